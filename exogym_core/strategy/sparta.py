"""SPARTA: average a small random share of the parameters at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.strategy.chain import Composition, Module
from exogym_core.strategy.diloco import DiLoCoCommunicator, DiLoCoOptions
from exogym_core.strategy.options import option, positive_int
from exogym_core.strategy.parts.average import AveragingOptions
from exogym_core.strategy.parts.flat import flatten, write_back
from exogym_core.strategy.parts.selectors import SelectionOptions
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn


__all__ = ["SPARTADiLoCoStrategy", "SPARTAStrategy", "SparseCommunicator", "SpartaOptions"]


class SpartaOptions(SelectionOptions, AveragingOptions):
    """Options of SPARTA: the share of parameters averaged, their choice, and how often.

    Args:
        interval: communicate every so many steps; also `sparta_interval`.
    """

    interval: int = option(1, positive_int)


class SparseCommunicator(Module, name="SPARTA"):
    """Average the values that a selector chooses, every `interval` steps.

    All parameters of a dtype form one flat tensor, and one all-reduce carries what is chosen from it. The
    choice comes from the shared seed, so neither indices nor a mask travel.

    Args:
        index_selector: as of `SpartaOptions`.
        interval: likewise.
        options: of `SpartaOptions`.
    """

    Options = SpartaOptions
    positional = ("index_selector", "interval")
    judged = "own"
    state = State("iteration", residuals="_residuals")
    round_steps = property(lambda self: self.options.interval)

    def __init__(self, *positional: Any, **options: Any) -> None:
        super().__init__(*positional, **options)
        self.index_selector, self.iteration = self.options.selector(), 0

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Lay the parameters out flat."""
        self.index_selector.seed = self.strategy.seed
        self._averaging = self.options.averaging().charged(self.strategy)
        self._residuals = [self._averaging.residual(flat) for flat in self.flats()]

    def after_update(self) -> None:
        """Average the chosen values, if this step is due."""
        if (self.strategy.local_step + 1) % self.options.interval:
            return
        if self.scope.site.between.world_size > 1:
            for bucket, residual in zip(self.buckets, self._residuals, strict=True):
                self._average_chosen(bucket, residual)
        self.iteration += 1

    def _average_chosen(self, bucket: Sequence[Tensor], residual: Tensor | None) -> None:
        flat = flatten(bucket)
        chosen = self.index_selector.places(flat, self.iteration)
        if not len(chosen):
            return
        lost = None if residual is None else residual[chosen]
        flat[chosen] = self.scope.site.average(self._averaging, flat[chosen], lost)
        if residual is not None and lost is not None:
            residual[chosen] = lost
        write_back(flat, bucket)


class SPARTAStrategy(Composition, name="SPARTA"):
    """Update locally, then average a share `p_sparta` of the parameters over all ranks.

    Bytes: a ring sends `2 (n - 1) / n` times `p_sparta` of the parameters' bytes per worker every
    `interval` steps.

    Args:
        optim_spec: the local optimizer (AdamW by default).
        p_sparta: the share averaged each time, above 0 and at most 1.
        options: of `SpartaOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Beton et al., Improving the Efficiency of Distributed Training using Sparse Parameter Averaging,
        openreview stFPf3gzq1.
    """

    module = SparseCommunicator
    positional = ("optim_spec", "p_sparta")


class _BothOptions(SpartaOptions, DiLoCoOptions):
    """`p_sparta`, `index_selector` and `interval` (also `sparta_interval`) besides DiLoCo's."""


class SPARTADiLoCoStrategy(Composition, name="SPARTA+DiLoCo"):
    """Local updates, a sparse average every `interval` steps, an outer step every `H` steps.

    Bytes: the sum of SPARTA's and DiLoCo's. `codec`, `error_feedback` and `aggregate` are of the pseudo-gradients;
    what SPARTA averages travels as it is.

    Args:
        optim_spec: the local optimizer (AdamW by default).
        outer_optim_spec: the outer one (SGD, 0.7, Nesterov momentum 0.9 by default).
        p_sparta: the share averaged each time, above 0 and at most 1.
        interval: average every so many steps.
        H: local steps a DiLoCo round.
        options: of `SpartaOptions` and `DiLoCoOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        SPARTAStrategy's, openreview stFPf3gzq1, and DiLoCoStrategy's, arXiv 2311.08105.
    """

    Options = _BothOptions
    positional = ("optim_spec", "outer_optim_spec", "p_sparta", "interval", "H")

    def compose(self, options: _BothOptions) -> list[Module]:
        """SPARTA's average, then DiLoCo's round."""
        sparse = SparseCommunicator(options.index_selector, options.interval, p_sparta=options.p_sparta)
        return [sparse, DiLoCoCommunicator(**{name: vars(options)[name] for name in DiLoCoOptions.names()})]
