"""Context of a step: weights and scaling of a rank's gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.communicator.base import Communicator

__all__ = ["StepContext"]


@dataclass(slots=True)
class StepContext:
    """Context of a step of this rank, passed to `Strategy.begin_step` by the loop.

    Attributes:
        number: of the step, from 0.
        samples: of this rank.
        samples_of: of every rank of the run; empty if all have the same number.
        scaler: scales the loss, and so the gradients of the backward pass; None: unscaled.
        last_micro_batch: whether the current, or just completed, backward pass completes the gradient.
        comm: connects the ranks of the run; needed with a `count`.
        count: tokens or samples that this rank's gradient is the mean of, where the model returns them with the loss;
            complete from the `last_micro_batch` on.
        is_skipped: the update was skipped, as gradients had overflowed.
        is_unscaled: gradients have been unscaled by `Strategy.unscale_gradients`.
    """

    number: int = 0
    samples: int = 0
    samples_of: Sequence[int] = ()
    scaler: torch.amp.GradScaler | None = None
    last_micro_batch: bool = True
    comm: Communicator | None = None
    is_unscaled: bool = False
    is_skipped: bool = False
    count: float | None = None
    _summed: dict[tuple[int, ...] | None, float] = field(default_factory=dict, init=False)

    @property
    def weight(self) -> float:
        """Weight of this rank's gradient in the mean of all ranks'."""
        return self.weight_among(None)

    def weight_among(self, ranks: Sequence[int] | None) -> float:
        """Weight of this rank's gradient in the mean of the gradients of `ranks`; None: of all ranks.

        It is this rank's samples over the mean of `ranks`'. Where the model returns counts it is this rank's count over
        their mean: the first call of a step sums the counts of `ranks`, all of which must call it then, by an
        all-reduce of 4 bytes that takes its time.
        """
        if self.count is not None and self.comm is not None and self.last_micro_batch:
            together = self.comm if ranks is None else self.comm.group(ranks, reuse=True)
            key = None if ranks is None else tuple(ranks)
            if key not in self._summed:
                total = torch.tensor([self.count], device=self.comm.device)
                self._summed[key] = together.all_reduce(total, "sum").item()
            return self.count * together.world_size / (self._summed[key] or 1.0)
        if not self.samples_of:
            return 1.0
        among = self.samples_of if ranks is None else [self.samples_of[rank] for rank in ranks]
        return self.samples * len(among) / sum(among)
