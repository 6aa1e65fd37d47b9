"""Codecs and optimizers whose work takes virtual time: their names, and the work of codecs, to be timed."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.plain import reachable
from exogym_core.strategy.base import Strategy
from exogym_core.strategy.optimizers import OPTIMIZERS
from exogym_core.strategy.parts.codecs import CODECS, Codec, codec_name
from exogym_core.strategy.parts.frequencies import transform_of
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.gradients import low_rank_of
from exogym_core.strategy.parts.muon import DirectionsAndAdamW, MuLoCoMuon, TorchMuon
from exogym_core.strategy.parts.tensor_codecs import (
    LargestCodec,
    LinearCodec,
    QSGDCodec,
    SignCodec,
    StatisticalCodec,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

__all__ = ["CODEC_NAMES", "OPTIMIZER_NAMES", "coding_trials", "own_codec_trials"]


_FEW_BITS = SignCodec, QSGDCodec, StatisticalCodec, LinearCodec, LargestCodec

#: Codecs whose work is charged: those of `coding_trials`, in `compute.coding` too.
CODEC_NAMES = frozenset(
    {name for name, codec in CODECS.items() if codec is not None}
    | {each.name for each in _FEW_BITS}
    | {"demo", "low-rank"}
)
#: Optimizers whose updates are charged, in `compute.updates`.
OPTIMIZER_NAMES = frozenset(
    {*OPTIMIZERS, "SGD with momentum"}
    | {each.__name__ for each in (MuLoCoMuon, TorchMuon, DirectionsAndAdamW)}
)

_SIDE = 64  # blocks and squares of values, as some codecs cut them
_LARGEST_SIDE = 2048


def coding_trials(
    num_values: int, num_ranks: int, device: torch.device | None = None
) -> Iterator[tuple[str, int, tuple[Callable[[], Any], Callable[[], Any]]]]:
    """Trials of every codec: its name, the number of values, and the calls that encode and decode them.

    About the number of values of a run (at least 4,096, at most four million): speeds depend on caches.
    Those of CODECS see one part a rank, the others all. DeMo decodes what `num_ranks` have sent, at once.
    """

    part, whole = _values(num_values / num_ranks, device), _values(num_values, device)
    for name, codec in sorted(CODECS.items()):
        if codec is not None:
            yield name, *_ways(codec, part)
    few = [
        SignCodec(),
        QSGDCodec(4, 512, "l2", shared_generator("trial")),
        StatisticalCodec(2),
        LinearCodec(4),
    ]
    largest = LargestCodec([torch.Size((len(whole) // 64, 64))], [(64, 64)], [64], 12, StatisticalCodec(2))
    for codec in [*few, largest]:
        yield codec.name, *_ways(codec, whole)
    yield "demo", len(whole), transform_of(whole, num_ranks)
    left, back = low_rank_of(whole)
    yield "low-rank", len(whole), (lambda: low_rank_of(whole), lambda: left @ back.T)


def own_codec_trials(
    strategy: Strategy, num_values: int, num_ranks: int, device: torch.device | None = None
) -> Iterator[tuple[str, int, tuple[Callable[[], Any], Callable[[], Any]]]]:
    """Trials of user-defined codecs: those in the attributes and options of the strategy and its members."""
    part = _values(num_values / num_ranks, device)
    codecs = [each for each in reachable(strategy, _has_codecs) if isinstance(each, Codec)]
    for name, codec in sorted({codec_name(codec): codec for codec in codecs}.items()):
        if CODECS.get(name) is not codec:
            yield name, *_ways(codec, part)


def _has_codecs(value: object) -> bool:
    return isinstance(value, Strategy) or (is_dataclass(value) and not isinstance(value, Codec))


def _ways(codec: Codec, values: Tensor) -> tuple[int, tuple[Callable[[], Any], Callable[[], Any]]]:
    message = codec.encode(values)
    return len(values), (lambda: codec.encode(values), lambda: codec.decode(message, len(values)))


def _values(number: float, device: torch.device | None) -> Tensor:
    """Small values, about `number` of them: a square."""
    side = min(max(round(number**0.5 / _SIDE), 1) * _SIDE, _LARGEST_SIDE)
    return (torch.randn(side * side, generator=torch.Generator().manual_seed(0)) * 1e-3).to(device)
