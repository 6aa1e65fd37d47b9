"""Streaming DiLoCo's table of compute utilisation: its printed schedule, simulated on one link as it is described.

Two replicas, one link between them, first in first out, without latency. A step of T seconds is a third forward
and two thirds backward, spread evenly over the layers, the backward pass from the last layer to the first. A
layer's reduction may start when its backward is done, and the layer's next forward waits for it; with overlap, the
forward `tau` steps later.

References:
    Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512, table 4.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from exogym_core.planning.rhythm import rhythm
from exogym_core.planning.simulated_rounds import SimulatedRounds
from exogym_core.strategy import build_strategy
from netsim import Topology
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "METHODS",
    "OWN",
    "PUBLISHED_1B",
    "TARGETS",
    "cells",
    "grid_points",
    "own_gbit_per_second",
    "utilisation",
]

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)

#: Published figures for 1B parameters, 24 layers and 0.1 s a step, in Gbit/s.
PUBLISHED_1B: dict[str, tuple[float, ...]] = {
    "Data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
    "DiLoCo, H=100": (1.4, 6.2, 13.3, 23.3, 86.8),
    "Streaming DiLoCo": (1.4, 5.2, 9.1, 16.0, 28.1),
    "Streaming + overlap (tau=1)": (1.4, 4.3, 6.2, 9.1, 11.0),
    "Streaming + overlap + FP4": (0.4, 0.9, 1.7, 2.0, 3.0),
}

METHODS = tuple(PUBLISHED_1B)

#: Share of the nominal parameters that travels; the table needs it and the paper does not explain it.
PAYLOAD_SHARE = 0.84

_STEPS_A_ROUND = 100
_LAYERS_A_FRAGMENT = 3
_ROUNDS = 10


@dataclass(frozen=True)
class _Method:
    """Schedule of layers: when they travel, their size, and the steps until they are needed."""

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


_RULES = dict(
    zip(
        METHODS,
        (
            _Method(every_step=True),
            _Method(),
            _Method(streams=True),
            _Method(streams=True, tau=1),
            _Method(streams=True, tau=1, bits=4.0),
        ),
        strict=True,
    )
)


def grid_points() -> list[float]:
    """The bandwidths of the table in Gbit/s: 50 from 0.1 to 1000, equally far apart in logarithm."""
    return [float(point) for point in np.logspace(-1, 3, 50)]


@lru_cache(maxsize=4096)
def utilisation(
    method: str, gbit_per_second: float, params: float = 1e9, layers: int = 24, step_seconds: float = 0.1
) -> float:
    """Computing / all time over ten outer rounds, waiting after the last one included.

    Raises:
        InputError: fewer layers than fragments need, or a figure that is not above zero.
    """
    if layers < _LAYERS_A_FRAGMENT or layers // _LAYERS_A_FRAGMENT >= _STEPS_A_ROUND:
        raise InputError(f"layers: {layers} given; the schedule needs {_LAYERS_A_FRAGMENT} to 299")
    if not (params > 0 and step_seconds > 0 and gbit_per_second > 0):
        raise InputError("params, step and bandwidth must be above zero")
    rule = _RULES[method]
    seconds_a_layer = params * PAYLOAD_SHARE * rule.bits / layers / (gbit_per_second * 1e9)
    num_steps = _ROUNDS * _STEPS_A_ROUND
    now = link_free = 0.0
    due: deque[tuple[int, dict[int, float]]] = (
        deque()
    )  # (step whose forward waits, end of each layer's reduction)
    for step in range(num_steps):
        waits = due.popleft()[1] if due and due[0][0] == step else {}
        now = _forward(now, step_seconds / 3, layers, waits)
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


def _forward(now: float, seconds: float, layers: int, waits: dict[int, float]) -> float:
    """End of a forward pass that waits for the reductions of some layers."""
    done = 0
    for layer in sorted(waits):
        now = max(now + (layer - done) * seconds / layers, waits[layer])
        done = layer
    return now + (layers - done) * seconds / layers


def cells(params: float = 1e9, layers: int = 24, step_seconds: float = 0.1) -> list[dict[str, object]]:
    """Every cell of the table: the smallest bandwidth of the grid that reaches the target; None: none does."""
    found: list[dict[str, object]] = []
    points = grid_points()
    for method in METHODS:
        for target in TARGETS:
            low, high = 0, len(points)
            while low < high:
                middle = (low + high) // 2
                if utilisation(method, points[middle], params, layers, step_seconds) >= target:
                    high = middle
                else:
                    low = middle + 1
            reached = points[low] if low < len(points) else None
            found.append({"method": method, "target": target, "gbit_per_second": reached})
    return found


_OWN_ROUNDS = 3

#: Our strategy for each method; `num_fragments` is a third of the layers.
OWN: Mapping[str, tuple[str, Mapping[str, Any]]] = dict(
    zip(
        METHODS,
        (
            ("AllReduce", {}),
            ("DiLoCo", {"H": 100}),
            ("StreamingDiLoCo", {"H": 100, "tau": 0}),
            ("StreamingDiLoCo", {"H": 100, "tau": 1}),
            ("StreamingDiLoCo", {"H": 100, "tau": 1, "codec": "e3m0"}),
        ),
        strict=True,
    )
)


class _Layers(nn.Module):
    """Equal layers in half precision, without values."""

    def __init__(self, params: float, layers: int) -> None:
        super().__init__()
        size = round(params * PAYLOAD_SHARE / layers)
        with torch.device("meta"):
            weights = (nn.Parameter(torch.empty(size, dtype=torch.bfloat16)) for _ in range(layers))
            self.layers = nn.ModuleList(nn.ParameterList([weight]) for weight in weights)


def own_gbit_per_second(
    params: float = 1e9, layers: int = 24, step_seconds: float = 0.1
) -> dict[tuple[str, float], float | None]:
    """By method and target: the least bandwidth of the table's grid with which our strategy reaches it; None: none."""
    return {
        (method, target): reached
        for method, (name, options) in OWN.items()
        for target, reached in _reached(name, options, params, layers, step_seconds).items()
    }


def _reached(
    name: str, options: Mapping[str, Any], params: float, layers: int, step_seconds: float
) -> dict[float, float | None]:
    fragments = (
        {"num_fragments": max(layers // _LAYERS_A_FRAGMENT, 1)} if name.startswith("Streaming") else {}
    )
    strategy = build_strategy(name, **options, **fragments)
    rounds = SimulatedRounds(
        strategy,
        _Layers(params, layers),
        2,
        _OWN_ROUNDS,
        rhythm(strategy, 2),
        [partial(_constant, step_seconds)] * 2,
    )
    known: dict[float, float] = {}

    def utilisation(gbit_per_second: float) -> float:
        if gbit_per_second not in known:
            simulated = rounds.on(_line(gbit_per_second))
            ends = simulated.round_seconds
            known[gbit_per_second] = simulated.compute_seconds[0] / len(ends) / (ends[-1] - ends[-2])
        return known[gbit_per_second]

    points, found = grid_points(), {}
    for target in TARGETS:
        low, high = 0, len(points)
        while low < high:
            middle = (low + high) // 2
            if utilisation(points[middle]) >= target:
                high = middle
            else:
                low = middle + 1
        found[target] = points[low] if low < len(points) else None
    return found


def _line(gbit_per_second: float) -> Topology:
    link = {"between": ["a", "b"], "bandwidth": f"{gbit_per_second * 1e9:.0f} bit/s"}
    return Topology.from_mapping({"hosts": {"a": {}, "b": {}}, "links": [link], "protocol": "ideal"})


def _constant(seconds: float, step: int) -> float:
    return seconds
