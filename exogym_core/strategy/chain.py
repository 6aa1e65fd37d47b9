"""Strategies as chains of modules: each owns what it does before, at and after a local update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options.optim import ensure_optim_spec
from exogym_core.strategy.sites.site import Site
from netsim.files.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.coding import Coding
    from exogym_core.strategy.absence.absence import Absence
    from exogym_core.strategy.parts.gradients import GradientAverager

__all__ = ["Chain", "Module", "Scope"]

# In a step's order.
_STEP_HOOKS = ("before_backward", "before_update", "after_update", "end_step")

# What is judged where modules disagree: rounds lead to parameters that everybody has.
_JUDGED = ("server", "outer", "own", "replica")


@dataclass(frozen=True)
class Scope:
    """What a module of a chain works on. `Sites` narrows it for the modules after it.

    Attributes:
        parameters: those that this rank brings together with others: all trainable ones, or its part of each.
        site: whom with: the ranks that stand for the other sites as this one does for its own.
        gradients: what averages gradients inside the site; None where nothing does.
    """

    parameters: Sequence[Tensor]
    site: Site
    gradients: GradientAverager | None = None


class Module:
    """One behaviour of a strategy: a link of a `Chain`. All hooks do nothing unless they are overridden.

    A step runs through the hooks in this order, each through the modules in the chain's order: `before_backward`
    before each backward pass, `before_update` when gradients are there, then the optimizer, `after_update`,
    `end_step`; `at_end` once after the last step. Before the first step: `enter`, then `_init_node`.

    Attributes:
        judged: what could be shipped where this module decides it, as for `Strategy`; None where it does not.
        overlaps_backward: the module communicates during the last backward pass.
        not_saved: attributes that `state_dict` may leave out, as for `Strategy`.
        goes_first: it stands before the others, wherever the chain names it.
        absence: who takes part, where that is not everyone, always.
        strategy: the chain, from `enter` on.
        comm: connects all ranks of the run.
        scope: what the module works on.
        seed: alike on all ranks.
    """

    judged: str | None = None
    not_saved: tuple[str, ...] = ()
    overlaps_backward: bool = False
    goes_first: bool = False
    absence: Absence | None = None

    strategy: Chain
    comm: Communicator
    scope: Scope
    seed: int

    def parts(self) -> Sequence[Module]:
        """This module, behind those that it brings along."""
        return [self]

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Join a chain on a rank whose replica is still as everyone's; returns the scope of those behind."""
        self.strategy, self.scope = strategy, scope
        self.comm, self.seed = strategy.comm, strategy.seed
        return scope

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Prepare this rank, when the optimizer is there too."""

    def before_backward(self, last_micro_batch: bool) -> None:
        """A backward pass comes; with `last_micro_batch` it completes the step's gradient."""

    def before_update(self) -> None:
        """Gradients are there, neither unscaled nor clipped."""

    def after_update(self) -> None:
        """The optimizer has made its step."""

    def end_step(self) -> None:
        """All modules have communicated: make the replica whole for the next step and for who looks on."""

    def at_end(self) -> None:
        """The last step is done: apply what is still in flight."""

    def close(self) -> None:
        """Let go of the model."""

    def judged_state(self) -> dict[str, Tensor] | None:
        """As for `Strategy`, of a module that says what is judged."""
        return None

    @property
    def judged_version(self) -> int:
        """As for `Strategy`."""
        return self.strategy.local_step

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those besides the chain's."""
        return []

    def state_dict(self) -> dict[str, Any]:
        """What the module keeps between steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """`values` of `scope.parameters`, in their order, by name, as `Strategy.judged_state` has them."""
        state: dict[str, Tensor] = {}
        held = zip(self.strategy.named_trainable(), self.scope.parameters, values, strict=True)
        for (name, parameter), piece, value in held:
            if piece.shape == parameter.shape:
                state[name] = value
            elif value.numel():
                first = piece.storage_offset() - parameter.storage_offset()
                state[f"{name}[{first}:{first + value.numel()}]"] = value
        return state


class Chain(Strategy):
    """Train locally, with modules that bring the replicas together, one behind the other.

    Args:
        modules: in the order in which they act; in files `{name: Sites, ...}` and so on, see MODULES.
        optim_spec: the optimizer of the local update (AdamW by default).
        max_norm: clip the norm of the gradient to this; inside a site, of the site's.
        options: of every Strategy: `lr`, `lr_scheduler`, ...

    Attributes:
        modules: with those that others brought along.

    >>> from exogym_core.strategy import Chain, DiLoCoCommunicator, Sites
    >>> [type(module).__name__ for module in Chain([Sites(8), DiLoCoCommunicator(H=500)]).modules]
    ['Sites', 'DiLoCoCommunicator']
    """

    def __init__(
        self,
        modules: Sequence[Module] = (),
        optim_spec: Any = None,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(optim_spec=optim_spec, max_norm=max_norm, **options)
        where = type(self).__name__
        if isinstance(modules, Module | str) or not all(isinstance(module, Module) for module in modules):
            raise InputError(
                f"{where}: {modules!r} must be a list of modules, as in [DiLoCoCommunicator(H=500)]"
            )
        parts = [part for module in modules for part in module.parts()]
        self.modules = sorted(parts, key=lambda part: not part.goes_first)
        self.absence = self._absence()
        self._refuse_waiting(where)
        self.overlaps_backward = any(module.overlaps_backward for module in self.modules)
        deciding = [module for module in self.modules if module.judged is not None]
        for module in deciding:
            if module.judged not in _JUDGED:
                raise unknown_name(f"judged of {type(module).__name__}", str(module.judged), _JUDGED)
        deciding.sort(key=lambda module: _JUDGED.index(str(module.judged)))
        self._judged_by = deciding[0] if deciding else None
        if self._judged_by is not None:
            self.judged = str(self._judged_by.judged)
        elif not self.modules:
            self.judged = "own"

    def _refuse_waiting(self, where: str) -> None:
        others = [type(m).__name__ for m in self.modules if m.absence is None and not m.goes_first]
        if others and self.absence is not None:
            raise InputError(
                f"{where}: rounds that go on without absent ranks do not go with {others[0]}, which waits for all; "
                "leave the time-outs out"
            )

    def setup(
        self, model: nn.Module, comm: Communicator, max_steps: int, seed: int, coding: Coding | None = None
    ) -> None:
        """Set up the optimizer, then the modules."""
        super().setup(model, comm, max_steps, seed, coding)
        for module in self.modules:
            module._init_node(model, self.rank, self.num_nodes)
        self._hooks = {name: self._hooks_called(name) for name in _STEP_HOOKS}

    def _hooks_called(self, name: str) -> list[Callable[..., None]]:
        """That hook of the modules that have one: a step passes through no others."""
        empty = getattr(Module, name)
        hooks = [getattr(module, name) for module in self.modules]
        return [hook for hook in hooks if getattr(hook, "__func__", hook) is not empty]

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        self.local_step = 0
        self.scope = Scope(self.trainable, Site(None, self.comm))
        for module in self.modules:
            self.scope = module.enter(self, self.scope)
        self.absence = self._absence()
        spec, averager = ensure_optim_spec(self.optim_spec), self.gradients
        self.optim = spec.build(model) if averager is None else averager.optimizer(spec, model)

    @property
    def gradients(self) -> GradientAverager | None:
        """What averages gradients inside a site; None where they stay apart."""
        return self.scope.gradients

    def _absence(self) -> Absence | None:
        """Who takes part in the rounds of a module; None: everyone, always."""
        return next((module.absence for module in self.modules if module.absence is not None), None)

    def before_backward(self, last_micro_batch: bool) -> None:
        """Have the modules know."""
        for hook in self._hooks["before_backward"]:
            hook(last_micro_batch)

    def step(self) -> None:
        """Gradients, clip, update, communicate."""
        hooks = self._hooks
        for before_update in hooks["before_update"]:
            before_update()
        self.clip_gradients()
        self.optimizer_step()
        for after_update in hooks["after_update"]:
            after_update()
        for end_step in hooks["end_step"]:
            end_step()
        super().step()

    def row(self) -> dict[str, Any]:
        """The step's round, where rounds do not wait for all."""
        return {} if self.absence is None else self.absence.row(self.local_step)

    def finish(self) -> None:
        """Apply what is in flight."""
        for module in self.modules:
            module.at_end()

    def close(self) -> None:
        """Let go of the model."""
        for module in self.modules:
            module.close()

    def _clip(self, max_norm: float) -> None:
        if self.gradients is None:
            super()._clip(max_norm)
        else:
            self.gradients.clip(max_norm)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The local one, then the modules'."""
        return [self.optim, *(optim for module in self.modules for optim in module.optimizers)]

    def judged_state(self) -> dict[str, Tensor] | None:
        """What the module says that decides it."""
        return None if self._judged_by is None else self._judged_by.judged_state()

    @property
    def judged_version(self) -> int:
        """Likewise."""
        return self.local_step if self._judged_by is None else self._judged_by.judged_version

    def state_dict(self) -> dict[str, Any]:
        """The strategy's state and its modules'."""
        return {**super().state_dict(), "modules": [module.state_dict() for module in self.modules]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both."""
        super().load_state_dict(state)
        for module, saved in zip(self.modules, state["modules"], strict=True):
            module.load_state_dict(saved)
