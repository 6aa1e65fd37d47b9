"""Which values to exchange: the same on every rank from a shared seed, so that no index ever travels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from exogym_core.strategy.options.arguments import fraction
from exogym_core.strategy.parts.generators import shared_generator
from netsim.files.errors import InputError, unknown_name

__all__ = [
    "SELECTORS",
    "IndexSelector",
    "PartitionedIndexSelector",
    "RandomIndexSelector",
    "ShuffledSequentialIndexSelector",
    "selector_named",
]


class IndexSelector(ABC):
    """Chooses a share `p` of the values of a flat tensor, each time another.

    One's own selector overrides `get_indices`. Ranks must agree, so it may depend on the tensor's size, the
    iteration and `seed` (set before the first call), never on the values or on a process-wide generator.
    """

    def __init__(self, p: float) -> None:
        self.p = fraction(type(self).__name__, "p", p)
        self.seed = 0

    @abstractmethod
    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        """Indices into `param` (1-D), or a mask of its shape, for the 0-based `iteration`."""

    @property
    def num_partitions(self) -> int:
        """In how many iterations a selector that goes through all values has visited each once."""
        return math.ceil(1 / self.p)


class RandomIndexSelector(IndexSelector):
    """`round(p N)` values (at least one) drawn anew each time.

    The tensor is cut into that many slices and one value is drawn from each, so every value has the same
    chance, none is drawn twice, and drawing costs as little as what is drawn.
    """

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        """Sorted indices."""
        count = max(1, round(self.p * len(param)))
        # Place by place, not `arange * len // count`: that product overflows for models of 3e10 parameters.
        places = torch.arange(count + 1)
        whole, rest = divmod(len(param), count)
        bounds = places * whole + places * rest // count
        generator = shared_generator(self.seed, "random", iteration)
        draws = torch.rand(count, generator=generator, dtype=torch.float64)
        return bounds[:-1] + (draws * (bounds[1:] - bounds[:-1])).long()


class _Cycling(IndexSelector):
    """Goes through a permutation of all values in `num_partitions` pieces."""

    def __init__(self, p: float) -> None:
        super().__init__(p)
        self._last: dict[int, tuple[tuple[int, int], Tensor]] = {}  # size -> (seed, shuffle), permutation

    def _piece(self, param: Tensor, iteration: int, shuffle: int) -> Tensor:
        size, key = len(param), (self.seed, shuffle)
        if size not in self._last or self._last[size][0] != key:
            generator = shared_generator(self.seed, "permutation", shuffle)
            self._last[size] = (key, torch.randperm(size, generator=generator))
        pieces = self._last[size][1].tensor_split(self.num_partitions)
        return pieces[iteration % self.num_partitions]


class ShuffledSequentialIndexSelector(_Cycling):
    """All values in turn, in one shuffled order that stays."""

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        """The next piece of the permutation."""
        return self._piece(param, iteration, 0)


class PartitionedIndexSelector(_Cycling):
    """All values in turn, shuffled anew after each pass."""

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        """The next piece of this pass's permutation."""
        return self._piece(param, iteration, iteration // self.num_partitions)


#: Selector class by name.
SELECTORS: dict[str, type[IndexSelector]] = {
    "partitioned": PartitionedIndexSelector,
    "random": RandomIndexSelector,
    "shuffled_sequential": ShuffledSequentialIndexSelector,
}


def selector_named(selector: str | type[IndexSelector] | IndexSelector, p: float) -> IndexSelector:
    """A selector from a name, a class (both get `p`) or an instance (which keeps its own).

    Raises:
        UnknownNameError: no selector of that name.
    """
    if isinstance(selector, IndexSelector):
        return selector
    if isinstance(selector, type) and issubclass(selector, IndexSelector):
        return selector(p)
    if not isinstance(selector, str):
        raise InputError(f"index_selector={selector!r} must be a name, an IndexSelector or its class")
    name = selector.lower().replace("-", "_")
    if name not in SELECTORS:
        raise unknown_name("index_selector", selector, SELECTORS)
    return SELECTORS[name](p)
