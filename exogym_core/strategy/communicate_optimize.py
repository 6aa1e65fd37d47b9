"""Strategies that update locally first and then communicate: a chain of communication modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from exogym_core.strategy.base import Strategy
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from exogym_core.communicator.base import Communicator

__all__ = ["CommunicateOptimizeStrategy", "CommunicationModule"]


class CommunicationModule(ABC):
    """One way of bringing replicas together, called after each local update.

    `self.comm`, `self.seed` (alike on all ranks) and `self.strategy` are set before `_init_node`.

    Attributes:
        judged: what could be shipped where this is the last module that knows, as for `Strategy`; None where it
            does not.
    """

    judged: str | None = None
    comm: Communicator
    seed: int
    strategy: Strategy

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Prepare this rank; the replicas are equal at this moment."""

    @abstractmethod
    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Exchange what is due after the 0-based `local_step`, changing `model`'s parameters in place."""

    def judged_state(self) -> dict[str, Tensor] | None:
        """As for `Strategy`, of a module that says what is judged."""
        return None

    @property
    def judged_version(self) -> int:
        """As for `Strategy`."""
        return self.strategy.local_step

    def state_dict(self) -> dict[str, Any]:
        """What the module keeps between steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class CommunicateOptimizeStrategy(Strategy):
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
        super().__init__(optim_spec=optim_spec, max_norm=max_norm, **options)
        if isinstance(communication_modules, CommunicationModule):
            raise InputError(f"{type(self).__name__}: communication_modules must be a list of modules")
        self.communication_modules = list(communication_modules)
        knowing = [module for module in self.communication_modules if module.judged is not None]
        self._judged_by = knowing[-1] if knowing else None
        self.judged = "replica" if self._judged_by is None else str(self._judged_by.judged)

    def setup(self, model: nn.Module, comm: Communicator, max_steps: int, seed: int) -> None:
        """Set up the optimizer, then the modules."""
        super().setup(model, comm, max_steps, seed)
        for module in self.communication_modules:
            module.comm, module.seed, module.strategy = comm, seed, self
            module._init_node(model, self.rank, self.num_nodes)

    def step(self) -> None:
        """Clip, update, communicate."""
        self.clip_gradients()
        self.optimizer_step()
        self._communicate()
        super().step()

    def _communicate(self) -> None:
        for module in self.communication_modules:
            module.communicate(self.model, self.rank, self.num_nodes, self.local_step)

    def judged_state(self) -> dict[str, Tensor] | None:
        """What the last module that knows says."""
        return super().judged_state() if self._judged_by is None else self._judged_by.judged_state()

    @property
    def judged_version(self) -> int:
        """Likewise."""
        return super().judged_version if self._judged_by is None else self._judged_by.judged_version

    def state_dict(self) -> dict[str, Any]:
        """The strategy's state and its modules'."""
        return {**super().state_dict(), "modules": [m.state_dict() for m in self.communication_modules]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both."""
        super().load_state_dict(state)
        for module, saved in zip(self.communication_modules, state["modules"], strict=True):
            module.load_state_dict(saved)
