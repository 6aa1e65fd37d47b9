"""`auto`: of every collective, the algorithm that is fastest on this network, found by trying them on a quiet copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.closed_form import undisturbed_seconds
from netsim.collectives.estimate import Estimator, is_crowd
from netsim.collectives.schedules import algorithms
from netsim.collectives.schedules.algorithms import (
    ALGORITHMS,
    OPERATIONS,
    default_algorithm,
)
from netsim.collectives.start import link_bytes
from netsim.errors import InputError, unknown_name
from netsim.topology.protocol import Protocol
from netsim.topology.weather import Weather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netsim.collectives.schedules.algorithms import Parts
    from netsim.collectives.schedules.schedule import Schedule
    from netsim.topology.topology import Topology

__all__ = ["Choices", "parse_collectives", "schedule"]

# A crowd of direct messages is left out: to simulate it would take longer than the run. So many are not even listed.
_MOST_LISTED_MESSAGES = 500_000

# The second repetition has warm connections, as a training step does.
_REPETITIONS = 2

# Times that differ by less are equal, and the table's earlier algorithm is taken.
_SAME = 1 + 1e-9

# A crowd that is not sooner than the best by more than its estimate's error is left out; a long one is not simulated.
_SURELY = 0.99
_LONG_SECONDS = 1.0

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
        self._searched = lru_cache(_MOST_REMEMBERED)(self._search)
        self._contenders = lru_cache(_MOST_REMEMBERED)(self._search_contenders)
        self._alike: dict[Hashable, str] = {}

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
        if self._quiet is None:
            return default_algorithm(op)
        return self._searched(op, tuple(hosts), _nearest_power(num_bytes), root)

    def contenders(
        self, op: str, hosts: Sequence[int], num_bytes: int, root: int = 0, within: float = 1.0
    ) -> tuple[str, ...]:
        """Names of the algorithm that `algorithm` chooses, and of those about as fast.

        In a whole round, where collectives overlap and connections are cold, one of these may be faster. Of algorithms
        that take equally long, only the table's first is named.

        Args:
            op, hosts, num_bytes, root: as for `algorithm`.
            within: times as long as the chosen one that others may take.
        """
        chosen = self.algorithm(op, hosts, num_bytes, root)
        if op in self._fixed or self._protocol.rendezvous or self._quiet is None:
            return (chosen,)
        return chosen, *self._contenders(op, tuple(hosts), _nearest_power(num_bytes), root, chosen, within)

    def _trial(self, op: str, hosts: tuple[int, ...], num_bytes: int, root: int) -> _Trial:
        assert self._quiet is not None
        return _Trial(op, hosts, num_bytes, root, self._quiet, self._protocol)

    def _search_contenders(
        self, op: str, hosts: tuple[int, ...], num_bytes: int, root: int, chosen: str, within: float
    ) -> list[str]:
        return self._trial(op, hosts, num_bytes, root).contenders(chosen, within)

    def _search(self, op: str, hosts: tuple[int, ...], num_bytes: int, root: int) -> str:
        trial = self._trial(op, hosts, num_bytes, root)
        likeness = trial.likeness()
        if likeness not in self._alike:
            self._alike[likeness] = trial.fastest()
        return self._alike[likeness]


@dataclass(frozen=True, eq=False)
class _Trial:
    """Estimate of one collective by several algorithms, on an idle network."""

    op: str
    hosts: tuple[int, ...]
    num_bytes: int
    root: int
    topology: Topology
    protocol: Protocol

    def fastest(self) -> str:
        """Algorithm whose last member finishes first; those that cannot win are not simulated."""
        names = _candidates(self.op, self.protocol)
        if len(names) == 1 or len(set(self.hosts)) < 2:
            return names[0]
        bounds = {name: self.bound_seconds(name) for name in names}
        best, best_seconds = names[0], math.inf
        crowds = self._crowds
        for name in sorted(names, key=lambda name: (crowds[name] > 0, bounds[name])):
            if bounds[name] > best_seconds * _SAME or crowds[name] > _SURELY * best_seconds:
                continue
            seconds = self.seconds(name)
            is_earlier = names.index(name) < names.index(best)
            if seconds * _SAME < best_seconds or (is_earlier and seconds <= best_seconds * _SAME):
                best, best_seconds = name, seconds
        return best

    def contenders(self, chosen: str, within: float) -> list[str]:
        """Other algorithms that take at most `within` times as long as the chosen one, and not as long as another."""
        names = _candidates(self.op, self.protocol)
        if len(names) == 1 or len(set(self.hosts)) < 2:
            return []
        seconds = {chosen: self.seconds(chosen)}
        most = within * seconds[chosen]
        for name in names:
            if name not in seconds and self.bound_seconds(name) <= most:
                took = self.seconds(name)
                if took <= most and took not in seconds.values():
                    seconds[name] = took
        return list(seconds)[1:]

    @cached_property
    def _crowds(self) -> dict[str, float]:
        return {name: self._crowd_seconds(name) for name in _candidates(self.op, self.protocol)}

    def _crowd_seconds(self, name: str) -> float:
        """Seconds of so many messages at once that simulating them takes long, by the busiest link; 0 for fewer."""
        most = self._estimator.most_at_once(self.hosts)
        if self._is_too_large(name) or not is_crowd(made := self._made(name, self.num_bytes), most):
            return 0.0
        return self._estimator.crowd.times(made, self.hosts)[0]

    def likeness(self) -> Hashable:
        """Key that is equal for collectives equivalent for all algorithms; of large groups, only for the same hosts."""
        if len(self.hosts) > _LARGEST_ALIKE:
            return self.op, self.hosts, self.num_bytes, self.root
        numbers: dict[int, int] = {}
        routes = tuple(
            tuple(numbers.setdefault(link, len(numbers)) for link in self.topology.route(src, dst))
            for src, dst in itertools.product(self.hosts, repeat=2)
        )
        links = tuple(
            (link.bits_per_second, link.latency_seconds, link.loss, link.measured_streams)
            for link in map(self.topology.links.__getitem__, numbers)
        )
        regions = tuple(map(self._regions.index, self._regions))
        return self.op, routes, links, regions, self.num_bytes, self.root

    @cached_property
    def _estimator(self) -> Estimator:
        return Estimator(self.topology, self.protocol)

    @cached_property
    def _regions(self) -> list[str]:
        return [self.topology.region_of(host) for host in self.hosts]

    def _is_too_large(self, name: str) -> bool:
        """Return whether only to list its messages would take too long."""
        members = {"direct": len(self.hosts), "two-level-direct": len(set(self._regions))}
        return members.get(name, 0) ** 2 > _MOST_LISTED_MESSAGES

    def _made(self, name: str, num_bytes: int) -> Schedule:
        return algorithms.schedule(
            self.op,
            len(self.hosts),
            num_bytes=num_bytes,
            algorithm=name,
            root=self.root,
            regions=self._regions,
        )

    def bound_seconds(self, name: str) -> float:
        """Lower bound of seconds; infinite for more messages than are worth listing."""
        if self._is_too_large(name):
            return math.inf
        made = self._made(name, self.num_bytes)
        alone = undisturbed_seconds(made, self.hosts, self.topology, self.protocol)
        load = np.array(link_bytes(made, self.hosts, self.topology))
        busiest = (load / self.protocol.payload_bytes_per_second(self.topology)).max(initial=0.0)
        return max(float(alone.max()) if alone is not None else 0.0, float(busiest))

    def seconds(self, name: str) -> float:
        """Estimated seconds until the last member finishes; infinite for more messages than are worth listing."""
        if self._is_too_large(name):
            return math.inf
        if self._crowds[name] > _LONG_SECONDS:
            return self._crowds[name]
        return self._estimator.seconds(partial(self._made, name), self.num_bytes, self.hosts, _REPETITIONS)


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
        algorithm = default_algorithm(op)
        if topology is not None and hosts is not None:
            chosen = Protocol.resolve(protocol, topology.protocol)
            quiet = replace(topology, weather=Weather())
            algorithm = _Trial(op, tuple(hosts), _total(num_bytes, parts), root, quiet, chosen).fastest()
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


def _candidates(op: str, protocol: Protocol) -> tuple[str, ...]:
    """Algorithms that `auto` compares: the protocol's own where it has some, each under its first name."""
    own = [name for name in ALGORITHMS[op] if name in protocol.algorithms]
    seen: dict[object, str] = {}
    for name in own or ALGORITHMS[op]:
        seen.setdefault(ALGORITHMS[op][name], name)
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
