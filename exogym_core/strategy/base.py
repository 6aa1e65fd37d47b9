"""Base of strategies: the owner of the optimizer, which decides what is communicated at the end of a step."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym_core.names import plain_numbers
from exogym_core.strategy.context import StepContext
from exogym_core.strategy.contradictions import refuse_contradictions
from exogym_core.strategy.optimizers import (
    LRSchedulerLike,
    OptimSpec,
    build_scheduler,
    ensure_optim_spec,
    resolve_scheduler,
    schedule_end,
    without_updates,
)
from exogym_core.strategy.options import (
    Options,
    checked_options,
    declare,
    given_arguments,
    number,
    option,
    refuse_unknown,
    take,
)
from exogym_core.strategy.participation.absence import Everyone, PatienceOptions
from exogym_core.strategy.participation.site import Site, SiteOptions
from exogym_core.strategy.parts.codecs import ChargedCodec
from exogym_core.strategy.parts.flat import buckets
from exogym_core.strategy.parts.outer import GlobalModel
from exogym_core.strategy.parts.state import State, Stateful
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim.lr_scheduler import LRScheduler

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.compute import Coding
    from exogym_core.events import RoundPlace
    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["Strategy"]


# Methods of a step by which a subclass may change it.
_STEP_METHODS = {
    *("begin_step", "zero_grad", "before_backward", "local_update", "before_update", "clip_gradients"),
    *("optimizer_step", "step", "communicate"),
}

# Attributes that a member of a chain has from it.
_SHARED = (
    *("model", "comm", "rank", "num_nodes", "seed", "max_steps", "coding", "where"),
    *("optim", "site", "local_step", "context"),
)


class Strategy(Stateful):
    """Base of all strategies; by itself it does nothing at a step but count it.

    The loop calls, once per rank, `setup`; then for each step `begin_step` and `zero_grad`, `before_backward`
    before each backward pass, and `step` after the last one; at the end `finish`. A strategy of one's own
    overrides `step`, uses `self.model`, `self.optim` and `self.comm`, and calls `super().step()` last. It may
    also override `prepare()`, called once when the optimizer is there, for its own state.
    Where its ranks' models differ, it says by `judged` and `judged_state` which one could be shipped.

    What happens before the update is in `before_update()`, what follows it in `communicate(step)`: `step` is
    `local_update()`, `communicate(self.local_step + 1)`, `super().step()`. A `Chain` can have such members.

    Options are declared in the class: `H: int = option(100, positive_int)`; or by a member with options of its own,
    `average = options_of(Averaging)`. `class MyStrategy(Strategy, name="Mine")` enters it in `registry`.

    Before `setup` a strategy is only its options: it can be copied, and each rank gets its own copy.

    Args:
        lr_scheduler: "lambda_cosine", a torch scheduler class or its name; None keeps the rate.
        lr_scheduler_kwargs: its options; for "lambda_cosine" `warmup_steps`, `cosine_anneal`, `max_steps`,
            `floor`.
        optim_spec: the (inner) optimizer: an OptimSpec, a name, a class, a factory or a mapping with `name`; also
            `inner_optim_spec`, `inner_optim` and `inner_optimizer`.
        lr: the optimizer's learning rate.
        max_norm: clip the norm of the gradient to this before the optimizer's step.
        others: synonyms of these; a name that is none is refused.

    Raises:
        UnknownNameError: an argument that does not exist; it is never ignored.
        InputError: two names of one argument were given different values.

    Attributes:
        model, comm, optim: this rank's model, communicator and optimizer, from `setup` on.
        rank, num_nodes: this rank's number and how many workers there are, likewise.
        max_steps, seed: of the run; the seed is the same on all ranks.
        scheduler: torch's schedule of the rate; None where it keeps.
        sites, patience: options: how ranks form sites, and how long rounds wait for absent ranks.
        site: this rank's site: its connections, and the average of gradients inside it.
        workers: who takes part in rounds.
        outer: the model that rounds lead to, of strategies that have one.
        num_rounds: rounds that have ended, of strategies that count them.
        goes_first: it stands before the others in a chain, wherever that names it.
        takes_complex: it brings complex parameters together; they are refused where it does not say so.
        takes_sites: it may stand behind `Sites` in a chain; else it brings single ranks together.
        updates_by: options given that say how the replica is updated, which a member of a chain has none of.
        where: name of the strategy that users have written, for errors.
        round_steps: period, in steps, of what the ranks send, as a number or a property of the options; 1 where every
            step sends the same; None: not said. Plans simulate rounds of so many steps, a run that ends at a virtual
            time ends with a round, and steps within a round may be run ahead. It is read after `setup`, too.
        warmup_steps: first steps that send otherwise than the rounds after them; read after `setup`, of a run of
            `max_steps`.
        sends_by_value: values decide which step sends how much: plans, which have none, show the bytes to be expected.
        plain_steps: a step up to `communicate` only averages gradients in the site, clips, and updates.
        state: attributes that checkpoints keep; a subclass declares its own, `state = State("momentum")`. `check` finds
            what is missing; attributes that are not declared may hold anything.
        default_optim: the optimizer where none is given.
        context: the step under way.
        coding: cost of coding in virtual time, as `setup` got it; None where it is free.
        judged: what targets, tables and verdicts judge: "replica" (all ranks' models are equal, which is checked at
            each evaluation), "outer" (parameters that rounds lead to), "server", or "own" (every rank's own; the mean
            of their losses). "": a member of a chain that leaves this to the others.
        local_step: number of steps done.
        nbytes: payload bytes of the last step.
        lr_callbacks: called on rank 0 with the learning rate after each step of the schedule.
        num_servers: ranks that compute nothing and `serve` instead; they are the last ones, and no workers.
        accepted_servers: the least and the largest number of them.
        is_synchronous: ranks do the same number of steps; where they do not, each ends at its own time.
        registry: classes by the names that experiment files give them.
        Options: dataclass of the options, made of what classes declare.
        positional: names of options that may be given by position, in order.
        declared, members: names of what is declared by the class and its bases, and the members' classes.
        common, taken: names of the options of every strategy, which help and logs leave out; of these, those that the
            class does not take.
        accepted: names that the constructor takes, and whether they may be left out.
    """

    lr_scheduler: LRSchedulerLike | None = option(None)
    lr_scheduler_kwargs: Mapping[str, Any] | None = option(None)
    optim_spec: Any = option(None)
    lr: float | None = option(None, number)
    max_norm: float | None = option(None, number)
    positional: ClassVar[tuple[str, ...]] = ("lr_scheduler", "lr_scheduler_kwargs")

    registry: ClassVar[dict[str, type[Strategy]]] = {}
    Options: ClassVar[type[Any]] = Options
    declared: ClassVar[tuple[str, ...]] = ()
    members: ClassVar[dict[str, type[Any]]] = {}
    common: ClassVar[tuple[str, ...]] = ()
    taken: ClassVar[tuple[str, ...]] = ()
    accepted: ClassVar[dict[str, bool]] = {}

    state = State("local_step", "optim", "scheduler", "site", "workers")
    judged: str = "replica"
    default_optim: ClassVar[OptimSpec] = OptimSpec(torch.optim.AdamW)
    round_steps: int | None = None
    warmup_steps: ClassVar[int] = 0
    sends_by_value: ClassVar[bool] = False
    plain_steps: ClassVar[bool] = False

    num_servers: int = 0
    accepted_servers: ClassVar[tuple[int, float]] = (1, math.inf)
    is_synchronous: ClassVar[bool] = True

    goes_first: ClassVar[bool] = False
    takes_sites: ClassVar[bool] = True
    takes_complex: ClassVar[bool] = False
    sites: Any = SiteOptions()
    patience: PatienceOptions = PatienceOptions()
    outer: Any = None
    num_rounds: Any = None

    model: nn.Module
    comm: Communicator
    optim: Optimizer
    rank: int
    num_nodes: int
    site: Site
    workers: Everyone
    _given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    _is_member = False

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Remember what it was made with, for logs."""
        strategy = super().__new__(cls)
        strategy._given = (arguments, options)
        return strategy

    def __init_subclass__(
        cls,
        name: str | None = None,
        part: str | None = None,
        positional: tuple[str, ...] | None = None,
        **others: Any,
    ) -> None:
        super().__init_subclass__(**others)
        cls.positional = cls.positional if positional is None else positional
        if name is not None:
            cls.registry[name] = cls
        if vars(cls).keys() & _STEP_METHODS and "plain_steps" not in vars(cls):
            cls.plain_steps = False
        declare(cls, part)

    def __init__(self, *positional: Any, **given: Any) -> None:
        cls, self.where = type(self), type(self).__name__
        if positional and isinstance(positional[0], nn.Module):
            raise InputError(
                f"{self.where}: the first argument is a model; the Trainer gives it to the strategy, "
                "leave it out and pass the optimizer as optim_spec="
            )
        options, others = checked_options(cls, positional, given)
        refuse_unknown(cls, others)
        set_before = self.__dict__.get("optim_spec")  # by a subclass, before it called this constructor
        take(self, options)
        self.updates_by = [name for name in cls.common if getattr(options, name) is not None]
        default: OptimSpec = set_before or self.default_optim
        self.optim_spec = ensure_optim_spec(
            options.optim_spec, default, **({} if options.lr is None else {"lr": options.lr})
        )
        self.lr_scheduler_kwargs = plain_numbers(dict(options.lr_scheduler_kwargs or {}))
        if self.lr_scheduler_kwargs and not options.lr_scheduler:
            raise InputError(
                f"{self.where}: lr_scheduler_kwargs without lr_scheduler; add lr_scheduler='lambda_cosine'"
            )
        self.lr_scheduler = options.lr_scheduler and resolve_scheduler(
            options.lr_scheduler, self.lr_scheduler_kwargs
        )
        self.scheduler: LRScheduler | None = None
        self.lr_callbacks: list[Callable[[float], None]] = []
        self.context = StepContext()
        self.coding: Coding | None = None
        self.max_steps = 1
        self.seed = 0
        self.local_step = 0
        self.nbytes = 0
        self._payload_bytes_before = 0

    # --- called by the loop --------------------------------------------------------------------------------

    def setup(
        self, model: nn.Module, comm: Communicator, max_steps: int, seed: int, coding: Coding | None = None
    ) -> None:
        """Take charge of `model` on this rank: build the optimizer and what else the strategy keeps.

        Called once per rank when all replicas are equal. `comm` connects all ranks, `max_steps` is how many steps the
        schedule of the rate has, `seed` is shared by all ranks. `coding` is given only
        where the work of codecs costs time; an override without it is for runs in which that is free.
        """
        kind = type(self)
        acts = (
            kind.communicate is not Strategy.communicate or kind.before_update is not Strategy.before_update
        )
        if acts and kind.step is Strategy.step:
            raise InputError(
                f"{self.where}: has no step(), which calls what it does: write self.local_update(), "
                "self.communicate(self.local_step + 1) and super().step() in one, or make it a member of a Chain"
            )
        self.rank, self.num_nodes = comm.rank, self.workers_among(comm.world_size)
        self.model, self.comm = model, comm
        self.coding = coding
        self.max_steps, self.seed = max_steps, seed
        refuse_contradictions(self)
        self._payload_bytes_before = comm.traffic.payload_bytes
        self._init_node(model, comm.rank, self.num_nodes)
        self.prepare()
        if self.scheduler is None:
            self._setup_scheduler()

    def join(self, whole: Strategy) -> None:
        """Become a member of `whole`, which has been set up, and updates the parameters.

        Raises:
            InputError: ranks of `whole` form sites, and this strategy does not take them.
        """
        if not (self.takes_sites or whole.site.is_single):
            raise InputError(
                f"{whole.where}: {type(self).__name__} mixes single ranks, not sites; leave Sites out"
            )
        for name in _SHARED:
            setattr(self, name, getattr(whole, name))
        self._is_member = True
        self.workers = self.patience.workers(self)
        self.prepare()

    def of_length(self, max_steps: int) -> Sequence[int]:
        """Steps that follow from the run's number of steps, such as the end of its schedule.

        A run resumes for another number of steps only where these stay the same.
        """
        end = schedule_end(self.lr_scheduler, self.lr_scheduler_kwargs or {}, max_steps)
        return [] if end is None else [end]

    def begin_step(self, context: StepContext) -> None:
        """Begin the step that `context` describes."""
        self.context = context

    def before_backward(self, last_micro_batch: bool) -> None:
        """Prepare for a backward pass; averages may begin in that of the `last_micro_batch`."""
        if not self._is_member:
            self.site.listen(last_micro_batch, self.context)

    def local_update(self) -> None:
        """Update the parameters: average the gradients inside the site, exchange them, clip, step the optimizer."""
        self.site.average_gradients(self.context)
        self.before_update()
        self.clip_gradients()
        self.optimizer_step()

    def before_update(self) -> None:
        """Exchange gradients, neither unscaled nor clipped yet, or what else comes before the update."""

    def communicate(self, step: int) -> None:
        """Bring replicas together after the local update of this `step`, from 1."""

    def step(self) -> None:
        """End a step: complete the replica, advance the schedule and the count. Overrides update, then call this."""
        self.site.gather()
        # The schedule counts steps, also those that overflowed, which ranks may not share.
        if self.scheduler is not None:
            with without_updates() if self.context.is_skipped else nullcontext():
                self.scheduler.step()
            if self.rank == 0:
                for callback in self.lr_callbacks:
                    callback(self.learning_rate)
        self.local_step += 1
        self.nbytes = self.comm.traffic.payload_bytes - self._payload_bytes_before
        self._payload_bytes_before += self.nbytes

    def skip_step(self) -> None:
        """Count a step that is not done: advance the schedule alone."""
        with without_updates():
            Strategy.step(self)

    @property
    def steps_to_exchange(self) -> int:
        """Number of next steps that average gradients in the site, clip and update, up to the next exchange after that.

        0: not known. The rest of such a step is `finish_step`.
        """
        if not self.plain_steps or self.round_steps is None:
            return 0
        if self.scheduler is not None:
            return 1
        if type(self).communicate is Strategy.communicate:  # nothing is exchanged after an update
            return sys.maxsize
        return self.round_steps - self.local_step % self.round_steps

    @property
    def has_ended_round(self) -> bool:
        """True if all ranks are at the end of a round, in which this one may have exchanged nothing."""
        return bool(self.round_steps and self.local_step and self.local_step % self.round_steps == 0)

    def finish_step(self) -> None:
        """Do what is left of a step after the optimizer's update."""
        self.communicate(self.local_step + 1)
        Strategy.step(self)

    def round_place(self) -> RoundPlace | None:
        """Place of the last step among the rounds, where ranks may be absent."""
        return self.workers.round_place(self.local_step)

    def finish(self) -> None:
        """After the last step, on the clock: apply what is still in flight."""

    def charge(self, codec: str, way: str, num_values: int) -> None:
        """Let the virtual time pass that it takes to code `num_values`: `way` is "encode" or "decode".

        For what a strategy of one's own encodes itself; `charged` does it for a `Codec`.

        Raises:
            InputError: `compute.coding` has speeds, but none called `codec`.
        """
        if self.coding is not None:
            self.comm.advance(self.coding.seconds(codec, way, num_values))
            self.comm.traffic.charged_values += num_values

    def charged(self, codec: Codec) -> Codec:
        """`codec`, whose work takes virtual time where coding is not free.

        A codec that is an attribute of the strategy, or one of its options, is measured where `compute.coding` says
        `measured`, or has speeds by name and none for it.

        Raises:
            InputError: `compute.coding` has speeds, but none for this codec.
        """
        if self.coding is None or not self.coding.speeds:
            return codec
        charged = ChargedCodec(codec, self.charge)
        self.coding.seconds(charged.name, "encode", 0)  # raises now, not in the first round
        return charged

    @property
    def overlaps_backward(self) -> bool:
        """True if it communicates during the last backward pass, by default if gradients are averaged inside a site."""
        return bool(self.sites.overlaps_backward)

    @property
    def sample_weight(self) -> float:
        """The weight of this rank's samples in the step under way."""
        return self.context.weight

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Scaler of the step's gradients, if they are scaled."""
        return self.context.scaler

    # --- ranks that serve ----------------------------------------------------------------------------

    @property
    def server_groups(self) -> tuple[int, ...]:
        """Numbers of servers by kind; each kind is spread over regions as workers are."""
        return (self.num_servers,)

    def workers_among(self, num_ranks: int) -> int:
        """Number of workers among so many ranks.

        Args:
            num_ranks: workers and servers.

        Raises:
            InputError: servers leave no worker.
        """
        if num_ranks <= self.num_servers:
            raise InputError(
                f"{type(self).__name__}: {num_ranks} ranks, of which {self.num_servers} serve, leave no worker; "
                "start more ranks"
            )
        return num_ranks - self.num_servers

    def take_servers(self, count: int) -> None:
        """Set the number of servers.

        Raises:
            InputError: the strategy has no servers, or cannot do with so many.
        """
        least, most = self.accepted_servers
        if not self.num_servers:
            raise InputError(f"{type(self).__name__}: servers={count}, but it has none; leave servers out")
        if not least <= count <= most:
            accepted = f"{least}" if least == most else f"{least} at least"
            raise InputError(
                f"{type(self).__name__}: servers={count}, but it takes {accepted}; leave servers out"
            )
        self.num_servers = count

    def serve(self, updated: Callable[[float], None]) -> None:
        """Serve instead of training, until no worker sends anything any more.

        Args:
            updated: to be called after changes of the model that could be shipped, with the local steps that have
                gone into it, as a mean over workers, when whatever has been taken from mailboxes is dealt with: it is
                evaluated then, and checkpoints keep `state_dict()`; after a restart `serve` begins again from that.
        """
        raise InputError(f"{type(self).__name__}: has no servers; leave servers out")

    # --- what could be shipped -----------------------------------------------------------------------------

    def judged_state(self) -> dict[str, Tensor] | None:
        """The parameters, by name, of the model that could be shipped now; None: those of this rank's replica.

        A model that the ranks of a site hold in parts is returned in parts: the key `weight[8:16]` names these of
        the flat values of `weight`. By default, of a strategy with an `outer` step, its global parameters.
        """
        has_outer = isinstance(self.outer, GlobalModel) and self.judged == "outer"
        return self.named(self.outer.theta) if has_outer else None

    @property
    def judged_version(self) -> int:
        """Number of the judged model, which rises with each new one; 0 is the initial model."""
        if self.workers.number is not None:
            return self.workers.number
        return self.num_rounds if self.num_rounds is not None and self.judged == "outer" else self.local_step

    # --- and what else the loop needs ----------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forget the last step's gradient."""
        if getattr(self.optim.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            self.optim.zero_grad()
            return
        for group in self.optim.param_groups:  # torch's own reports to profiler and compiler: 15 us
            for parameter in group["params"]:
                parameter.grad = None

    def close(self) -> None:
        """Release the model: remove hooks from it. Nothing else may be called afterwards."""
        self.site.close()

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the constructor, with its own defaults for the rest: for logs."""
        return given_arguments(type(self), *self._given)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step (of the optimizer's first parameter group)."""
        return float(self.optim.param_groups[0]["lr"])

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers of the strategy, the one that applies gradients first; then the outer one."""
        return [self.optim, *(self.outer.optimizers if isinstance(self.outer, GlobalModel) else [])]

    def declared_state(self) -> dict[str, str]:
        """Attributes that are state, by key; of a member of another strategy those of its own."""
        own = super().declared_state()
        of_all = Strategy.state.attributes if self._is_member else {}
        return {key: name for key, name in own.items() if key not in of_all}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`, which `state_dict` returned, after `setup` with the same options."""
        super().load_state_dict(state)
        self._payload_bytes_before = self.comm.traffic.payload_bytes

    # --- for subclasses ------------------------------------------------------------------------------------

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Prepare this rank; called by `setup`. Enters the rank's site, and builds `self.optim`."""
        self.local_step = 0
        self.enter_site()
        # A strategy in EXO Gym's manner may have set `optim_spec` to what it was given, after this constructor.
        spec = ensure_optim_spec(self.optim_spec)
        self.optim = self.site.build(spec, self.model)

    def enter_site(self) -> None:
        """Connect this rank with its site and with other sites."""
        self.site = self.sites.enter(self)
        self.workers = self.patience.workers(self)

    def prepare(self) -> None:
        """Prepare this rank's state: all replicas are equal, and the optimizer is there."""

    def _setup_scheduler(self) -> None:
        """Build the learning-rate schedule on `self.optim`."""
        if self.lr_scheduler:
            self.scheduler = build_scheduler(
                self.optim, self.lr_scheduler, self.lr_scheduler_kwargs or {}, self.max_steps
            )

    @property
    def trainable(self) -> list[Tensor]:
        """The model's parameters that take gradients, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def named_trainable(self) -> list[tuple[str, Tensor]]:
        """Trainable parameters with their names."""
        return [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]

    @property
    def held(self) -> Sequence[Tensor]:
        """Parameters, or parts of them, that this rank brings together with other sites'."""
        return self.site.held

    def unscale_gradients(self) -> None:
        """Undo the scaler's factor before gradients are exchanged; what has overflowed here becomes zero.

        The update is then made whatever this rank's scaler has found: the others count on it.
        """
        self.context.unscale(self.optim, self.trainable)

    def clip_gradients(self) -> None:
        """Undo the scaler's factor, unless that is done, then clip the norm to `max_norm`, if these are set.

        Raises:
            InputError: gradients are sparse and are to be clipped.
        """
        self.context.unscale(self.optim)
        if self.max_norm is not None:
            self.site.clip(self.max_norm)

    @property
    def buckets(self) -> list[list[Tensor]]:
        """Parameters that this rank holds, in buckets of one dtype and device each."""
        return buckets(self.held)

    def named(self, values: Sequence[Tensor]) -> dict[str, Tensor]:
        """`values` of `held`, in their order, by name, as `judged_state` has them."""
        return self.site.named([name for name, _ in self.named_trainable()], values)

    def optimizer_step(self) -> None:
        """Update the parameters from their gradients; with a scaler, only if these were finite when it unscaled them.

        After `unscale_gradients` the update is made in any case.
        """
        self.context.update(self.optim)


declare(Strategy)
Strategy.common = tuple(Strategy.Options.names())
