"""Samples of each rank at each step: disjoint, complete, seeded, as many steps everywhere; fingerprints of datasets.

Random numbers that datasets draw while they are read are a function of the run's seed and the place in the data:
torch's, numpy's and `random`'s global generators are seeded for each reading and restored after it, and so are
generators that a dataset holds itself (`self.rng = numpy.random.default_rng(3)`), which the ranks of one process share.
So draws depend on no loader's workers, process, model or earlier reading, and a resumed run repeats them.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from exogym_core.data.batches import Reader, as_tuple, batch_reader
from exogym_core.plain import reachable
from exogym_core.workers.rng import RandomStates
from netsim.errors import InputError
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = [
    "ClientData",
    "Draws",
    "EpochOrder",
    "OwnData",
    "RankBatches",
    "Reading",
    "SharedData",
    "Source",
    "StepReader",
    "StepSamples",
    "StreamedData",
    "dataset_length",
    "dealt",
    "digest_of",
    "fingerprint",
    "shared_out",
    "steps_together",
    "stream_length",
]

Generator: TypeAlias = np.random.Generator | np.random.RandomState | random.Random | torch.Generator

_LONGEST_LIST = 64  # longer ones hold samples
_MOST_OBJECTS = 10_000
_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_CLOSED = (*_KINDS, type, torch.Tensor, np.ndarray)  # their attributes hold no generators


def _access(
    generator: Any,
) -> tuple[Callable[[], Any], Callable[[Any], object], Callable[[int], object]]:
    """Functions of a generator that read its state, set it, and seed it."""
    if isinstance(generator, torch.Generator):
        return generator.get_state, generator.set_state, generator.manual_seed
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        set_state = partial(setattr, bits, "state")
        return lambda: bits.state, set_state, lambda seed: set_state(type(bits)(seed).state)
    is_pythons = isinstance(generator, random.Random)
    read, set_state = (
        (generator.getstate, generator.setstate) if is_pythons else (generator.get_state, generator.set_state)
    )
    return read, set_state, lambda seed: generator.seed(seed % 2**32)


class Draws:
    """The random numbers of one dataset.

    Args:
        dataset: generators that it reaches through attributes and short lists and mappings are seeded too, from the
            run's seed and their states now.
        seed: of the run.
    """

    def __init__(self, dataset: object, seed: int) -> None:
        self._held: list[Generator] = []
        if type(dataset) is not TensorDataset:  # indexing tensors draws nothing
            shared = (random._inst, torch.default_generator)  # by the process
            opened = reachable(
                dataset, lambda value: not isinstance(value, _CLOSED), _LONGEST_LIST, _MOST_OBJECTS
            )
            found = [
                each for each in opened if isinstance(each, _KINDS) and not any(each is one for one in shared)
            ]
            self._held = found[::-1]
        digest = hashlib.blake2b(str(seed).encode())
        for generator in self._held:
            state = _access(generator)[0]()
            digest.update(repr(state.tolist() if isinstance(state, torch.Tensor) else state).encode())
        self._key = digest.digest()

    def seed(self, *place: int) -> None:
        """Seed all generators, global ones and those held, for the reading at `place`."""
        digest = hashlib.blake2b(self._key + repr(place).encode(), digest_size=32).digest()
        words = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 32, 8)]
        torch.default_generator.manual_seed(words[0])
        random.seed(words[1])
        np.random.seed(words[2] % 2**32)
        for position, generator in enumerate(self._held):
            _access(generator)[2]((words[3] + position) % 2**63)

    @contextmanager
    def at(self, *place: int) -> Iterator[None]:
        """Seed generators for the reading at `place`, such as (rank, epoch, step), and restore them after the block."""
        with self.aside():
            self.seed(*place)
            yield

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Restore all generators, global ones and those held, after the block."""
        before = self.states()
        try:
            yield
        finally:
            self.load(before)

    def states(self) -> tuple[RandomStates, list[Any]]:
        """Current states of all generators, global ones and those held."""
        return RandomStates.of_process(), [_access(generator)[0]() for generator in self._held]

    def load(self, states: tuple[RandomStates, list[Any]]) -> None:
        """Set all generators, global ones and those held, back to earlier states."""
        states[0].load()
        for generator, state in zip(self._held, states[1], strict=True):
            _access(generator)[1](state)


class StepReader(Dataset[Any]):
    """Reads a rank's steps, in its process or a DataLoader's worker, with the same result.

    Args:
        dataset: of samples.
        collate: makes a batch of samples.
        draws: random numbers of reading.

    Attributes:
        is_plain: tensors are indexed, by indices of any shape.
    """

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None, draws: Draws
    ) -> None:
        self._dataset, self._collate, self._draws = dataset, collate, draws
        self._reader: Reader | None = None
        while type(dataset) is Subset:
            dataset = dataset.dataset
        self.is_plain = collate is None and type(dataset) is TensorDataset  # which draws nothing

    def read(self, place: Sequence[int], pieces: Sequence[Tensor]) -> list[Any]:
        """The micro-batches of these indices; what is drawn depends on `place`, such as (rank, epoch, step)."""
        if self._reader is None:
            self._reader = batch_reader(self._dataset, self._collate)
        with nullcontext() if self.is_plain else self._draws.at(*place):
            return [self._reader(piece) for piece in pieces]

    def __getitems__(self, asked: tuple[Sequence[int], Sequence[Any]]) -> list[Any]:
        """Read for a DataLoader, by indices in arrays."""
        place, pieces = asked
        return self.read(place, [torch.from_numpy(piece) for piece in pieces])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Samples of a rank in a step.

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


class RankBatches(NamedTuple):
    """Batches of consecutive ranks in one: its tensors have a row for each."""

    ranks: range
    batch: Any


@dataclass(frozen=True)
class Reading:
    """Settings by which samples become a rank's batches.

    Attributes:
        rank, num_ranks: the rank, and how many train.
        batch_size: samples a rank and step.
        minibatch_size: samples a forward pass.
        drop_last: leave out a last step that is not full.
        collate: makes a batch of samples; None: torch's way.
        loader: arguments for a DataLoader, empty for none.
        draws: random numbers of reading, by place in the data; made from the dataset where not given.
        batches: samples of each rank in a step, `batch_size` in the mean; empty where all have as many.
    """

    rank: int
    num_ranks: int
    batch_size: int
    minibatch_size: int
    drop_last: bool = False
    collate: Callable[[list[Any]], Any] | None = None
    loader: Mapping[str, Any] = field(default_factory=dict)
    draws: Draws | None = None
    batches: Sequence[int] = ()


def shared_out(total: int, weights: Sequence[float]) -> list[int]:
    """Whole shares of `total` in proportion to `weights`, at least one each; the largest remainders are rounded up.

    >>> shared_out(32, [1.0, 3.0]), shared_out(4, [1.0, 1.0, 100.0])
    ([8, 24], [1, 1, 2])
    """
    shares, left = [1] * len(weights), total
    ranks, few = list(range(len(weights))), [-1]
    exact: dict[int, float] = {}
    while few:  # one sample is more than their proportion, and less is left for the others
        whole = sum(weights[rank] for rank in ranks)
        exact = {rank: left * weights[rank] / whole for rank in ranks}
        few = [rank for rank in ranks if exact[rank] <= 1]
        ranks, left = [rank for rank in ranks if exact[rank] > 1], left - len(few)
    for rank in ranks:
        shares[rank] = int(exact[rank])
    left = total - sum(shares)
    for rank in sorted(ranks, key=lambda rank: shares[rank] - exact[rank])[:left]:
        shares[rank] += 1
    return shares


@lru_cache(maxsize=16)
def dealt(total: int, num_ranks: int) -> Sequence[int]:
    """Number of samples of each rank when `total` are dealt out in turn; empty where all get as many."""
    most, left = divmod(total, num_ranks)
    return tuple(most + (rank < left) for rank in range(num_ranks)) if left else ()


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
            order = torch.arange(self.num_samples)
            if self.shuffle:
                entropy = [word % 2**64 for word in (*self._seed, epoch)]
                high, low = map(int, np.random.SeedSequence(entropy).generate_state(2))
                generator = torch.Generator().manual_seed(high << 32 | low)
                order = torch.randperm(self.num_samples, generator=generator)
            self._kept[epoch] = order
        return self._kept[epoch]


class TorchOrder(EpochOrder):
    """The order in which ranks with torch's DistributedSampler read, whose epoch is never set: the same in each epoch.

    Args:
        num_samples: in the dataset; the order has as many more as fill up the last ranks.
        shuffle: by the sampler's own seed, 0.
        num_ranks: among which samples are dealt out in turn.

    Source: EXO Gym (exogym/train_node.py), which makes such a sampler and does not call `set_epoch`.
    """

    def __init__(self, num_samples: int, shuffle: bool, num_ranks: int) -> None:
        samples: Any = range(num_samples)  # the sampler asks their number alone
        of_ranks: list[list[int]] = [
            list(DistributedSampler(samples, num_ranks, rank, shuffle=shuffle)) for rank in range(num_ranks)
        ]
        self._order = torch.tensor(of_ranks).t().flatten()
        super().__init__(len(self._order), shuffle)

    def of(self, epoch: int) -> Tensor:
        """Indices in the order of each epoch."""
        return self._order


class Source:
    """A rank's stream of steps, epoch after epoch; its position is all its state.

    Attributes:
        steps_per_epoch: None where it is not known before reading.
        num_epochs: epochs after which the stream ends; None: never.
        epoch, step: finished epochs, and finished steps of this one.
        known_as: fingerprint of the rank's own data, for checkpoints.
        has_whole_steps: the number of steps is known, and each is one micro-batch.
        sizes: samples of each rank's own data set; empty where all read one, or where sizes are not known.
    """

    has_whole_steps = False
    sizes: Sequence[int] = ()
    steps_per_epoch: int | None = None
    num_epochs: int | None = None
    known_as: str | None = None
    epoch = 0
    step = 0
    _reading: Reading

    def next_step(self) -> StepSamples | None:
        """The next step's batch, None at the end; a new epoch begins after the last step of one."""
        raise NotImplementedError

    def sit_out(self, num_steps: int) -> None:
        """Pass steps in which the rank takes no part: others read their samples of them."""
        for _ in range(num_steps):
            self.next_step()

    def close(self) -> None:
        """End processes that read ahead."""

    def _begin_epoch(self) -> bool:
        self.epoch, self.step = self.epoch + 1, 0
        return self.num_epochs is None or self.epoch < self.num_epochs

    def state_dict(self) -> dict[str, Any]:
        """Position of the rank in the data, and their fingerprint."""
        return {"epoch": self.epoch, "step": self.step, "known_as": self.known_as}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position.

        Raises:
            InputError: these are other data.
        """
        known = state.get("known_as")
        if self.known_as is not None and known is not None and self.known_as != known:
            raise InputError(
                f"fit: the checkpoint's training set is {known}, this rank's is {self.known_as}; let the "
                "factory make the same datasets, or start a new run"
            )
        self.epoch, self.step = state["epoch"], state["step"]


class _IndexedData(Source):
    """A dataset with a length; subclasses choose the indices of a step."""

    steps_per_epoch: int

    def __init__(self, dataset: Dataset[Any], reading: Reading) -> None:
        self._reading = reading
        self._reader = StepReader(dataset, reading.collate, reading.draws or Draws(dataset, 0))
        self._loaded: Iterator[Any] | None = None

    def share(self, epoch: int, step: int) -> tuple[Tensor, int, Sequence[int]]:
        """Samples of this rank at a step, the number of all ranks', and that of each rank unless they are equal."""
        raise NotImplementedError

    def next_step(self) -> StepSamples | None:
        """The next step's batch, None at the end."""
        if self.step == self.steps_per_epoch:
            self._loaded = None
            if not self._begin_epoch():
                return None
        own, total, samples_of = self.share(self.epoch, self.step)
        samples = own.shape[0]
        is_whole = samples <= self._reading.minibatch_size
        pieces = [own] if is_whole else torch.split(own, self._reading.minibatch_size)
        if not self._reading.loader:
            batches = self._reader.read((self._reading.rank, self.epoch, self.step), pieces)
        else:
            if self._loaded is None:
                self._loaded = self._load_rest_of_epoch()
            batches = [as_tuple(batch) for batch in next(self._loaded)]
        self.step += 1
        sizes = [samples] if is_whole else map(len, pieces)
        return StepSamples(list(zip(batches, sizes, strict=True)), samples, total, samples_of)

    def sit_out(self, num_steps: int) -> None:
        """Pass steps in which the rank takes no part: others read their samples of them."""
        self._loaded = None
        done = self.epoch * self.steps_per_epoch + self.step + num_steps
        self.epoch, self.step = divmod(done, self.steps_per_epoch)
        if not self.step and self.epoch:  # an epoch begins with its first step
            self.epoch, self.step = self.epoch - 1, self.steps_per_epoch

    def _load_rest_of_epoch(self) -> Iterator[Any]:
        # Indices as arrays: each tensor would be sent as a descriptor, by a thread that a forked rank lacks.
        def steps() -> Iterator[tuple[tuple[int, ...], list[Any]]]:
            for step in range(self.step, self.steps_per_epoch):
                pieces = torch.split(self.share(self.epoch, step)[0], self._reading.minibatch_size)
                yield (self._reading.rank, self.epoch, step), [piece.numpy() for piece in pieces]

        loader = DataLoader(
            self._reader,
            batch_sampler=steps(),  # type: ignore[arg-type]
            collate_fn=list,  # the reader has made batches already
            # Its own: the loader would draw its workers' seed from the rank's stream.
            generator=torch.Generator().manual_seed(0),
            **self._reading.loader,
        )
        return iter(loader)

    def close(self) -> None:
        """End the loader's workers: garbage that still has them waits five seconds for each."""
        self._loaded = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position."""
        super().load_state_dict(state)
        self._loaded = None


class SharedData(_IndexedData):
    """A dataset shared by all ranks, each with its own samples.

    Step s of an epoch takes the next `num_ranks * batch_size` samples of the order and deals them out in
    turn, so all ranks together see what one rank with a batch `num_ranks` times as large would see. The last
    step shares what is left evenly; what is not enough for one sample a rank is left out of this epoch. With
    `batches` each rank takes its number of a step's samples, and of the last step in proportion.

    Args:
        dataset: with a length.
        order: of its samples, shared by ranks.
        reading: settings of batches.

    Raises:
        InputError: fewer samples than ranks (or than a full step, with `drop_last`).
    """

    def __init__(self, dataset: Dataset[Any], order: EpochOrder, reading: Reading) -> None:
        super().__init__(dataset, reading)
        self.has_whole_steps = reading.minibatch_size >= max(reading.batches, default=reading.batch_size)
        self._order, num_ranks = order, reading.num_ranks
        self._stride = num_ranks * reading.batch_size
        full, left = divmod(order.num_samples, self._stride)
        self.steps_per_epoch = full + (left >= num_ranks and not reading.drop_last)
        if not self.steps_per_epoch:
            need = self._stride if reading.drop_last else num_ranks
            raise InputError(
                f"fit: the training set has {format_count(order.num_samples, 'sample')}, but {num_ranks} ranks need "
                f"{need} for a step; use fewer ranks or more data"
            )

    def is_readable_for(self, sources: Sequence[Source]) -> bool:
        """True if `sources` are those of all ranks, in their order, and this one can read for all."""
        ranks = [each._reading.rank for each in sources]
        alike = [isinstance(each, SharedData) and each._order is self._order for each in sources]
        places = {(each.epoch, each.step) for each in sources}
        is_plain = self._reader.is_plain and not self._reading.batches
        is_read_here = is_plain and self.has_whole_steps and not self._reading.loader
        return is_read_here and all(alike) and len(places) == 1 and ranks == [*range(self._reading.num_ranks)]

    def next_of_all(self, sources: Sequence[Source]) -> tuple[list[StepSamples], list[RankBatches]] | None:
        """The next step of the ranks of `sources`, read at once; None at the end of the last epoch."""
        is_at_end = self.step == self.steps_per_epoch
        epoch, step = (self.epoch + 1, 0) if is_at_end else (self.epoch, self.step)
        if epoch == self.num_epochs:
            return None
        chunk = self._order.of(epoch)[step * self._stride : (step + 1) * self._stride]
        num_ranks = self._reading.num_ranks
        total = chunk.shape[0]
        fewest, left = divmod(total, num_ranks)  # `left` ranks have one sample more
        of_each = chunk[: total - left].view(fewest, num_ranks).t()
        longer = torch.cat([of_each[:left], chunk[total - left :, None]], 1)
        parts = ((range(left), longer), (range(left, num_ranks), of_each[left:].contiguous()))
        batches = [
            RankBatches(ranks, self._reader.read((), [indices])[0]) for ranks, indices in parts if ranks
        ]
        for each in sources:
            each.epoch, each.step = epoch, step + 1
        samples_of = () if total == self._stride else dealt(total, num_ranks)
        more, fewer = (StepSamples([], size, total, samples_of) for size in (fewest + 1, fewest))
        return [more] * left + [fewer] * (num_ranks - left), batches

    def share(self, epoch: int, step: int) -> tuple[Tensor, int, Sequence[int]]:
        """Every `num_ranks`-th sample of the step's; with `batches`, this rank's stretch of them."""
        chunk = self._order.of(epoch)[step * self._stride : (step + 1) * self._stride]
        total, num_ranks = chunk.shape[0], self._reading.num_ranks
        if batches := self._reading.batches:
            counts = batches if total == self._stride else shared_out(total, batches)
            start = sum(counts[: self._reading.rank])
            return chunk[start : start + counts[self._reading.rank]], total, counts
        samples_of = () if total == self._stride else dealt(total, num_ranks)
        return chunk[self._reading.rank :: num_ranks], total, samples_of


class OwnData(_IndexedData):
    """A dataset of this rank's own, made by a factory; every rank takes as many steps as the smallest allows.

    Args:
        dataset: with a length.
        order: of its samples, different on every rank.
        lengths: of the datasets of all ranks, in rank order.
        reading: settings of batches.

    Raises:
        InputError: a rank's dataset is empty (or holds no full step, with `drop_last`).
    """

    def __init__(
        self, dataset: Dataset[Any], order: EpochOrder, lengths: Sequence[int], reading: Reading
    ) -> None:
        super().__init__(dataset, reading)
        self.has_whole_steps = reading.minibatch_size >= reading.batch_size
        self._order, self._lengths = order, lengths
        self.sizes = lengths
        smallest, batch_size, drop_last = min(lengths), reading.batch_size, reading.drop_last
        self._steps_of = [(each if drop_last else each + batch_size - 1) // batch_size for each in lengths]
        self.steps_per_epoch: int = min(self._steps_of)
        if not self.steps_per_epoch:
            raise InputError(
                f"fit: the dataset that the factory made for rank {lengths.index(smallest)} has "
                f"{format_count(smallest, 'sample')}, too few for a step; return at least "
                f"{batch_size if drop_last else 1}"
            )

    def left_out(self) -> str | None:
        """Warning about samples of the longer datasets that each epoch leaves out; None where it leaves out none."""
        if max(self._steps_of) == self.steps_per_epoch:
            return None
        seen = sum(min(length, self.steps_per_epoch * self._reading.batch_size) for length in self._lengths)
        return (
            f"fit: the ranks' datasets have from {min(self._lengths)} to {max(self._lengths)} samples: an epoch ends "
            f"for all with the smallest, after {format_count(self.steps_per_epoch, 'step')}, and sees {seen} of the "
            f"{sum(self._lengths)} samples; make them equally long, or repeat the samples of the short ones"
        )

    def share(self, epoch: int, step: int) -> tuple[Tensor, int, Sequence[int]]:
        """The next samples of this rank's own."""
        start = step * self._reading.batch_size
        counts = [min(self._reading.batch_size, length - start) for length in self._lengths]
        own = self._order.of(epoch)[start : start + self._reading.batch_size]
        return own, sum(counts), counts if len(set(counts)) > 1 else ()


class StreamedData(Source):
    """An iterable dataset. A shared one is dealt out as in `SharedData`; of its own one a rank takes all.

    Every rank iterates by itself, so a shared iterable must give the same samples to each of them: what it draws
    from torch's, numpy's or `random`'s generators is the same on all ranks, and new in each epoch. It is
    begun again when it ends.

    Args:
        dataset: to iterate over.
        reading: settings of batches; loader arguments have no use here.
        is_own: whether the rank has a stream of its own.
        agreed_steps: of such a stream, after how many steps an epoch ends for all ranks (None: when this one ends).
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        reading: Reading,
        *,
        is_own: bool = False,
        agreed_steps: int | None = None,
    ) -> None:
        self._reading = reading
        self._dataset, self._is_own, self._agreed = dataset, is_own, agreed_steps
        self._collate = reading.collate if reading.collate is not None else default_collate
        self._draws = reading.draws or Draws(dataset, 0)
        self._num_parts = 1 if is_own else reading.num_ranks
        self._stride = self._num_parts * reading.batch_size
        # Of streams of their own, ranks cannot know the others' last steps: these must be full.
        must_be_full = reading.drop_last or (is_own and reading.num_ranks > 1)
        self._fewest = self._stride if must_be_full else self._num_parts
        self._samples: Iterator[Any] | None = None
        self._drawn: Any = None  # states of the draws' generators, after the last sample
        self.steps_per_epoch = self._agreed
        length = stream_length(dataset)
        if not is_own and length is not None:
            full, left = divmod(length, self._stride)
            self.steps_per_epoch = full + (left >= self._fewest)

    def next_step(self) -> StepSamples | None:
        """The next step's batch, None at the end."""
        is_through = self._agreed is not None and self.step == self._agreed
        samples, total = ([], 0) if is_through else self._take()
        if self._agreed is not None and not is_through and total < self._fewest:
            raise InputError(
                f"fit: the iterable training set of rank {self._reading.rank} ended at step {self.step + 1} of an "
                f"epoch that should have {self._agreed}; let every epoch have as many samples as the first, and as "
                "len() says"
            )
        if total < self._fewest and self.step:
            self._samples = None
            if not self._begin_epoch():
                return None
            samples, total = self._take()
        if total < self._fewest:
            raise InputError(
                f"fit: an epoch of the iterable training set has {format_count(total, 'sample')}, but a step needs "
                f"{self._fewest}; use fewer ranks or more data"
            )
        size, rank = self._reading.minibatch_size, self._reading.rank
        pieces = [samples[start : start + size] for start in range(0, len(samples), size)]
        # A resumed run makes no batches of what it leaves out.
        with self._draws.at(rank, self.epoch, self.step):
            batches = [(as_tuple(self._collate(piece)), len(piece)) for piece in pieces]
        self.step += 1
        samples_of = dealt(total, self._num_parts)  # of its own stream a rank takes full batches, as all do
        of_all = total * self._reading.num_ranks // self._num_parts
        return StepSamples(batches, len(samples), of_all, samples_of)

    def _take(self) -> tuple[list[Any], int]:
        own, total = [], 0
        for sample in self._read(self._stride):
            if self._is_own or total % self._num_parts == self._reading.rank:
                own.append(sample)
            total += 1
        return own, total

    def _read(self, count: int) -> Iterator[Any]:
        """The next samples of this epoch, at most `count`."""
        with self._draws.aside():
            if self._samples is None:
                self._draws.seed(*(self._reading.rank, self.epoch) if self._is_own else (self.epoch,))
                self._samples = iter(self._dataset)
            else:
                self._draws.load(self._drawn)
            try:
                yield from islice(self._samples, count)
            finally:
                self._drawn = self._draws.states()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position."""
        super().load_state_dict(state)
        self._samples = None
        for _ in self._read(self.step * self._stride):
            pass


class ClientData(_IndexedData):
    """A rank's share of a `Partition`: every rank passes through its own samples, in epochs of its own length.

    The last batch of an epoch is what is left. Steps in which the rank takes no part leave its position as it is.

    Args:
        dataset: this rank's samples.
        order: of them, different on every rank.
        lengths: numbers of samples of all ranks, in rank order.
        reading: settings of batches.

    Raises:
        InputError: incomplete batches are to be left out, of which a small share has no other.
    """

    def __init__(
        self, dataset: Dataset[Any], order: EpochOrder, lengths: Sequence[int], reading: Reading
    ) -> None:
        super().__init__(dataset, reading)
        if reading.drop_last:
            raise InputError(
                "fit: drop_last and a Partition: some shares have no full batch; leave drop_last out"
            )
        self.has_whole_steps = reading.minibatch_size >= reading.batch_size
        self._order, self.sizes = order, lengths
        self._lengths = np.asarray(lengths)
        self._steps_of = -(-self._lengths // reading.batch_size)
        self.steps_per_epoch: int = int(self._steps_of[reading.rank])

    def share(self, epoch: int, step: int) -> tuple[Tensor, int, Sequence[int]]:
        """The next samples of this rank's own; numbers of others are those after as many steps."""
        size = self._reading.batch_size
        places = (epoch * self.steps_per_epoch + step) % self._steps_of * size
        counts = np.minimum(self._lengths - places, size)
        own = self._order.of(epoch)[step * size : (step + 1) * size]
        return own, int(counts.sum()), counts.tolist()

    def sit_out(self, num_steps: int) -> None:
        """Pass steps in which the rank takes no part."""


def steps_together(
    sources: Sequence[Source], num_steps: int
) -> Iterator[tuple[list[StepSamples], list[RankBatches]]]:
    """The next steps of ranks that step together: samples of each, and batches of ranks that have as many.

    Without batches, ranks have read by themselves, and theirs are in their samples.
    """
    first = sources[0]
    reads_for_all = isinstance(first, SharedData) and first.is_readable_for(sources)
    for _ in range(num_steps):
        of_all = cast("SharedData", first).next_of_all(sources) if reads_for_all else None
        yield of_all or ([cast("StepSamples", each.next_step()) for each in sources], [])


def stream_length(dataset: object) -> int | None:
    """Length of an iterable dataset; None where it has none."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
    except (ValueError, OverflowError) as error:
        name = type(dataset).__name__
        raise InputError(f"fit: len() of {name} fails: {error}; return the number of samples") from None


def dataset_length(dataset: object) -> int:
    """Length of a dataset; raises InputError where it has none."""
    length = stream_length(dataset)
    if length is None:
        name = type(dataset).__name__
        raise InputError(f"fit: {name} has no len(); give it one, or derive it from IterableDataset")
    return length


_NUM_SAMPLES = 32  # in a digest, evenly spaced
_WHOLE_BYTES = 64 * 2**20  # limit of tensors whose digest is of all values


def digest_of(values: Iterable[Any]) -> str:
    """A digest of tensors, arrays, numbers, texts, and lists and mappings of them."""
    digest = hashlib.sha256()
    for value in values:
        _feed(digest, value)
    return digest.hexdigest()


def fingerprint(dataset: Dataset[Any], draws: Draws) -> str:
    """Kind and length of a dataset, with a digest of some samples.

    The digest is of all values of tensors up to 64 MiB, else of 32 samples evenly spaced, or of the first 32 of an
    iterable dataset. It is left out where two readings differ, as with numbers drawn from the system's entropy.
    """
    kind = type(dataset).__name__
    length = stream_length(dataset)
    name = kind if length is None else f"{kind} of {format_count(length, 'sample')}"
    first, second = (_digest(dataset, length, draws) for _ in range(2))
    return f"{name} ({first[:12]})" if first == second else name


def _digest(dataset: Any, length: int | None, draws: Draws) -> str:
    if type(dataset) is TensorDataset and sum(tensor.nbytes for tensor in dataset.tensors) <= _WHOLE_BYTES:
        return digest_of(dataset.tensors)
    with draws.at(0):
        if isinstance(dataset, IterableDataset) or length is None:
            return digest_of(islice(iter(dataset), _NUM_SAMPLES))
        places = sorted({round(place) for place in np.linspace(0, length - 1, min(length, _NUM_SAMPLES))})
        return digest_of(dataset[place] for place in places)


def _feed(digest: hashlib._Hash, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        _feed(digest, list(value.items()))
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)} parts".encode())
        for part in value:
            _feed(digest, part)
    else:  # the address of an object in its repr says nothing
        digest.update(re.sub(r" at 0x[0-9a-f]+", "", repr(value)).encode())
