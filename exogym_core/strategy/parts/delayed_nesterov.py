"""Delayed Nesterov: an outer step for displacements that arrive one by one, each when it comes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DelayedNesterov"]


class DelayedNesterov:
    """Momentum only with every `buffer`-th arrival; plain steps between them.

    With the t-th displacement `d` to arrive (t from 0) and `D` their sum since the last momentum step:

        D += d
        (t + 1) mod N = 0:  m = beta m + D / N;  phi -= e ((1 - c N + c) beta m + d / N);  D = 0
        otherwise:          phi -= e (c beta m + d / N)

    With N = 1 it is SGD with Nesterov momentum.

    Args:
        phi: the flat parameters, changed in place.
        lr: e.
        momentum: beta.
        buffer: N.
        share: c, the part of the momentum that plain steps take.

    References:
        Liu et al., Asynchronous Local-SGD Training for Language Modeling, arXiv 2401.09135, algorithm 3; the rule is as
        utnslab/halos has it.
    """

    def __init__(self, phi: Tensor, lr: float, momentum: float, buffer: int = 1, share: float = 0.0) -> None:
        self.phi, self.lr, self.momentum, self.buffer, self.share = phi, lr, momentum, buffer, share
        self.velocity, self.pending = torch.zeros_like(phi), torch.zeros_like(phi)
        self.num_arrived = 0

    @torch.no_grad()
    def step(self, displacement: Tensor) -> None:
        """Take in one displacement, of `phi`'s shape."""
        n, c = self.buffer, self.share
        self.pending += displacement
        self.num_arrived += 1
        if self.num_arrived % n == 0:
            self.velocity.mul_(self.momentum).add_(self.pending, alpha=1 / n)
            scale = (1 - c * n + c) * self.momentum
            self.pending.zero_()
        else:
            scale = c * self.momentum
        self.phi.sub_(self.velocity, alpha=self.lr * scale).sub_(displacement, alpha=self.lr / n)

    def state_dict(self) -> dict[str, Any]:
        """What arrivals change, besides `phi`."""
        return {
            "velocity": self.velocity.clone(),
            "pending": self.pending.clone(),
            "num_arrived": self.num_arrived,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.velocity.copy_(state["velocity"])
        self.pending.copy_(state["pending"])
        self.num_arrived = state["num_arrived"]
