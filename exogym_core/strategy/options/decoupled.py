"""What users say of Decoupled DiLoCo."""

from __future__ import annotations

from dataclasses import dataclass

from exogym_core.strategy.options.arguments import fraction, number, option, positive_int
from exogym_core.strategy.options.served import ServedOptions

__all__ = ["DecoupledDiLoCoOptions"]


@dataclass(frozen=True)
class DecoupledDiLoCoOptions(ServedOptions):
    """What decoupled DiLoCo takes.

    Args:
        H: local steps in which every fragment is sent once.
        num_fragments: P, of whole tensors and about equal size, embeddings apart; fragment p leaves after step
            `(p + 1) H / P` of every H.
        quorum: K, learners whose fragment must have come before it is merged; by default all.
        grace: virtual seconds that the syncer waits for the others after the quorum is there.
        outer_lr: of the fragments' Nesterov step.
        outer_momentum: its momentum.
        mix: the share of the merged fragment in what a learner goes on from.
    """

    H: int = option(24, positive_int)
    num_fragments: int = option(24, positive_int)
    quorum: int | None = option(None, positive_int)
    grace: float = option(0.0, number)
    outer_lr: float = option(0.7, number)
    outer_momentum: float = option(0.9, number)
    mix: float = option(0.5, fraction)
