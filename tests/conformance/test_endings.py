"""Runs in processes end soon after a failure, name the failed rank and the cause, and leave nothing behind."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import select
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance_cases import run
from forks import Fork, run_script

from exogym_core.communicator import Communicator
from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.workers.processes.children import Children, Pipe
from exogym_core.workers.run import run_ranks
from netsim.errors import DeadlockError, RankError

PROCESSES = ["processes", "gloo"]


def _left_behind() -> tuple[list[str], int, list[str]]:
    """Descriptors, threads and shared memory of this process; children must be reaped."""
    gc.collect()  # mapped memory goes with the last tensor in it
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    # Semaphores of multiprocessing are other programs': nothing here makes any.
    shared = sorted(name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-"))
    return sorted(os.listdir("/proc/self/fd")), threading.active_count(), shared


def _failure_of(transport: str, body: Callable[[Communicator], Any], num_ranks: int) -> tuple[str, int]:
    """What a run raises: its text and the rank that it names. The traceback would keep the run's parts alive."""
    with pytest.raises(RankError) as caught:
        run(transport, body, num_ranks)
    return str(caught.value), caught.value.rank


def _dies(how: Callable[[], Any]) -> Callable[[Communicator], None]:
    """Rank 1 ends in the middle of what the others wait for."""

    def body(comm: Communicator) -> None:
        comm.all_reduce(torch.ones(3))
        if comm.rank == 1:
            faulthandler.disable()  # pytest's would write the stack of a fault that is meant
            how()
        comm.all_reduce(torch.ones(3))

    return body


_DEATHS = {
    "killed by signal 9 (SIGKILL)": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "killed by signal 11 (SIGSEGV)": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit code 7": lambda: os._exit(7),
}


@pytest.mark.parametrize("transport", PROCESSES)
@pytest.mark.parametrize("message", _DEATHS)
def test_a_dead_process_is_named_with_its_signal_or_exit_code(message: str, transport: str) -> None:
    before = _left_behind()
    text, rank = _failure_of(transport, _dies(_DEATHS[message]), 2)
    first = text.splitlines()[0]
    assert "rank 1" in first
    assert message in first
    assert rank == 1
    assert _left_behind() == before


def _raises() -> None:
    raise KeyError("mine")


@pytest.mark.parametrize("transport", PROCESSES)
def test_an_exception_is_reported_first_and_once(transport: str) -> None:
    before = _left_behind()
    text, _ = _failure_of(transport, _dies(_raises), 3)
    assert text.startswith("rank 1 failed at test_endings.py:")
    assert "KeyError: 'mine'" in text.splitlines()[0]
    assert text.count("KeyError: 'mine'") == 1
    assert "Traceback" not in text
    # The frames below are the test's own, none of what carries ranks.
    frames = [line for line in text.splitlines() if line.startswith("  File ")]
    assert len(frames) == 2
    assert all("test_endings.py" in frame for frame in frames)
    assert _left_behind() == before


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raises_mutely() -> None:
    raise _MuteError


@pytest.mark.parametrize("transport", ["threads", *PROCESSES])
def test_an_exception_without_a_text_is_still_named(transport: str) -> None:
    text, rank = _failure_of(transport, _dies(_raises_mutely), 2)
    assert "_MuteError: (its text is unavailable" in text.splitlines()[0]
    assert rank == 1


def test_the_other_ranks_calls_are_reported_in_a_line_each() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(_dies(_raises), 3, transport="gloo")
    lines = str(caught.value).splitlines()
    assert lines[-3] == "other ranks:"
    for rank, line in zip((0, 2), lines[-2:], strict=True):
        assert line.startswith(f"  rank {rank}: waits in all_reduce(float32[3], op=sum) at test_endings.py:")


def _hides_the_cause(comm: Communicator) -> None:
    try:
        if comm.rank == 1:
            raise ValueError("the cause")
    finally:
        comm.barrier() if comm.rank == 1 else comm.all_reduce(torch.ones(2))


def test_a_collective_in_a_finally_block_does_not_hide_the_cause() -> None:
    with pytest.raises(RankError, match="ValueError: the cause"):
        run_ranks(_hides_the_cause, 3, transport="gloo")


@pytest.mark.parametrize("transport", PROCESSES)
def test_a_success_leaves_nothing(transport: str) -> None:
    run(transport, lambda comm: comm.barrier(), 2)
    before = _left_behind()
    run(transport, lambda comm: comm.group([1, 0]).all_reduce(torch.ones(2), async_op=True).wait(), 2)
    assert _left_behind() == before


def test_many_failed_runs_leave_nothing() -> None:
    before = _left_behind()
    for _ in range(20):
        with pytest.raises(RankError):
            run_ranks(_dies(_raises), 2, transport="gloo")
    assert _left_behind() == before


def _waits_for_ever(comm: GlooCommunicator) -> None:
    if comm.rank == 0:
        comm.all_reduce(torch.ones(2))
    else:
        signal.pause()


def test_a_rank_that_never_calls_costs_the_time_out_and_is_named() -> None:
    with pytest.raises(DeadlockError) as caught:
        run_ranks(_waits_for_ever, 2, transport="gloo", timeout_seconds=0.2)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("rank 0 waits in all_reduce(float32[2], op=sum) at test_endings.py:")
    assert "within 0.2 s" in lines[0]
    assert lines[1] == "  rank 1: does not wait; it is in"
    assert any("_waits_for_ever at " in line and "signal.pause()" in line for line in lines[2:])
    assert lines[-1] == "  rank 1: was computing, or waiting for something else"


def _never_received(comm: GlooCommunicator) -> None:
    if comm.rank == 0:
        comm.isend(torch.ones(2), 1)


def test_an_unreceived_message_is_reported_at_the_end() -> None:
    with pytest.raises(
        DeadlockError, match=r"every rank has ended, but rank 0 send\(float32\[2\]\) at .*rank 1"
    ):
        run_ranks(_never_received, 2, transport="gloo")


def _listening(comm: GlooCommunicator) -> list[str]:
    """Addresses at which this process listens."""
    comm.group([1, 0]).barrier()
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = []
    for name in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{name}") as table:
            rows = [line.split() for line in table.readlines()[1:]]
        found += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return found


def test_ranks_listen_on_loopback_only() -> None:
    listening = run_ranks(_listening, 2, transport="gloo").results
    assert all(addresses for addresses in listening)  # or the test would see nothing
    assert all(address.startswith("0100007F:") for addresses in listening for address in addresses)


_SCRIPT = """
import os, signal, sys
import torch
from exogym_core.workers.run import run_ranks

def body(comm):
    comm.barrier()
    comm.mark({"pid": os.getpid()})
    while True:
        comm.all_reduce(torch.ones(3))

def tell(row):
    print(row.row["pid"], flush=True)

run_ranks(body, 2, transport="gloo", on_row=tell)  # not guarded: no child imports this script
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_the_parent_whatever_ends_it(number: signal.Signals, tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    (tmp_path / "temporary").mkdir()
    parent = Fork(run_script, str(script), environment={"TMPDIR": str(tmp_path / "temporary")})
    parent.wait_for(lambda: parent.out.count("\n") >= 2)
    ranks = [os.pidfd_open(int(pid)) for pid in parent.out.split()[:2]]
    parent.send_signal(number)
    end = parent.end()
    assert end.returncode == -number
    assert end.stderr.count("Traceback") == (1 if number == signal.SIGINT else 0)
    for rank in ranks:
        assert select.select([rank], [], [], 60.0)[0]
        os.close(rank)
    assert os.listdir(tmp_path / "temporary") == []


def _under_torchrun(port: int) -> Callable[[int, Pipe], None]:
    def target(index: int, channel: Pipe) -> None:
        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(index),
            WORLD_SIZE="2",
            LOCAL_RANK=str(index),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        with GlooCommunicator.from_environment(backend="gloo") as comm:
            total = comm.all_reduce(torch.tensor([comm.rank + 1])).item()
            channel.send((total, comm.group([1, 0]).all_gather_object(index), _listening(comm)))

    return target


def test_ranks_started_by_torchrun_find_each_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with Children(_under_torchrun(port), 2) as children:
        answers = [channel.recv() for channel in children.channels]
    assert [answer[:2] for answer in answers] == [(3, [1, 0])] * 2
    assert all(address.startswith("0100007F:") for answer in answers for address in answer[2])
