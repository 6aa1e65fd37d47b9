"""SPARTA+DiLoCo: sparse averaging keeps the replicas together between DiLoCo's outer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.strategy.communicate_optimize import CommunicateOptimizeStrategy
from exogym_core.strategy.diloco import DiLoCoCommunicator
from exogym_core.strategy.options.arguments import fraction, one_argument
from exogym_core.strategy.parts.selectors import IndexSelector, selector_named
from exogym_core.strategy.sparta import SparseCommunicator

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from exogym_core.strategy.options.optim import OptimizerLike
    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["SPARTADiLoCoStrategy"]


class SPARTADiLoCoStrategy(CommunicateOptimizeStrategy):
    """Average a share `p_sparta` every `sparta_interval` steps, and take DiLoCo's outer step every `H`.

    Bytes: the sum of both.

    Args:
        inner_optim_spec: the inner optimizer (AdamW by default); also `optim_spec` and `inner_optim`.
        outer_optim_spec: the outer one (SGD, 0.7, Nesterov momentum 0.9 by default).
        p_sparta: the share averaged each time, above 0 and at most 1.
        sparta_interval: average every so many steps; also called `interval`.
        H: local steps a DiLoCo round; also `local_steps` and `num_inner_steps`.
        index_selector: "random", "shuffled_sequential", "partitioned", or an IndexSelector or its class.
        outer_lr: the outer learning rate.
        outer_momentum: the outer momentum.
        codec: how pseudo-gradients travel, by its name in CODECS: "fp32" (as they are), "fp16", "int8", ...
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        SPARTAStrategy's and DiLoCoStrategy's.
    """

    def __init__(
        self,
        inner_optim_spec: OptimizerLike | None = None,
        outer_optim_spec: OptimizerLike | None = None,
        p_sparta: float = 0.005,
        sparta_interval: int | None = None,
        H: int | None = None,  # noqa: N803
        *,
        interval: int | None = None,
        local_steps: int | None = None,
        num_inner_steps: int | None = None,
        index_selector: str | type[IndexSelector] | IndexSelector = "random",
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        codec: str | Codec | None = None,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        self.H = one_argument(where, 100, H=H, local_steps=local_steps, num_inner_steps=num_inner_steps)
        self.sparta_interval = one_argument(where, 1, sparta_interval=sparta_interval, interval=interval)
        self.index_selector = selector_named(index_selector, fraction(where, "p_sparta", p_sparta))
        self.sparse_comm = SparseCommunicator(self.index_selector, self.sparta_interval)
        self.diloco_comm = DiLoCoCommunicator(
            self.H, outer_optim_spec, outer_lr=outer_lr, outer_momentum=outer_momentum, codec=codec
        )
        modules = [self.sparse_comm, self.diloco_comm]
        super().__init__(modules, inner_optim_spec=inner_optim_spec, **options)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The inner and the outer optimizer."""
        return [self.optim, self.diloco_comm.outer.optim]
