"""Text of a topology file with its sources, and comments on measured and assumed figures."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from netsim.errors import InputError
from netsim.files.documents import MAX_FILE_BYTES, parse_document
from netsim.topology.file import LinkEntry, RegionEntry
from netsim.topology.graph import Link
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "Assumed",
    "LinkLine",
    "TopologyBuilder",
    "milliseconds",
    "on_one_line",
    "rate",
    "region_entry",
    "safe_name",
]

_PLAIN = re.compile(r"[A-Za-z_][\w.-]*")
_WORDS = {"yes", "no", "on", "off", "true", "false", "null", "y", "n"}


@dataclass(frozen=True)
class Assumed:
    """Values for what a file does not say.

    Attributes:
        bits_per_second: of links without a rate; None: refuse them.
        latency_seconds: of links without a latency, one way; None: refuse them.
        nic_bits_per_second: of each host's own link, where routes between sites were measured; None: 10 Gbit/s.
        hosts: how many each site has; None: one.
        nics: place -> (up, down) of its hosts' own links, where it is not `nic_bits_per_second`.
        hosts_of: place -> how many it has, where it is not `hosts`.
    """

    bits_per_second: float | None = None
    latency_seconds: float | None = None
    nic_bits_per_second: float | None = None
    hosts: int | None = None
    nics: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    hosts_of: Mapping[str, int] = field(default_factory=dict)

    def rate(self, missing: str, notes: list[str]) -> float:
        """Rate of a link without one, with a note.

        Raises InputError where none is assumed; it begins with what is `missing`.
        """
        if self.bits_per_second is None:
            raise InputError(f"{missing} with --bandwidth")
        notes.append(f"rate assumed: {rate(self.bits_per_second)}")
        return self.bits_per_second

    def latency(self, missing: str, notes: list[str]) -> float:
        """Latency of a link without one, as `rate`."""
        if self.latency_seconds is None:
            raise InputError(f"{missing} with --latency")
        notes.append(f"latency assumed: {milliseconds(self.latency_seconds)}")
        return self.latency_seconds


@dataclass
class LinkLine:
    """Both directions of a connection, and a comment on the origin of their figures."""

    there: Link
    back: Link
    comment: str = ""

    @classmethod
    def between(
        cls,
        one: str,
        other: str,
        rates: Sequence[float],
        latency_seconds: float,
        comment: str,
        loss: float = 0.0,
        streams: Sequence[int | None] = (None, None),
        mtu: int | None = None,
        of_stream: Sequence[float | None] = (None, None),
    ) -> LinkLine:
        """Connect two nodes; `rates` in bit/s, the `streams` that measured them, and that of one, there and back."""
        there, back = (
            Link(0, *ends, rate, latency_seconds, loss, None, 0.0, count, mtu, single)
            for ends, rate, count, single in zip(
                ((one, other), (other, one)), rates, streams, of_stream, strict=True
            )
        )
        return cls(there, back, comment)

    def line(self) -> str:
        """Entry of `links` or `wan`."""
        between = f"[{_quote(self.there.source)}, {_quote(self.there.target)}]"
        entry = {"between": between, **LinkEntry.form(self.there, self.back, _FORMATS)}
        text = f"  # {on_one_line(self.comment)}" if self.comment else ""
        return f"  - {_flow(entry)}{text}"


@dataclass
class TopologyBuilder:
    """Topology file under construction.

    Attributes:
        name: of the topology.
        sources: sentences for `source`: what was read, when it was measured, what was assumed.
        hosts: names, where there are no regions.
        routers: names of nodes that only forward.
        regions: name -> entry as text, such as `{hosts: 2, nic: 10 Gbit/s, latency: 50 us}`.
        links: between nodes, or between regions where there are any.
        protocol: how transfers use links; None: left open.
        are_ends_measured: links are routes measured end to end, so that none leads through a third place, even if
            that has less latency.
        remarks: notes to the reader on what was read.
        not_read: columns, attributes and lines of the files that are not used.
    """

    name: str
    sources: list[str]
    hosts: list[str] = field(default_factory=list)
    routers: list[str] = field(default_factory=list)
    regions: dict[str, str] = field(default_factory=dict)
    links: list[LinkLine] = field(default_factory=list)
    protocol: str | None = None
    are_ends_measured: bool = False
    remarks: list[str] = field(default_factory=list)
    not_read: list[str] = field(default_factory=list)

    def to_yaml(self) -> str:
        """Write the text of the file, and read it back once as a check.

        Raises InputError for a network that is not connected, or too large for a topology file.
        """
        text = self._text([])
        routes = self._routes(self._load(text))
        if routes:
            text = self._text(routes)
            self._load(text)
        return text

    def _text(self, routes: Iterable[str]) -> str:
        text = "\n".join(self._lines(routes)) + "\n"
        if len(text.encode()) > MAX_FILE_BYTES:  # perhaps not without a comment on each link
            text = "\n".join(self._lines(routes, is_short=True)) + "\n"
        if len(text.encode()) > MAX_FILE_BYTES:
            raise InputError(
                f"{self.name}: {len(self.links):,} links make a topology file of more than 1 MB, which is not read: "
                "take some of the places with --only A,B,..."
            )
        return text

    def _load(self, text: str) -> Topology:
        return Topology.from_mapping(cast("dict[str, Any]", parse_document(text).data), where=self.name)

    def _routes(self, topology: Topology) -> list[str]:
        """Routes between measured ends that differ from those of least latency."""
        if not self.are_ends_measured:
            return []
        ends = {(link.there.source, link.there.target) for link in self.links}
        routes = []
        for source, target in sorted({*ends, *((other, one) for one, other in ends)}):
            via = [source, target] if self.regions else []
            first, last = (
                topology.host_index(f"{end}.0" if self.regions else end) for end in (source, target)
            )
            if [topology.links[link].target for link in topology.route(first, last)][:-1] != via:
                through = ", ".join(map(_quote, via))
                routes.append(f"  - {{from: {_quote(source)}, to: {_quote(target)}, through: [{through}]}}")
        return routes

    def _lines(self, routes: Iterable[str], is_short: bool = False) -> Iterable[str]:
        yield f"name: {json.dumps(self.name)}"
        left_out = [f"Not read: {'; '.join(self.not_read)}."] if self.not_read else []
        yield f"source: {json.dumps(on_one_line(' '.join([*left_out, *self.sources]))[:2000])}"
        if self.protocol is not None:
            yield f"protocol: {self.protocol}"
        yield from (f"# Note: {on_one_line(remark)}" for remark in self.remarks)
        if self.hosts:
            yield "hosts:"
            yield from (f"  {_quote(name)}: {{}}" for name in self.hosts)
        if self.routers:
            yield f"routers: [{', '.join(map(_quote, self.routers))}]"
        if self.regions:
            yield "regions:"
            yield from (f"  {_quote(name)}: {entry}" for name, entry in self.regions.items())
        if self.links:
            yield "wan:" if self.regions else "links:"
            yield from ((replace(link, comment="") if is_short else link).line() for link in self.links)
        routes = list(routes)
        if routes:
            yield "# Each route was measured end to end: none leads through a third place."
            yield "routes:"
            yield from routes


def rate(bits_per_second: float) -> str:
    """Format a rate as topology files have it.

    >>> rate(1.4e9), rate(523.4e6), rate(56e3)
    ('1.4 Gbit/s', '523.4 Mbit/s', '56 kbit/s')
    """
    for prefix, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:.9g} {prefix}bit/s"
    return f"{bits_per_second:.9g} bit/s"


def milliseconds(seconds: float) -> str:
    """Format a latency as topology files have it, in us below 0.1 ms."""
    return f"{seconds * 1e6:.9g} us" if 0 < seconds < 1e-4 else f"{seconds * 1e3:.9g} ms"


def region_entry(
    hosts: int, up: float, down: float, latency_seconds: float, streams: int | None = None
) -> str:
    """Entry of `regions`: each host's own link in bit/s, the goodput of `streams` together where measured."""
    card = LinkLine.between("", "", (up, down), latency_seconds, "", streams=(streams, streams))
    return _flow({"hosts": hosts, **RegionEntry.form(card.there, card.back, _FORMATS)})


# Few digits and a unit.
_FORMATS = {"bit/s": rate, "s": milliseconds, "%": lambda share: f"{share * 100:.6g} %"}


def _flow(entry: Mapping[str, Any]) -> str:
    """Write a mapping in one line of YAML; its values need no quotes."""
    values = ((key, _flow(value) if isinstance(value, dict) else value) for key, value in entry.items())
    return f"{{{', '.join(f'{key}: {value}' for key, value in values)}}}"


def safe_name(name: str, taken: dict[str, str]) -> str:
    """Turn a name into one that topology files accept; `taken` maps originals to their names.

    >>> taken = {}
    >>> safe_name("New York, NY", taken), safe_name("New York; NY", taken), safe_name("New York, NY", taken)
    ('New-York-NY', 'New-York-NY-2', 'New-York-NY')
    """
    if name not in taken:
        base = re.sub(r"[^\w.]+", "-", name).strip("-.")[:90] or "node"
        base = base if base[0].isalnum() or base[0] == "_" else f"n{base}"
        known, number, unique = set(taken.values()), 1, base
        while unique in known:
            number += 1
            unique = f"{base}-{number}"
        taken[name] = unique
    return taken[name]


def _quote(name: str) -> str:
    is_plain = _PLAIN.fullmatch(name) and name.lower() not in _WORDS
    return name if is_plain else json.dumps(name)


def on_one_line(text: str) -> str:
    """Replace line breaks and unprintable characters by spaces."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
