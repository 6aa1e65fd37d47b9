"""The work of every codec there is, to be timed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.strategy.demo import transform_of
from exogym_core.strategy.parts.codecs import CODECS
from exogym_core.strategy.parts.low_rank import low_rank_of

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
    yield "demo", transform_of(values)
    left, back = low_rank_of(values)
    yield "low-rank", (lambda: low_rank_of(values), lambda: left @ back.T)
