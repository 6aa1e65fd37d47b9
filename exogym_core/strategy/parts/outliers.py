"""Outliers among a few numbers that come again each round."""

from __future__ import annotations

import torch
from torch import Tensor

from exogym_core.strategy.parts.state import State, Stateful

__all__ = ["Outliers"]


class Outliers(Stateful):
    """Outliers among norms, each against the running mean and variance of those before it.

    With a norm x, r the `rate`, and both learned from norms that are no outliers::

        score = (x - mean) / sqrt(variance)
        mean <- mean + r (x - mean),  variance <- (1 - r) (variance + r (x - mean before) (x - mean after))

    x is an outlier if `score > limit max(1, s)`, s the standard deviation of the last `warmup` scores, and more than
    `warmup` norms have been learned; also if it is not finite.

    Args:
        like: as many values as there are norms.
        limit, warmup, rate: as above; infinity: only what is not finite is an outlier.

    References:
        The rule as in intelligent-machine-learning/atorch, `atorch/local_sgd/utils/anomaly_detection.py`.
    """

    state = State("count", "mean", "variance", "scores")

    def __init__(self, like: Tensor, limit: float, warmup: int, rate: float) -> None:
        self.limit, self.warmup, self.rate = limit, warmup, rate
        self.count = torch.zeros_like(like, dtype=torch.long)
        self.mean, self.variance = (torch.zeros_like(like) for _ in range(2))
        self.scores = like.new_zeros(warmup, len(like))

    def among(self, norms: Tensor) -> Tensor:
        """Whether each norm is an outlier."""
        limits = self.limit * self.scores.std(dim=0).clamp(min=1)
        return ~norms.isfinite() | ((self.count >= self.warmup) & (self._scores_of(norms) > limits))

    def learn(self, norms: Tensor) -> None:
        """Learn from the norms of a round."""
        learned = ~self.among(norms)
        before = norms - self.mean
        self.mean = torch.where(learned, self.mean + self.rate * before, self.mean)
        variance = (1 - self.rate) * (self.variance + self.rate * before * (norms - self.mean))
        self.variance = torch.where(learned, variance, self.variance)
        place = (self.count % self.warmup)[None]
        self.count = self.count + learned
        scores = torch.where(learned, self._scores_of(norms), self.scores.gather(0, place)[0])
        self.scores.scatter_(0, place, scores[None])

    def _scores_of(self, norms: Tensor) -> Tensor:
        known = (self.count >= self.warmup) & (self.variance > 0)
        return torch.where(known, (norms - self.mean) / self.variance.sqrt(), 0.0)
