"""A rank that hangs in its own code: a line names it and its place, nothing fails, and Ctrl-C ends it."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.workers import threads
from exogym_core.workers.host import Runner
from exogym_core.workers.processes import process_runner
from exogym_core.workers.threads import Silence

CARRIERS = ["threads", {"kind": "processes", "processes": 3}]


@pytest.fixture(autouse=True)
def ctrl_c() -> Any:
    """SIGINT raises, also where a background shell has handed it down ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("workers", CARRIERS, ids=["threads", "three processes"])
def test_a_silent_rank_is_reported_once_with_its_place_and_may_continue(
    workers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reported: list[Silence] = []
    take_in = Runner._silent

    def hear(run: Runner, silence: Silence, block: range) -> None:
        if reported:
            (tmp_path / "again").touch()
        take_in(run, silence, block)

    monkeypatch.setattr(threads, "SECONDS_OF_SILENCE", 0.05)
    monkeypatch.setattr(Runner, "_silent", hear)
    monkeypatch.setattr(Silence, "warn", lambda silence: reported.append(silence))

    def computes_for_long(comm: Communicator) -> float:
        comm.barrier()
        if comm.rank == 1:
            while not (tmp_path / "again").exists():
                torch.ones(10).sum()
        return float(comm.all_reduce(torch.ones(1)))

    assert run_ranks(computes_for_long, 3, workers=workers).results == [3.0] * 3
    assert [silence.rank for silence in reported] == [1]
    path, line, function = reported[0].place
    assert (os.path.basename(path), function) == ("test_watch.py", "computes_for_long")
    start = computes_for_long.__code__.co_firstlineno
    assert start + 3 <= line <= start + 4


@pytest.mark.parametrize(
    ("function", "where"), [("forward", "forward at mine.py:7"), ("<module>", "mine.py:7")]
)
def test_a_silence_is_a_warning_at_the_place(function: str, where: str) -> None:
    with pytest.warns(UserWarning, match=rf"^rank 2 has made no call for 31 s .* it is in {where} ") as got:
        Silence(2, 31.4, 5, ("/somewhere/mine.py", 7, function), True).warn()
    assert (got[0].filename, got[0].lineno) == ("/somewhere/mine.py", 7)


def test_a_stopped_process_is_reported_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []

    def warn(text: str, *_: object, **__: object) -> None:
        reported.append(text)
        found = re.search(r"kill -CONT (\d+)", text)
        if found is not None:
            os.kill(int(found[1]), signal.SIGCONT)

    monkeypatch.setattr(process_runner, "_SECONDS_OF_SILENCE", 0.2)
    monkeypatch.setattr(process_runner.warnings, "warn", warn)

    def body(comm: Communicator) -> float:
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return float(comm.all_reduce(torch.ones(1)))

    assert run_ranks(body, 2, workers={"kind": "processes", "processes": 2}).results == [2.0, 2.0]
    assert any(
        re.fullmatch(r"the process of rank 1 \((\d+)\) is stopped: kill -CONT \1 .*", line)
        for line in reported
    )


def test_ctrl_c_ends_a_rank_that_is_busy_with_itself() -> None:
    before = threading.active_count()

    def body(comm: Communicator) -> None:
        """Rank 1 has Ctrl-C sent to the main thread and then runs its own code."""
        comm.barrier()
        if comm.rank == 1:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        while comm.rank == 1:
            torch.ones(10).sum()
        comm.barrier()

    with pytest.raises(KeyboardInterrupt):
        run_ranks(body, 3)
    assert threading.active_count() == before


def test_a_silence_without_a_place_in_a_users_code_names_none_of_ours() -> None:
    with pytest.warns(UserWarning, match=r"it is inside of netgym \(if it is computing") as got:
        Silence(0, 30.0, 5, (threads.__file__, 7, "place_in"), True).warn()
    assert ".py" not in str(got[0].message)
