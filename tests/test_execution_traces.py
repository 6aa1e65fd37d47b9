"""Chakra execution traces, read back by their own schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chakra_schema
import torch

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.workers.journal import Journal
from netgym.launch.chakra import ExecutionTraces
from netsim.network.trace import Span
from netsim.ranks import Call, Key, Post


def attributes(node: Any) -> dict[str, Any]:
    return {each.name: getattr(each, each.WhichOneof("value")) for each in node.attr}


def body(comm: Communicator) -> None:
    comm.advance(0.25)
    handle = comm.all_reduce(torch.zeros(300), async_op=True)
    comm.advance(0.5)
    handle.wait()
    comm.advance(1.0)
    if comm.rank < 2:
        (comm.isend if comm.rank == 0 else comm.irecv)(
            torch.zeros(7, dtype=torch.float64), 1 - comm.rank
        ).wait()
    comm.group([0, 2]).barrier() if comm.rank != 1 else None


def test_a_trace_has_what_was_computed_and_sent_and_what_waited_for_what(tmp_path: Path) -> None:
    traces = ExecutionTraces(3)
    run_ranks(body, 3, "two-datacenters", journal=Journal(on_request=traces.take))
    traces.write(tmp_path)
    read = [chakra_schema.read((tmp_path / f"chakra.{rank}.et").read_bytes()) for rank in range(3)]
    assert {metadata.version for metadata, _ in read} == {"0.0.4"}
    nodes = [(node.id, node.name, node.type, node.duration_micros) for node in read[0][1]]
    assert nodes == [
        (1, "compute", 4, 250_000),
        (2, "all_reduce", 7, 0),
        (3, "compute", 4, 500_000),
        (4, "compute", 4, 1_000_000),
        (5, "send", 5, 0),
        (6, "barrier", 7, 0),
    ]
    depends = [(list(node.ctrl_deps), list(node.data_deps)) for node in read[0][1]]
    assert depends == [([], []), ([1], []), ([1], []), ([3], [2]), ([4], []), ([4], [5])], (
        "overlap stays overlap"
    )
    _, reduced, _, _, sent, barrier = read[0][1]
    assert attributes(reduced) == {"comm_size": 1200, "comm_type": 0, "pg_name": "0", "is_cpu_op": False}
    assert attributes(sent)["comm_size"] == 56
    assert attributes(sent)["comm_dst"] == 1
    assert [node.name for node in read[1][1]][-1] == "recv"
    assert attributes(barrier)["comm_type"] == 9


def test_communication_has_its_durations(tmp_path: Path) -> None:
    """From the post to the end; of two calls that begin together each has its own, whichever ends first."""
    now = [1.0]
    traces = ExecutionTraces(1, now=lambda: now[0])
    calls = [("all_reduce", 8), ("all_reduce", 4), ("all_reduce", 4), ("barrier", 0), ("all_reduce", 4)]
    for number, (op, num_bytes) in enumerate(calls):
        now[0] = 1.0 if number < 2 else float(number)
        traces.take(0, Post(Key(0, number), 0, Call(op, (0, 1), num_bytes)))
    spans = [
        Span(0, "communication", "all_reduce", 1.0, 1.25, 4),
        Span(0, "communication", "all_reduce", 1.0, 3.0, 8),
        Span(0, "wait", "barrier", 3.0, 9.0),
        Span(0, "communication", "all_reduce", 4.0, 4.125, 4),
        Span(0, "communication", "barrier", 3.0, 3.5, 0),
        Span(1, "communication", "barrier", 3.0, 7.0, 0),
    ]
    traces.add_times(spans)
    traces.write(tmp_path)
    _, nodes = chakra_schema.read((tmp_path / "chakra.0.et").read_bytes())
    durations = [node.duration_micros for node in nodes]
    assert durations == [2_000_000, 250_000, 0, 500_000, 125_000], "the third has ended undone"
