"""Messages that come when they come, over every transport: mailboxes, anyone's message, receives taken back."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from conformance_cases import SIMULATED, TRANSPORTS, run
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import star_form

from exogym_core.communicator import Communicator, run_ranks
from netsim.errors import DeadlockError, InputError, MismatchError

TOPOLOGY = star_form("abcd", latency={"a": "10 ms", "b": "20 ms", "c": "30 ms", "d": "40 ms"})


def serve(comm: Communicator) -> list[tuple[int, float]]:
    """Double each message, until no rank can send any more."""
    log = []
    while letters := comm.take(wait=math.inf):
        for source, tensor in letters:
            log.append((source, tensor[0].item()))
            comm.put(2 * tensor, source, "answers")
    return log


def ask(comm: Communicator, num_letters: int = 3) -> list[list[float]]:
    """Sends numbers to the server and polls for each answer."""
    got: list[list[float]] = []
    for number in range(num_letters):
        comm.advance(0.1 * comm.rank)
        comm.put(torch.tensor([100.0 * comm.rank + number, 1.0]), 0)
        while not (letters := comm.take("answers")):
            comm.advance(0.01)
            if comm.transport == "gloo":
                time.sleep(0.001)
        got += [tensor.tolist() for _, tensor in letters]
    return got


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_come_on_the_rank_s_device(transport: str) -> None:
    """Whatever carries them: a message from a checkpoint, or by a socket, was on the CPU."""

    def body(comm: Communicator) -> list[str]:
        pair = comm.group([0, 1])
        if comm.rank == 1:
            comm.put(torch.ones(3), 0)
            return []
        pair.device = torch.device("meta")
        return [tensor.device.type for _, tensor in comm.take(wait=math.inf)]

    assert run(transport, body, 2).results[0] == ["meta"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_and_workers_that_poll(transport: str) -> None:
    """Each worker's messages arrive in order and are answered; the server learns that all workers have ended."""

    def body(comm: Communicator) -> object:
        return serve(comm) if comm.rank == 0 else ask(comm)

    log, *answers = run(transport, body, 3).results
    assert answers == [[[2 * (100.0 * rank + k), 2.0] for k in range(3)] for rank in (1, 2)]
    for rank in (1, 2):
        assert [value for source, value in log if source == rank] == [100.0 * rank + k for k in range(3)]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="looks for a stopped process")
def test_a_message_over_gloo_waits_for_none_of_another_sender() -> None:
    """Rank 1 stops in the middle of its message: rank 2's, which is announced later, is there before it."""
    large = torch.ones(2_000_000)

    def is_stopped(pid: int) -> bool:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T"

    def body(comm: Communicator) -> list[int]:
        pids = comm.all_gather_object(os.getpid())
        if comm.rank == 1:
            comm.put(large, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
        while comm.rank != 1 and not is_stopped(pids[1]):
            time.sleep(0.001)
        if comm.rank == 2:
            comm.put(torch.ones(1), 0)
        sources: list[int] = []
        while comm.rank == 0 and len(sources) < 2:
            sources += [source for source, _ in comm.take(wait=math.inf)]
            os.kill(pids[1], signal.SIGCONT)
        return sources

    assert run_ranks(body, 3, transport="gloo").results[0] == [2, 1]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_dtype_and_shape_travels_also_to_oneself(transport: str) -> None:
    sent = [
        torch.arange(6, dtype=torch.int64).view(2, 3),
        torch.zeros(0),
        torch.tensor(2.5, dtype=torch.float16),
    ]

    def body(comm: Communicator) -> list[tuple[int, torch.Tensor]]:
        for tensor in sent:
            comm.put(tensor, comm.rank, "own")
            comm.put(tensor, (comm.rank + 1) % comm.world_size, "next")
        comm.barrier()
        comm.barrier()
        got = comm.take("own", wait=5.0)
        while len(got) < 6:
            got += comm.take("next", wait=5.0)
        return got

    for rank, letters in enumerate(run(transport, body, 2).results):
        assert [source for source, _ in letters] == [rank] * 3 + [1 - rank] * 3
        for (_, tensor), original in zip(letters, sent * 2, strict=True):
            assert tensor.dtype == original.dtype
            assert torch.equal(tensor, original)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_receive_from_anyone_returns_the_rank(transport: str) -> None:
    def body(comm: Communicator) -> object:
        tensor = torch.zeros(2)
        if comm.rank:
            for number in range(2):
                comm.advance(0.5 + 0.5 * comm.rank)
                comm.send(torch.full((2,), 10.0 * comm.rank + number), 0)
            return None
        return [(comm.recv(tensor), tensor[0].item()) for _ in range(4)]

    got = run(transport, body, 3).results[0]
    assert sorted(got) == [(1, 10.0), (1, 11.0), (2, 20.0), (2, 21.0)]
    if transport in SIMULATED:  # in order of virtual time: at 1, 1.5, 2 and 3 s
        assert [rank for rank, _ in got] == [1, 2, 1, 2]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_cancelled_receive_leaves_its_message_to_the_next(transport: str) -> None:
    def body(comm: Communicator) -> object:
        tensor = torch.zeros(2)
        if comm.rank:
            comm.recv(torch.zeros(1), 0)
            comm.advance(5.0)
            comm.send(torch.full((2,), 7.0), 0)
            return None
        handle = comm.irecv(torch.zeros(2), 1)
        cancelled = handle.cancel()
        comm.send(torch.zeros(1), 1)
        return cancelled, comm.recv(tensor, 1).tolist()

    assert run(transport, body, 2).results[0] == (True, [7.0, 7.0])


@pytest.mark.parametrize("transport", SIMULATED)
def test_what_has_been_sent_is_not_cancelled(transport: str) -> None:
    def body(comm: Communicator) -> object:
        tensor = torch.zeros(1)
        if comm.rank:
            handle = comm.isend(torch.ones(1), 0)
            return handle.cancel(), handle.wait()
        handle = comm.irecv(tensor, 1)
        comm.advance(1.0)
        return handle.cancel(), handle.wait().item()

    assert run(transport, body, 2).results == [(False, 1.0), (False, None)]


def test_a_letter_takes_the_network_as_long_as_a_message() -> None:
    """10 kB from a to b at 8 Mbit/s over 10 + 20 ms, ideal: 40 ms; the sender does not wait."""

    def body(comm: Communicator) -> float:
        if comm.rank == 0:
            comm.put(torch.zeros(10_000, dtype=torch.uint8), 1)
        else:
            assert len(comm.take(wait=math.inf)) == 1
        return comm.now()

    run = run_ranks(body, 2, topology=TOPOLOGY)
    assert run.results == [0.0, pytest.approx(0.04, abs=2e-9)]
    assert run.results[1] >= 0.04


def test_waiting_for_a_letter_that_is_under_way_is_the_networks_time() -> None:
    """Rank 1 waits half a second for rank 0 to compute, then 40 ms for what it has sent."""

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.advance(0.5)
            comm.put(torch.zeros(10_000, dtype=torch.uint8), 1)
        else:
            comm.take(wait=math.inf)

    run = run_ranks(body, 2, topology=TOPOLOGY)
    assert run.exposed_seconds[1] == pytest.approx(0.54, abs=1e-6)
    assert run.network_seconds[1] == pytest.approx(0.04, abs=1e-6)


def test_waiting_ends_at_its_time() -> None:
    def body(comm: Communicator) -> tuple[int, float]:
        if comm.rank == 0:
            comm.advance(1.0)
            comm.put(torch.zeros(1), 1)
            return 0, comm.now()
        letters = comm.take(wait=0.25)
        return len(letters), comm.now()

    assert run_ranks(body, 2, topology=TOPOLOGY).results == [(0, 1.0), (0, 0.25)]


def test_servers_of_servers_end_one_after_the_other() -> None:
    """Ranks 0 and 1 serve; when the worker has ended, 0 sends 1 a last message, and then no rank waits for ever."""

    def body(comm: Communicator) -> list[int]:
        if comm.rank == 2:
            comm.put(torch.ones(1), 0)
            return []
        log = []
        while letters := comm.take(wait=math.inf):
            log += [source for source, _ in letters]
        if comm.rank == 0:
            comm.put(torch.ones(1), 1)
        return log

    assert run_ranks(body, 3, topology=TOPOLOGY).results == [[2], [0], []]


@settings(max_examples=15, deadline=None)
@given(
    plans=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 3000)), max_size=6),
        min_size=4,
        max_size=4,
    )
)
def test_every_letter_arrives_once_in_its_senders_order(
    plans: list[list[tuple[int, int, int]]],
) -> None:
    """Whatever ranks put, whenever: none is lost or doubled, and threads and processes see the same instants."""

    def body(comm: Communicator) -> list[tuple[float, int, int]]:
        got: list[tuple[float, int, int]] = []
        for number, (dst, hundredths, size) in enumerate(plans[comm.rank]):
            comm.advance(hundredths / 100)
            comm.put(torch.full((size + 1,), number, dtype=torch.int64), dst)
            got += [(comm.now(), source, int(tensor[0])) for source, tensor in comm.take()]
        while letters := comm.take(wait=math.inf):
            got += [(comm.now(), source, int(tensor[0])) for source, tensor in letters]
        return got

    results = run_ranks(body, 4, topology=TOPOLOGY).results
    for rank, got in enumerate(results):
        for source in range(4):
            sent = [number for number, (dst, _, _) in enumerate(plans[source]) if dst == rank]
            assert [number for _, peer, number in got if peer == source] == sent
    again = run_ranks(body, 4, topology=TOPOLOGY, workers={"kind": "processes", "processes": 2})
    assert again.results == results


def test_mistakes_are_one_line() -> None:
    def message(body: object, error: type[Exception]) -> str:
        with pytest.raises(error) as caught:
            run_ranks(body, 2, topology=TOPOLOGY)  # type: ignore[arg-type]
        return str(caught.value).partition("\n")[0]

    def negative(comm: Communicator) -> None:
        comm.take(wait=-1)

    def collective(comm: Communicator) -> None:
        handle = comm.all_reduce(torch.ones(1), async_op=True)
        try:
            handle.cancel()
        finally:
            handle.wait()

    def nobody(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.recv(torch.zeros(1))

    def shapes(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.recv(torch.zeros(1))
        else:
            comm.send(torch.zeros(2), 0)

    assert "take: wait=-1; give seconds from 0 up, or math.inf" in message(negative, InputError)
    assert "cancel: all_reduce(float32[1], op=sum)" in message(collective, InputError)
    assert "rank 0 in firstsent" in message(nobody, DeadlockError)
    assert "rank 1 called send(float32[2])" in message(shapes, MismatchError)
