"""Codecs that strategies make for their tensors: a few bits a value, tensor by tensor, the largest values of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exogym_core.strategy.parts.codecs import (
    CastCodec,
    Codec,
    HeadedCodec,
    PiecewiseCodec,
    in_rows,
    pack,
    packed_bytes,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "EachTensorCodec",
    "LargestCodec",
    "LinearCodec",
    "QSGDCodec",
    "SignCodec",
    "StatisticalCodec",
    "block_shape",
    "cut",
    "joined",
    "largest_divisor",
    "matrix_shape",
]


class SignCodec(HeadedCodec):
    """A bit a value, 1 for non-negative ones, and with a `scale` one fp32 number a message.

    A bit has no zero: zero decodes to plus the scale.

    Args:
        scale: what signs are multiplied with: "l1", the mean magnitude; "l2", the root mean square; "none", 1.

    References:
        Bernstein et al., signSGD, arXiv 1802.04434. Tang et al., 1-bit Adam, arXiv 2102.02888.
    """

    name, bits = "sign", 1

    def __init__(self, scale: str = "none") -> None:
        self.scale = scale

    def num_head(self, num_values: int) -> int:
        return 0 if self.scale == "none" else 1

    def coded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        wide = values.float()
        size = wide.abs().mean() if self.scale == "l1" else wide.square().mean().sqrt()
        return size.nan_to_num(0.0).view(1)[: self.num_head(len(values))], values >= 0

    def restored(self, head: Tensor, codes: Tensor) -> Tensor:
        signs = codes.float() * 2 - 1
        return signs * head if len(head) else signs


class QSGDCodec(HeadedCodec):
    """Stochastic rounding to s levels of each bucket's norm, without bias; a code is a sign and a level.

    Args:
        bits: of a code; s is `2 ** (bits - 1) - 1`.
        bucket: values that share a norm, which travels in fp32.
        norm: "l2", or "max", the largest magnitude.
        generator: draws the rounding of `encode`, on the CPU.

    References:
        Alistarh et al., QSGD, arXiv 1610.02132, section 3.1; buckets and the largest magnitude in section 4.
    """

    name = "qsgd"

    def __init__(self, bits: int, bucket: int, norm: str, generator: torch.Generator | None = None) -> None:
        self.bits, self.bucket, self.norm, self.generator = bits, bucket, norm, generator
        self.num_levels = 2 ** (bits - 1) - 1

    def num_head(self, num_values: int) -> int:
        return -(-num_values // self.bucket)

    def coded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        chunks = in_rows(values.float(), self.bucket)
        norms = chunks.norm(dim=1) if self.norm == "l2" else chunks.abs().amax(dim=1)
        shares = chunks.abs() / norms.where(norms > 0, 1.0)[:, None]
        places = (shares * self.num_levels).view(-1)[: len(values)]
        drawn = torch.rand(len(values), generator=self.generator).to(values.device)
        levels = (places.floor() + (drawn < places - places.floor())).clamp(max=self.num_levels)
        return norms, levels.to(torch.uint8) | (values < 0).to(torch.uint8) << (self.bits - 1)

    def restored(self, head: Tensor, codes: Tensor) -> Tensor:
        levels = (codes & self.num_levels).float() / self.num_levels
        norms = head.repeat_interleave(self.bucket)[: len(codes)]
        return torch.where(codes > self.num_levels, -levels, levels) * norms


class StatisticalCodec(HeadedCodec):
    """`2 ** bits` equal bins of 6 standard deviations around the mean; a code decodes to the mean of its bin.

    With c = v - mean, the code is `clamp(round(c / scale + levels / 2))`, `scale = 6 sigma / levels`; the mean and the
    bins' means of c travel in fp32.

    References:
        The authors' code of MuLoCo, arXiv 2505.23725, and of SparseLoCo, arXiv 2508.15706.
    """

    name = "statistical"

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def num_head(self, num_values: int) -> int:
        return 1 + (1 << self.bits)

    def coded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        wide, num_levels = values.float(), 1 << self.bits
        mean = wide.mean() if len(wide) else wide.new_zeros(())
        centered = wide - mean
        sigma = (centered.square().sum() / max(len(wide) - 1, 1)).sqrt()
        scale = 6 * sigma / num_levels
        scale = scale.where((scale > 0) & scale.isfinite(), 1.0)
        codes = (centered / scale + num_levels // 2).round().nan_to_num(0.0).clamp(0, num_levels - 1).long()
        zeros = wide.new_zeros(num_levels)
        sums = zeros.scatter_add(0, codes, centered)
        counts = zeros.scatter_add(0, codes, torch.ones_like(centered))
        return torch.cat([mean.view(1), sums / counts.clamp(min=1)]), codes

    def restored(self, head: Tensor, codes: Tensor) -> Tensor:
        return head[1:][codes.int()] + head[0]


class LinearCodec(HeadedCodec):
    """`2 ** bits` equal steps from the smallest to the largest value, which travel in fp32.

    References:
        The authors' code of MuLoCo, arXiv 2505.23725 (linear quantisation of a whole tensor).
    """

    name = "linear"

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def num_head(self, num_values: int) -> int:
        return 2

    def coded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        wide = values.float()
        low, high = (wide.amin(), wide.amax()) if len(wide) else (wide.new_zeros(()), wide.new_zeros(()))
        step = (high - low) / (2**self.bits - 1)
        step = step.where(step > 0, 1.0)
        codes = ((wide - low) / step).round().nan_to_num(0.0).clamp(0, 2**self.bits - 1)
        return torch.stack([low, step]), codes

    def restored(self, head: Tensor, codes: Tensor) -> Tensor:
        low, step = head
        return torch.add(low, codes.float() * step)


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
        blocks = cut(values.view(self.shape), self.block)
        places = blocks.abs().topk(self.count, dim=1).indices
        kept = blocks.gather(1, places).view(-1)
        return torch.cat([pack(places.view(-1), self.index_bits), self.values.encode(kept)])

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        coded, rest = message.tensor_split([packed_bytes(self.num_kept, self.index_bits)])
        places = unpack(coded, self.index_bits, self.num_kept).long().view(self.num_blocks, self.count)
        kept = self.values.decode(rest, self.num_kept).view(self.num_blocks, self.count)
        blocks = kept.new_zeros(self.num_blocks, self.block[0] * self.block[1])
        return joined(blocks.scatter_(1, places, kept), self.shape, self.block).reshape(-1)

    def encoded_bytes(self, num_values: int) -> int:
        return packed_bytes(self.num_kept, self.index_bits) + self.values.encoded_bytes(self.num_kept)
