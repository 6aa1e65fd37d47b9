"""Which samples each rank sees at each step: disjoint, complete, seeded, the same number of steps everywhere."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from exogym_core.data.batches import as_tuple, batch_reader
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["EpochOrder", "OwnData", "SharedData", "Source", "Step", "StreamedData"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank computes on in one step.

    Attributes:
        micro_batches: the batch in pieces, each with its number of samples.
        samples: of this rank.
        total_samples: of all ranks.
    """

    micro_batches: list[tuple[Any, int]]
    samples: int
    total_samples: int


class EpochOrder:
    """The order of a dataset's samples in each epoch; ranks of one process share it.

    Args:
        num_samples: in the dataset.
        shuffle: a new random order each epoch, else the dataset's own.
        seed: any whole numbers.
    """

    def __init__(self, num_samples: int, shuffle: bool, *seed: int) -> None:
        self.num_samples, self.shuffle, self._seed = num_samples, shuffle, seed
        self._kept: OrderedDict[int, Tensor] = OrderedDict()

    def of(self, epoch: int) -> Tensor:
        """Indices in the order of `epoch`."""
        if not self.shuffle:
            epoch = 0
        if epoch not in self._kept:
            if len(self._kept) > 1:  # ranks are at most one epoch apart in a run that communicates
                self._kept.popitem(last=False)
            self._kept[epoch] = self._draw(epoch) if self.shuffle else torch.arange(self.num_samples)
        return self._kept[epoch]

    def _draw(self, epoch: int) -> Tensor:
        words = np.random.SeedSequence([word % 2**64 for word in (*self._seed, epoch)]).generate_state(2)
        generator = torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1]))
        return torch.randperm(self.num_samples, generator=generator)


class Source:
    """A rank's stream of steps, epoch after epoch; its position is all its state.

    Attributes:
        steps_per_epoch: None where only reading tells.
        num_epochs: after how many the stream ends; None for never.
        epoch, step: how many epochs are through, and how many steps of this one.
    """

    steps_per_epoch: int | None = None
    num_epochs: int | None = None

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0

    def next_step(self) -> Step | None:
        """The next step's batch, None at the end; a new epoch begins when the last one is through."""
        raise NotImplementedError

    def _begin_epoch(self) -> bool:
        self.epoch, self.step = self.epoch + 1, 0
        return self.num_epochs is None or self.epoch < self.num_epochs

    def state_dict(self) -> dict[str, int]:
        """Where the rank is in the data."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self.epoch, self.step = state["epoch"], state["step"]


class _IndexedData(Source):
    """A dataset with a length: subclasses tell which indices make up a step."""

    steps_per_epoch: int

    def __init__(
        self,
        dataset: Dataset[Any],
        minibatch_size: int,
        collate: Callable[[list[Any]], Any] | None = None,
        loader: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._dataset, self._minibatch_size = dataset, minibatch_size
        self._read = batch_reader(dataset, collate)
        self._loader = dict(loader or {})
        self._loaded: Iterator[Any] | None = None

    def indices(self, epoch: int, step: int) -> tuple[Tensor, int]:
        """This rank's samples at a step, and how many all ranks have."""
        raise NotImplementedError

    def next_step(self) -> Step | None:
        """The next step's batch, None at the end."""
        if self.step == self.steps_per_epoch:
            self._loaded = None
            if not self._begin_epoch():
                return None
        own, total = self.indices(self.epoch, self.step)
        samples = len(own)
        if samples <= self._minibatch_size:
            pieces = [(self._fetch(own), samples)]
        else:
            pieces = [(self._fetch(piece), len(piece)) for piece in torch.split(own, self._minibatch_size)]
        self.step += 1
        return Step(pieces, samples, total)

    def _fetch(self, indices: Tensor) -> Any:
        if not self._loader:
            return self._read(indices)
        if self._loaded is None:
            batches = [
                piece.tolist()
                for step in range(self.step, self.steps_per_epoch)
                for piece in torch.split(self.indices(self.epoch, step)[0], self._minibatch_size)
            ]
            # A generator of its own: the loader would draw its workers' seed from the rank's stream.
            generator = torch.Generator().manual_seed(self.epoch)
            self._loaded = iter(
                DataLoader(self._dataset, batch_sampler=batches, generator=generator, **self._loader)
            )
        return as_tuple(next(self._loaded))

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self._loaded = None


class SharedData(_IndexedData):
    """One dataset for all ranks, dealt out sample by sample.

    Step s of an epoch takes the next `world_size * batch_size` samples of the order and deals them out in
    turn, so all ranks together see what one rank with a batch `world_size` times as large would see. The last
    step shares what is left evenly; what is not enough for one sample a rank is left out of this epoch.

    Args:
        dataset: with a length.
        order: of its samples, shared by ranks.
        rank, world_size: whose part this is.
        batch_size: samples a rank and step.
        minibatch_size: samples a forward pass.
        drop_last: leave out a last step that is not full.
        collate: makes a batch of samples.
        loader: arguments for a DataLoader, empty for none.

    Raises:
        InputError: fewer samples than ranks (or than a full step, with `drop_last`).
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: EpochOrder,
        rank: int,
        world_size: int,
        batch_size: int,
        minibatch_size: int,
        *,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        loader: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dataset, minibatch_size, collate, loader)
        self._order, self._rank, self._world_size = order, rank, world_size
        self._stride = world_size * batch_size
        full, left = divmod(order.num_samples, self._stride)
        self.steps_per_epoch = full + (left >= world_size and not drop_last)
        if not self.steps_per_epoch:
            need = self._stride if drop_last else world_size
            raise InputError(
                f"fit: the training set has {order.num_samples} samples, but {world_size} ranks need "
                f"{need} for a step; use fewer ranks or more data"
            )

    def indices(self, epoch: int, step: int) -> tuple[Tensor, int]:
        """This rank's samples at a step, and how many all ranks have."""
        chunk = self._order.of(epoch)[step * self._stride : (step + 1) * self._stride]
        return chunk[self._rank :: self._world_size], len(chunk)


class OwnData(_IndexedData):
    """A dataset of this rank's own, made by a factory; every rank takes as many steps as the smallest allows.

    Args:
        dataset: with a length.
        lengths: of the datasets of all ranks, in rank order.
        rank: whose part this is.
        batch_size: samples a rank and step.
        minibatch_size: samples a forward pass.
        shuffle, seed: the order of each epoch, different on every rank.
        drop_last: leave out a last step that is not full.
        collate: makes a batch of samples.
        loader: arguments for a DataLoader, empty for none.

    Raises:
        InputError: a rank's dataset is empty (or holds no full step, with `drop_last`).
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        lengths: Sequence[int],
        rank: int,
        batch_size: int,
        minibatch_size: int,
        shuffle: bool,
        seed: int,
        *,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        loader: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(dataset, minibatch_size, collate, loader)
        self._order = EpochOrder(lengths[rank], shuffle, seed, rank + 1)
        self._lengths, self._batch_size = lengths, batch_size
        smallest = min(lengths)
        self.steps_per_epoch = smallest // batch_size if drop_last else math.ceil(smallest / batch_size)
        if not self.steps_per_epoch:
            raise InputError(
                f"fit: the dataset that the factory made for rank {lengths.index(smallest)} has {smallest} samples, "
                f"too few for a step; return at least {batch_size if drop_last else 1}"
            )

    def indices(self, epoch: int, step: int) -> tuple[Tensor, int]:
        """This rank's samples at a step, and how many all ranks have."""
        start = step * self._batch_size
        total = sum(min(self._batch_size, length - start) for length in self._lengths)
        return self._order.of(epoch)[start : start + self._batch_size], total


class StreamedData(Source):
    """An iterable dataset. A shared one is dealt out as in `SharedData`; of its own one a rank takes all.

    Every rank iterates by itself, so a shared iterable must give the same samples to each of them. It is
    begun again when it ends.

    Args:
        dataset: what is iterated.
        rank, world_size: whose part this is; (0, 1) for a stream of the rank's own.
        batch_size: samples a rank and step.
        minibatch_size: samples a forward pass.
        num_ranks: how many ranks train.
        drop_last: leave out a last step that is not full.
        collate: makes a batch of samples.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        rank: int,
        world_size: int,
        batch_size: int,
        minibatch_size: int,
        num_ranks: int,
        *,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self._dataset, self._rank, self._world_size = dataset, rank, world_size
        self._batch_size, self._minibatch_size, self._num_ranks = batch_size, minibatch_size, num_ranks
        self._collate = collate if collate is not None else default_collate
        # Of streams of their own, ranks cannot know the others' last steps: these must be full.
        own = world_size == 1 and num_ranks > 1
        self._fewest = world_size * batch_size if drop_last or own else world_size
        self._samples: Iterator[Any] | None = None
        if hasattr(dataset, "__len__"):
            full, left = divmod(len(dataset), world_size * batch_size)
            self.steps_per_epoch = full + (left >= self._fewest)

    def next_step(self) -> Step | None:
        """The next step's batch, None at the end."""
        own, total = self._take()
        if total < self._fewest and self.step:
            self._samples = None
            if not self._begin_epoch():
                return None
            own, total = self._take()
        if total < self._fewest:
            raise InputError(
                f"fit: an epoch of the iterable training set has {total} samples, but a step needs "
                f"{self._fewest}; use fewer ranks or more data"
            )
        self.step += 1
        size = self._minibatch_size
        pieces = [own[start : start + size] for start in range(0, len(own), size)]
        batches = [(as_tuple(self._collate(piece)), len(piece)) for piece in pieces]
        return Step(batches, len(own), total * self._num_ranks // self._world_size)

    def _take(self) -> tuple[list[Any], int]:
        if self._samples is None:
            self._samples = iter(self._dataset)
        own, total = [], 0
        for sample in islice(self._samples, self._world_size * self._batch_size):
            if total % self._world_size == self._rank:
                own.append(sample)
            total += 1
        return own, total

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self._samples = iter(self._dataset)
        for _ in islice(self._samples, self.step * self._world_size * self._batch_size):
            pass
