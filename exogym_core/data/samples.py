"""Which samples each rank sees at each step: disjoint, complete, seeded, the same number of steps everywhere."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
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

__all__ = ["EpochOrder", "OwnData", "Reading", "SharedData", "Source", "StepSamples", "dealt"]


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


@dataclass(frozen=True)
class Reading:
    """How samples become batches, whoever gets which.

    Attributes:
        minibatch_size: samples a forward pass.
        drop_last: leave out a last step that is not full.
        collate: makes a batch of samples; None: torch's way.
        loader: arguments for a DataLoader, empty for none.
        draws: what reading draws at random, by place in the data; made of the dataset where not given.
    """

    minibatch_size: int
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    loader: Mapping[str, Any] = field(default_factory=dict)
    draws: Draws | None = None

    def draws_of(self, dataset: object) -> Draws:
        """What reading `dataset` draws."""
        return self.draws if self.draws is not None else Draws(dataset, 0)


def dealt(total: int, num_ranks: int) -> Sequence[int]:
    """How many of `total` samples each rank gets when they are dealt out in turn; nothing where all get as many."""
    most, left = divmod(total, num_ranks)
    return [most + (rank < left) for rank in range(num_ranks)] if left else ()


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

    def __init__(self, dataset: Dataset[Any], rank: int, reading: Reading) -> None:
        super().__init__()
        self._rank, self._minibatch_size = rank, reading.minibatch_size
        self._reader = StepReader(dataset, reading.collate, reading.draws_of(dataset))
        self._loader = dict(reading.loader)
        self._loaded: Iterator[Any] | None = None

    def share(self, epoch: int, step: int) -> tuple[Tensor, int, Sequence[int]]:
        """This rank's samples at a step, how many all ranks have, and each of them; nothing where all have as many."""
        raise NotImplementedError

    def next_step(self) -> StepSamples | None:
        """The next step's batch, None at the end."""
        if self.step == self.steps_per_epoch:
            self._loaded = None
            if not self._begin_epoch():
                return None
        own, total, samples_of = self.share(self.epoch, self.step)
        samples = own.shape[0]
        is_whole = samples <= self._minibatch_size
        pieces = [own] if is_whole else torch.split(own, self._minibatch_size)
        if not self._loader:
            batches = self._reader.read((self._rank, self.epoch, self.step), pieces)
        else:
            batches = self._loaded_step()
        self.step += 1
        sizes = [samples] if is_whole else map(len, pieces)
        return StepSamples(list(zip(batches, sizes, strict=True)), samples, total, samples_of)

    def _loaded_step(self) -> list[Any]:
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
            own = source.share(self._epoch, step)[0]
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
        reading: how they become batches.

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
        reading: Reading,
    ) -> None:
        super().__init__(dataset, rank, reading)
        self._order, self._world_size = order, world_size
        self._stride = world_size * batch_size
        full, left = divmod(order.num_samples, self._stride)
        self.steps_per_epoch = full + (left >= world_size and not reading.drop_last)
        if not self.steps_per_epoch:
            need = self._stride if reading.drop_last else world_size
            raise InputError(
                f"fit: the training set has {order.num_samples} samples, but {world_size} ranks need "
                f"{need} for a step; use fewer ranks or more data"
            )

    def share(self, epoch: int, step: int) -> tuple[Tensor, int, Sequence[int]]:
        """Every `world_size`-th sample of the step's."""
        chunk = self._order.of(epoch)[step * self._stride : (step + 1) * self._stride]
        total = chunk.shape[0]
        samples_of = () if total == self._stride else dealt(total, self._world_size)
        return chunk[self._rank :: self._world_size], total, samples_of


class OwnData(_IndexedData):
    """A dataset of this rank's own, made by a factory; every rank takes as many steps as the smallest allows.

    Args:
        dataset: with a length.
        order: of its samples, different on every rank.
        lengths: of the datasets of all ranks, in rank order.
        rank: whose part this is.
        batch_size: samples a rank and step.
        reading: how they become batches.

    Raises:
        InputError: a rank's dataset is empty (or holds no full step, with `drop_last`).
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        order: EpochOrder,
        lengths: Sequence[int],
        rank: int,
        batch_size: int,
        reading: Reading,
    ) -> None:
        super().__init__(dataset, rank, reading)
        self._order, self._lengths, self._batch_size = order, lengths, batch_size
        smallest, drop_last = min(lengths), reading.drop_last
        self.steps_per_epoch = smallest // batch_size if drop_last else math.ceil(smallest / batch_size)
        if not self.steps_per_epoch:
            raise InputError(
                f"fit: the dataset that the factory made for rank {lengths.index(smallest)} has {smallest} samples, "
                f"too few for a step; return at least {batch_size if drop_last else 1}"
            )

    def share(self, epoch: int, step: int) -> tuple[Tensor, int, Sequence[int]]:
        """The next samples of this rank's own."""
        start = step * self._batch_size
        counts = [min(self._batch_size, length - start) for length in self._lengths]
        own = self._order.of(epoch)[start : start + self._batch_size]
        return own, sum(counts), counts if len(set(counts)) > 1 else ()
