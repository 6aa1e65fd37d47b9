"""Which hosts advice takes together: groups that are near each other, found by their ways alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exogym_core.cost.compute import Compute
from netgym.planning.advise import advise
from netgym.planning.groups import Grouping, best_groups, group_seconds, groupings
from netgym.planning.measure import Setting
from netgym.planning.models import planned_model
from netsim import Topology


def probed(num_hosts: int = 4) -> Topology:
    """As `netsim probe` writes it: every host a region of its own; first letters' neighbours are near."""
    names = [f"{letter}{place}" for place in range(num_hosts // 2) for letter in "ab"]
    wan = []
    for one, other in itertools.combinations(names, 2):
        near = one[0] == other[0]
        wan.append(
            {
                "between": [one, other],
                "bandwidth": "5 Gbit/s" if near else "200 Mbit/s",
                "rtt": "2 ms" if near else "90 ms",
            }
        )
    return Topology.from_mapping(
        {
            "regions": {name: {"hosts": 1, "nic": "10 Gbit/s", "latency": "10 us"} for name in names},
            "wan": wan,
            "protocol": "ideal",
        }
    )


def partitions(members: Sequence[int], size: int) -> Iterator[list[tuple[int, ...]]]:
    if not members:
        yield []
        return
    first, *others = members
    for rest in itertools.combinations(others, size - 1):
        left = [each for each in others if each not in rest]
        for more in partitions(left, size):
            yield [(first, *rest), *more]


def slowest(groups: Sequence[Sequence[int]], seconds: Sequence[Sequence[float]]) -> float:
    return max(seconds[a][b] for group in groups for a in group for b in group if a != b)


@given(
    st.sampled_from([(4, 2), (6, 2), (6, 3)]).flatmap(
        lambda shape: st.tuples(
            st.just(shape),
            st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=shape[0], max_size=shape[0]),
        )
    )
)
def test_groups_of_places_in_a_plane_are_nearly_the_best(
    drawn: tuple[tuple[int, int], list[tuple[float, float]]],
) -> None:
    """Each host is in one group of the size asked for; no grouping has a slowest way of less than half."""
    (number, size), places = drawn
    seconds = [[abs(a[0] - b[0]) + abs(a[1] - b[1]) for b in places] for a in places]
    found = best_groups(seconds, size)
    assert sorted(member for group in found for member in group) == list(range(number))
    assert {len(group) for group in found} == {size}
    least = min(slowest(groups, seconds) for groups in partitions(range(number), size))
    assert least <= slowest(found, seconds) <= 2 * least + 1e-9


@pytest.mark.parametrize("size", [2, 4, 8])
def test_clusters_that_are_there_are_found(size: int) -> None:
    """However their members are mixed in the file."""
    number = 16
    cluster = [(5 * place) % (number // size) for place in range(number)]
    seconds = [[1.0 if cluster[a] == cluster[b] else 9.0 for b in range(number)] for a in range(number)]
    assert slowest(best_groups(seconds, size), seconds) == 1.0


def test_every_number_of_groups_is_tried_and_none_where_all_hosts_are_alike() -> None:
    mixed = probed(8)
    found = list(groupings(mixed, range(8), 1e9))
    assert [size for size, _ in found] == [2, 4]
    for size, order in found:
        for at in range(0, 8, size):
            assert len({mixed.hosts[place].name[0] for place in order[at : at + size]}) == 1
    lan = Topology.load("cluster")
    assert list(groupings(lan, range(4), 1e9)) == []


def test_numbers_of_groups_are_compared_by_the_time_of_a_round() -> None:
    """Groups of a city are sooner than such across the sea; two ranks of one host need no line."""
    net, payload = probed(8), 10**8
    cities = sorted(range(8), key=lambda host: net.hosts[host].name)
    near, far = Grouping(4, cities), Grouping(4, [*cities[::2], *cities[1::2]])
    ways = [group_seconds(net, range(8), each, payload) for each in (near, far)]
    assert ways[0][0] < ways[1][0] / 5
    assert ways[0][1] > ways[0][0]
    of_one_host = group_seconds(net, [0, 0, 2, 2], Grouping(2, [0, 1, 2, 3]), payload)
    assert of_one_host == (0.0, group_seconds(net, [0, 2], Grouping(2, [0, 1]), payload)[0])


def test_advice_groups_near_hosts_of_a_probed_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hosts of two cities, each a region of its own: the rows tell which of them act as one, and it pays."""
    monkeypatch.setattr("netgym.planning.advise.CANDIDATES", (("DiLoCo", {"H": 30, "codec": "int8"}),))
    compute = Compute.parse("100 ms")
    where = Setting(planned_model("llama-2m", 64), probed(), compute, 4, 8, 1e9)
    advice = advise(where)
    (row,) = [row for row in advice["ranked"] if row["groups"]]
    assert row["options"] == {"H": 30, "codec": "int8", "ranks_per_worker": 2}
    assert row["groups"] == [["a0.0", "a1.0"], ["b0.0", "b1.0"]]
    assert any(line.endswith("are a0.0, a1.0 | b0.0, b1.0") for line in advice["explained"])
    (alone,) = [row for row in advice["ranked"] if not row["groups"] and not row["left_out"]]
    assert row["wan_bytes"] != alone["wan_bytes"]


def test_groups_whose_steps_cannot_pay_are_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients inside take longer than the soonest whole step."""
    monkeypatch.setattr("netgym.planning.advise.CANDIDATES", (("DiLoCo", {"H": 3000, "codec": "int8"}),))
    where = Setting(planned_model("llama-2m", 64), probed(), Compute.parse("10 us"), 4, 8, 1e9)
    answer = advise(where)
    assert not any(row["groups"] for row in [*answer["ranked"], *answer["dominated"]])


def test_the_ring_of_advice_goes_over_sites_with_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went over all twelve of a network whose four first had workers."""
    monkeypatch.setattr("netgym.planning.advise.CANDIDATES", (("DiLoCo", {"H": 30}),))
    model = planned_model("llama-2m", 32)
    found = advise(Setting(model, probed(6), Compute.parse("1 s"), 4, 2, 1e5))
    assert sorted(found["ring"]["sites"]) == sorted(found["placement"])
    assert len(found["placement"]) == 4
