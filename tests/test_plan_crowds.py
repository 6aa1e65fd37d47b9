"""Plans of very many workers: extrapolated times equal those of all messages."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from exogym_core.cost.compute import Compute
from exogym_core.strategy import build_strategy
from netgym.planning.advise import advise
from netgym.planning.measure import Measured, Setting, measure
from netgym.planning.models import planned_model
from netgym.planning.setting import Known, with_links
from netsim import Protocol, Topology
from netsim.collectives import estimate
from netsim.collectives.estimate import Estimator
from netsim.errors import InputError


def homes(number: int, **more: Any) -> Setting:
    """No two alike: uploads of 10 to 100 Mbit/s, downloads of 100 to 1,000, and 3 to 60 ms."""
    rates = [10 + 90 * (0.61803 * i % 1) for i in range(number)]
    links = [
        {
            "between": [f"h{i}", "net"],
            "up": f"{rate:.5f} Mbit/s",
            "down": f"{100 + 900 * (0.41421 * i % 1):.5f} Mbit/s",
            "latency": f"{3 + 57 * (0.73205 * i % 1):.5f} ms",
        }
        for i, rate in enumerate(rates)
    ]
    network = {
        "hosts": {f"h{i}": {} for i in range(number)},
        "routers": ["net"],
        "links": links,
        "protocol": "ideal",
    }
    model = planned_model("llama-2m", 32)
    return Setting(model, Topology.from_mapping(network), Compute.parse("1 s"), number, 2, 1e6, **more)


@pytest.mark.parametrize(
    "protocol", ["ideal", "linux-tcp", {"preset": "linux-tcp", "window": "64 KiB"}], ids=str
)
def test_a_crowd_takes_what_its_busiest_link_takes(protocol: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty-four homes that send codes to each other: seconds to two hundredths, and every link's bytes."""
    where = homes(24, protocol=protocol)
    strategy = build_strategy("DiLoCo", H=2, codec="int8")
    whole = Measured(strategy, where)
    monkeypatch.setattr(estimate, "_MOST_WHOLE", 300)
    monkeypatch.setattr(estimate, "_MOST_UNLIKE", 300)
    reckoned = Measured(strategy, homes(24, protocol=protocol))
    assert reckoned.plan.seconds_per_round == pytest.approx(whole.plan.seconds_per_round, rel=0.02)
    assert reckoned.plan.wan_bytes == whole.plan.wan_bytes
    assert reckoned.figures.link_bytes == pytest.approx(whole.figures.link_bytes)
    assert any("busiest link" in remark for remark in reckoned.plan.remarks)


def test_a_crowd_begins_as_its_members_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the narrowest line messages of a home with a fast device are early."""
    where = homes(24, protocol="linux-tcp")
    narrow = with_links(where.topology, lambda link: replace(link, bits_per_second=link.bits_per_second / 10))
    hosts = tuple(replace(host, device="rtx-2080-ti" if host.index % 2 else "a100") for host in narrow.hosts)
    network = replace(narrow, hosts=hosts)
    where = replace(where, topology=network, compute=Compute.parse("flops"), batch_size=25_000)
    strategy = build_strategy("DiLoCo", H=2, codec="int8")
    whole = measure(strategy, where)
    monkeypatch.setattr(estimate, "_MOST_UNLIKE", 300)
    reckoned = measure(strategy, replace(where, known=Known()))
    computing = [2 * each.mean_seconds for each in where.durations()]
    assert computing[1] - computing[0] > 0.05 * whole.seconds_per_round
    assert reckoned.seconds_per_round == pytest.approx(whole.seconds_per_round, rel=0.02)
    assert any("busiest link" in remark for remark in reckoned.remarks)


def test_messages_of_like_hosts_are_simulated_whole() -> None:
    """Of 48 workers in four regions all messages between two regions end together, which costs little."""
    regions, unlike = Topology.load("wan-4-regions"), homes(48).topology

    def most(topology: Topology, protocol: str) -> int:
        return Estimator(topology, Protocol.parse(protocol)).most_at_once(topology.place(48))

    assert most(unlike, "linux-tcp") < 48 * 47
    assert most(regions, "linux-tcp") > 48 * 47
    assert most(unlike, "gloo") > 48 * 47


def test_a_long_ring_between_unlike_homes_takes_what_its_first_steps_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty-four under TCP, whose pace settles late: as all messages, to a hundredth."""
    where = homes(24, protocol="linux-tcp", collectives="ring")
    monkeypatch.setattr(estimate, "_MOST_WHOLE", math.inf)
    whole = measure(build_strategy("DiLoCo", H=2), where)
    monkeypatch.setattr(estimate, "_MOST_WHOLE", 1000)
    reckoned = measure(build_strategy("DiLoCo", H=2), homes(24, protocol="linux-tcp", collectives="ring"))
    assert reckoned.seconds_per_round == pytest.approx(whole.seconds_per_round, rel=0.01)


def test_too_many_ranks_that_read_the_clock_are_reported() -> None:
    """Staged codes in flight have every rank run: of thousands one line says what to do, at once."""
    where = homes(300)
    with pytest.raises(InputError, match="reads the clock, so each of 300 ranks has to run"):
        measure(build_strategy("StreamingDiLoCo", H=10, codec="int8", tau=2, num_fragments=2), where)


def test_ranks_that_read_the_clock_are_not_said_to_be_computed_from_the_busiest_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All their messages are simulated; with other links, of two rounds alone, which take what two of three do."""
    monkeypatch.setattr(estimate, "_MOST_UNLIKE", 50)
    where = homes(8, protocol="linux-tcp")
    made = Measured(build_strategy("StreamingDiLoCo", H=10, codec="int8", tau=2, num_fragments=2), where)
    assert not any("busiest link" in remark for remark in made.plan.remarks)
    two, three = made.rounds.on(where, 2), made.rounds.on(where)
    assert (len(two.round_seconds), len(three.round_seconds)) == (2, 3)
    assert two.round_seconds == three.round_seconds[:2]
    assert made.later_round(where) == made.own_round()


def test_advice_leaves_out_what_takes_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged codes in flight between unlike homes: named, with the command that plans them."""
    chosen = (
        ("DiLoCo", {"H": 2}),
        ("StreamingDiLoCo", {"H": 10, "codec": "int8", "tau": 2, "num_fragments": 2}),
    )
    monkeypatch.setattr("netgym.planning.advise.CANDIDATES", chosen)
    monkeypatch.setattr("netgym.planning.advise.SEARCHED", {})
    monkeypatch.setattr(estimate, "_MOST_UNLIKE", 50)
    where = replace(homes(8, protocol="linux-tcp"), tokens=1e5)
    (left,) = [row for row in advise(where)["not_simulated"] if row["reason"].startswith("reads the clock")]
    assert left["strategy"] == "StreamingDiLoCo"
