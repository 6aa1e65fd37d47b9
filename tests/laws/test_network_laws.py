"""Laws 1, 2, 3 and 9 of the network, on random networks and transfers; each one catches a planted bug."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import use_sources

from netsim import Clock, Network, Topology
from netsim.network.clock import Order
from netsim.testing import protocols, topologies
from netsim.topology.topology import FloatArray

IDEAL = st.just("ideal")


@dataclass(frozen=True)
class Case:
    """A network as a mapping, and transfers (start, from, to, bytes) over it by host index."""

    form: dict[str, Any]
    rows: tuple[tuple[float, int, int, int], ...]
    protocol: str | dict[str, Any] = "ideal"

    def topology(self, factor: int = 1) -> Topology:
        """The network with so many times the bandwidth."""
        plain = Topology.from_mapping(self.form)
        links = [replace(link, bits_per_second=link.bits_per_second * factor) for link in plain.links]
        return replace(plain, links=tuple(links))


@st.composite
def cases(draw: st.DrawFn, protocol: st.SearchStrategy[Any] = IDEAL) -> Case:
    num_hosts = draw(st.integers(2, 5))
    host = st.integers(0, num_hosts - 1)
    row = st.tuples(
        st.sampled_from([0.0, 0.0, 0.01, 0.5, 1.0, 1.25]),
        host,
        host,
        st.sampled_from([0, 1, 1000, 100_000, 1_000_000, 3_000_000]),
    )
    rows = tuple(sorted(draw(st.lists(row, min_size=1, max_size=12))))
    return Case(draw(topologies(num_hosts, num_hosts)), rows, draw(protocol))


class Account:
    """Watches a network and keeps its own books of bytes, from the rates it hears of."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.sizes: dict[int, float] = {}
        self.routes: dict[int, list[int]] = {}
        self.rates: dict[int, float] = {}
        self.moved: dict[int, float] = {}
        self.since: dict[int, float] = {}
        self.ended: dict[int, float] = {}
        self.instants: set[float] = set()
        network.observe(self)

    def capacity_changed(self, link: int, bits_per_second: float) -> None: ...

    def transfer_started(
        self, transfer: int, source: int, target: int, num_bytes: float, connection: Hashable
    ) -> None:
        assert transfer not in self.sizes
        self.sizes[transfer] = num_bytes
        self.routes[transfer] = list(self.network.topology.route(source, target))
        self.moved[transfer] = 0.0
        self.instants.add(self.network.env.now)

    def transfer_ended(self, transfer: int, delivered_bytes: float) -> None:
        assert transfer not in self.ended
        self._move(transfer, 0.0)
        self.rates.pop(transfer)
        self.ended[transfer] = delivered_bytes
        self.instants.add(self.network.env.now)

    def rates_changed(self, transfers: Sequence[int], bytes_per_second: Sequence[float]) -> None:
        for transfer, rate in zip(transfers, bytes_per_second, strict=True):
            self._move(transfer, rate)
        self.instants.add(self.network.env.now)

    def _move(self, transfer: int, rate: float) -> None:
        now = self.network.env.now
        self.moved[transfer] += self.rates.get(transfer, 0.0) * (now - self.since.get(transfer, now))
        self.rates[transfer], self.since[transfer] = rate, now

    def check_bytes(self) -> None:
        """Law 1: sent = received + dropped + in flight, and links carry what transfers move over them."""
        for transfer in list(self.rates):
            self._move(transfer, self.rates[transfer])
        received = sum(self.ended.values())
        in_flight = sum(size for transfer, size in self.sizes.items() if transfer not in self.ended)
        account = received + self.network.dropped_bytes + in_flight
        assert account == pytest.approx(sum(self.sizes.values()), rel=1e-9, abs=1e-3)
        assert self.network.num_in_flight == len(self.sizes) - len(self.ended)
        expected = np.zeros(len(self.network.topology.links))
        for transfer, size in self.sizes.items():
            moved = self.moved[transfer]
            assert moved <= size * (1 + 1e-9) + 1e-3
            if transfer in self.ended and self.routes[transfer]:
                assert moved == pytest.approx(self.ended[transfer], rel=1e-9, abs=1e-3)
            expected[self.routes[transfer]] += moved
        np.testing.assert_allclose(self.network.link_bytes, expected, rtol=1e-9, atol=1e-2)


def simulate(
    case: Case, at_instant: Callable[[Account], None] | None = None, factor: int = 1
) -> tuple[Account, list[float]]:
    """Simulate a case to its end; `at_instant` is called at the end of each instant."""
    clock = Clock()
    network = Network(clock, case.topology(factor), case.protocol)
    account = Account(network)
    finish = [math.inf] * len(case.rows)

    def start() -> Any:
        for number, (seconds, source, target, num_bytes) in enumerate(case.rows):
            if seconds > clock.now:
                yield clock.at(seconds)
            network.send(
                source,
                target,
                num_bytes * factor,
                lambda number=number: finish.__setitem__(number, clock.now),
                connection=number,
            )

    clock.process(start())
    while (instant := clock.peek()) < math.inf:
        if instant > clock.now and at_instant is not None:
            at_instant(account)
        end = clock.at(instant, Order.MEETINGS)  # the network goes no further by itself
        while not end.processed:
            clock.step()
    return account, finish


def check_conservation(case: Case) -> None:
    """Law 1: bytes on links are those of transfers, at every instant; all that is sent arrives, once."""
    account, _ = simulate(case, Account.check_bytes)
    account.check_bytes()
    assert account.ended == account.sizes


def check_rates(
    rates: Mapping[int, float], route_of: Callable[[int], Any], capacity: FloatArray, *, fair: bool = True
) -> None:
    """Law 2: no link is overloaded; where rates are `fair` each transfer has a full link on which no other has more."""
    load, largest = np.zeros(len(capacity)), np.zeros(len(capacity))
    for transfer, rate in rates.items():
        route = route_of(transfer)
        load[route] += rate
        largest[route] = np.maximum(largest[route], rate)
    assert (load <= capacity * (1 + 1e-9)).all()
    for transfer, rate in rates.items():
        route = route_of(transfer)
        full = load[route] >= capacity[route] * (1 - 1e-9)
        assert not fair or (full & (largest[route] <= rate * (1 + 1e-9))).any()


def check_capacity(case: Case) -> None:
    def audit(account: Account) -> None:
        capacity = account.network.topology.bits_per_second / 8
        check_rates(account.rates, account.routes.__getitem__, capacity)

    simulate(case, audit)


def check_lower_bound(case: Case) -> None:
    """Law 3: nothing arrives before its latency and its bytes over its narrowest link."""
    _, finishes = simulate(case)
    topology = case.topology()
    for (start, source, target, num_bytes), finish in zip(case.rows, finishes, strict=True):
        route = list(topology.route(source, target))
        latency = sum(topology.latency_seconds[route].tolist())
        narrowest = min(topology.bits_per_second[route].tolist(), default=math.inf)
        assert finish >= (start + latency + num_bytes * 8 / narrowest) * (1 - 1e-9)


def check_scaling(case: Case, factor: int = 1000) -> None:
    """Law 9: as many times the bytes over as many times the bandwidth take the same time."""
    (_, finish), (_, scaled) = simulate(case), simulate(case, factor=factor)
    np.testing.assert_allclose(finish, scaled, rtol=1e-9, atol=1e-12)


@given(cases(protocols()))
def test_bytes_are_conserved(case: Case) -> None:
    check_conservation(case)


@given(cases())
def test_links_are_full_and_not_overfull(case: Case) -> None:
    check_capacity(case)


@given(cases(protocols()))
def test_nothing_arrives_too_early(case: Case) -> None:
    check_lower_bound(case)


@given(cases())
def test_scaling_bytes_and_bandwidth_changes_no_time(case: Case) -> None:
    check_scaling(case)


# A hub and three hosts: transfers share links for a while, one of them two links with two others.
CROWDED = Case(
    {
        "hosts": ["h0", "h1", "h2", "h3"],
        "links": [
            {"between": ["h1", "h0"], "bandwidth": "10 Mbit/s", "latency": "10 ms"},
            {"between": ["h2", "h0"], "bandwidth": "5 Mbit/s", "latency": "1 ms"},
            {"between": ["h3", "h0"], "bandwidth": "10 Mbit/s", "latency": "37 ms"},
        ],
    },
    ((0.0, 0, 1, 1_000_000), (0.0, 0, 2, 3_000_000), (0.5, 1, 2, 1_000_000), (0.5, 1, 3, 100_000)),
)


@pytest.mark.parametrize("check", [check_conservation, check_capacity, check_lower_bound, check_scaling])
def test_the_crowded_case_keeps_all_laws(check: Callable[[Case], None]) -> None:
    check(CROWDED)


def draining(engine: Any) -> list[Any]:
    """Transfers whose first byte has arrived."""
    return [transfer for transfer in engine.in_flight() if transfer.drains]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda claim: min(link.capacity / len(link.claims) for link in claim.links),
        lambda claim: claim.next_rate * 1.001,
    ],
    ids=["equal parts of each link", "an overfull link"],
)
def test_law_2_catches(wrong: Callable[[Any], float], monkeypatch: pytest.MonkeyPatch) -> None:
    shares = use_sources(monkeypatch).FairShares
    right = shares.settle

    def settle(self: Any) -> list[Any]:
        changed: list[Any] = right(self)
        for claim in changed:
            claim.next_rate = wrong(claim)
        return changed

    monkeypatch.setattr(shares, "settle", settle)
    with pytest.raises(AssertionError):
        check_capacity(CROWDED)


def test_law_9_catches_a_tolerance_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = use_sources(monkeypatch).Engine
    right = engine._settle

    def generous(self: Any) -> None:
        right(self)
        for transfer in draining(self):
            if transfer.remaining < 1_500_000:
                self._heap.move(transfer, self.now)

    monkeypatch.setattr(engine, "_settle", generous)
    with pytest.raises(AssertionError):
        check_scaling(CROWDED)
