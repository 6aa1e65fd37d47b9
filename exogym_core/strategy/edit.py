"""EDiT: DiLoCo whose pseudo-gradients are weighed by their norms, without outliers, and clipped."""

from __future__ import annotations

import math
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.diloco import DiLoCoStrategy
from exogym_core.strategy.options import fraction, number, option, whole_number
from exogym_core.strategy.parts.flat import unflatten
from exogym_core.strategy.parts.gradients import clip_norm
from exogym_core.strategy.parts.outer import OuterStep
from exogym_core.strategy.parts.outliers import Outliers
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor

    from exogym_core.communicator.base import Communicator

__all__ = ["EDiTStrategy"]


class EDiTStrategy(DiLoCoStrategy, name="EDiT"):
    """DiLoCo with EDiT's pseudo-gradient penalty, tensor by tensor.

    With d_i worker i's pseudo-gradient of a tensor, and G_i its norm, infinite if worker i finds it an outlier::

        D = sum over workers of w_i d_i,  w_i = exp(-G_i) / sum over workers of exp(-G_j)
        D <- D min(1, clip_outer / (|D| + 1e-6)),  |D| over all tensors

    Then the outer step. A tensor that is an outlier on all workers stays as it is. `Outliers` has what an outlier is.
    Layers are not averaged one by one during the forward pass, and rounds have H steps, not a time, as in A-EDiT.

    Bytes: DiLoCo's, and 4 bytes a tensor from each worker to all others.

    Args:
        outlier_score: standard deviations above the mean of a tensor's norms that make an outlier; 0: there is none.
        outlier_warmup: rounds that the mean is learned for before there are outliers.
        outlier_rate: weight of a round in mean and variance.
        clip_outer: norm to which the mean of pseudo-gradients is clipped; 0: as it is.
        options: of DiLoCo, without sharding and `aggregate`, and of every Strategy.

    References:
        Cheng et al., EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models, arXiv
        2412.07210; the rule as in the authors' code, intelligent-machine-learning/atorch,
        `atorch/local_sgd/DDP/outer_optim_model_averager.py`.
    """

    outlier_score: float = option(3.0, number)
    outlier_warmup: int = option(120, partial(whole_number, least=2))
    outlier_rate: float = option(0.02, fraction)
    clip_outer: float = option(10.0, number)
    weighs_by_samples = False

    def __init__(self, *positional: Any, **given: Any) -> None:
        super().__init__(*positional, **given)
        if self.averaging.aggregate != "mean":
            raise InputError(
                f"{self.where}: weighs pseudo-gradients by their norms; leave out aggregate=",
                about=("aggregate",),
            )
        if self.sites.sharding != "NO_SHARD":
            raise InputError(
                f"{self.where}: needs the norms of whole tensors; leave out sharding=", about=("sharding",)
            )

    def prepare(self) -> None:
        """Begin with the same theta on every worker, and no norms seen."""
        super().prepare()
        self.outer = PenalizedStep(self)


class PenalizedStep(OuterStep):
    """Outer step along pseudo-gradients weighed by their norms, of an `EDiTStrategy`."""

    state = State("outliers")

    def __init__(self, strategy: EDiTStrategy) -> None:
        optimizer, averaging = strategy.outer_optimizer.outer_optim(), strategy.averaging.charged(strategy)
        super().__init__(strategy.held, optimizer, averaging)
        self.clip = strategy.clip_outer
        self.norms = torch.zeros(len(strategy.held), dtype=torch.float64, device=strategy.held[0].device)
        limit = strategy.outlier_score or math.inf
        self.outliers = Outliers(self.norms, limit, strategy.outlier_warmup, strategy.outlier_rate)
        self.dropped = self.norms > 0

    @torch.no_grad()
    def values(self, comm: Communicator | None = None) -> list[Tensor]:
        """Pseudo-gradients times their weights and the number of workers, so that their mean is the weighted sum."""
        assert comm is not None, "weights are among workers"
        flats = super().values(comm)
        pairs = zip(flats, self.anchors, strict=True)
        parts = [part for flat, anchors in pairs for part in unflatten(flat, anchors)]
        self.norms = torch.stack([part.norm().double() for part in parts])
        own = torch.where(self.outliers.among(self.norms), math.inf, self.norms)
        norms = torch.stack(comm.all_gather(own.float()))  # [workers, tensors]
        weights = (-norms).softmax(dim=0).nan_to_num(0.0)[comm.rank] * comm.world_size
        self.dropped = norms.isinf().all(dim=0)
        for part, weight in zip(parts, weights, strict=True):
            part.copy_(torch.where(weight > 0, part * weight, 0.0))
        return flats

    def update(self) -> None:
        """Clip, and take the outer optimizer's step for tensors that some worker has sent."""
        anchors = list(chain.from_iterable(self.anchors))
        if not self.norms.is_meta:
            for anchor, is_dropped in zip(anchors, self.dropped.tolist(), strict=True):
                anchor.grad = None if is_dropped else anchor.grad
        if self.clip:
            clip_norm(anchors, self.clip)
        self.outliers.learn(self.norms)
        super().update()
