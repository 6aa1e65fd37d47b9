"""What a strategy is told about the step that begins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["StepContext"]


@dataclass(slots=True)
class StepContext:
    """A step as this rank does it; whoever runs the loop hands it to `Strategy.begin_step`.

    Attributes:
        number: of the step, from 0.
        weight: samples of this rank in this step over the mean of all ranks'. Strategies that average gradients
            weigh this rank's with it.
        samples: of this rank.
        samples_of: of every rank of the run; empty where all have as many.
        scaler: what gradients are scaled with, as they come from the backward pass; None where they are not.
        last_micro_batch: whether the backward pass that is under way, or just over, completes the gradient.
    """

    number: int = 0
    weight: float = 1.0
    samples: int = 0
    scaler: torch.amp.GradScaler | None = None
    last_micro_batch: bool = True
    samples_of: Sequence[int] = ()

    def weight_among(self, ranks: Sequence[int]) -> float:
        """Samples of this rank over the mean of `ranks`'.

        Raises:
            InputError: batches are uneven, and nobody said how large the others' are.
        """
        if self.samples_of:
            return self.samples * len(ranks) / sum(self.samples_of[rank] for rank in ranks)
        if self.weight != 1.0:
            raise InputError(
                f"StepContext: weight={self.weight:g} is relative to all ranks; say samples_of too, for the weight "
                "inside a site"
            )
        return 1.0
