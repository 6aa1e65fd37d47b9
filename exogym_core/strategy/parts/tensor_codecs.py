"""Codecs of a flat tensor by the tensors in it: each by itself, or the largest values of its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exogym_core.strategy.parts.codecs import CastCodec, Codec, PiecewiseCodec, pack, packed_bytes, unpack

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
    """Rows and columns: a vector is one row, other tensors keep their first dimension."""
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


class EachTensorCodec(PiecewiseCodec):
    """Codec that encodes tensor by tensor.

    Args:
        sizes: values of each tensor, in the order in which they lie in the flat one.
        codec: of each.
    """

    def __init__(self, sizes: Sequence[int], codec: Codec) -> None:
        self.sizes, self.codec, self.name = list(sizes), codec, codec.name

    def pieces(self, num_values: int) -> list[tuple[int, Codec]]:
        """A piece for each tensor, all with one codec."""
        return [(size, self.codec) for size in self.sizes]


class LargestCodec(PiecewiseCodec):
    """The values of largest magnitude of each block of each tensor, with their places; the rest decodes to zero.

    Args:
        shapes: of the tensors, in the order in which they lie in the flat one.
        blocks: (height, width) of each one's blocks.
        counts: values that a block of each keeps.
        index_bits: of a place within a block.
        values: how the values of a tensor travel; None: as they are, in `dtype`.
        dtype: of values without a codec.

    References:
        Lin et al., Deep Gradient Compression, arXiv 1712.01887. Sarfi et al., SparseLoCo, arXiv 2508.15706.
    """

    name = "largest"

    def __init__(
        self,
        shapes: Sequence[torch.Size],
        blocks: Sequence[tuple[int, int]],
        counts: Sequence[int],
        index_bits: int,
        values: Codec | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        kept = CastCodec(dtype) if values is None else values
        self._pieces = [
            (shape.numel(), _LargestOfTensor(shape, block, count, index_bits, kept))
            for shape, block, count in zip(shapes, blocks, counts, strict=True)
            if shape.numel()
        ]

    def pieces(self, num_values: int) -> Sequence[tuple[int, Codec]]:
        """A piece for each tensor that has values."""
        return self._pieces


class _LargestOfTensor(Codec):
    """The `count` largest values of each block of one tensor: places of all blocks, then the values."""

    def __init__(
        self, shape: torch.Size, block: tuple[int, int], count: int, index_bits: int, values: Codec
    ) -> None:
        self.shape, self.block, self.index_bits, self.values = shape, block, index_bits, values
        size = block[0] * block[1]
        self.count = min(count, size)
        self.num_blocks = shape.numel() // size
        self.num_kept = self.num_blocks * self.count

    def encode(self, values: Tensor) -> Tensor:
        """Packed places of the largest values of all blocks, followed by the encoded values."""
        blocks = cut(values.view(self.shape), self.block)
        places = blocks.abs().topk(self.count, dim=1).indices
        kept = blocks.gather(1, places).view(-1)
        return torch.cat([pack(places.view(-1), self.index_bits), self.values.encode(kept)])

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """The tensor, zero where nothing was sent."""
        coded, rest = message.tensor_split([packed_bytes(self.num_kept, self.index_bits)])
        places = unpack(coded, self.index_bits, self.num_kept).long().view(self.num_blocks, self.count)
        kept = self.values.decode(rest, self.num_kept).view(self.num_blocks, self.count)
        blocks = kept.new_zeros(self.num_blocks, self.block[0] * self.block[1])
        return joined(blocks.scatter_(1, places, kept), self.shape, self.block).reshape(-1)

    def encoded_bytes(self, num_values: int) -> int:
        """Size: `index_bits` a place, filled up to a byte, and the values' message."""
        return packed_bytes(self.num_kept, self.index_bits) + self.values.encoded_bytes(self.num_kept)
