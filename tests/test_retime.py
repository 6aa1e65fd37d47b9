"""Timing a training on another network: what is recorded, what is refused, and folders."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import experiment, fitted, outcome, results_of, samples
from forks import Fork

import netgym
from exogym_core.results.fit_result import FitResult
from exogym_core.results.run_folder import RunFolder, is_own
from exogym_core.run.retiming import RecordedTraining
from exogym_core.strategy import AllReduceStrategy, DiLoCoStrategy, Strategy
from netgym.cli.main import main
from netgym.studies.report import StudyReport
from netgym.studies.study import Study
from netgym.studies.sweep import PointRun, SweepProgress, settle
from netsim import Topology
from netsim.errors import InputError
from netsim.topology.file import plain_form

LAN = {"topology": "lan", "compute": {"fixed": "2 ms", "jitter": 0.1}}
WAN = {"topology": "wan-4-regions", "compute": {"fixed": "3 ms", "jitter": 0.3}, "protocol": "ideal"}


def trained(strategy: Strategy | None = None, **options: Any) -> FitResult:
    given = {"num_nodes": 4, "max_steps": 6, "val_interval": 2, "progress": False}
    chosen = DiLoCoStrategy(H=2) if strategy is None else strategy
    return fitted(validation=samples(16, 1), strategy=chosen, **(given | options))


class ReadsClock(AllReduceStrategy):
    def step(self) -> None:
        super().step()
        self.comm.now()


class ReadsBytes(AllReduceStrategy):
    def step(self) -> None:
        super().step()
        self.skips = self.comm.traffic.bytes_sent > 10**9


class InFlight(AllReduceStrategy):
    """Has two averages in flight, in groups that are made for each step as well."""

    def step(self) -> None:
        pair = self.comm.group([self.rank // 2 * 2, self.rank // 2 * 2 + 1])
        handles = [
            comm.all_reduce(torch.ones(size), async_op=True)
            for comm in (self.comm, pair)
            for size in (3000, 5)
        ]
        for handle in handles:
            handle.wait()
            self.comm.advance(0.0001)
        super().step()


class Advances(AllReduceStrategy):
    def step(self) -> None:
        self.comm.advance(0.001 * (1 + self.rank))
        super().step()


@pytest.mark.parametrize(
    ("strategy", "options", "reason"),
    [
        (ReadsClock(), {}, "read the clock"),
        (ReadsBytes(), {}, "read the bytes"),
        (None, {"until": "1 s"}, "read the clock"),
        (None, {"val_seconds": "10 ms"}, "read the clock"),
        (DiLoCoStrategy(H=2, timeout_waiting_for_peers="1 s"), {}, "read the clock"),
    ],
    ids=["clock", "bytes", "until", "evaluations", "time-outs"],
)
def test_what_learns_times_or_bytes_is_trained_again(
    strategy: Strategy | None, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InputError, match=f"retime: this run has to be trained again: .*{reason}"):
        trained(strategy, **LAN, **options).retime(topology="wan-4-regions")


CODED = {"compute": {"fixed": "2 ms", "coding": "1 MB/s", "updates": "1 MB/s"}}


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (AllReduceStrategy(), {"workers": "stacked"}),
        (AllReduceStrategy(), {"compute": {"flops": {"device": "a100"}}}),
        (AllReduceStrategy(codec="int8"), CODED),
        (Advances(), {"minibatch_size": 2}),
        (InFlight(), {"workers": {"kind": "processes", "processes": 2}}),
        (InFlight(), {"compute": {"fixed": "2 ms", "shared_cores": 2}}),
    ],
    ids=lambda each: str(each) if isinstance(each, dict) else type(each).__name__,
)
def test_however_it_was_computed(strategy: Strategy, options: dict[str, Any]) -> None:
    network = {"topology": "wan-4-regions", "protocol": "ideal"}
    original = trained(strategy, **(LAN | options))
    assert outcome(original.retime(**network)) == outcome(trained(strategy, **(LAN | options | network)))


def test_a_resumed_training_is_timed_as_one_without_an_interruption(tmp_path: Path) -> None:
    options = {**LAN, "checkpoint_interval": 2, "save_dir": tmp_path}
    first = trained(**(options | {"max_steps": 4}))
    resumed = trained(**options, resume_from=first.checkpoint_folder)
    assert resumed.resumed_step == 4
    assert outcome(resumed.retime(**WAN)) == outcome(trained(**WAN))


def test_a_recording_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exogym_core.workers.streams._MOST_BYTES", 1000)
    with pytest.raises(InputError, match="take too much memory"):
        trained(**LAN).retime(**WAN)


# --- folders ------------------------------------------------------------------------------------------------


def command(*words: object) -> int:
    return main(list(map(str, words)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison of strategies that can be retimed, and one that cannot."""
    text = experiment(
        topology="lan",
        compute="{fixed: 2 ms, jitter: 0.1}",
        strategies="[AllReduce, {name: DiLoCo, H: 2}, {name: AsyncDiLoCo, H: 2}]",
        seeds=2,
        checkpoint="{every: 2}",
        target_loss=2.2,
    )
    tmp_path = tmp_path_factory.mktemp("retime")
    (tmp_path / "small.yaml").write_text(text, encoding="utf-8")
    assert command("compare", tmp_path / "small.yaml", "--out", tmp_path / "run", "--jobs", 1) == 0
    return tmp_path / "run"


def test_a_run_folder_is_timed_on_another_network(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, network = run.parent, ("--topology", "wan-4-regions", "--set", "compute.jitter=0.3")
    assert command("retime", run, *network, "--out", folder / "timed", "--jobs", 1) == 0
    there = command("compare", run / "experiment.yaml", *network, "--out", folder / "there", "--jobs", 1)
    assert there == 0
    assert results_of(folder / "timed") == results_of(folder / "there")
    facts = json.loads((folder / "timed/environment.json").read_text(encoding="utf-8"))
    assert facts["retimed"] == {
        f"{name}.seed-{seed}": "../run" for name in ("AllReduce", "DiLoCo") for seed in (0, 1)
    }
    log = (folder / "timed/log.txt").read_text(encoding="utf-8")
    assert "DiLoCo seed 1 is retimed: it was trained in ../run" in log
    assert "AsyncDiLoCo seed 0 is trained: this run has to be trained again: its ranks read the clock" in log
    line = (
        "retimed: 4 runs, trained in ../run; trained again: 2 runs of AsyncDiLoCo (its ranks read the clock, "
    )
    assert line in " ".join(capsys.readouterr().out.split())
    assert line in (folder / "timed/report.html").read_text(encoding="utf-8")


def test_another_network_has_its_own_protocol(run: Path, tmp_path: Path) -> None:
    """The stored experiment names the protocol of the network that it ran on."""
    network = {**plain_form(Topology.load("wan-4-regions")), "protocol": "gloo"}
    (tmp_path / "there.yaml").write_text(json.dumps(network), encoding="utf-8")
    words = ("--topology", tmp_path / "there.yaml", "--set", "protocol.streams=2", "--jobs", 1)
    assert command("retime", run, *words, "--out", tmp_path / "timed") == 0
    assert command("compare", run.parent / "small.yaml", *words, "--out", tmp_path / "there") == 0
    rows = [(tmp_path / name / "metrics/DiLoCo.seed-0.csv").read_bytes() for name in ("timed", "there")]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    "change",
    [
        *("steps=5", "strategies.DiLoCo.H=3", "seeds=1", "workers.count=3"),
        *("workers.kind=stacked", "workers.intra_op_threads=2"),  # which change the last bits of losses
    ],
)
def test_other_trainings_are_refused(run: Path, change: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("retime", run, "--set", change) == 2
    line = capsys.readouterr().err
    assert f"retime: {change.partition('.')[0].partition('=')[0]} is another than in" in line
    assert "use: netgym compare" in line


def test_what_is_no_other_timing_of_a_run_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep was trained again, and a run copied."""
    study = shutil.copytree(run, tmp_path / "sweep/points/0000").parents[1]
    shutil.copy(run / "experiment.yaml", study)
    shutil.copy(run / "environment.json", study)
    shutil.copytree(run, tmp_path / "tuned/search").with_name("experiment.yaml").write_text("name: tuned\n")
    there = "--topology", "wan-4-regions"
    for words, line in (
        ((run, "--topology", "lan"), "is timed as asked: give another network, such as --topology"),
        ((run,), "is timed as asked"),
        ((study, *there), f"is a sweep: retime one of its points, such as {study}/points/0000; or add the"),
        ((tmp_path / "tuned", "--trust", *there), f"use: netgym retime {tmp_path}/tuned/comparison"),
        ((tmp_path, *there), "is no run folder: it has no experiment.yaml"),  # it was told to remove it
        ((run, "--set", "topology.links.0.rtt=1 s"), "the topology has no 'links': it has name, "),
    ):
        assert command("retime", *words) == 2
        assert line in capsys.readouterr().err
    far = ("--set", "topology.wan.0.rtt=1 s", *there, "--out", tmp_path / "far", "--jobs", 1)
    assert command("retime", run, *far) == 0
    changes: dict[str, Any] = {
        "topology": "wan-4-regions",
        "overrides": {"topology.wan.0.rtt": "1 s"},
        "progress": False,
    }
    again = netgym.load(run).retime(**changes, out=tmp_path / "python", jobs=1)
    assert RunFolder(again.folder).digest() == RunFolder(tmp_path / "far").digest()
    with pytest.raises(InputError, match="is timed as asked"):
        netgym.retime(run, topology="lan")
    assert command("retime", tmp_path / "far", "--set", "topology.links.0.rtt=1 s") == 2
    line = "the topology has no 'links': its links are wan.0 (us-east - us-west), "
    assert line in " ".join(capsys.readouterr().err.split())
    farther = ("--set", "topology.wan.0.rtt=2 s", "--out", tmp_path / "farther", "--jobs", 1)
    assert command("retime", tmp_path / "far", *farther) == 0, "its links have the keys of the file"
    network = "network wan-4-regions with wan.0.rtt 2 s; protocol"
    assert network in " ".join(capsys.readouterr().out.split())


def test_a_stopped_retiming_goes_on_by_retiming(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hint began another folder on the old network, and what was resumed was trained."""
    network, retime = ("--topology", "wan-4-regions", "--jobs", 1), RecordedTraining.of_run
    assert command("retime", run, *network, "--out", tmp_path / "whole") == 0
    of_run: list[str] = []

    def stopped(folder: Path, name: str) -> Any:
        of_run.append(name)
        if len(of_run) == 2:
            raise KeyboardInterrupt
        return retime(folder, name)

    monkeypatch.setattr(RecordedTraining, "of_run", stopped)
    assert command("retime", run, *network, "--out", tmp_path / "cut") == 130
    printed = capsys.readouterr()
    assert f"to continue: netgym compare --resume {tmp_path}/cut" in printed.err
    assert "retimed: 1 run, trained in" in " ".join(printed.out.split())
    assert command("compare", "--resume", tmp_path / "cut", "--jobs", 1) == 0
    assert results_of(tmp_path / "cut") == results_of(tmp_path / "whole")
    facts = [RunFolder(tmp_path / name).read_retimed() for name in ("cut", "whole")]
    assert facts[0] == facts[1] != {}


def test_a_damaged_recording_is_trained_again(run: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(run, tmp_path / "run")
    (damaged / "streams/DiLoCo.seed-0.gz").write_bytes(gzip.compress(b"[]"))
    timed = tmp_path / "timed"
    assert command("retime", damaged, "--topology", "wan-4-regions", "--out", timed, "--jobs", 1) == 0
    assert "DiLoCo seed 0 is trained: " in (timed / "log.txt").read_text(encoding="utf-8")


# --- sweeps -------------------------------------------------------------------------------------------------


def swept(folder: Path, jobs: int, **axes: Any) -> Path:
    """A sweep of a small experiment, with two strategies of which one cannot be retimed."""
    text = experiment(
        topology="lan",
        compute="{fixed: 2 ms, jitter: 0.1}",
        strategies="[AllReduce, {name: DiLoCo, H: 2}, {name: AsyncDiLoCo, H: 2}]",
        checkpoint="{every: 2}",
        sweep=json.dumps(axes),
    )
    (folder / "small.yaml").write_text(text, encoding="utf-8")
    assert command("sweep", folder / "small.yaml", "--out", folder / "sweep", "--jobs", jobs) == 0
    return folder / "sweep"


BOTH = ["AllReduce", "DiLoCo"]


@pytest.mark.parametrize(
    ("jobs", "jitter", "expected"),
    [
        (1, [0.1], [[], ["AllReduce"], BOTH, BOTH]),
        pytest.param(
            *(2, [0.1, 0], [[], BOTH, ["AllReduce"], BOTH, BOTH, BOTH, BOTH, BOTH]),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["1", "2"],
)
def test_a_sweep_trains_each_distinct_training_once(
    tmp_path: Path, jobs: int, jitter: list[float], expected: list[list[str]], capsys: Any
) -> None:
    axes: dict[str, Any] = {"topology": ["lan", "wan-4-regions"], "strategies.DiLoCo.H": [2, 1]}
    study = swept(tmp_path, jobs, **axes, **{"compute.jitter": jitter})
    entries = json.loads((study / "summary.json").read_text(encoding="utf-8"))
    assert [entry.get("retimed", []) for entry in entries] == expected
    # Every point has AsyncDiLoCo, and the first one's is the first.
    num_runs, num_retimed, num_again = 3 * len(expected), sum(map(len, expected)), len(expected) - 1
    why = f"trained again: {num_again} runs of AsyncDiLoCo (its server takes what comes first)"
    first = f"trained: {num_runs - num_retimed - num_again} runs on lan; retimed: {num_retimed} runs; {why}"
    assert first in " ".join(capsys.readouterr().out.split())
    assert first in StudyReport([study]).html()
    assert "AsyncDiLoCo is trained again: its server" in (study / "points/0001/log.txt").read_text()
    for entry in entries[-1:]:
        point = study / "points" / entry["name"]
        there = tmp_path / entry["name"]
        assert command("compare", point / "experiment.yaml", "--out", there, "--jobs", 1) == 0
        assert results_of(point) == results_of(there)


def test_networks_and_seeds_are_added_to_a_finished_sweep(tmp_path: Path, capsys: Any) -> None:
    """A network before the first, or in its place, and a seed, had all points trained again."""

    def text(networks: list[str], num_seeds: int) -> str:
        sweep = json.dumps({"topology": networks, "seeds": num_seeds})
        return experiment(topology="lan", compute="2 ms", strategies=f"[{', '.join(BOTH)}]", sweep=sweep)

    def begin(name: str, *given: Any) -> Path:
        (tmp_path / f"{name}.yaml").write_text(text(*given), encoding="utf-8")
        assert command("sweep", tmp_path / f"{name}.yaml", "--out", tmp_path / name, "--jobs", 1) == 0
        return tmp_path / name

    def resumed(*options: Any, name: str = "sweep") -> str:
        capsys.readouterr()
        assert command("sweep", "--resume", tmp_path / name, "--jobs", 1, *options) == 0
        return " ".join(capsys.readouterr().err.split())

    def retimed() -> list[list[str]]:
        entries = json.loads((study / "summary.json").read_text(encoding="utf-8"))
        return [
            sorted({name.partition(".seed")[0] for name in entry.get("retimed", [])}) for entry in entries
        ]

    study = begin("sweep", ["lan", "wan-4-regions"], 2)
    edited = study / "experiment.yaml"
    edited.write_text(edited.read_text().replace("  topology:\n", "  topology:\n  - home-tiers\n"))
    said = resumed("--trust")
    assert "kept under another number: point 1 (now 2), 2 (now 3)" in said
    assert "run again" not in said
    assert retimed() == [BOTH, [], BOTH]
    assert RunFolder(study / "points/0002").read_retimed()["DiLoCo.seed-0"] == "../0001"
    edited.write_text(edited.read_text().replace("  - lan\n", "  - two-datacenters\n"))
    assert "run again, as the experiment was changed since: point 2 (another topology)" in resumed("--trust")
    assert retimed() == [BOTH, BOTH, BOTH]
    assert RunFolder(study / "points/0002").read_retimed()["DiLoCo.seed-0"] == "a point that was removed"
    kept = {each: each.stat().st_mtime_ns for each in study.rglob("metrics/*.seed-[01].csv")}
    said = resumed("--seeds", 3)
    assert "continued with the seeds that were added: point 1, 2, 3" in said
    assert re.search(r"3 points: about .* for 6 runs, 4 of them by retiming", said)
    assert {each: each.stat().st_mtime_ns for each in kept} == kept
    assert "run again" not in resumed(), "sealed"
    new = begin("new", ["home-tiers", "two-datacenters", "wan-4-regions"], 3)
    for number in range(3):
        assert results_of(study / f"points/000{number}") == results_of(new / f"points/000{number}")
    assert command("sweep", "--resume", study, "--seeds", 2) == 2
    assert "has 3 seeds (0, 1, 2), and seeds can only be added: " in capsys.readouterr().err
    assert command("sweep", tmp_path / "new.yaml", "--resume", study) == 2
    assert "--resume takes no EXPERIMENT" in capsys.readouterr().err
    assert command("sweep", "--resume", study, "--vary", "steps=[1, 2]") == 2
    assert "leave out --vary; to change what it runs, edit its experiment.yaml" in capsys.readouterr().err


def test_a_sweep_of_one_seed_gets_another(tmp_path: Path, capsys: Any) -> None:
    """All was trained again, as files of a single seed have other names."""
    study = swept(tmp_path, 1, topology=["lan", "wan-4-regions"])
    capsys.readouterr()
    assert command("sweep", "--resume", study, "--seeds", 2, "--jobs", 1) == 0
    assert re.search(r"2 points: about .* for 6 runs, 2 of them by retiming", capsys.readouterr().err)
    (tmp_path / "new").mkdir()
    new = swept(tmp_path / "new", 1, topology=["lan", "wan-4-regions"], seeds=2)
    for number in range(2):
        points = [folder / f"points/000{number}" for folder in (study, new)]
        assert results_of(points[0]) == results_of(points[1])
        assert RunFolder(points[0]).read_retimed() == RunFolder(points[1]).read_retimed()


def test_runs_of_which_an_earlier_version_judged_another_model_are_trained_again(
    tmp_path: Path, capsys: Any
) -> None:
    text = experiment(strategies="[AllReduce, {name: FedAvg, H: 2, island_size: 2}]", sweep="{steps: [2, 4]}")
    (tmp_path / "small.yaml").write_text(text, encoding="utf-8")
    study = tmp_path / "sweep"
    assert command("sweep", tmp_path / "small.yaml", "--out", study, "--jobs", 1) == 0
    before, time = results_of(study / "points/0000"), (study / "points/0000/metrics/AllReduce.csv").stat()
    for path in (study / "summary.json", study / "points/0000/summary.json"):
        path.write_text(path.read_text().replace('"judged": "own"', '"judged": "outer"'))
    shutil.rmtree(study / "points/0001")
    capsys.readouterr()
    assert command("sweep", "--resume", study, "--jobs", 1) == 0
    assert "trained again, as an earlier version judged another model: point 1\n" in capsys.readouterr().err
    log = (study / "points/0000/log.txt").read_text(encoding="utf-8")
    assert "FedAvg is trained again: an earlier version judged another model" in log
    assert results_of(study / "points/0000") == before
    assert (study / "points/0000/metrics/AllReduce.csv").stat() == time


@pytest.fixture(scope="module")
def networks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep over two networks; the first point trains, the other retimes it."""
    folder = tmp_path_factory.mktemp("networks")
    sweep = json.dumps({"topology": ["lan", "wan-4-regions"]})
    text = experiment(topology="lan", compute="2 ms", strategies="[AllReduce]", steps=2, sweep=sweep)
    (folder / "small.yaml").write_text(text, encoding="utf-8")
    assert command("sweep", folder / "small.yaml", "--out", folder / "sweep", "--jobs", 1) == 0
    return folder / "sweep"


def kill_before(number: int, call: Callable[..., object], *given: object) -> None:
    """End this process in a call, as a kill does, before it makes, renames or removes something once more."""
    left = iter(range(number))

    def count(event: str, _: Any) -> None:
        if event in ("os.rename", "os.mkdir", "os.rmdir") and next(left, None) is None:
            os._exit(9)

    sys.addaudithook(count)
    call(*given)


SWAP = "  - lan\n  - wan-4-regions\n", "  - wan-4-regions\n  - lan\n"
STEPS = "steps: 2", "steps: 3"


@pytest.mark.parametrize(
    ("edit", "edit_after", "num_seeds"),
    [
        pytest.param(SWAP, SWAP, None, id="swap"),
        pytest.param(SWAP, ("", ""), None, id="undone", marks=pytest.mark.thorough),
        pytest.param(("  - lan\n", ""), ("  - lan\n", ""), None, id="removal"),
        pytest.param(STEPS, STEPS, None, id="other", marks=pytest.mark.thorough),
        pytest.param(None, None, 3, id="seeds", marks=pytest.mark.thorough),
    ],
)
def test_a_kill_while_a_sweep_is_changed_loses_no_result(
    networks: Path, tmp_path: Path, edit: Any, edit_after: Any, num_seeds: int | None
) -> None:
    """Wherever it comes, the folder that the next attempt leaves is that of one without a kill."""

    def attempt(folder: Path, edit: Any) -> None:
        if edit is not None:
            text = (networks / "experiment.yaml").read_text(encoding="utf-8")
            (folder / "experiment.yaml").write_text(text.replace(*edit), encoding="utf-8")
        study = Study.open(folder, trust=True)
        study = study.with_seeds(num_seeds) if num_seeds else study
        if study.is_changed:
            settle(study, 0, study.sweep.grid(), lambda _: None)
        progress = SweepProgress(lambda *_: None, study.sweep.num_points)
        for number, point in enumerate(study.sweep.grid()):
            if study.finished(number) is None:
                each = PointRun(study, number, point, progress)
                begun, _ = each.begin()
                each.experiment(begun)
                begun.release()

    def contents(number: int) -> dict[str, bytes]:
        """Files after an attempt that was killed, and another."""
        folder = tmp_path / str(number)
        shutil.copytree(networks, folder)
        if number:
            killed = Fork(kill_before, number - 1, attempt, folder, edit).end()
            ends.append((killed.returncode, is_own(folder)))
        attempt(folder, edit_after)
        files = (path for path in folder.rglob("*") if path.is_file() and ".writing-" not in path.name)
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    ends = [(9, True)]
    whole = contents(0)
    while ends[-1][0] == 9:
        assert contents(len(ends)) == whole, len(ends)
    assert ends.pop() == (0, True)
    # Without an edit, --trust is needed only after a kill between the writing of the experiment and of its seal.
    assert edit or ends.count((9, False)) == 1


def test_data_are_read_once_a_training_however_many_networks_it_is_timed_on(tmp_path: Path) -> None:
    (tmp_path / "counted.py").write_text(
        "from pathlib import Path\nfrom netgym.tasks import build_task\n\n\ndef digits(log):\n"
        "    with Path(log).open('a') as file:\n        file.write('read\\n')\n    return build_task('digits')\n"
    )
    times = []
    for networks in (["lan", "wan-4-regions"], ["lan", "wan-4-regions", "home-tiers"]):
        log = tmp_path / f"{len(networks)}.txt"
        task, sweep = json.dumps({"name": "counted:digits", "log": str(log)}), {"topology": networks}
        text = experiment(task=task, compute="2 ms", strategies="[AllReduce]", sweep=json.dumps(sweep))
        (tmp_path / "small.yaml").write_text(text, encoding="utf-8")
        out = tmp_path / f"{len(networks)}"
        assert command("sweep", tmp_path / "small.yaml", "--out", out, "--jobs", 2) == 0
        times.append(len(log.read_text().splitlines()))
    assert times[0] == times[1]


@pytest.mark.thorough
def test_a_stopped_sweep_retimes_what_was_trained_before(tmp_path: Path) -> None:
    study = swept(tmp_path, 1, topology=["lan", "wan-4-regions"])
    before = results_of(study / "points/0001")
    entries = json.loads((study / "summary.json").read_text(encoding="utf-8"))
    shutil.rmtree(study / "points/0001")
    (study / "summary.json").write_text(json.dumps(entries[:1]), encoding="utf-8")
    assert command("sweep", "--resume", study, "--jobs", 1) == 0
    assert results_of(study / "points/0001") == before
    assert "AllReduce is retimed: it was trained in ../0000" in (study / "points/0001/log.txt").read_text()
