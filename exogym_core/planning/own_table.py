"""Our own strategies where Streaming DiLoCo's table has its printed schedule: the bandwidth that each needs.

Two workers, one link between them without latency, and a model of equal layers in half precision whose size is the
table's payload. What differs from the printed schedule is what the strategies themselves do: a round's end is waited
for as a whole, and a fragment leaves when its step is over.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from exogym_core.planning.rhythm import rhythm
from exogym_core.planning.simulated_rounds import SimulatedRounds
from exogym_core.planning.streaming_table import METHODS, PAYLOAD_SHARE, TARGETS, grid_points
from exogym_core.strategy import build_strategy
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OWN", "own_gbit_per_second"]

_LAYERS_A_FRAGMENT = 3
_ROUNDS = 3

#: Which of our strategies stands beside each method; `num_fragments` is a third of the layers.
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
        _ROUNDS,
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
    return Topology.from_mapping({"hosts": {"a": {}, "b": {}}, "links": [link]})


def _constant(seconds: float, step: int) -> float:
    return seconds
