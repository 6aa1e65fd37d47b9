"""Published figures of `published.yaml` and ours, computed with the strategies, schedules and network of training."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

import netsim
from exogym_core.cost.compute import Compute
from exogym_core.run.planned_rank import PlannedRounds
from exogym_core.strategy import build_strategy
from netgym.planning.models import SequenceModel
from netgym.planning.rounds import SimulatedRounds
from netgym.planning.setting import Setting
from netsim import Topology
from netsim.errors import InputError, unknown_name
from netsim.files.documents import load_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["METHODS", "PUBLISHED", "TARGETS", "cells_of", "reproduce", "utilisation"]

_FILE: Any = load_document(Path(__file__).with_suffix(".yaml")).data

#: Name -> `source`, and `groups` of cells with their `links`, or the `methods` of Streaming DiLoCo's table.
PUBLISHED: Mapping[str, Mapping[str, Any]] = _FILE


def reproduce(name: str, **options: Any) -> dict[str, Any]:
    """The cells of one published result.

    Args:
        name: in `PUBLISHED`.
        options: of the Streaming table: `params`, `layers`, `step_seconds`.

    Returns:
        `name`, `source`, and `cells`: mappings with `published`, `ours`, `residual` (ours / published - 1) and `cause`,
        or those of the Streaming table.

    Raises:
        UnknownNameError: there is no such result.
    """
    cells = list(cells_of(name, **options))
    return {"name": name, "source": PUBLISHED[name]["source"], "cells": cells}


def cells_of(name: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Cells of `reproduce`, each as soon as it is computed."""
    if name not in PUBLISHED:
        raise unknown_name("published result", name, PUBLISHED)
    entry = PUBLISHED[name]
    if "methods" in entry:
        yield from _streaming(**options)
    links = entry.get("links", {})
    for group in entry.get("groups", ()):
        yield from (_cell({**group, **cell}, links) for cell in group["cells"])


# --- cells of the file ---------------------------------------------------------------------------------------


def _cell(cell: Mapping[str, Any], links: Mapping[str, Any]) -> dict[str, Any]:
    """A row; `basis` of the figure compared with ours: `published`, `derived` from published ones, or `circular` (ours
    is computed from it)."""
    ours, published, cause = _figure(cell, links), cell["published"], cell["cause"]
    if "other" in cell:
        other = _figure({**cell, **cell["other"]}, links)
        cause = cause.format(other=other, other_residual=other / published - 1, over_other=ours / other - 1)
    return {
        "what": cell["what"],
        "basis": cell.get("basis", "published"),
        "unit": cell["unit"],
        "published": published,
        "ours": ours,
        "residual": ours / published - 1,
        "cause": cause,
    }


def _figure(cell: Mapping[str, Any], links: Mapping[str, Any]) -> float:
    """Figure of a simulated collective or round, in the cell's unit."""
    topology = _topology(cell["network"], links)
    regions = cell.get("regions", [None])
    hosts = [
        host.name
        for region in regions
        for host in topology.hosts
        if region in (None, topology.region_of(host.index))
    ]
    if cell.get("strategy"):
        seconds, num_bytes, num_values = _round(cell, topology, hosts)
    else:
        given = {name: cell[name] for name in ("algorithm", "protocol", "repeat") if name in cell}
        num_bytes = num_values = cell["bytes"]
        seconds = netsim.collective(topology, cell["op"], num_bytes=num_bytes, ranks=hosts, **given).seconds
    match cell["unit"]:
        case "s":
            return seconds
        case "samples/s":
            return float(cell["samples"] / (cell["samples"] / cell["samples_per_second"] + seconds))
        case "MB":
            return num_bytes / 1e6
        case "bit":
            return num_bytes * 8 / num_values
        case "x":  # as many times less than fp32
            return 32 / (num_bytes * 8 / num_values)
    return num_bytes * 8 / seconds / {"Mbit/s": 1e6, "Gbit/s": 1e9}[cell["unit"]]


def _topology(network: str | Mapping[str, Any], links: Mapping[str, Any]) -> Topology:
    """A shipped network; a line between two hosts; hosts around a switch; or measured pairs of hosts in regions."""
    if isinstance(network, str):
        return Topology.load(network)
    if "mesh" in network:  # every pair of hosts has its own measured stream, every host its own line
        places = network["mesh"].items()
        placed = [(region, f"{region}-{i}") for region, number in places for i in range(number)]
        wan = [
            {"between": [one, other], **links["zone" if here == there else f"{here} - {there}"]}
            for (here, one), (there, other) in combinations(placed, 2)
        ]
        return Topology.from_mapping({"regions": {name: links["host"] for _, name in placed}, "wan": wan})
    link = network.get("link", network.get("line"))
    link = links[link] if isinstance(link, str) else link
    if "line" in network:
        return Topology.from_mapping({"hosts": ["a", "b"], "links": [{"between": ["a", "b"], **link}]})
    hosts = [f"h{i}" for i in range(network["star"])]
    spokes = [{"between": [host, "switch"], **link} for host in hosts]
    return Topology.from_mapping({"hosts": hosts, "routers": ["switch"], "links": spokes})


class _Matrices(nn.Module):
    """Layers of one parameter of these shapes, without values."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        matrices = (nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes)
        self.layers = nn.ModuleList(nn.ParameterList([matrix]) for matrix in matrices)


def _round(cell: Mapping[str, Any], topology: Topology, hosts: Sequence[str]) -> tuple[float, int, int]:
    """Seconds and payload bytes of a rank in the second round of one step, and the number of parameters."""
    shapes = [
        tuple(map(int, text.split("x"))) for text, number in cell["parameters"].items() for _ in range(number)
    ]
    setting = _setting(_Matrices(shapes), topology, len(hosts), placement=hosts)
    strategy = build_strategy(cell["strategy"], **cell["options"])
    rounds = SimulatedRounds(strategy, setting, PlannedRounds(1, 2))
    simulated = rounds.on(setting)
    (first, second), payload = simulated.round_seconds, simulated.payload_bytes[0]
    return second - first, payload[1] - payload[0], setting.model.num_parameters


def _setting(
    model: nn.Module, topology: Topology, num_ranks: int, step_seconds: float = 0.0, **options: Any
) -> Setting:
    """Setting with steps of `step_seconds` and a model whose operations do not count."""
    return Setting(SequenceModel(model, 1, 0), topology, Compute(fixed=step_seconds), num_ranks, 1, **options)


# --- Streaming DiLoCo's table of compute utilisation ---------------------------------------------------

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)

#: Share of the nominal parameters that travels; the table needs it and the paper does not explain it.
PAYLOAD_SHARE = 0.84

_STEPS_A_ROUND = 100
_LAYERS_A_FRAGMENT = 3
_ROUNDS = 10


@dataclass(frozen=True)
class _Method:
    """A method of the table.

    Attributes:
        printed: Gbit/s for 1B parameters, 24 layers and 0.1 s a step, by target.
        strategy, options: our strategy; `num_fragments` is a third of the layers.
        every_step, streams: when layers travel: all at each step; fragments in turn; else all at a round's end.
        tau: steps until they are needed.
        bits: of a parameter.
    """

    printed: tuple[float, ...]
    strategy: str
    options: Mapping[str, Any]
    every_step: bool = False
    streams: bool = False
    tau: int = 0
    bits: float = 16.0

    def sent(self, step: int, layers: int) -> range | tuple[int, ...]:
        """The layers that leave during the backward pass of the 0-based `step`."""
        if self.every_step:
            return range(layers)
        place = step % _STEPS_A_ROUND
        if not self.streams:
            return range(layers) if place == _STEPS_A_ROUND - 1 else ()
        fragments = layers // _LAYERS_A_FRAGMENT
        number, rest = divmod(place, _STEPS_A_ROUND // (fragments + 1))
        return range(number, layers, fragments) if not rest and number < fragments else ()


_METHODS = {name: _Method(**given) for name, given in _FILE["streaming-diloco"]["methods"].items()}
METHODS = tuple(_METHODS)


def _streaming(params: float = 1e9, layers: int = 24, step_seconds: float = 0.1) -> Iterator[dict[str, Any]]:
    points = _grid_points()

    def nearest(gbit_per_second: float) -> int:
        return min(range(len(points)), key=lambda i: abs(math.log(points[i] / gbit_per_second)))

    is_printed = (params, layers, step_seconds) == (1e9, 24, 0.1)
    for name, method in _METHODS.items():
        options = ", ".join(f"{key}={value}" for key, value in method.options.items())
        own = _own_utilisation(method, params, layers, step_seconds)
        for target, printed in zip(TARGETS, method.printed, strict=True):
            reached = _smallest(
                partial(utilisation, name, params=params, layers=layers, step_seconds=step_seconds), target
            )
            cell = {
                "method": name,
                "target": target,
                "gbit_per_second": reached,
                "strategy": f"{method.strategy}({options})",
                "strategy_gbit_per_second": _smallest(own, target),
            }
            if is_printed:
                assert reached is not None
                cell |= {
                    "published": printed,
                    "ours": reached,
                    "residual": reached / printed - 1,
                    "grid_steps": nearest(reached) - nearest(printed),
                    "cause": "the table's resolution is one step of its grid, a factor of 1.207",
                }
            yield cell


def _grid_points() -> list[float]:
    """The bandwidths of the table in Gbit/s: 50 from 0.1 to 1000, equally far apart in logarithm."""
    return [float(point) for point in np.logspace(-1, 3, 50)]


@lru_cache(maxsize=4096)
def utilisation(
    method: str, gbit_per_second: float, params: float = 1e9, layers: int = 24, step_seconds: float = 0.1
) -> float:
    """Computing / all time over ten outer rounds, waiting after the last one included.

    Two replicas, one link between them, first in first out, without latency. A step of T seconds is a third forward
    and two thirds backward, spread evenly over the layers, the backward pass from the last layer to the first. A
    layer's reduction may start when its backward is done, and the layer's next forward waits for it; with overlap, the
    forward `tau` steps later.

    Raises:
        InputError: fewer layers than fragments need, or a figure that is not above zero.

    References:
        Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512, table 4.
    """
    if layers < _LAYERS_A_FRAGMENT or layers // _LAYERS_A_FRAGMENT >= _STEPS_A_ROUND:
        raise InputError(f"layers: {layers} given; the schedule needs {_LAYERS_A_FRAGMENT} to 299")
    if not (params > 0 and step_seconds > 0 and gbit_per_second > 0):
        raise InputError("params, step and bandwidth must be above zero")
    rule = _METHODS[method]
    seconds_a_layer = params * PAYLOAD_SHARE * rule.bits / layers / (gbit_per_second * 1e9)
    num_steps = _ROUNDS * _STEPS_A_ROUND
    now = link_free = 0.0
    due: deque[tuple[int, dict[int, float]]] = (
        deque()
    )  # (step whose forward waits, end of each layer's reduction)
    for step in range(num_steps):
        waits = due.popleft()[1] if due and due[0][0] == step else {}
        done = 0
        for layer in sorted(waits):  # the forward pass waits for reductions
            now = max(now + (layer - done) * step_seconds / 3 / layers, waits[layer])
            done = layer
        now += (layers - done) * step_seconds / 3 / layers
        sent = set(rule.sent(step, layers))
        if not sent:
            now += step_seconds * 2 / 3
            continue
        ends: dict[int, float] = {}
        for layer in reversed(range(layers)):
            now += step_seconds * 2 / 3 / layers
            if layer in sent:
                link_free = max(link_free, now) + seconds_a_layer
                ends[layer] = link_free
        due.append((step + 1 + rule.tau, ends))
    now = max([now, *(end for _, ends in due for end in ends.values())])
    return num_steps * step_seconds / now


def _smallest(utilisation: Callable[[float], float], target: float) -> float | None:
    """Smallest bandwidth of the grid at which `utilisation` reaches `target`, or None."""
    points = _grid_points()
    place = bisect_left(points, target, key=utilisation)
    return points[place] if place < len(points) else None


_OWN_ROUNDS = 3


def _own_utilisation(
    method: _Method, params: float, layers: int, step_seconds: float
) -> Callable[[float], float]:
    """Utilisation of our strategy by Gbit/s."""
    fragments = {"num_fragments": max(layers // _LAYERS_A_FRAGMENT, 1)} if method.streams else {}
    strategy = build_strategy(method.strategy, **method.options, **fragments)
    size = round(params * PAYLOAD_SHARE / layers)
    model = _Matrices([(size,)] * layers, torch.bfloat16)
    setting = _setting(model, _line(1.0), 2, step_seconds)
    assert strategy.round_steps is not None
    rounds = SimulatedRounds(strategy, setting, PlannedRounds(strategy.round_steps, _OWN_ROUNDS))

    @cache
    def utilisation(gbit_per_second: float) -> float:
        simulated = rounds.on(replace(setting, topology=_line(gbit_per_second)))
        ends = simulated.round_seconds
        return simulated.compute_seconds[0] / len(ends) / (ends[-1] - ends[-2])

    return utilisation


def _line(gbit_per_second: float) -> Topology:
    link = {"between": ["a", "b"], "bandwidth": f"{gbit_per_second * 1e9:.0f} bit/s"}
    return Topology.from_mapping({"hosts": {"a": {}, "b": {}}, "links": [link], "protocol": "ideal"})
