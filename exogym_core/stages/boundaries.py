"""Codecs of what crosses from stage to stage, forwards and backwards."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import torch

from exogym_core.strategy.parts.codecs import CODECS
from netsim.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from torch import Tensor

    from exogym_core.stages.options import BoundaryCodecOptions, Stages
    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["BOUNDARY_CODECS", "BoundaryCodec", "boundary_codec", "boundary_trials"]

#: Codecs of boundaries alone, beside `CODECS`.
BOUNDARY_CODECS = ("subspace", "top-k")


class BoundaryCodec(Protocol):
    """Codec of activations and their gradients.

    Attributes:
        name: in `compute.coding`.
        residuals: what was not sent yet, by place; kept in checkpoints.
    """

    name: str
    residuals: dict[Hashable, Tensor]

    def message_like(self, values: Tensor) -> Tensor:
        """Memory for the message of such values."""

    def encode(self, values: Tensor, place: Hashable) -> Tensor:
        """Message of `values`, the next ones at this `place` (boundary, direction and micro-batch)."""

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """Values of a message, in the shape and dtype of `like`."""


class _Flat:
    """One of `CODECS`, on the flat values."""

    def __init__(self, name: str, codec: Codec) -> None:
        self.name, self._codec = name, codec
        self.residuals: dict[Hashable, Tensor] = {}

    def message_like(self, values: Tensor) -> Tensor:
        return values.new_empty(self._codec.encoded_bytes(values.numel()), dtype=torch.uint8)

    def encode(self, values: Tensor, place: Hashable) -> Tensor:
        return self._codec.encode(values.reshape(-1))

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        return self._codec.decode(message, like.numel()).to(like.dtype).view(like.shape)


class _TopK:
    """The largest share of the values, and their places; the rest is added to the next values at the same place.

    So each micro-batch of a step has its residual at each boundary (Rudakov et al., arXiv 2401.07788, error feedback).
    """

    name = "top-k"

    def __init__(self, share: float) -> None:
        self._share = share
        self.residuals: dict[Hashable, Tensor] = {}

    def message_like(self, values: Tensor) -> Tensor:
        size = self._count(values) * (values.element_size() + 4)
        return values.new_empty(size, dtype=torch.uint8)

    def _count(self, values: Tensor) -> int:
        return max(1, math.ceil(self._share * values.numel()))

    def encode(self, values: Tensor, place: Hashable) -> Tensor:
        flat = values.reshape(-1).clone()
        owed = self.residuals.get(place)
        if owed is not None and owed.shape == flat.shape:
            flat += owed
        places = flat.abs().topk(self._count(flat), sorted=False).indices.sort().values
        kept = flat[places]
        flat[places] = 0
        self.residuals[place] = flat
        return torch.cat([kept.view(torch.uint8), places.to(torch.int32).view(torch.uint8)])

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        size = self._count(like) * like.element_size()
        kept, places = message[:size].clone().view(like.dtype), message[size:].clone().view(torch.int32)
        flat = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
        flat[places.long()] = kept
        return flat.view(like.shape)


class _Subspace:
    """Coordinates in a fixed subspace of the last dimension, shared by all ranks (Ramasinghe et al., arXiv 2506.01260).

    Forwards x U, backwards g U, for U of orthonormal columns: the gradients are those of a model that projects by U U^T
    at its boundaries. The paper also keeps the weights that write into the stream in the subspace, by which nothing is
    lost; here what lies outside is.
    """

    name = "subspace"

    def __init__(self, width: int, seed: int) -> None:
        self._width, self._seed = width, seed
        self._bases: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}
        self.residuals: dict[Hashable, Tensor] = {}

    def _basis(self, like: Tensor) -> Tensor:
        size = like.shape[-1]
        if not self._width <= size:
            raise InputError(
                f"fit: stages.codec: width {self._width} of the subspace exceeds the {size} features at a boundary"
            )
        key = (size, like.dtype, like.device)
        if key not in self._bases:
            drawn = torch.randn(size, self._width, generator=torch.Generator().manual_seed(self._seed))
            self._bases[key] = torch.linalg.qr(drawn.double()).Q.to(like)
        return self._bases[key]

    def message_like(self, values: Tensor) -> Tensor:
        return values.new_empty((*values.shape[:-1], self._width))

    def encode(self, values: Tensor, place: Hashable) -> Tensor:
        return values @ self._basis(values)

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        return message @ self._basis(like).T


def boundary_codec(options: BoundaryCodecOptions | None) -> BoundaryCodec | None:
    """Codec of these options; None: values travel as they are."""
    if options is None:
        return None
    if options.name == "top-k":
        return _TopK(options.share)
    if options.name == "subspace":
        assert options.width is not None  # checked there
        return _Subspace(options.width, options.seed)
    if options.name not in CODECS:
        raise unknown_name("stages.codec", options.name, [*CODECS, *BOUNDARY_CODECS])
    codec = CODECS[options.name]
    return None if codec is None else _Flat(options.name, codec)


def boundary_trials(
    stages: Stages | None, device: torch.device | None = None
) -> Iterator[tuple[str, int, tuple[Callable[[], Any], Callable[[], Any]]]]:
    """Trial of a codec of `BOUNDARY_CODECS`, as those of `coding_trials`: a value costs alike at any number of them."""
    codec = None if stages is None else boundary_codec(stages.codec)
    if codec is None or codec.name not in BOUNDARY_CODECS:
        return
    assert stages is not None
    assert stages.codec is not None
    drawn = torch.randn(256, 4 * (stages.codec.width or 64), generator=torch.Generator().manual_seed(0))
    values = drawn.to(device)
    message = codec.encode(values, "trial")
    yield (
        codec.name,
        values.numel(),
        (lambda: codec.encode(values, "trial"), lambda: codec.decode(message, values)),
    )
