"""Ranks that fail or disagree: ends soon, names the failed rank and the cause, leaves nothing; on every host."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import confused
import pytest
import torch
from forks import Fork, run_script
from transports import TRANSPORTS, run

from exogym_core.communicator import Communicator
from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.workers.processes.children import Children, Pipe
from exogym_core.workers.run import run_ranks
from netsim.errors import DeadlockError, MismatchError, RankError

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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
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


# --- calls that disagree ------------------------------------------------------------------------------------


def _dtype(comm: Communicator) -> None:
    comm.all_gather(confused.ones().long() if comm.rank == 1 else confused.ones())


def _order(comm: Communicator) -> None:
    calls: list[Callable[[torch.Tensor], Any]] = [comm.all_reduce, comm.all_gather]
    for call in reversed(calls) if comm.rank == 1 else calls:
        call(confused.ones())


def _group(comm: Communicator) -> None:
    comm.group([1, 0, 2] if comm.rank == 1 else [0, 1, 2]).all_reduce(confused.ones())


def _once_too_often(comm: Communicator) -> None:
    for _ in range(3 if comm.rank == 1 else 2):
        comm.all_reduce(confused.ones())


def _one_rank_gone(comm: Communicator) -> None:
    if comm.rank != 1:
        comm.all_reduce(confused.ones())


def _asynchronous(comm: Communicator) -> None:
    handle = comm.all_reduce(confused.ones(4 if comm.rank == 1 else 3), async_op=True)
    handle.wait()


def _in_a_group(comm: Communicator) -> None:
    if comm.rank > 0:
        comm.group([1, 2]).all_reduce(confused.ones(4 if comm.rank == 1 else 3))


_TABLE = {
    confused.another_operation: ["broadcast", "all_reduce"],
    confused.another_shape: ["float32[3]", "float32[4]"],
    _dtype: ["float32[3]", "int64[3]"],
    confused.another_reduction: ["op=sum", "op=max"],
    confused.another_root: ["src=0", "src=1"],
    _order: ["all_reduce", "all_gather"],
    _group: [],
    _once_too_often: ["ended", "all_reduce"],
    _one_rank_gone: ["ended", "all_reduce"],
    confused.a_message_of_another_size: ["send(float32[5])", "recv(float32[3])"],
    _asynchronous: ["float32[3]", "float32[4]"],
    _in_a_group: ["float32[3]", "float32[4]"],
}


_IN_PROCESSES_TOO = {
    *(confused.another_shape, _once_too_often, confused.circle_of_receives, confused.crossed_groups),
}


def _on_transports(bodies: Iterable[Callable[[Communicator], None]]) -> list[Any]:
    """Every body in threads, where a run costs next to nothing; one of each kind on the other transports."""
    return [
        pytest.param(body, transport, id=f"{body.__name__}-{transport}")
        for body in bodies
        for transport in TRANSPORTS
        if transport == "threads" or body in _IN_PROCESSES_TOO
    ]


@pytest.mark.parametrize(("body", "transport"), _on_transports(_TABLE))
def test_a_mismatch_is_reported(body: Callable[[Communicator], None], transport: str) -> None:
    with pytest.raises((MismatchError, DeadlockError)) as caught:
        run(transport, body, 3)
    first = str(caught.value).splitlines()[0]
    assert "rank" in first
    assert "1" in first
    assert f"{Path(body.__code__.co_filename).name}:" in first
    for words in _TABLE[body]:
        assert words in first


def _crossed_making_of_groups(comm: Communicator) -> None:
    if comm.rank < 2:
        comm.group([0, 1])
    if comm.rank == 2:
        comm.recv(confused.ones(), 0)
    if comm.rank == 1:
        comm.group([1, 2])


_DEADLOCKS = {
    confused.circle_of_receives: "rank 1 waits for rank 2 in recv",
    confused.missing_send: "rank 1 waits for rank 0 in recv",
    confused.missing_receive: "rank 1 waits for rank 0 in send",
    confused.another_tag: "rank 1 waits for rank 0",
    confused.crossed_groups: "rank 1 waits for ranks 0, 2 in all_reduce",
    confused.from_anyone: "rank 1",
    confused.handles_in_a_circle: "rank 1 waits for rank 2 in recv",
}


@pytest.mark.parametrize(("body", "transport"), _on_transports(_DEADLOCKS))
def test_ranks_that_wait_in_a_cycle_are_reported_at_once(
    body: Callable[[Communicator], None], transport: str
) -> None:
    """Over gloo too, long before its time-out, with every rank's call and place."""
    with pytest.raises(DeadlockError) as caught:
        run(transport, body, 3, timeout_seconds=600)
    first, *table = str(caught.value).splitlines()
    assert first.startswith("deadlock: ")
    assert _DEADLOCKS[body] in first
    assert "confused.py:" in first or body is confused.from_anyone
    assert "  rank 1" in {line.split(":")[0] for line in table} or body is confused.from_anyone


def test_ranks_that_make_groups_in_different_orders_are_reported_at_once() -> None:
    """Over gloo the members of a group connect when they make it; in simulation there is nothing to wait for."""
    with pytest.raises(
        DeadlockError, match=r"rank 1 waits for rank 2 in group\(\[1, 2\]\) at test_endings"
    ) as caught:
        run("gloo", _crossed_making_of_groups, 3, timeout_seconds=600)
    assert "rank 2 waits for rank 0 in recv(float32[3]) at test_endings.py:" in str(caught.value)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_equal_calls_that_are_swapped_on_one_rank_are_reported_by_their_places(transport: str) -> None:
    """They would give each other's values, silently; who means it says so."""
    with pytest.raises(MismatchError, match=r"rank 1 called all_reduce.* at confused.py:\d+") as caught:
        run(transport, confused.swapped, 3)
    assert "ranks 0, 2 called" in str(caught.value)

    def meant(comm: Communicator) -> list[float]:
        comm.compare_places(False)
        return confused.swapped(comm)

    assert run(transport, meant, 3).results[0] == [102.0, 201.0]


# --- every place where ranks live ---------------------------------------------------------------------------
