"""What every rank of a `fit` runs: its data, model, clock and loop, made from the request."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import warnings
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from exogym_core.checkpoints.checkpoint import RankCheckpoints, StoredCheckpoint
from exogym_core.cost.compute import Compute, StepDurations, intra_op_threads, measure_seconds
from exogym_core.cost.flops import count_flops
from exogym_core.data.batches import batch_reader, collate_of, move_batch
from exogym_core.data.draws import Draws
from exogym_core.data.fingerprint import digest_of, fingerprint
from exogym_core.data.samples import (
    EpochOrder,
    OwnData,
    SharedData,
    Source,
    StreamedData,
    stream_length,
)
from exogym_core.names import visible
from exogym_core.ranks.rng import seed_device
from exogym_core.strategy.trials import coding_trials
from exogym_core.training.deposits import Looks
from exogym_core.training.evaluation import Evaluation, kept_rng
from exogym_core.training.learner import StepCost, TorchLearner
from exogym_core.training.loop import Loop, RankOutcome
from exogym_core.training.minibatch import fitting_size
from exogym_core.training.observer import Observer
from exogym_core.training.server import Server
from exogym_core.training.trial import first_batch, refuse_wrong_parts
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

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
    own_dataset: Dataset[Any] | None = None  # rank 0's, if it had to be made to look at a batch
    checkpoints: RankCheckpoints = field(default_factory=RankCheckpoints)
    order: EpochOrder | None = field(init=False, default=None)
    draws: Draws | None = field(init=False, default=None)  # of a shared training set

    def __post_init__(self) -> None:
        if self.train_dataset is None:
            raise InputError("fit: train_dataset is missing; pass a torch Dataset")
        refuse_wrong_parts(self.model, train_dataset=self.train_dataset, val_dataset=self.val_dataset)
        if not self.is_shared:
            return
        self.draws = Draws(self.train_dataset, self.request.seed)  # before anything is read
        if isinstance(self.train_dataset, IterableDataset):
            if (remark := _unused_loader(self.request)) is not None:
                warnings.warn(remark, UserWarning, stacklevel=5)
        else:
            self.order = EpochOrder(_length(self.train_dataset), self.request.shuffle, self.request.seed)

    @property
    def is_shared(self) -> bool:
        """Whether there is one training set for all ranks."""
        return isinstance(self.train_dataset, Dataset) or not callable(self.train_dataset)

    # --- before the run ------------------------------------------------------------------------------------

    def known_max_steps(self) -> int | None:
        """How many steps there will be, None where only the ranks find out."""
        if self.is_shared:
            return self.request.limit(self._shared_source(0).steps_per_epoch)
        return self.request.max_steps if self.request.num_epochs is None else None

    def prepare(self) -> None:
        """Find out what is left open: the micro-batch that fits, a step's operations or its seconds here."""
        if self.request.finds_minibatch:
            self.request = replace(
                self.request, minibatch_size=self._fitting_minibatch(), finds_minibatch=False
            )
        request = self.request
        if all(request.device_of(rank).type == "cpu" for rank in range(request.num_nodes)):
            # Every optimizer imports torch's compiler at its first step, which takes a second and more: here
            # once, where processes for ranks are forked, and not in each of them.
            importlib.import_module("torch._dynamo")
        self.compute = request.compute
        if self.compute is not None and request.carrier.has_clock:
            self.compute = self.compute.with_measured_coding(request.workers.intra_op_threads, coding_trials)
        by_flops = self.compute is not None and self.compute.kind == "flops"
        measured = self.compute is not None and self.compute.kind == "measured"
        if not request.carrier.has_clock or not (by_flops or measured or request.workers.kind == "auto"):
            return
        device = request.device_of(0)
        with kept_rng(device), first_batch():
            batch = move_batch(self._sample_batch(request.minibatch_size), device)
            model = copy.deepcopy(self.model).to(device)
            repeats = request.batch_size // request.minibatch_size
            counted = count_flops(model, batch)
            self.step_flops = float(counted.total) * repeats
            if by_flops:
                counted.warn_or_refuse()
            if measured:
                assert self.compute is not None
                with intra_op_threads(request.workers.intra_op_threads):
                    seconds = measure_seconds(model, batch) * repeats
                self.compute = replace(
                    self.compute, kind="fixed", seconds=seconds * self.compute.factor, factor=1.0
                )
        for rank in range(request.num_nodes):
            self._durations(rank)  # an unknown device is told now, not in a rank

    def workers(self) -> WorkerSpec:
        """How the ranks are carried, `auto` decided by the size of a step."""
        affinity = getattr(os, "sched_getaffinity", None)
        num_cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
        return self.request.workers.settle(self.request.num_nodes, num_cores, self.step_flops)

    def _fitting_minibatch(self) -> int:
        request, device = self.request, self.request.device_of(0)
        ranks = Counter(str(request.device_of(rank)) for rank in range(request.num_nodes))
        num_ranks = max(ranks.values())
        if request.is_joining:
            num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
        with kept_rng(device), first_batch():
            return fitting_size(
                copy.deepcopy(self.model).to(device),
                lambda size: move_batch(self._sample_batch(size), device),
                request.batch_size,
                num_ranks,
                precision=request.autocast,
            )

    def _sample_batch(self, size: int) -> Any:
        dataset = self.train_dataset
        if not self.is_shared:
            if self.own_dataset is None:
                self.own_dataset = self._made(0, train=True)
            dataset = self.own_dataset
        collate = collate_of(self.request.dataloader_kwargs)[0]
        if isinstance(dataset, IterableDataset):
            samples = list(islice(dataset, size))
            return (collate or default_collate)(samples)
        return batch_reader(dataset, collate)(torch.arange(min(size, _length(dataset))))  # type: ignore[arg-type]

    def fingerprint(self) -> str | None:
        """What a training set for all ranks is known by; None where each rank has its own."""
        if not self.is_shared or self.draws is None:
            return None
        with first_batch():
            return fingerprint(self.train_dataset, self.draws)  # type: ignore[arg-type]

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
        return Server(comm, model, copy.deepcopy(request.strategy), self._looks(), seed=request.seed)

    def _looks(self) -> Looks:
        request = self.request
        every = request.val_interval if self.evaluates else None
        return Looks(every, request.correlation_interval, request.val_seconds)

    def loop(self, comm: Communicator, remarks: list[str]) -> Loop:
        """This rank's loop, ready to start; what the user should be warned of is added to `remarks`."""
        request, device = self.request, self.request.device_of(comm.rank)
        seed_device(device, request.seed, comm.rank)
        data = self._shared_source(comm.rank) if self.is_shared else self._own_source(comm, remarks)
        data.num_epochs = request.num_epochs
        max_steps = request.limit(data.steps_per_epoch)
        if self.checkpoints.resumed is not None:
            self._refuse_fewer_steps(max_steps, self.checkpoints.resumed)
        strategy, model = copy.deepcopy(request.strategy), copy.deepcopy(self.model).to(device)
        coding = self.compute.coding if self.compute is not None and self.compute.coding.speeds else None
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
        request, dataset = self.request, self.val_dataset
        if callable(dataset) and not isinstance(dataset, Dataset):
            dataset = self._made(0, train=False)
        return Evaluation(
            dataset,  # type: ignore[arg-type]
            request.val_size,
            request.batch_size,
            request.seed,
            device,
            request.accuracy,
            collate_of(request.dataloader_kwargs)[0],
            request.autocast,
        )

    def _shared_source(self, rank: int) -> Source:
        request = self.request
        collate, drop_last, loader = collate_of(request.dataloader_kwargs)
        if isinstance(self.train_dataset, IterableDataset):
            return StreamedData(
                self.train_dataset,
                rank,
                request.num_nodes,
                request.batch_size,
                request.minibatch_size,
                request.num_nodes,
                drop_last=drop_last,
                collate=collate,
                draws=self.draws,
            )
        assert self.order is not None
        return SharedData(
            self.train_dataset,  # type: ignore[arg-type]
            self.order,
            rank,
            request.num_nodes,
            request.batch_size,
            request.minibatch_size,
            drop_last=drop_last,
            collate=collate,
            loader=loader,
            draws=self.draws,
        )

    def _own_source(self, comm: Communicator, remarks: list[str]) -> Source:
        request = self.request
        collate, drop_last, loader = collate_of(request.dataloader_kwargs)
        prepared = self.own_dataset if comm.rank == 0 else None
        dataset = prepared if prepared is not None else self._made(comm.rank, train=True)
        sizes = (request.batch_size, request.minibatch_size)
        draws = Draws(dataset, request.seed)
        if isinstance(dataset, IterableDataset):
            if comm.rank == 0 and (remark := _unused_loader(request)) is not None:
                remarks.append(remark)
            source: Source = StreamedData(
                dataset,
                0,
                1,
                *sizes,
                comm.world_size,
                drop_last=drop_last,
                collate=collate,
                draws=draws,
                own=(comm.rank, self._agreed_steps(dataset, draws, comm)),
            )
            source.known_as = self._known_as(dataset, draws)
            return source
        num_compared = min(request.batch_size, _length(dataset))
        with draws.at(comm.rank):
            first = digest_of(dataset[index] for index in range(num_compared))
        with comm.off_clock():
            facts = comm.all_gather_object((_length(dataset), first))
        prints = {digest for _, digest in facts}
        if comm.world_size > 1 and len(prints) == 1:
            remarks.append(
                "fit: the dataset factory made datasets that begin with the same batch on every rank; "
                "use its `rank` and `num_nodes` to give each rank its own samples"
            )
        lengths = [length for length, _ in facts]
        source = OwnData(
            dataset,
            lengths,
            comm.rank,
            *sizes,
            request.shuffle,
            request.seed,
            drop_last=drop_last,
            collate=collate,
            loader=loader,
            draws=draws,
        )
        source.known_as = self._known_as(dataset, draws)
        return source

    def _known_as(self, dataset: Dataset[Any], draws: Draws) -> str | None:
        return fingerprint(dataset, draws) if self.checkpoints.home is not None else None

    def _agreed_steps(self, dataset: IterableDataset[Any], draws: Draws, comm: Communicator) -> int | None:
        """After how many steps an epoch ends for all ranks, each with a stream of its own; None: it need not end.

        Streams that do not say how long they are get counted, as far as the run can get, where epochs matter.
        """
        request, length = self.request, stream_length(dataset)
        if length is None and request.num_epochs is not None:
            most = request.limit(None) * request.batch_size
            with draws.at(comm.rank, 0):
                length = sum(1 for _ in islice(dataset, most))
        with comm.off_clock():
            lengths = comm.all_gather_object(length)
        if None in lengths:
            return None
        smallest = min(lengths)
        if not (steps := smallest // request.batch_size):
            raise InputError(
                f"fit: the iterable dataset that the factory made for rank {lengths.index(smallest)} has "
                f"{smallest} samples, too few for a step; return at least {request.batch_size}"
            )
        return int(steps)

    def _made(self, rank: int, *, train: bool) -> Dataset[Any]:
        """The dataset that the user's factory makes."""
        factory = self.train_dataset if train else self.val_dataset
        name = "train_dataset" if train else "val_dataset"
        arguments = {"rank": rank, "num_nodes": self.request.num_nodes, "train_dataset": train}
        assert callable(factory)
        try:
            inspect.signature(factory).bind(**arguments)
        except TypeError as error:
            raise InputError(
                f"fit: the {name} factory cannot be called ({error}); write f(rank, num_nodes, train_dataset)"
            ) from None
        except ValueError:  # no signature to look at
            pass
        # Rank 0's may be made in the parent, the validation set by several ranks: alike, whoever makes it.
        with Draws(None, self.request.seed).at(rank, int(train)):
            dataset = factory(**arguments)
        if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
            raise InputError(
                f"fit: the {name} factory returned {type(dataset).__name__} for rank {rank}; return a Dataset"
            )
        return dataset


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise InputError(
            f"fit: {type(dataset).__name__} has no len(); give it one, or derive it from IterableDataset"
        ) from None


def _unused_loader(request: FitRequest) -> str | None:
    """What to tell of loader arguments that a stream has no use for."""
    loader = collate_of(request.dataloader_kwargs)[2]
    if not loader:
        return None
    return (
        f"fit: dataloader_kwargs has {', '.join(sorted(loader))}, which an iterable training set does not use: every "
        "rank reads it by itself; leave that out"
    )
