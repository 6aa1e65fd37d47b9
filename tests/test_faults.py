"""Faults and weather: effects on transfers, to the instant; deadlocks are reported."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from worlds import star

import netsim
from netsim import Background, Clock, Drift, Faults, HostEvent, Network, Topology
from netsim.errors import DeadlockError
from netsim.transfers import time_flows
from netsim.weather.faults import drift_factors

MEGABYTE = 1_000_000
A, B, C = range(3)


def both(name: str, **event: Any) -> dict[str, Any]:
    return {"link": [name, "switch"], **event}


def finish(topology: Topology, *flows: tuple[float, str, str, float], protocol: str = "ideal") -> list[float]:
    return [round(each, 9) for each in time_flows(topology, flows, protocol).tolist()]


ONE = (0.0, "a", "b", MEGABYTE)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([both("a", at="0.52 s", down=True), both("a", at="3 s", up=True)], 3.5),
        ([both("b", at="0.52 s", down=True, **{"for": "1 s"})], 2.02),
        ([both("b", at="0.52 s", down=True, direction="down")], None),
        ([both("b", at="0.52 s", down=True, direction="up")], 1.02),
        ([both("a", at="0.52 s", bandwidth="4 Mbit/s")], 1.52),
        ([both("a", at="0.52 s", bandwidth="4 Mbit/s", **{"for": "500 ms"})], 1.27),
        ([both("a", at="0.52 s", bandwidth="0 bit/s", **{"for": "500 ms"})], 1.52),
        ([both("a", at="0 s", latency="1 s")], 2.01),
        ([both("a", at="0 s", down=True), both("a", at="1 s", up=True)], 2.02),
        ([{"host": "c", "at": "0.5 s", "crash": True}], 1.02),
        # Two causes: the link is back when neither keeps it down; the later of two values stands.
        ([both("a", at="0.52 s", down=True, **{"for": "1 s"}), both("a", at="1 s", down=True, **{"for": "2 s"})], 3.5),
        (
            [
                both("a", at="0.02 s", bandwidth="4 Mbit/s", **{"for": "500 ms"}),
                both("a", at="0.27 s", bandwidth="2 Mbit/s", **{"for": "10 s"}),
            ],
            3.77,
        ),
    ],
)  # fmt: skip
def test_events_reach_a_transfer_in_flight(events: list[dict[str, Any]], expected: float | None) -> None:
    topology = star(events=events)
    if expected is None:
        with pytest.raises(DeadlockError):
            finish(topology, ONE)
    else:
        assert finish(topology, ONE) == [expected]


def test_weather_after_the_end_is_named() -> None:
    events = [both("a", at="1 h", latency="20 ms"), {"host": "c", "at": "2 h", "crash": True}]
    background = [{"from": "a", "to": "b", "rate": "1 Mbit/s", "start": "0.9 h"}]
    traces = [{"link": ["b", "switch"], "bandwidth": [["1.5 h", "1 Mbit/s"]]}]
    world = star(events=events, background=background, traces=traces)
    late = "traffic from a to b at 54 min, event of link a-switch at 1 h, trace of link b-switch at 1 h 30 min, 1 more"
    assert netsim.flows(world, [ONE]).later_weather == late
    assert netsim.collective(world, "barrier").later_weather == late
    assert netsim.flows(world, [ONE, (3599.0, "a", "b", 1)]).later_weather == (
        "event of link a-switch at 1 h, trace of link b-switch at 1 h 30 min, crash of host c at 2 h"
    )
    assert netsim.flows(world, [(3600.0 * 2, "a", "b", 0)]).later_weather is None


def test_traces_are_piecewise_constant() -> None:
    rows = [["0 s", "16 Mbit/s"], ["0.27 s", "2 Mbit/s"], ["1.27 s", "8 Mbit/s"]]
    assert finish(star(traces=[both("a", bandwidth=rows)]), ONE) == [1.77]  # the other link stays at 8 Mbit/s
    slow = star(traces=[both("a", latency=[["1 s", "110 ms"]])])
    assert finish(slow, ONE, (1.5, "a", "c", 0)) == [1.02, 1.62]


def test_nothing_crosses_a_dead_link_not_even_an_empty_message() -> None:
    topology = star(events=[both("a", at="0 s", down=True, **{"for": "2 s"})])
    for protocol in ("ideal", "linux-tcp", "gloo"):
        (arrival,) = finish(topology, (0.5, "a", "b", 0), protocol=protocol)
        assert arrival == pytest.approx(2.0204 if protocol == "gloo" else 2.02, abs=1e-3)  # it leaves at 2 s


# -- background and drift ------------------------------------------------------------------------------------


def test_background_takes_its_rate_and_no_more_than_its_share() -> None:
    def with_rate(rate: str, **more: Any) -> float:
        return finish(star(background=[{"from": "a", "to": "c", "rate": rate, **more}]), ONE)[0]

    assert with_rate("2 Mbit/s") == pytest.approx(0.02 + 8 / 6)
    assert with_rate("100 Mbit/s") == pytest.approx(0.02 + 2)
    assert with_rate("4 Mbit/s", stop="500 ms") == pytest.approx(0.02 + 1 + 0.24)
    assert with_rate("4 Mbit/s", start="5 s") == pytest.approx(1.02)


def test_background_transfers_every_so_often() -> None:
    traffic = [{"from": "a", "to": "c", "bytes": 100_000, "every": "500 ms"}]
    # Three of them begin before it is through, at 0, 0.5 and 1 s, and each takes 0.1 s of the link from it.
    assert finish(star(background=traffic), ONE) == [pytest.approx(1.32)]


def test_background_does_not_pile_up() -> None:
    """More than a link carries, and more than can wait for a dead one: at most 100 transfers go at once."""
    clock = Clock()
    network = Network(clock, star(events=[both("c", at="600 s", down=True, **{"for": "500 s"})]))
    faults = Faults(network)
    faults.add(Background(from_="a", to="c", bytes=MEGABYTE, every=0.125, stop=1000.0))
    clock.run(until=400)
    assert network.num_in_flight == 100
    one = clock.now
    clock.run(network.transfer(A, C, MEGABYTE))
    assert clock.now - one == pytest.approx(0.02 + 101, rel=0.02)
    clock.run(until=1000.5)
    assert network.num_in_flight == 100
    clock.run(until=1200)
    assert network.num_in_flight == 0


def test_drift_has_mean_1_and_depends_on_seed_and_link_alone() -> None:
    drift = Drift(link=("a", "s"), kind="lognormal", every=0.5, sigma=0.4, seed=3)
    drawn = list(itertools.islice(drift_factors(drift, "a->s"), 4000))
    assert [instant for instant, _ in drawn[:3]] == [0.0, 0.5, 1.0]
    assert np.mean([factor for _, factor in drawn]) == pytest.approx(1.0, abs=0.02)
    again = list(itertools.islice(drift_factors(drift, "a->s"), 4000))
    assert drawn == again
    assert drawn != list(itertools.islice(drift_factors(drift, "b->s"), 4000))
    other = Drift(link=("a", "s"), kind="lognormal", every=0.5, sigma=0.4, seed=4)
    assert drawn != list(itertools.islice(drift_factors(other, "a->s"), 4000))


def test_regimes_hold_for_an_exponential_time_and_always_change() -> None:
    drift = Drift(link=("a", "s"), kind="regime", every=2.0, levels=(1.0, 0.3, 0.0))
    drawn = list(itertools.islice(drift_factors(drift, "a->s"), 3000))
    assert drawn[0] == (0.0, 1.0)
    assert all(one[1] != other[1] for one, other in itertools.pairwise(drawn))
    holds = np.diff([instant for instant, _ in drawn])
    assert holds.mean() == pytest.approx(2.0, rel=0.1)
    assert np.std(holds) == pytest.approx(2.0, rel=0.1)


def test_weather_is_the_same_whatever_else_goes_on() -> None:
    """One transfer on links of its own meets the same weather alone and among others."""
    drift = {"kind": "lognormal", "every": "100 ms", "sigma": 0.5}
    weather = {"drift": [both(name, **drift) for name in "abc"]}
    alone = finish(star(**weather), ONE)
    among = finish(star(**weather), ONE, (0.0, "b", "c", MEGABYTE), (0.3, "c", "a", MEGABYTE))
    assert among[0] == alone[0]
    reversed_keys = {"drift": weather["drift"][::-1]}
    assert finish(star(**reversed_keys), ONE) == alone


# -- hosts ---------------------------------------------------------------------------------------------------


def test_a_crash_drops_what_is_in_flight_and_holds_what_is_sent_later() -> None:
    topology = star(events=[{"host": "b", "at": "0.52 s", "crash": True, "for": "2 s"}])
    flows = [ONE, (0.0, "b", "c", MEGABYTE), (0.6, "a", "b", MEGABYTE), (0.6, "a", "c", MEGABYTE)]
    assert finish(topology, *flows) == [math.inf, math.inf, 3.54, 1.62]


@pytest.mark.parametrize("protocol", ["ideal", "linux-tcp", "gloo"])
@pytest.mark.parametrize("num_bytes", [0, MEGABYTE])
def test_what_has_come_through_at_the_instant_of_a_crash_is_not_sent_again(
    protocol: str, num_bytes: int
) -> None:
    """The last byte comes at the very instant: the message is there, its bytes are counted once, none is dropped."""
    clock = Clock()
    network = Network(clock, star(), protocol)
    clock.run(network.transfer(A, B, num_bytes))
    end = clock.now
    clock = Clock()
    network = Network(clock, star(), protocol)
    Faults(network).add(HostEvent(at=end, host="b", crash=True, for_=4.98))
    done = network.transfer(A, B, num_bytes)
    network.send(A, B, MEGABYTE, lambda: None)  # right behind it: nothing of it has moved, and all is dropped
    clock.run(done)
    assert clock.now == end
    assert network.dropped_bytes == MEGABYTE
    assert network.link_bytes.max() == pytest.approx(num_bytes)


# -- TCP gives up --------------------------------------------------------------------------------------------

GIVES_UP = 924.6


def out_of_order(seconds: float) -> Topology:
    return star(events=[both("b", at="0.5 s", down=True, **{"for": f"{seconds} s"})])


@pytest.mark.parametrize("protocol", ["linux-tcp", "gloo"])
def test_tcp_gives_up_on_a_link_that_is_dead_for_too_long(protocol: str) -> None:
    topology = out_of_order(1000)
    with pytest.raises(DeadlockError) as error:
        finish(topology, ONE, protocol=protocol)
    assert str(error.value) == (
        f"link b->switch, link switch->b went dead at 0.5 s and stayed so for longer than {protocol} waits (924.6 s), "
        "and transfer 1 (a to b, 1000000 bytes) can never arrive: let an event bring it back"
    )
    assert finish(topology, (0.0, "a", "c", MEGABYTE), (2000.0, "a", "b", 1.0), protocol=protocol)
    assert finish(topology, ONE, protocol="ideal") == [1001.02]
    assert 1 + GIVES_UP - 1 < finish(out_of_order(GIVES_UP), ONE, protocol=protocol)[0] < GIVES_UP + 1.5


def test_tcp_gives_up_when_it_has_tried_for_long_enough_itself() -> None:
    topology = out_of_order(1000)
    assert finish(topology, (100.0, "a", "b", MEGABYTE), protocol="linux-tcp")[0] == pytest.approx(
        1001.6, abs=0.1
    )
    with pytest.raises(DeadlockError, match=r"went dead at 0.5 s and stayed so"):
        finish(topology, (75.0, "a", "b", MEGABYTE), protocol="linux-tcp")


def test_a_host_that_is_away_for_too_long_is_given_up() -> None:
    topology = star(events=[{"host": "b", "at": "0.1 s", "crash": True, "for": "1000 s"}])
    message = r"^host b crashed at 0.1 s and stayed so for longer than linux-tcp waits \(924.6 s\), and transfer 1 \(a"
    with pytest.raises(DeadlockError, match=message):
        finish(topology, (0.5, "a", "b", 1.0), protocol="linux-tcp")


def test_background_that_is_given_up_is_lost_and_counted() -> None:
    clock = Clock()
    network = Network(clock, out_of_order(1000), "linux-tcp")
    faults = Faults(network)
    faults.add(Background(from_="a", to="b", bytes=MEGABYTE, every=50.0, stop=50.0))
    clock.run(until=2000)
    assert network.num_in_flight == 0
    assert network.link_bytes.max() + network.dropped_bytes == pytest.approx(MEGABYTE)
    assert network.link_bytes.max() < MEGABYTE / 2
