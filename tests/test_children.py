"""Child processes: what they are given and say to each other, how they end, and that nothing stays behind."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forks import Fork

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.exchange import copy_values, reduce_tensors
from exogym_core.workers.processes.children import ChannelClosed, Children, Pipe, end_process, fork
from exogym_core.workers.processes.protocol import (
    INLINE_BYTES,
    Blocked,
    Done,
    Requests,
    dumps,
    loads,
)
from exogym_core.workers.processes.shared_memory import Arena, blocks_in
from netsim.errors import BrokenCallError, InputError
from netsim.ranks import Key, Mark


def _echo(index: int, channel: Pipe) -> None:
    with contextlib.suppress(ChannelClosed):
        while True:
            channel.send((index, channel.recv()))


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.thorough)])
def test_objects_go_both_ways_and_nothing_is_left(method: str) -> None:
    gc.collect()  # of earlier tests
    before = _open_descriptors()
    num_children = 2 if method == "fork" else 1  # which imports torch again
    offset = 3  # a closure reaches both kinds of children

    def target(index: int, channel: Pipe) -> None:
        given = channel.recv()
        channel.send({"index": index, "sum": given["tensor"] + offset, "type": type("Local", (), {})})

    with Children(target, num_children, method=method) as children:
        for channel in children.channels:
            channel.send({"tensor": torch.arange(3)})
        answers = [channel.recv() for channel in children.channels]
        pids = children.pids
    assert [answer["index"] for answer in answers] == [*range(num_children)]
    assert answers[-1]["sum"].tolist() == [3, 4, 5]
    assert [children.describe_exit(index) for index in range(num_children)] == ["exit code 0"] * num_children
    assert not any(_alive(pid) for pid in pids)
    assert _open_descriptors() == before


def _kill_self(number: int) -> Callable[[int, Pipe], None]:
    def target(index: int, channel: Pipe) -> None:
        faulthandler.disable()  # pytest's would write the stack of a fault that is meant
        os.kill(os.getpid(), number)

    return target


def test_what_a_dead_child_sent_is_still_received_though_a_grandchild_holds_the_channel() -> None:
    def target(index: int, channel: Pipe) -> None:
        if os.fork() == 0:
            channel.recv()
            os._exit(0)
        channel.send("last words")
        os.kill(os.getpid(), signal.SIGKILL)

    with Children(target, 1, method="fork") as children:
        assert children.describe_exit(0, timeout_seconds=10) == "killed by signal 9 (SIGKILL)"
        assert children.ready([0]) == [0]
        assert children.channels[0].recv() == "last words"
        with pytest.raises(ChannelClosed):
            children.channels[0].recv()


def test_children_that_do_not_end_are_killed_and_stopped_ones_too() -> None:
    def target(index: int, channel: Pipe) -> None:
        channel.send("here")
        os.kill(os.getpid(), signal.SIGSTOP)

    children = Children(target, 2, method="fork")
    with contextlib.suppress(KeyError), children:
        assert [channel.recv() for channel in children.channels] == ["here", "here"]
        assert children.ready([0, 1], timeout_seconds=0) == []
        raise KeyError
    assert children.describe_exit(0) == "killed by signal 9 (SIGKILL)"


def test_children_do_not_hold_each_others_channels() -> None:
    """The first child sees the end of its channel though the second still runs."""
    with Children(_echo, 2, method="fork") as children:
        children.channels[0].finish()
        assert children.describe_exit(0, timeout_seconds=10) == "exit code 0"
        children.channels[1].send("still here")
        assert children.channels[1].recv() == (1, "still here")


def test_a_fork_leaves_inherited_garbage_alone() -> None:
    """The destructor of a process group joins native threads, which a fork has not copied: it would never return."""

    def target(index: int, channel: Pipe) -> None:
        gc.collect()
        channel.send("collected")

    gc.disable()
    try:
        garbage: list[Any] = [dist.ProcessGroupGloo(dist.HashStore(), 0, 1)]
        garbage.append(garbage)
        del garbage
        with Children(target, 1, method="fork") as children:
            assert children.ready([0], timeout_seconds=30)
            assert children.channels[0].recv() == "collected"
    finally:
        gc.enable()


def test_text_printed_before_a_fork_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook showed lines of a sweep's points again for each child that was forked after them."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as written:
        monkeypatch.setattr(sys, "stderr", stream)
        print("point 1 of 2", file=sys.stderr)
        if (pid := fork()) == 0:
            end_process(0)
        os.waitpid(pid, 0)
        stream.close()
        assert written.read() == "point 1 of 2\n"


_IN_FORKS: list[signal.Signals] = []
"""Signals that the main thread gets in the functions that Python calls at a fork, one a fork.

Another thread may take one of the process, and on a busy machine run its handler after the fork's end.
"""

os.register_at_fork(before=lambda: _IN_FORKS and signal.pthread_kill(threading.get_ident(), _IN_FORKS.pop()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_comes_while_a_child_is_forked_interrupts_after_it(number: signal.Signals) -> None:
    """Python ignores what its handler raises in functions called at a fork, and a long run went on to its end."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    def report_handler(index: int, channel: Pipe) -> None:
        channel.send(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)

    previous = signal.signal(number, interrupt)
    try:
        with Children(report_handler, 0, method="fork") as children:
            _IN_FORKS.append(number)
            with pytest.raises(KeyboardInterrupt):
                children.add("netgym late")
            assert children.channels[0].recv() is True  # it was started whole, and is known
            assert children.reap(0, timeout_seconds=30) == "exit code 0"
    finally:
        signal.signal(number, previous)


def test_threads_of_ranks_have_ended_for_the_system_when_a_run_ends() -> None:
    libc, key = ctypes.CDLL(None), ctypes.c_uint()
    # The thread's own data goes when it exits: here that takes as long as a destructor kept from a core.
    libc.pthread_key_create(ctypes.byref(key), libc.usleep)
    native_ids = []

    def body(comm: Communicator) -> None:
        native_ids.append(threading.get_native_id())
        libc.pthread_setspecific(key, ctypes.c_void_p(200_000))

    run_ranks(body, 2)
    libc.pthread_key_delete(key)
    assert len(native_ids) == 2
    assert not [each for each in native_ids if os.path.exists(f"/proc/self/task/{each}")]


def test_what_cannot_be_sent_is_named_with_the_remedy() -> None:
    settings = {"model": [torch.nn.Linear(1, 1), threading.Lock()]}

    def target(index: int, channel: Pipe) -> None:
        channel.send(settings)

    with pytest.raises(InputError, match=r"settings\['model'\]\[1\] \(lock\).*workers.kind=threads"):
        Children(target, 1, method="spawn").__enter__()


def test_failures_leave_nothing() -> None:
    descriptors, threads = _open_descriptors(), threading.active_count()
    for _ in range(2):
        with Children(_kill_self(signal.SIGKILL), 1, method="fork") as children:
            children.ready([0])
    assert _open_descriptors() <= descriptors, "fewer where garbage of earlier tests is collected"
    assert threading.active_count() <= threads


@pytest.mark.parametrize(
    ("method", "num_children"), [("fork", 2), pytest.param("spawn", 1, marks=pytest.mark.thorough)]
)
def test_children_end_with_a_killed_parent(method: str, num_children: int) -> None:
    offset = 0  # a closure reaches both kinds of children

    def target(index: int, channel: Pipe) -> None:
        channel.send(os.getpid() + offset)
        while True:
            time.sleep(60)

    def parent() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup
        print("once")
        atexit.register(print, "exit handler")
        with Children(target, num_children, method=method) as children:
            for channel in children.channels:
                print(channel.recv())
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    result = Fork(parent).end(60.0)
    assert result.returncode == -signal.SIGKILL
    first, *pids = result.stdout.splitlines()
    assert first == "once"
    assert len(pids) == num_children
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # gone already
            process = os.pidfd_open(int(pid))
            assert select.select([process], [], [], 60.0)[0]
            os.close(process)


# --- the protocol of simulation and rank groups -------------------------------------------------------------


def through_a_pipe(message: object) -> Any:
    buffers: list[memoryview] = []
    return loads(dumps(message, buffers), buffers)


def test_large_tensors_are_no_part_of_a_pickle() -> None:
    for values in (torch.arange(3.0), torch.arange(90_000.0), torch.tensor([1, 9], dtype=torch.uint16)):
        buffers: list[memoryview] = []
        frame = dumps([Requests(0, [Mark({"values": values})])], buffers)
        assert (len(buffers), len(frame) < 1000) == (int(values.nbytes > INLINE_BYTES), True)
        got = loads(frame, buffers)[0].requests[0].row["values"]
        assert torch.equal(got, values)


def test_classes_of_functions_and_errors_travel_by_value() -> None:
    class Odd:
        pass

    assert type(through_a_pipe([Blocked(1, Key(Odd(), 3), 1)])[0].key.group).__name__ == "Odd"
    error = through_a_pipe(Done(Key(0, 1), {}, BrokenCallError("gone"), []))
    assert str(error.error) == "gone"
    with pytest.raises(InputError, match="cannot be sent to another process"):
        dumps([Requests(1, [Mark({"loss": (i for i in range(3))})])], [])


@pytest.mark.parametrize("is_read_first", [False, True])
def test_a_room_is_free_when_its_tensor_is_gone_and_others_have_read_it(is_read_first: bool) -> None:
    """They read its values until they say so; its memory then goes back to the system at once."""
    arena = Arena(region=1)
    room = arena.empty((1 << 20,), torch.float32, once=True).fill_(3.0)
    ref, view = arena.put(room), room[5:]
    del room
    if is_read_first:
        arena.free(blocks_in([ref]))
        assert not arena.get(ref).any()
    else:
        del view
        assert arena.get(ref).eq(3.0).all()
    other = arena.put(torch.ones(1 << 20))
    assert other.content != ref.content
    if is_read_first:
        del view
    else:
        arena.free(blocks_in([ref]))
    assert arena.put(torch.ones(1 << 20)).content == ref.content
    arena.close()


def test_large_values_are_copied_as_torch_copies_them() -> None:
    values = torch.randn(600_000, 2, dtype=torch.complex64)
    given = [
        *(values, values.conj(), values.imag, values.conj().imag, values.T, values[:, 0], values[1:]),
        *(values.real.to(torch.bfloat16), values.real > 0, torch.nn.Parameter(values)),
    ]
    arena = Arena()
    for each in given:
        assert torch.equal(arena.get(arena.put(each)), each)
        into = torch.zeros_like(each, memory_format=torch.contiguous_format).detach()
        copy_values(into, each.detach())
        assert torch.equal(into, each)
        assert into._version == 1, "autograd knows of it"
    whole = torch.zeros(values.shape, dtype=torch.complex128)
    copy_values(whole, values)  # converted
    assert torch.equal(whole, values.to(torch.complex128))
    arena.close()


@pytest.mark.parametrize(
    ("dtype", "op", "num_threads"),
    [
        (torch.float32, "avg", 1),
        (torch.float32, "sum", 3),
        (torch.bfloat16, "avg", 3),
        (torch.int64, "max", 3),
    ],
)
def test_pieces_give_the_bits_of_the_whole(dtype: torch.dtype, op: str, num_threads: int) -> None:
    """Large tensors are reduced piece by piece, by several threads if torch has them, to the same bits."""
    generator = torch.Generator().manual_seed(3)
    tensors = [(torch.randn(900_001, generator=generator) * 9).to(dtype) for _ in range(3)]
    strided = [torch.stack([tensor, tensor], dim=1)[:, 0] for tensor in tensors]  # these go whole
    arena = Arena()
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        shared = reduce_tensors(tensors, op, arena.empty)
        with torch.inference_mode():
            assert torch.equal(shared, reduce_tensors(tensors, op)) or not shared.isfinite().all()
    finally:
        torch.set_num_threads(before)
    assert arena.put(shared).num_bytes == shared.nbytes
    assert torch.equal(shared.view(torch.uint8), reduce_tensors(strided, op).contiguous().view(torch.uint8))
    arena.close()
