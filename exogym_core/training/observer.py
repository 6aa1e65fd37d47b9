"""The other side of looking on: takes what ranks deposit, folds it as it comes, judges, and tells rows.

No rank waits for it. What comes early is kept on a shelf that spills to a private file, so memory is bounded however
far ahead some ranks are. Parts are added up in rank order, in fp32, so that results do not depend on who comes first.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym_core.communicator.values import accumulator_dtype
from exogym_core.ranks.shelf import Shelf
from exogym_core.training.snapshot import load_named, pack, unpack, whole_state
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.training.evaluation import Evaluation
    from exogym_core.training.snapshot import Layout

__all__ = ["FinalModels", "Observer", "correlation_of"]

_MEMORY_BYTES = 64 * 2**20  # of deposits that have to wait, before a file is used
_CHUNK = 1 << 18  # values of all replicas that are compared at a time

# How far replicas may be from each other and still count as equal: relative to their norm, and to how far they have
# come from the initial model. Real ranks on unlike processors round differently.
_ROUNDING = 1e-6
_ROUNDING_OF_UPDATES = 1e-3


@dataclass
class FinalModels:
    """What a run leaves.

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

    def add(self, shelf: Shelf, flats: Sequence[Tensor]) -> None:
        """Fold in the next part."""
        self.count += 1
        if self.count == 1:
            self.first = shelf.put(flats)
            return
        if self.first is not None:
            first = shelf.get(self.first)
            if all(map(_same, first, flats)):
                return
            total = [flat.to(accumulator_dtype(flat.dtype), copy=True) for flat in first]
            for _ in range(self.count - 2):
                _add(total, first)
            shelf.drop(self.first)
            self.first = None
        else:
            assert self.total is not None
            total = shelf.pop(self.total)
        _add(total, flats)
        self.total = shelf.put(total)

    def take(self, shelf: Shelf, like: Sequence[Tensor]) -> list[Tensor]:
        """The mean, in the dtypes of `like`, whose whole numbers are kept."""
        if self.first is not None:
            return shelf.pop(self.first)
        assert self.total is not None
        total = shelf.pop(self.total)
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
class _Look:
    """One step that is looked at, until all present ranks' parts have come."""

    step: int
    what: list[str]
    present: list[int]
    judged: str
    waiting: dict[int, tuple[Mapping[str, Any], int]] = field(default_factory=dict)  # rank -> note, ticket
    num_folded: int = 0
    mean: _Mean = field(default_factory=_Mean)
    first: tuple[Mapping[str, Any], int] | None = None  # the lowest rank's
    losses: list[float] = field(default_factory=list)  # of the ranks' own models, in order
    accuracies: list[float] = field(default_factory=list)
    replicas: list[int] = field(default_factory=list)  # tickets, to be compared
    version: int | None = None  # of the judged model, where a server tells it
    parts: dict[str, Tensor] = field(default_factory=dict)  # of the judged model


class Observer:
    """Judges a run's models.

    Judged are: the lowest present rank's replica where all are equal, which is checked; what the strategy tells where
    it is apart from them, once a version; every rank's own otherwise, by the mean of the losses. The loss of the mean
    of all replicas is a diagnostic.

    Args:
        model: like the ranks'; copied.
        device: where it judges.
        make_evaluation: makes what judges, at the first need; None: nothing is judged.
        tell: told of every finished row, in order of steps: an evaluation or a correlation.
        known: rows of an earlier part of this run.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        make_evaluation: Callable[[], Evaluation] | None,
        tell: Callable[[Mapping[str, Any]], None],
        known: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._initial, self._device, self._make, self._tell = model, device, make_evaluation, tell
        self._evaluation: Evaluation | None = None
        self._model: nn.Module | None = None
        self._shelf = Shelf(_MEMORY_BYTES)
        self._looks: dict[tuple[int, int], _Look] = {}  # by step and first rank: servers are looked at apart
        self._rows: dict[int, list[dict[str, Any]]] = {}  # finished, held back for earlier steps
        self._verdicts: dict[int, tuple[float, float | None]] = {}  # judged version -> loss, accuracy
        self._final: FinalModels | None = None
        self._known = {row["step"] for row in known if "judged_loss" in row}
        for row in known:
            if "judged_loss" in row:
                self._verdicts = {row["judged_version"]: (row["judged_loss"], row["accuracy"])}

    @property
    def shelf(self) -> Shelf:
        """Where deposits wait."""
        return self._shelf

    def take(self, rank: int, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Take a rank's deposit, which is the observer's from now on.

        Raises:
            InputError: the strategy says that replicas are equal, and they are not.
        """
        if note["step"] in self._known and "evaluate" in note["what"]:
            return
        key = (note["step"], note["present"][0])
        look = self._looks.get(key)
        if look is None:
            look = _Look(note["step"], list(note["what"]), list(note["present"]), note["judged"])
            self._looks[key] = look
        if rank not in look.present:
            return
        look.waiting[rank] = (note, self._shelf.put(tensors))
        while look.num_folded < len(look.present) and look.present[look.num_folded] in look.waiting:
            self._fold(look, *look.waiting.pop(look.present[look.num_folded]))
        if look.num_folded == len(look.present):
            self._end(look)

    def finish(self) -> FinalModels:
        """No more deposits will come.

        Where a rank that was present has gone, the others' count.
        """
        for _, look in sorted(self._looks.items()):
            for rank in sorted(look.waiting):
                self._fold(look, *look.waiting.pop(rank))
            self._end(look)
        self._release()
        assert self._final is not None
        return self._final

    def close(self) -> None:
        """Give back what is held."""
        self._shelf.close()

    # --- parts as they come --------------------------------------------------------------------------------

    def _fold(self, look: _Look, note: Mapping[str, Any], ticket: int) -> None:
        look.num_folded += 1
        layouts: Mapping[str, Layout] = note["layouts"]
        sections = _sections(layouts, self._shelf.get(ticket))
        replica = [*sections["parameters"], *sections["buffers"]]
        if not note["is_replica"]:  # a server's, which tells the judged model
            for part in ("judged", "judged_buffers"):
                if part in sections:
                    look.parts |= unpack(layouts[part], sections[part])
            look.version = note["version"]
            self._shelf.drop(ticket)
            return
        look.mean.add(self._shelf, replica)
        if "correlate" in look.what:
            look.replicas.append(self._shelf.put([flat for flat in replica if flat.is_floating_point()]))
        if "judged" in sections:
            for part in ("judged", "judged_buffers"):
                look.parts |= unpack(layouts[part], sections[part])
        if look.first is None:
            look.first = (note, ticket)
            self._judge_replica(look, note, sections, accuracy=look.judged in ("own", "replica"))
            return
        if look.judged == "own":
            self._judge_replica(look, note, sections, accuracy=True)
        if look.judged == "replica":
            self._check_equal(look, note, sections["parameters"])
        self._shelf.drop(ticket)

    def _check_equal(self, look: _Look, note: Mapping[str, Any], parameters: Sequence[Tensor]) -> None:
        """Refuse to judge the lowest rank's replica for all where a rank that has done as many steps has another.

        Buffers may differ: running means are of each rank's own batches. So may last bits, between kinds of processors.
        """
        if look.mean.first is not None:  # all so far are equal, buffers included
            return
        assert look.first is not None
        first, ticket = look.first
        if (
            first["version"] != note["version"]
        ):  # evaluated at a virtual time, between two steps of one of them
            return
        own = _sections(first["layouts"], self._shelf.get(ticket))["parameters"]
        if all(map(_same, own, parameters)):
            return
        _, initial = pack(dict(self._initial.named_parameters()))
        rounding = _ROUNDING * _distance(own) + _ROUNDING_OF_UPDATES * _distance(own, initial)
        if _distance(own, parameters) > rounding:
            raise InputError(_unequal(look, note))

    def _judge_replica(
        self, look: _Look, note: Mapping[str, Any], sections: Mapping[str, Sequence[Tensor]], accuracy: bool
    ) -> None:
        evaluation = self._judge(look)
        if evaluation is None or not note["is_worker"]:
            return
        model = self._loaded(note, sections)
        look.losses.append(evaluation.loss(model))
        measured = evaluation.accuracy(model) if accuracy else None
        if measured is not None:
            look.accuracies.append(measured)

    def _judge(self, look: _Look) -> Evaluation | None:
        if "evaluate" not in look.what or self._make is None:
            return None
        if self._evaluation is None:
            self._evaluation = self._make()
        return self._evaluation

    def _loaded(self, note: Mapping[str, Any], sections: Mapping[str, Sequence[Tensor]]) -> nn.Module:
        """The observer's model with these values."""
        if self._model is None:
            self._model = copy.deepcopy(self._initial).to(self._device)
        for part in ("parameters", "buffers"):
            load_named(self._model, unpack(note["layouts"][part], sections[part]))
        return self._model

    # --- all have come -------------------------------------------------------------------------------------

    def _end(self, look: _Look) -> None:
        del self._looks[look.step, look.present[0]]
        assert look.first is not None
        note, ticket = look.first
        sections = _sections(note["layouts"], self._shelf.pop(ticket))
        rows: list[dict[str, Any]] = []
        verdict = self._verdict(look, note, sections)
        judged = whole_state(self._loaded_judged(look, note, sections)) if "final" in look.what else {}
        is_alike = look.mean.first is not None
        replica = [*sections["parameters"], *sections["buffers"]]
        means = look.mean.take(self._shelf, replica)
        evaluation = self._judge(look)
        if evaluation is not None and verdict is not None:
            local = mean = None  # workers' models: not known where a server alone is looked at
            if look.losses:
                local = mean = look.losses[0]
            if look.losses and not is_alike:
                mean = evaluation.loss(self._loaded(note, _cut(note["layouts"], means)))
            rows.append(
                {
                    "step": look.step,
                    "local_loss": local,
                    "global_loss": mean,
                    "judged_loss": verdict[0],
                    "accuracy": verdict[1],
                    "judged_version": note["version"] if look.version is None else look.version,
                    "judged_step": note["born"],
                }
            )
        if "correlate" in look.what:
            rows.append({"step": look.step, "correlation": self._correlation(look.replicas)})
        if "final" in look.what:
            extra = note["extra"]
            mean_state = whole_state(self._loaded(note, _cut(note["layouts"], means)))
            self._final = FinalModels({**mean_state, **extra}, {**judged, **extra})
        self._rows.setdefault(look.step, []).extend(rows)
        self._release()

    def _verdict(
        self, look: _Look, note: Mapping[str, Any], sections: Mapping[str, Sequence[Tensor]]
    ) -> tuple[float, float | None] | None:
        """Loss and accuracy of the judged model; None where nothing is judged."""
        evaluation = self._judge(look)
        if evaluation is None:
            return None
        if look.judged in ("own", "replica"):
            accuracies = look.accuracies
            mean = sum(accuracies) / len(accuracies) if accuracies else None
            return sum(look.losses) / len(look.losses), mean
        version = note["version"] if look.version is None else look.version
        if version not in self._verdicts:
            model = self._loaded_judged(look, note, sections)
            self._verdicts = {version: (evaluation.loss(model), evaluation.accuracy(model))}
        return self._verdicts[version]

    def _loaded_judged(
        self, look: _Look, note: Mapping[str, Any], sections: Mapping[str, Sequence[Tensor]]
    ) -> nn.Module:
        """The judged model: the lowest rank's replica, and over it what the strategy has told."""
        model = self._loaded(note, sections)
        whole = {name: value for name, value in look.parts.items() if not name.endswith("]")}
        load_named(model, whole)
        with torch.no_grad():
            parameters = dict(model.named_parameters())
            for key, value in look.parts.items():
                if key.endswith("]"):
                    name, _, place = key[:-1].rpartition("[")
                    start, stop = map(int, place.split(":"))
                    parameters[name].view(-1)[start:stop] = value.view(-1).to(parameters[name].device)
        return model

    def _release(self) -> None:
        """Tell the rows that nothing earlier is awaited for."""
        for step in sorted(self._rows):
            if any(other < step for other, _ in self._looks):
                return
            for row in self._rows.pop(step):
                self._tell(row)

    def _correlation(self, tickets: Sequence[int]) -> float:
        sizes = [len(flat) for flat in self._shelf.get(tickets[0])]

        def chunks() -> Any:
            step = max(1, _CHUNK // len(tickets))
            for index, size in enumerate(sizes):
                for start in range(0, size, step):
                    yield torch.stack(
                        [self._shelf.part(ticket, index, start, start + step).double() for ticket in tickets]
                    )

        value = correlation_of(chunks, len(tickets), sum(sizes))
        for ticket in tickets:
            self._shelf.drop(ticket)
        return value


def _unequal(look: _Look, note: Mapping[str, Any]) -> str:
    """Message for a strategy that claims equal replicas wrongly, with the line to write instead."""
    return (
        f"{note['strategy']}: judged = 'replica' says that all ranks' models are equal, but after "
        f"{note['num_steps']} steps rank {note['rank']}'s is not rank {look.present[0]}'s; write judged = 'own' to "
        "judge each rank's model, or judged = 'outer' with a judged_state() that returns the last average"
    )


def _distance(first: Sequence[Tensor], second: Sequence[Tensor] | None = None) -> float:
    """The norm of the difference of flat tensors, or of the first ones alone."""
    pairs = zip(first, first if second is None else second, strict=True)
    return math.sqrt(
        sum(
            (a.double() if second is None else a.double() - b.double()).square().sum().item()
            for a, b in pairs
        )
    )


def _sections(layouts: Mapping[str, Layout], tensors: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
    """A deposit's flat tensors by what they are."""
    sections, start = {}, 0
    for name, layout in layouts.items():
        sections[name] = tensors[start : start + len(layout)]
        start += len(layout)
    return sections


def _cut(layouts: Mapping[str, Layout], replica: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
    """Flat tensors of parameters and buffers, apart."""
    num = len(layouts["parameters"])
    return {"parameters": replica[:num], "buffers": replica[num:]}


def correlation_of(chunks: Callable[[], Any], num_replicas: int, num_values: int) -> float:
    """Mean Pearson correlation over all pairs of replicas: 1 where they agree, less as they drift apart.

    `nan` for a single replica, which has no pair, and for constant ones.

    Args:
        chunks: gives the replicas' values piece by piece, [replica, value] in double precision; called twice.
        num_replicas, num_values: how many there are in all.
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
