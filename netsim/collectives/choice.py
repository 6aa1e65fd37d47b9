"""`auto`: of every collective, the algorithm that is fastest on this network, found by trying them on a quiet copy."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from netsim.collectives.closed_form import QuietNetwork, undisturbed_seconds
from netsim.collectives.estimate import Estimator, is_crowd
from netsim.collectives.schedules import algorithms
from netsim.collectives.schedules.algorithms import (
    ALGORITHMS,
    OPERATIONS,
    algorithm_names,
    default_algorithm,
)
from netsim.errors import InputError, unknown_name
from netsim.topology.protocol import Protocol
from netsim.topology.weather import Weather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from netsim.collectives.schedules.algorithms import Parts
    from netsim.collectives.schedules.schedule import Schedule
    from netsim.topology.topology import Topology

__all__ = ["Choices", "parse_collectives", "schedule"]

T = TypeVar("T")

# A crowd of direct messages is left out: to simulate it would take longer than the run. So many are not even listed.
_MOST_LISTED_MESSAGES = 500_000

# The second repetition has warm connections, as a training step does.
_REPETITIONS = 2

# Times that differ by less are equal, and the table's earlier algorithm is taken.
_SAME = 1 + 1e-9

_MOST_REMEMBERED = 4096
_LARGEST_ALIKE = 8


def parse_collectives(spec: str | Mapping[str, str] | None) -> dict[str, str]:
    """Parse the algorithms that `spec` fixes: op -> name, without those left to `auto`.

    `auto` or None fixes nothing; a name alone holds for every operation that has an algorithm of that name.

    Raises UnknownNameError for an operation or algorithm that does not exist, InputError for anything else.

    >>> parse_collectives("ring")
    {'all_reduce': 'ring', 'all_gather': 'ring', 'reduce_scatter': 'ring'}
    >>> parse_collectives({"all_reduce": "tree", "broadcast": "auto"})
    {'all_reduce': 'tree'}
    """
    if spec is None or spec == "auto":
        return {}
    if isinstance(spec, str):
        fixed = {op: spec for op in OPERATIONS if spec in ALGORITHMS[op]}
        if not fixed:
            known = dict.fromkeys(name for names in ALGORITHMS.values() for name in names)
            raise unknown_name("algorithm of collectives", spec, ["auto", *known])
        return fixed
    if not isinstance(spec, Mapping):
        raise InputError(
            f"collectives: expected auto, an algorithm, or a mapping such as all_reduce: ring; got {spec!r}"
        )
    for op, name in spec.items():
        if op not in ALGORITHMS:
            raise unknown_name("collective", str(op), OPERATIONS)
        if name != "auto" and name not in ALGORITHMS[op]:
            raise unknown_name(f"algorithm for {op}", str(name), (*ALGORITHMS[op], "auto"))
    return {op: name for op, name in spec.items() if name != "auto"}


class Choices:
    """Algorithm of each collective: the fixed one, else the fastest on this network.

    The fastest is found by the network model on an idle copy: nominal capacities, no background traffic, warm
    connections, all members entering at once. It is found once for each operation, group and size (by powers of
    two, the nearest), and does not depend on what was asked before; weather and overlap do not have it chosen
    again. Groups of few members with equal routes are one. Under a protocol with rendezvous it is gloo's own.
    All algorithms of an operation send the same number of bytes in total, the least there is (but for gloo's), so
    the choice moves seconds and not bytes.

    Args:
        topology: the network; None: nothing takes time, and the table's first algorithm is taken.
        protocol: how transfers use it.
        fixed: op -> algorithm, as `parse_collectives` gives it.
    """

    def __init__(
        self, topology: Topology | None, protocol: Protocol, fixed: Mapping[str, str] | None = None
    ) -> None:
        self._protocol = protocol
        self._fixed = dict(fixed or {})
        self._quiet = replace(topology, weather=Weather()) if topology is not None else None
        self._fastest: _Memory[str] = _Memory()

    def algorithm(self, op: str, hosts: Sequence[int], num_bytes: int, root: int = 0) -> str:
        """Name the algorithm of one collective.

        Args:
            op: the operation.
            hosts: the host of each member; unused without a network.
            num_bytes: as `schedule` takes it.
            root: position of the root among the members.
        """
        if op in self._fixed:
            return self._fixed[op]
        if self._protocol.rendezvous:
            return default_algorithm(op, gloo=True)
        names = _different(op)
        if self._quiet is None or len(names) == 1 or len(set(hosts)) < 2:
            return names[0]
        trial = _Trial(op, tuple(hosts), _nearest_power(num_bytes), root, self._quiet, self._protocol)
        return self._fastest.of(trial, lambda: _fastest(trial, names))


class _Memory(Generic[T]):
    """Cache of results by collective, shared by equivalent collectives; the least recently used are dropped."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, T] = OrderedDict()

    def of(self, trial: _Trial, find: Callable[[], T]) -> T:
        """Cached result for this collective or one like it, else the result of `find`."""
        if trial.name in self._known:
            self._known.move_to_end(trial.name)
            return self._known[trial.name]
        alike = trial.likeness()
        found = self._known[alike] if alike in self._known else find()
        for key in (alike, trial.name):
            self._known[key] = found
            self._known.move_to_end(key)
        while len(self._known) > _MOST_REMEMBERED:
            self._known.popitem(last=False)
        return found


def _fastest(trial: _Trial, names: Sequence[str]) -> str:
    """Algorithm whose last member finishes first; those that cannot win are not simulated."""
    bounds = {name: trial.bound_seconds(name) for name in names}
    best, best_seconds = names[0], math.inf
    for name in sorted(names, key=lambda name: bounds[name]):
        if bounds[name] > best_seconds * _SAME:
            break
        seconds = trial.seconds(name)
        is_earlier = names.index(name) < names.index(best)
        if seconds * _SAME < best_seconds or (is_earlier and seconds <= best_seconds * _SAME):
            best, best_seconds = name, seconds
    return best


class _Trial:
    """Estimate of one collective by several algorithms, on an idle network."""

    def __init__(
        self,
        op: str,
        hosts: tuple[int, ...],
        num_bytes: int,
        root: int,
        topology: Topology,
        protocol: Protocol,
    ) -> None:
        self.name = (op, hosts, num_bytes, root)
        self._op, self._hosts, self._num_bytes, self._root = op, hosts, num_bytes, root
        self._topology, self._protocol = topology, protocol

    def likeness(self) -> Hashable:
        """Key that is equal for collectives equivalent for all algorithms; of large groups, only for the same hosts."""
        return (self._op, _likeness(self._hosts, self._topology), self._num_bytes, self._root)

    @cached_property
    def _regions(self) -> list[str]:
        return [self._topology.region_of(host) for host in self._hosts]

    @cached_property
    def _rate(self) -> np.ndarray:
        """Payload bytes per second of each link."""
        return self._protocol.payload_bytes_per_second(self._topology)

    def _is_too_large(self, name: str) -> bool:
        """Return whether only to list its messages would take too long."""
        members = {"direct": len(self._hosts), "two-level-direct": len(set(self._regions))}
        return members.get(name, 0) ** 2 > _MOST_LISTED_MESSAGES

    def _made(self, name: str, num_bytes: int) -> Schedule:
        return algorithms.schedule(
            self._op,
            len(self._hosts),
            num_bytes=num_bytes,
            algorithm=name,
            root=self._root,
            regions=self._regions,
        )

    def bound_seconds(self, name: str) -> float:
        """Lower bound of seconds; infinite for more messages than are worth listing."""
        if self._is_too_large(name):
            return math.inf
        made = self._made(name, self._num_bytes)
        alone = undisturbed_seconds(made, self._hosts, QuietNetwork.of(self._topology, self._protocol))
        return max(float(alone.max()) if alone is not None else 0.0, self._busiest_link_seconds(made))

    def _busiest_link_seconds(self, made: Schedule) -> float:
        """Seconds of the link with most to carry."""
        load = np.zeros(len(self._rate))
        for src, dst, num_bytes in made.pair_bytes:
            for link in self._topology.route(self._hosts[src], self._hosts[dst]):
                load[link] += num_bytes
        return float((load / self._rate).max(initial=0.0))

    def seconds(self, name: str) -> float:
        """Estimated seconds until the last member finishes; infinite for a crowd of messages."""
        if self._is_too_large(name) or is_crowd(self._made(name, self._num_bytes)):
            return math.inf
        estimator = Estimator(self._topology, self._protocol)
        return estimator.seconds(partial(self._made, name), self._num_bytes, self._hosts, _REPETITIONS)


def schedule(
    op: str,
    num_ranks: int,
    *,
    num_bytes: int = 0,
    algorithm: str | None = None,
    root: int = 0,
    element_bytes: int = 1,
    hosts: Sequence[int] | None = None,
    topology: Topology | None = None,
    parts: Parts | None = None,
    protocol: Protocol | None = None,
) -> Schedule:
    """Build the schedule of one collective, on a network where one is given.

    Args:
        op: operation, such as "all_reduce".
        num_ranks: members.
        num_bytes: the whole tensor for all_reduce, broadcast and reduce; the sum over ranks for all_gather, gather,
            scatter, reduce_scatter and all_to_all; the message for sendrecv.
        algorithm: its name, None for the operation's default; "auto" takes the fastest for this size on an idle
            network, and the default without a network.
        root: member that sends to all or receives from all, where the operation has one.
        element_bytes: size of an element; parts hold whole elements.
        hosts: index of each member's host; with `topology` it gives algorithms the regions, else all are in one.
        topology: the network.
        parts: uneven shares in bytes: one a rank, or from i to j as n rows of n for all_to_all; `num_bytes` is then
            their sum and need not be given.
        protocol: under which "auto" compares; None: the topology's, else `linux-tcp`.

    Raises:
        UnknownNameError: the operation or the algorithm does not exist.
        InputError: a number or size is wrong.
    """
    regions: list[str] = []
    if topology is not None and hosts is not None:
        regions = [topology.region_of(host) for host in hosts]
    if algorithm == "auto":
        names = _different(op)
        algorithm = names[0]
        if topology is not None and hosts is not None and len(set(hosts)) > 1:
            chosen = Protocol.resolve(protocol, topology.protocol)
            quiet = replace(topology, weather=Weather())
            total = _total(num_bytes, parts)
            trial = _Trial(op, tuple(hosts), total, root, quiet, chosen)
            algorithm = _fastest(trial, names)
    return algorithms.schedule(
        op,
        num_ranks,
        num_bytes=num_bytes,
        algorithm=algorithm,
        root=root,
        element_bytes=element_bytes,
        regions=regions,
        parts=parts,
    )


def _different(op: str) -> tuple[str, ...]:
    """The operation's algorithms, without those that are another one by another name."""
    seen: dict[object, str] = {}
    algorithm_names(op)  # raises for an unknown operation
    for name, builder in ALGORITHMS[op].items():
        seen.setdefault(builder, name)
    return tuple(seen.values())


def _total(num_bytes: int, parts: Parts | None) -> int:
    if parts is None:
        return num_bytes
    return sum(part if isinstance(part, int) else sum(part) for part in parts)


def _nearest_power(num_bytes: int) -> int:
    """Nearest power of two by ratio; 0 stays.

    >>> [_nearest_power(size) for size in (0, 1, 5, 6, 1000, 25_000_000)]
    [0, 1, 4, 8, 1024, 33554432]
    """
    return 1 << ((num_bytes * num_bytes).bit_length() // 2) if num_bytes else 0


def _likeness(hosts: tuple[int, ...], topology: Topology) -> Hashable:
    """Key that is equal for groups equivalent for all algorithms; of large groups, the hosts themselves."""
    if len(hosts) > _LARGEST_ALIKE:
        return hosts
    numbers: dict[int, int] = {}
    routes = tuple(
        tuple(numbers.setdefault(link, len(numbers)) for link in topology.route(src, dst))
        for src in hosts
        for dst in hosts
    )
    links = tuple(
        (
            topology.links[link].bits_per_second,
            topology.links[link].latency_seconds,
            topology.links[link].loss,
            topology.links[link].measured_streams,
        )
        for link in numbers
    )
    regions = [topology.region_of(host) for host in hosts]
    return routes, links, tuple(regions.index(region) for region in regions)
