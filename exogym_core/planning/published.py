"""Published figures and ours, each computed with the strategies, schedules and network that training uses."""

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

import netsim
from exogym_core.cost.compute import Compute
from exogym_core.planning import unfitted
from exogym_core.planning.models import SequenceModel
from exogym_core.planning.rhythm import Rhythm, rhythm
from exogym_core.planning.rounds import SimulatedRounds
from exogym_core.planning.setting import Setting
from exogym_core.strategy import build_strategy
from netsim import Topology
from netsim.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["METHODS", "PUBLISHED", "TARGETS", "reproduce", "utilisation"]

_SECOND_HAND = "not read in the original"


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
    if name not in PUBLISHED:
        raise unknown_name("published result", name, PUBLISHED)
    source, make = PUBLISHED[name]
    return {"name": name, "source": source, "cells": make(**options)}


def _cell(
    what: str, unit: str, published: float, ours: float, cause: str, basis: str = "published"
) -> dict[str, Any]:
    """A row; `basis` of the figure compared with ours: `published`, `derived` from published ones, or `circular` (ours
    is computed from it)."""
    return {
        "what": what,
        "basis": basis,
        "unit": unit,
        "published": published,
        "ours": ours,
        "residual": ours / published - 1,
        "cause": cause,
    }


def _streaming(params: float = 1e9, layers: int = 24, step_seconds: float = 0.1) -> list[dict[str, Any]]:
    is_printed = (params, layers, step_seconds) == (1e9, 24, 0.1)
    cells: list[dict[str, Any]] = []
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
                    "grid_steps": _nearest(reached) - _nearest(printed),
                    "cause": "the table's resolution is one step of its grid, a factor of 1.207",
                }
            cells.append(cell)
    return cells


def _nearest(gbit_per_second: float) -> int:
    """The place of a bandwidth on the table's grid."""
    points = _grid_points()
    return min(range(len(points)), key=lambda i: abs(math.log(points[i] / gbit_per_second)))


class _Matrices(nn.Module):
    """Layers of one parameter of these shapes, without values."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        matrices = (nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")) for shape in shapes)
        self.layers = nn.ModuleList(nn.ParameterList([matrix]) for matrix in matrices)


def _round(
    name: str,
    shapes: Sequence[tuple[int, ...]],
    num_ranks: int,
    topology: Topology,
    placement: Sequence[str] | None = None,
    **options: Any,
) -> tuple[float, int]:
    """(seconds, payload bytes of a rank) of the second round of a strategy with rounds of one step."""
    setting = _setting(_Matrices(shapes), topology, num_ranks, placement=placement)
    rounds = SimulatedRounds(
        build_strategy(name, **options), setting, Rhythm(1, (False,), goes_alone=True), 2
    )
    simulated = rounds.on(setting)
    payload = simulated.payload_bytes[0]
    return simulated.round_seconds[1] - simulated.round_seconds[0], payload[1] - payload[0]


def _setting(
    model: nn.Module, topology: Topology, num_ranks: int, step_seconds: float = 0.0, **options: Any
) -> Setting:
    """Ranks that compute so long a step, with a model whose operations do not count."""
    return Setting(SequenceModel(model, 1, 0), topology, Compute(fixed=step_seconds), num_ranks, 1, **options)


def _intellect() -> list[dict[str, Any]]:
    topology = Topology.load("intellect-1")
    regions = ["us-central", "us-east", "us-west", "europe", "asia"]
    cause = (
        "the topology's rates were inferred from these medians: a check of consistency, not a prediction; ours "
        "adds latency"
    )
    cells = []
    for where, number, seconds in (("USA", 3, 103.0), ("USA and Europe", 4, 382.0), ("worldwide", 5, 469.0)):
        placement = [
            host.name
            for region in regions[:number]
            for host in topology.hosts
            if topology.region_of(host.index) == region
        ]
        ring = netsim.collective(
            topology, "all_reduce", num_bytes=10_211_381_248, algorithm="ring", ranks=placement
        )
        took = ring.seconds
        cells.append(_cell(f"int8 ring all-reduce, {where}", "s", seconds, took, cause, "circular"))
        ours, _ = _round(
            "DiLoCo", [(10_211_381_248,)], len(placement), topology, placement, H=1, codec="int8"
        )
        text = (
            f"not INTELLECT-1's algorithm: ours exchanges codes directly between all pairs, theirs goes around a ring, "
            f"and that alone is {ours / took - 1:+.0%} on the same links"
        )
        cells.append(_cell(f"our DiLoCo with int8, {where}", "s", seconds, ours, text))
    return cells


def _shaped() -> list[dict[str, Any]]:
    topology = Topology.from_mapping(
        {
            "hosts": {f"h{i}": {} for i in range(4)},
            "routers": ["switch"],
            "links": [
                {
                    "between": [f"h{i}", "switch"],
                    "bandwidth": "992.6 Mbit/s",
                    "latency": "50 us",
                    "measured": {"streams": 1},
                }
                for i in range(4)
            ],
        }
    )
    seconds, _ = _round("DiLoCo", [(30_850_000,)], 4, topology, H=1)
    cause = "start of the round, copies to and from the devices and Python are not modelled"
    return [_cell("synchronisation of 30.85 M fp32 parameters", "s", 1.505, seconds, cause)]


_OLMO_1B = [(50304, 2048)] + [(6144, 2048), (2048, 2048), (16384, 2048), (2048, 8192)] * 16
_LAN = {"hosts": {"a": {}, "b": {}}, "links": [{"between": ["a", "b"], "bandwidth": "1 Gbit/s"}]}


_PRINTED_K = 32


def _demo() -> list[dict[str, Any]]:
    printed = {32: 110.32, 16: 55.16, 8: 27.58, 4: 13.79, 2: 6.90}
    topology, cells = Topology.from_mapping(_LAN), []
    for topk, megabytes in printed.items():
        _, payload = _round("DeMo", _OLMO_1B, 2, topology, compression_topk=topk)
        basis = "published" if topk == _PRINTED_K else "derived"
        cause = (
            "rounding"
            if topk == _PRINTED_K
            else f"a share of the printed k = {_PRINTED_K}, by the released code"
        )
        what = f"OLMo-1B, k={topk}, a step and worker"
        cells.append(_cell(what, "MB", megabytes, payload / 1e6, cause, basis))
    return cells


def _sparse() -> list[dict[str, Any]]:
    shape = (4096, 4096)
    _, payload = _round("SparseLoCo", [shape], 2, Topology.from_mapping(_LAN), H=1, k=64)
    bits = payload * 8 / (shape[0] * shape[1])
    cause = "heads of the quantiser: five fp32 numbers a tensor"
    return [
        _cell("k = 64 of 4096, a parameter", "bit", 64 * 14 / 4096, bits, cause, "derived"),
        _cell("below fp32", "x", 146.3, 32 / bits, cause),
    ]


def _regions() -> list[dict[str, Any]]:
    pairs = [
        ("Oregon - Virginia", 67, 0.79),
        ("Virginia - Frankfurt", 90, 1.02),
        ("Virginia - Tokyo", 143, 0.524),
        ("Oregon - Frankfurt", 143, 0.404),
        ("Oregon - Tokyo", 96, 0.523),
        ("Tokyo - Frankfurt", 223, 0.36),
    ]
    num_bytes = 2 * 10**9
    cells = []
    for name, milliseconds, gbit in pairs:
        link = {"between": ["a", "b"], "bandwidth": f"{gbit} Gbit/s", "rtt": f"{milliseconds} ms"}
        topology = Topology.from_mapping(
            {"hosts": ["a", "b"], "links": [{**link, "measured": {"streams": 16}}]}
        )
        protocol = {"preset": "linux-tcp", "streams": 16}
        took = netsim.collective(topology, "sendrecv", num_bytes=num_bytes, protocol=protocol, repeat=2)
        ours = num_bytes * 8 / took.seconds / 1e9
        cause = (
            f"start-up; NCCL had 16 connections: one, with a window of 4 MiB, gets at most "
            f"{2**22 * 8 / milliseconds / 1e6:.3g} Gbit/s"
        )
        cells.append(_cell(f"{name}, round trip {milliseconds} ms", "Gbit/s", gbit, ours, cause, "circular"))
    return cells


def _rows(rows: Iterable[unfitted.Row]) -> list[dict[str, Any]]:
    return [_cell(*row) for row in rows]


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


_STREAMING = "StreamingDiLoCo"
_METHODS = {
    "Data-parallel": _Method((86.8, 152.6, 184.2, 222.3, 569.0), "AllReduce", {}, every_step=True),
    "DiLoCo, H=100": _Method((1.4, 6.2, 13.3, 23.3, 86.8), "DiLoCo", {"H": 100}),
    "Streaming DiLoCo": _Method((1.4, 5.2, 9.1, 16.0, 28.1), _STREAMING, {"H": 100, "tau": 0}, streams=True),
    "Streaming + overlap (tau=1)": _Method(
        (1.4, 4.3, 6.2, 9.1, 11.0), _STREAMING, {"H": 100, "tau": 1}, streams=True, tau=1
    ),
    "Streaming + overlap + FP4": _Method(
        (0.4, 0.9, 1.7, 2.0, 3.0),
        _STREAMING,
        {"H": 100, "tau": 1, "codec": "e3m0"},
        streams=True,
        tau=1,
        bits=4.0,
    ),
}
METHODS = tuple(_METHODS)


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


def _smallest(utilisation: Callable[[float], float], target: float) -> float | None:
    """The smallest bandwidth of the grid at which `utilisation` reaches `target`; None: none does."""
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
    rounds = SimulatedRounds(strategy, setting, rhythm(strategy, 2), _OWN_ROUNDS)

    @cache
    def utilisation(gbit_per_second: float) -> float:
        simulated = rounds.on(replace(setting, topology=_line(gbit_per_second)))
        ends = simulated.round_seconds
        return simulated.compute_seconds[0] / len(ends) / (ends[-1] - ends[-2])

    return utilisation


def _line(gbit_per_second: float) -> Topology:
    link = {"between": ["a", "b"], "bandwidth": f"{gbit_per_second * 1e9:.0f} bit/s"}
    return Topology.from_mapping({"hosts": {"a": {}, "b": {}}, "links": [link], "protocol": "ideal"})


#: Name -> (source, what makes its cells).
PUBLISHED: Mapping[str, tuple[str, Callable[..., list[dict[str, Any]]]]] = {
    "streaming-diloco": (f"Streaming DiLoCo, arXiv 2501.18512, table 4 ({_SECOND_HAND})", _streaming),
    "intellect-1": (
        f"INTELLECT-1, arXiv 2412.01152: median times of an outer step's all-reduce ({_SECOND_HAND}; with 38 min of "
        f"computing they give 96 and 83 % utilisation, as its abstract, read, has it)",
        _intellect,
    ),
    "shaped-4-gpus": (f"DiLoCo on 4 GPUs of one zone over shaped TCP ({_SECOND_HAND})", _shaped),
    "demo": (
        f"DeMo, arXiv 2411.19870: k=32 is printed ({_SECOND_HAND}); its sizes and the rest follow from the released "
        f"code (bloc97/DeMo, read)",
        _demo,
    ),
    "sparseloco": (
        f"SparseLoCo, arXiv 2508.15706 ({_SECOND_HAND}): 12-bit indices, 2-bit values (one-covenant/templar, read)",
        _sparse,
    ),
    "dt-fm": (
        "DT-FM, arXiv 2206.01288: pairs of AWS regions as its simulator has them, and their measurement by NCCL "
        "(DS3Lab/DT-FM, BinhangYuan/tc_cluster_setting, read)",
        _regions,
    ),
    "pytorch-shaped": (
        "PyTorch 1.9's collectives of 256 MiB on AWS hosts shaped by tc: averages of 2022 for DT-FM "
        "(BinhangYuan/tc_cluster_setting, read)",
        lambda: _rows(unfitted.shaped_collectives()),
    ),
    "four-continents": (
        "Erben et al., arXiv 2306.03163: hivemind on T4s in up to four regions of Google Cloud, 32,768 samples a step "
        "(text and logs in cirquit/hivemind-multi-cloud, read)",
        lambda: _rows(unfitted.continents()),
    ),
    "ocean-streams": (
        "Erben et al., arXiv 2306.03163: iperf between regions of Google Cloud (logs in cirquit/hivemind-multi-cloud, "
        "read)",
        lambda: _rows(unfitted.ocean_streams()),
    ),
}
