"""HeLoCo: async DiLoCo whose server doubts displacements that its momentum contradicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.options import number, option
from exogym_core.strategy.participation.servers import ServedStrategy
from exogym_core.strategy.parts.flat import unflatten
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from torch import Tensor


__all__ = ["HeLoCoStrategy"]


class HeLoCoStrategy(ServedStrategy, name="HeLoCo", experimental=True):
    """Async DiLoCo whose server turns stale displacements towards its momentum, tensor by tensor.

    With `c = cos(d, m)` and `conf = |d| / (|d| + k |m| + eps)` of a tensor's displacement d and momentum m:

        c >= 0.2:  d' = d
        c < 0:     d' = d - min(0.5 (-c) conf, 0.5) c |d| unit(m)
        between:   d' = |d| unit((1 - l) unit(d) + l unit(m)),  l = min((1 - c) conf, 1)
        m = mu m + (1 - mu) d';  phi -= eta (d' + mu m)

    The rule is second-hand: read in summaries of the paper, not in its authors' code.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        outer_lr: eta.
        outer_momentum: mu.
        confidence: k, how much longer than a displacement the momentum must be to doubt it.
        dylu: workers do fewer local steps the slower they are, see `ServedStrategy`.
        options: of every Strategy.

    References:
        HeLoCo, arXiv 2606.00271.
    """

    outer_lr: float = option(0.7, number)
    outer_momentum: float = option(0.9, number)
    confidence: float = option(3.0, number)

    state = State("momentum")

    def prepare(self) -> None:
        """Begin with the same parameters everywhere."""
        super().prepare()
        self.momentum = torch.zeros_like(self.phi)

    def arrived(self, source: int, displacement: Tensor, steps: int) -> None:
        """Correct, then a step with momentum."""
        parts = (unflatten(flat, self.trainable) for flat in (displacement, self.momentum, self.phi))
        for d, m, phi in zip(*parts, strict=True):
            corrected = _corrected(d, m, self.confidence)
            m.mul_(self.outer_momentum).add_(corrected, alpha=1 - self.outer_momentum)
            phi.sub_(corrected + self.outer_momentum * m, alpha=self.outer_lr)


def _corrected(d: Tensor, m: Tensor, confidence: float) -> Tensor:
    """A displacement, turned towards the momentum where they disagree."""
    length, momentum = d.norm(), m.norm()
    if not length or not momentum:
        return d
    cosine = float((d * m).sum() / (length * momentum))
    if cosine >= 0.2:
        return d
    conf = float(length / (length + confidence * momentum + 1e-12))
    unit_m = m / momentum
    if cosine < 0:
        turned: Tensor = d - unit_m * (min(0.5 * -cosine * conf, 0.5) * cosine * float(length))
        return turned
    mix = min((1 - cosine) * conf, 1.0)
    mixed = (1 - mix) * d / length + mix * unit_m
    straightened: Tensor = mixed * float(length / mixed.norm())
    return straightened
