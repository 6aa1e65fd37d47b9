"""The arguments of DeMo."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exogym_core.strategy.options.arguments import Options, number, option, positive_int
from netsim.files.errors import InputError, unknown_name

__all__ = ["WIRE", "DeMoOptions"]

#: Wire codec -> (dtype of an index within its block, dtype of a value).
WIRE = {"compact": (torch.int16, torch.bfloat16), "released": (torch.int64, torch.float32)}


@dataclass(frozen=True)
class DeMoOptions(Options):
    """What DeMo takes.

    Args:
        compression_decay: of the momentum, from 0 up to below 1.
        compression_topk: entries sent per block.
        compression_chunk: longest side of a block.
        weight_decay: multiplies parameters by `1 - lr weight_decay` before the update.
        codec: "released" (64-bit index and fp32 value an entry) or "compact" (16-bit index, bf16).
    """

    compression_decay: float = option(0.999, number)
    compression_topk: int = option(32, positive_int)
    compression_chunk: int = option(64, positive_int)
    weight_decay: float = option(0.0, number)
    codec: str = option("released")

    def check(self, where: str) -> None:
        """Refuse a momentum that never fades and indices that do not fit."""
        if self.compression_decay >= 1:
            raise InputError(f"{where}: compression_decay={self.compression_decay!r} must be below 1")
        if self.codec not in WIRE:
            raise unknown_name(f"codec of {where}", str(self.codec), WIRE)
        if self.compression_chunk**2 - 1 > torch.iinfo(WIRE[self.codec][0]).max:
            raise InputError(f"{where}: compression_chunk={self.compression_chunk} needs codec='released'")
