"""Codecs of one to eight bits a value: signs, stochastic levels, levels of a distribution, levels of a range."""

from __future__ import annotations

import torch
from torch import Tensor

from exogym_core.strategy.parts.codecs import Codec, read_as

__all__ = ["LinearCodec", "QSGDCodec", "SignCodec", "StatisticalCodec", "pack", "packed_bytes", "unpack"]


def packed_bytes(num_codes: int, bits: int) -> int:
    """Size of so many codes of `bits` bits each: the last byte is filled up."""
    return -(-num_codes * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """`codes` (1-D, integers from 0 to below `2 ** bits`) as flat uint8, the lowest bit of the first code first.

    >>> pack(torch.tensor([1, 2, 3]), 12).tolist()
    [1, 32, 0, 3, 0]
    """
    narrow = codes.to(torch.uint8 if bits <= 8 else torch.int64)
    flags = (narrow[:, None] >> torch.arange(bits, dtype=narrow.dtype, device=codes.device) & 1).to(
        torch.uint8
    )
    padded = torch.nn.functional.pad(flags.view(-1), (0, -flags.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=codes.device)).sum(1, dtype=torch.uint8)


def unpack(message: Tensor, bits: int, num_codes: int) -> Tensor:
    """The `num_codes` codes that were packed into `message`, in int64.

    >>> unpack(pack(torch.tensor([1, 2, 3]), 12), 12, 3).tolist()
    [1, 2, 3]
    """
    flags = message[:, None] >> torch.arange(8, dtype=torch.uint8, device=message.device) & 1
    codes = flags.view(-1)[: num_codes * bits].view(num_codes, bits).long()
    return (codes << torch.arange(bits, device=message.device)).sum(1)


class SignCodec(Codec):
    """A bit a value, 1 for what is not negative, and with a `scale` one fp32 number a message.

    A bit knows no zero: it comes back as plus the scale.

    Args:
        scale: what signs are multiplied with: "l1", the mean magnitude; "l2", the root mean square; "none", 1.

    References:
        Bernstein et al., signSGD, arXiv 1802.04434. Tang et al., 1-bit Adam, arXiv 2102.02888.
    """

    def __init__(self, scale: str = "none") -> None:
        self.scale = scale
        self.name = "sign"

    def encode(self, values: Tensor) -> Tensor:
        """The scale, if there is one, then the bits."""
        bits = pack((values >= 0).to(torch.uint8), 1)
        if self.scale == "none":
            return bits
        wide = values.float()
        size = wide.abs().mean() if self.scale == "l1" else wide.square().mean().sqrt()
        return torch.cat([size.nan_to_num(0.0).view(1).view(torch.uint8), bits])

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """Plus or minus the scale."""
        if self.scale == "none":
            return unpack(message, 1, num_values).float() * 2 - 1
        return (unpack(message[4:], 1, num_values).float() * 2 - 1) * read_as(message[:4], torch.float32)

    def encoded_bytes(self, num_values: int) -> int:
        """A bit a value, and the scale."""
        return packed_bytes(num_values, 1) + (0 if self.scale == "none" else 4)


class QSGDCodec(Codec):
    """Stochastic rounding to s levels of each bucket's norm, without bias; a code is a sign and a level.

    Args:
        bits: of a code; s is `2 ** (bits - 1) - 1`.
        bucket: values that share a norm, which travels in fp32.
        norm: "l2", or "max", the largest magnitude.
        generator: draws the rounding of `encode`, on the CPU.

    References:
        Alistarh et al., QSGD, arXiv 1610.02132, section 3.1; buckets and the largest magnitude in section 4.
    """

    def __init__(self, bits: int, bucket: int, norm: str, generator: torch.Generator | None = None) -> None:
        self.bits, self.bucket, self.norm, self.generator = bits, bucket, norm, generator
        self.name = "qsgd"

    def encode(self, values: Tensor) -> Tensor:
        """Norms first, then the codes."""
        chunks = torch.nn.functional.pad(values.float(), (0, -len(values) % self.bucket)).view(
            -1, self.bucket
        )
        norms = chunks.norm(dim=1) if self.norm == "l2" else chunks.abs().amax(dim=1)
        num_levels = 2 ** (self.bits - 1) - 1
        places = (chunks.abs() / norms.where(norms > 0, 1.0)[:, None] * num_levels).view(-1)[: len(values)]
        drawn = torch.rand(len(values), generator=self.generator).to(values.device)
        levels = (places.floor() + (drawn < places - places.floor())).clamp(max=num_levels)
        codes = levels.to(torch.uint8) | (values < 0).to(torch.uint8) << (self.bits - 1)
        return torch.cat([norms.view(torch.uint8), pack(codes, self.bits)])

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """Sign times level times norm over s."""
        start, num_levels = 4 * self._num_buckets(num_values), 2 ** (self.bits - 1) - 1
        norms = read_as(message[:start], torch.float32).repeat_interleave(self.bucket)[:num_values]
        codes = unpack(message[start:], self.bits, num_values)
        levels = (codes & num_levels).float() / num_levels
        return torch.where(codes > num_levels, -levels, levels) * norms

    def encoded_bytes(self, num_values: int) -> int:
        """`bits` a value and four bytes a bucket."""
        return packed_bytes(num_values, self.bits) + 4 * self._num_buckets(num_values)

    def _num_buckets(self, num_values: int) -> int:
        return -(-num_values // self.bucket)


class StatisticalCodec(Codec):
    """`2 ** bits` equal bins of 6 standard deviations around the mean; each comes back as the mean of its values.

    With c = v - mean, the code is `clamp(round(c / scale + levels / 2))`, `scale = 6 sigma / levels`; the mean and the
    bins' means of c travel in fp32.

    References:
        The authors' code of MuLoCo, arXiv 2505.23725, and of SparseLoCo, arXiv 2508.15706.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = "statistical"

    def encode(self, values: Tensor) -> Tensor:
        """The mean, the bins' means, the codes."""
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
        head = torch.cat([mean.view(1), sums / counts.clamp(min=1)])
        return torch.cat([head.view(torch.uint8), pack(codes, self.bits)])

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """The mean of each value's bin."""
        start = 4 * (1 + (1 << self.bits))
        head = read_as(message[:start], torch.float32)
        return head[1:][unpack(message[start:], self.bits, num_values)] + head[0]

    def encoded_bytes(self, num_values: int) -> int:
        """`bits` a value, and `1 + 2 ** bits` fp32 numbers."""
        return packed_bytes(num_values, self.bits) + 4 * (1 + (1 << self.bits))


class LinearCodec(Codec):
    """`2 ** bits` equal steps from the smallest to the largest value, which travel in fp32.

    References:
        The authors' code of MuLoCo, arXiv 2505.23725 (linear quantisation of a whole tensor).
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.name = "linear"

    def encode(self, values: Tensor) -> Tensor:
        """Smallest value, step, codes."""
        wide = values.float()
        low, high = (wide.amin(), wide.amax()) if len(wide) else (wide.new_zeros(()), wide.new_zeros(()))
        step = (high - low) / (2**self.bits - 1)
        step = step.where(step > 0, 1.0)
        codes = ((wide - low) / step).round().nan_to_num(0.0).clamp(0, 2**self.bits - 1)
        return torch.cat([torch.stack([low, step]).view(torch.uint8), pack(codes.to(torch.uint8), self.bits)])

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """Smallest value plus so many steps."""
        low, step = read_as(message[:8], torch.float32)
        return torch.add(low, unpack(message[8:], self.bits, num_values).float() * step)

    def encoded_bytes(self, num_values: int) -> int:
        """`bits` a value, and two fp32 numbers."""
        return packed_bytes(num_values, self.bits) + 8
