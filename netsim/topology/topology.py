"""Networks: hosts, routers, directed links, regions, and the routes that traffic takes.

    topology = Topology.load("wan-4-regions")        # one that ships, or the path of a YAML file
    topology.route(0, 5)                             # indices into topology.links

`netsim show` prints a topology, `netsim validate` checks one, `netgym schema topology` prints the format.
"""

from __future__ import annotations

import copy
import itertools
import math
import operator
import os
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import topologies
from netsim.errors import InputError, unknown_name, visible
from netsim.files.documents import Document, load_document
from netsim.topology import shipped_topologies
from netsim.topology.file import TopologyReader, likely_names, plain_form
from netsim.topology.graph import Host, Link, ShortestRoutes, natural_key
from netsim.topology.weather import Weather
from netsim.units import format_count, format_seconds, shown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["FloatArray", "Host", "Link", "Topology"]


def _spread(num_ranks: int, groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Place ranks evenly over groups of hosts (regions), contiguous within a group.

    Every host gets a rank before any gets a second one. Where the number does not divide, earlier groups
    get one more; a group that is full leaves its share to the others. Returns each rank's host.

    >>> _spread(4, [[0, 1, 2], [3, 4, 5]])
    (0, 1, 3, 4)
    >>> _spread(5, [[0, 1, 2], [3]])
    (0, 1, 2, 0, 3)
    """
    rounds, rest = divmod(num_ranks, sum(map(len, groups)))
    extra = [0] * len(groups)
    while rest:
        for position, group in enumerate(groups):
            if rest and extra[position] < len(group):
                extra[position] += 1
                rest -= 1
    places: list[int] = []
    for group, more in zip(groups, extra, strict=True):
        places += [*group] * rounds + [*group[:more]]
    return tuple(places)


# Routes of a group are compared pair by pair.
_LARGEST_ALIKE = 8
_MOST_PLACES = 100

FloatArray: TypeAlias = "npt.NDArray[np.float64]"


@dataclass(frozen=True)
class Topology:
    """An immutable network. Equal files give equal topologies, whatever the order of their keys and entries.

    Attributes:
        name, source: its name, and the origin of its figures.
        hosts: in natural name order; `hosts[i].index == i`.
        routers: names of nodes that only forward, in natural order.
        links: one direction each, by natural order of (source, target); `links[i].index == i`.
        regions: names, in natural order.
        protocol: as the file has it: a preset's name, a mapping, or None; `netsim.topology.protocol` checks it.
        explicit_routes: (host, host) -> links, for the routes that the file gives.
        weather: changes while it runs.
    """

    name: str
    source: str
    hosts: tuple[Host, ...]
    routers: tuple[str, ...]
    links: tuple[Link, ...]
    regions: tuple[str, ...]
    protocol: str | Mapping[str, Any] | None = None
    explicit_routes: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict, repr=False)
    weather: Weather = field(default_factory=Weather.model_construct, repr=False)

    @classmethod
    def load(cls, path_or_name: str | Path) -> Topology:
        """Read `path_or_name`: a YAML file, or the shipped topology of that name.

        Raises InputError (a ValueError) with every mistake by file, line and key.
        """
        path = _find(path_or_name)
        return TopologyReader(load_document(path)).read(cls, path.stem, path.parent)

    @classmethod
    def document_of(cls, path_or_name: str | Path) -> Document:
        """Checked content of `path_or_name`, a YAML file or a shipped topology, that refers to no other file.

        It has the topology's name, and the content of CSV files in place of their names.

        Raises InputError (a ValueError) as `load` does.
        """
        path = _find(path_or_name)
        document = load_document(path)
        topology = TopologyReader(document).read(cls, path.stem, path.parent)
        return replace(document, data=topology.without_files(document.data))  # type: ignore[arg-type]

    def without_files(self, written: Mapping[str, Any]) -> dict[str, Any]:
        """Form of this topology that was `written`, with its name, and the content of CSV files in place of theirs."""
        data = {**written, "name": self.name}
        if data.get("traces"):
            data["traces"] = self.to_mapping()["traces"]
        if any(entry.get("file") for entry in data.get("availability") or ()):
            del data["availability"]
            data["events"] = self.to_mapping()["events"]
        return data

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], where: str = "<mapping>") -> Topology:
        """A topology from a `mapping` of the same form as the file; `where` names it in errors.

        Raises InputError (a ValueError) with every mistake by key.
        """
        data = copy.deepcopy(dict(mapping)) if isinstance(mapping, Mapping) else mapping
        return cls.from_document(Document(where, data))

    @classmethod
    def from_document(cls, document: Document) -> Topology:
        """A topology from a `document` that was read already, such as a part of another file; raises InputError."""
        return TopologyReader(document).read(cls, "topology", Path())

    @cached_property
    def link_between(self) -> dict[tuple[str, str], Link]:
        """Links by the names of their ends, (source, target)."""
        return {(link.source, link.target): link for link in self.links}

    def host_index(self, name: str) -> int:
        """Index of a host by its name; raises UnknownNameError."""
        index = self._host_indices.get(name)
        if index is None:
            raise unknown_name("host", str(name), likely_names(str(name), self._host_indices))
        return index

    def route(self, src: int, dst: int) -> tuple[int, ...]:
        """The links (indices) from host `src` to host `dst`, in order; () within a host.

        It is the file's explicit route, or that of least latency, then fewest links, then least natural name order.
        """
        known = self.explicit_routes.get((src, dst))
        if known is not None:
            return known
        return self._graph.route(self.hosts[src].name, self.hosts[dst].name)

    def route_latency_seconds(self, src: int, dst: int) -> float:
        """One-way latency in seconds from host `src` to host `dst`: the sum over its route."""
        links = self.links
        return math.fsum([links[link].latency_seconds for link in self.route(src, dst)])

    @cached_property
    def bits_per_second(self) -> FloatArray:
        """Capacity of each link; shape (links,), read-only."""
        return _read_only([link.bits_per_second for link in self.links])

    @cached_property
    def latency_seconds(self) -> FloatArray:
        """One-way latency of each link; shape (links,), read-only."""
        return _read_only([link.latency_seconds for link in self.links])

    @cached_property
    def loss(self) -> FloatArray:
        """Share of packets that each link loses; shape (links,), read-only."""
        return _read_only([link.loss for link in self.links])

    @cached_property
    def measured_streams(self) -> npt.NDArray[np.int64]:
        """Streams with which the goodput of each link was measured, 0 where its rate is nominal; shape (links,)."""
        import numpy as np

        return np.array([link.measured_streams or 0 for link in self.links], dtype=np.int64)

    def bytes_by_name(self, link_bytes: Sequence[float]) -> dict[str, int]:
        """Whole bytes by name of the link (`a->b`), of `link_bytes` by link index, for links with any."""
        rounded = zip(self.links, map(round, link_bytes), strict=True)
        return {link.name: num_bytes for link, num_bytes in rounded if num_bytes}

    def egress_dollars(self, link_bytes: Sequence[float]) -> float:
        """Dollars of `link_bytes`, by link index, at the `egress` price of each link.

        Raises InputError where they are not one number a link.

        >>> link = {"between": ["a", "b"], "bandwidth": "1 Gbit/s", "egress": "0.02 $/GB"}
        >>> pair = {"hosts": ["a", "b"], "links": [link]}
        >>> Topology.from_mapping(pair).egress_dollars([125e9, 0])
        2.5
        """
        if len(link_bytes) != len(self.links):
            raise InputError(
                f"egress_dollars: {len(link_bytes)} numbers for {len(self.links)} links; give one each"
            )
        return math.fsum(map(operator.mul, self.dollars_per_byte, link_bytes))

    @cached_property
    def dollars_per_byte(self) -> list[float]:
        """Price of a byte over each link: the link's `egress`, and that of the store which sends it."""
        stores = {host.name: host.store.dollars_per_byte for host in self.hosts if host.store is not None}
        return [link.dollars_per_byte + stores.get(link.source, 0.0) for link in self.links]

    @cached_property
    def rank_hosts(self) -> tuple[Host, ...]:
        """Hosts that ranks are placed on: all but stores."""
        return tuple(host for host in self.hosts if host.store is None)

    def store_hosts(self, name: str, relays: Sequence[str] = ()) -> tuple[int, ...]:
        """Host (index) of a store, then those of its relays.

        Args:
            name: of the store; "": the only one that is.
            relays: names of stores that it sends copies to.

        Raises:
            UnknownNameError: one of them is no store.
            InputError: there is no store, not one where `name` is missing, or one is named twice.
        """
        stores = [host.name for host in self.hosts if host.store is not None]
        where = f"topology {self.name}"
        if not stores:
            raise InputError(f"{where} has no store: add a host NAME: {{store: {{}}}}, and its link")
        if not name and len(stores) > 1:
            raise InputError(
                f"{where} has {format_count(len(stores), 'store')}: name one: {', '.join(stores)}"
            )
        names = (name or stores[0], *relays)
        for number, each in enumerate(names):
            if each not in stores:
                raise unknown_name(f"store of {where}", each, stores)
            if each in names[:number]:
                raise InputError(
                    f"exchange: store: {each} is named twice: name the store once, and each relay once"
                )
        return tuple(map(self.host_index, names))

    def region_of(self, host: int) -> str:
        """The region of a `host` (index); the host's own name where it is in none."""
        machine = self.hosts[host]
        return machine.region if machine.region is not None else machine.name

    def place(self, num_ranks: int, placement: Sequence[str] | None = None) -> tuple[int, ...]:
        """The host of each of `num_ranks`: spread evenly over regions, or by `placement`, a host's name a rank.

        Raises InputError where the number of ranks is not positive, the names do not match it, or one is a store's.
        """
        if num_ranks < 1:
            raise InputError(f"num_ranks={num_ranks}: expected at least 1")
        if placement is None:
            return _spread(num_ranks, self._groups)
        if isinstance(placement, str) or not isinstance(placement, Sequence):
            raise InputError("placement: expected a list of host names, one a rank")
        if len(placement) != num_ranks:
            raise InputError(f"placement: expected {num_ranks} host names, one a rank, got {len(placement)}")
        places = tuple(self.host_index(name) for name in placement)
        if stores := [name for name, host in zip(placement, places, strict=True) if self.hosts[host].store]:
            raise InputError(
                f"placement: {stores[0]} is a store, and a store runs no workers: name another host"
            )
        return places

    @cached_property
    def unused_links(self) -> str | None:
        """Remark on links that no route takes, as a route over others has less latency; None without any.

        Links between hosts or the routers next to them are looked at, of up to `_MOST_PLACES` such places.
        """
        hosts = zip(self.hosts, self.access_links, strict=True)
        places = {host.name if access is None else access[0].target for host, access in hosts}
        given, found = set(itertools.chain.from_iterable(self.explicit_routes.values())), []
        for link in self.links if len(places) <= _MOST_PLACES else ():
            both = link.index, self.link_between[link.target, link.source].index
            if both[0] < both[1] and {link.source, link.target} <= places and given.isdisjoint(both):
                route = [self.links[index] for index in self._graph.route(link.source, link.target)]
                if len(route) > 1:
                    found.append((link, route))
        if not found:
            return None
        link, route = found[0]
        one, other = (math.fsum(each.latency_seconds for each in way) for way in (route, [link]))
        return (
            f"link {link.source} - {link.target}"
            + (f" and {format_count(len(found) - 1, 'other')} carry" if found[1:] else " carries")
            + f" no route: {link.source} to {link.target} goes by {', '.join(each.target for each in route[:-1])} "
            f"({format_seconds(one)} one way instead of {format_seconds(other)})"
            + ", and each link on the way charges egress" * any(each.dollars_per_byte for each in route)
            + ": give `routes:` to use it"
        )

    def to_mapping(self) -> dict[str, Any]:
        """Plain data in the form of the file, exact and in canonical order: loads back to an equal topology."""
        return plain_form(self)

    @cached_property
    def _host_indices(self) -> dict[str, int]:
        return {host.name: host.index for host in self.hosts}

    @cached_property
    def _groups(self) -> list[list[int]]:
        """Hosts by region, in natural order; a host without region is a group of its own."""
        groups = defaultdict[tuple[object, bool], list[int]](list)
        for host in self.rank_hosts:
            groups[natural_key(host.region or host.name), host.region is None].append(host.index)
        return [groups[key] for key in sorted(groups)]

    @cached_property
    def host_kinds(self) -> Sequence[int]:
        """Kind of each host, as a number; routes between hosts of two kinds have links with equal figures.

        Such hosts are behind one node, by links with the same figures.
        """
        if self.explicit_routes:
            return range(len(self.hosts))
        kinds: dict[object, int] = {}
        found = []
        for host, access in enumerate(self.access_links):
            place: object = host
            if access is not None:
                place = access[0].target, access[0].figures, access[1].figures
            found.append(kinds.setdefault(place, len(kinds)))
        return found

    @cached_property
    def access_links(self) -> list[tuple[Link, Link] | None]:
        """The only link out of each host and the only one into it; None for a host with others."""
        out, into = defaultdict[str, list[Link]](list), defaultdict[str, list[Link]](list)
        for link in self.links:
            out[link.source].append(link)
            into[link.target].append(link)
        found: list[tuple[Link, Link] | None] = []
        for host in self.hosts:
            sent, received = out[host.name], into[host.name]
            found.append((sent[0], received[0]) if len(sent) == len(received) == 1 else None)
        return found

    def likeness(self, hosts: Sequence[int]) -> Hashable:
        """Key of a group of hosts; groups with equal keys take equally long for every collective.

        It holds the pattern of links on their routes, the figures of these links, and the pattern of regions. For more
        than `_LARGEST_ALIKE` members it is the hosts themselves.
        """
        if len(hosts) > _LARGEST_ALIKE:
            return tuple(hosts)
        numbers: dict[int, int] = {}
        routes = tuple(
            tuple(numbers.setdefault(link, len(numbers)) for link in self.route(src, dst))
            for src, dst in itertools.product(hosts, repeat=2)
        )
        regions = [self.region_of(host) for host in hosts]
        return routes, tuple(self.links[link].figures for link in numbers), tuple(map(regions.index, regions))

    @cached_property
    def _graph(self) -> ShortestRoutes:
        return ShortestRoutes([*self._host_indices, *self.routers], self.links)


def _find(path_or_name: str | Path) -> Path:
    """File of a shipped topology's name, or of a path."""
    if not isinstance(path_or_name, str | os.PathLike):
        raise InputError(f"Topology.load: expected a name or a path, got {shown(path_or_name)}")
    path = Path(path_or_name)
    is_name = path.name == str(path_or_name) and path.suffix not in (".yaml", ".yml")
    shipped = Path(topologies.__path__[0], f"{path.name if is_name else path.stem}.yaml")
    is_shipped = os.path.isfile(shipped)  # unlike the path's own method it takes names that no file can have
    if is_name and is_shipped:
        return shipped
    if os.path.exists(path):
        return path
    # `topologies/NAME.yaml` is where the repository has them; an installed package has them elsewhere.
    if is_shipped and path.suffix == ".yaml" and str(path.parent) in (".", "topologies"):
        return shipped
    if is_name:
        raise unknown_name("topology or file", str(path_or_name)[:200], shipped_topologies())
    known = ", ".join(shipped_topologies())
    raise InputError(f"{visible(str(path))}: no such file: give the path of a YAML file, or one of {known}")


def _read_only(values: Sequence[float]) -> FloatArray:
    # Imported here: `netsim show` and `validate` do without it, and it takes a third of their start.
    import numpy as np

    array = np.array(values, dtype=np.float64)
    array.setflags(write=False)
    return array
