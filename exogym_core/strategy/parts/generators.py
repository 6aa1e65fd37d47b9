"""Random numbers equal on all ranks without a message: a generator from a seed and a few numbers."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["shared_generator"]


def shared_generator(*key: int | str) -> torch.Generator:
    """A CPU generator that depends on `key` alone, such as `(seed, "islands", round)`.

    The process-wide generators are neither read nor changed, so a strategy's draws depend on no model,
    loader or other rank.

    >>> a, b = shared_generator(7, "islands", 3), shared_generator(7, "islands", 3)
    >>> bool((torch.randperm(5, generator=a) == torch.randperm(5, generator=b)).all())
    True
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
