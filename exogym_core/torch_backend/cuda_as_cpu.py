"""CUDA devices that a script names, on a machine that has none: the CPU stands in for them."""

from __future__ import annotations

__all__ = ["stand_in_for_cuda"]


def stand_in_for_cuda(num_devices: int) -> None:
    """Stub."""
