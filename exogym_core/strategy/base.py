"""Base of strategies: the owner of the optimizer, which decides what is communicated at the end of a step."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from exogym_core.names import plain_numbers
from exogym_core.strategy.optimizers import (
    LRSchedulerLike,
    OptimizerLike,
    OptimSpec,
    build_scheduler,
    ensure_optim_spec,
    resolve_scheduler,
    schedule_end,
    without_updates,
)
from exogym_core.strategy.options import (
    Configured,
    checked_options,
    given_arguments,
    number,
    refuse_unknown,
    resolved_synonyms,
)
from exogym_core.strategy.participation import Participants
from exogym_core.strategy.parts.codecs import ChargedCodec
from exogym_core.strategy.parts.gradients import clip_norm
from exogym_core.strategy.parts.state import State, Stateful
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim.lr_scheduler import LRScheduler

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.compute import Coding
    from exogym_core.strategy.parts.codecs import Codec
    from exogym_core.strategy.parts.gradients import GradientAverager

__all__ = ["ConfiguredStrategy", "StepContext", "Strategy"]


@dataclass(slots=True)
class StepContext:
    """Context of a step of this rank, passed to `Strategy.begin_step` by the loop.

    Attributes:
        number: of the step, from 0.
        samples: of this rank.
        samples_of: of every rank of the run; empty where all have as many.
        scaler: what gradients are scaled with, as they come from the backward pass; None where they are not.
        last_micro_batch: whether the backward pass that is under way, or just over, completes the gradient.
        comm: connects the ranks of the run; needed where there is a `count`.
        count: tokens or samples that this rank's gradient is the mean of, where the model returns them with the loss;
            complete from the `last_micro_batch` on.
    """

    number: int = 0
    samples: int = 0
    samples_of: Sequence[int] = ()
    scaler: torch.amp.GradScaler | None = None
    last_micro_batch: bool = True
    comm: Communicator | None = None
    count: float | None = None
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


class Strategy(Participants, Configured, Stateful):
    """Base of all strategies; by itself it does nothing at a step but count it.

    The loop calls, once per rank, `setup`; then for each step `begin_step` and `zero_grad`, `before_backward`
    before each backward pass, and `step` after the last one; at the end `finish`. A strategy of one's own
    overrides `step`, uses `self.model`, `self.optim` and `self.comm`, and calls `super().step()` last. It may
    also override `_init_node(model, rank, num_nodes)` to prepare what it needs; `self.comm` and `self.seed` are
    there. Where its ranks' models differ, it says by `judged` and `judged_state` which one could be shipped.

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
        state: attributes that checkpoints keep; a subclass declares its own, `state = State("momentum")`. `check` finds
            what is missing; attributes that are not declared may hold anything.
        default_optim: the optimizer where none is given.
        overlaps_backward: the strategy communicates during the last backward pass.
        context: the step under way.
        coding: cost of coding in virtual time, as `setup` got it; None where it is free.
        judged: what targets, tables and verdicts judge: "replica" (all ranks' models are equal, which is checked at
            each evaluation), "outer" (parameters that rounds lead to), "server", or "own" (every rank's own; the mean
            of their losses).
        local_step: number of steps done.
        nbytes: payload bytes of the last step.
        lr_callbacks: called on rank 0 with the learning rate after each step of the schedule.
    """

    registry: ClassVar[dict[str, type[Strategy]]] = {}
    state = State("local_step", "optim", "scheduler")
    overlaps_backward: bool = False
    judged: str = "replica"
    default_optim: ClassVar[OptimSpec] = OptimSpec(torch.optim.AdamW)

    model: nn.Module
    comm: Communicator
    optim: Optimizer
    rank: int
    num_nodes: int
    _given: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Refuse a model as the first argument, whatever the constructor of a subclass would take it for."""
        if arguments and isinstance(arguments[0], nn.Module):
            raise InputError(
                f"{cls.__name__}: the first argument is a model; the Trainer gives it to the strategy, "
                "leave it out and pass the optimizer as optim_spec="
            )
        strategy = super().__new__(cls)
        strategy._given = (arguments, options)
        return strategy

    def __init__(
        self,
        lr_scheduler: LRSchedulerLike | None = None,
        lr_scheduler_kwargs: Mapping[str, Any] | None = None,
        *,
        optim_spec: OptimizerLike | None = None,
        lr: float | None = None,
        max_norm: float | None = None,
        **others: Any,
    ) -> None:
        where = type(self).__name__
        others, _ = resolved_synonyms(type(self), {"optim_spec": optim_spec, **others})
        optim = others.pop("optim_spec", None)
        refuse_unknown(type(self), others)
        # A subclass may have set `optim_spec` before it called this constructor.
        default: OptimSpec = self.__dict__.get("optim_spec", self.default_optim)
        options = {} if lr is None else {"lr": number(where, "lr", lr)}
        self.optim_spec = ensure_optim_spec(optim, default, **options)
        self.max_norm = None if max_norm is None else number(where, "max_norm", max_norm)
        self.lr_scheduler_kwargs = plain_numbers(dict(lr_scheduler_kwargs or {}))
        if self.lr_scheduler_kwargs and not lr_scheduler:
            raise InputError(
                f"{where}: lr_scheduler_kwargs without lr_scheduler; add lr_scheduler='lambda_cosine'"
            )
        self.lr_scheduler = lr_scheduler and resolve_scheduler(lr_scheduler, self.lr_scheduler_kwargs)
        self.scheduler: LRScheduler | None = None
        self.lr_callbacks: list[Callable[[float], None]] = []
        self.context = StepContext()
        self.coding: Coding | None = None
        self.max_steps = 1
        self.seed = 0
        self.local_step = 0
        self.nbytes = 0
        self._payload_bytes_before = 0
        self._update_skipped = False
        self._is_unscaled = False

    # --- called by the loop --------------------------------------------------------------------------------

    def setup(
        self, model: nn.Module, comm: Communicator, max_steps: int, seed: int, coding: Coding | None = None
    ) -> None:
        """Take charge of `model` on this rank: build the optimizer and what else the strategy keeps.

        Called once per rank when all replicas are equal. `comm` connects all ranks, `max_steps` is how many steps the
        schedule of the rate has, `seed` is shared by all ranks. `coding` is given only
        where the work of codecs costs time; an override without it is for runs in which that is free.
        """
        self.rank, self.num_nodes = comm.rank, self.workers_among(comm.world_size)
        self.model, self.comm = model, comm
        self.coding = coding
        self.max_steps, self.seed = max_steps, seed
        self._payload_bytes_before = comm.traffic.payload_bytes
        self._init_node(model, comm.rank, self.num_nodes)
        if self.scheduler is None:
            self._setup_scheduler()

    def of_length(self, max_steps: int) -> Sequence[int]:
        """Steps that follow from the run's number of steps, such as the end of its schedule.

        A run resumes for another number of steps only where these stay the same.
        """
        end = schedule_end(self.lr_scheduler, self.lr_scheduler_kwargs, max_steps)
        return [] if end is None else [end]

    def begin_step(self, context: StepContext) -> None:
        """Begin the step that `context` describes."""
        self.context = context

    def before_backward(self, last_micro_batch: bool) -> None:
        """Prepare for a backward pass; averages may begin in that of the `last_micro_batch`."""

    def step(self) -> None:
        """End a step: advance the schedule and the count. Overrides update the model, then call this."""
        # The schedule counts steps, also those that overflowed, which ranks may not share.
        if self.scheduler is not None:
            with without_updates() if self._update_skipped else nullcontext():
                self.scheduler.step()
            if self.rank == 0:
                for callback in self.lr_callbacks:
                    callback(self.learning_rate)
        self._update_skipped = False
        self.local_step += 1
        self.nbytes = self.comm.traffic.payload_bytes - self._payload_bytes_before
        self._payload_bytes_before += self.nbytes

    def skip_step(self) -> None:
        """Count a step that is not done: advance the schedule alone."""
        with without_updates():
            Strategy.step(self)

    @property
    def round_steps(self) -> int | None:
        """Period, in steps, of what the ranks send; None: not declared.

        Declared as a number (`round_steps = 50`) or a property of the options; 1 where every step sends the same. Plans
        simulate rounds of so many steps, a run that ends at a virtual time ends with a round, and steps within a round
        may be run ahead. It may depend on the model: it is read after `setup`, too.
        """
        return None

    @property
    def warmup_steps(self) -> int:
        """First steps that send otherwise than the rounds after them; read after `setup`, of a run of `max_steps`."""
        return 0

    @property
    def sends_by_value(self) -> bool:
        """True if values decide which step sends how much: plans, which have none, show the bytes to be expected."""
        return False

    @property
    def steps_to_exchange(self) -> int:
        """Number of next steps that only average gradients, clip and update, up to the next exchange after an update.

        0: not known. What averages is `averager`, and the rest of such a step is `finish_step`.
        """
        return 0

    @property
    def averager(self) -> GradientAverager | None:
        """Averager of all ranks' gradients in steps of `steps_to_exchange`; None where they stay apart."""
        return None

    @property
    def has_ended_round(self) -> bool:
        """True if all ranks are at the end of a round, in which this one may have exchanged nothing."""
        return bool(self.round_steps and self.local_step and self.local_step % self.round_steps == 0)

    def finish_step(self) -> None:
        """Do what is left of a step after the optimizer's update."""
        Strategy.step(self)

    def row(self) -> dict[str, Any]:
        """Values of the last step's row besides loss and bytes."""
        return {}

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
    def sample_weight(self) -> float:
        """The weight of this rank's samples in the step under way."""
        return self.context.weight

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Scaler of the step's gradients, if they are scaled."""
        return self.context.scaler

    # --- what could be shipped -----------------------------------------------------------------------------

    def judged_state(self) -> dict[str, Tensor] | None:
        """The parameters, by name, of the model that could be shipped now; None: those of this rank's replica.

        A model that the ranks of a site hold in parts is returned in parts: the key `weight[8:16]` names these of
        the flat values of `weight`.
        """
        return None

    @property
    def judged_version(self) -> int:
        """Number of the judged model, which rises with each new one; 0 is the initial model."""
        return self.local_step

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
        """Optimizers of the strategy, the one that applies gradients first."""
        return [self.optim]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`, which `state_dict` returned, after `setup` with the same options."""
        super().load_state_dict(state)
        self._payload_bytes_before = self.comm.traffic.payload_bytes

    # --- for subclasses ------------------------------------------------------------------------------------

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Prepare this rank; called by `setup`. Builds `self.optim`."""
        self.local_step = 0
        # A strategy in EXO Gym's manner may have set `optim_spec` to what it was given, after this constructor.
        self.optim = ensure_optim_spec(self.optim_spec).build(model)

    def _setup_scheduler(self) -> None:
        """Build the learning-rate schedule on `self.optim`."""
        if self.lr_scheduler:
            self.scheduler = build_scheduler(
                self.optim, self.lr_scheduler, self.lr_scheduler_kwargs, self.max_steps
            )

    @property
    def trainable(self) -> list[Tensor]:
        """The model's parameters that take gradients, in the model's order."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def named_trainable(self) -> list[tuple[str, Tensor]]:
        """Trainable parameters with their names."""
        return [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]

    def unscale_gradients(self) -> None:
        """Undo the scaler's factor before gradients are exchanged; what has overflowed here becomes zero.

        The update is then made whatever this rank's scaler has found: the others count on it.
        """
        scaler = self.context.scaler
        if scaler is None or self._is_unscaled:
            return
        scaler.unscale_(self.optim)
        self._is_unscaled = True
        for parameter in self.trainable:
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)

    def clip_gradients(self) -> None:
        """Undo the scaler's factor, unless that is done, then clip the norm to `max_norm`, if these are set.

        Raises:
            InputError: gradients are sparse and are to be clipped.
        """
        scaler = self.context.scaler
        if scaler is not None and not self._is_unscaled:
            scaler.unscale_(self.optim)
        if self.max_norm is not None:
            self._clip(self.max_norm)

    def _clip(self, max_norm: float) -> None:
        clip_norm(self.trainable, max_norm)

    def optimizer_step(self) -> None:
        """Update the parameters from their gradients; with a scaler, only if these were finite when it unscaled them.

        After `unscale_gradients` the update is made in any case.
        """
        scaler = self.context.scaler
        if scaler is None:
            self.optim.step()
        elif self._is_unscaled:
            self._is_unscaled = False
            self.optim.step()
            scaler.update()
        else:
            scale = scaler.get_scale()
            scaler.step(self.optim)
            scaler.update()
            self._update_skipped = scaler.get_scale() < scale


class ConfiguredStrategy(Strategy):
    """Strategy whose constructor takes the fields of its `Options`.

    Attributes:
        options: those.
    """

    positional: ClassVar[tuple[str, ...]] = ("optim_spec",)
    options: Any

    def __init__(self, *positional: Any, **given: Any) -> None:
        self.options, others = checked_options(type(self), positional, given)
        super().__init__(**others)
