"""SPARTA: average a small random share of the parameters at every step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.diloco import DiLoCoStrategy
from exogym_core.strategy.options import option, options_of, positive_int
from exogym_core.strategy.parts.average import Averaging
from exogym_core.strategy.parts.flat import flatten, write_back
from exogym_core.strategy.parts.selectors import SelectionOptions
from exogym_core.strategy.parts.state import State, Stateful

if TYPE_CHECKING:
    from exogym_core.strategy.parts.selectors import IndexSelector

__all__ = ["SPARTADiLoCoStrategy", "SPARTAStrategy", "SparseCommunicator", "SparseMean"]


class SparseMean(Stateful):
    """Mean over sites of the parameters' values that a selector chooses.

    All parameters of a dtype form one flat tensor; one all-reduce carries the values chosen from it. The
    choice comes from the shared seed, so neither indices nor a mask travel.

    Args:
        strategy: whose parameters these are.
        selector: chooses.
        averaging: how the mean is made.
    """

    state = State("iteration", "residuals")

    def __init__(self, strategy: Strategy, selector: IndexSelector, averaging: Averaging) -> None:
        self.site, self.buckets, self.selector, self.averaging = (
            strategy.site,
            strategy.buckets,
            selector,
            averaging,
        )
        selector.seed, self.iteration = strategy.seed, 0
        self.residuals = list(map(averaging.residual, self.buckets))

    def take(self) -> None:
        """Average the values chosen this time."""
        if self.site.between.world_size > 1:
            for bucket, residual in zip(self.buckets, self.residuals, strict=True):
                flat = flatten(bucket)
                chosen = self.selector.places(flat, self.iteration)
                if not len(chosen):
                    continue
                lost = None if residual is None else residual[chosen]
                flat[chosen] = self.site.average(self.averaging, flat[chosen], lost)
                if residual is not None and lost is not None:
                    residual[chosen] = lost
                write_back(flat, bucket)
        self.iteration += 1


class SPARTAStrategy(Strategy, name="SPARTA"):
    """Update locally, then average a share `p_sparta` of the parameters over all ranks.

    Bytes: a ring sends `2 (n - 1) / n` times `p_sparta` of the parameters' bytes per worker every
    `interval` steps.

    Args:
        optim_spec: the local optimizer (AdamW by default).
        p_sparta: the share averaged each time, above 0 and at most 1.
        index_selector: of these values, see `SelectionOptions`.
        interval: steps between averages; also `sparta_interval`.
        codec, error_feedback, aggregate: of the mean, see `Averaging`.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Beton et al., Improving the Efficiency of Distributed Training using Sparse Parameter Averaging,
        openreview stFPf3gzq1.
    """

    selection: SelectionOptions = options_of(SelectionOptions)
    averaging: Averaging = options_of(Averaging)
    interval: int = option(1, positive_int)
    positional = ("optim_spec", "p_sparta")

    judged = "own"
    round_steps = property(lambda self: self.interval)
    state = State("sparse")
    plain_steps = True

    def prepare(self) -> None:
        """Lay the parameters out flat."""
        self.sparse = SparseMean(self, self.selection.selector(), self.averaging.charged(self))

    def communicate(self, step: int) -> None:
        """Average the chosen values, if this step is due."""
        if step % self.interval == 0:
            self.sparse.take()


class SparseCommunicator(SPARTAStrategy, part="SPARTA", positional=("index_selector", "interval")):
    """SPARTA as a member of a `Chain`."""


class SPARTADiLoCoStrategy(DiLoCoStrategy, name="SPARTA+DiLoCo"):
    """Local updates, a sparse average every `interval` steps, an outer step every `H` steps.

    Bytes: the sum of SPARTA's and DiLoCo's. `codec`, `error_feedback` and `aggregate` are of the pseudo-gradients;
    what SPARTA averages travels as it is.

    Args:
        optim_spec: the local optimizer (AdamW by default).
        outer_optim_spec: the outer one (SGD, 0.7, Nesterov momentum 0.9 by default).
        p_sparta: the share averaged each time, above 0 and at most 1.
        interval: steps between averages; also `sparta_interval`.
        H: local steps a DiLoCo round.
        index_selector: of the values averaged, see `SelectionOptions`.
        options: of DiLoCo, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        SPARTAStrategy's, openreview stFPf3gzq1, and DiLoCoStrategy's, arXiv 2311.08105.
    """

    selection: SelectionOptions = options_of(SelectionOptions)
    interval: int = option(1, positive_int)
    positional = ("optim_spec", "outer_optim_spec", "p_sparta", "interval", "H")  # type: ignore[assignment]

    periods = property(lambda self: (self.interval, self.H))
    round_steps = property(lambda self: math.lcm(*self.periods))
    state = State("sparse")
    plain_steps = True
    weighs_by_samples = False

    def prepare(self) -> None:
        """Lay the parameters out flat, and begin with the same theta on every worker."""
        super().prepare()
        self.sparse = SparseMean(self, self.selection.selector(), Averaging())

    def communicate(self, step: int) -> None:
        """The sparse mean, then DiLoCo's round."""
        if step % self.interval == 0:
            self.sparse.take()
        super().communicate(step)
