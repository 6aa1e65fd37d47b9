"""Codecs of what crosses from stage to stage, forwards and backwards."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from fnmatch import filter as matching
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from exogym_core.strategy.parts.codecs import CODECS
from netsim.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from torch import Tensor

    from exogym_core.stages.options import BoundaryCodecOptions, Stages
    from exogym_core.stages.split import Boundary
    from exogym_core.strategy.parts.codecs import Codec

__all__ = [
    "BOUNDARY_CODECS",
    "BoundaryCodec",
    "boundary_codec",
    "boundary_trials",
    "kept_parameters",
    "project_features",
]

#: Codecs of boundaries alone, beside `CODECS`.
BOUNDARY_CODECS = ("subspace", "top-k")


class BoundaryCodec(ABC):
    """Codec of activations and their gradients.

    Attributes:
        name: in `compute.coding`.
        residuals: what was not sent yet, by place; kept in checkpoints.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.residuals: dict[Hashable, Tensor] = {}

    @abstractmethod
    def message_like(self, values: Tensor) -> Tensor:
        """Memory for the message of such values."""

    @abstractmethod
    def encode(self, values: Tensor, place: Hashable) -> Tensor:
        """Message of `values`, the next ones at this `place` (boundary, direction and micro-batch)."""

    @abstractmethod
    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        """Values of a message, in the shape and dtype of `like`."""


class _Flat(BoundaryCodec):
    """One of `CODECS`, on the flat values."""

    def __init__(self, name: str, codec: Codec) -> None:
        super().__init__(name)
        self._codec = codec

    def message_like(self, values: Tensor) -> Tensor:
        return values.new_empty(self._codec.encoded_bytes(values.numel()), dtype=torch.uint8)

    def encode(self, values: Tensor, place: Hashable) -> Tensor:
        return self._codec.encode(values.reshape(-1))

    def decode(self, message: Tensor, like: Tensor) -> Tensor:
        return self._codec.decode(message, like.numel()).to(like.dtype).view(like.shape)


class _TopK(BoundaryCodec):
    """The largest share of the values, and their places; the rest is added to the next values at the same place.

    So each micro-batch of a step has its residual at each boundary (Rudakov et al., arXiv 2401.07788, error feedback).
    """

    def __init__(self, share: float) -> None:
        super().__init__("top-k")
        self._share = share

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


class _Subspace(BoundaryCodec):
    """Coordinates in a fixed subspace of the last dimension, shared by all ranks (Ramasinghe et al., arXiv 2506.01260).

    Forwards x U, backwards g U, for U of orthonormal columns: the gradients are those of a model that projects by U U^T
    at its boundaries. What lies outside is lost: nothing where all parameters that write to the features are kept in
    the subspace.
    """

    def __init__(self, width: int, seed: int) -> None:
        super().__init__("subspace")
        self._width, self._seed = width, seed
        self._bases: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}

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


def project_features(codec: BoundaryCodec, values: Tensor, dim: int) -> Tensor:
    """Project values on the subspace of a codec along `dim`."""
    turned = values.movedim(dim, -1)
    return codec.decode(codec.encode(turned, ""), turned).movedim(-1, dim)


def kept_parameters(
    options: BoundaryCodecOptions | None, model: nn.Module, boundaries: Sequence[Sequence[Boundary]]
) -> dict[str, int]:
    """Dimension of the features by parameter that is kept in the subspace.

    It is the first one in an `nn.Linear`, and else the last one: of embeddings, biases, GPT-2's `Conv1D`.

    Raises:
        InputError: a pattern matches no parameter, or one without the features of all boundaries.
    """
    found: dict[str, int] = {}
    where, kind = "fit: stages.codec.keep", type(model).__name__
    patterns: Any = [] if options is None else options.keep or []
    if patterns is True:
        if not hasattr(model, "stream_writers"):
            raise InputError(f"{where}: {kind} has no stream_writers: list patterns, as in ['*.down.weight']")
        patterns = model.stream_writers
    parameters = dict(model.named_parameters())
    widths = {each.shape[-1] for row in boundaries for each in row if each.dtype.is_floating_point}
    for pattern in patterns:
        names = matching(parameters, pattern)
        if not names:
            raise InputError(f"{where}: no parameter of {kind} matches {pattern!r}")
        for name in names:
            owner, shape = model.get_submodule(name.rpartition(".")[0]), list(parameters[name].shape)
            found[name] = 0 if isinstance(owner, nn.Linear) else len(shape) - 1
            if {*shape[found[name] :][:1]} != widths:
                raise InputError(f"{where}: {name} of shape {shape} does not write {sorted(widths)} features")
    return found


def boundary_trials(
    stages: Stages | None, device: torch.device | None = None
) -> Iterator[tuple[str, int, tuple[Callable[[], Any], Callable[[], Any]]]]:
    """Trial of a codec of `BOUNDARY_CODECS`, as those of `coding_trials`: a value costs alike at any number of them."""
    options = None if stages is None else stages.codec
    codec = boundary_codec(options)
    if options is None or codec is None or codec.name not in BOUNDARY_CODECS:
        return
    drawn = torch.randn(256, 4 * (options.width or 64), generator=torch.Generator().manual_seed(0))
    values = drawn.to(device)
    message = codec.encode(values, "trial")
    yield (
        codec.name,
        values.numel(),
        (lambda: codec.encode(values, "trial"), lambda: codec.decode(message, values)),
    )
