"""Whole models of workers, put together of the parts that the ranks of a chain deposit."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from exogym_core.strategy.parts.flat import pack_named, unpack_named

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from exogym_core.events import EvaluationPoint, Snapshot
    from exogym_core.strategy.parts.flat import Layout

__all__ = ["Assembly", "whole_states"]


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
