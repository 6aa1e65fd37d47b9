"""Which samples of an iterable dataset each rank sees at each step, as it is read."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, default_collate

from exogym_core.data.batches import as_tuple
from exogym_core.data.samples import Reading, Source, StepSamples, dealt
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from exogym_core.data.draws import StreamOfDraws

__all__ = ["StreamedData", "stream_length"]


class StreamedData(Source):
    """An iterable dataset. A shared one is dealt out as in `SharedData`; of its own one a rank takes all.

    Every rank iterates by itself, so a shared iterable must give the same samples to each of them: what it draws
    from torch's, numpy's or `random`'s generators is the same on all ranks, and new in each epoch. It is
    begun again when it ends.

    Args:
        dataset: what is iterated.
        rank, world_size: whose part this is; (0, 1) for a stream of the rank's own.
        batch_size: samples a rank and step.
        num_ranks: how many ranks train.
        reading: how they become batches; loader arguments have no use here.
        own: of a stream of its own: the rank, and after how many steps an epoch ends for all ranks (None: when
            this one ends).
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        rank: int,
        world_size: int,
        batch_size: int,
        num_ranks: int,
        reading: Reading,
        *,
        own: tuple[int, int | None] | None = None,
    ) -> None:
        super().__init__()
        self._dataset, self._rank, self._world_size = dataset, rank, world_size
        self._batch_size, self._minibatch_size, self._num_ranks = (
            batch_size,
            reading.minibatch_size,
            num_ranks,
        )
        self._collate = reading.collate if reading.collate is not None else default_collate
        self._draws = reading.draws_of(dataset)
        self._own_rank = own[0] if own is not None else None
        # Of streams of their own, ranks cannot know the others' last steps: these must be full.
        is_own = world_size == 1 and num_ranks > 1
        self._fewest = world_size * batch_size if reading.drop_last or is_own else world_size
        self._samples: Iterator[Any] | None = None
        self._drawn: StreamOfDraws | None = None
        self._agreed = own[1] if own is not None else None
        self.steps_per_epoch = self._agreed
        length = stream_length(dataset)
        if own is None and length is not None:
            full, left = divmod(length, world_size * batch_size)
            self.steps_per_epoch = full + (left >= self._fewest)

    def next_step(self) -> StepSamples | None:
        """The next step's batch, None at the end."""
        is_through = self._agreed is not None and self.step == self._agreed
        samples, total = ([], 0) if is_through else self._take()
        if self._agreed is not None and not is_through and total < self._fewest:
            raise InputError(
                f"fit: the iterable training set of rank {self._own_rank} ended at step {self.step + 1} of an epoch "
                f"that should have {self._agreed}; let every epoch have as many samples as the first, and as len() says"
            )
        if total < self._fewest and self.step:
            self._samples = None
            if not self._begin_epoch():
                return None
            samples, total = self._take()
        if total < self._fewest:
            raise InputError(
                f"fit: an epoch of the iterable training set has {total} samples, but a step needs "
                f"{self._fewest}; use fewer ranks or more data"
            )
        size = self._minibatch_size
        pieces = [samples[start : start + size] for start in range(0, len(samples), size)]
        place = (self._rank if self._own_rank is None else self._own_rank, self.epoch, self.step)
        with self._draws.at(*place):  # a resumed run makes no batches of what it leaves out
            batches = [(as_tuple(self._collate(piece)), len(piece)) for piece in pieces]
        self.step += 1
        samples_of = dealt(total, self._world_size)  # of its own stream a rank takes full batches, as all do
        return StepSamples(batches, len(samples), total * self._num_ranks // self._world_size, samples_of)

    def _take(self) -> tuple[list[Any], int]:
        own, total = [], 0
        for sample in self._read(self._world_size * self._batch_size):
            if total % self._world_size == self._rank:
                own.append(sample)
            total += 1
        return own, total

    def _read(self, count: int) -> Iterator[Any]:
        """The next samples of this epoch, at most so many."""
        if self._samples is None or self._drawn is None:
            place = (self.epoch,) if self._own_rank is None else (self._own_rank, self.epoch)
            self._drawn = self._draws.stream(*place)
            with self._drawn.going_on():
                self._samples = iter(self._dataset)
        with self._drawn.going_on():
            yield from islice(self._samples, count)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        super().load_state_dict(state)
        self._samples = None
        for _ in self._read(self.step * self._world_size * self._batch_size):
            pass


def stream_length(dataset: object) -> int | None:
    """How many samples an iterable dataset says that it has, None where it does not say."""
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
