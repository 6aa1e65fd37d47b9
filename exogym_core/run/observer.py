"""Observer of a run: folds the snapshots of ranks as they come, evaluates models off the clock, reports rows.

No rank waits for it. Early snapshots are kept in a buffer that spills to private files, so memory is bounded however
far ahead some ranks are. Parts are added up in rank order, in fp32, so that results do not depend on arrival order.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from exogym_core.communicator.exchange import accumulator_dtype
from exogym_core.data.batches import autocast_to, batch_reader, collate_of, loss_and_count, move_batch
from exogym_core.data.samples import Draws, EpochOrder, dataset_length
from exogym_core.events import Correlated, Evaluated, EvaluationPoint, Grid
from exogym_core.names import shown_value
from exogym_core.run.snapshots import load_named, pack, unpack, whole_state
from exogym_core.workers.journal import SpillBuffer
from exogym_core.workers.rng import RandomStates, kept_rng, seed_device
from netsim.errors import InputError
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from exogym_core.events import Finding
    from exogym_core.run.request import FitRequest
    from exogym_core.run.snapshots import Layout

__all__ = ["Evaluation", "FinalModels", "Observer", "correlation_of"]


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
            RandomStates(self._request.seed, _ORDER_STREAM).load()
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
    """What a user's measure returns for a batch, as a number."""
    found = measure(model, batch)
    try:
        return float(found)
    except (TypeError, ValueError):
        code = getattr(measure, "__code__", None)
        place = "" if code is None else f" ({os.path.basename(code.co_filename)}:{code.co_firstlineno})"
        raise InputError(
            f"fit: accuracy{place} returned {shown_value(found)}; return the fraction right, a number"
        ) from None


_MEMORY_BYTES = 512 * 2**20  # of waiting snapshots, before a file is used
_CHUNK = 1 << 18  # values of all replicas that are compared at a time

# Distances up to which replicas count as equal: relative to their norm, and to their distance from the initial model.
# Real ranks on unlike processors round differently.
_ROUNDING = 1e-6
_ROUNDING_OF_UPDATES = 1e-3


Note = Mapping[str, Any]
"""Facts about a snapshot: its point, rank, model version and layouts."""

Sections = Mapping[str, Sequence[Tensor]]
"""Flat tensors of a snapshot by section."""


@dataclass
class FinalModels:
    """Models at the end of a run.

    Attributes:
        mean: state of the mean of the present ranks' models; whole-number and truth-value buffers are the lowest
            present rank's.
        judged: state of the model that could be shipped; where every rank has its own, the lowest present rank's.
    """

    mean: dict[str, Any]
    judged: dict[str, Any]


@dataclass
class _Mean:
    """A mean that is built up in order; as long as all parts are equal there is nothing to add up."""

    first: int | None = None  # tickets
    total: int | None = None
    count: int = 0

    def add(self, spill: SpillBuffer, flats: Sequence[Tensor]) -> None:
        """Fold in the next part."""
        self.count += 1
        if self.count == 1:
            self.first = spill.put(flats)
            return
        if self.first is not None:
            first = spill.get(self.first)
            if all(map(_same, first, flats)):
                return
            total = [flat.to(accumulator_dtype(flat.dtype), copy=True) for flat in first]
            for _ in range(self.count - 2):
                _add(total, first)
            spill.pop(self.first)
            self.first = None
        else:
            assert self.total is not None
            total = spill.pop(self.total)
        _add(total, flats)
        self.total = spill.put(total)

    def take(self, spill: SpillBuffer, like: Sequence[Tensor]) -> list[Tensor]:
        """The mean, in the dtypes of `like`; whole numbers are those of `like`."""
        if self.first is not None:
            return spill.pop(self.first)
        assert self.total is not None
        total = spill.pop(self.total)
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
    present: list[int]
    judged: str
    waiting: dict[int, tuple[Note, int]] = field(default_factory=dict)  # rank -> note, ticket
    num_folded: int = 0
    mean: _Mean = field(default_factory=_Mean)
    first: tuple[Note, int] | None = None  # the lowest rank's
    losses: list[float] = field(default_factory=list)  # of the ranks' own models, in order
    accuracies: list[float] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)  # tickets, to be compared
    version: int | None = None  # of the judged model, where a server reports it
    parts: dict[str, Tensor] = field(default_factory=dict)  # of the judged model


class Observer:
    """Judges a run's models.

    Judged are: the lowest present rank's replica where all are equal, which is checked; the strategy's judged state
    where it differs from them, once a version; every rank's own otherwise, by the mean of the losses. The loss of the
    mean of all replicas is a diagnostic.

    Args:
        model: like the ranks'; copied.
        device: where it judges.
        make_evaluation: makes the evaluation at the first need; None: none.
        report: called with every finding, in order of points.
        known: findings of an earlier part of this run.

    Attributes:
        spill: buffer of waiting snapshots.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        make_evaluation: Callable[[], Evaluation] | None,
        report: Callable[[Finding], None],
        known: Sequence[Finding] = (),
    ) -> None:
        self._initial, self._device, self._make, self._report = model, device, make_evaluation, report
        self._evaluation: Evaluation | None = None
        self._model: nn.Module | None = None
        self.spill = SpillBuffer(_MEMORY_BYTES)
        # By point and first rank: servers are evaluated apart.
        self._pending: dict[tuple[EvaluationPoint, int], _PendingEvaluation] = {}
        self._found: dict[EvaluationPoint, list[Finding]] = {}  # held back for earlier points
        self._verdicts: dict[int, tuple[float, float | None]] = {}  # judged version -> loss, accuracy
        self._final: FinalModels | None = None
        evaluated = [found for found in known if isinstance(found, Evaluated)]
        self._known = {found.point for found in evaluated}
        for found in evaluated[-1:]:
            self._verdicts = {found.judged_version: (found.judged_loss, found.accuracy)}

    def take(self, rank: int, note: Note, tensors: Sequence[Tensor]) -> None:
        """Take a rank's snapshot, which the observer owns from now on.

        Raises:
            InputError: the strategy says that replicas are equal, and they are not.
        """
        grid, number = note["point"]
        point = EvaluationPoint(Grid(grid), number)  # plain numbers, where they come from another process
        if point in self._known and "evaluate" in note["what"]:
            return
        key = (point, note["present"][0])
        pending = self._pending.get(key)
        if pending is None:
            pending = _PendingEvaluation(point, list(note["what"]), list(note["present"]), note["judged"])
            self._pending[key] = pending
        if rank not in pending.present:
            return
        pending.waiting[rank] = (note, self.spill.put(tensors))
        while (
            pending.num_folded < len(pending.present)
            and pending.present[pending.num_folded] in pending.waiting
        ):
            self._fold(pending, *pending.waiting.pop(pending.present[pending.num_folded]))
        if pending.num_folded == len(pending.present):
            self._end(pending)

    def finish(self) -> FinalModels:
        """Finish pending evaluations after the last snapshot.

        Where a rank that was present has gone, the others' count.
        """
        for _, pending in sorted(self._pending.items()):
            for rank in sorted(pending.waiting):
                self._fold(pending, *pending.waiting.pop(rank))
            self._end(pending)
        self._release()
        assert self._final is not None
        return self._final

    def close(self) -> None:
        """Release the memory and the spill file of deposits not yet read."""
        self.spill.close()

    # --- parts as they come --------------------------------------------------------------------------------

    def _fold(self, pending: _PendingEvaluation, note: Note, ticket: int) -> None:
        pending.num_folded += 1
        layouts: Mapping[str, Layout] = note["layouts"]
        sections = _sections(layouts, self.spill.get(ticket))
        replica = [*sections["parameters"], *sections["buffers"]]
        for part in ("judged", "judged_buffers"):
            if part in sections:
                pending.parts |= unpack(layouts[part], sections[part])
        if not note["is_replica"]:  # a server's, which has the judged model
            pending.version = note["version"]
            self.spill.pop(ticket)
            return
        pending.mean.add(self.spill, replica)
        if "correlate" in pending.what:
            pending.replicas.append(self.spill.put([flat for flat in replica if flat.is_floating_point()]))
        if pending.first is None:
            pending.first = (note, ticket)
            self._judge_replica(pending, note, sections, accuracy=pending.judged in ("own", "replica"))
            return
        if pending.judged == "own":
            self._judge_replica(pending, note, sections, accuracy=True)
        if pending.judged == "replica":
            self._check_equal(pending, note, sections["parameters"])
        self.spill.pop(ticket)

    def _check_equal(self, pending: _PendingEvaluation, note: Note, parameters: Sequence[Tensor]) -> None:
        """Refuse to judge the lowest rank's replica for all where a rank that has done as many steps has another.

        Buffers may differ: running means are of each rank's own batches. So may last bits, between kinds of processors.
        """
        if pending.mean.first is not None:  # all so far are equal, buffers included
            return
        assert pending.first is not None
        first, ticket = pending.first
        if first["version"] != note["version"]:
            return  # evaluated at a virtual time, between two steps of one of them
        own = _sections(first["layouts"], self.spill.get(ticket))["parameters"]
        if all(map(_same, own, parameters)):
            return
        _, initial = pack(dict(self._initial.named_parameters()))
        rounding = _ROUNDING * _distance(own) + _ROUNDING_OF_UPDATES * _distance(own, initial)
        if _distance(own, parameters) > rounding:
            raise InputError(
                f"{note['strategy']}: judged = 'replica' says that all ranks' models are equal, but after "
                f"{format_count(note['num_steps'], 'step')} rank {note['rank']}'s is not rank {pending.present[0]}'s; "
                "write judged = 'own' to judge each rank's model, or judged = 'outer' with a judged_state() that "
                "returns the last average"
            )

    def _judge_replica(
        self,
        pending: _PendingEvaluation,
        note: Note,
        sections: Sections,
        accuracy: bool,
    ) -> None:
        evaluation = self._judge(pending)
        if evaluation is None or not note["is_worker"]:
            return
        model = self._loaded(note, sections)
        pending.losses.append(evaluation.loss(model))
        measured = evaluation.accuracy(model) if accuracy else None
        if measured is not None:
            pending.accuracies.append(measured)

    def _judge(self, pending: _PendingEvaluation) -> Evaluation | None:
        if "evaluate" not in pending.what or self._make is None:
            return None
        if self._evaluation is None:
            self._evaluation = self._make()
        return self._evaluation

    def _loaded(self, note: Note, sections: Sections) -> nn.Module:
        """The observer's model with these values."""
        if self._model is None:
            self._model = copy.deepcopy(self._initial).to(self._device)
        for part in ("parameters", "buffers"):
            load_named(self._model, unpack(note["layouts"][part], sections[part]))
        return self._model

    # --- all have come -------------------------------------------------------------------------------------

    def _end(self, pending: _PendingEvaluation) -> None:
        del self._pending[pending.point, pending.present[0]]
        assert pending.first is not None
        note, ticket = pending.first
        sections = _sections(note["layouts"], self.spill.pop(ticket))
        found: list[Finding] = []
        verdict = self._verdict(pending, note, sections)
        judged = whole_state(self._loaded_judged(pending, note, sections)) if "final" in pending.what else {}
        is_alike = pending.mean.first is not None
        replica = [*sections["parameters"], *sections["buffers"]]
        means = pending.mean.take(self.spill, replica)
        evaluation = self._judge(pending)
        if evaluation is not None and verdict is not None:
            local = mean = None  # workers' models: not known where a server alone is looked at
            if pending.losses:
                local = mean = pending.losses[0]
            if pending.losses and not is_alike:
                mean = evaluation.loss(self._loaded(note, _sections(note["layouts"], means)))
            version = note["version"] if pending.version is None else pending.version
            found.append(Evaluated(pending.point, local, mean, *verdict, version, note["born"]))
        if "correlate" in pending.what:
            found.append(Correlated(pending.point, self._correlation(pending.replicas)))
        if "final" in pending.what:
            extra = note["extra"]
            mean_state = whole_state(self._loaded(note, _sections(note["layouts"], means)))
            self._final = FinalModels({**mean_state, **extra}, {**judged, **extra})
        self._found.setdefault(pending.point, []).extend(found)
        self._release()

    def _verdict(
        self, pending: _PendingEvaluation, note: Note, sections: Sections
    ) -> tuple[float, float | None] | None:
        """Loss and accuracy of the judged model; None where nothing is judged."""
        evaluation = self._judge(pending)
        if evaluation is None:
            return None
        if pending.judged in ("own", "replica"):
            accuracies = pending.accuracies
            mean = sum(accuracies) / len(accuracies) if accuracies else None
            return sum(pending.losses) / len(pending.losses), mean
        version = note["version"] if pending.version is None else pending.version
        if version not in self._verdicts:
            model = self._loaded_judged(pending, note, sections)
            self._verdicts = {version: (evaluation.loss(model), evaluation.accuracy(model))}
        return self._verdicts[version]

    def _loaded_judged(self, pending: _PendingEvaluation, note: Note, sections: Sections) -> nn.Module:
        """The judged model: the lowest rank's replica, overwritten by the strategy's judged state."""
        model = self._loaded(note, sections)
        whole = {name: value for name, value in pending.parts.items() if not name.endswith("]")}
        load_named(model, whole)
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
        for point in sorted(self._found):
            if any(other < point for other, _ in self._pending):
                return
            for found in self._found.pop(point):
                self._report(found)

    def _correlation(self, tickets: Sequence[int]) -> float:
        sizes = [len(flat) for flat in self.spill.get(tickets[0])]

        def chunks() -> Any:
            step = max(1, _CHUNK // len(tickets))
            for index, size in enumerate(sizes):
                for start in range(0, size, step):
                    yield torch.stack(
                        [self.spill.part(ticket, index, start, start + step).double() for ticket in tickets]
                    )

        value = correlation_of(chunks, len(tickets), sum(sizes))
        for ticket in tickets:
            self.spill.pop(ticket)
        return value


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


def correlation_of(chunks: Callable[[], Any], num_replicas: int, num_values: int) -> float:
    """Mean Pearson correlation over all pairs of replicas: 1 where they agree, less as they drift apart.

    `nan` for a single replica, which has no pair, and for constant ones.

    Args:
        chunks: gives the replicas' values piece by piece, [replica, value] in double precision; called twice.
        num_replicas, num_values: totals.
    """
    if num_replicas < 2:
        return float("nan")
    sums = torch.zeros(num_replicas, dtype=torch.float64)
    for chunk in chunks():
        sums += chunk.sum(dim=1)
    means = (sums / max(num_values, 1))[:, None]
    products = torch.zeros(num_replicas, num_replicas, dtype=torch.float64)
    for chunk in chunks():
        centred = chunk - means
        products += centred @ centred.T
    deviations = products.diagonal().sqrt()
    matrix = (products / deviations[:, None] / deviations[None, :]).clip(-1.0, 1.0)
    pairs = torch.triu_indices(num_replicas, num_replicas, offset=1)
    return float(matrix[pairs[0], pairs[1]].mean())
