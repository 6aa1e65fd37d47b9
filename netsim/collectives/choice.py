"""`auto`: the fastest algorithm of each collective, found by trials on a quiet copy of the network."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain
from numbers import Integral
from typing import TYPE_CHECKING, Any

from netsim.collectives.estimate import Estimator
from netsim.collectives.operations import OPERATIONS
from netsim.collectives.schedules.algorithms import ALGORITHMS, algorithm_names, build, default_algorithm
from netsim.collectives.schedules.nccl import BARRIER_BYTES, prefers_tree
from netsim.collectives.schedules.schedule import Problem
from netsim.errors import InputError, unknown_name
from netsim.topology.protocol import Protocol
from netsim.topology.weather import Weather
from netsim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.topology.topology import Topology

__all__ = ["Choices", "library_algorithm", "parse_collectives", "schedule"]

_MOST_BYTES = 10**15  # sums over ranks and steps stay whole in 64 bits
_MOST_RANKS = 1_000_000
_MOST_REMEMBERED = 4096
_SIGNIFICANT_BITS = 6  # of the size for which an algorithm is chosen


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


@dataclass(frozen=True)
class _Question:
    """A collective for which an algorithm is chosen; equal for groups of equal likeness."""

    op: str
    num_bytes: int
    root: int
    likeness: Hashable
    hosts: tuple[int, ...] = field(compare=False)


class Choices:
    """Algorithm of each collective: the fixed one, else the fastest on this network.

    The fastest is found by the network model on an idle copy: nominal capacities, no background traffic, warm
    connections, all members entering at once. It is found once for each operation, group and size (to 2 %), whatever
    was asked before, and kept under weather and overlap. Groups of equal likeness are one. Under a protocol of a
    library it is the library's own choice. Shipped algorithms of an operation, except gloo's and NCCL's barriers, send
    the same number of bytes in total, so the choice changes seconds and not bytes.

    Args:
        topology: the network; None: no network, and the table's first algorithm.
        protocol: how transfers use it.
        fixed: op -> algorithm, as `parse_collectives` gives it.
    """

    def __init__(
        self, topology: Topology | None, protocol: Protocol, fixed: Mapping[str, str] | None = None
    ) -> None:
        self._topology, self._protocol = topology, protocol
        self._fixed = dict(fixed or {})

    @cached_property
    def _searches(self) -> _Searches | None:
        """Searches on this network, from the first collective without a fixed algorithm on; None: none is needed."""
        if self._topology is None or self._protocol.library:
            return None
        return _searches_on(self._topology, self._protocol)

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
        if self._searches is None:
            return library_algorithm(self._protocol, op, hosts, num_bytes) or default_algorithm(op)
        return self._searches.fastest(self._searches.question(op, hosts, num_bytes, root))

    def contenders(
        self,
        op: str,
        hosts: Sequence[int],
        num_bytes: int,
        root: int = 0,
        within: float = 1.0,
        few_messages: float = 0,
    ) -> tuple[str, ...]:
        """Names of algorithms with few messages; where others have more, of the fastest and those nearly as fast too.

        One of these may be fastest in a whole round, in which collectives overlap and connections are cold. Of
        algorithms with more messages that take equally long, only the table's first is named.

        Args:
            op, hosts, num_bytes, root: as for `algorithm`.
            within: largest duration of the others, relative to the chosen one's.
            few_messages: number of messages up to which the duration does not matter.
        """
        if op in self._fixed or self._searches is None:
            return (self.algorithm(op, hosts, num_bytes, root),)
        asked = self._searches.question(op, hosts, num_bytes, root)
        return self._searches.contenders(asked, within, few_messages)


@dataclass(frozen=True)
class _Network:
    """A network, without its weather, and the algorithms to choose from; equal where all answers are."""

    topology: Topology
    protocol: Protocol
    table: tuple[tuple[Any, ...], ...]  # of algorithms, to which a user's own may be added

    def __hash__(self) -> int:
        return hash((self.topology.name, self.protocol.name))


class _Searches:
    """Searches for algorithms on a network, each made once.

    Attributes:
        estimator: of collectives on it.
        fastest: finds the fastest algorithm for a question.
        contenders: finds those of `Choices.contenders` for a question, `within` and `few_messages`.
    """

    def __init__(self, topology: Topology, protocol: Protocol) -> None:
        self._topology, self.estimator = topology, Estimator(topology, protocol)
        self._likeness = lru_cache(_MOST_REMEMBERED)(topology.likeness)
        self.fastest = lru_cache(_MOST_REMEMBERED)(self._search)
        self.contenders = lru_cache(_MOST_REMEMBERED)(self._search_contenders)

    def question(self, op: str, hosts: Sequence[int], num_bytes: int, root: int) -> _Question:
        """Question of a collective; of equal ones one is searched for."""
        members = tuple(hosts)
        return _Question(op, _round_bytes(num_bytes), root, self._likeness(members), members)

    def _problem(self, asked: _Question) -> Problem:
        hosts, topology = asked.hosts, self._topology
        return _problem(
            asked.op, len(hosts), asked.num_bytes, root=asked.root, hosts=hosts, topology=topology
        )

    def _search(self, asked: _Question) -> str:
        return self.estimator.fastest(self._problem(asked), asked.hosts)

    def _search_contenders(self, asked: _Question, within: float, few_messages: float) -> tuple[str, ...]:
        estimator, problem, hosts = self.estimator, self._problem(asked), asked.hosts
        names = estimator.candidates(problem, hosts)
        few = [name for name in names if estimator.has_few(replace(problem, algorithm=name), few_messages)]
        if len(few) == len(names):
            return names
        fastest = self.fastest(asked)
        others = [name for name in names if name not in (fastest, *few)]
        near = estimator.nearly_as_fast(replace(problem, algorithm=fastest), hosts, others, within)
        return tuple(dict.fromkeys((fastest, *few, *near)))


def library_algorithm(protocol: Protocol, op: str, hosts: Sequence[int], num_bytes: int) -> str | None:
    """Name the algorithm that the protocol's library takes; None where `auto` takes the fastest.

    Args:
        protocol: its `library` and `card_bits_per_second` count.
        op, hosts, num_bytes: as of `Choices.algorithm`.
    """
    if protocol.library == "gloo":
        return "gloo"
    if protocol.library == "hivemind":
        return "direct" if "direct" in ALGORITHMS[op] else default_algorithm(op)
    if protocol.library != "nccl":
        return None
    reduced = {"all_reduce": num_bytes, "barrier": BARRIER_BYTES}.get(op)
    if reduced is not None and prefers_tree(
        reduced, len(hosts), len(set(hosts)), protocol.card_bits_per_second
    ):
        return "nccl-tree"
    return "nccl-ring" if "nccl-ring" in ALGORITHMS[op] else default_algorithm(op)


def _searches_on(topology: Topology, protocol: Protocol) -> _Searches:
    table = tuple((op, *rows.items()) for op, rows in ALGORITHMS.items())
    return _searches(_Network(replace(topology, weather=Weather()), protocol, table))


@lru_cache(maxsize=8)  # the choice for a whole round and its simulations ask the same
def _searches(network: _Network) -> _Searches:
    return _Searches(network.topology, network.protocol)


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
    parts: Sequence[int] | Sequence[Sequence[int]] | None = None,
    protocol: Protocol | None = None,
) -> Schedule:
    """Build the schedule of one collective, on a network where one is given; the same object for the same arguments.

    A collective of no bytes has no messages, except all_to_all, whose members learn that each part is empty.

    Args:
        op: operation, such as "all_reduce".
        num_ranks: members.
        num_bytes: as of `Schedule`; for sendrecv from member 0 to member 1.
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
    names = algorithm_names(op)
    if algorithm not in (None, "auto", *names):
        raise unknown_name(f"algorithm for {op}", str(algorithm), (*names, "auto"))
    problem = _problem(
        op, num_ranks, num_bytes, root=root, hosts=hosts, topology=topology, parts=parts, grain=element_bytes
    )
    if algorithm == "auto" and topology is not None and hosts is not None:
        estimator = _searches_on(topology, Protocol.resolve(protocol, topology.protocol)).estimator
        algorithm = estimator.fastest(replace(problem, element_bytes=1, parts=None), tuple(hosts))
    return build(replace(problem, algorithm=names[0] if algorithm in (None, "auto") else str(algorithm)))


def _problem(
    op: str,
    num_ranks: int,
    num_bytes: int,
    *,
    root: int,
    hosts: Sequence[int] | None,
    topology: Topology | None,
    parts: Sequence[int] | Sequence[Sequence[int]] | None = None,
    grain: int = 1,
) -> Problem:
    """Check a request; return it with the default algorithm."""
    for name, value, least, largest in (
        ("num_ranks", num_ranks, 2 if OPERATIONS[op].is_message else 1, _MOST_RANKS),
        ("num_bytes", num_bytes, 0, None),
        ("element_bytes", grain, 1, None),
    ):
        if not isinstance(value, Integral) or value < least or (largest is not None and value > largest):
            limit = f"of at least {least}" if largest is None else f"from {least} to {largest:,}"
            raise InputError(f"{op}: {name} is {value!r}; give a whole number {limit}")
    if not isinstance(root, Integral) or not 0 <= root < num_ranks:
        raise InputError(f"{op}: root {root!r} is not a member; it must be from 0 to {num_ranks - 1}")
    flat = None if parts is None else _flat_parts(op, num_ranks, parts)
    total = int(num_bytes) if flat is None else sum(flat)
    num_bytes_each, each = (total // num_ranks, " a rank") if OPERATIONS[op].is_per_pair else (total, "")
    if num_bytes_each > _MOST_BYTES:
        size, most = format_bytes(num_bytes_each), format_bytes(_MOST_BYTES)
        raise InputError(f"{op}: {size}{each} is more than the {most} that are timed at once: split it")
    regions = () if topology is None or hosts is None else tuple(map(topology.region_of, hosts))
    return Problem(op, default_algorithm(op), num_ranks, total, root, grain, flat, regions)


def _flat_parts(op: str, num_ranks: int, parts: Sequence[int] | Sequence[Sequence[int]]) -> tuple[int, ...]:
    operation = OPERATIONS[op]
    if operation.is_whole:
        raise InputError(f"{op}: it has no parts; give num_bytes instead")
    rows = [[row] if isinstance(row, int) else list(row) for row in parts]
    wanted = num_ranks if operation.is_per_pair else 1
    if len(rows) != num_ranks or any(len(row) != wanted for row in rows):
        shape = f"{num_ranks} rows of {num_ranks}" if operation.is_per_pair else f"{num_ranks} numbers"
        raise InputError(f"{op}: parts must be {shape} of bytes for {num_ranks} ranks")
    flat = tuple(chain.from_iterable(rows))
    if min(flat) < 0:
        raise InputError(f"{op}: parts must be 0 bytes or more, got {min(flat)}")
    return flat


def _round_bytes(num_bytes: int) -> int:
    """Round to 6 significant bits, so that collectives of ever new sizes need few searches.

    >>> [_round_bytes(size) for size in (0, 1, 63, 64, 65, 13_000, 25_000_000)]
    [0, 1, 63, 64, 66, 13056, 25165824]
    """
    shift = max(num_bytes.bit_length() - _SIGNIFICANT_BITS, 0)
    return (num_bytes + (1 << shift >> 1)) >> shift << shift
