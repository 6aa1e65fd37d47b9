"""Split of a model into stages, the part of it that a rank holds, and whole models put together of such parts."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from exogym_core.cost.operations import OperationWatch
from exogym_core.data.batches import autocast_to, device_of
from exogym_core.learner import loss_and_count
from exogym_core.stages.boundaries import kept_parameters
from exogym_core.strategy.parts.flat import pack_named, unpack_named
from exogym_core.workers.rng import kept_rng
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.events import EvaluationPoint, Snapshot
    from exogym_core.stages.options import Stages
    from exogym_core.strategy.parts.flat import Layout

__all__ = [
    "Assembly",
    "Boundary",
    "Cut",
    "HeldPart",
    "StagePart",
    "parts_of",
    "pass_through",
    "tensors_of",
    "whole_states",
]


class StagePart(nn.Module):
    """Part of a model: a function of some of its modules.

    Args:
        function: called with what the part before returns (the first part: with a batch; the last one: with the batch,
            too).
        modules: of the model, that the function uses.

    >>> layer = nn.Linear(2, 1)
    >>> StagePart(lambda batch: layer(batch[0]), layer)([torch.zeros(3, 2)]).shape
    torch.Size([3, 1])
    """

    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.held = nn.ModuleList(modules)
        self._function = function

    def forward(self, *values: Any) -> Any:
        """Values that the part hands to the next one, by the function of the split."""
        return self._function(*values)


def parts_of(model: nn.Module, split: Any, num_stages: int) -> Sequence[nn.Module]:
    """Parts of a model, in order: the first takes a batch, the others what the part before returns.

    The last one also takes the batch, and returns the loss. They come from a function `split(model)`, from the model's
    own method `pipeline_parts()`, or are the children of an `nn.Sequential`.

    Raises:
        InputError: there are none, or a function returns another number of them than of stages.
    """
    name = type(model).__name__
    own: Callable[[], Sequence[nn.Module]] | None = getattr(model, "pipeline_parts", None)
    if callable(split):
        parts = list(split(model))
        if len(parts) != num_stages:
            raise InputError(
                f"fit: stages.split returned {len(parts)} modules; return {num_stages}, one a stage"
            )
    elif own is not None:
        parts = list(own())
    elif isinstance(model, nn.Sequential):
        last = model[-1]
        parts = [*list(model)[:-1], StagePart(lambda value, batch: last(value), last)]
    else:
        raise InputError(
            f"fit: stages: {name} does not say how it is cut: pass stages={{'count': ..., 'split': f}} with "
            f"f(model) -> list of {num_stages} modules, or give it a method pipeline_parts()"
        )
    return parts


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """Tensors that one part hands to the next: one, or several in a tuple.

    Raises:
        InputError: it is something else.
    """
    tensors = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(each, Tensor) for each in tensors):
        raise InputError(
            f"fit: stages: a part returned a {type(value).__name__}; parts hand on a tensor, or a tuple of tensors"
        )
    return tensors


class Boundary(NamedTuple):
    """Tensor that crosses from one stage to the next.

    Attributes:
        shape: for `samples` samples.
        samples: of the batch that was measured.
        per_sample: what each dimension grows by with a sample.
        dtype: of its values.
        has_gradient: a gradient comes back.
    """

    shape: tuple[int, ...]
    samples: int
    per_sample: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    @classmethod
    def of(cls, tensor: Tensor, samples: int, other: Tensor | None, other_samples: int) -> Boundary:
        """Boundary of a tensor of a batch, and that of another size; without it the first dimension is the batch's."""
        shape = tuple(tensor.shape)
        if other is None:
            growth = [int(shape[:1] == (samples,)), *(0 for _ in shape[1:])][: len(shape)]
        else:
            differences = (a - b for a, b in zip(shape, other.shape, strict=True))
            growth = [each // (samples - other_samples) for each in differences]
        return cls(shape, samples, tuple(growth), tensor.dtype, tensor.requires_grad)

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Shape of this tensor of a micro-batch of `samples`."""
        more = samples - self.samples
        return tuple(size + more * growth for size, growth in zip(self.shape, self.per_sample, strict=True))

    def empty(self, samples: int, device: torch.device) -> Tensor:
        """Memory for this tensor of a micro-batch of `samples`."""
        return torch.empty(self.sizes(samples), dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Cut:
    """Cut of a model into stages.

    Attributes:
        stages: the options.
        edges: first part of each stage, and the number of parts.
        shares: of a whole step's operations, by stage.
        boundaries: tensors that enter each stage; none for the first.
        holders: by parameter and buffer, the stages that hold it.
        kept: dimension of the features by parameter that is kept in the codec's subspace.
    """

    stages: Stages
    edges: tuple[int, ...]
    shares: tuple[float, ...]
    boundaries: tuple[tuple[Boundary, ...], ...]
    holders: dict[str, tuple[int, ...]]
    kept: dict[str, int]

    @classmethod
    def of(
        cls,
        stages: Stages,
        model: nn.Module,
        batch: Any,
        samples: int,
        autocast: str | None,
        other: tuple[Any, int] | None = None,
    ) -> Cut:
        """Cut a model by a forward pass over a batch of `samples`, on a copy.

        Args:
            stages: the options.
            model: the whole one.
            batch: its argument.
            samples: of the batch.
            autocast: as for `fit`.
            other: a batch of another size, by which sizes at boundaries that grow with the samples are found.

        Raises:
            InputError: it cannot be cut so.
        """
        replica = copy.deepcopy(model)
        number = stages.num_stages
        parts = parts_of(replica, stages.split, number)
        device = device_of(replica)
        with kept_rng(device), autocast_to(autocast, device):
            value, entering, costs = pass_through(parts, batch)
        loss, count = loss_and_count(value, "fit: stages: a first batch", with_gradient=True)
        with kept_rng(device), autocast_to(autocast, device), torch.no_grad():
            whole, whole_count = loss_and_count(replica(batch), "fit: stages: a first batch")
            replica.eval()
            others: Sequence[Sequence[Tensor | None]] = [(None,) * len(each) for each in entering]
            other_samples = 0
            if other is not None and other[1] != samples:
                others, other_samples = pass_through(parts, other[0])[1], other[1]
        if count is not None or whole_count is not None:
            raise InputError(
                f"fit: stages: {type(model).__name__} returns a count with its loss, which only the last stage knows: "
                "return the mean loss over samples"
            )
        near = 1e-3 if autocast is None else 1e-2
        if not (whole.is_meta or torch.allclose(loss.detach(), whole, near, 1e-6, equal_nan=True)):
            raise InputError(
                f"fit: stages: the parts of {type(model).__name__} have loss {loss.item():.6g} in a first batch, and "
                f"the model {whole.item():.6g}: the parts must compute what its forward does, drawing in its order"
            )
        if stages.split == "bytes" or not any(costs):
            costs = [float(sum(each.nbytes for each in part.parameters())) for part in parts]
        # Parts without parameters belong to the one before.
        has_trained = [any(each.requires_grad for each in part.parameters()) for part in parts]
        trained = [place for place, has_some in enumerate(has_trained) if has_some]
        starts = [0, *trained[1:], len(parts)]
        if len(trained) < number:
            raise InputError(
                f"fit: stages: {len(trained)} parts of {type(model).__name__} have parameters to train, for {number} "
                f"stages: take at most {len(trained)}"
            )
        if callable(stages.split):
            edges = tuple(range(number + 1))
        else:
            sums = [sum(costs[a:b]) for a, b in pairwise(starts)]
            edges = tuple(starts[index] for index in _edges(sums, number))
        spans = list(pairwise(edges))
        total = sum(costs) or 1.0
        shares = tuple(sum(costs[a:b]) / total for a, b in spans)
        boundaries = tuple(
            tuple(Boundary.of(*each, other_samples) for each in zip(entering[a], repeat(samples), others[a]))
            for a, _ in spans
        )
        holders = _holders(replica, [parts[a:b] for a, b in spans])
        kept = kept_parameters(stages.codec, replica, boundaries)
        return cls(stages, edges, shares, boundaries, holders, kept)

    def with_dtypes(self, entering: Sequence[Sequence[torch.dtype]]) -> Cut:
        """The cut with these dtypes of the tensors that enter each stage."""
        boundaries = tuple(
            tuple(boundary._replace(dtype=dtype) for boundary, dtype in zip(boundaries, dtypes, strict=True))
            for boundaries, dtypes in zip(self.boundaries, entering, strict=True)
        )
        return replace(self, boundaries=boundaries)

    def held_by(self, model: nn.Module, position: int) -> HeldPart:
        """The part of a replica that the rank at `position` of a chain holds; the rest of `model` is dropped."""
        count = self.stages.count
        parts = parts_of(model, self.stages.split, self.stages.num_stages)
        own = range(position, self.stages.num_stages, count)
        modules = {stage: list(parts[self.edges[stage] : self.edges[stage + 1]]) for stage in own}
        mine = {id(each) for own_parts in modules.values() for part in own_parts for each in _values(part)}
        for module in model.modules():
            for values in (module._parameters, module._buffers):
                values.update({name: None for name, each in values.items() if id(each) not in mine})
            if getattr(module, "num_batches_tracked", 0) is None:
                # A state without the number is given one otherwise when a checkpoint is loaded.
                vars(module)["track_running_stats"] = False
        return HeldPart(model, modules)

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Positions of the ranks of a chain that hold this parameter."""
        return tuple(sorted({stage % self.stages.count for stage in self.holders[name]}))


class HeldPart(NamedTuple):
    """Part of a model that a rank holds.

    Attributes:
        model: the whole model without what other ranks hold, so that names stay as they are.
        modules: parts by stage, in order.
    """

    model: nn.Module
    modules: dict[int, list[nn.Module]]


def pass_through(parts: Sequence[nn.Module], batch: Any) -> tuple[Any, list[tuple[Tensor, ...]], list[float]]:
    """Pass a batch through all parts: the output, the tensors that enter each part but the first, its operations."""
    counted = [0.0] * len(parts)
    entering: list[tuple[Tensor, ...]] = []
    value: Any = batch
    for index, part in enumerate(parts):
        entering.append(tensors_of(value) if index else ())

        def count(each: Any, index: int = index) -> None:
            counted[index] += each.flops

        with OperationWatch(count, lambda name: None):
            value = part(value, batch) if index == len(parts) - 1 else part(value)
    return value, entering, counted


def _holders(model: nn.Module, stages: Sequence[Sequence[nn.Module]]) -> dict[str, tuple[int, ...]]:
    """Stages that hold each parameter and buffer of a model.

    Args:
        model: the whole one.
        stages: parts of each stage.

    Raises:
        InputError: no stage holds one, or a stage holds one that is not the model's.
    """
    holders: dict[str, tuple[int, ...]] = {}
    named = [*model.named_parameters(), *model.named_buffers()]
    held = [{id(each) for part in parts for each in _values(part)} for parts in stages]
    for name, value in named:
        holders[name] = tuple(stage for stage, ids in enumerate(held) if id(value) in ids)
        if not holders[name]:
            raise InputError(f"fit: stages: no stage holds {name!r}: the split leaves it out")
    if set().union(*held) - {id(value) for _, value in named}:
        raise InputError(
            "fit: stages: a stage holds parameters that are not the model's: split its own modules"
        )
    return holders


def _values(part: nn.Module) -> list[Tensor]:
    return [*part.parameters(), *part.buffers()]


def _edges(costs: Sequence[float], number: int) -> tuple[int, ...]:
    """Edges of `number` runs of parts such that the most costly run costs least; of equal ones the first."""
    sums = [0.0, *accumulate(costs)]
    best: list[list[tuple[float, tuple[int, ...]]]] = [[(cost, (0,)) for cost in sums]]
    for run in range(1, number):
        row: list[tuple[float, tuple[int, ...]]] = []
        for end in range(len(sums)):
            options = [
                (max(best[-1][start][0], sums[end] - sums[start]), (*best[-1][start][1], start))
                for start in range(run, end)
            ]
            row.append(min(options, default=(float("inf"), ())))
        best.append(row)
    return (*best[-1][-1][1], len(costs))


class Assembly:
    """Joins the snapshots of the ranks of a worker, and passes them on as its own.

    Args:
        take: gets a worker's number, the snapshot of its whole model and the tensors.
        model: the whole model, for the order of its names.
        count: ranks of a worker.
    """

    def __init__(
        self, take: Callable[[int, Snapshot, Sequence[Tensor]], None], model: nn.Module, count: int
    ) -> None:
        self._take, self._count = take, count
        named = [*model.named_parameters(), *model.named_buffers()]
        self._order = {name: place for place, (name, _) in enumerate(named)}
        self._parts: dict[
            tuple[int, EvaluationPoint], dict[int, tuple[Snapshot, dict[str, dict[str, Tensor]]]]
        ] = {}

    def take(self, rank: int, snapshot: Snapshot, tensors: Sequence[Tensor]) -> None:
        """Take the snapshot of a rank; its tensors may be reused afterwards."""
        worker, position = divmod(rank, self._count)
        # Of ranks in order: some may be absent at other positions.
        worker = list(snapshot.present).index(worker)
        rest = iter(tensors)
        sections = {
            name: {
                key: value.clone()
                for key, value in unpack_named(layout, list(islice(rest, len(layout)))).items()
            }
            for name, layout in snapshot.layouts.items()
        }
        parts = self._parts.setdefault((worker, snapshot.point), {})
        parts[position] = (snapshot, sections)
        if len(parts) < self._count:
            return
        del self._parts[worker, snapshot.point]
        layouts: dict[str, Layout] = {}
        flats: list[Tensor] = []
        for name in snapshot.layouts:
            joined: dict[str, Tensor] = {}
            for number in sorted(parts, reverse=True):
                joined |= parts[number][1].get(name, {})
            order = sorted(joined, key=lambda key: self._order[key.partition("[")[0]])
            layouts[name], packed = pack_named({key: joined[key] for key in order})
            flats += packed
        extra = {key: value for each, _ in parts.values() for key, value in each.extra.items()}
        present = range(len(snapshot.present))
        self._take(worker, snapshot._replace(layouts=layouts, extra=extra, present=present), flats)


def whole_states(states: Sequence[Mapping[str, Any]], count: int) -> list[dict[str, Any]]:
    """State of each worker's model, of the states of its ranks."""
    workers = (states[first : first + count] for first in range(0, len(states), count))
    return [dict(chain.from_iterable(state.items() for state in reversed(ranks))) for ranks in workers]
