"""Chains: strategies that act in one step, in order."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import options_of
from exogym_core.strategy.participation.site import Everyone, SitesOptions
from exogym_core.strategy.parts.state import State, Stateful
from netsim.errors import InputError, about_option, unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import StepContext

__all__ = ["Chain", "CommunicateOptimizeStrategy", "CommunicationModule", "Sites"]


# Order of precedence where members disagree: rounds lead to parameters that every rank has.
_JUDGED = ("server", "outer", "own", "replica")

# Methods by which a member acts in the step of a chain, and those of an update, which is the chain's.
_ACTS = ("before_backward", "before_update", "communicate", "finish")
_UPDATES = ("clip_gradients", "optimizer_step")


class Sites(Strategy, part="Sites"):
    """Data parallelism inside sites: ranks of a site average gradients at each step and stay equal.

    Members after it average over sites, not ranks: their exchanges cross between sites once, each rank of a
    site carrying its part. Gradients travel in flat buckets, the last layers' first; a bucket leaves as soon as the
    last backward pass of a step has filled it. Where the batches of a site's ranks are uneven, gradients are
    weighed by samples within the site.

    Args:
        ranks_per_worker: ranks of a site; all, if it is not given.
        options: of `SitesOptions`.

    Raises:
        InputError: (at `setup`) they do not divide the ranks, or a chain has sites already.

    References:
        Li et al., PyTorch Distributed, arXiv 2006.15704. Zhao et al., PyTorch FSDP, arXiv 2304.11277.
    """

    sites: SitesOptions = options_of(SitesOptions)
    positional = ("ranks_per_worker",)
    goes_first = True
    round_steps = 1
    plain_steps = True

    def __init__(self, *positional: Any, **given: Any) -> None:
        super().__init__(*positional, **given)
        self.judged = "" if self.sites.ranks_per_worker is None else "own"


class CommunicationModule(Stateful, ABC):
    """EXO Gym's member of a chain: exchanges parameters after each local update.

    Attributes:
        comm: connects all ranks, once they have met.
    """

    comm: Communicator

    @abstractmethod
    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Communicate after the 0-based `local_step`; changes `model`'s parameters in place."""

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Prepare this rank's state: replicas are equal, and the optimizer is there."""


class _Adapter(Strategy):
    """A `CommunicationModule` as a member of a chain."""

    judged = ""
    state = State("module")

    def __init__(self, module: CommunicationModule) -> None:
        super().__init__()
        self.module, self.where = module, type(module).__name__

    def prepare(self) -> None:
        self.module.comm = self.comm
        self.module._init_node(self.model, self.rank, self.num_nodes)

    def communicate(self, step: int) -> None:
        self.module.communicate(self.model, self.rank, self.num_nodes, step - 1)


class Chain(Strategy):
    """Train locally, with members that exchange gradients or parameters, in order.

    Args:
        modules: strategies, in the order in which they act; in files `{name: Sites, ...}` and so on, see MODULES.
        optim_spec: the optimizer of the local update (AdamW by default).
        max_norm: clip the norm of the gradient to this; inside a site, of the site's.
        options: of every Strategy: `lr`, `lr_scheduler`, ...

    Attributes:
        modules: its members.

    >>> from exogym_core.strategy import Chain, DiLoCoCommunicator, Sites
    >>> [type(module).__name__ for module in Chain([Sites(8), DiLoCoCommunicator(H=500)]).modules]
    ['Sites', 'DiLoCoCommunicator']
    """

    state = State("modules")
    plain_steps = property(lambda self: all(each.plain_steps for each in self.modules))
    takes_complex = property(lambda self: all(each.takes_complex for each in self.modules))
    overlaps_backward = property(lambda self: any(each.overlaps_backward for each in self.modules))
    modules: Sequence[Strategy] = ()

    def __init__(
        self,
        modules: Sequence[Strategy | CommunicationModule] = (),
        optim_spec: Any = None,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(optim_spec=optim_spec, max_norm=max_norm, **options)
        is_list = not isinstance(modules, Strategy | CommunicationModule | str)
        if not is_list or not all(isinstance(each, Strategy | CommunicationModule) for each in modules):
            raise InputError(
                f"{self.where}: {modules!r} must be a list of modules, as in [DiLoCoCommunicator(H=500)]",
                about=("modules",),
            )
        members = [_Adapter(each) if isinstance(each, CommunicationModule) else each for each in modules]
        for place, each in enumerate(members):
            if names := each.shared_state.update_options:
                with about_option("modules"), about_option(place):
                    raise InputError(
                        f"{self.where}: {each.where}: {names[0]}= is the chain's, which updates: give it to "
                        f"{self.where}",
                        about=names[:1],
                    )
            kind = type(each)
            acts, updates = (
                any(getattr(kind, name) is not getattr(Strategy, name) for name in names)
                for names in (_ACTS, _UPDATES)
            )
            if updates:
                raise InputError(
                    f"{self.where}: {each.where} updates parameters itself, and in a chain the chain does; name it "
                    "without a Chain"
                )
            if kind.step not in (Strategy.step, Strategy.take_step) or not (acts or each.goes_first):
                raise InputError(
                    f"{self.where}: {each.where}: its step() is not called in a chain; move what it does into one of "
                    f"{', '.join(_ACTS)}, and leave step() out"
                )
        self._places = sorted(range(len(members)), key=lambda place: not members[place].goes_first)
        self.modules = [members[place] for place in self._places]
        self.patience = _only_patience(self.modules, self.where)
        deciding = [each for each in self.modules if each.judged]
        for each in deciding:
            if each.judged not in _JUDGED:
                raise unknown_name(f"judged of {each.where}", each.judged, _JUDGED)
        self._judged_by = min(deciding, key=lambda each: _JUDGED.index(each.judged), default=None)
        if self._judged_by is not None:
            self.judged = self._judged_by.judged
        elif not self.modules:
            self.judged = "own"

    def enter_site(self) -> None:
        """Connect this rank with its site, which a member describes, and with other sites."""
        dividing = [each for each in self.modules if each.sites.ranks_per_worker != 1]
        if len(dividing) > 1:
            raise InputError(f"{self.where}: has sites already; name Sites once")
        with self._about(*dividing):
            self.sites = dividing[0].sites if dividing else self.sites
            self.site = self.sites.enter(self)
        patient = [each for each in self.modules if self.patience.of_steps and each.patience is self.patience]
        with self._about(*patient):
            self.workers = self.membership() if patient else Everyone(self)

    @contextmanager
    def _about(self, *member: Strategy) -> Iterator[None]:
        """Have errors of the block be about a member, at its place in `modules` as given; about none without one."""
        with ExitStack() as stack:
            for each in member:
                stack.enter_context(about_option("modules"))
                stack.enter_context(about_option(self._places[self.modules.index(each)]))
            yield

    def prepare(self) -> None:
        """Let the members join."""
        for each in self.modules:
            with self._about(each):
                each.join(self)
            if each.workers.has_absences:
                self.workers = each.workers

    def begin_step(self, context: StepContext) -> None:
        """Begin a step, of all members too."""
        super().begin_step(context)
        for each in self.modules:
            each.begin_step(context)

    def before_backward(self, last_micro_batch: bool) -> None:
        """Let members prepare for a backward pass."""
        super().before_backward(last_micro_batch)
        for each in self.modules:
            each.before_backward(last_micro_batch)

    def before_update(self) -> None:
        """Let members exchange gradients."""
        for each in self.modules:
            each.before_update()

    def communicate(self, step: int) -> None:
        """Exchange the parameters of each member, in order."""
        for each in self.modules:
            each.communicate(step)

    def close(self) -> None:
        """Release the model, of all members."""
        for each in self.modules:
            each.close()
        super().close()

    @property
    def acting(self) -> Sequence[Strategy]:
        """Members of the chain, each of which exchanges gradients in a step."""
        return self.modules

    @property
    def round_steps(self) -> int | None:  # type: ignore[override]
        """Least common multiple of the members' periods, if all declare one."""
        each = [member.round_steps for member in self.modules]
        return None if None in each else math.lcm(*(steps for steps in each if steps is not None))

    @property
    def warmup_steps(self) -> int:  # type: ignore[override]
        """Longest warm-up among the members."""
        return max((each.warmup_steps for each in self.modules), default=0)

    @property
    def sends_by_value(self) -> bool:  # type: ignore[override]
        """True if any member sends by value."""
        return any(each.sends_by_value for each in self.modules)

    @property
    def has_ended_round(self) -> bool:
        """True if a round of any member has just ended."""
        return any(each.has_ended_round for each in self.modules if not each.goes_first)

    @property
    def steps_to_exchange(self) -> int:
        """Steps up to the next exchange of a member; single ones where the learning rate may change after each."""
        if not self.plain_steps:
            return 0
        if self.scheduler is not None:
            return 1
        return min((each.steps_to_exchange for each in self.modules), default=sys.maxsize)

    def finish(self) -> None:
        """Apply averages in flight; gather shards of parameters again."""
        in_flight = [each for each in self.modules if type(each).finish is not Strategy.finish]
        for each in in_flight:
            each.finish()
        if in_flight:
            self.site.gather()

    @property
    def optimizers(self) -> list[Optimizer]:
        """The local one, then the members'."""
        return [
            self.optim,
            *(each for member in self.modules for each in member.optimizers if each is not self.optim),
        ]

    def judged_state(self) -> dict[str, Tensor] | None:
        """Judged parameters of the member that decides; None: every rank's own model."""
        return None if self._judged_by is None or self.judged == "own" else self._judged_by.judged_state()

    @property
    def judged_version(self) -> int:
        """Judged version of the member that decides."""
        return self.local_step if self._judged_by is None else self._judged_by.judged_version


def _only_patience(members: Sequence[Strategy], where: str) -> Any:
    """Time-outs of the member that continues without absent ranks; the defaults if all members wait for all ranks.

    Raises:
        InputError: it stands beside one that does not.
    """
    patient = [each for each in members if each.patience.patience(where) is not None]
    for each in members if patient else ():
        if each.goes_first or each is patient[0]:
            continue
        with_what, remedy = f"{each.where}, which waits for all", "leave the time-outs out"
        if each in patient:  # of which others would be absent
            with_what, remedy = "those of a second module", "leave one of both modules out"
        raise InputError(
            f"{where}: rounds that continue without absent ranks do not combine with {with_what}; {remedy}"
        )
    return patient[0].patience if patient else Strategy.patience


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
        communication_modules: Sequence[Strategy | CommunicationModule],
        optim_spec: Any = None,
        max_norm: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__(communication_modules, optim_spec, max_norm, **options)
        self.communication_modules = list(communication_modules)
