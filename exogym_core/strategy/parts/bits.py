"""Small integers packed without gaps, so that a message has the bits that papers count."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack", "packed_bytes", "unpack"]


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
