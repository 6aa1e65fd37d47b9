"""Intervals over seeds by the bootstrap: small, pure, and the same every time.

With fewer than about six seeds a percentile interval is too narrow, and with fewer than two there is none: it says how
much the seeds that were run differ, and no more.

Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13 (percentile intervals).
"""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["bootstrap_interval", "paired_interval"]

_DRAWS = 4000
_EXACT = 5  # values up to which every resample is taken: 5 ** 5 = 3125


def bootstrap_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float] | None:
    """The percentile interval of the mean of `values`; None with fewer than two, or where one is not finite.

    Of up to five values all resamples are taken, of more 4,000 drawn with a fixed seed. The order of the values
    changes nothing.

    Args:
        values: one a seed.
        level: the share of resampled means inside, between 0 and 1.

    Raises:
        ValueError: `level` is not between 0 and 1.

    >>> bootstrap_interval([1.0, 2.0, 3.0])
    (1.0, 3.0)
    >>> bootstrap_interval([2.0, 2.0]), bootstrap_interval([2.0])
    ((2.0, 2.0), None)
    """
    if not 0 < level < 1:
        raise ValueError(f"bootstrap_interval: level={level} must lie between 0 and 1, such as 0.95")
    ordered = sorted(values)
    count = len(ordered)
    if count < 2 or not all(map(math.isfinite, ordered)):
        return None
    if count <= _EXACT:
        means = sorted(math.fsum(each) / count for each in itertools.product(ordered, repeat=count))
    else:
        draws = random.Random(0)
        means = sorted(math.fsum(draws.choices(ordered, k=count)) / count for _ in range(_DRAWS))
    left_out = int((1 - level) / 2 * len(means))
    return means[left_out], means[-1 - left_out]


def paired_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """The interval of the mean of `first - second`, pair by pair: of two things met with the same seeds.

    >>> paired_interval([5.0, 7.0, 9.0], [4.0, 5.0, 8.0])
    (1.0, 2.0)
    """
    return bootstrap_interval([a - b for a, b in zip(first, second, strict=True)])
