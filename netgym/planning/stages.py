"""Ranks with stages in plans: their messages and computing, without values."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from exogym_core.data.batches import autocast_to
from exogym_core.data.samples import StepSamples
from exogym_core.run.algorithms import without_values
from exogym_core.run.planned_rank import PlannedRank, arrive, planned_copy
from exogym_core.stages.boundaries import boundary_codec
from exogym_core.stages.learner import StageLearner, StageRank
from exogym_core.stages.split import parts_of, pass_through
from netsim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.compute import Coding
    from exogym_core.stages.options import StagePass, Stages
    from exogym_core.stages.split import Boundary, Cut
    from exogym_core.strategy.base import StepContext, Strategy
    from netgym.planning.setting import Setting

__all__ = [
    "PlannedStages",
    "batch_of",
    "boundary_bytes",
    "bubble",
    "dtypes_in_half",
    "may_fit",
    "planned_stages",
    "stage_rows",
    "stages_text",
]


def batch_of(samples: Any, number: int, device: str = "meta") -> Any:
    """Batch of `number` samples without values, shaped as those of another batch."""
    return tree_map_only(
        Tensor, lambda each: torch.empty((number, *each.shape[1:]), dtype=each.dtype, device=device), samples
    )


def dtypes_in_half(stages: Stages, model: nn.Module, samples: Any) -> list[list[torch.dtype]]:
    """Dtypes of the tensors that enter each part of a model under `autocast: bf16`, without values.

    Autocast does not reach the meta device, but fake tensors of a CPU.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), autocast_to("bf16", torch.device("cpu")):
        parts = parts_of(without_values(model, "cpu"), stages.split, stages.num_stages)
        _, entering, _ = pass_through(parts, batch_of(samples, 1, "cpu"))
    return [[each.dtype for each in tensors] for tensors in entering]


class _Shares:
    """Clock of a plan: computing in shares of a step."""

    def __init__(self, rank: int, computing: Callable[[int, float], None]) -> None:
        self.rank, self.computing, self.step = rank, computing, 0

    def advance(self, seconds: float, work: tuple[Any, ...] = ()) -> None:
        """Compute this share of the step."""
        self.computing(self.step, seconds)


class _WholeStep:
    """Duration of a step in steps."""

    def seconds(self, step: int, samples: int | None = None) -> float:
        """Return 1: a step lasts one step."""
        return 1.0


class _PlannedLearner(StageLearner):
    """Learner whose passes compute nothing."""

    def _forward_pass(self, action: StagePass, batch: Any, samples: int, context: StepContext) -> float:
        boundaries, key = self._rank.cut.boundaries, action[1:]
        if action.stage:
            self._entered[key] = self._messages.receive(action, samples)
        if action.stage < len(boundaries) - 1:
            self._left[key] = tuple(
                each.empty(samples, self._device) for each in boundaries[action.stage + 1]
            )
        return 0.0

    def _backward_pass(self, action: StagePass, samples: int, weight: float) -> None:
        if action.stage < len(self._rank.cut.boundaries) - 1:
            self._messages.receive(action, samples)
        own = [each for part in self._rank.held.modules[action.stage] for each in part.parameters()]
        for parameter in reversed(own):
            if parameter.requires_grad:
                arrive(parameter)
        for tensor in self._entered.get(action[1:], ()):
            if tensor.is_floating_point():
                tensor.requires_grad_()
                tensor.grad = tensor.detach()


class PlannedStages(PlannedRank):
    """A rank with stages in a plan.

    Args:
        comm: connects all ranks.
        cut: of the model.
        model: whole, on the meta device; changed.
        strategy: its own, not set up.
        computing: called with (step, share of a worker's whole step).
        micro_batches: samples of each micro-batch of a step.
        max_steps, coding: as for `PlannedRank`.
    """

    def __init__(
        self,
        comm: Communicator,
        cut: Cut,
        model: nn.Module,
        strategy: Strategy,
        computing: Callable[[int, float], None],
        micro_batches: list[int],
        max_steps: int,
        coding: Coding | None = None,
        seed: int = 0,
    ) -> None:
        stage = StageRank(cut, comm, cut.held_by(model, comm.rank % cut.stages.count))
        self._clock = _Shares(comm.rank, computing)
        self._step_samples = StepSamples(
            [(None, samples) for samples in micro_batches], sum(micro_batches), sum(micro_batches)
        )
        super().__init__(stage.peers, stage.held.model, strategy, computing, max_steps, coding, seed)
        whole: Any = _WholeStep()
        stage.clip_together(strategy)
        self._is_asynchronous = cut.stages.is_asynchronous
        clock: Any = self._clock
        self._learner = _PlannedLearner(stage, clock, strategy, whole, None, self._coding)

    def _gradients(self, step: None, context: StepContext) -> float:
        self._clock.step = context.number
        return self._learner.gradients(self._step_samples, context)

    def take_alike(self, most: int, *, copies: bool) -> int:
        """Take one step whose requests are copied, as its messages are those of all steps between exchanges."""
        number = min(self.strategy.steps_to_exchange - 1, most)
        if number < 2 or self._is_asynchronous:  # messages of one step are waited for in another
            return 0
        self._take_copied(number)
        return number


def planned_stages(
    comm: Communicator,
    setting: Setting,
    strategy: Strategy,
    computing: Callable[[int, float], None],
    max_steps: int,
) -> PlannedStages:
    """A rank of a plan's worker, with a copy of the strategy."""
    mine = planned_copy(strategy)
    assert setting.cut is not None
    assert setting.stages is not None
    number = setting.stages.microbatches or 1
    micro_batches = [setting.batch_size // number] * number
    about = (copy.deepcopy(setting.model.model), mine, computing, micro_batches, max_steps)
    return PlannedStages(comm, setting.cut, *about, setting.compute.coding, setting.seed)


def boundary_bytes(cut: Cut, batch_size: int) -> list[tuple[int, int]]:
    """Bytes that go to and come from the next rank in a step, by the rank's place; of the last rank under `interleaved`
    those to and from the first one."""
    stages, device = cut.stages, torch.device("meta")
    number, codec = stages.microbatches or 1, boundary_codec(stages.codec)

    def size(boundary: Boundary) -> int:
        values = boundary.empty(batch_size // number, device)
        message = codec.message_like(values) if codec is not None and values.is_floating_point() else values
        return message.nbytes * number

    crossing = [
        (sum(map(size, entering)), sum(size(each) for each in entering if each.has_gradient))
        for entering in cut.boundaries[1:]
    ]
    of_ranks = [crossing[place :: stages.count] for place in range(stages.count)]
    return [(sum(to for to, _ in each), sum(back for _, back in each)) for each in of_ranks]


def bubble(cut: Cut) -> float:
    """Least idle share of a step, (p - 1) / (chunks m + p - 1) for p ranks and m micro-batches; 0 under `pipedream`."""
    stages = cut.stages
    number, chunks = stages.microbatches or 1, stages.num_stages // stages.count
    return 0.0 if stages.is_asynchronous else (stages.count - 1) / (chunks * number + stages.count - 1)


def stage_rows(
    setting: Setting, states: Sequence[Mapping[str, int]], seconds_per_step: float
) -> list[dict[str, Any]]:
    """Rows of a plan's stages, see `Plan.stages`; none without stages.

    Args:
        setting: of the plan.
        states: bytes by purpose of each rank of a worker.
        seconds_per_step: of the plan.
    """
    cut, topology = setting.cut, setting.topology
    if cut is None:
        return []
    count = cut.stages.count
    crossing, seconds = boundary_bytes(cut, setting.batch_size), setting.computing_seconds()
    hosts = setting.hosts[:count]
    rows = []
    for place, memory in enumerate(setting.memory_of_ranks(states)):
        (there, back), host, following = crossing[place], hosts[place], hosts[(place + 1) % count]
        traffic = sum(
            num_bytes * sum(topology.dollars_per_byte[link] for link in topology.route(*ends))
            for num_bytes, ends in ((there, (host, following)), (back, (following, host)))
        )
        rows.append(
            {
                "host": topology.hosts[host].name,
                "computing": sum(cut.shares[place::count]),
                "idle": max(1 - seconds[place] / seconds_per_step, 0.0) if seconds_per_step else 0.0,
                "staleness": cut.stages.staleness(place),
                "memory": memory["total"],
                "boundary_bytes": there + back,
                "boundary_dollars": traffic,
                "dollars_per_hour": setting.price_of(host),
            }
        )
    return rows


def may_fit(setting: Setting, states: Mapping[str, int]) -> bool:
    """False if a stage's part of a whole replica's states, and its activations, exceed a worker's memory.

    Args:
        setting: with stages.
        states: bytes by purpose of a replica on one rank.

    Raises:
        InputError: the model cannot be cut so.
    """
    cut = setting.cut
    assert cut is not None
    sizes, held = [0] * cut.stages.count, 0
    for name, parameter in setting.model.model.named_parameters():
        held += parameter.nbytes
        for place in cut.ranks_of(name):
            sizes[place] += parameter.nbytes
    parts = [{of: size * own // held for of, size in states.items()} for own in sizes]
    return setting.fits(parts) is not False


def stages_text(cut: Cut, batch_size: int) -> str:
    """Stages of a plan in a line: schedule, least idle share of a step, and bytes over each boundary both ways."""
    stages, most = cut.stages, max(map(sum, boundary_bytes(cut, batch_size)))
    return (
        f"{stages.count} ranks a worker, {stages.schedule}, {stages.microbatches or 1} micro-batches: idle for "
        f"{bubble(cut):.0%} of a step at least; up to {format_bytes(most)} a step cross a boundary"
    )
