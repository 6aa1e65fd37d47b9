"""Strategies of hypothesis: networks, protocols, weather, placements and calls of collectives.

Each draws all its choices as one string of bytes, which is quick; a byte of zero takes the first of several options, so
that failing examples shrink to few hosts, round figures and short files.
"""

from __future__ import annotations

import os
from itertools import combinations, islice, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from netsim.collectives.operations import OPERATIONS
from netsim.errors import InputError
from netsim.testing.laws import CallShape, Case, LawError, TopologyMapping

try:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as with_seed
    from hypothesis import strategies as st
    from hypothesis.configuration import set_hypothesis_home_dir
except ImportError:
    raise InputError("netsim.testing: hypothesis is not installed: run: pip install 'netgym[test]'") from None

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "BANDWIDTHS",
    "LATENCIES",
    "PROTOCOLS",
    "calls",
    "cases",
    "hold_for_all",
    "placements",
    "protocols",
    "topologies",
    "weather",
]

T = TypeVar("T")

BANDWIDTHS = ("10 Mbit/s", "1 Mbit/s", "100 Mbit/s", "1 Gbit/s")
LATENCIES = ("1 ms", "0 s", "10 ms", "30 ms")
PROTOCOLS: tuple[str | dict[str, Any], ...] = (
    *("ideal", "linux-tcp", "gloo", "nccl-sockets"),
    {"preset": "linux-tcp", "streams": 8},
    {"preset": "linux-tcp", "connections": "per-transfer", "queue": 30},
    {"preset": "linux-tcp", "window": "64 KiB"},
    "hivemind",
)
_ELEMENT_BYTES = (4, 1, 8, 2)
_LARGE_ELEMENTS = (4, 1, 1000, 100_000)  # blocks of a large tensor
_INSTANTS = ("1 ms", "0 s", "5 ms", "20 ms", "100 ms")
_DURATIONS = ("10 ms", "1 ms", "50 ms", "300 ms")
_KINDS = ("event", "crash", "trace", "drift", "background")
_CHANGES: tuple[dict[str, Any], ...] = (
    {"down": True},
    {"bandwidth": "100 kbit/s"},
    {"latency": "50 ms"},
    {"loss": "2 %"},
)


class Picks:
    """Choices by the bytes of a string, the first options when they are used up."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def below(self, num: int) -> int:
        """A number from 0 to num - 1, num at most 65,536."""
        first = next(self._bytes, 0)
        return (first if num <= 256 else 256 * first + next(self._bytes, 0)) % num

    def of(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.below(len(options))]

    def part(self, num_bytes: int) -> Picks:
        """Choices by the next bytes alone."""
        return Picks(bytes(islice(self._bytes, num_bytes)))

    def chance(self, one_in: int) -> bool:
        """True once in so many times; False for zeros."""
        return self.below(one_in) == one_in - 1


@st.composite  # and not `map`, of which reports show the bytes
def _drawn(draw: st.DrawFn, make: Callable[[Picks], T], num_bytes: int) -> T:
    return make(Picks(draw(st.binary(min_size=num_bytes, max_size=num_bytes))))


def topologies(
    min_hosts: int = 1, max_hosts: int = 6, *, is_detailed: bool = False
) -> st.SearchStrategy[TopologyMapping]:
    """Draw networks: one to three regions with links between them, or a tree of hosts and routers.

    Args:
        min_hosts: fewest hosts.
        max_hosts: most hosts.
        is_detailed: with devices, regions of single hosts, loss, queues and circles of links as well.
    """

    def make(picks: Picks) -> TopologyMapping:
        return TopologyMapping((_detailed if is_detailed else _topology)(picks, min_hosts, max_hosts))

    return _drawn(make, 32 + 5 * max_hosts + 60 * is_detailed)


def _topology(picks: Picks, min_hosts: int, max_hosts: int) -> dict[str, Any]:
    num = min_hosts + picks.below(max_hosts - min_hosts + 1)
    return _tree(picks, num) if picks.chance(3) else _regions(picks, num)


def _regions(picks: Picks, num_hosts: int) -> dict[str, Any]:
    links, cards, first = picks.part(6), picks.part(6), picks  # one may shrink without changing another
    count = min(1 + first.below(3), num_hosts)
    is_meshed, sizes = first.chance(2), [1] * count
    for _ in range(num_hosts - count):
        sizes[first.below(count)] += 1
    regions = {
        name: {"hosts": size, "nic": cards.of(BANDWIDTHS), "latency": cards.of(LATENCIES)}
        for name, size in zip("abc", sizes, strict=False)
    }
    wan = [_link(links, *pair) for pair in (combinations(regions, 2) if is_meshed else pairwise(regions))]
    return {"regions": regions, **({"wan": wan} if wan else {})}


def _link(picks: Picks, one: str, other: str) -> dict[str, Any]:
    return {"between": [one, other], "bandwidth": picks.of(BANDWIDTHS), "latency": picks.of(LATENCIES)}


def _tree(picks: Picks, num_hosts: int) -> dict[str, Any]:
    hosts = [f"h{number}" for number in range(num_hosts)]
    routers = [f"r{number}" for number in range(picks.below(4))]
    names = [*hosts, *routers]
    links = [
        {
            "between": [name, names[picks.below(place)]],
            "up": picks.of(BANDWIDTHS),
            "down": picks.of(BANDWIDTHS),
            "latency": picks.of(LATENCIES),
        }
        for place, name in enumerate(names)
        if place
    ]
    return {"hosts": hosts, **({"routers": routers} if routers else {}), "links": links}


def _detailed(picks: Picks, min_hosts: int, max_hosts: int) -> dict[str, Any]:
    if max_hosts > 1 and picks.chance(4):
        net = _regions(picks, max(min_hosts, 2) - 1)
        net |= {"hosts": ["h0"], "links": [_link(picks, "h0", "a")]}
    else:
        net = _topology(picks, min_hosts, max_hosts)
    links = net.setdefault("wan" if "regions" in net else "links", [])
    named = list(net.get("regions", ())) or [*net["hosts"], *net.get("routers", ())]
    known = [set(link["between"]) for link in links]
    pairs = [pair for pair in combinations(named, 2) if {*pair} not in known]
    links += [_link(picks, *pair) for pair in pairs if picks.chance(4)]
    for link in links:
        if picks.chance(2):
            link |= {"loss": "0.07 %", "queue": 1 + picks.below(10_000)}
    keys: tuple[dict[str, str], ...] = ({}, {"device": "h100"}, {"region": "far"})
    if "hosts" in net:
        net["hosts"] = {name: dict(picks.of(keys)) for name in net["hosts"]}
    return {key: value for key, value in net.items() if value}


def protocols() -> st.SearchStrategy[str | dict[str, Any]]:
    """Draw protocols, presets first: names, or mappings with other streams, windows and connections."""
    return st.sampled_from(PROTOCOLS)


def placements(topology: Mapping[str, Any], num_ranks: int) -> st.SearchStrategy[tuple[str, ...] | None]:
    """Draw hosts of ranks: None, where they are spread evenly, or names in any order, some of them shared.

    Args:
        topology: the network, as `topologies` draws it.
        num_ranks: number of ranks.
    """
    return _drawn(lambda picks: _placement(picks, topology, num_ranks), 3 + num_ranks)


def _placement(picks: Picks, topology: Mapping[str, Any], num_ranks: int) -> tuple[str, ...] | None:
    if not picks.chance(2):
        return None
    names = _host_names(topology)
    first, is_shuffled = picks.below(len(names)), picks.chance(2)
    return tuple(
        picks.of(names) if is_shuffled else names[(first + rank) % len(names)] for rank in range(num_ranks)
    )


def _host_names(topology: Mapping[str, Any]) -> list[str]:
    regions = topology.get("regions", {})
    inside = [f"{name}.{number}" for name, entry in regions.items() for number in range(entry["hosts"])]
    return [*topology.get("hosts", ()), *inside]


def weather(topology: Mapping[str, Any]) -> st.SearchStrategy[TopologyMapping]:
    """Draw weather in which every transfer ends: keys of a topology file with one to three entries.

    Links fail and slow down, and hosts crash, for some time; rates and latencies get worse and never better, so lower
    bounds hold.

    Args:
        topology: the network, as `topologies` draws it.
    """
    return _drawn(lambda picks: TopologyMapping(_weather(picks, topology)), 24)


def _weather(picks: Picks, topology: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    hosts, regions = _host_names(topology), topology.get("regions", {})
    links = [link["between"] for key in ("links", "wan") for link in topology.get(key, ())]
    links += [[host, host.partition(".")[0]] for host in hosts if host.partition(".")[0] in regions]
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(1 + picks.below(3)):
        kind, at, lasts = picks.of(_KINDS), picks.of(_INSTANTS), picks.of(_DURATIONS)
        if kind == "background" and len(hosts) > 1:
            source = picks.below(len(hosts))
            target = (source + 1 + picks.below(len(hosts) - 1)) % len(hosts)
            entry = {"from": hosts[source], "to": hosts[target], "rate": "500 kbit/s", "stop": "1 s"}
            found.setdefault("background", []).append(entry)
        elif kind == "crash" or not links:
            crash = {"at": at, "host": picks.of(hosts), "crash": True, "for": lasts}
            found.setdefault("events", []).append(crash)
        elif kind == "trace" and "traces" not in found:
            found["traces"] = [{"link": [*picks.of(links)], "bandwidth": [[at, "500 kbit/s"]]}]
        elif kind == "drift" and "drift" not in found:
            levels = {"kind": "regime", "every": "100 ms", "levels": ["100 %", "30 %"]}
            found["drift"] = [{"link": [*picks.of(links)], **levels}]
        else:
            event = {"at": at, "link": [*picks.of(links)], **picks.of(_CHANGES), "for": lasts}
            found.setdefault("events", []).append(event)
    return found


def calls(
    num_ranks: int,
    operation: str | None = None,
    *,
    element_bytes: Sequence[int] = _ELEMENT_BYTES,
    most_elements: int = 2000,
    are_parts_even: bool = False,
) -> st.SearchStrategy[CallShape]:
    """Draw calls of collectives: operation, sizes (none, one, fewer or more than members, uneven), root, group.

    Args:
        num_ranks: ranks of whom all, or a group in any order, take part.
        operation: such as "all_reduce"; None: any.
        element_bytes: sizes of an element.
        most_elements: of the layout where parts are equal.
        are_parts_even: sizes are never uneven.
    """
    names = [operation] if operation else [*OPERATIONS][: None if num_ranks > 1 else -1]
    sizes = tuple(element_bytes)
    return _drawn(
        lambda picks: _call(picks, num_ranks, picks.of(names), sizes, most_elements, are_parts_even),
        13 + 2 * num_ranks + num_ranks**2,
    )


def _call(
    picks: Picks, num_ranks: int, name: str, sizes: Sequence[int], most_elements: int, are_parts_even: bool
) -> CallShape:
    op = OPERATIONS[name]
    order = list(range(num_ranks))
    if picks.chance(4):
        order = [order.pop(picks.below(len(order))) for _ in range(num_ranks)]
        order = order[: 1 + op.is_message + picks.below(num_ranks - op.is_message)]
    group = tuple(order[: 2 if op.is_message else None])
    if not op.has_size:
        return CallShape(name, group)
    size, root = picks.of(sizes), picks.below(len(group)) if op.has_root else 0
    num_parts = op.num_parts(len(group))
    if not (op.is_whole or are_parts_even) and picks.chance(3):
        return CallShape(name, group, tuple(picks.below(10) for _ in range(num_parts)), size, root)
    few = 4 * max(num_parts, len(group)) + 2
    return CallShape(name, group, picks.below(most_elements + 1 if picks.chance(4) else few), size, root)


def cases(operation: str, *, max_ranks: int = 9) -> st.SearchStrategy[Case]:
    """Draw calls on networks, under any protocol, an eighth of them in weather.

    Args:
        operation: such as "all_reduce".
        max_ranks: largest number of ranks.
    """
    least = 1 + OPERATIONS[operation].is_message

    def make(picks: Picks) -> Case:
        # Parts of their own, so that one may shrink without changing another.
        first, where, changes, places = (picks.part(num) for num in (4, 96, 24, 3 + max_ranks))
        num_ranks = least + first.below(max_ranks - least + 1)
        topology = TopologyMapping(_topology(where, 1, min(num_ranks + 1, 8)))
        topology["protocol"] = first.of(PROTOCOLS)
        if first.chance(8):
            topology |= _weather(changes, topology)
        call = _call(picks, num_ranks, operation, _LARGE_ELEMENTS, 500, False)
        return Case(call, topology, _placement(places, topology, num_ranks))

    return _drawn(make, 140 + 3 * max_ranks + OPERATIONS[operation].num_parts(max_ranks))


def hold_for_all(
    examples: st.SearchStrategy[T],
    check: Callable[[T], object],
    cases: int | None = None,
    seed: int | None = None,
    most_smaller: int = 1000,
) -> None:
    """Check drawn examples, and make the first that fails smaller.

    Args:
        examples: drawn.
        check: raises LawError.
        cases: number of examples; None: as hypothesis's profile says.
        seed: of the draws; None: as the profile says.
        most_smaller: number of smaller examples that are tried at most.

    Raises:
        LawError: of the smallest example found.
    """
    __tracebackhide__ = True  # pytest shows the error alone
    failed: dict[str, LawError] = {}  # an example that fails is not run again: chance may have a part in it
    num_smaller = 0

    def check_once(example: T) -> None:
        nonlocal num_smaller
        name = repr(example) if failed else ""
        num_smaller += bool(failed)
        if name not in failed and num_smaller <= most_smaller:
            try:
                check(example)
            except LawError as error:
                name = repr(example)
                failed[name] = error
        if name in failed:
            failed[name] = failed.pop(name)  # the newest is the smallest
            raise failed[name]

    number: Any = {} if cases is None else {"max_examples": cases}
    options = settings(
        **number,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.target, Phase.shrink],
    )
    drawn = options(given(examples)(check_once))
    is_placed = "HYPOTHESIS_STORAGE_DIRECTORY" in os.environ
    # It would keep constants of all modules in the current folder, and goes on where it cannot.
    if not is_placed:
        set_hypothesis_home_dir(os.devnull)
    try:
        (drawn if seed is None else with_seed(seed)(drawn))()
    except Exception:
        if not failed:
            raise
    finally:
        if not is_placed:
            set_hypothesis_home_dir(None)
    if failed:
        error = [*failed.values()][-1]
        raise LawError(*error.args) from error.__cause__
