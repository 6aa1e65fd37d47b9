"""EXO Gym's way of writing a chain: modules that communicate after each local update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from exogym_core.strategy.chain import Chain, Module

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

__all__ = ["CommunicateOptimizeStrategy", "CommunicationModule"]


class CommunicationModule(Module, ABC):
    """One way of bringing replicas together, called after each local update."""

    @abstractmethod
    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Exchange what is due after the 0-based `local_step`, changing `model`'s parameters in place."""

    def after_update(self) -> None:
        """Communicate."""
        strategy = self.strategy
        self.communicate(strategy.model, strategy.rank, strategy.num_nodes, strategy.local_step)


class CommunicateOptimizeStrategy(Chain):
    """Clip, update locally, then let each module communicate, in the order given.

    Args:
        communication_modules: the modules.
        optim_spec: the optimizer of the local update (AdamW by default).
        max_norm: clip the norm of the local gradient to this.
        options: of every Strategy: `inner_optim`, `lr`, `lr_scheduler`, ...
    """

    def __init__(
        self,
        communication_modules: Sequence[CommunicationModule],
        optim_spec: Any = None,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(communication_modules, optim_spec, max_norm, **options)
        self.communication_modules = list(communication_modules)
