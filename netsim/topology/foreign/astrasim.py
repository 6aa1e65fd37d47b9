"""ASTRA-sim's network files (analytical backend): dimensions of rings, switches and full meshes.

topology: [ Ring, Switch ]      # a building block a dimension
npus_count: [ 4, 2 ]            # their product is the number of NPUs
bandwidth: [ 100.0, 50.0 ]      # GB/s a link; ASTRA-sim's GB are 2^30 bytes (bw_GBps_to_Bpns in its source)
latency: [ 500.0, 1000.0 ]      # ns a link
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from netsim.files.errors import InputError, unknown_name
from netsim.topology.foreign.draft import Draft, DraftLink

if TYPE_CHECKING:
    from netsim.topology.topology import Topology

__all__ = ["is_astrasim", "read_astrasim", "write_astrasim"]

_BLOCKS = ("FullyConnected", "Ring", "Switch")
_MOST_NPUS = 4096
_GB_BITS = 8 * 2**30


def is_astrasim(data: object) -> TypeGuard[dict[str, Any]]:
    """Whether YAML is such a file."""
    return isinstance(data, dict) and {"topology", "npus_count", "bandwidth", "latency"} <= set(data)


def read_astrasim(path: str | Path, data: dict[str, Any]) -> Draft:
    """A host for each NPU, a router for each switch. Raises InputError for what the format does not allow."""
    blocks = [str(block) for block in _listed(path, data, "topology")]
    counts = _listed(path, data, "npus_count")
    rates, latencies = (_numbers(path, data, key) for key in ("bandwidth", "latency"))
    if not len(blocks) == len(counts) == len(rates) == len(latencies):
        raise InputError(f"{path}: topology, npus_count, bandwidth and latency need as many entries each")
    for block in blocks:
        if block not in _BLOCKS:
            raise unknown_name(f"building block in {path}", block, _BLOCKS)
    if any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in counts):
        raise InputError(f"{path}: npus_count: expected whole numbers from 1 up, got {counts}")
    if math.prod(counts) > _MOST_NPUS:
        raise InputError(f"{path}: {math.prod(counts):,} NPUs are more than {_MOST_NPUS:,}")
    shape = " x ".join(f"{block}({count})" for block, count in zip(blocks, counts, strict=True))
    draft = Draft(Path(path).stem, [f"{Path(path).name}: ASTRA-sim network {shape}."])
    names = {at: f"npu{number}" for number, at in enumerate(_places(counts))}
    draft.hosts = list(names.values())
    for dim, (block, count) in enumerate(zip(blocks, counts, strict=True)):
        figures = (rates[dim] * _GB_BITS, latencies[dim] * 1e-9, f"dimension {dim}, {block}")
        groups = sorted({(*at[:dim], 0, *at[dim + 1 :]) for at in names})
        for number, base in enumerate(groups):
            members = [names[(*base[:dim], index, *base[dim + 1 :])] for index in range(count)]
            _connect(draft, block, members, f"switch{dim}.{number}", figures)
    return draft


def _places(counts: list[int]) -> list[tuple[int, ...]]:
    """Positions in the order of NPU numbers: the first dimension counts fastest."""
    return [tuple(reversed(at)) for at in itertools.product(*(range(count) for count in reversed(counts)))]


def _connect(
    draft: Draft, block: str, members: list[str], switch: str, figures: tuple[float, float, str]
) -> None:
    bits_per_second, seconds, comment = figures
    if len(members) == 1:
        return
    if block == "Switch":
        draft.routers.append(switch)
        pairs = [(member, switch) for member in members]
    elif block == "Ring":
        around = zip(members, members[1:] + members[:1], strict=True)
        pairs = sorted({(min(pair), max(pair)) for pair in around}, key=lambda pair: members.index(pair[0]))
    else:
        pairs = list(itertools.combinations(members, 2))
    for one, other in pairs:
        draft.links.append(DraftLink(one, other, bits_per_second, bits_per_second, seconds, comment=comment))


def _listed(path: str | Path, data: dict[str, Any], key: str) -> list[Any]:
    value = data[key]
    if not isinstance(value, list) or not value:
        raise InputError(f"{path}: {key}: expected a list with an entry for each dimension")
    return value


def _numbers(path: str | Path, data: dict[str, Any], key: str) -> list[float]:
    try:
        numbers = [float(value) for value in _listed(path, data, key)]
    except (TypeError, ValueError):
        numbers = [math.nan]
    if not all(0 <= number < math.inf for number in numbers):
        raise InputError(f"{path}: {key}: expected numbers from 0 up")
    return numbers


def write_astrasim(topology: Topology) -> str:
    """The network file of a topology of one dimension: a switch, a full mesh or a ring of equal links.

    Raises InputError for others, of which the format can say nothing.
    """
    num = len(topology.hosts)
    figures = {(link.bits_per_second, link.latency_seconds) for link in topology.links}
    ends = {(link.source, link.target) for link in topology.links}
    names = [host.name for host in topology.hosts]
    block = ""
    if len(figures) == 1 and num > 1:
        neighbours = {name: {target for source, target in ends if source == name} for name in names}
        if len(topology.routers) == 1 and all(near == set(topology.routers) for near in neighbours.values()):
            block = "Switch"
        elif not topology.routers and all(len(near) == num - 1 for near in neighbours.values()):
            block = "FullyConnected"
        elif not topology.routers and all(len(near) == 2 for near in neighbours.values()):
            block = "Ring"
    if not block:
        raise InputError(
            f"{topology.name}: ASTRA-sim's network files know a switch, a full mesh or a ring of equal links only: "
            "export as simgrid, or give each region a topology of its own"
        )
    ((bits_per_second, seconds),) = figures
    gigabytes = float(f"{bits_per_second / _GB_BITS:.8g}")  # as many digits as topology files keep
    return (
        f"topology: [ {block} ]\nnpus_count: [ {num} ]\n"
        f"bandwidth: [ {gigabytes!r} ]  # GB/s, 2^30 bytes\nlatency: [ {seconds * 1e9!r} ]  # ns\n"
    )
