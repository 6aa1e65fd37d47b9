"""Runs side by side: the results of one after the other, clean ends, and the other runs' results kept."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import experiment

from exogym_core.workers.processes.jobs import Job, JobEnd, call_each, run_jobs
from netgym.cli.main import main
from netgym.experiment.comparison import compare
from netgym.studies import sweep
from netsim.errors import InputError

EXPERIMENT = experiment(
    topology="lan",
    collectives="ring",  # chosen ones take longer than all else
    compute="50 ms",
    seeds=2,
    strategies='[AllReduce, {name: "own:Fails", label: Own}, {name: DiLoCo, H: 2}]',
)
OWN = """\
import os, signal
from exogym_core.strategy import AllReduceStrategy


class Fails(AllReduceStrategy):
    def step(self):
        super().step()
        if self.local_step == 1:  # before its first row: how many of these a failing run has depends on the machine
            END
"""


class Steps:
    """Report that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def step(self, number: Any) -> None:
        self.lines.append(number)


def ends(num_jobs: int, *calls: Callable[[Any], Any]) -> list[tuple[list[Any], JobEnd]]:
    reports = [Steps() for _ in calls]
    jobs = (Job(str(number), call, reports[number]) for number, call in enumerate(calls))
    found = {int(job.name): end for job, end in run_jobs(jobs, num_jobs)}
    return [(report.lines, found[number]) for number, report in enumerate(reports)]


def double(report: Any) -> int:
    report.step(21)
    return 42


def refuse(report: Any) -> None:
    raise InputError("steps: 0 is too few")


def test_cuda_is_not_started_before_jobs_are_forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Forks of a process that has asked CUDA's runtime cannot use it, and torch's optimizers ask in each step."""
    parent, asked = os.getpid(), []

    def is_available() -> bool:
        asked.append(os.getpid())
        return False

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    path = tmp_path / "cpu.yaml"
    path.write_text(
        experiment(
            topology="lan", collectives="ring", compute="50 ms", seeds=2, strategies="[AllReduce]", steps=2
        )
    )
    assert main(["compare", str(path), "--jobs", "2", "--out", str(tmp_path / "out")]) == 0
    assert parent not in asked
    assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"  # where devices are found out, NVML tells


def test_calls_side_by_side_return_in_order_and_raise() -> None:
    def squared(number: int) -> tuple[int, int]:
        if number < 0:
            raise InputError(f"{number}: is negative")
        return os.getpid(), number**2

    found = call_each(squared, range(3), 2)
    assert [square for _, square in found] == [0, 1, 4]
    assert os.getpid() not in {process for process, _ in found}
    assert call_each(squared, [3], 1) == [(os.getpid(), 9)]
    with pytest.raises(InputError, match=r"-2: is negative"):
        call_each(squared, [1, -2], 2)


class UnsendableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not to be sent")


def crash(report: Any) -> None:
    raise UnsendableError("inside")


@pytest.mark.parametrize("num_jobs", [1, 2])
def test_a_job_reports_and_ends_alike_here_and_in_a_process(num_jobs: int) -> None:
    (first, failed, *_), (second, refused), (_, crashed) = (*ends(num_jobs, double, refuse, crash),)
    assert (first, failed) == ([21], JobEnd(42))
    assert second == []
    assert (type(refused.error), str(refused.error)) == (InputError, "steps: 0 is too few")
    assert "inside" in str(crashed.error)


def test_leaving_interrupts_what_runs_and_takes_its_last_reports(tmp_path: Path) -> None:
    def wait(report: Any) -> None:
        report.step(os.getpid())
        (tmp_path / "waits").touch()
        try:
            signal.pause()
        except KeyboardInterrupt:
            report.step("saved")
            raise

    def end(_: Any) -> int:
        while not (tmp_path / "waits").exists():
            time.sleep(0.001)
        return 42

    report = Steps()
    with closing(run_jobs(iter([Job("wait", wait, report), Job("ends", end, Steps())]), 2)) as running:
        assert next(running)[1].result == 42
    pid, saved = report.lines
    assert saved == "saved"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def files_of(folder: Path) -> dict[str, bytes]:
    left_out = ("log.txt", "environment.json", "report.html")
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in left_out
    }


def compared(
    folder: Path, num_jobs: int, end: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    (folder / "own.py").write_text(OWN.replace("END", end))
    (folder / "small.yaml").write_text(EXPERIMENT)
    out = folder / f"with-{num_jobs}"
    code = main(["compare", str(folder / "small.yaml"), "--out", str(out), "--jobs", str(num_jobs)])
    captured = capsys.readouterr()
    return code, captured.out.replace(str(out), "OUT"), captured.err


def test_a_comparison_side_by_side_is_the_one_run_after_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A strategy fails: its further seeds leave nothing."""
    alone, side_by_side = (compared(tmp_path, number, "raise ValueError('no')", capsys) for number in (1, 9))
    assert alone[:2] == side_by_side[:2]
    assert alone[0] == 1
    assert files_of(tmp_path / "with-1") == files_of(tmp_path / "with-9")


def test_a_run_that_is_killed_is_marked_and_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = "os.path.exists('once') or (open('once', 'w').close(), os.kill(os.getpid(), signal.SIGKILL))"
    monkeypatch.chdir(tmp_path)
    code, _, err = compared(tmp_path, 2, end, capsys)
    assert code == 1
    assert "Own failed: its process ended: killed by signal 9 (SIGKILL)" in err
    assert main(["compare", "--resume", str(tmp_path / "with-2"), "--jobs", "2"]) == 0
    summary = json.loads((tmp_path / "with-2/summary.json").read_text())
    assert [entry["seeds"] for entry in summary] == [[0, 1]] * 3
    assert not any("failed" in entry or "incomplete" in entry for entry in summary)


# --- the training point of a sweep over networks --------------------------------------------------------------


def swept(folder: Path, num_jobs: int, end: str) -> tuple[int, dict[str, bytes]]:
    """Exit code, and files of a sweep whose second point retimes the first."""
    folder.mkdir()
    (folder / "own.py").write_text(OWN.replace("END", end))
    (folder / "small.yaml").write_text(f"{EXPERIMENT}sweep: {{topology: [lan, wan-4-regions]}}\n")
    out = folder / "out"
    code = main(["sweep", str(folder / "small.yaml"), "--out", str(out), "--jobs", str(num_jobs)])
    return code, files_of(out)


@pytest.fixture
def given_jobs(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Jobs of the comparisons in this process; the estimate has one."""
    jobs: list[int | None] = []

    def noted(*given: Any, **options: Any) -> Any:
        jobs.append(options.get("jobs", 1))
        return compare(*given, **options)

    monkeypatch.setattr(sweep, "compare", noted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    return jobs


def test_a_training_point_with_its_strategies_side_by_side_is_the_one_run_after_run(
    tmp_path: Path, given_jobs: list[int | None]
) -> None:
    """A strategy fails, at each point."""
    alone = swept(tmp_path / "1", 1, "raise ValueError('no')")
    assert set(given_jobs) == {1}
    assert swept(tmp_path / "2", 2, "raise ValueError('no')") == alone
    assert given_jobs[-1] == 2
    assert alone[0] == 1
    entries = json.loads(alone[1]["summary.json"])
    assert [entry.get("retimed") for entry in entries] == [
        None,
        [f"{name}.seed-{seed}" for name in ("AllReduce", "DiLoCo") for seed in (0, 1)],
    ]


def test_an_interrupted_training_point_resumes_to_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_jobs: list[int | None]
) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    end = "os.path.exists('again') or os.getppid() != MAIN or os.kill(MAIN, signal.SIGINT)"
    end = end.replace("MAIN", str(os.getpid()))  # the estimate's training is in this process itself
    code, _ = swept(tmp_path / "cut", 2, end)
    assert (code, given_jobs[-1]) == (130, 2)
    Path("again").touch()
    assert main(["sweep", "--resume", str(tmp_path / "cut/out"), "--trust", "--jobs", "2"]) == 0
    assert swept(tmp_path / "whole", 1, end) == (0, files_of(tmp_path / "cut/out"))
