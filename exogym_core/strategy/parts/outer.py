"""The outer step of local-update methods: the mean displacement as a gradient of a second optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from exogym_core.strategy.optimizers import OptimSpec, ensure_optim_spec
from exogym_core.strategy.options import Options, number, option
from exogym_core.strategy.parts.average import AGGREGATES, Flight, RoundAveraging
from exogym_core.strategy.parts.flat import flatten, pack_plain, unflatten, unpack_plain, write_back
from exogym_core.strategy.parts.state import State, Stateful
from netsim.errors import InputError, about_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.participation.site import Site

__all__ = [
    "DelayedNesterov",
    "GlobalModel",
    "KeptParameters",
    "OuterAveraging",
    "OuterOptimizer",
    "OuterStep",
    "SharedModel",
    "nesterov",
]


@lru_cache(maxsize=64)
def nesterov(lr: float, momentum: float) -> OptimSpec:
    """SGD with Nesterov momentum; without momentum plain SGD. Checked once, not on every rank."""
    return OptimSpec(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)


class OuterOptimizer(Options):
    """Options of the optimizer that takes outer steps.

    Args:
        outer_optim_spec: the outer optimizer (SGD with Nesterov momentum); also `outer_optim` and
            `outer_optimizer`.
        outer_lr: its learning rate, unless `outer_optim_spec` has one; the default of 0.7 is for SGD alone.
        outer_momentum: its momentum (0.9), in the same way.

    Attributes:
        default_lr: the learning rate of the default.
    """

    default_lr: ClassVar[float] = 0.7

    outer_optim_spec: OptimSpec | None = option(None, lambda where, name, value: ensure_optim_spec(value))
    outer_lr: float | None = option(None, number)
    outer_momentum: float | None = option(None, number)

    def check(self, where: str) -> None:
        """Refuse options that the outer optimizer does not take, or gets twice."""
        self.outer_optim()

    def outer_optim(self) -> OptimSpec:
        """The outer optimizer yet to be built."""
        if self.outer_optim_spec is None:
            lr, momentum = self.outer_lr, self.outer_momentum
            return nesterov(self.default_lr if lr is None else lr, 0.9 if momentum is None else momentum)
        given: dict[str, Any] = {"lr": self.outer_lr, "momentum": self.outer_momentum}
        given = {name: value for name, value in given.items() if value is not None}
        with about_option("outer_optim_spec"):
            return ensure_optim_spec(self.outer_optim_spec, **given)


class OuterAveraging(RoundAveraging):
    """Average of a round's pseudo-gradients, see `RoundAveraging`.

    `aggregate="isotropic"` gives every matrix `D = U S V^T` of the mean equal singular values, `mean(S) U V^T`, before
    the outer optimizer takes it; other tensors, and the bytes, are those of the mean.

    References:
        Horoi et al., Can Model Merging Improve Aggregation in DiLoCo?, arXiv 2607.03011; the rule as in the authors'
        code, shoroi/isoloco, `src/tplr/isocloco.py`, `orthogonalize_object="gradient"`.
    """

    aggregates = (*AGGREGATES, "isotropic")

    def charged(self, strategy: Strategy) -> Self:
        """As `Averaging.charged`; refuses singular values of matrices that ranks hold in parts."""
        whole = zip(strategy.trainable, strategy.held, strict=True)
        if self.aggregate == "isotropic" and any(held.shape != each.shape for each, held in whole):
            raise InputError(
                f"{strategy.where}: aggregate='isotropic' needs whole matrices, and sharding= cuts them; leave one out",
                about=("aggregate", "sharding"),
            )
        return super().charged(strategy)


def isotropic(mean: Tensor) -> Tensor:
    """A matrix with the mean of its singular values in place of each; other tensors as they are."""
    if mean.dim() != 2 or mean.is_meta:
        return mean
    left, values, right = torch.linalg.svd(mean, full_matrices=False)
    spread: Tensor = values.mean() * (left @ right)
    return spread


class GlobalModel(Stateful, ABC):
    """The global model of a strategy with rounds, which is judged if `judged` is "outer"."""

    @property
    @abstractmethod
    def theta(self) -> list[Tensor]:
        """Its parameters, in the order in which they were given."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers that update it."""
        return []


class KeptParameters(GlobalModel):
    """Global parameters beside a replica that has others, equal to it at first."""

    state = State("kept")

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.kept = [parameter.detach().clone() for parameter in parameters]

    @property
    def theta(self) -> list[Tensor]:
        """Its parameters, in the order in which they were given."""
        return self.kept


class SharedModel(GlobalModel):
    """Global model of rounds that may continue without absent ranks; its values travel in flat buckets.

    Args:
        parameters: those of this rank.
        averaging: how they are averaged.

    Attributes:
        plan, buckets: indices of the parameters, and the parameters, by bucket.
        residuals: rounding errors that this rank owes the next mean, by bucket.
    """

    def __init__(self, parameters: Sequence[Tensor], averaging: RoundAveraging) -> None:
        self.averaging = averaging
        self.plan = averaging.plan(parameters)
        self.buckets = [[parameters[index] for index in bucket] for bucket in self.plan]
        self.residuals = [averaging.residual(bucket) for bucket in self.buckets]

    @abstractmethod
    def values(self, comm: Communicator | None = None) -> list[Tensor]:
        """Values that this rank sends, flat, in memory of `comm`, which averages them in place; None: they are kept."""

    @abstractmethod
    def packed(self) -> list[Tensor]:
        """State that a rank catches up to, flat."""

    @abstractmethod
    def unpack(self, packed: Sequence[Tensor]) -> None:
        """Take over the state of another rank's `packed`, and the global parameters as this rank's."""

    @torch.no_grad()
    def mean_over(self, site: Site, weight: float = 1.0) -> list[Tensor]:
        """The mean over sites of what each sends, flat, `weight` times each; waits for it."""
        return self.averaging.means(site, self.values(site.between), self.residuals, weight)

    @torch.no_grad()
    def averaged(
        self, site: Site, peers: Communicator, values: list[Tensor] | None = None, *, weight: float = 1.0
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The mean over the ranks of `peers`, flat, `weight` times each, and the residuals that it leaves.

        Changes nothing but `values`, which this rank sends; None: `self.values`. Of a site whose ranks have the same
        values each has the mean of its own part alone, see `spread`.
        """
        values = self.values(peers) if values is None else values
        residuals = [None if residual is None else residual.clone() for residual in self.residuals]
        if weight != 1.0:
            self.averaging.weigh(values, weight)
        own = [None if residual is None else site.own(residual) for residual in residuals]
        parts, waits = zip(map(site.own, values), own, strict=True), len(values) == 1
        for flight in [Flight(self.averaging.steps(peers, *each, waits=waits)) for each in parts]:
            flight.wait()
        return values, residuals

    @torch.no_grad()
    def spread(self, site: Site, values: Sequence[Tensor]) -> None:
        """Complete the result of `averaged` among the ranks of the site."""
        for value in values:
            Flight(site.spread_steps(value)).wait()


class OuterStep(SharedModel):
    """The global parameters `theta` and the optimizer that updates them, equal on every rank.

    `mean_over` averages the pseudo-gradients `theta - theta_i`, `step` updates `theta` with them. No rank is
    special, and nothing but the pseudo-gradients travels. With one site it is the same without a message. Every
    rank holds the whole of `theta` and of the optimizer's state, also where a site has several ranks.
    """

    state = State("optim", "residuals", theta="flats")

    def __init__(
        self, parameters: Sequence[Tensor], optim_spec: OptimSpec, averaging: OuterAveraging | None = None
    ) -> None:
        super().__init__(parameters, averaging if averaging is not None else OuterAveraging())
        self.flats = [flatten(bucket) for bucket in self.buckets]
        # The optimizer sees parameters in their shapes, which are views of the flat copies.
        views = zip(self.flats, self.buckets, strict=True)
        self.anchors = [[nn.Parameter(view) for view in unflatten(flat, like)] for flat, like in views]
        with about_option("outer_optim_spec"):
            self.optim = optim_spec.build(chain.from_iterable(self.anchors))

    @property
    def theta(self) -> list[Tensor]:
        """The global parameters in the order in which they were given; views."""
        anchors = zip(chain.from_iterable(self.plan), chain.from_iterable(self.anchors), strict=True)
        return [anchor.detach() for _, anchor in sorted(anchors, key=itemgetter(0))]

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizer of the global parameters, alone in a list."""
        return [self.optim]

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Update the global parameters with flat gradients; every worker continues from them."""
        self.apply(gradients)
        self.reset_parameters()

    @torch.no_grad()
    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Update the global parameters with flat gradients; the replica stays as it is."""
        is_merged = self.averaging.aggregate == "isotropic"
        for flat, anchors in zip(gradients, self.anchors, strict=True):
            for anchor, gradient in zip(anchors, unflatten(flat, anchors), strict=True):
                anchor.grad = isotropic(gradient) if is_merged else gradient
        self.update()

    def update(self) -> None:
        """Take the outer optimizer's step along the gradients of `anchors`."""
        self.optim.step()
        for anchor in chain.from_iterable(self.anchors):  # torch's own reports to profiler and compiler
            anchor.grad = None

    def packed(self) -> list[Tensor]:
        """Global parameters and the outer optimizer's state, flat: the state that a rank catches up to."""
        form, *tensors = pack_plain(self.optim.state_dict())
        return [form, *self.flats, *tensors]

    @torch.no_grad()
    def unpack(self, packed: Sequence[Tensor]) -> None:
        """Take over the state of another rank's `packed`, and the global parameters as this rank's."""
        form, *tensors = packed
        for flat, theirs in zip(self.flats, tensors, strict=False):
            flat.copy_(theirs)
        self.optim.load_state_dict(unpack_plain([form, *tensors[len(self.flats) :]]))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set this rank's parameters to the global ones."""
        pairs = zip(chain.from_iterable(self.buckets), chain.from_iterable(self.anchors), strict=True)
        for parameter, anchor in pairs:
            if not anchor.is_meta:  # which has no values
                parameter.copy_(anchor)

    @torch.no_grad()
    def mix(self, alpha: float) -> None:
        """Set this rank's parameters to `alpha` of them and the rest of the global ones."""
        for flat, bucket in zip(self.flats, self.buckets, strict=True):
            write_back(flat if alpha == 0 else alpha * flatten(bucket) + (1 - alpha) * flat, bucket)

    @torch.no_grad()
    def values(self, comm: Communicator | None = None) -> list[Tensor]:
        """Pseudo-gradients: this rank's displacement from the global parameters, negated; frees the gradients."""
        displacements = []
        for flat, bucket in zip(self.flats, self.buckets, strict=True):
            for parameter in bucket:
                parameter.grad = None
            own = flatten(bucket, comm)
            displacements.append(torch.sub(flat, own, out=own))
        return displacements


class DelayedNesterov(Stateful):
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

    state = State("velocity", "pending", "num_arrived")

    def __init__(self, phi: Tensor, lr: float, momentum: float, buffer: int = 1, share: float = 0.0) -> None:
        self.phi, self.lr, self.momentum, self.buffer, self.share = phi, lr, momentum, buffer, share
        self.velocity, self.pending = torch.zeros_like(phi), torch.zeros_like(phi)
        self.num_arrived = 0

    @torch.no_grad()
    def step(self, displacement: Tensor) -> None:
        """Apply one displacement, of `phi`'s shape."""
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
