"""Evaluator of a run: folds the snapshots of ranks as they come, evaluates models off the clock.

Parts are added up in rank order, in fp32, so that results do not depend on arrival order.
"""

from __future__ import annotations

import copy
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from exogym_core.communicator.exchange import accumulator_dtype
from exogym_core.data.batches import autocast_to, batch_reader, collate_of, move_batch
from exogym_core.data.samples import Draws, EpochOrder, dataset_length
from exogym_core.events import Correlated, Evaluated, EvaluationPoint
from exogym_core.learner import loss_and_count
from exogym_core.names import shown_value
from exogym_core.run.snapshots import load_named, whole_state
from exogym_core.strategy.parts.flat import pack_named, unpack_named
from exogym_core.workers.journal import SnapshotThread, SpillBuffer
from exogym_core.workers.rng import kept_rng, seed_device, seed_process
from netsim.errors import InputError
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from exogym_core.events import EvaluationPoint, Finding, Snapshot
    from exogym_core.run.request import FitRequest
    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.parts.flat import Layout
    from exogym_core.workers.journal import Held

__all__ = ["Evaluation", "Evaluator"]


_ORDER_STREAM = 1 << 32  # keeps the choice of evaluation samples apart from the training order


class Evaluation:
    """Losses on the same samples every time, with the same random numbers where a model draws some.

    Args:
        dataset: to take samples from: `val_size` of them, or all where it has fewer.
        request: of the run; its seed chooses the samples, the same on all ranks.
        device: where models are.

    Raises:
        InputError: there is nothing to take.
    """

    def __init__(self, dataset: Dataset[Any], request: FitRequest, device: torch.device) -> None:
        self._request, self._device = request, device
        # Every rank that judges reads for itself: what is drawn in doing so is the same on all of them.
        with kept_rng(device), Draws(dataset, request.seed).at(_ORDER_STREAM):
            self._batches = [(move_batch(batch, device), size) for batch, size in self._fixed(dataset)]
        self.num_samples = sum(samples for _, samples in self._batches)
        if not self.num_samples:
            raise InputError("fit: the validation set is empty; pass val_size=0 to go without one")

    def _fixed(self, dataset: Dataset[Any]) -> list[tuple[Any, int]]:
        size, most = self._request.batch_size, self._request.val_size
        collate = collate_of(self._request.dataloader_kwargs)[0]
        if isinstance(dataset, IterableDataset):
            samples = list(islice(dataset, most))
            pieces = [samples[start : start + size] for start in range(0, len(samples), size)]
            return [((collate or default_collate)(piece), len(piece)) for piece in pieces]
        order = EpochOrder(dataset_length(dataset), True, self._request.seed, _ORDER_STREAM)
        read = batch_reader(dataset, collate)
        return [(read(indices), len(indices)) for indices in torch.split(order.of(0)[:most], size)]

    def loss(self, model: nn.Module) -> float:
        """Mean loss in evaluation mode over the samples, or over what the model counts, each counting once."""

        def measure(batch: Any, samples: int) -> tuple[float, float]:
            loss, count = loss_and_count(model(batch), "evaluation")
            return float(loss), samples if count is None else count

        return self._mean(model, measure)

    def accuracy(self, model: nn.Module) -> float | None:
        """Fraction of the samples right, None where no measure was given."""
        measure = self._request.accuracy
        if measure is None:
            return None
        return self._mean(model, lambda batch, samples: (_fraction(measure, model, batch), samples))

    def _mean(self, model: nn.Module, measure: Callable[[Any, int], tuple[float, float]]) -> float:
        modes = [(module, module.training) for module in model.modules()]
        with (
            kept_rng(self._device),
            torch.no_grad(),
            autocast_to(self._request.autocast, self._device),
        ):
            seed_process(self._request.seed, _ORDER_STREAM)
            seed_device(self._device, self._request.seed, _ORDER_STREAM)
            model.eval()
            try:
                measured = [measure(batch, samples) for batch, samples in self._batches]
            finally:
                for module, training in modes:
                    module.training = training
        total = sum(value * weight for value, weight in measured if weight)
        return total / sum(weight for _, weight in measured)


def _fraction(measure: Callable[[nn.Module, Any], float], model: nn.Module, batch: Any) -> float:
    """Number that a user's measure returns for a batch."""
    found = measure(model, batch)
    try:
        return float(found)
    except (TypeError, ValueError):
        code = getattr(measure, "__code__", None)
        place = "" if code is None else f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
        raise InputError(
            f"fit: accuracy{place} returned {shown_value(found)}; return the fraction right, a number"
        ) from None


_CHUNK = 1 << 18  # values of all replicas that are compared at a time

# Distances up to which replicas count as equal: relative to their norm, and to their distance from the initial model.
# Real ranks on unlike processors round differently.
_ROUNDING = 1e-6
_ROUNDING_OF_UPDATES = 1e-3


Sections = Mapping[str, Sequence[Tensor]]
"""Flat tensors of a snapshot by section."""


@dataclass
class _Mean:
    """A mean that is built up in order; as long as all parts are equal there is nothing to add up."""

    spill: SpillBuffer
    held: Held | None = None  # the first part as long as all are equal, then their sum
    are_equal: bool = True
    count: int = 0

    def add(self, flats: Sequence[Tensor]) -> None:
        """Fold in the next part."""
        self.count += 1
        if self.held is None:
            self.held = self.spill.put(flats)
            return
        if self.are_equal:
            first = self.held.tensors
            if all(map(_same, first, flats)):
                return
            self.are_equal = False
            total = [flat.to(accumulator_dtype(flat.dtype), copy=True) for flat in first]
            for _ in range(self.count - 2):
                _add(total, first)
            self.spill.pop(self.held)
        else:
            total = self.spill.pop(self.held)
        _add(total, flats)
        self.held = self.spill.put(total)

    def take(self, like: Sequence[Tensor]) -> list[Tensor]:
        """The mean, in the dtypes of `like`; whole numbers are those of `like`."""
        assert self.held is not None
        total = self.spill.pop(self.held)
        if self.are_equal:
            return total
        return [
            (each.div_(self.count) if flat.is_floating_point() else flat).to(flat.dtype)
            for each, flat in zip(total, like, strict=True)
        ]


def _same(first: Tensor, second: Tensor) -> bool:
    # By bits: a replica that has become not a number is equal to itself.
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def _add(total: Sequence[Tensor], flats: Sequence[Tensor]) -> None:
    for each, flat in zip(total, flats, strict=True):
        if flat.is_floating_point():
            each.add_(flat)


@dataclass
class _PendingEvaluation:
    """Evaluation at one point, until all present ranks' parts have come."""

    point: EvaluationPoint
    what: list[str]
    present: Sequence[int]
    mean: _Mean
    waiting: dict[int, tuple[Snapshot, Held]] = field(default_factory=dict)  # by rank
    num_folded: int = 0
    first: tuple[Snapshot, Held] | None = None  # the lowest rank's
    losses: list[float] = field(default_factory=list)  # of the ranks' own models, in order
    accuracies: list[float] = field(default_factory=list)
    replicas: list[Held] = field(default_factory=list)  # to be compared
    version: int | None = None  # of the judged model, where a server reports it
    parts: dict[str, Tensor] = field(default_factory=dict)  # of the judged model


class Evaluator(SnapshotThread):
    """Evaluates a run's models: in the turn of the rank that deposits a snapshot, or in a thread of its own.

    Judged are: the lowest present rank's replica where all are equal, which is checked; the strategy's judged state
    where it differs from them, once a version; every rank's own otherwise, by the mean of the losses. The loss of the
    mean of all replicas is a diagnostic.

    No rank waits for it, in virtual or host time. Snapshots that wait for their turn, or for those of other ranks, lie
    in memory up to `memory_bytes` and beyond it in unnamed files: a rank that waited for room might owe a message to
    the one whose snapshot makes room, and over real transports the wait would be measured.

    Args:
        model: like the ranks'; copied.
        device: where it evaluates.
        strategy: of the run.
        make_evaluation: makes the evaluation at the first need; None: none.
        intra_op_threads: torch's threads for one operator in its own thread; they change last bits. None: no thread.
        known: findings of an earlier part of this run.

    Attributes:
        memory_bytes: of waiting snapshots.
        found: findings in the order of their points, for the run monitor to take out.
    """

    memory_bytes = 512 * 2**20

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        strategy: Strategy,
        make_evaluation: Callable[[], Evaluation] | None,
        intra_op_threads: int | None,
        known: Sequence[Finding] = (),
    ) -> None:
        self._spill = SpillBuffer(self.memory_bytes)
        super().__init__(self._take, self._spill, "evaluator", intra_op_threads)
        self._initial, self._device, self._strategy = model, device, strategy
        self._make, self._is_inline = make_evaluation, intra_op_threads is None
        self.found: deque[Finding] = deque()
        self._evaluation: Evaluation | None = None
        self._model: nn.Module | None = None
        # By point and first rank: servers are evaluated apart.
        self._pending: dict[tuple[EvaluationPoint, int], _PendingEvaluation] = {}
        self._early: dict[EvaluationPoint, list[Finding]] = {}  # held back for earlier points
        self._verdicts: dict[int, tuple[float, float | None]] = {}  # judged version -> loss, accuracy
        self._final: tuple[dict[str, Any], dict[str, Any]] | None = None
        self._known: set[EvaluationPoint] = set()
        for each in known:
            if isinstance(each, Evaluated):
                self._known.add(each.point)
                self._verdicts = {each.judged_version: (each.judged_loss, each.accuracy)}

    def take(self, rank: int, snapshot: Snapshot, tensors: Sequence[Tensor]) -> None:
        """Take a rank's snapshot; in a thread, its tensors may be reused afterwards.

        Raises:
            InputError: the strategy says that replicas are equal, and they are not.
            Exception: an earlier one of the thread.
        """
        self.raise_if_failed()
        if self._is_inline:
            self._take(rank, snapshot, tensors)
            self.num_taken[rank] += 1
        else:
            self.put(rank, snapshot, [tensor.clone() for tensor in tensors])

    def result(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Models at the end of the run, after the last snapshot: the mean of the present ranks', and the judged one.

        Whole-number and truth-value buffers, and the judged model where every rank has its own, are the lowest present
        rank's. Where a rank that was present has gone, the others' count.
        """
        self.stop()
        self.raise_if_failed()
        for _, pending in sorted(self._pending.items()):
            for rank in sorted(pending.waiting):
                self._fold(pending, rank)
            self._end(pending)
        self._release()
        assert self._final is not None
        return self._final

    def close(self) -> None:
        """Drop waiting snapshots, and end the thread."""
        self.failure = self.failure or RuntimeError("the run is over")
        self.stop()
        self._pending.clear()

    # --- parts as they come --------------------------------------------------------------------------------

    def _take(self, rank: int, snapshot: Snapshot, tensors: Sequence[Tensor]) -> None:
        if snapshot.point in self._known and "evaluate" in snapshot.what:
            return
        key = (snapshot.point, snapshot.present[0])
        pending = self._pending.get(key)
        if pending is None:
            about = (snapshot.point, snapshot.what, snapshot.present)
            pending = self._pending[key] = _PendingEvaluation(*about, _Mean(self._spill))
        if rank not in pending.present:
            return
        pending.waiting[rank] = (snapshot, self._spill.put(tensors))
        while (
            pending.num_folded < len(pending.present)
            and (turn := pending.present[pending.num_folded]) in pending.waiting
        ):
            self._fold(pending, turn)
        if pending.num_folded == len(pending.present):
            self._end(pending)

    def _fold(self, pending: _PendingEvaluation, rank: int) -> None:
        """Fold in the snapshot of a rank, in the order of ranks: results do not depend on who comes first."""
        snapshot, held = pending.waiting.pop(rank)
        pending.num_folded += 1
        sections = _sections(snapshot.layouts, held.tensors)
        replica = [*sections["parameters"], *sections["buffers"]]
        for part in ("judged", "judged_buffers"):
            if part in sections:
                pending.parts |= unpack_named(snapshot.layouts[part], sections[part])
        if not snapshot.is_replica:  # a server's, which has the judged model
            pending.version = snapshot.version
            self._spill.pop(held)
            return
        pending.mean.add(replica)
        if "correlate" in pending.what:
            pending.replicas.append(self._spill.put([flat for flat in replica if flat.is_floating_point()]))
        judged, is_first = self._strategy.judged, pending.first is None
        evaluation = self._evaluation_of(pending)
        if evaluation is not None and snapshot.is_worker and (is_first or judged == "own"):
            model = self._loaded(snapshot, sections)
            pending.losses.append(evaluation.loss(model))
            measured = evaluation.accuracy(model) if judged in ("own", "replica") else None
            if measured is not None:
                pending.accuracies.append(measured)
        if is_first:
            pending.first = (snapshot, held)
            return
        if judged == "replica":
            self._check_equal(pending, rank, snapshot, sections["parameters"])
        self._spill.pop(held)

    def _check_equal(
        self, pending: _PendingEvaluation, rank: int, snapshot: Snapshot, parameters: Sequence[Tensor]
    ) -> None:
        """Refuse to judge the lowest rank's replica for all where a rank that has done as many steps has another.

        Buffers may differ: running means are of each rank's own batches. So may last bits, between kinds of processors.
        """
        if pending.mean.are_equal:  # buffers included
            return
        assert pending.first is not None
        first, held = pending.first
        if first.version != snapshot.version:
            return  # evaluated at a virtual time, between two steps of one of them
        own = _sections(first.layouts, held.tensors)["parameters"]
        if all(map(_same, own, parameters)):
            return
        _, initial = pack_named(dict(self._initial.named_parameters()))
        rounding = _ROUNDING * _distance(own) + _ROUNDING_OF_UPDATES * _distance(own, initial)
        if _distance(own, parameters) > rounding:
            raise InputError(
                f"{type(self._strategy).__name__}: judged = 'replica' says that all ranks' models are equal, but after "
                f"{format_count(snapshot.num_steps, 'step')} rank {rank}'s is not rank {pending.present[0]}'s; "
                "write judged = 'own' to judge each rank's model, or judged = 'outer' with a judged_state() that "
                "returns the last average"
            )

    def _evaluation_of(self, pending: _PendingEvaluation) -> Evaluation | None:
        if "evaluate" not in pending.what or self._make is None:
            return None
        if self._evaluation is None:
            self._evaluation = self._make()
        return self._evaluation

    def _loaded(self, snapshot: Snapshot, sections: Sections) -> nn.Module:
        """The evaluator's model with these values."""
        if self._model is None:
            self._model = copy.deepcopy(self._initial).to(self._device)
        for part in ("parameters", "buffers"):
            load_named(self._model, unpack_named(snapshot.layouts[part], sections[part]))
        return self._model

    # --- all have come -------------------------------------------------------------------------------------

    def _end(self, pending: _PendingEvaluation) -> None:
        del self._pending[pending.point, pending.present[0]]
        assert pending.first is not None
        snapshot, held = pending.first
        sections = _sections(snapshot.layouts, self._spill.pop(held))
        found: list[Finding] = []
        version = snapshot.version if pending.version is None else pending.version
        evaluation = self._evaluation_of(pending)
        verdict: tuple[float, float | None] | None = None
        if evaluation is not None and self._strategy.judged in ("own", "replica"):
            accuracies = pending.accuracies
            accuracy = sum(accuracies) / len(accuracies) if accuracies else None
            verdict = sum(pending.losses) / len(pending.losses), accuracy
        elif evaluation is not None:
            if version not in self._verdicts:
                model = self._loaded_judged(pending, snapshot, sections)
                self._verdicts = {version: (evaluation.loss(model), evaluation.accuracy(model))}
            verdict = self._verdicts[version]
        is_last = "final" in pending.what
        judged = whole_state(self._loaded_judged(pending, snapshot, sections)) if is_last else {}
        means = pending.mean.take([*sections["parameters"], *sections["buffers"]])
        if evaluation is not None and verdict is not None:
            local = mean = None  # workers' models: not known where a server alone is evaluated
            if pending.losses:
                local = mean = pending.losses[0]
            if pending.losses and not pending.mean.are_equal:
                mean = evaluation.loss(self._loaded(snapshot, _sections(snapshot.layouts, means)))
            found.append(Evaluated(pending.point, local, mean, *verdict, version, snapshot.born))
        if "correlate" in pending.what:
            found.append(
                Correlated(pending.point, _correlation([self._spill.pop(held) for held in pending.replicas]))
            )
        if is_last:
            mean_state = whole_state(self._loaded(snapshot, _sections(snapshot.layouts, means)))
            self._final = {**mean_state, **snapshot.extra}, {**judged, **snapshot.extra}
        self._early.setdefault(pending.point, []).extend(found)
        self._release()

    def _loaded_judged(
        self, pending: _PendingEvaluation, snapshot: Snapshot, sections: Sections
    ) -> nn.Module:
        """The judged model: the lowest rank's replica, overwritten by the strategy's judged state."""
        model = self._loaded(snapshot, sections)
        load_named(model, {name: value for name, value in pending.parts.items() if not name.endswith("]")})
        with torch.no_grad():
            parameters = dict(model.named_parameters())
            for key, value in pending.parts.items():
                if key.endswith("]"):
                    name, _, place = key[:-1].rpartition("[")
                    start, stop = map(int, place.split(":"))
                    parameters[name].view(-1)[start:stop] = value.view(-1).to(parameters[name].device)
        return model

    def _release(self) -> None:
        """Report the findings before which no evaluation is pending."""
        for point in sorted(self._early):
            if any(other < point for other, _ in self._pending):
                return
            self.found += self._early.pop(point)


def _distance(first: Sequence[Tensor], second: Sequence[Tensor] | None = None) -> float:
    """The norm of the difference of flat tensors, or of the first ones alone."""
    pairs = zip(first, first if second is None else second, strict=True)
    return math.sqrt(
        sum(
            (a.double() if second is None else a.double() - b.double()).square().sum().item()
            for a, b in pairs
        )
    )


def _sections(layouts: Mapping[str, Layout], tensors: Sequence[Tensor]) -> Sections:
    """Flat tensors of a snapshot by section."""
    rest = iter(tensors)
    return {name: list(islice(rest, len(layout))) for name, layout in layouts.items()}


def _correlation(replicas: Sequence[Sequence[Tensor]]) -> float:
    """Mean Pearson correlation over all pairs of replicas: 1 where they agree, less as they drift apart.

    `nan` for a single replica, which has no pair, and for constant ones.

    Args:
        replicas: flat tensors of each, of equal sizes.
    """
    count = len(replicas)
    if count < 2:
        return math.nan

    def chunks() -> Iterator[Tensor]:
        """Values of all replicas piece by piece, [replica, value]."""
        for flats in zip(*replicas, strict=True):
            for pieces in zip(*(flat.split(max(1, _CHUNK // count)) for flat in flats), strict=True):
                yield torch.stack(pieces).double()

    sums = torch.zeros(count, dtype=torch.float64)
    for chunk in chunks():
        sums += chunk.sum(dim=1)
    means = (sums / max(sum(map(torch.numel, replicas[0])), 1))[:, None]
    products = torch.zeros(count, count, dtype=torch.float64)
    for chunk in chunks():
        centred = chunk - means
        products += centred @ centred.T
    deviations = products.diagonal().sqrt()
    matrix = (products / deviations[:, None] / deviations[None, :]).clip(-1.0, 1.0)
    pairs = torch.triu_indices(count, count, offset=1)
    return float(matrix[pairs[0], pairs[1]].mean())
