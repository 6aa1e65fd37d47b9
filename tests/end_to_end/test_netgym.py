"""`netgym` as users run it, on an experiment of six steps."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from experiments import experiment, results_of
from forks import Fork
from safetensors.torch import load_file

from netgym.cli.main import main

SMALL = experiment(
    model="{name: mlp, hidden: [8]}",
    workers="{count: 4, kind: threads}",
    topology="two-datacenters",
    collectives="ring",  # chosen ones take longer than all else
    compute="50 ms",
    steps=6,
    batch_size=4,
    target_loss=2.4,
    strategies="[AllReduce, {name: DiLoCo, H: 3}, {name: SPARTA+DiLoCo, H: 3, p_sparta: 0.5}]",
)

STORMY = """\
regions:
  us: {hosts: 2, nic: 1 Gbit/s, latency: 50 us}
  eu: {hosts: 2, nic: 1 Gbit/s, latency: 50 us}
wan:
  - {between: [us, eu], bandwidth: 100 Mbit/s, rtt: 80 ms}
events:
  - {at: 100 ms, link: [us, eu], down: true, for: 200 ms}
traces:
  - {link: [us.0, us], bandwidth: trace.csv}
background:
  - {from: eu.0, to: us.1, bytes: 200 kB, every: 700 ms}
drift:
  - {link: [eu.0, eu], kind: lognormal, every: 1 s, sigma: 0.3}
"""

SUMMARY_KEYS = [
    "name",
    "final_loss",
    "accuracy",
    "virtual_seconds",
    "virtual_seconds_to_target",
    "compute_utilisation",
    "bytes_sent_per_worker",
    "wan_bytes",
]


class Netgym:
    """Runs commands in this process, in a folder of their own."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capture = folder, capture
        self.experiment = folder / "small.yaml"
        self.experiment.write_text(SMALL)

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """The exit code, what went to stdout and what went to stderr."""
        self._capture.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = self._capture.readouterr()
        return code, captured.out, captured.err

    def run(self, *arguments: object) -> Path:
        """Run a command that must succeed; returns the folder that it names last."""
        code, out, err = self(*arguments)
        assert code == 0, err
        return self.folder / out.splitlines()[-1]


@pytest.fixture
def netgym(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Netgym:
    monkeypatch.chdir(tmp_path)
    return Netgym(tmp_path, capsys)


class TestCompare:
    @pytest.mark.pictures
    def test_the_run_folder_holds_what_the_design_says(self, netgym: Netgym) -> None:
        """And what is missing of the page is drawn again to the same bytes."""
        code, out, err = netgym("compare", netgym.experiment)
        assert code == 0, err
        folder = netgym.folder / "runs" / "small-1"
        assert out.splitlines()[-1] == str(Path("runs/small-1"))
        files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        labels = ("AllReduce", "DiLoCo", "SPARTA+DiLoCo")
        assert files == {
            *("experiment.yaml", "environment.json", "summary.json", "report.html", "log.txt"),
            *(f"links/{label}.csv" for label in labels),
            *(f"streams/{label}.gz" for label in labels),
            *(f"metrics/{label}.csv" for label in labels),
            *(f"metrics/{label}.validation.csv" for label in labels),
            *(f"models/{label}.safetensors" for label in labels),
            *(f"plots/{name}.png" for name in ("loss_against_bytes", "loss_against_time")),
            *(f"plots/{name}.png" for name in ("use_of_the_network", "where_the_time_went")),
        }
        os.umask(umask := os.umask(0))
        for path in folder.rglob("[!.]*"):
            rights = (0o777 if path.is_dir() else 0o666) & ~umask
            assert path.stat().st_mode & 0o777 == rights, f"{path}: a page is there to be shown"
        assert "touched loss 2.4 after" in out
        assert "DiLoCo (2 of 3): 6 steps" in err
        self.check_metrics(folder)

        page, before = (folder / "report.html").read_text(), results_of(folder)
        assert "outages, crashes, traces" not in page
        (folder / "report.html").unlink()
        (folder / "plots" / "loss_against_time.png").unlink()
        assert netgym.run("report", folder) == folder
        assert (folder / "report.html").read_text() == page
        assert results_of(folder) == before

    @staticmethod
    def check_metrics(folder: Path) -> None:
        summary = json.loads((folder / "summary.json").read_text())
        assert [list(entry)[: len(SUMMARY_KEYS)] for entry in summary] == [SUMMARY_KEYS] * 3
        assert [entry["name"] for entry in summary] == ["AllReduce", "DiLoCo", "SPARTA+DiLoCo"]
        for entry in summary:
            assert 0 < entry["compute_utilisation"] < 1
            with (folder / "metrics" / f"{entry['name']}.csv").open() as file:
                rows = list(csv.DictReader(file))
            assert [row["step"] for row in rows] == list("123456")
            assert list(rows[0])[:7] == [
                *("step", "examples_trained", "train_loss", "train_perplexity", "lr"),
                *("virtual_seconds", "bytes_sent"),
            ]
            assert int(rows[-1]["bytes_sent"]) == entry["bytes_sent"] == entry["bytes_sent_per_worker"] * 4
            with (folder / "metrics" / f"{entry['name']}.validation.csv").open() as file:
                validation = list(csv.DictReader(file))
            assert [row["step"] for row in validation] == list("0246")
            assert float(validation[-1]["global_loss"]) == entry["final_loss"]
            state = load_file(folder / "models" / f"{entry['name']}.safetensors")
            assert sum(tensor.numel() for tensor in state.values()) == 64 * 8 + 8 + 8 * 10 + 10

    def test_a_stored_experiment_needs_no_other_file(self, netgym: Netgym) -> None:
        network, trace = netgym.folder / "stormy.yaml", netgym.folder / "trace.csv"
        network.write_text(STORMY)
        trace.write_text("start_s,bits_per_second\n0,1e9\n0.3,12345678.9012345\n")
        folder = netgym.run("run", netgym.experiment, "--strategy", "DiLoCo", "--topology", network)
        for path in (network, trace, netgym.experiment):
            path.unlink()
        again = netgym.run("compare", folder / "experiment.yaml")
        assert results_of(again) == results_of(folder)
        assert (again / "experiment.yaml").read_bytes() == (folder / "experiment.yaml").read_bytes()

    def test_without_a_network_there_is_no_virtual_time(self, netgym: Netgym) -> None:
        folder = netgym.run("run", netgym.experiment, "--strategy", "DiLoCo", "--set", "topology=null")
        (entry,) = json.loads((folder / "summary.json").read_text())
        assert entry["virtual_seconds"] is None
        assert entry["bytes_sent_per_worker"] > 0

    def test_names_neither_leave_the_folder_nor_steer_page_or_terminal_and_secrets_stay_out(
        self, netgym: Netgym, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MY_TOKEN", "hunter2")
        name = r"../../<script>alert(1)</script>\e[31mred\a\u202e\r"
        netgym.experiment.write_text(
            SMALL.replace("name: small", f'name: "{name}"').replace(
                "name: DiLoCo", f'name: DiLoCo, label: "{name}"'
            )
        )
        code, out, err = netgym("compare", netgym.experiment, "--set", "steps=1")
        assert code == 0
        assert all(character.isprintable() or character == "\n" for character in out + err)
        (folder,) = (netgym.folder / "runs").iterdir()
        assert {path.name for path in netgym.folder.iterdir()} == {"runs", "small.yaml"}
        assert "<script>alert" not in (folder / "report.html").read_text()
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert len(files) > 10
        for path in files:
            assert path.name.isprintable()
            assert b"hunter2" not in path.read_bytes(), path


def test_a_run_that_fails_says_where_its_remains_are(netgym: Netgym, monkeypatch: pytest.MonkeyPatch) -> None:
    (netgym.folder / "failing.py").write_text(
        "from exogym_core.strategy import SimpleReduceStrategy\n"
        "class Failing(SimpleReduceStrategy):\n"
        "    def step(self):\n"
        "        super().step()\n"
        "        assert self.local_step < 3, 'unable to continue'\n"
    )
    monkeypatch.syspath_prepend(netgym.folder)
    failing = "[{name: 'failing:Failing', label: AllReduce}"
    netgym.experiment.write_text(SMALL.replace("[AllReduce", failing))
    code, _, err = netgym("run", "small.yaml", "--strategy", "AllReduce")
    assert code == 1
    lines = err[err.index("error: ") :].splitlines()
    assert lines[0].startswith("error: rank ")
    assert lines[0].endswith(" failed at failing.py:5: AssertionError: unable to continue")
    assert (
        lines[-1] == "Results so far are in runs/small-1; to continue: netgym compare --resume runs/small-1"
    )
    assert json.loads((netgym.folder / "runs/small-1/summary.json").read_text())[0]["incomplete"]


def test_debug_shows_the_traceback(netgym: Netgym) -> None:
    code, _, err = netgym("compare", "nowhere.yaml", "--debug")
    assert code == 2
    assert "Traceback" in err


def test_list_names_each_strategys_paper(netgym: Netgym) -> None:
    lines = netgym("list", "strategies")[1].splitlines()[1:]
    style = r"  \S+ +[^\[\]]+\. \[(arXiv|openreview) \w[^\[\]]*\]"
    assert [
        line for line in lines if not re.fullmatch(style, line) or "(arXiv" in line or "et al." in line
    ] == []
    assert next(line for line in lines if line.startswith("  NoLoCo ")).endswith(" [arXiv 2506.10911]")


def test_version_and_help(netgym: Netgym) -> None:
    assert netgym("--version")[1].startswith("netgym ")
    assert "compare" in netgym("--help")[1]


@pytest.fixture
def long_run(tmp_path: Path) -> Iterator[Fork]:
    """A run in a process of its own that would take for ever, once it has trained a few steps."""
    (tmp_path / "small.yaml").write_text(SMALL.replace("steps: 6", "steps: 1000000"))
    run = Fork(main, ["compare", "small.yaml", "--out", "out"], folder=tmp_path)
    run.wait_for(lambda: ": step " in run.err)  # lines of runs side by side share their time
    yield run
    run.kill()


def test_a_signal_ends_the_run_in_order(long_run: Fork, netgym: Netgym, tmp_path: Path) -> None:
    long_run.send_signal(signal.SIGTERM)
    ended = long_run.end()
    err = ended.stderr
    assert ended.returncode == 143, err
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("interrupted: results so far are in out, marked incomplete")
    entry, *others = json.loads((tmp_path / "out" / "summary.json").read_text())
    name = entry["name"]  # the second alone where the first had no step yet
    assert name in ("AllReduce", "DiLoCo")
    assert all(other["incomplete"] for other in others)
    assert entry["incomplete"] is True
    assert entry["steps"] > 0
    rows = (tmp_path / "out" / "metrics" / f"{name}.csv").read_text().splitlines()
    assert len(rows) == entry["steps"] + 1
    status, out, _ = netgym("report", "out")
    assert status == 0
    assert f"{name} (incomplete)" in out
    assert "stopped before its end" in (tmp_path / "out" / "report.html").read_text()
