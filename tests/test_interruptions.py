"""A signal in the middle of a command: its results so far, one line, the signal's exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from experiments import experiment, json_of

from exogym_core.results.run_folder import RunFolder
from netgym import strategy_check as check
from netgym.cli.main import main
from netgym.experiment import comparison
from netgym.planning import reproduce
from netgym.studies import sweep
from netsim.cli import main as netsim_cli
from netsim.cli import timing
from netsim.cli.terminal import DelayedProgress

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
EXPERIMENT = experiment(topology="lan", compute="50 ms", target_loss=3)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(EXPERIMENT)
    return tmp_path


def signal_at(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    call: int,
    number: int = signal.SIGINT,
    counts: Callable[..., bool] = lambda *given, **options: True,
) -> None:
    """Send this process a signal when `owner.name` is called for the `call`th time of those that count."""
    calls: list[None] = []
    whole: Callable[..., Any] = getattr(owner, name)

    def counted(*given: Any, **options: Any) -> Any:
        if counts(*given, **options):
            calls.append(None)
            if len(calls) == call:
                os.kill(os.getpid(), number)
        return whole(*given, **options)

    monkeypatch.setattr(owner, name, counted)


def is_point(experiment: Any, folder: Any, *given: Any, **options: Any) -> bool:
    """True for a point of a sweep, not for the few steps by which it estimates."""
    return folder.path.parent.name == "points"


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_every_command_ends_with_the_code_of_its_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, code: int
) -> None:
    before = signal.getsignal(number)
    signal_at(monkeypatch, reproduce.netsim, "collective", 3, number)
    assert main(["reproduce", "dt-fm"]) == code
    printed = capsys.readouterr()
    assert [line for line in printed.out.splitlines() if ": predicted" in line][2:] == [], "two figures"
    assert printed.err == "interrupted: 2 figures so far\n"
    assert signal.getsignal(number) is before


def test_the_exit_code_is_the_signals_wherever_it_meets_python() -> None:
    """`python -m` ends itself by SIGINT once KeyboardInterrupt has passed through the `exec` of a text."""
    lines = [
        "import os, signal, sys",
        "from netsim.cli import main, show",
        "def stopped(name): exec('os.kill(os.getpid(), signal.SIGTERM)')",
        "show.Topology.load = stopped",
        "sys.exit(main.main(['show', 'lan']))",
    ]
    Path("stopped.py").write_text("\n".join(lines))
    assert subprocess.run([sys.executable, "-m", "stopped"], check=False).returncode == 143


def test_a_closed_terminal_changes_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*given: Any, **options: Any) -> None:
        raise OSError(5, "Input/output error")

    signal_at(monkeypatch, reproduce.netsim, "collective", 3, signal.SIGHUP)
    monkeypatch.setattr(reproduce.ReproducedRun, "lines", closed)
    assert main(["reproduce", "dt-fm"]) == 129


def test_a_signal_that_compiled_code_makes_an_error_of_fails_no_point(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = sweep.compare

    def converted(*given: Any, **options: Any) -> Any:
        try:
            if is_point(*given):
                os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt as error:
            raise ValueError(f"Error calling function: {error!r}") from None
        return whole(*given, **options)

    monkeypatch.setattr(sweep, "compare", converted)
    assert main(["sweep", "small.yaml", "--vary", "steps=[2,3]", "--jobs", "1", "--out", "out"]) == 130
    printed = capsys.readouterr()
    assert "failed" not in printed.out + printed.err
    assert "steps=2  not finished" in printed.out


def test_a_check_prints_the_laws_that_were_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signal_at(monkeypatch, check, "_difference", 1)
    assert main(["check", "AllReduce", "--steps", "3", "--json"]) == 130
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert not found["passed"], "laws are missing"
    assert [row["law"] for row in found["rows"]] == list(check.LAWS)[: len(found["rows"])]
    assert printed.err.endswith(f"interrupted: {len(found['rows'])} of {len(check.LAWS)} laws were tried\n")


def test_a_sweep_shows_the_points_that_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signal_at(monkeypatch, sweep, "compare", 2, counts=is_point)
    words = "sweep small.yaml --vary strategies.*.lr=[0.01,0.02,0.03] --jobs 1 --out out"
    assert main(words.split()) == 130
    printed = capsys.readouterr()
    assert "0.01  AllReduce" in printed.out
    assert "0.02  not finished" in printed.out
    assert "0.03" not in printed.out
    assert printed.err.endswith(
        "results so far are in out, marked incomplete; to continue: netgym sweep --resume out\n"
    )
    assert "0.01" in Path("out/results.csv").read_text()
    assert Path("out/report.html").is_file()


@pytest.mark.parametrize("words", ["compare small.yaml", "sweep small.yaml --vary steps=[2,3] --jobs 1"])
def test_a_signal_after_the_last_step_leaves_table_and_digest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    signal_at(
        monkeypatch, RunFolder, "write_text", 1, counts=lambda folder, name, *given: name == "report.html"
    )
    assert main([*words.split(), "--out", "out"]) == 130
    printed = capsys.readouterr()
    assert printed.out.count("digest ") == 1
    assert printed.out.endswith("\nout\n")
    assert printed.err.endswith("interrupted: results are in out\n")
    assert Path("out/report.html").is_file()


def test_a_command_that_had_not_begun_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    signal_at(monkeypatch, sweep, "probe", 1)
    assert main(["sweep", "small.yaml", "--vary", "steps=[2,3]", "--out", "out"]) == 130
    assert capsys.readouterr().err == "interrupted: nothing was trained yet, and nothing is left\n"
    assert [path.name for path in folder.iterdir()] == ["small.yaml"]


@pytest.mark.parametrize(("number", "code"), SIGNALS[:2])
@pytest.mark.parametrize(
    ("words", "again", "owner", "name"),
    [
        ("sweep small.yaml --vary steps=[2,3]", "sweep", sweep, "probe"),
        ("tune small.yaml --over lr=0.01,0.02 --seeds 1", "tune", sweep, "probe"),
        ("compare small.yaml", "compare", comparison, "compare"),
    ],
)
def test_a_resume_that_had_not_begun_leaves_all_that_it_found(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    again: str,
    owner: Any,
    name: str,
    number: int,
    code: int,
) -> None:
    def killed(*given: Any, **options: Any) -> None:
        raise SystemExit

    with monkeypatch.context() as first:
        first.setattr(owner, name, killed)
        with pytest.raises(SystemExit):
            main([*words.split(), "--out", "out"])
    found = set(Path("out").rglob("*"))
    capsys.readouterr()
    signal_at(monkeypatch, owner, name, 1, number)
    assert main([again, "--resume", "out"]) == code
    last = f"nothing was trained yet, and out is as it was; to continue: netgym {again} --resume out\n"
    assert capsys.readouterr().err.endswith(f"interrupted: {last}")
    assert Path("out/experiment.yaml") in found <= set(Path("out").rglob("*"))


@pytest.mark.thorough
def test_a_tuning_shows_the_best_points_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signal_at(monkeypatch, sweep, "compare", 4, counts=is_point)
    words = "tune small.yaml --over lr=0.01,0.02 --seeds 1 --jobs 1 --out out"
    assert main(words.split()) == 130
    printed = capsys.readouterr()
    assert printed.out.startswith("Best of each strategy so far on tuning seeds 1000:")
    assert [line.split()[0] for line in printed.out.splitlines()[1:-1]] == ["strategy", "AllReduce", "DiLoCo"]
    assert printed.err.endswith("to continue: netgym tune --resume out\n")
    assert len(json_of(["tune", "--resume", "out", "--json"], capsys)["chosen"]) == 2


def test_flows_that_were_delivered_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("flows.csv").write_text("start_s,src,dst,bytes\n5,lan.0,lan.1,10\n0,lan.0,lan.1,20\n")
    signal_at(monkeypatch, DelayedProgress, "advance", 1)
    assert netsim_cli.main(["flows", "lan", "flows.csv"]) == 130
    printed = capsys.readouterr()
    header, row = printed.out.splitlines()
    assert header == "start_s,src,dst,bytes,finish_s"
    assert row.startswith("0,lan.0,lan.1,20,0.00")
    assert printed.err.splitlines()[-1] == "interrupted: 1 of 2 transfers delivered"


def test_a_collective_that_is_cut_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signal_at(monkeypatch, timing, "collective", 1, signal.SIGTERM)
    assert netsim_cli.main(["collective", "lan", "barrier"]) == 143
    assert capsys.readouterr().err == "interrupted: barrier was not timed to its end\n"
