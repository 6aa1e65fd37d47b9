"""What every rank of a `fit` runs: its data, model, clock and loop, made from the request."""

from __future__ import annotations

import copy
import importlib
import math
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from exogym_core.checkpoints.writing import RankCheckpoints
from exogym_core.cost.compute import Compute, StepDurations, intra_op_threads, measure_seconds
from exogym_core.cost.flops import count_flops
from exogym_core.data.batches import collate_of, move_batch
from exogym_core.names import visible
from exogym_core.ranks.rng import seed_device
from exogym_core.strategy.trials import coding_trials, own_codec_trials
from exogym_core.training.deposits import Looks
from exogym_core.training.evaluation import Evaluation, kept_rng
from exogym_core.training.learner import StepCost, TorchLearner
from exogym_core.training.loop import Loop, RankOutcome
from exogym_core.training.minibatch import fitting_size
from exogym_core.training.observer import Observer
from exogym_core.training.server import Server
from exogym_core.training.sources import DataSets
from exogym_core.training.trial import first_batch, refuse_wrong_parts
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch import nn
    from torch.utils.data import Dataset

    from exogym_core.checkpoints.checkpoint import StoredCheckpoint
    from exogym_core.communicator.base import Communicator
    from exogym_core.ranks.spec import WorkerSpec
    from exogym_core.training.request import FitRequest

__all__ = ["Program"]


@dataclass
class Program:
    """What every rank runs: `program(comm)`. Made once, read by all ranks, sent to processes whole."""

    request: FitRequest
    model: nn.Module
    train_dataset: Dataset[Any] | Callable[..., Dataset[Any]]
    val_dataset: Dataset[Any] | Callable[..., Dataset[Any]] | None
    compute: Compute | None = None
    step_flops: float = 0.0
    checkpoints: RankCheckpoints = field(default_factory=RankCheckpoints)
    data: DataSets = field(init=False)

    def __post_init__(self) -> None:
        if self.train_dataset is None:
            raise InputError("fit: train_dataset is missing; pass a torch Dataset")
        refuse_wrong_parts(self.model, train_dataset=self.train_dataset, val_dataset=self.val_dataset)
        self.data = DataSets(self.request, self.train_dataset, self.val_dataset)

    # --- before the run ------------------------------------------------------------------------------------

    def known_max_steps(self) -> int | None:
        """How many steps there will be, None where only the ranks find out."""
        if self.data.is_shared:
            return self.request.limit(self.data.shared_source(0).steps_per_epoch)
        return self.request.max_steps if self.request.num_epochs is None else None

    def prepare(self) -> None:
        """Find out what is left open: the micro-batch that fits, a step's operations or its seconds here."""
        if self.request.finds_minibatch:
            self.request = replace(
                self.request, minibatch_size=self._fitting_minibatch(), finds_minibatch=False
            )
            self.data.request = self.request
        request = self.request
        if all(request.device_of(rank).type == "cpu" for rank in range(request.num_nodes)):
            # Every optimizer imports torch's compiler at its first step, which takes a second and more: here
            # once, where processes for ranks are forked, and not in each of them.
            importlib.import_module("torch._dynamo")
        self.compute = request.compute
        if self.compute is not None and request.carrier.has_clock:
            shapes = [each.shape for each in self.model.parameters() if each.requires_grad]
            size = sum(map(math.prod, shapes)), request.num_nodes
            self.compute = self.compute.with_measured_work(
                request.workers.intra_op_threads,
                coding_trials(*size),
                shapes,
                own_codec_trials(request.strategy, *size),
            )
        by_flops = self.compute is not None and self.compute.kind == "flops"
        measured = self.compute is not None and self.compute.kind == "measured"
        if not request.carrier.has_clock or not (by_flops or measured or request.workers.kind == "auto"):
            return
        device = request.device_of(0)
        with kept_rng(device), first_batch(self.model):
            batch = move_batch(self.data.sample_batch(request.minibatch_size), device)
            model = copy.deepcopy(self.model).to(device)
            repeats = request.batch_size // request.minibatch_size
            counted = count_flops(model, batch)
            self.step_flops = float(counted.total) * repeats
            if by_flops:
                counted.warn_or_refuse()
            if measured:
                assert self.compute is not None
                with intra_op_threads(request.workers.intra_op_threads):
                    seconds = measure_seconds(model, batch, self.compute.at_once) * repeats
                self.compute = replace(
                    self.compute, kind="fixed", seconds=seconds * self.compute.factor, factor=1.0, at_once=1
                )
        for rank in range(request.num_nodes):
            self._durations(rank)  # an unknown device is told now, not in a rank

    def workers(self) -> WorkerSpec:
        """How the ranks are carried, `auto` decided by the size of a step."""
        affinity = getattr(os, "sched_getaffinity", None)
        num_cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
        request = self.request
        on_cuda = any(request.device_of(rank).type == "cuda" for rank in range(request.num_nodes))
        return request.workers.settle(request.num_nodes, num_cores, self.step_flops, on_cuda=on_cuda)

    def _fitting_minibatch(self) -> int:
        request, device = self.request, self.request.device_of(0)
        ranks = Counter(str(request.device_of(rank)) for rank in range(request.num_nodes))
        num_ranks = max(ranks.values())
        if request.is_apart or request.is_joining:
            num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1 if request.is_apart else num_ranks))
        with kept_rng(device), first_batch(self.model):
            return fitting_size(
                copy.deepcopy(self.model).to(device),
                lambda size: move_batch(self.data.sample_batch(size), device),
                request.batch_size,
                num_ranks,
                precision=request.autocast,
            )

    def refuse_fewer_steps_than(self, resumed: StoredCheckpoint) -> None:
        """Raise InputError if the run is known to end before the checkpoint that it is to go on from."""
        if (steps := self.known_max_steps()) is not None:
            self._refuse_fewer_steps(steps, resumed)

    def _refuse_fewer_steps(self, steps: int, resumed: StoredCheckpoint) -> None:
        if steps < resumed.step:
            what = "max_steps" if steps == self.request.max_steps else "num_epochs"
            raise InputError(
                f"fit: {what} ends the run after {steps} steps, but {visible(resumed.path)} has done {resumed.step}; "
                "ask for at least as many, or resume from an earlier checkpoint"
            )

    def code_roots(self) -> list[object]:
        """Inputs of the computation besides options and data: strategy, model, and how batches are made."""
        request = self.request
        return [request.strategy, self.model, request.accuracy, dict(request.dataloader_kwargs or {})]

    # --- on a rank -----------------------------------------------------------------------------------------

    def __call__(self, comm: Communicator) -> RankOutcome:
        """Train on this rank, or serve."""
        if comm.rank >= self.request.num_nodes:
            return self.server(comm).run()
        remarks: list[str] = []
        outcome = self.loop(comm, remarks).run()
        return replace(outcome, remarks=tuple(remarks))

    def server(self, comm: Communicator) -> Server:
        """A rank that computes nothing."""
        request, device = self.request, self.request.device_of(comm.rank)
        seed_device(device, request.seed, comm.rank)
        model = copy.deepcopy(self.model).to(device)
        strategy = copy.deepcopy(request.strategy)
        return Server(comm, model, strategy, self._looks(), seed=request.seed, checkpoints=self.checkpoints)

    def _looks(self) -> Looks:
        request = self.request
        every = request.val_interval if self.evaluates else None
        return Looks(every, request.correlation_interval, request.val_seconds)

    def loop(self, comm: Communicator, remarks: list[str]) -> Loop:
        """This rank's loop, ready to start; what the user should be warned of is added to `remarks`."""
        request, device = self.request, self.request.device_of(comm.rank)
        seed_device(device, request.seed, comm.rank)
        data = self.data.source(comm, remarks, keeps=self.checkpoints.home is not None)
        data.num_epochs = request.num_epochs
        max_steps = request.limit(data.steps_per_epoch)
        if self.checkpoints.resumed is not None:
            self._refuse_fewer_steps(max_steps, self.checkpoints.resumed)
        strategy, model = copy.deepcopy(request.strategy), copy.deepcopy(self.model).to(device)
        coding = self.compute.coding if self.compute is not None and self.compute.coding.speeds else None
        updates = self.compute.updates if self.compute is not None and self.compute.updates.speeds else None
        by_flops = self.compute is not None and self.compute.kind == "flops"
        cost = StepCost(self._durations(comm.rank), request.batch_size, scale_with_samples=by_flops)

        def make_learner() -> TorchLearner:
            return TorchLearner(
                model, comm, strategy.before_backward, cost, request.autocast, strategy.overlaps_backward
            )

        return Loop(
            comm,
            model,
            strategy,
            data,
            make_learner,
            max_steps,
            seed=request.seed,
            until=request.until,
            looks=self._looks(),
            checkpoints=self.checkpoints,
            coding=coding,
            updates=updates,
        )

    # --- who looks on --------------------------------------------------------------------------------------

    @property
    def evaluates(self) -> bool:
        """Whether models are judged."""
        return self.val_dataset is not None and self.request.val_size > 0

    def observer(
        self, tell: Callable[[Mapping[str, Any]], None], known: Sequence[Mapping[str, Any]]
    ) -> Observer:
        """What judges the run's models; `tell` is told of rows, `known` are those of an earlier part."""
        device = self.request.device_of(0)
        make = partial(self._evaluation, device) if self.evaluates else None
        return Observer(self.model, device, make, tell, known)

    def _durations(self, rank: int) -> StepDurations | None:
        request, compute = self.request, self.compute
        if compute is None or request.topology is None:
            return None
        hosts = request.topology.place(request.num_ranks, request.placement)
        host = request.topology.hosts[hosts[rank]]
        seconds = compute.step_seconds(
            self.step_flops, host.device, f"host {host.name}: ", request.autocast is not None
        )
        seconds *= host.slowdown(hosts[: request.num_nodes].count(hosts[rank]))  # servers compute nothing
        # A host is known by its first rank, so that renaming hosts changes no draw.
        return StepDurations(compute, seconds, request.seed, hosts.index(hosts[rank]))

    def _evaluation(self, device: torch.device) -> Evaluation:
        request = self.request
        return Evaluation(
            self.data.validation(),
            request.val_size,
            request.batch_size,
            request.seed,
            device,
            request.accuracy,
            collate_of(request.dataloader_kwargs)[0],
            request.autocast,
        )
