"""Random experiments, their runs on several carriers, stopped and resumed.

An experiment is the mapping of an experiment file. It runs as a user's does, by `netgym compare`, in a process with a
session and a temporary folder of its own: in threads, and on a carrier that must give the same files, byte for byte.
"""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2  # noqa: F401  # as below: imported once here, and not in each of the processes
import matplotlib.figure  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import yaml
from experiments import results_of
from forks import Fork, left_of

from exogym_core.config import yaml_text
from exogym_core.results.report import page
from netgym.cli.main import main
from netgym.experiment import comparison

Mapped = dict[str, Any]

OWN = '''\
"""A model with random draws and buffers, which show steps too many and too few."""

import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 10)
        )

    def logits(self, inputs):
        return self.layers(inputs.flatten(1))

    def forward(self, batch):
        return torch.nn.functional.cross_entropy(self.logits(batch[0]), batch[1])
'''
CPU_SECONDS = 120
# Ends of experiments that are in order: who is needed is cut off for ever; an average is given too little time.
EXPECTED = ("never comes back", "never come back", "though all members answer")


# --- drawing -------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """An experiment, and the other way in which it runs.

    Attributes:
        experiment: the file's mapping.
        carrier: changes of `workers`.
        jobs: runs at once.
        stops: number of a strategy, a step after which it is stopped, and by which signal; one after the other.
    """

    experiment: Mapped
    carrier: Mapped
    jobs: int
    stops: list[list[int]]

    def text(self) -> str:
        """The experiment as YAML, and how it runs."""
        way = f"# workers: {self.carrier}, --jobs {self.jobs}, stopped: {self.stops}\n"
        return way + yaml_text(self.experiment)


class Draw(random.Random):
    """Draws from the rules of experiments.yaml."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        rules = yaml.safe_load(Path(__file__).with_name("experiments.yaml").read_text(encoding="utf-8"))
        size = self.choice([1, 1, 1, 2, 2, 3])  # ranks of a site
        count = size * self.choice([2, 3]) if size > 1 else self.randint(2, 5)
        if self.random() < 0.3:
            hosts, links = (
                [f"{name}.{number}" for name in ("us", "eu") for number in range(3)],
                [["us.0", "us"]],
            )
            region = {"hosts": 3, "nic": "1 Mbit/s", "latency": "1 ms"}
            network: Mapped = {"regions": dict.fromkeys(("us", "eu"), region)}
            wan = links[:0] = [["us", "eu"]]
        else:
            hosts = [f"h{number}" for number in range(count)]
            wan = links = [[host, "switch"] for host in hosts]
            network = {"hosts": hosts, "routers": ["switch"]}
        lines = [{"between": link, "bandwidth": "$rate", "latency": "$delay"} for link in wan]
        late = self.sample(range(count), self.choice([1, 1, count - 1]))
        self.rules: Mapped = rules | {
            **{"count": count, "size": size, "first": hosts[0], "last": hosts[-1], "host": ["any", *hosts]},
            **{"link": ["any", *links], "network": {**network, "wan" if len(wan) == 1 else "links": lines}},
            **{"join_at": dict.fromkeys(late, "1..2000 ms"), "placement": [["any", *hosts]] * count},
        }

    def of(self, rule: Any) -> Any:
        """A value of a rule."""
        if isinstance(rule, dict):
            drawn: Mapped = {}
            for key, inner in rule.items():
                name, _, chance = key.partition(" (") if isinstance(key, str) else (key, "", "")
                if chance and self.random() * 100 >= int(chance[:-1]):
                    continue
                value = self.of(inner)
                for part in (
                    (value if isinstance(value, list) else [value]) if name == "also" else [{name: value}]
                ):
                    drawn |= part
            return drawn
        if isinstance(rule, list):
            return (
                self.of(self.choice(rule[1:])) if rule[:1] == ["any"] else [self.of(inner) for inner in rule]
            )
        if isinstance(rule, str) and rule.startswith("$"):
            return self.of(self.rules[rule[1:]])
        if isinstance(rule, str) and (found := re.fullmatch(r"(\d+)\.\.(\d+)( .*)?", rule)):
            number = self.randint(int(found[1]), int(found[2]))
            return f"{number}{found[3]}" if found[3] else number
        return rule


def drawn(seed: int) -> Case:
    """The case of this number."""
    draw = Draw(seed)
    experiment = draw.of("$experiment")
    for number, entry in enumerate(experiment["strategies"]):
        entry["label"] = f"s{number}"
    carrier, jobs, stops = map(draw.of, ("$carrier", "$jobs", "$stops"))
    num_labels, steps = len(experiment["strategies"]), experiment["steps"]
    return Case(
        experiment, carrier, jobs, [[place % num_labels, 1 + at % steps, how] for place, at, how in stops]
    )


# --- running -------------------------------------------------------------------------------------------------


def _stopping(folder: Path, stops: list[list[int]]) -> Callable[..., Any]:
    """Loggers that press Ctrl-C, or kill the command and its processes, when a run has done a step, each once."""
    command = os.getpid()

    class Presser:
        def __init__(self, of: str) -> None:
            self.of = of

        def __enter__(self) -> list[Presser]:
            return [self]

        def __exit__(self, *exception: object) -> None:
            pass

        def event(self, row: Mapping[str, Any]) -> None:
            for number, (place, step, which) in enumerate(stops):
                mark = folder / f"stopped-{number}"
                if (
                    row["kind"] == "step"
                    and row["step"] >= step
                    and self.of.startswith(f"s{place}")
                    and not mark.exists()
                ):
                    mark.touch()
                    if which == signal.SIGKILL:
                        os.killpg(command, signal.SIGKILL)
                    os.kill(command, which)
                    signal.pause()

    return lambda experiment, folder, of: Presser(of)


def _netgym(folder: Path, stops: list[list[int]], *arguments: str) -> int:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    torch.set_num_threads(1)
    page.draw_pictures = lambda *_: {}
    if stops:
        comparison.open_loggers = _stopping(folder, stops)
    return main(list(arguments))


class Ended(NamedTuple):
    """End of a run: exit code, errors, and the files that equal runs have equal."""

    code: int
    errors: str
    files: dict[str, bytes]

    @property
    def complaint(self) -> str:
        """The line with which it failed, if it did."""
        lines = [line for line in self.errors.splitlines() if "rror: " in line or " failed: " in line]
        return "" if self.code == 0 else (lines or self.errors.splitlines() or [""])[-1]


def run(case: Case, folder: Path, *changes: str, jobs: int = 1, stops: Any = ()) -> Ended:
    """Run the case by the command line, and resume it until all its stops have happened."""
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    (folder / "drawn.yaml").write_text(yaml_text(case.experiment))
    scratch = folder / "tmp"
    scratch.mkdir()
    arguments = ["compare", "drawn.yaml", "--out", "out", *changes, "--jobs", str(jobs)]
    for number in range(len(stops) + 1):
        environment = {"TMPDIR": str(scratch), "HOME": str(folder)}
        fork = Fork(
            _netgym, folder, stops[number : number + 1], *arguments, folder=folder, environment=environment
        )
        done = fork.end(300)
        deadline = time.monotonic() + 5
        while (left := left_of(fork.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        if left or list(scratch.iterdir()):
            return Ended(99, f"error: left behind: processes {left}, files {list(scratch.iterdir())}", {})
        if not (folder / "stopped-0").exists():
            break
        (folder / "stopped-0").unlink()
        arguments = ["compare", "--resume", "out", "--jobs", str(jobs)]
    out = folder / "out"
    links = {f"links/{path.name}": path.read_bytes() for path in out.glob("links/*")}
    return Ended(done.returncode, done.stderr, {**results_of(out), **links} if out.is_dir() else {})


def differences(case: Case) -> str:
    """First difference of the case's runs, or part of the experiment that was not simulated, in a line; "" for none."""
    with tempfile.TemporaryDirectory() as name:
        plain = run(case, Path(name, "plain"))
        if not 0 <= plain.code <= 2 or "Traceback" in plain.errors:
            return f"ended with {plain.code}: {plain.complaint or plain.errors[-300:]}"
        if plain.code and not any(phrase in plain.errors for phrase in EXPECTED):
            return f"error: {plain.complaint}"
        if plain.code == 0 and (missing := absent(case.experiment, plain)):
            return missing
        change = yaml_text({**case.experiment["workers"], **case.carrier}).strip().replace("\n", ", ")
        other = run(
            case, Path(name, "other"), "--set", f"workers={{{change}}}", jobs=case.jobs, stops=case.stops
        )
        return apart(plain, other, is_stacked=case.carrier["kind"] == "stacked")


def apart(plain: Ended, other: Ended, is_stacked: bool) -> str:
    """First difference of two runs; where one has stacked replicas, losses and parameters may round otherwise."""
    if (plain.code, plain.complaint) != (other.code, other.complaint):
        return f"ends: {plain.code} {plain.complaint!r}, then {other.code} {other.complaint!r}"
    if plain.code and "strategies failed" not in plain.complaint:
        return ""  # the only strategy failed: its last rows, and runs of other seeds, hang on host time
    failed = {entry["name"] for entry in json.loads(plain.files["summary.json"]) if entry.get("failed")}
    for path in sorted({*plain.files, *other.files}):
        one, two = plain.files.get(path), other.files.get(path)
        if one is None or two is None:
            return f"{path}: only in the {'other' if one is None else 'plain'} run"
        hangs_on_loss = is_stacked and path.startswith("models")
        if hangs_on_loss or (path == "summary.json" and (is_stacked or failed)):
            continue
        if Path(path).name.partition(".")[0] in failed:
            continue
        if is_stacked and path.startswith("metrics"):
            one, two = timed(one), timed(two)
        if one != two:
            lines = zip(one.splitlines(), two.splitlines(), strict=False)
            pair = next(((a, b) for a, b in lines if a != b), (len(one), len(two)))
            return f"{path}: {pair[0]!r}, then {pair[1]!r}"[:700]
    return ""


def timed(table: bytes) -> bytes:
    """Columns of a table that depend on no loss."""
    rows = list(csv.reader(table.decode().splitlines()))
    places = [
        place
        for place, name in enumerate(rows[0])
        if not ("loss" in name or "perp" in name or name in ("accuracy", "correlation"))
    ]
    return "\n".join(",".join(row[place] for place in places) for row in rows).encode()


def absent(experiment: Mapped, ended: Ended) -> str:
    """Part of the experiment that was not simulated in a run, though it ended well."""
    strategies = {each["label"]: each for each in experiment["strategies"]}
    for entry in json.loads(ended.files["summary.json"]):
        label = entry["name"]
        parts = [entry[f"{part}_seconds"] for part in ("computing", "network", "waiting")]
        if abs(sum(parts) - entry["virtual_seconds"]) > 1e-6 * entry["virtual_seconds"]:
            return f"{label}: seconds: {parts} do not sum to {entry['virtual_seconds']}"
        if not entry["bytes_sent"] and "sent nothing" not in ended.errors:
            return f"{label}: bytes: none were sent, and nothing says so"
        if "until" not in experiment and entry["steps"] != experiment["steps"]:
            return f"{label}: steps: {entry['steps']}"
        if "seeds" in experiment:
            continue
        rows = list(csv.DictReader(ended.files[f"metrics/{label}.csv"].decode().splitlines()))
        if wrong := _wrong_rows(experiment, strategies[label], entry, rows):
            return f"{label}: {wrong}"
    return ""


def _wrong_rows(experiment: Mapped, strategy: Mapped, entry: Mapped, rows: list[dict[str, str]]) -> str:
    """First error in the rows of a run, or in its object of the summary."""
    end, times = entry["virtual_seconds"], [float(row["virtual_seconds"]) for row in rows]
    is_ordered = times == sorted(times) or "until" in experiment  # then slow ranks may do fewer steps
    if not is_ordered or [int(row["step"]) for row in rows] != list(range(1, len(rows) + 1)):
        return "rows: not in order"
    events = experiment["topology"].get("events", [])
    if (end < max((seconds(event["at"]) for event in events), default=0.0)) != ("later_weather" in entry):
        return f"weather: ends at {end}, later_weather is {entry.get('later_weather')}"
    if "dropped_peers" in entry:
        rounds = strategy.get("modules", [strategy])[0]
        first_round = times[rounds["H"] - 1] if len(times) >= rounds["H"] else math.inf
        late = {rank for rank, at in rounds.get("join_at", {}).items() if seconds(at) > first_round}
        away = {row["rank"] for row in entry["dropped_peers"]}
        return "" if late <= away else f"absences: of {late} only {away} were away"
    computed = len(rows) * seconds(experiment["compute"]["fixed"])
    is_plain = len(experiment["compute"]) == 1 and not {"until", "failures"} & {*experiment}
    if is_plain and abs(entry["computing_seconds"] - computed) > 1e-6 * computed:
        return f"computing: {entry['computing_seconds']} s, not {computed}"
    return ""


def seconds(text: str) -> float:
    """Seconds of a time as it is drawn."""
    return float(text.removesuffix(" ms")) / 1000
