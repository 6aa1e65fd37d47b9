"""When a target loss is reached: the first evaluation at or below it, if the loss then stays there."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Judged", "Reached", "reach"]

_LEAST_LATER = 2  # evaluations that must follow


class Judged(NamedTuple):
    """An evaluation of the judged model.

    Attributes:
        version: which model; one that is judged again, because no newer one has come to exist, counts once.
        seconds: the virtual time at which that model came to exist; None where there is no virtual time.
        loss: its loss.
    """

    version: int
    seconds: float | None
    loss: float


class Reached(NamedTuple):
    """How a run stands to its target.

    Attributes:
        target: `held`, `touched` (once there, and not known to have stayed) or `missed`.
        seconds: the virtual time of the first model at or below the target; None if there was none, or no
            virtual time.
        position: of its evaluation among those given; None if there was none.
    """

    target: Literal["held", "touched", "missed"]
    seconds: float | None = None
    position: int | None = None


def reach(evaluations: Sequence[Judged], target_loss: float) -> Reached:
    """When the target was reached, by MLPerf's rule, and whether it was held.

    The first evaluation at or below `target_loss` tells the time; nothing is interpolated. It is held if at least
    two other models are judged after it and the median of their losses is at or below the target too: one noisy
    evaluation does not undo it, and a run that diverges does not have it. A loss that is not a number is above
    every target.

    >>> seconds = (1.0, 2.0, 3.0, 4.0)
    >>> def run(*losses): return [Judged(n, s, loss) for n, (s, loss) in enumerate(zip(seconds, losses))]
    >>> reach(run(0.9, 0.5, 0.6, 0.4), 0.5)
    Reached(target='held', seconds=2.0, position=1)
    >>> reach(run(0.9, 0.5, 0.6, 0.7), 0.5).target, reach(run(0.9, 0.8, 0.5, 0.4), 0.5).target
    ('touched', 'touched')
    >>> reach(run(0.9, 0.8, 0.7, 0.6), 0.5)
    Reached(target='missed', seconds=None, position=None)
    """
    for position, (version, seconds, loss) in enumerate(evaluations):
        if loss <= target_loss:
            later = {other.version: other.loss for other in evaluations[position + 1 :]}
            later.pop(version, None)
            losses = [math.inf if math.isnan(each) else each for each in later.values()]
            held = len(losses) >= _LEAST_LATER and median(losses) <= target_loss
            return Reached("held" if held else "touched", seconds, position)
    return Reached("missed")
