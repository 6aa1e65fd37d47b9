"""Damaged lists of flows and traces: CSV that anybody may write."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from drawn_damage import Choices, damaged_text, flow
from fuzzed_folder import FOLDER, accepted

from netsim import Topology
from netsim.errors import DeadlockError
from netsim.transfers import read_flows, time_flows

__all__ = ["TRACE", "flows", "runs", "traces"]

TRACE = b"start_s,latency_s\n0,0.01\n5,0.02\n7.5,1e-3\n"
_NET = {
    "hosts": {"a": {}, "b": {}, "7": {}, "été": {}},
    "links": [
        {"between": [one, other], "bandwidth": "8 Mbit/s", "latency": "1 ms"}
        for one, other in (("a", "b"), ("b", "7"), ("7", "été"))
    ],
}
_FLOWS = b"start_s,src,dst,bytes,note\n0,a,b,1000,x\n0.5,b,7,1e6,\n1.25,a,7,0,y\n2,7,a,12345.5,z\n"
_CELLS = [
    b"nan",
    b"inf",
    b"-1",
    b"1e400",
    b"1e300",
    b"",
    b",",
    b'"',
    b"\n",
    b"\r",
    b"\0",
    b"a",
    b"0",
    b"7",
    b"\xff",
]
_CELLS += [b"1_0", b"1e-300", b"\xef\xbb\xbf", b"finish_s", b"bytes", b"999", "\u0661".encode(), b"\x1b[2J"]
_RATES = b"start_s,bits_per_second\n0,1000000\n5,2e6\n7.5,0\n20,3e6\n"


def _csv_reader(read: Callable[[bytes, int], bool], texts: list[bytes]) -> Callable[[bytes], bool]:
    def one(data: bytes) -> bool:
        choices = Choices(data)
        kind, use = choices.below(4), choices.below(256)
        text = choices.pick(texts)
        return read(choices.rest() if kind == 0 else damaged_text(choices, text, _CELLS), use)

    return one


def _flows(data: bytes, use: int) -> bool:
    path = FOLDER.write("flows.csv", data)
    net = _net()
    table = accepted(path, lambda: read_flows(path, net))
    if table is not None and use % 4 == 0 and len(table.flows) <= 50:
        ends = time_flows(net, table.flows)
        assert all(end >= flow.start_seconds for end, flow in zip(ends.tolist(), table.flows, strict=True))
    return table is not None


@functools.cache
def _net() -> Topology:
    return Topology.from_mapping(_NET)


def _traces(data: bytes, use: int) -> bool:
    path = FOLDER.write("trace.csv", data)
    quantity = ("bandwidth", "latency")[use % 2]
    trace = {"link": ["a", "b"], quantity: path.name}
    net = FOLDER.write("traced.yaml", flow({**_NET, "traces": [trace]}).encode())
    found: Topology | None = accepted(net, lambda: Topology.load(net))
    if found is not None and use % 8 == 4:
        runs(found)
    return found is not None


def runs(topology: Topology) -> None:
    """Use it: two transfers over it end, or never can."""
    last = len(topology.hosts) - 1
    try:
        ends = accepted(None, lambda: time_flows(topology, [(0.0, 0, last, 1000.0), (0.5, last, 0, 0.0)]))
    except DeadlockError:
        return
    assert ends is None or all(0 < end <= math.inf for end in ends.tolist())


flows = _csv_reader(_flows, [_FLOWS])
traces = _csv_reader(_traces, [_RATES, TRACE])
