"""The discrete cosine transform of parameters in blocks, and the largest frequencies of each block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from exogym_core.strategy.parts.codecs import read_as
from exogym_core.strategy.parts.tensor_codecs import block_shape, cut, joined

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["FrequencyBlocks", "transform_of"]

Wire = tuple[torch.dtype, torch.dtype]
"""Dtypes of an index within its block, and of a value, as they travel."""


def _dct_matrix(size: int) -> Tensor:
    """The orthonormal DCT-II as a matrix: `matrix @ x` are x's frequencies, `matrix.T` goes back."""
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    position = torch.arange(size, dtype=torch.float64)[None, :]
    matrix = torch.cos(math.pi / size * (position + 0.5) * frequency) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


class FrequencyBlocks:
    """Parameters of one block shape, cut into blocks: momentum in the frequency domain, top-k, and back.

    The transform is orthonormal and linear, so momentum kept as frequencies equals DeMo's, and removing what
    was sent is a subtraction of single entries.
    """

    def __init__(self, parameters: Sequence[Tensor], shape: tuple[int, int], topk: int, wire: Wire) -> None:
        self.parameters, self.wire = list(parameters), wire
        self.shape = height, width = shape
        self.k = min(topk, height * width)
        first = parameters[0]
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        self.rows, self.columns = (_dct_matrix(size).to(first.device, self.dtype) for size in shape)
        self.num_blocks = sum(p.numel() for p in parameters) // (height * width)
        self.momentum = torch.zeros(self.num_blocks, height * width, dtype=self.dtype, device=first.device)

    @classmethod
    def of(cls, parameters: Sequence[Tensor], chunk: int, topk: int, wire: Wire) -> list[Self]:
        """Blocks of the parameters with values, grouped by shape; their sides are at most `chunk`."""
        groups: dict[tuple[Any, ...], list[Tensor]] = {}
        for parameter in (p for p in parameters if p.numel()):
            shape = block_shape(parameter.shape, chunk)
            groups.setdefault((shape, parameter.dtype, parameter.device), []).append(parameter)
        return [cls(members, shape, topk, wire) for (shape, *_), members in groups.items()]

    @property
    def num_bytes(self) -> int:
        """Size of what travels: `min(k, block)` entries a block."""
        return self.num_blocks * self.k * sum(dtype.itemsize for dtype in self.wire)

    def accumulate(self, decay: float, updates: Iterable[Tensor]) -> None:
        """`momentum = decay momentum + DCT(updates)`."""
        # Of plans, in which only sizes count: torch takes long to find those of each operation.
        if self.momentum.is_meta:
            return
        height, width = self.shape
        blocks = torch.cat([cut(update, self.shape).to(self.dtype) for update in updates]).view(
            -1, height, width
        )
        frequencies = self.rows @ blocks @ self.columns.T
        self.momentum.mul_(decay).add_(frequencies.view(self.num_blocks, -1))

    def taken(self) -> Tensor:
        """The `k` largest entries of each block as bytes, indices before values; as encoded they leave the momentum."""
        if self.momentum.is_meta:
            return self.momentum.new_empty(self.num_bytes, dtype=torch.uint8)
        index_dtype, value_dtype = self.wire
        indices = self.momentum.abs().topk(self.k, dim=1, sorted=False).indices
        values = self.momentum.gather(1, indices)
        sent = values.to(value_dtype)
        self.momentum.scatter_add_(1, indices, -sent.to(self.dtype))
        return torch.cat([part.view(-1).view(torch.uint8) for part in (indices.to(index_dtype), sent)])

    def mean(self, messages: Tensor) -> list[Tensor]:
        """Each entry's mean over the ranks that sent it, transformed back, in the parameters' shapes.

        `messages` are what ranks have `taken`, one a row.
        """
        if messages.is_meta:
            return [torch.empty_like(parameter, dtype=self.dtype) for parameter in self.parameters]
        halves = messages.tensor_split([self.num_blocks * self.k * self.wire[0].itemsize], dim=1)
        shape = (len(messages), self.num_blocks, self.k)  # rank, block, entry
        indices, values = (
            read_as(part.reshape(-1), dtype).view(shape)
            for part, dtype in zip(halves, self.wire, strict=True)
        )
        indices, values = indices.long(), values.to(self.dtype)
        total, count = torch.zeros_like(self.momentum), torch.zeros_like(self.momentum)
        num_ranks = len(indices)
        # A CPU adds up along a row in order. A GPU does not, and ranks must agree in every bit: rank by rank.
        num_turns = 1 if indices.device.type == "cpu" else num_ranks
        in_rows = (part.transpose(0, 1).reshape(self.num_blocks, -1) for part in (indices, values))
        for places, parts in zip(*(part.chunk(num_turns, dim=1) for part in in_rows), strict=True):
            total.scatter_add_(1, places, parts)
            count.scatter_add_(1, places, torch.ones_like(parts))
        blocks = (total / count.clamp(min=1)).view(-1, *self.shape)
        height, width = self.shape
        sizes = [p.numel() // (height * width) for p in self.parameters]
        pieces = torch.split(self.rows.T @ blocks @ self.columns, sizes)
        return [joined(piece, p.shape, self.shape) for piece, p in zip(pieces, self.parameters, strict=True)]


def transform_of(values: Tensor, num_ranks: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Encoding and decoding of a default step for flat `values`, n x 4096 of them, to be timed."""
    blocks = FrequencyBlocks([values.view(-1, 64)], (64, 64), topk=32, wire=(torch.int64, torch.float32))

    def there() -> Tensor:
        blocks.accumulate(0.999, [values.view(-1, 64)])
        return blocks.taken()

    message = there()
    return there, lambda: blocks.mean(torch.stack([message] * num_ranks))
