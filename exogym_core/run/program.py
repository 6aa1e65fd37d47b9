"""Program of every rank of a `fit`: model and data checked, data dealt out, clock and loop made from the request."""

from __future__ import annotations

import copy
import inspect
import math
import traceback
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from exogym_core.checkpoints.writing import RankCheckpoints
from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
from exogym_core.communicator.simulated.simulation import World
from exogym_core.cost.compute import Coding, Compute, StepDurations
from exogym_core.cost.flops import count_flops
from exogym_core.cost.speeds import measure_seconds, with_measured_speeds
from exogym_core.data.batches import batch_reader, collate_of, move_batch
from exogym_core.data.partition import Partition
from exogym_core.data.samples import (
    ClientData,
    Draws,
    EpochOrder,
    OwnData,
    Reading,
    SharedData,
    Source,
    StreamedData,
    TorchOrder,
    dataset_length,
    digest_of,
    fingerprint,
    shared_out,
    stream_length,
)
from exogym_core.learner import TorchLearner, fitting_size
from exogym_core.meeting_place import whole_number_of
from exogym_core.names import visible
from exogym_core.plain import encode
from exogym_core.run.algorithms import choose_algorithms, first_rounds
from exogym_core.run.evaluator import Evaluation, Evaluator
from exogym_core.run.loop import Loop, RankOutcome, Server
from exogym_core.run.snapshots import EvaluationTimes, load_whole_state, named_tensors, passing_buffers
from exogym_core.run.stacked import Stack, StackedLearner, StackingError, backward_order
from exogym_core.stages.boundaries import boundary_trials
from exogym_core.stages.learner import StageLearner, StageRank
from exogym_core.stages.split import Cut
from exogym_core.strategy.optimizers import ensure_optim_spec, try_schedule
from exogym_core.strategy.trials import coding_trials, own_codec_trials
from exogym_core.workers.failures import own_frames
from exogym_core.workers.host import RankJob
from exogym_core.workers.processes.children import can_fork
from exogym_core.workers.rng import kept_rng, seed_device
from exogym_core.workers.spec import IN_ONE_PROCESS, num_cores
from exogym_core.workers.threads import intra_op_threads
from netsim.collectives.operations import OPERATIONS
from netsim.errors import InputError, NetsimError, about_option
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.checkpoints.checkpoint import StoredCheckpoint
    from exogym_core.communicator.base import Communicator
    from exogym_core.data.samples import StepSamples
    from exogym_core.events import Finding
    from exogym_core.run.recording import Recording
    from exogym_core.run.request import FitRequest
    from exogym_core.strategy.base import Strategy
    from exogym_core.workers.spec import WorkerSpec

__all__ = ["DataSets", "Program", "first_batch", "refuse_wrong_parts"]


def refuse_wrong_parts(model: object, **datasets: object) -> None:
    """Raise InputError for a wrong model or data set; `datasets` by argument's name, None for none."""
    if isinstance(model, type):
        raise InputError(f"fit: model is the class {model.__name__}; pass one: {model.__name__}()")
    if not isinstance(model, nn.Module):
        raise InputError(f"fit: model is a {type(model).__name__}; pass a torch.nn.Module")
    if all(not parameter.requires_grad for parameter in model.parameters()):
        raise InputError("fit: the model has no parameter to train; set requires_grad on some")
    for name, tensor in named_tensors(model).items():
        if is_lazy(tensor):
            what = "has no shape yet: run a batch through the model first"
        elif tensor.is_meta:
            what = "is on the meta device, without values: give it some (model.to_empty, then initialise)"
        elif tensor.is_quantized:
            what = "is quantised: train the model as it was before, and quantise it afterwards"
        elif tensor.layout is not torch.strided:
            what = "is sparse: keep it dense (to_dense), or as an attribute that is no buffer"
        elif 0 in [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]:
            what = "has several elements at one place of memory (expand): register a clone() of it"
        else:  # it can be copied, sent and kept
            continue
        raise InputError(f"fit: {type(model).__name__}: {name!r} {what}")
    for name, dataset in datasets.items():
        if isinstance(dataset, DataLoader):
            raise InputError(
                f"fit: {name} is a DataLoader; pass its dataset (the trainer makes batches of it)"
            )
        is_data = callable(dataset) or hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
        if dataset is not None and not is_data:
            raise InputError(f"fit: {name} is a {type(dataset).__name__}; pass a torch Dataset")


def _try_state(model: nn.Module, keeps: bool) -> None:
    """Copy the model and its state as ranks and the end of the run do.

    Args:
        model: of the run.
        keeps: checkpoints are to keep the state.

    Raises:
        InputError: it cannot be copied, or cannot load its state.
    """
    doing = "be copied, which each rank needs"
    try:
        copied = copy.deepcopy(model)
        doing = "give its state, and take it again, as at the end of a run"
        state = {**copied.state_dict(), **passing_buffers(copied)}
        others = {name: each for name, each in state.items() if not isinstance(each, torch.Tensor)}
        if any(isinstance(each, torch.dtype) for each in others.values()):
            raise TypeError("a module is quantised: train it as it was before, and quantise it afterwards")
        load_whole_state(copied, state | copy.deepcopy(others))
    except Exception as error:
        raise InputError(f"fit: {type(model).__name__} cannot {doing}: {_in_a_line(error)}") from error
    if keeps:
        encode(others, {}, f"fit: checkpoints: {type(model).__name__}.state_dict()")


@contextmanager
def first_batch(model: nn.Module | None = None) -> Iterator[None]:
    """Turn an exception of the user's data set or model into one line, with the traceback below it.

    Args:
        model: takes the batch, if one does.

    Raises:
        InputError: as described.
    """
    try:
        yield
    except NetsimError:
        raise
    except Exception as error:
        raise _of_first_batch(error, model) from None


def _of_first_batch(error: Exception, model: nn.Module | None) -> InputError:
    trace = "\n".join(own_frames(error))
    return InputError(
        f"fit: a first batch fails: {_in_a_line(error)} (a model takes a batch as the data set yields it, in one "
        f"argument, and returns its mean loss{_inputs_of(model)})\n{trace}"
    )


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _inputs_of(model: nn.Module | None) -> str:
    """Remedy for a model that takes parts of a batch by name, as Hugging Face's do; "" for others."""
    if model is None:
        return ""
    try:
        names = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # of a module that is no Python
        return ""
    if len(names) < 2:
        return ""
    listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"; this one takes {listed}: wrap it in a module whose forward(batch) returns model(**batch).loss"


class DataSets:
    """The data sets of a run, and which samples of them a rank sees.

    Args:
        request: of the run.
        train_dataset: one for all ranks, or a factory of each rank's own.
        val_dataset: for evaluations, or a factory of it.

    Attributes:
        is_shared: one training set is for all ranks.
        batches: samples of each rank in a step, once they are known; empty where all have as many.
    """

    def __init__(
        self,
        request: FitRequest,
        train_dataset: Dataset[Any] | Callable[..., Dataset[Any]],
        val_dataset: Dataset[Any] | Callable[..., Dataset[Any]] | None,
    ) -> None:
        self.request = request
        self._train_dataset, self._val_dataset = train_dataset, val_dataset
        self.is_shared = isinstance(train_dataset, Dataset) or not callable(train_dataset)
        self._own_dataset: Dataset[Any] | None = None  # rank 0's, if it had to be made to look at a batch
        self._order: EpochOrder | None = None
        self._draws: Draws | None = None  # of a shared training set
        self.batches: Sequence[int] = ()
        if request.batch_by_speed and (not self.is_shared or isinstance(train_dataset, IterableDataset)):
            raise InputError(
                "fit: batch_by_speed deals one data set with a length out to all workers, not streams, a Partition or "
                "the data sets of a factory: leave it out",
                about=("batch_by_speed",),
            )
        if request.sampler == "torch" and (not self.is_shared or isinstance(train_dataset, IterableDataset)):
            raise InputError(
                "fit: sampler 'torch' deals one dataset with a length out to all ranks, but "
                f"{'ranks read a stream' if self.is_shared else 'a factory makes each rank its own'}; leave sampler "
                "out",
                about=("sampler",),
            )
        if isinstance(train_dataset, Partition):
            if request.num_epochs is not None:
                raise InputError("fit: epochs of a Partition differ between workers; pass max_steps= alone")
            train_dataset.shares(request.num_nodes)  # refused before ranks start
        if not self.is_shared:
            return
        self._draws = Draws(train_dataset, request.seed)  # before anything is read
        if isinstance(train_dataset, IterableDataset):
            if (remark := _unused_loader(request)) is not None:
                warnings.warn(remark, UserWarning, stacklevel=7)
        else:
            length = dataset_length(train_dataset)
            self._order = (
                TorchOrder(length, request.shuffle, request.num_nodes)
                if request.sampler == "torch"
                else EpochOrder(length, request.shuffle, request.seed)
            )

    def sample_batch(self, size: int) -> tuple[Any, int]:
        """A batch of the first samples that rank 0 would read, at most so many, and their number."""
        dataset = self._train_dataset
        if not self.is_shared:
            if self._own_dataset is None:
                self._own_dataset = self._made(0, train=True)
            dataset = self._own_dataset
        collate = collate_of(self.request.dataloader_kwargs)[0]
        if isinstance(dataset, IterableDataset):
            samples = list(islice(dataset, size))
            if not samples:
                raise InputError("fit: the training set is empty")
            return (collate or default_collate)(samples), len(samples)
        number = min(size, dataset_length(dataset))
        return batch_reader(dataset, collate)(torch.arange(number)), number  # type: ignore[arg-type]

    def samples_a_step(self) -> int:
        """Most samples of rank 0 in a step, in which a batch larger than its data is what there is."""
        size, dataset = self.request.batch_size, self._train_dataset if self.is_shared else self._own_dataset
        if isinstance(dataset, IterableDataset):
            return size
        readers = self.request.num_nodes if self.is_shared else 1
        return min(size, math.ceil(dataset_length(dataset) / readers))

    @property
    def has_places(self) -> bool:
        """True if `samples_at` finds the samples of any rank and step."""
        return self._order is not None

    def samples_at(self, rank: int, step: int) -> StepSamples:
        """Samples of a rank in a step of a shared training set with a length, counted from 0."""
        source = self.shared_source(rank)
        source.sit_out(step)
        samples = source.next_step()
        assert samples is not None  # epochs have no end there
        return samples

    def fingerprint(self) -> str | None:
        """Digest of a training set for all ranks; None where each rank has its own."""
        if not self.is_shared or self._draws is None:
            return None
        with first_batch():
            return fingerprint(self._train_dataset, self._draws)  # type: ignore[arg-type]

    def validation(self) -> Any:
        """The validation set, made where it is a factory."""
        dataset = self._val_dataset
        if callable(dataset) and not isinstance(dataset, Dataset):
            return self._made(0, train=False)
        return dataset

    # --- samples of a rank ------------------------------------------------------------------------------

    def shared_source(self, rank: int) -> Source:
        """A rank's part of a training set for all."""
        dataset, reading = self._train_dataset, self._reading(rank, self._draws)
        if isinstance(dataset, IterableDataset):
            return StreamedData(dataset, reading)
        assert self._order is not None
        return SharedData(dataset, self._order, reading)  # type: ignore[arg-type]

    def _reading(self, rank: int, draws: Draws | None) -> Reading:
        request = self.request
        collate, drop_last, loader = collate_of(request.dataloader_kwargs)
        size = request.minibatch_size
        if size == request.batch_size:  # the whole batch
            size = max(self.batches, default=size)
        return Reading(
            rank, request.num_nodes, request.batch_size, size, drop_last, collate, loader, draws, self.batches
        )

    def source(self, comm: Communicator, remarks: list[str], *, keeps: bool) -> Source:
        """Samples of this rank; `keeps`: checkpoints must recognise its own data.

        Warnings for the user are added to `remarks`.
        """
        if self.is_shared:
            return self.shared_source(comm.rank)
        request = self.request
        if comm.world_size > request.num_nodes:  # servers read no data
            comm = comm.group(range(request.num_nodes))
        prepared = self._own_dataset if comm.rank == 0 else None
        dataset = prepared if prepared is not None else self._made(comm.rank, train=True)
        draws = Draws(dataset, request.seed)
        reading = self._reading(comm.rank, draws)
        if isinstance(self._train_dataset, Partition):
            order = EpochOrder(dataset_length(dataset), request.shuffle, request.seed, comm.rank + 1)
            sizes = self._train_dataset.sizes(request.num_nodes)
            source: Source = ClientData(dataset, order, sizes, reading)
        elif isinstance(dataset, IterableDataset):
            if comm.rank == 0 and (remark := _unused_loader(request)) is not None:
                remarks.append(remark)
            agreed_steps = self._agreed_steps(dataset, draws, comm)
            source = StreamedData(dataset, reading, is_own=True, agreed_steps=agreed_steps)
        else:
            order = EpochOrder(dataset_length(dataset), request.shuffle, request.seed, comm.rank + 1)
            lengths = self._agreed_lengths(dataset, draws, comm, remarks)
            source = OwnData(dataset, order, lengths, reading)
            has_whole_epoch = request.limit(source.steps_per_epoch) >= source.steps_per_epoch
            if has_whole_epoch and (line := source.left_out()) is not None:
                remarks.append(line)
        source.known_as = fingerprint(dataset, draws) if keeps else None
        return source

    def _agreed_lengths(
        self, dataset: Dataset[Any], draws: Draws, comm: Communicator, remarks: list[str]
    ) -> list[int]:
        """Numbers of samples of all ranks' own data sets; a remark where all begin with the same batch."""
        num_compared = min(self.request.batch_size, dataset_length(dataset))
        with draws.at(comm.rank):
            first = digest_of(dataset[index] for index in range(num_compared))
        with comm.off_clock():
            facts = comm.all_gather_object((dataset_length(dataset), first))
        if comm.world_size > 1 and len({digest for _, digest in facts}) == 1:
            remarks.append(
                "fit: the dataset factory made datasets that begin with the same batch on every rank; "
                "use its `rank` and `num_nodes` to give each rank its own samples"
            )
        return [length for length, _ in facts]

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
                f"{format_count(smallest, 'sample')}, too few for a step; return at least {request.batch_size}"
            )
        return int(steps)

    def _made(self, rank: int, *, train: bool) -> Dataset[Any]:
        """The dataset that the user's factory makes."""
        factory = self._train_dataset if train else self._val_dataset
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
        # Rank 0's may be made in the parent, the validation set by several ranks: equal in any case.
        with Draws(None, self.request.seed).at(rank, int(train)):
            dataset = factory(**arguments)
        if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
            raise InputError(
                f"fit: the {name} factory returned {type(dataset).__name__} for rank {rank}; return a Dataset"
            )
        return dataset


def _unused_loader(request: FitRequest) -> str | None:
    """Warning about loader arguments that a stream does not use; None without any."""
    loader = collate_of(request.dataloader_kwargs)[2]
    if not loader:
        return None
    return (
        f"fit: dataloader_kwargs has {', '.join(sorted(loader))}, which an iterable training set does not use: every "
        "rank reads it by itself; leave that out"
    )


@dataclass
class Program:
    """Program of every rank: `program(comm)`. Made once, read by all ranks, sent to processes whole."""

    request: FitRequest
    model: nn.Module
    train_dataset: Dataset[Any] | Callable[..., Dataset[Any]]
    val_dataset: Dataset[Any] | Callable[..., Dataset[Any]] | None
    compute: Compute | None = None
    step_flops: float = 0.0
    checkpoints: RankCheckpoints = field(default_factory=RankCheckpoints)
    is_tried: bool = False  # in the training that is retimed
    first_rounds: Recording | None = None  # for the choice of algorithms
    cut: Cut | None = None  # into stages
    data: DataSets = field(init=False)
    evaluates: bool = field(init=False)  # models
    # Of gradients, where replicas are stacked.
    backward_order: list[str] | None = field(default=None, init=False)
    _stack: Stack | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.train_dataset is None:
            raise InputError("fit: train_dataset is missing; pass a torch Dataset")
        refuse_wrong_parts(self.model, train_dataset=self.train_dataset, val_dataset=self.val_dataset)
        if not self.is_tried:
            _try_state(self.model, self.request.checkpoint_interval is not None)
        self.data = DataSets(self.request, self.train_dataset, self.val_dataset)
        self.evaluates = self.val_dataset is not None and self.request.val_size > 0
        strategy = self.request.strategy
        spec = ensure_optim_spec(strategy.optim_spec)
        if strategy.lr_scheduler is not None:
            schedule = (strategy.lr_scheduler, strategy.lr_scheduler_kwargs)
            try_schedule(spec, self.model, *schedule, self.known_max_steps() or 1)

    # --- before the run ------------------------------------------------------------------------------------

    def known_max_steps(self) -> int | None:
        """Number of steps; None where only the ranks can count them."""
        if self.data.is_shared:
            return self.request.limit(self.data.shared_source(0).steps_per_epoch)
        return self.request.max_steps if self.request.num_epochs is None else None

    def prepare(self) -> None:
        """Measure open settings: the micro-batch that fits, a step's operations or its seconds here."""
        request = self.request
        if request.finds_minibatch:
            request.take_minibatch(self._fitting_minibatch())
        if request.workers.kind == "stacked":
            self._decide_on_stack()
        self.compute = request.compute
        # Free work is not measured, and its speeds are not looked for.
        has_speeds = self.compute is not None and (
            self.compute.is_measured or self.compute.coding.speeds or self.compute.shared_cores is not None
        )
        if self.compute is not None and has_speeds and request.carrier.has_clock:
            shapes = [each.shape for each in self.model.parameters() if each.requires_grad]
            size = sum(map(math.prod, shapes)), request.num_nodes, request.device_of(0)
            self.compute = with_measured_speeds(
                self.compute,
                request.workers.intra_op_threads,
                chain(coding_trials(*size), boundary_trials(request.stages, request.device_of(0))),
                shapes,
                own_codec_trials(request.strategy, *size),
                request.device_of(0),
            )
        if request.stages is not None:
            device = request.device_of(0)
            with kept_rng(device), first_batch(self.model):
                batch, samples = self.data.sample_batch(request.minibatch_size)
                about = (self.model.to(device), move_batch(batch, device), samples, request.autocast)
                other = self.data.sample_batch(samples - 1) if samples > 1 else None
                other = other and (move_batch(other[0], device), other[1])
                with about_option("stages"):
                    self.cut = Cut.of(request.stages, *about, other)
            if request.waits_for_some and not self.data.has_places:
                raise InputError(
                    "fit: stages with waiting times need one training set with a length for all workers, of which a "
                    "rank reads an absent one's samples: pass a torch Dataset, or leave the waiting times out",
                    about=("stages",),
                )
        by_flops = self.compute is not None and self.compute.flops is not None
        measured = self.compute is not None and self.compute.measured is not None
        if not request.carrier.has_clock or not (by_flops or measured or request.workers.kind == "auto"):
            return
        with self._trial() as (model, batch, samples):
            counted = count_flops(model, batch)
            self.step_flops = float(counted.total) * (request.batch_size / samples)
            if by_flops:
                counted.warn_or_refuse()
            if measured:
                assert self.compute is not None
                with intra_op_threads(request.workers.intra_op_threads):
                    cores = self.compute.shared_cores
                    seconds = measure_seconds(model, batch, cores, request.autocast)
                self.compute = self.compute.with_seconds(seconds * self.data.samples_a_step() / samples)
        _ = self.durations  # an unknown device is reported now, not in a rank

    @contextmanager
    def _trial(self) -> Iterator[tuple[nn.Module, Any, int]]:
        """A copy of the model, a first batch and its number of samples, on rank 0's device."""
        device = self.request.device_of(0)
        with kept_rng(device), first_batch(self.model):
            batch, samples = self.data.sample_batch(self.request.minibatch_size)
            yield copy.deepcopy(self.model).to(device), move_batch(batch, device), samples

    def _decide_on_stack(self) -> None:
        """Stack the replicas, or warn with the reason for which ranks run in threads instead."""
        request, device = self.request, self.request.device_of(0)
        reason: str | None = None
        if request.stages is not None:
            reason = "ranks hold stages"
        elif request.strategy.clients.are_drawn:
            reason = "clients that are not drawn hold no replica"
        elif not request.carrier.has_clock:
            reason = "ranks over real sockets are processes"
        elif any(request.device_of(rank) != device for rank in range(request.num_nodes)):
            reason = "replicas are on several devices"
        elif request.autocast == "fp16":
            reason = "fp16 scales the loss of each replica by itself"
        else:
            with self._trial() as (model, batch, _):
                try:
                    self.backward_order = backward_order(model, batch, request.autocast)
                except StackingError as error:
                    reason = str(error)
        if reason is not None:
            warnings.warn(f"workers: stacked: ranks run in threads: {reason}", UserWarning, stacklevel=8)

    def workers(self) -> WorkerSpec:
        """Kind and number of worker processes, `auto` decided by the size of a step and their number."""
        request = self.request
        kind, devices = request.workers.kind, map(request.device_of, range(request.num_nodes))
        on_cuda = kind == "ray" and any(device.type == "cuda" for device in devices)
        steps = self.known_max_steps() if kind == "auto" and can_fork() else None
        return request.workers.settle(
            request.num_training, num_cores(), self.step_flops, num_steps=steps, on_cuda=on_cuda
        )

    def _fitting_minibatch(self) -> int:
        request, device = self.request, self.request.device_of(0)
        ranks = Counter(str(request.device_of(rank)) for rank in range(request.num_nodes))
        num_ranks = max(ranks.values())
        if request.launch != "local":
            num_ranks = whole_number_of("LOCAL_WORLD_SIZE", 1 if request.launch == "site" else num_ranks)
        with kept_rng(device), first_batch(self.model):
            return fitting_size(
                copy.deepcopy(self.model).to(device),
                lambda size: move_batch(self.data.sample_batch(size)[0], device),
                request.batch_size,
                num_ranks,
                precision=request.autocast,
            )

    def job(self) -> RankJob:
        """Job of the transport, once all is settled."""
        request = self.request
        return RankJob(
            num_ranks=request.num_ranks,
            topology=request.topology,
            placement=request.places,
            protocol=request.protocol,
            collectives=request.collectives,
            seed=request.seed,
            workers=self.workers(),
            trace=request.trace,
            timeout_seconds=request.timeout_seconds,
            compare_calls=request.compare_calls,
            shared_cores=None if self.compute is None else self.compute.shared_cores,
            choose=lambda: self.collectives,
        )

    @cached_property
    def strategy(self) -> Strategy:
        """Strategy of the ranks, not set up, which knows how long their steps take."""
        strategy = copy.deepcopy(self.request.strategy)
        facts = strategy.shared_state.run
        facts.step_seconds = tuple(each.mean_seconds for each in self.durations)
        facts.batches = self.batches
        return strategy

    def world(self, collectives: str | Mapping[str, str] | None) -> World:
        """World of the run, with algorithms of collectives as `fit` takes them."""
        request = self.request
        where = (request.topology, request.places, request.protocol, collectives)
        cores = None if self.compute is None else self.compute.shared_cores
        return World.build(request.num_ranks, *where, cores)

    @cached_property
    def collectives(self) -> Mapping[str, str]:
        """Algorithms of collectives by operation: the request's, and those that are fastest in whole rounds."""
        request = self.request
        world = self.world(request.collectives)
        if world.topology is None or world.protocol.library or request.stages is not None:
            return world.collectives
        if all(op in world.collectives for op, each in OPERATIONS.items() if not each.is_per_pair):
            return world.collectives
        if self.first_rounds is None:
            coding = None if self.compute is None else self.compute.coding
            about = (request.num_nodes, self.known_max_steps() or 1, coding, request.collectives)
            self.first_rounds = first_rounds(self.strategy, self.model, *about)
        if self.first_rounds is None:
            return world.collectives
        return choose_algorithms(self.first_rounds, world, [each.mean_seconds for each in self.durations])

    def refuse_fewer_steps(self, steps: int | None, resumed: StoredCheckpoint) -> None:
        """Raise InputError if a run of `steps` (None: not known yet) ends before the checkpoint it resumes from."""
        if steps is not None and steps < resumed.step:
            what = "max_steps" if steps == self.request.max_steps else "num_epochs"
            raise InputError(
                f"fit: {what} ends the run after {format_count(steps, 'step')}, but "
                f"{visible(resumed.path)} has done {resumed.step}; "
                "ask for at least as many, or resume from an earlier checkpoint",
                about=(what,),
            )

    # --- on a rank -----------------------------------------------------------------------------------------

    def __call__(self, comm: Communicator) -> RankOutcome:
        """Train on this rank, or serve."""
        remarks: list[str] = []
        role = self.role(comm, remarks)
        try:
            outcome = role.run()
        except Exception as error:
            is_known = isinstance(error, NetsimError) or not _inputs_of(self.model)
            passed = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            is_foreign = getattr(self.model.forward, "__code__", None) not in passed
            if isinstance(role, Server) or role.local_step or is_known or is_foreign:
                raise
            raise _of_first_batch(error, self.model) from None
        return replace(outcome, remarks=(*outcome.remarks, *remarks))

    def role(self, comm: Communicator, remarks: list[str]) -> Loop | Server:
        """Role of this rank, ready to run; warnings for the user are added to `remarks`."""
        request, compute, checkpoints = self.request, self.compute, self.checkpoints
        device = request.device_of(comm.rank)
        seed_device(device, request.seed, comm.rank)
        model, strategy = copy.deepcopy(self.model).to(device), copy.deepcopy(self.strategy)
        every = request.val_interval if self.evaluates else None
        settings: dict[str, Any] = {
            "seed": request.seed,
            "evaluations": EvaluationTimes(every, request.correlation_interval, request.val_seconds),
            "checkpoints": checkpoints,
            "is_copy": request.carrier.has_clock,
        }
        if comm.rank >= request.num_training:
            return Server(comm, model, strategy, **settings)
        stage: StageRank | None = None
        if self.cut is not None:
            assert request.stages is not None
            held = self.cut.held_by(model, comm.rank % request.stages.count)
            stage = StageRank(self.cut, comm, held, self.data.samples_at)
        self.data.batches = self.batches
        keeps = checkpoints.every is not None or checkpoints.resumed is not None
        data = self.data.source(comm if stage is None else stage.peers, remarks, keeps=keeps)
        data.num_epochs = request.num_epochs
        max_steps = request.limit(None if isinstance(data, ClientData) else data.steps_per_epoch)
        if checkpoints.resumed is not None:
            self.refuse_fewer_steps(max_steps, checkpoints.resumed)
        return Loop(
            comm,
            model,
            strategy,
            data,
            partial(self._learner, comm, model, strategy, stage),
            max_steps,
            stage=stage,
            until=request.until,
            coding=self._charged_coding,
            updates=compute.updates if compute is not None and compute.updates.speeds else None,
            **settings,
        )

    @property
    def _charged_coding(self) -> Coding | None:
        """Speeds of codecs; None where coding takes no time."""
        return self.compute.coding if self.compute is not None and self.compute.coding.speeds else None

    def _learner(
        self, comm: Communicator, model: nn.Module, strategy: Strategy, stage: StageRank | None
    ) -> TorchLearner:
        """Learner of a rank, made before its strategy is set up."""
        request, order = self.request, self.backward_order
        cost = self.durations[comm.rank] if self.durations else None
        if stage is not None:
            keeps = self.checkpoints.every is not None
            about = strategy, cost, request.autocast, self._charged_coding
            return StageLearner(stage, comm, *about, keeps=keeps)
        if order is None or not isinstance(comm, SimulatedCommunicator) or comm.turns is None:
            parts = model, comm, strategy.before_backward, cost, request.autocast
            return TorchLearner(*parts, strategy.overlaps_backward)
        if self._stack is None:  # of all ranks of this run
            sizes = request.num_nodes, request.autocast, comm.turns
            self._stack = Stack(model, *sizes, cuda_graphs=request.workers.cuda_graphs)
        order = order if strategy.overlaps_backward else None
        return StackedLearner(model, comm, strategy.before_backward, cost, self._stack, order)

    # --- evaluation ----------------------------------------------------------------------------------------

    def evaluator(self, known: Sequence[Finding]) -> Evaluator:
        """Evaluator of the run's models; `known` are findings of an earlier part."""
        request, workers = self.request, self.workers()
        device = request.device_of(0)
        make = (lambda: Evaluation(self.data.validation(), request, device)) if self.evaluates else None
        # Ranks that are threads of this process take turns with the evaluation; elsewhere it has its own thread.
        is_inline = request.carrier.has_clock and workers.kind in IN_ONE_PROCESS
        threads = None if is_inline else workers.intra_op_threads
        return Evaluator(self.model, device, request.strategy, make, threads, known)

    @cached_property
    def batches(self) -> Sequence[int]:
        """Samples of each worker in a step, by the speeds of their hosts; empty where all have as many."""
        request = self.request
        if not request.batch_by_speed:
            return ()
        speeds = [1 / seconds for seconds, _ in self._whole_steps()]
        return tuple(shared_out(request.batch_size * request.num_nodes, speeds))

    def _whole_steps(self) -> list[tuple[float, int]]:
        """Mean seconds of a step of `batch_size` samples of each worker, and a number of its host."""
        request, compute = self.request, self.compute
        assert compute is not None
        assert request.topology is not None
        hosts = request.topology.place(request.num_ranks, request.places)[: request.num_training]
        num_workers, first_rank, found = Counter(hosts), dict[int, int](), []
        for rank, place in enumerate(hosts):
            host = request.topology.hosts[place]
            seconds = compute.step_seconds(
                self.step_flops, host.device, f"host {host.name}: ", request.autocast is not None
            )
            if compute.shared_cores is None:  # else ranks compute on those, and not on the hosts' devices
                seconds *= host.slowdown(num_workers[place])  # servers compute nothing
            # A host is known by its first rank, so that renaming hosts changes no draw.
            found.append((seconds, first_rank.setdefault(place, rank)))
        return found

    @cached_property
    def durations(self) -> list[StepDurations]:
        """Virtual seconds of each worker's steps; none where computing is free. Available once `compute` is settled."""
        request, compute = self.request, self.compute
        durations: list[StepDurations] = []
        if compute is None or request.topology is None:
            return durations
        batch_size = None if compute.flops is None else request.batch_size
        for rank, (seconds, number) in enumerate(self._whole_steps()):
            if self.batches:
                batch_size = self.batches[rank]
                seconds *= batch_size / request.batch_size
            durations.append(StepDurations(compute, seconds, request.seed, number, batch_size))
        return durations
