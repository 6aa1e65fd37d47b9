"""SPARTA+DiLoCo: sparse averaging keeps the replicas together between DiLoCo's outer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exogym_core.strategy.chain import Chain
from exogym_core.strategy.diloco import DiLoCoCommunicator
from exogym_core.strategy.options.arguments import checked_options
from exogym_core.strategy.options.diloco import DiLoCoOptions
from exogym_core.strategy.options.sparta import SpartaOptions
from exogym_core.strategy.sparta import SparseCommunicator

if TYPE_CHECKING:
    from exogym_core.strategy.options.optim import OptimizerLike

__all__ = ["SPARTADiLoCoStrategy"]


@dataclass(frozen=True)
class _BothOptions(SpartaOptions, DiLoCoOptions):
    """`p_sparta`, `index_selector` and `interval` (also `sparta_interval`) besides DiLoCo's."""


class SPARTADiLoCoStrategy(Chain):
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

    def __init__(
        self,
        optim_spec: OptimizerLike | None = None,
        outer_optim_spec: OptimizerLike | None = None,
        p_sparta: float | None = None,
        interval: int | None = None,
        H: int | None = None,  # noqa: N803
        **options: Any,
    ) -> None:
        given = {
            "outer_optim_spec": outer_optim_spec,
            "p_sparta": p_sparta,
            "interval": interval,
            "H": H,
            **options,
        }
        both, others = checked_options(type(self), _BothOptions, given)
        self.H, self.sparta_interval = both.H, both.interval
        self.sparse_comm = SparseCommunicator(both.index_selector, both.interval, p_sparta=both.p_sparta)
        self.diloco_comm = DiLoCoCommunicator(**{name: vars(both)[name] for name in DiLoCoOptions.names()})
        self.index_selector = self.sparse_comm.index_selector
        super().__init__([self.sparse_comm, self.diloco_comm], optim_spec, **others)
