"""Base of strategies: owns the optimizer, and exchanges gradients or parameters in each step."""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from exogym_core.strategy.optimizers import (
    LRSchedulerLike,
    OptimSpec,
    build_scheduler,
    ensure_optim_spec,
    require_plain_sgd,
    resolve_scheduler,
    schedule_end,
    without_updates,
)
from exogym_core.strategy.options import (
    Options,
    checked_options,
    declare,
    given_arguments,
    mapping,
    number,
    option,
    refuse_unknown,
    take,
)
from exogym_core.strategy.participation.absence import StepAbsence
from exogym_core.strategy.participation.options import ClientOptions, PatienceOptions
from exogym_core.strategy.participation.site import Everyone, Site, SiteOptions
from exogym_core.strategy.parts.codecs import ChargedCodec
from exogym_core.strategy.parts.flat import buckets
from exogym_core.strategy.parts.outer import GlobalModel
from exogym_core.strategy.parts.state import State, Stateful
from netsim.errors import InputError, about_option
from netsim.units import plain_numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.compute import Coding
    from exogym_core.events import RoundPlace
    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["SharedState", "StepContext", "Strategy"]

T = TypeVar("T")


@dataclass(slots=True)
class StepContext:
    """Context of a step of this rank, passed to `Strategy.begin_step` by the loop.

    Attributes:
        number: of the step, from 0.
        samples: of this rank.
        samples_of: of every rank of the run; empty if all have the same number.
        scaler: scales the loss, and so the gradients of the backward pass; None: unscaled.
        last_micro_batch: whether the current, or just completed, backward pass completes the gradient.
        comm: connects the ranks of the run; needed with a `count`.
        data_sizes: samples of each worker's own data set; empty where all read one.
        count: tokens or samples that this rank's gradient is the mean of, where the model returns them with the loss;
            complete from the `last_micro_batch` on.
        is_skipped: the update was skipped, as gradients had overflowed.
        is_unscaled: gradients have been unscaled by `Strategy.unscale_gradients`.
        loss: mean loss of the samples, where passes are taken as part of the exchange; else None.
    """

    number: int = 0
    samples: int = 0
    samples_of: Sequence[int] = ()
    scaler: torch.amp.GradScaler | None = None
    last_micro_batch: bool = True
    comm: Communicator | None = None
    is_unscaled: bool = False
    is_skipped: bool = False
    count: float | None = None
    data_sizes: Sequence[int] = ()
    loss: float | None = None
    _summed: dict[tuple[int, ...] | None, float] = field(default_factory=dict, init=False)

    @property
    def weight(self) -> float:
        """Weight of this rank's gradient in the mean of all ranks'."""
        return self.weight_among(None)

    def weight_among(self, ranks: Sequence[int] | None) -> float:
        """Weight of this rank's gradient in the mean of the gradients of `ranks`; None: of all ranks.

        It is this rank's samples over the mean of `ranks`'. Where the model returns counts it is this rank's count over
        their mean: the first call of a step sums the counts of `ranks`, all of which must call it then, by an
        all-reduce of 4 bytes that takes its time.
        """
        if self.count is not None and self.comm is not None and self.last_micro_batch:
            together = self.comm if ranks is None else self.comm.group(ranks, reuse=True)
            key = None if ranks is None else tuple(ranks)
            if key not in self._summed:
                total = torch.tensor([self.count], device=self.comm.device)
                self._summed[key] = together.all_reduce(total, "sum").item()
            return self.count * together.world_size / (self._summed[key] or 1.0)
        if not self.samples_of:
            return 1.0
        among = self.samples_of if ranks is None else [self.samples_of[rank] for rank in ranks]
        return self.samples * len(among) / sum(among)


# Methods of a step by which a subclass may change it, and those of them that `take_step` calls.
_ACTS = ("before_update", "optimizer_step", "communicate")
_STEP_METHODS = {
    *(*_ACTS, "begin_step", "zero_grad", "before_backward", "local_update", "clip_gradients", "step")
}


@dataclass(slots=True)
class RunFacts:
    """Facts of a run that its strategies use.

    Attributes:
        max_steps, seed, coding: as passed to `Strategy.setup`.
        step_seconds: mean virtual seconds of a step of each worker; empty where steps take no time.
        batches: samples of each worker in a step; empty where all have as many.
    """

    max_steps: int = 1
    seed: int = 0
    coding: Coding | None = None
    step_seconds: Sequence[float] = ()
    batches: Sequence[int] = ()


class SharedState:
    """State of a rank that its strategies share: those of a chain have the chain's; see `Strategy` for what each is.

    Attributes:
        whole: the strategy that was set up; None before.
        payload_bytes: sent before this step.
        updated_step: the step that was updated last; -1: none.
        update_options: names of given options of the local update, which members of a chain must not have.
    """

    model: nn.Module
    comm: Communicator
    optim: Optimizer
    site: Site

    def __init__(self, where: str) -> None:
        self.where = where
        self.whole: Strategy | None = None
        self.run = RunFacts()
        self.scheduler: LRScheduler | None = None
        self.lr_callbacks: list[Callable[[float], None]] = []
        self.context = StepContext()
        self.local_step = 0
        self.nbytes = 0
        self.payload_bytes = 0
        self.updated_step = -1
        self.update_options: list[str] = []


class Shared(property, Generic[T]):
    """An attribute of a strategy that its `SharedState` holds, or the `part` of it."""

    def __init__(self, part: str = "shared_state") -> None:
        self._part = part

    def __set_name__(self, owner: type, name: str) -> None:
        part = attrgetter(self._part)
        super().__init__(
            attrgetter(f"{self._part}.{name}"), lambda strategy, value: setattr(part(strategy), name, value)
        )

    if TYPE_CHECKING:

        def __get__(self, strategy: object, owner: type | None = None) -> T: ...  # type: ignore[override]

        def __set__(self, strategy: object, value: T) -> None: ...


class UpdateOptions(Options):
    """Options of the local update, which every strategy has; see `Strategy`."""

    lr_scheduler: LRSchedulerLike | None = option(None)
    lr_scheduler_kwargs: Mapping[str, Any] | None = option(None, mapping)
    optim_spec: Any = option(None)
    lr: float | None = option(None, number)
    max_norm: float | None = option(None, number)


class Strategy(Stateful):
    """Base of all strategies; by itself it only counts steps.

    The loop calls, once per rank, `setup`; then for each step `begin_step` and `zero_grad`, `before_backward`
    before each backward pass, and `step` after the last one; at the end `finish`. A strategy of your own exchanges
    gradients in `before_update()`, or parameters in `communicate(step)`, by `self.comm`; its step is `take_step`, and a
    `Chain` can have it as a member. Or it overrides `step`, and calls `super().step()` last. It may also override
    `prepare()`, called once when the optimizer is there, for its own state.
    Where ranks' models differ, `judged` and `judged_state` define the one that could be shipped.

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
        max_steps, seed: of the run; the seed is the same on all ranks.
        scheduler: torch's schedule of the rate; None: the rate is constant.
        sites, patience, clients: options of sites, of waiting for absent ranks, and of clients drawn for each round.
        site: this rank's site: its connections, and the average of gradients inside it.
        held: parameters, or parts of them, that this rank averages with other sites.
        workers: membership of rounds.
        outer: global model of strategies with rounds; else None.
        num_rounds: completed rounds, of strategies that count them.
        modules: members of a chain; empty for all others.
        goes_first: it acts before the others in a chain, wherever it is listed.
        takes_complex: it exchanges complex parameters; otherwise they are refused.
        takes_sites: it may follow `Sites` in a chain; otherwise it exchanges between single ranks.
        where: the name that the user wrote, for errors.
        round_steps: period of communication in steps, as a number or a property of the options; 1 if every step sends
            the same; None: not declared. Plans simulate rounds of that length, a run that ends at a virtual time ends
            with a round, and steps within a round may be run ahead. It is read after `setup`, too.
        periods: of its exchanges, where they have several; `round_steps` is a multiple of each.
        warmup_steps: first steps, whose communication differs from that of later rounds; read after `setup`, for a
            run of `max_steps`.
        sends_by_value: values decide which step sends how much: plans, which have no values, show expected bytes.
        plain_steps: a step up to `communicate` only averages gradients in the site, clips, and updates.
        healed: attributes that are equal on all ranks and state, which a rank takes over that was absent from exchanges
            of gradients.
        state: attributes that checkpoints keep; a subclass declares its own, `state = State("momentum")`. `check` finds
            missing declarations; undeclared attributes are not kept.
        default_optim: the default optimizer.
        applies: exchanged values that the optimizer applies as they are, such as "signs"; "": gradients, of which any
            optimizer makes its own updates.
        weigh_by_default: weights of the workers in the mean of a round, see `ClientOptions.weigh_by`.
        weighs_by_samples: all its averages over workers can be weighed by their samples.
        shared_state: attributes that members of a chain have in common with it.
        context: the current step.
        scaler: of the step's gradients; None: they are not scaled.
        coding: cost of coding in virtual time, as passed to `setup`; None: free.
        judged: what targets, tables and verdicts judge: "replica" (all ranks' models are equal, which is checked at
            each evaluation), "outer" (parameters that rounds lead to), "server", or "own" (every rank's own; the mean
            of their losses). "": a member of a chain that leaves this to other members.
        local_step: number of completed steps.
        nbytes: payload bytes of the last step.
        lr_callbacks: called on rank 0 with the learning rate after each step of the schedule.
        num_servers: number of ranks that `serve` instead of training: the last ones, which are no workers.
        accepted_servers: smallest and largest number of servers.
        arithmetic: names of a server's methods that only change values: plans, which have no values, skip them.
        is_synchronous: all ranks do the same number of steps; otherwise each ends at its own time.
        registry: classes by the names that experiment files give them.
        experimental: its rule could not be read in the paper or in code that its authors publish: `netgym list` names
            it with `--all` alone.
        variants: names of other published strategies, and options that make them: a refusal of the name says so.
        Options: dataclass of all declared options.
        positional: names of options that may be given by position, in order.
        declared, members: names of options declared by the class and its bases, and classes of members with options.
        common, taken: names of the options of every strategy, which help and logs omit; those of them that the class
            refuses.
        accepted: names of the constructor's arguments, and whether each is optional.
    """

    positional: ClassVar[tuple[str, ...]] = ("lr_scheduler", "lr_scheduler_kwargs")

    registry: ClassVar[dict[str, type[Strategy]]] = {}
    Options: ClassVar[type[Any]] = UpdateOptions
    declared: ClassVar[tuple[str, ...]] = ()
    members: ClassVar[dict[str, type[Any]]] = {}
    common: ClassVar[tuple[str, ...]] = ()
    taken: ClassVar[tuple[str, ...]] = ()
    accepted: ClassVar[dict[str, bool]] = {}

    state = State("local_step", "optim", "scheduler", "site", "workers")
    healed: ClassVar[tuple[str, ...]] = ()
    judged: str = "replica"
    experimental: ClassVar[bool] = False
    variants: ClassVar[tuple[tuple[str, str], ...]] = ()
    default_optim: ClassVar[OptimSpec] = OptimSpec(torch.optim.AdamW)
    applies: ClassVar[str] = ""
    round_steps: int | None = None
    periods: ClassVar[Sequence[int]] = ()
    warmup_steps: ClassVar[int] = 0
    sends_by_value: ClassVar[bool] = False
    plain_steps: ClassVar[bool] = False

    num_servers: int = 0
    accepted_servers: ClassVar[tuple[int, float]] = (1, math.inf)
    arithmetic: ClassVar[tuple[str, ...]] = ()
    is_synchronous: ClassVar[bool] = True

    modules: Sequence[Strategy] = ()
    goes_first: ClassVar[bool] = False
    takes_sites: ClassVar[bool] = True
    takes_complex: ClassVar[bool] = False
    sites: Any = SiteOptions()
    patience: PatienceOptions = PatienceOptions()
    clients: ClientOptions = ClientOptions()
    weigh_by_default: ClassVar[str] = "worker"
    weighs_by_samples: ClassVar[bool] = False
    outer: Any = None
    num_rounds: Any = None

    shared_state: SharedState
    model = Shared["nn.Module"]()
    comm = Shared["Communicator"]()
    optim = Shared[Optimizer]()
    site = Shared[Site]()
    held = Shared["Sequence[Tensor]"]("shared_state.site")
    where = Shared[str]()
    max_steps = Shared[int]("shared_state.run")
    seed = Shared[int]("shared_state.run")
    coding = Shared["Coding | None"]("shared_state.run")
    scheduler = Shared[LRScheduler | None]()
    lr_callbacks = Shared["list[Callable[[float], None]]"]()
    context = Shared[StepContext]()
    scaler = Shared["torch.amp.GradScaler | None"]("shared_state.context")
    local_step = Shared[int]()
    nbytes = Shared[int]()
    workers: Everyone
    _given: tuple[tuple[Any, ...], dict[str, Any]]  # arguments by position, and by name

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Keep the constructor's arguments, for logs."""
        strategy = super().__new__(cls)
        strategy._given = arguments, options
        strategy.shared_state = SharedState(cls.__name__)
        return strategy

    def __init_subclass__(
        cls,
        name: str | None = None,
        part: str | None = None,
        positional: tuple[str, ...] | None = None,
        experimental: bool = False,
        **others: Any,
    ) -> None:
        super().__init_subclass__(**others)
        cls.experimental = experimental
        cls.positional = cls.positional if positional is None else positional
        if name is not None:
            cls.registry[name] = cls
        if vars(cls).keys() & _STEP_METHODS and "plain_steps" not in vars(cls):
            cls.plain_steps = False
        if cls.step is Strategy.step and any(getattr(cls, a) is not getattr(Strategy, a) for a in _ACTS):
            cls.step = Strategy.take_step  # type: ignore[method-assign]
        declare(cls, part)

    def __init__(self, *positional: Any, **given: Any) -> None:
        cls = type(self)
        if positional and isinstance(positional[0], nn.Module):
            raise InputError(
                f"{self.where}: the first argument is a model; the Trainer gives it to the strategy, "
                "leave it out and pass the optimizer as optim_spec=",
                about=("optim_spec",),
            )
        options, others = checked_options(cls, positional, given)
        refuse_unknown(cls, others)
        set_before = self.__dict__.get("optim_spec")  # by a subclass, before it called this constructor
        take(self, options)
        self.shared_state.update_options = [name for name in cls.common if getattr(options, name) is not None]
        default: OptimSpec = set_before or self.default_optim
        with about_option("optim_spec"):
            self.optim_spec = ensure_optim_spec(
                options.optim_spec, default, **({} if options.lr is None else {"lr": options.lr})
            )
        self.lr_scheduler_kwargs = plain_numbers(dict(options.lr_scheduler_kwargs or {}))
        if self.lr_scheduler_kwargs and not options.lr_scheduler:
            raise InputError(
                f"{self.where}: lr_scheduler_kwargs without lr_scheduler; add lr_scheduler='lambda_cosine'",
                about=("lr_scheduler_kwargs",),
            )
        self.lr_scheduler = options.lr_scheduler and resolve_scheduler(
            options.lr_scheduler, self.lr_scheduler_kwargs
        )
        self.max_norm: float | None = options.max_norm
        if self.applies:
            require_plain_sgd(self)
        has_shards, waits = self.sites.sharding != "NO_SHARD", self.patience.of_steps
        if has_shards and waits and self.patience.patience(self.where) is not None:
            raise InputError(
                f"{self.where}: a lost rank would take its shard of the optimizer's state with it; leave out sharding= "
                "or the time-outs",
                about=("sharding",),
            )

    # --- called by the loop --------------------------------------------------------------------------------

    def setup(
        self, model: nn.Module, comm: Communicator, max_steps: int, seed: int, coding: Coding | None = None
    ) -> None:
        """Attach to `model` on this rank: build the optimizer and the strategy's own state.

        Called once per rank when all replicas are equal. `comm` connects all ranks, `max_steps` is the length of the
        learning-rate schedule, `seed` is shared by all ranks. `coding` is passed only if coding costs virtual time; an
        override without it is for runs in which coding is free.
        """
        shared, run = self.shared_state, self.shared_state.run
        shared.whole, shared.model, shared.comm = self, model, comm
        shared.local_step, shared.updated_step = 0, -1
        run.max_steps, run.seed, run.coding = max_steps, seed, coding
        shared.payload_bytes = comm.state.traffic.payload_bytes
        num_nodes = self.num_nodes
        if self.num_servers and self.judged != "server":
            raise InputError(
                f"{self.where}: num_servers={self.num_servers}, but judged={self.judged!r}; servers keep the model "
                "that could be shipped: write judged = 'server'"
            )
        steps = self.round_steps
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1):
            raise InputError(f"{self.where}: round_steps={steps!r} must be a whole number of at least 1")
        if (
            comm.world_size > 1
            and not self.takes_complex
            and any(each.is_complex() for each in self.trainable)
        ):
            name, parameter = next(each for each in self.named_trainable() if each[1].is_complex())
            raise InputError(
                f"{self.where}: parameter {name!r} is {parameter.dtype}, and ranks bring real ones together; hold its "
                "real and imaginary parts (torch.view_as_real), or write takes_complex = True in a strategy of your "
                "own that does more"
            )
        self._init_node(model, comm.rank, num_nodes)
        self.prepare()
        if self.scheduler is None:
            self._setup_scheduler()

    def join(self, whole: Strategy) -> None:
        """Become a member of the chain `whole`, which has been set up and updates the parameters.

        Raises:
            InputError: ranks of `whole` form sites, and this strategy does not take them.
        """
        if not (self.takes_sites or whole.site.is_single):
            raise InputError(
                f"{whole.where}: {type(self).__name__} mixes single ranks, not sites; leave Sites out"
            )
        self.shared_state = whole.shared_state
        self.workers = whole.workers if whole.workers.of_steps else self.membership()
        self.prepare()

    def of_length(self, max_steps: int) -> Sequence[int]:
        """Steps derived from the run's number of steps, such as the end of its schedule.

        A run resumes for another number of steps only if these stay the same.
        """
        end = schedule_end(self.lr_scheduler, self.lr_scheduler_kwargs or {}, max_steps)
        return [] if end is None else [end]

    def begin_step(self, context: StepContext) -> None:
        """Begin the step that `context` describes."""
        self.shared_state.context = context

    def before_backward(self, last_micro_batch: bool) -> None:
        """Prepare for a backward pass; averages may begin during that of the `last_micro_batch`."""
        if self.shared_state.whole is not self:
            return
        gradients = self.site.gradients
        if isinstance(self.workers, StepAbsence):
            self.workers.listen(last_micro_batch)
        elif gradients is not None:
            gradients.listen(last_micro_batch, self.site.weight(self.context))

    def take_step(self) -> None:
        """Take a step: `step` of strategies that exchange gradients or parameters and do not override it.

        Called by a subclass's `step` that has made the local update itself, it only counts the step.
        """
        if self.shared_state.updated_step != self.local_step:
            self.local_update()
            self.communicate(self.local_step + 1)
        Strategy.step(self)

    def local_update(self) -> None:
        """Update the parameters: average the gradients inside the site, exchange them, clip, step the optimizer.

        Where others exchanged theirs without this rank there is no update: it has their newest state.
        """
        self.shared_state.updated_step = self.local_step
        absence = self.workers if isinstance(self.workers, StepAbsence) else None
        if absence is None:
            self._exchange_gradients()
        elif not absence.exchange(self._exchange_gradients):
            return
        self.clip_gradients()
        self.optimizer_step()
        if absence is not None:
            absence.end_step()

    def _exchange_gradients(self) -> None:
        gradients = self.site.gradients
        if gradients is not None:
            is_scaled = self.context.scaler is not None
            gradients.average(self.site.weight(self.context), scaled=is_scaled)
            if is_scaled:
                gradients.share_overflow()
        self.before_update()

    def before_update(self) -> None:
        """Exchange gradients, which are neither unscaled nor clipped yet."""

    def communicate(self, step: int) -> None:
        """Exchange parameters after the local update of the 1-based `step`."""

    def step(self) -> None:
        """End a step: complete the replica, advance the schedule and the count. Overrides update, then call this."""
        gradients = self.site.gradients
        if gradients is not None:
            gradients.gather()
        # The schedule counts steps, also those that overflowed, which ranks may not share.
        if self.scheduler is not None:
            with without_updates() if self.context.is_skipped else nullcontext():
                self.scheduler.step()
            if self.rank == 0:
                for callback in self.lr_callbacks:
                    callback(self.learning_rate)
        state = self.shared_state
        state.local_step += 1
        state.nbytes = state.comm.state.traffic.payload_bytes - state.payload_bytes
        state.payload_bytes += state.nbytes

    def skip_step(self) -> None:
        """Count a skipped step: advance only the schedule."""
        with without_updates():
            Strategy.step(self)

    def sit_out(self, num_steps: int) -> None:
        """Count steps in which this rank takes no part: advance only the schedule."""
        if self.scheduler is None:
            self.local_step += num_steps
        else:
            for _ in range(num_steps):
                self.skip_step()

    @property
    def steps_to_exchange(self) -> int:
        """Number of steps up to and including the next one that ends with an exchange between sites.

        Each averages gradients in the site, clips and updates; `finish_step` is the rest of it. 0: unknown.
        """
        if not self.plain_steps or self.round_steps is None:
            return 0
        if self.scheduler is not None:
            return 1
        if type(self).communicate is Strategy.communicate:  # nothing is exchanged after an update
            return sys.maxsize
        return min(steps - self.local_step % steps for steps in self.periods or (self.round_steps,))

    @property
    def has_ended_round(self) -> bool:
        """True if all ranks are at the end of a round, even if this one took no part in it."""
        return bool(self.round_steps and self.local_step and self.local_step % self.round_steps == 0)

    def finish_step(self) -> None:
        """Complete a step after the optimizer's update."""
        self.communicate(self.local_step + 1)
        Strategy.step(self)

    def round_place(self) -> RoundPlace | None:
        """Place of the last step among the rounds, where ranks may be absent."""
        return self.workers.round_place(self.local_step)

    def finish(self) -> None:
        """Apply averages still in flight after the last step, on the clock."""

    def charge(self, codec: str, way: str, num_values: int) -> None:
        """Charge the virtual time to code `num_values`: `way` is "encode" or "decode".

        For encodings of your own strategy; `charged` does it for a `Codec`.

        Raises:
            InputError: `compute.coding` has speeds, but none called `codec`.
        """
        if self.coding is not None:
            self.comm.advance(self.coding.seconds(codec, way, num_values))
            self.comm.state.traffic.charged_values += num_values

    def charged(self, codec: Codec) -> Codec:
        """`codec`, charged in virtual time unless coding is free.

        A codec that is an attribute of the strategy, or one of its options, is measured if `compute.coding` is
        `measured`, or has speeds by name and none for this codec.

        Raises:
            InputError: `compute.coding` has speeds, but none for this codec.
        """
        if self.coding is None or not self.coding.speeds:
            return codec
        charged = ChargedCodec(codec, self.charge)
        self.coding.seconds(charged.name, "encode", 0)  # raises now, not in the first round
        return charged

    @cached_property
    def rank(self) -> int:
        """This rank's number, from `setup` on."""
        return self.comm.rank

    @cached_property
    def num_nodes(self) -> int:
        """The number of workers, from `setup` on.

        Raises:
            InputError: servers leave no worker.
        """
        num_ranks = self.comm.world_size
        if num_ranks <= self.num_servers:
            raise InputError(
                f"{type(self).__name__}: {num_ranks} ranks, of which {self.num_servers} serve, leave no worker; "
                "start more ranks"
            )
        return num_ranks - self.num_servers

    @property
    def acting(self) -> Sequence[Strategy]:
        """Strategies that exchange gradients in its steps: itself, or the members of a chain."""
        return [self]

    @property
    def peers(self) -> Communicator:
        """Connects the ranks that exchange gradients now: all, or those that are present."""
        return self.workers.peers

    @property
    def overlaps_backward(self) -> bool:
        """True if it communicates during the last backward pass: by default if gradients are averaged inside a site."""
        return bool(self.sites.overlaps_backward)

    @property
    def sample_weight(self) -> float:
        """The weight of this rank's samples in the step under way."""
        return self.context.weight

    # --- servers --------------------------------------------------------------------------------------------

    @property
    def server_groups(self) -> tuple[int, ...]:
        """Numbers of servers by kind; each kind is spread over regions like the workers."""
        return (self.num_servers,)

    def take_servers(self, count: int) -> None:
        """Set the number of servers.

        Raises:
            InputError: the strategy has no servers, or does not take that number.
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
        """Serve instead of training, until all workers have ended.

        Args:
            updated: call it when the mailbox is empty and the judged model has changed, with the mean over workers of
                the local steps behind that model. Evaluations and checkpoints happen there: they keep `state_dict()`,
                from which `serve` begins again after a restart.
        """
        raise InputError(f"{type(self).__name__}: has no servers; leave servers out")

    # --- the judged model ----------------------------------------------------------------------------------

    def judged_state(self) -> dict[str, Tensor] | None:
        """Parameters, by name, of the model that could be shipped now; None: those of this rank's replica.

        A model that the ranks of a site hold in parts is returned in parts: the key `weight[8:16]` names values 8 to
        15 of the flat `weight`. The default is the global parameters of `outer`, if the strategy has one.
        """
        has_outer = isinstance(self.outer, GlobalModel) and self.judged == "outer"
        return self.named(self.outer.theta) if has_outer else None

    @property
    def judged_version(self) -> int:
        """Version of the judged model, which increases with each change; 0 is the initial model."""
        if self.workers.number is not None:
            return self.workers.number
        return self.num_rounds if self.num_rounds is not None and self.judged == "outer" else self.local_step

    # --- for the loop --------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Drop the last step's gradients."""
        if getattr(self.optim.zero_grad, "__func__", None) is not Optimizer.zero_grad:
            self.optim.zero_grad()
            return
        for group in self.optim.param_groups:  # torch's own reports to profiler and compiler: 15 us
            for parameter in group["params"]:
                parameter.grad = None

    def close(self) -> None:
        """Release the model: remove hooks from it. No other call may follow."""
        self.site.close()

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the constructor, defaults included, for logs."""
        return given_arguments(type(self), *self._given)

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step (of the optimizer's first parameter group)."""
        return float(self.optim.param_groups[0]["lr"])

    @property
    def optimizers(self) -> list[Optimizer]:
        """Optimizers of the strategy: the local one first, then those of `outer`."""
        return [self.optim, *(self.outer.optimizers if isinstance(self.outer, GlobalModel) else [])]

    def declared_state(self) -> dict[str, str]:
        """Attributes that are state, by key; without those of the chain in a member."""
        own = super().declared_state()
        is_member = self.shared_state.whole not in (None, self)
        of_all = Strategy.state.attributes if is_member else {}
        return {key: name for key, name in own.items() if key not in of_all}

    @property
    def own_state(self) -> list[str]:
        """Attributes of the state that its class declares, without that of every strategy."""
        return [name for key, name in self.declared_state().items() if key not in Strategy.state.attributes]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`, which `state_dict` returned, after `setup` with the same options."""
        super().load_state_dict(state)
        self.shared_state.payload_bytes = self.comm.state.traffic.payload_bytes

    # --- for subclasses ------------------------------------------------------------------------------------

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Enter this rank's site and build `self.optim`; called by `setup`."""
        self.enter_site()
        # As in EXO Gym, a subclass may have set `optim_spec` after this constructor, to any form of it.
        spec = ensure_optim_spec(self.optim_spec)
        with about_option("optim_spec"):
            self.shared_state.optim = self.site.build(spec, self.model)

    def enter_site(self) -> None:
        """Connect this rank to its site and to other sites."""
        self.shared_state.site = self.sites.enter(self)
        self.workers = self.membership()

    def membership(self) -> Everyone:
        """Membership of this rank, which is connected, in rounds."""
        drawn = self.clients.workers(self)
        return self.patience.workers(self) if drawn is None else drawn

    @property
    def round_weights(self) -> Mapping[int, int]:
        """Weight of each worker in the mean of a round; empty: all weigh the same."""
        clients, batches = self.clients, self.shared_state.run.batches
        by_default = "steps" if clients.balance else "samples" if batches else self.weigh_by_default
        kind = clients.weigh_by or by_default
        if kind == "steps":
            return self.workers.num_steps
        return dict(enumerate(batches or self.context.data_sizes)) if kind == "samples" else {}

    def round_weight(self, ranks: Sequence[int]) -> float:
        """Weight of this worker in the mean of a round among `ranks`, over their mean weight."""
        of = self.round_weights
        return 1.0 if not of else of[self.rank] * len(ranks) / sum(of[rank] for rank in ranks)

    def prepare(self) -> None:
        """Create this rank's own state: called when all replicas are equal and the optimizer is built."""

    def _setup_scheduler(self) -> None:
        """Build the learning-rate schedule on `self.optim`."""
        if self.lr_scheduler:
            self.shared_state.scheduler = build_scheduler(
                self.optim, self.lr_scheduler, self.lr_scheduler_kwargs or {}, self.max_steps
            )

    @property
    def trainable(self) -> list[Tensor]:
        """The model's parameters that take gradients, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def named_trainable(self) -> list[tuple[str, Tensor]]:
        """Trainable parameters with their names."""
        return [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]

    def unscale_gradients(self) -> None:
        """Undo the scaler's factor before gradients are exchanged; overflows of this rank become zero.

        The update is then made whatever this rank's scaler finds: the other ranks rely on it.
        """
        context = self.context
        if context.scaler is None or context.is_unscaled:
            return
        context.scaler.unscale_(self.optim)
        context.is_unscaled = True
        for parameter in self.trainable:
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)

    def clip_gradients(self) -> None:
        """Undo the scaler's factor, unless done, then clip the norm to `max_norm`, if set.

        Raises:
            InputError: gradients are sparse and are to be clipped.
        """
        scaler = self.context.scaler
        if scaler is not None and not self.context.is_unscaled:
            scaler.unscale_(self.optim)
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

        After `unscale_gradients` the update is made in any case. Each call is an update: a step may make several, such
        as one for each gradient that has arrived, and counts once.
        """
        context, scaler = self.context, self.context.scaler
        context.is_skipped, self.shared_state.updated_step = False, self.local_step
        if scaler is None:
            self.optim.step()
            return
        scale = scaler.get_scale()
        if context.is_unscaled:
            self.optim.step()
        else:
            scaler.step(self.optim)
        scaler.update()
        context.is_skipped = not context.is_unscaled and scaler.get_scale() < scale
        context.is_unscaled = False


declare(Strategy)
Strategy.common = tuple(UpdateOptions.names())
