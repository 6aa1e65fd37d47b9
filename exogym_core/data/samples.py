"""Which samples each rank sees at each step: disjoint, complete, seeded, the same number of steps everywhere."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from exogym_core.data.batches import StepReader, as_tuple
from exogym_core.data.draws import Draws
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["EpochOrder", "OwnData", "SharedData", "Source", "StepSamples", "dealt", "uneven"]


@dataclass(frozen=True, slots=True)
class StepSamples:
    """What one rank computes on in one step.

    Attributes:
        micro_batches: the batch in pieces, each with its number of samples.
        samples: of this rank.
        total_samples: of all ranks.
        samples_of: of each rank; empty where all have as many.
    """

    micro_batches: list[tuple[Any, int]]
    samples: int
    total_samples: int
    samples_of: Sequence[int] = ()


def dealt(total: int, num_ranks: int) -> list[int]:
    """How many of `total` samples each rank gets when they are dealt out in turn."""
    return [total // num_ranks + (rank < total % num_ranks) for rank in range(num_ranks)]


def uneven(counts: Sequence[int]) -> Sequence[int]:
    """`counts`, or nothing where all are alike."""
    return counts if len(set(counts)) > 1 else ()


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
        known_as: what the data are known by, where checkpoints must know the rank's own.
    """

    steps_per_epoch: int | None = None
    num_epochs: int | None = None
    known_as: str | None = None

    def __init__(self) -> None:
        self.epoch = 0
        self.step = 0

    def next_step(self) -> StepSamples | None:
        """The next step's batch, None at the end; a new epoch begins when the last one is through."""
        raise NotImplementedError

    def _begin_epoch(self) -> bool:
        self.epoch, self.step = self.epoch + 1, 0
        return self.num_epochs is None or self.epoch < self.num_epochs

    def state_dict(self) -> dict[str, Any]:
        """Where the rank is in the data, and in which."""
        return {"epoch": self.epoch, "step": self.step, "known_as": self.known_as}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            InputError: these are other data.
        """
        known = state.get("known_as")
        if self.known_as is not None and known is not None and self.known_as != known:
            raise InputError(
                f"fit: the training set that the checkpoint knows is {known}, this rank's is {self.known_as}; let the "
                "factory make the same datasets, or start anew"
            )
        self.epoch, self.step = state["epoch"], state["step"]


class _IndexedData(Source):
    """A dataset with a length: subclasses tell which indices make up a step."""

    steps_per_epoch: int

    def __init__(
        self,
        dataset: Dataset[Any],
        rank: int,
        minibatch_size: int,
        collate: Callable[[list[Any]], Any] | None = None,
        loader: Mapping[str, Any] | None = None,
        draws: Draws | None = None,
    ) -> None:
        super().__init__()
        self._rank, self._minibatch_size = rank, minibatch_size
        self._reader = StepReader(dataset, collate, draws if draws is not None else Draws(dataset, 0))
        self._loader = dict(loader or {})
        self._loaded: Iterator[Any] | None = None

    def indices(self, epoch: int, step: int) -> tuple[Tensor, int]:
        """This rank's samples at a step, and how many all ranks have."""
        raise NotImplementedError

    def _counts(self, step: int, total: int) -> Sequence[int]:
        """The samples of each rank at a step, of so many in total."""
        raise NotImplementedError

    def next_step(self) -> StepSamples | None:
        """The next step's batch, None at the end."""
        if self.step == self.steps_per_epoch:
            self._loaded = None
            if not self._begin_epoch():
                return None
        own, total = self.indices(self.epoch, self.step)
        pieces = torch.split(own, self._minibatch_size)
        batches, counts = self._read_step(pieces), self._counts(self.step, total)
        self.step += 1
        sizes = [len(piece) for piece in pieces]
        return StepSamples(list(zip(batches, sizes, strict=True)), len(own), total, uneven(counts))

    def _read_step(self, pieces: Sequence[Tensor]) -> list[Any]:
        if not self._loader:
            return self._reader.read((self._rank, self.epoch, self.step), pieces)
        if self._loaded is None:
            asked = _EpochSteps(self)
            # A generator of its own: the loader would draw its workers' seed from the rank's stream.
            generator = torch.Generator().manual_seed(0)
            loader = DataLoader(
                self._reader,
                batch_sampler=asked,  # type: ignore[arg-type]
                collate_fn=list,  # the reader has made batches already
                generator=generator,
                **self._loader,
            )
            self._loaded = iter(loader)
        return [as_tuple(batch) for batch in next(self._loaded)]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self._loaded = None


class _EpochSteps:
    """What a source's loader is asked for in the rest of an epoch: each step's place and indices, made as it is due."""

    def __init__(self, source: _IndexedData) -> None:
        self._source, self._epoch, self._step = source, source.epoch, source.step

    def __iter__(self) -> Iterator[tuple[tuple[int, ...], list[Tensor]]]:
        source = self._source
        for step in range(self._step, source.steps_per_epoch):
            own = source.indices(self._epoch, step)[0]
            yield (source._rank, self._epoch, step), list(torch.split(own, source._minibatch_size))


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
        draws: what reading draws at random, by (rank, epoch, step); made of the dataset where not given.

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
        draws: Draws | None = None,
    ) -> None:
        super().__init__(dataset, rank, minibatch_size, collate, loader, draws)
        self._order, self._world_size = order, world_size
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

    def _counts(self, step: int, total: int) -> Sequence[int]:
        return dealt(total, self._world_size)


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
        draws: what reading draws at random, by (rank, epoch, step); made of the dataset where not given.

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
        draws: Draws | None = None,
    ) -> None:
        super().__init__(dataset, rank, minibatch_size, collate, loader, draws)
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
        return self._order.of(epoch)[start : start + self._batch_size], sum(self._counts(step, 0))

    def _counts(self, step: int, total: int) -> Sequence[int]:
        return [min(self._batch_size, length - step * self._batch_size) for length in self._lengths]
