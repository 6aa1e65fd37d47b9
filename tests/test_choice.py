"""`collectives: auto`: the chosen algorithms, and that every strategy and codec is charged for the best one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds import chain, chain_form, star, star_form

import netsim
from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy.parts.average import Averaging, Flight
from exogym_core.strategy.parts.codecs import codec_named
from netsim import Protocol, Topology, schedule
from netsim.collectives.choice import Choices, parse_collectives
from netsim.collectives.collective import lower_bound_seconds
from netsim.collectives.schedules.algorithms import ALGORITHMS
from netsim.collectives.start import time_collective

IDEAL, TCP, GLOO = (Protocol.parse(name) for name in ("ideal", "linux-tcp", "gloo"))
SIZES = st.integers(0, 36).map(lambda power: 1 << power)


def wan(num_regions: int = 4, hosts: int = 2, **more: Any) -> Topology:
    """Regions whose lines are all different."""
    names = [f"r{index}" for index in range(num_regions)]
    pairs = [(a, b) for a in range(num_regions) for b in range(a)]
    return Topology.from_mapping(
        {
            "name": "wan",
            "source": "test",
            "regions": {name: {"hosts": hosts, "nic": "10 Gbit/s", "latency": "50 us"} for name in names},
            "wan": [
                {
                    "between": [names[a], names[b]],
                    "bandwidth": f"{200 + 100 * ((3 * a + 5 * b) % 7)} Mbit/s",
                    "latency": f"{10 + 7 * ((a + b) % 4)} ms",
                }
                for a, b in pairs
            ],
            "protocol": "ideal",
            **more,
        }
    )


OFFERED = [name for name, row in ALGORITHMS["all_reduce"].items() if row.is_offered]


def seconds_of(topology: Topology, algorithm: str, num_bytes: int, protocol: Protocol = IDEAL) -> float:
    hosts = range(len(topology.hosts))
    made = schedule(
        "all_reduce", len(hosts), num_bytes=num_bytes, algorithm=algorithm, hosts=hosts, topology=topology
    )
    return time_collective(topology, protocol, made, hosts, repeat=2).seconds[-1]


@pytest.mark.parametrize(
    ("rate", "latency", "num_bytes"), [("50 Mbit/s", "40 ms", 13_000), ("1 Gbit/s", "15 ms", 14_000)]
)
def test_a_size_just_below_a_window_is_chosen_for_itself(rate: str, latency: str, num_bytes: int) -> None:
    """13 kB leave in TCP's first window, and the power of two next to them does not."""
    cities = Topology.from_mapping(star_form("abc", rate, latency, protocol="linux-tcp"))
    chosen = Choices(cities, TCP).algorithm("all_reduce", range(3), num_bytes)
    every = {name: seconds_of(cities, name, num_bytes, TCP) for name in OFFERED}
    assert every[chosen] == pytest.approx(min(every.values()), rel=1e-3)


def test_weather_and_the_traffic_of_others_do_not_choose() -> None:
    calm = wan()
    rough = wan(
        events=[{"at": "0 s", "link": ["r0", "r1"], "bandwidth": "1 kbit/s"}],
        background=[{"from": "r0.0", "to": "r2.0", "rate": "100 Mbit/s"}],
    )
    for num_bytes in (1 << 10, 1 << 24):
        chosen = [Choices(net, TCP).algorithm("all_reduce", range(8), num_bytes) for net in (calm, rough)]
        assert chosen[0] == chosen[1]


def nccl_of(card: str) -> Protocol:
    return Protocol.parse({"preset": "nccl-sockets", "card": card})


def test_under_gloo_it_is_gloos_own_unless_fixed() -> None:
    assert Choices(wan(), GLOO).algorithm("all_reduce", range(8), 1 << 20) == "gloo"
    fixed = Choices(wan(), GLOO, parse_collectives("ring"))
    assert fixed.algorithm("all_reduce", range(8), 1 << 20) == "ring"
    assert fixed.algorithm("broadcast", range(8), 1 << 20) == "gloo"


def test_under_nccl_sockets_it_is_nccls_choice() -> None:
    """Between sites a schedule in two levels is faster, which NCCL does not have; a ring can still be named."""
    nccl = Choices(wan(), Protocol.parse("nccl-sockets"))
    assert nccl.algorithm("all_reduce", range(8), 1 << 27) == "nccl-ring"
    assert nccl.algorithm("all_reduce", range(8), 8) == "nccl-tree"
    assert nccl.algorithm("broadcast", range(8), 1 << 20) == "nccl-ring"
    assert nccl.algorithm("all_to_all", range(8), 1 << 20) == "direct"
    assert Choices(wan(), nccl_of("100 Gbit/s")).algorithm("all_reduce", range(8), 1 << 15) == "nccl-tree"
    fixed = Choices(wan(), Protocol.parse("nccl-sockets"), parse_collectives("ring"))
    assert fixed.algorithm("all_reduce", range(8), 8) == "ring"
    assert Choices(wan(), TCP).algorithm("all_reduce", range(8), 1 << 27) == "two-level-direct"


def test_under_hivemind_every_peer_averages_a_part() -> None:
    hivemind = Choices(wan(), Protocol.parse("hivemind"))
    assert hivemind.algorithm("all_reduce", range(8), 1 << 27) == "direct"
    assert hivemind.algorithm("barrier", range(8), 0) == "dissemination"


def test_groups_that_no_algorithm_can_tell_apart_are_chosen_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of a thousand hosts talk to each other in turn: the memory holds one choice for all alike."""
    choices = Choices(star(40, "1 Gbit/s", "1 ms"), TCP)
    simulated = []

    def watched(net: Any, *arguments: Any, **options: Any) -> Any:
        simulated.append(net)
        return time_collective(net, *arguments, **options)

    monkeypatch.setattr("netsim.collectives.estimate.time_collective", watched)
    choices.algorithm("all_reduce", (0, 1), 1 << 20)
    once = len(simulated)
    for first in range(40):
        for second in range(40):
            if first != second:
                choices.algorithm("all_reduce", (first, second), 1 << 20)
    assert len(simulated) == once > 0


@pytest.mark.parametrize("protocol", [IDEAL, TCP], ids=lambda protocol: protocol.name)
def test_a_thousand_ranks_are_chosen_for_without_simulating_crowds(protocol: Protocol) -> None:
    """No schedule of a million messages is simulated, whatever the size."""
    topology = wan(4, 256)
    choices = Choices(topology, protocol)
    for num_bytes in (1 << 10, 1 << 30):
        assert choices.algorithm("all_reduce", range(1024), num_bytes) in (
            "tree",
            "two-level",
            "two-level-direct",
        )


def test_what_a_lossy_line_takes_does_not_grow_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loss is an event: of 40 GB only the first 256 MB are simulated, and time goes on in proportion."""
    simulated = []

    def watched(net: Topology, protocol: Protocol, made: Any, hosts: Any, **options: Any) -> Any:
        simulated.append(made.num_bytes)
        return time_collective(net, protocol, made, hosts, **options)

    monkeypatch.setattr("netsim.collectives.estimate.time_collective", watched)
    lossy = chain("ab", "1 Gbit/s", "20 ms", "0.1 %")
    assert Choices(lossy, TCP).algorithm("all_reduce", (0, 1), 40_000_000_000) != "tree"
    assert max(simulated) <= 256_000_000


def test_pieces_of_a_long_message_are_timed_on_a_lossy_line_too() -> None:
    """gloo's algorithm cuts large tensors into thousands of pieces, for which it was taken for lossless and chosen."""
    form = star_form("abc", "1 Gbit/s", "20 ms")
    home = {"between": ["home", "switch"], "up": "40 Mbit/s", "down": "300 Mbit/s", "latency": "5 ms"}
    form |= {"hosts": ["home", *"abc"], "links": [home | {"loss": "0.1 %"}, *form["links"]]}
    sites = Topology.from_mapping(form)
    # By gloo it takes three times as long.
    assert Choices(sites, TCP).algorithm("all_reduce", range(4), 500_000_000) == "direct"


# --- what ranks pay --------------------------------------------------------------------------------------------------


def reduced(comm: Communicator) -> float:
    return float(comm.all_reduce(torch.ones(50_000))[0])


def coded(name: str | None, collectives: Any) -> tuple[float, list[list[float]]]:
    def body(comm: Communicator) -> list[float]:
        flat = torch.linspace(-1, 1, 400_000) * (comm.rank + 1)
        flat[0] = comm.rank
        codec = codec_named(name) if name is not None else None
        return Flight(Averaging(codec).steps(comm, flat)).wait()[:4].tolist()

    run = run_ranks(body, 4, "wan-4-regions", protocol="linux-tcp", collectives=collectives)
    assert run.virtual_seconds is not None
    return run.virtual_seconds, run.results


def test_a_codec_saves_bytes_and_does_not_change_the_collective() -> None:
    """Half the bytes are at best half the seconds, on the same ways; so too where one algorithm is fixed."""
    for collectives in ("auto", "ring"):
        plain, _ = coded(None, collectives)
        half, _ = coded("bf16", collectives)
        assert 0.45 * plain < half < 1.05 * plain


def test_around_a_ring_sums_are_encoded_again_at_every_hop() -> None:
    _, rings = coded("bf16", "ring")
    _, straight = coded("bf16", "auto")
    assert rings[0] == rings[3]
    assert rings[0] == pytest.approx(straight[0], rel=0.02)
    assert rings[0][0] == pytest.approx(1.5)


def test_a_run_tells_that_a_window_limits_it() -> None:
    """1 Gbit/s over a round trip of 150 ms is 18 MB in flight, more than four windows of 4 MiB."""
    pair = chain_form("ab", "1 Gbit/s", "75 ms")

    def body(comm: Communicator) -> None:
        comm.all_reduce(torch.ones(4_000_000))

    limited = run_ranks(body, 2, pair, protocol="linux-tcp").window_limit
    assert limited.startswith("limited by the window from a to b")
    assert run_ranks(body, 2, pair).window_limit is None
    assert run_ranks(body, 2, pair, protocol={"preset": "linux-tcp", "streams": 8}).window_limit is None


# --- the bound -------------------------------------------------------------------------------------------------------


@given(
    num_bytes=SIZES,
    op=st.sampled_from(sorted(set(ALGORITHMS) - {"sendrecv"})),
    num_regions=st.integers(1, 4),
    hosts=st.integers(1, 3),
)
def test_the_bound_is_the_networks(num_bytes: int, op: str, num_regions: int, hosts: int) -> None:
    """It is one for all algorithms; laws of schedules hold that none beats it."""
    topology = wan(num_regions, hosts)
    members = range(num_regions * hosts)
    bounds = set()
    for algorithm in ALGORITHMS[op]:
        if algorithm == "gloo" and num_bytes > 1 << 24:
            continue  # many segments
        made = schedule(
            op, len(members), num_bytes=num_bytes, algorithm=algorithm, hosts=members, topology=topology
        )
        bounds.add(lower_bound_seconds(made, members, topology))
    assert len(bounds) == 1


def test_the_bound_is_reached_where_one_can_do_no_better() -> None:
    """Around equal links a ring of large tensors takes the bound, but for its latencies."""
    star = dataclasses.replace(wan(1, 6))
    made = schedule("all_reduce", 6, num_bytes=1 << 34, algorithm="ring")
    taken = time_collective(star, IDEAL, made, range(6)).seconds[0]
    assert taken == pytest.approx(lower_bound_seconds(made, range(6), star), rel=1e-3)


def test_auto_leaves_out_what_would_list_too_many_segments() -> None:
    assert netsim.collective("lan", "all_reduce", num_bytes=10**15).algorithm == "ring"
