"""Deadlocks in any weather: endless weather keeps no stuck run alive; a link that comes back does."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from worlds import chain, star_form, use_sources

from exogym_core.communicator import Communicator, run_ranks
from netsim.errors import DeadlockError
from netsim.transfers import time_flows

LINE = ["c", "switch"]
ENDLESS: dict[str, dict[str, Any]] = {
    "lognormal": {"drift": [{"link": LINE, "kind": "lognormal", "every": "10 s", "sigma": 0.3}]},
    "regime": {"drift": [{"link": LINE, "kind": "regime", "every": "10 s", "levels": ["100 %", "50 %"]}]},
    "steady": {"background": [{"from": "d", "to": "c", "rate": "1 Mbit/s"}]},
    "bursts": {"background": [{"from": "d", "to": "c", "bytes": 10_000, "every": "3 s"}]},
}
WEATHERS = pytest.mark.parametrize("weather", list(ENDLESS))
PROTOCOLS = pytest.mark.parametrize("protocol", ["ideal", "linux-tcp"])


star = partial(star_form, "abcd")


@PROTOCOLS
@WEATHERS
def test_a_server_ends_when_its_last_client_has_whatever_the_weather(weather: str, protocol: str) -> None:
    """It learns that no letter can come at the very instant from which that is so, and not at a turn of weather."""

    def body(comm: Communicator) -> float:
        if comm.rank == 0:
            while comm.take(wait=math.inf):
                pass
            return comm.now()
        comm.advance(1.3 * comm.rank)
        comm.put(torch.zeros(1000), 0)
        return 0.0

    calm = run_ranks(body, 2, star(), protocol=protocol, placement=["a", "b"]).results[0]
    assert 1.3 < calm < 1.5
    assert (
        run_ranks(body, 2, star(**ENDLESS[weather]), protocol=protocol, placement=["a", "b"]).results[0]
        == calm
    )


@WEATHERS
def test_a_lost_message_is_reported_with_all_waits(weather: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a transfer ever be forgotten by mistake, the run ends with a table instead of never."""
    monkeypatch.setattr(use_sources(monkeypatch).Collective, "_send", lambda self, *args: None)

    def body(comm: Communicator) -> None:
        if comm.rank < 2:
            comm.group([0, 1]).all_reduce(torch.zeros(250_000))

    with pytest.raises(DeadlockError) as error:
        run_ranks(body, 3, star(**ENDLESS[weather]), protocol="linux-tcp", collectives="ring")
    assert str(error.value).splitlines() == [
        "deadlock: rank 0 in all_reduce, rank 1 in all_reduce wait for an event that cannot happen",
        "  rank 0: in all_reduce: ranks 0, 1; all have come",
        "  rank 1: in all_reduce: ranks 0, 1; all have come",
    ]


@PROTOCOLS
@WEATHERS
def test_a_link_that_comes_back_by_its_trace_is_hope(weather: str, protocol: str) -> None:
    trace = [{"link": ["a", "switch"], "bandwidth": [["0 s", "0 bit/s"], ["500 s", "8 Mbit/s"]]}]

    def body(comm: Communicator) -> None:
        if comm.rank < 2:
            comm.group([0, 1]).all_reduce(torch.zeros(1000))

    run = run_ranks(body, 3, star(traces=trace, **ENDLESS[weather]), protocol=protocol)
    assert 500.0 < run.virtual_seconds < 503.0


def test_acknowledgements_never_take_all_of_a_narrow_way_back() -> None:
    """Those of steady traffic at 900 Mbit/s filled a way back of 10 Mbit/s: what was sent there never arrived."""
    link = {"between": ["a", "b"], "up": "10 Mbit/s", "down": "1 Gbit/s", "latency": "10 ms"}
    background = [{"from": "b", "to": "a", "rate": "900 Mbit/s"}]
    topology = chain(links=[link], background=background)
    (finish,) = time_flows(topology, [(1.0, "a", "b", 1e6)], "linux-tcp")
    assert 1.8 < finish < 3.0
