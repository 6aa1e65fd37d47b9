"""Codecs of a flat tensor that know the tensors it is made of: each by itself, or the largest values of its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exogym_core.strategy.parts.codecs import Codec, read_as
from exogym_core.strategy.parts.few_bits import pack, packed_bytes, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "EachTensorCodec",
    "LargestCodec",
    "block_shape",
    "cut",
    "joined",
    "largest_divisor",
    "matrix_shape",
]


def largest_divisor(size: int, limit: int) -> int:
    """The largest divisor of `size` that is at most `limit`."""
    return next((divisor for divisor in range(min(size, limit), 0, -1) if size % divisor == 0), 1)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns: vectors are one row, what has more dimensions keeps its first."""
    rows = shape[0] if len(shape) > 1 else 1
    return rows, shape.numel() // max(rows, 1)


def block_shape(shape: torch.Size, limit: int) -> tuple[int, int]:
    """Height and width of a tensor's blocks: the largest divisors up to `limit`."""
    rows, columns = matrix_shape(shape)
    return largest_divisor(rows, limit), largest_divisor(columns, limit)


def cut(tensor: Tensor, block: tuple[int, int]) -> Tensor:
    """`tensor` as [number of blocks, values of a block]."""
    height, width = block
    rows, _ = matrix_shape(tensor.shape)
    return tensor.reshape(rows // height, height, -1, width).transpose(1, 2).reshape(-1, height * width)


def joined(blocks: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """The tensor of that shape that was cut into `blocks`."""
    height, width = block
    rows, _ = matrix_shape(shape)
    return blocks.reshape(rows // height, -1, height, width).transpose(1, 2).reshape(shape)


class EachTensorCodec(Codec):
    """Codec that encodes tensor by tensor.

    Args:
        sizes: values of each tensor, in the order in which they lie in the flat one.
        codec: of each.
    """

    def __init__(self, sizes: Sequence[int], codec: Codec) -> None:
        self.sizes, self.codec, self.name = list(sizes), codec, codec.name

    def encode(self, values: Tensor) -> Tensor:
        """The tensors' messages, one behind the other."""
        return torch.cat([self.codec.encode(piece) for piece in torch.split(values, self.sizes)])

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """The tensors, one behind the other."""
        messages = torch.split(message, [self.codec.encoded_bytes(size) for size in self.sizes])
        parts = zip(messages, self.sizes, strict=True)
        return torch.cat([self.codec.decode(part, size) for part, size in parts])

    def encoded_bytes(self, num_values: int) -> int:
        """Encoded bytes of all tensors together."""
        return sum(self.codec.encoded_bytes(size) for size in self.sizes)


class LargestCodec(Codec):
    """The values of largest magnitude of each block of each tensor, with their places; the rest comes back as zero.

    Args:
        shapes: of the tensors, in the order in which they lie in the flat one.
        blocks: (height, width) of each one's blocks.
        counts: values that a block of each keeps.
        index_bits: of a place within a block.
        values: how the values of a tensor travel; None: as they are, in `dtype`.
        dtype: of values, where no codec says it.

    References:
        Lin et al., Deep Gradient Compression, arXiv 1712.01887. Sarfi et al., SparseLoCo, arXiv 2508.15706.
    """

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        blocks: Sequence[tuple[int, int]],
        counts: Sequence[int],
        index_bits: int,
        values: Codec | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.index_bits, self.values, self.dtype, self.name = index_bits, values, dtype, "largest"
        self._plan = [
            (shape, block, shape.numel() // (block[0] * block[1]), min(count, block[0] * block[1]))
            for shape, block, count in zip(shapes, blocks, counts, strict=True)
            if shape.numel()
        ]
        self._sizes = [shape.numel() for shape, *_ in self._plan]

    def encode(self, values: Tensor) -> Tensor:
        """Places, then values, of each tensor, block by block."""
        parts = [torch.empty(0, dtype=torch.uint8, device=values.device)]
        pieces = torch.split(values, self._sizes) if self._plan else ()
        for piece, (shape, block, _, count) in zip(pieces, self._plan, strict=True):
            blocks = cut(piece.view(shape), block)
            places = blocks.abs().topk(count, dim=1).indices
            kept = blocks.gather(1, places).view(-1)
            coded = kept.to(self.dtype).view(torch.uint8) if self.values is None else self.values.encode(kept)
            parts += [pack(places.view(-1), self.index_bits), coded]
        return torch.cat(parts)

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """The tensors, zero where nothing was sent."""
        pieces = [torch.empty(0, device=message.device)]
        for shape, block, num_blocks, count in self._plan:
            num_kept = num_blocks * count
            ends = [packed_bytes(num_kept, self.index_bits), self._bytes(num_kept)]
            coded_places, coded, message = message.tensor_split([ends[0], sum(ends)])
            places = unpack(coded_places, self.index_bits, num_kept).view(num_blocks, count)
            kept = read_as(coded, self.dtype) if self.values is None else self.values.decode(coded, num_kept)
            blocks = kept.new_zeros(num_blocks, block[0] * block[1])
            pieces.append(
                joined(blocks.scatter_(1, places, kept.view(num_blocks, count)), shape, block).reshape(-1)
            )
        return torch.cat(pieces)

    def encoded_bytes(self, num_values: int) -> int:
        """Size: of each tensor `index_bits` a place, filled up to a byte, and its values' message."""
        kept = [num_blocks * count for _, _, num_blocks, count in self._plan]
        return sum(packed_bytes(num, self.index_bits) + self._bytes(num) for num in kept)

    def _bytes(self, num_kept: int) -> int:
        return num_kept * self.dtype.itemsize if self.values is None else self.values.encoded_bytes(num_kept)
