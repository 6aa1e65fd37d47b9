"""The work of every codec there is, to be timed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.parts.codecs import CODECS
from exogym_core.strategy.parts.few_bits import LinearCodec, QSGDCodec, SignCodec, StatisticalCodec
from exogym_core.strategy.parts.frequencies import transform_of
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.low_rank import low_rank_of
from exogym_core.strategy.parts.tensor_codecs import LargestCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["coding_trials"]


def coding_trials(values: Tensor) -> Iterator[tuple[str, tuple[Callable[[], Any], Callable[[], Any]]]]:
    """Of every codec its name, and how it encodes `values` and decodes them."""

    def ways(codec: Codec) -> tuple[Callable[[], Any], Callable[[], Any]]:
        message = codec.encode(values)
        return lambda: codec.encode(values), lambda: codec.decode(message, len(values))

    yield from ((name, ways(codec)) for name, codec in sorted(CODECS.items()) if codec is not None)
    few = [
        SignCodec(),
        QSGDCodec(4, 512, "l2", shared_generator("trial")),
        StatisticalCodec(2),
        LinearCodec(4),
    ]
    largest = LargestCodec([torch.Size((len(values) // 64, 64))], [(64, 64)], [64], 12, StatisticalCodec(2))
    yield from ((codec.name, ways(codec)) for codec in [*few, largest])
    yield "demo", transform_of(values)
    left, back = low_rank_of(values)
    yield "low-rank", (lambda: low_rank_of(values), lambda: left @ back.T)
