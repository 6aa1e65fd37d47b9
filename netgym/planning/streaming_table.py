"""Streaming DiLoCo's table of compute utilisation: its printed schedule, and NetGym's strategies, on one link."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from exogym_core.cost.compute import Compute
from exogym_core.run.planned_rank import PlannedRounds
from exogym_core.strategy import build_strategy
from netgym.planning.models import SequenceModel
from netgym.planning.rounds import SimulatedRounds
from netgym.planning.setting import Setting
from netsim import Topology
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["METHODS", "TARGETS", "cells", "utilisation"]


TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)

#: Share of the nominal parameters that travels; the table needs it and the paper does not explain it.
PAYLOAD_SHARE = 0.84

#: The bandwidths of the table in Gbit/s, equally far apart in logarithm.
_GRID: Sequence[float] = np.logspace(-1, 3, 50).tolist()

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


_METHODS = {
    "Data-parallel": _Method((86.8, 152.6, 184.2, 222.3, 569.0), "AllReduce", {}, every_step=True),
    "DiLoCo, H=100": _Method((1.4, 6.2, 13.3, 23.3, 86.8), "DiLoCo", {"H": 100}),
    "Streaming DiLoCo": _Method(
        (1.4, 5.2, 9.1, 16.0, 28.1), "StreamingDiLoCo", {"H": 100, "tau": 0}, streams=True
    ),
    "Streaming + overlap (tau=1)": _Method(
        (1.4, 4.3, 6.2, 9.1, 11.0), "StreamingDiLoCo", {"H": 100, "tau": 1}, streams=True, tau=1
    ),
    "Streaming + overlap + FP4": _Method(
        (0.4, 0.9, 1.7, 2.0, 3.0),
        "StreamingDiLoCo",
        {"H": 100, "tau": 1, "codec": "e3m0"},
        streams=True,
        tau=1,
        bits=4.0,
    ),
}
METHODS = tuple(_METHODS)


def cells(
    _: str = "", *, params: float = 1e9, layers: int = 24, step_seconds: float = 0.1
) -> Iterator[dict[str, Any]]:
    """Smallest bandwidth at which each method reaches each utilisation; with the printed one for the printed size."""

    def nearest(gbit_per_second: float) -> int:
        return min(range(len(_GRID)), key=lambda i: abs(math.log(_GRID[i] / gbit_per_second)))

    is_printed = (params, layers, step_seconds) == (1e9, 24, 0.1)
    for name, method in _METHODS.items():
        options = ", ".join(f"{key}={value}" for key, value in method.options.items())
        own = _own_utilisation(method, params, layers, step_seconds)
        for target, printed in zip(TARGETS, method.printed, strict=True):
            reached = _smallest(
                partial(utilisation, name, params=params, layers=layers, step_seconds=step_seconds), target
            )
            cell = {
                "what": f"{name}, {target:.0%}",
                "basis": "fitted",
                "unit": "Gbit/s",
                "measured": printed if is_printed else None,
                "predicted": reached,
                "first": None,
                "cause": "the table's resolution is one step of its grid, a factor of 1.207",
                "method": name,
                "target": target,
                "gbit_per_second": reached,
                "strategy": f"{method.strategy}({options})",
                "strategy_gbit_per_second": _smallest(own, target),
            }
            if is_printed:
                assert reached is not None
                cell["grid_steps"] = nearest(reached) - nearest(printed)
            yield cell


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
    # (step whose forward waits, end of each layer's reduction).
    due: deque[tuple[int, dict[int, float]]] = deque()
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
    place = bisect_left(_GRID, target, key=utilisation)
    return _GRID[place] if place < len(_GRID) else None


_OWN_ROUNDS = 3


def _own_utilisation(
    method: _Method, params: float, layers: int, step_seconds: float
) -> Callable[[float], float]:
    """Utilisation of our strategy by Gbit/s."""
    fragments = {"num_fragments": max(layers // _LAYERS_A_FRAGMENT, 1)} if method.streams else {}
    strategy = build_strategy(method.strategy, **method.options, **fragments)
    size = round(params * PAYLOAD_SHARE / layers)
    model = nn.Module()  # layers of one parameter each, whose operations do not count
    matrices = (torch.empty(size, dtype=torch.bfloat16, device="meta") for _ in range(layers))
    model.layers = nn.ModuleList(nn.ParameterList([matrix]) for matrix in matrices)
    setting = Setting(SequenceModel(model, 1, 0), _line(1.0), Compute(fixed=step_seconds), 2, 1)
    assert strategy.round_steps is not None
    rounds = SimulatedRounds(strategy, setting, PlannedRounds(strategy.round_steps, _OWN_ROUNDS))

    @cache
    def utilisation(gbit_per_second: float) -> float:
        simulated = rounds.on(replace(setting, topology=_line(gbit_per_second)))
        ends = simulated.round_seconds
        return simulated.compute_seconds[0][-1] / len(ends) / (ends[-1] - ends[-2])

    return utilisation


def _line(gbit_per_second: float) -> Topology:
    link = {"between": ["a", "b"], "bandwidth": f"{gbit_per_second * 1e9:.0f} bit/s"}
    return Topology.from_mapping({"hosts": {"a": {}, "b": {}}, "links": [link], "protocol": "ideal"})
