"""Selectors of the values to exchange, equal on all ranks by a shared seed, so that no index ever travels."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from exogym_core.strategy.options import Options, fraction, option
from exogym_core.strategy.parts.generators import shared_generator
from netsim.errors import InputError, about_option, unknown_name

__all__ = [
    "SELECTORS",
    "IndexSelector",
    "PartitionedIndexSelector",
    "RandomIndexSelector",
    "SelectionOptions",
    "ShuffledSequentialIndexSelector",
    "slice_bounds",
]


class IndexSelector(ABC):
    """Chooses a share `p` of the values of a flat tensor, each time another.

    A selector of your own overrides `get_indices`. Ranks must agree, so it may depend on the tensor's size, the
    iteration and `seed` (set before the first call), never on the values or on a process-wide generator.
    """

    def __init__(self, p: float) -> None:
        self.p = fraction(type(self).__name__, "p", p)
        self.seed = 0

    @abstractmethod
    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        """Indices into `param` (1-D), or a mask of its shape, for the 0-based `iteration`."""

    def places(self, flat: Tensor, iteration: int) -> Tensor:
        """Indices of `get_indices`, also where that returns a mask, on the device of `flat`."""
        chosen = self.get_indices(flat, iteration).to(flat.device).view(-1)
        return chosen.nonzero().view(-1) if chosen.dtype == torch.bool else chosen

    def count(self, size: int) -> int:
        """Number of values chosen of `size` at a time: `p` of them, at least one."""
        return max(1, round(self.p * size))


class RandomIndexSelector(IndexSelector):
    """`round(p N)` values (at least one) drawn again each time.

    The tensor, turned by a random number of places, is cut into that many slices and one value is drawn from
    each: none is drawn twice, drawing costs as little as what is drawn, and every value has the same chance, as
    turning brings it into short and long slices alike.
    """

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        """Draw the indices of iteration `iteration`, sorted."""
        size, count = len(param), self.count(len(param))
        if param.is_meta:
            return param.new_empty(count, dtype=torch.long)
        generator = shared_generator(self.seed, "random", iteration)
        draws = torch.rand(count, generator=generator, dtype=torch.float64)
        turn = torch.randint(size, (), generator=generator)
        bounds = slice_bounds(torch.arange(count + 1), size, count)
        chosen = bounds[:-1] + (draws * (bounds[1:] - bounds[:-1])).long()
        return ((chosen + turn) % size).sort().values


def slice_bounds(numbers: Tensor, size: int, count: int) -> Tensor:
    """Begin of the slices of these numbers, of `count` that `size` places are cut into evenly.

    >>> slice_bounds(torch.tensor([0, 1, 2, 3]), 10, 3).tolist()
    [0, 3, 6, 10]
    """
    whole, rest = divmod(size, count)  # `numbers * size` would overflow for billions of places
    return numbers * whole + numbers * rest // count


class _Cycling(IndexSelector):
    """Goes through a permutation of all values, `round(p N)` at a time, and round again."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self._last: dict[int, tuple[tuple[int, int], Tensor]] = {}  # size -> (seed, shuffle), permutation

    def _piece(self, param: Tensor, piece: int, shuffle: int) -> Tensor:
        size, key = len(param), (self.seed, shuffle)
        if param.is_meta:
            return param.new_empty(self.count(size), dtype=torch.long)
        if size not in self._last or self._last[size][0] != key:
            generator = shared_generator(self.seed, "permutation", shuffle)
            self._last[size] = (key, torch.randperm(size, generator=generator))
        count = self.count(size)
        first = piece * count % size
        return self._last[size][1][torch.arange(first, first + count) % size]


class ShuffledSequentialIndexSelector(_Cycling):
    """Choose all values in turn, in one shuffled order that repeats."""

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        """The next piece of the permutation."""
        return self._piece(param, iteration, 0)


class PartitionedIndexSelector(_Cycling):
    """Choose all values in turn, shuffled again after each pass; a pass repeats some values if p does not divide 1."""

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        """The next piece of this pass's permutation."""
        a_pass = -(-len(param) // self.count(len(param)))
        return self._piece(param, iteration % a_pass, iteration // a_pass)


#: Selector class by name.
SELECTORS: dict[str, type[IndexSelector]] = {
    "partitioned": PartitionedIndexSelector,
    "random": RandomIndexSelector,
    "shuffled_sequential": ShuffledSequentialIndexSelector,
}


class SelectionOptions(Options):
    """Options of averages over a share of the parameters.

    Args:
        p_sparta: the share averaged each time, above 0 and at most 1.
        index_selector: "random", "shuffled_sequential", "partitioned", or an IndexSelector or its class.
    """

    p_sparta: float = option(0.005, fraction)
    index_selector: str | type[IndexSelector] | IndexSelector = option("random")

    def check(self, where: str) -> None:
        """Refuse a selector that does not exist."""
        self.selector()

    def selector(self) -> IndexSelector:
        """The selector of averaged values: of a name or a class with `p_sparta`; an instance keeps its own share."""
        given = self.index_selector
        if isinstance(given, IndexSelector):
            return given
        if isinstance(given, type) and issubclass(given, IndexSelector):
            return given(self.p_sparta)
        with about_option("index_selector"):
            if not isinstance(given, str):
                raise InputError(f"index_selector={given!r} must be a name, an IndexSelector or its class")
            name = given.lower().replace("-", "_")
            if name not in SELECTORS:
                raise unknown_name("index_selector", given, SELECTORS)
        return SELECTORS[name](self.p_sparta)
