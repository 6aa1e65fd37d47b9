"""Strategies as chains of modules: each owns what it does before, at and after a local update."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.optimizers import ensure_optim_spec
from exogym_core.strategy.options import Configured, Options, checked_options, refuse_unknown
from exogym_core.strategy.participation.site import Site
from exogym_core.strategy.parts.flat import buckets, flatten
from exogym_core.strategy.parts.state import State, Stateful
from netsim.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.compute import Coding
    from exogym_core.strategy.parts.gradients import GradientAverager

__all__ = [
    "Chain",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "Composition",
    "Module",
    "RoundModule",
    "Scope",
]


# In a step's order.
_STEP_HOOKS = ("before_backward", "before_update", "after_update", "end_step")

# Methods of a step by which a subclass of Chain may change it.
_STEP_METHODS = (
    "begin_step",
    "zero_grad",
    "before_backward",
    "clip_gradients",
    "_clip",
    "optimizer_step",
    "step",
)

# Order of precedence where modules disagree: rounds lead to parameters that every rank has.
_JUDGED = ("server", "outer", "own", "replica")


@dataclass(frozen=True)
class Scope:
    """Parameters and sites that a module of a chain works on. `Sites` narrows it for the modules after it.

    Attributes:
        parameters: those that this rank brings together with others: all trainable ones, or its part of each.
        site: ranks of the same position at the other sites.
        gradients: what averages gradients inside the site; None where nothing does.
    """

    parameters: Sequence[Tensor]
    site: Site
    gradients: GradientAverager | None = None


class Module(Configured, Stateful):
    """A behaviour of a strategy, part of a `Chain`. All hooks do nothing unless they are overridden.

    A step runs through the hooks in this order, each through the modules in the chain's order: `before_backward`
    before each backward pass, `before_update` when gradients are there, then the optimizer, `after_update`,
    `end_step`; `at_end` once after the last step. Before the first step: `enter`, then `_init_node`.

    Args:
        positional, given: fields of `Options`.

    Attributes:
        options: those.
        judged: what could be shipped where this module decides it, as for `Strategy`; None where it does not.
        overlaps_backward: the module communicates during the last backward pass.
        takes_sites: it may stand behind `Sites`; else it brings single ranks together.
        goes_first: it stands before the others, wherever the chain names it.
        num_rounds: that have ended, of a module that counts them.
        strategy: the chain, from `enter` on.
        comm: connects all ranks of the run.
        scope: what the module works on.
        seed: equal on all ranks.
    """

    registry: ClassVar[dict[str, type[Module]]] = {}
    judged: str | None = None
    overlaps_backward: bool = False
    takes_sites: bool = True
    goes_first: bool = False

    options: Any = Options()
    num_rounds: int
    strategy: Chain
    comm: Communicator
    scope: Scope
    seed: int

    def __init__(self, *positional: Any, **given: Any) -> None:
        self.options, unknown = checked_options(type(self), positional, given)
        refuse_unknown(type(self), unknown)

    def parts(self) -> Sequence[Module]:
        """Modules that this one stands for: itself, or with those that its options bring along."""
        return [self]

    def check_beside(self, others: Sequence[Module], where: str) -> None:
        """Refuse modules of the same chain that do not go with this one; raises InputError, beginning with `where`."""

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Join a chain on a rank whose replica is still as everyone's; returns the scope of those behind.

        Raises:
            InputError: ranks of the chain form sites, and it does not take them.
        """
        self.strategy, self.scope = strategy, scope
        self.comm, self.seed = strategy.comm, strategy.seed
        if not self.takes_sites and (scope.gradients is not None or scope.site.inside is not None):
            raise InputError(
                f"{type(strategy).__name__}: {type(self).__name__} mixes single ranks, not sites; "
                "leave Sites out"
            )
        return scope

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Prepare this rank's state: all modules have entered, and the optimizer is there."""

    def before_backward(self, last_micro_batch: bool) -> None:
        """Prepare for a backward pass; with `last_micro_batch` it completes the step's gradient."""

    def before_update(self) -> None:
        """Exchange gradients, neither unscaled nor clipped yet."""

    def after_update(self) -> None:
        """Bring replicas together after the optimizer's step."""

    def end_step(self) -> None:
        """Complete the replica for the next step and for evaluation; all modules have communicated."""

    def at_end(self) -> None:
        """Apply exchanges still in flight after the last step."""

    def close(self) -> None:
        """Release the model: its hooks and what refers to its parameters."""

    def step_row(self) -> dict[str, Any]:
        """Values of the last step's row, as `Strategy.row`."""
        return {}

    def judged_state(self) -> dict[str, Tensor] | None:
        """Judged parameters, as of `Strategy`, where this module decides what is judged."""
        return None

    @property
    def round_steps(self) -> int | None:
        """Period, in steps, of what this module sends, as `Strategy.round_steps`; None: not declared."""
        return None

    @property
    def warmup_steps(self) -> int:
        """First steps that send otherwise than those after them, as `Strategy.warmup_steps`."""
        return 0

    @property
    def sends_by_value(self) -> bool:
        """True if values decide which step sends how much, as `Strategy.sends_by_value`."""
        return False

    @property
    def steps_to_exchange(self) -> int:
        """Number of next steps, up to the one at whose end it may exchange something."""
        return 1

    @property
    def averager(self) -> GradientAverager | None:
        """Averager of all ranks' gradients, where the hooks before an update do nothing else."""
        return None

    @property
    def judged_version(self) -> int:
        """Version of the judged model, as of `Strategy`: rounds that have ended, where they are counted."""
        is_counted = self.judged == "outer" and hasattr(self, "num_rounds")
        return self.num_rounds if is_counted else self.strategy.local_step

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers besides the chain's."""
        return []

    @cached_property
    def buckets(self) -> list[list[Tensor]]:
        """Parameters of `scope` in buckets of one dtype and device each."""
        return buckets(self.scope.parameters)

    def flats(self) -> list[Tensor]:
        """Copy the parameters into flat tensors, one a bucket."""
        return [flatten(bucket) for bucket in self.buckets]

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

    state = State("modules")
    modules: list[Module]

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
        for part in self.modules:
            part.check_beside([each for each in self.modules if each is not part], where)
        self.overlaps_backward = any(module.overlaps_backward for module in self.modules)
        deciding = [module for module in self.modules if module.judged is not None]
        for module in deciding:
            if module.judged not in _JUDGED:
                raise unknown_name(f"judged of {type(module).__name__}", str(module.judged), _JUDGED)
        self._judged_by = min(deciding, key=lambda module: _JUDGED.index(str(module.judged)), default=None)
        if self._judged_by is not None:
            self.judged = str(self._judged_by.judged)
        elif not self.modules:
            self.judged = "own"

    def setup(
        self, model: nn.Module, comm: Communicator, max_steps: int, seed: int, coding: Coding | None = None
    ) -> None:
        """Set up the optimizer, then the modules."""
        super().setup(model, comm, max_steps, seed, coding)
        for module in self.modules:
            module._init_node(model, self.rank, self.num_nodes)
        self._hooks = {name: self._hooks_called(name) for name in _STEP_HOOKS}
        self._averagers = [
            module.averager
            for module in self.modules
            if any(_is_overridden(module, name) for name in ("before_backward", "before_update"))
        ]
        self._updates_plainly = None not in self._averagers and all(
            getattr(type(self), name) is getattr(Chain, name) for name in _STEP_METHODS
        )

    def _hooks_called(self, name: str) -> list[Callable[..., None]]:
        """Hooks of that name of the modules that override it."""
        return [getattr(module, name) for module in self.modules if _is_overridden(module, name)]

    @property
    def steps_to_exchange(self) -> int:
        """Steps up to the end of a round; single ones where the learning rate may change after each."""
        if not self._updates_plainly:
            return 0
        if self.scheduler is not None:
            return 1
        return min((module.steps_to_exchange for module in self.modules), default=1)

    @property
    def averager(self) -> GradientAverager | None:
        """Averager of the module that has one."""
        return self._averagers[0] if self._updates_plainly and self._averagers else None

    @property
    def round_steps(self) -> int | None:
        """Least common multiple of the modules' periods; None where one declares none."""
        periods = [module.round_steps for module in self.modules]
        declared = [period for period in periods if period is not None]
        return math.lcm(*declared) if len(declared) == len(periods) else None

    @property
    def warmup_steps(self) -> int:
        """Those of the module with most."""
        return max((module.warmup_steps for module in self.modules), default=0)

    @property
    def sends_by_value(self) -> bool:
        """True if that holds for a module."""
        return any(module.sends_by_value for module in self.modules)

    @property
    def has_ended_round(self) -> bool:
        """True if a round of a module has ended."""
        periods = [module.round_steps for module in self.modules]
        return self.local_step > 0 and any(period and self.local_step % period == 0 for period in periods)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        self.local_step = 0
        self.scope = Scope(self.trainable, Site(None, self.comm))
        for module in self.modules:
            self.scope = module.enter(self, self.scope)
        spec, averager = ensure_optim_spec(self.optim_spec), self.gradients
        self.optim = spec.build(model) if averager is None else averager.build(spec, spec.groups(model))

    @property
    def gradients(self) -> GradientAverager | None:
        """Averager of gradients inside a site; None where they stay apart."""
        return self.scope.gradients

    def before_backward(self, last_micro_batch: bool) -> None:
        """Call that hook of the modules."""
        for hook in self._hooks["before_backward"]:
            hook(last_micro_batch)

    def step(self) -> None:
        """Gradients, clip, update, communicate."""
        for before_update in self._hooks["before_update"]:
            before_update()
        self.clip_gradients()
        self.optimizer_step()
        self.finish_step()

    def finish_step(self) -> None:
        """Communicate, and count the step."""
        for after_update in self._hooks["after_update"]:
            after_update()
        for end_step in self._hooks["end_step"]:
            end_step()
        super().step()

    def row(self) -> dict[str, Any]:
        """Values that modules add to the step's row."""
        return {name: value for module in self.modules for name, value in module.step_row().items()}

    def finish(self) -> None:
        """Apply what is in flight; where a site holds the parameters in shards, gather them once more."""
        hooks = self._hooks_called("at_end")
        for at_end in hooks:
            at_end()
        if hooks and self.gradients is not None:
            self.gradients.gather()

    def close(self) -> None:
        """Release the model: its hooks and what refers to its parameters, of all modules."""
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
        """Judged parameters of the module that decides; None: every rank's own model."""
        return None if self._judged_by is None or self.judged == "own" else self._judged_by.judged_state()

    @property
    def judged_version(self) -> int:
        """Judged version of the module that decides."""
        return self.local_step if self._judged_by is None else self._judged_by.judged_version


def _is_overridden(module: Module, name: str) -> bool:
    hook = getattr(module, name)
    return getattr(hook, "__func__", hook) is not getattr(Module, name)


class RoundModule(Module):
    """Module that acts after every round of `H` local steps."""

    @property
    def H(self) -> int:  # noqa: N802
        """Local steps a round."""
        return int(self.options.H)

    @property
    def round_steps(self) -> int | None:
        """Local steps a round."""
        return self.H

    @property
    def steps_to_exchange(self) -> int:
        """Steps up to the end of the round."""
        if type(self).after_update is not RoundModule.after_update:
            return 1
        return self.H - self.strategy.local_step % self.H

    def after_update(self) -> None:
        """End the round, where this step is its last."""
        number, rest = divmod(self.strategy.local_step + 1, self.H)
        if rest == 0:
            self.end_round(number - 1)

    def end_round(self, number: int) -> None:
        """Bring replicas together after the round of this 0-based number."""
        raise NotImplementedError


class Composition(Chain):
    """Published strategy: a chain of modules made from the options of its class.

    Attributes:
        module: the only module, which takes all options; a strategy of several overrides `compose`.
        applied: updates that the optimizer gets for gradients; then only SGD without momentum may apply them.
    """

    module: ClassVar[type[Module]]
    positional: ClassVar[tuple[str, ...]] = ("optim_spec",)
    taken = ("modules",)
    applied: ClassVar[str] = ""

    def __init_subclass__(cls, **others: Any) -> None:
        if "module" in vars(cls):
            cls.Options = cls.module.Options
        super().__init_subclass__(**others)

    def __init__(self, *positional: Any, **given: Any) -> None:
        options, others = checked_options(type(self), positional, given)
        refuse_unknown(type(self), {name: others[name] for name in self.taken if name in others})
        if "H" in options.names():
            self.H = options.H
        super().__init__(self.compose(options), **others)
        if self.applied:
            self._require_plain_sgd()

    def compose(self, options: Any) -> list[Module]:
        """Make the modules from `options`, an instance of `Options`."""
        return [self.module(**vars(options))]

    def _require_plain_sgd(self) -> None:
        spec = self.optim_spec
        given = spec.cls if isinstance(spec.cls, type) else torch.optim.SGD
        accepted = given is self.default_optim.cls or issubclass(given, torch.optim.SGD)
        if not accepted or spec.kwargs.get("momentum"):
            raise InputError(
                f"{type(self).__name__}: optim_spec={given.__name__} would take {self.applied} for gradients, which is "
                "another algorithm; leave optim_spec out and write lr= (SGD without momentum applies them)"
            )


class CommunicationModule(Module, ABC):
    """Module that brings replicas together after each local update."""

    @abstractmethod
    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Exchange what is due after the 0-based `local_step`, changing `model`'s parameters in place."""

    def after_update(self) -> None:
        """Exchange what is due after this step."""
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
