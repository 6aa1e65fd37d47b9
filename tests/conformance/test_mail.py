"""Mailboxes and messages from anyone: their times, and their ends."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from worlds import star_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.gloo.messages import GlooMailboxes

TOPOLOGY = star_form("abcd", latency={"a": "10 ms", "b": "20 ms", "c": "30 ms", "d": "40 ms"})


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


@settings(max_examples=6, deadline=None)
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


class Turns:
    """A store of two members, whose calls take turns as drawn, then come as they like."""

    def __init__(self, turns: list[tuple[int, int]]) -> None:
        self.store, self.moved = torch.distributed.HashStore(), threading.Condition()
        self.turns = [member for member, count in turns for _ in range(count)]

    def of(self, member: int) -> Any:
        def is_next(name: str, key: Any) -> bool:
            if name == "get" and not self.store.check([key]):  # it waits for the other member
                while member in self.turns[:1]:
                    del self.turns[:1]
                    self.moved.notify_all()
                return False
            return not self.turns or self.turns[0] == member

        def call(name: str, *arguments: Any) -> Any:
            with self.moved:
                self.moved.wait_for(lambda: is_next(name, arguments[0]))
                del self.turns[:1]
                self.moved.notify_all()
                return getattr(self.store, name)(*arguments)

        return SimpleNamespace(**{name: partial(call, name) for name in ("add", "check", "get", "set")})

    def end(self) -> None:
        with self.moved:
            self.turns = []
            self.moved.notify_all()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 6)), max_size=14))
@example([(0, 5), (1, 4), (0, 4), (1, 4), (0, 4)])  # the server answers between two looks of the worker
def test_a_wait_over_gloo_ends_for_no_answer_that_is_on_its_way(turns: list[tuple[int, int]]) -> None:
    """In whatever order a worker and its server reach the store."""
    shared, got = Turns(turns), list[int]()
    worker, server = (
        GlooMailboxes(
            cast("Any", SimpleNamespace(member=member, size=2)), shared.of(member), cast("Any", None)
        )
        for member in range(2)
    )

    def serve() -> None:
        while letters := server.take("", math.inf):
            for source, _ in letters:
                server.put(torch.empty(0), source, "answers")
        server.end()
        shared.end()

    thread = threading.Thread(target=serve)
    thread.start()
    for _ in range(2):
        worker.put(torch.empty(0), 1, "")
        got.append(len(worker.take("answers", math.inf)))
    worker.end()
    shared.end()
    thread.join()
    assert got == [1, 1]
