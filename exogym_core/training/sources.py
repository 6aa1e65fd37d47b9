"""The data of a `fit`: one training set dealt out to all ranks, or what the user's factory makes for each."""

from __future__ import annotations

import inspect
import warnings
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from exogym_core.data.batches import batch_reader, collate_of
from exogym_core.data.draws import Draws
from exogym_core.data.fingerprint import digest_of, fingerprint
from exogym_core.data.samples import EpochOrder, OwnData, Reading, SharedData, Source
from exogym_core.data.streams import StreamedData, stream_length
from exogym_core.training.trial import first_batch
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from exogym_core.communicator.base import Communicator
    from exogym_core.training.request import FitRequest

__all__ = ["DataSets"]


class DataSets:
    """The data sets of a run, and which samples of them a rank sees.

    Args:
        request: what was asked for; a micro-batch that is found later is set here too.
        train_dataset: one for all ranks, or a factory of each rank's own.
        val_dataset: for who judges, or a factory of it.
    """

    def __init__(
        self,
        request: FitRequest,
        train_dataset: Dataset[Any] | Callable[..., Dataset[Any]],
        val_dataset: Dataset[Any] | Callable[..., Dataset[Any]] | None,
    ) -> None:
        self.request = request
        self._train_dataset, self._val_dataset = train_dataset, val_dataset
        self._own_dataset: Dataset[Any] | None = None  # rank 0's, if it had to be made to look at a batch
        self._order: EpochOrder | None = None
        self._draws: Draws | None = None  # of a shared training set
        if not self.is_shared:
            return
        self._draws = Draws(train_dataset, request.seed)  # before anything is read
        if isinstance(train_dataset, IterableDataset):
            if (remark := _unused_loader(request)) is not None:
                warnings.warn(remark, UserWarning, stacklevel=6)
        else:
            self._order = EpochOrder(_length(train_dataset), request.shuffle, request.seed)

    @property
    def is_shared(self) -> bool:
        """Whether there is one training set for all ranks."""
        return isinstance(self._train_dataset, Dataset) or not callable(self._train_dataset)

    def sample_batch(self, size: int) -> Any:
        """A batch of the first samples that rank 0 would read, at most so many."""
        dataset = self._train_dataset
        if not self.is_shared:
            if self._own_dataset is None:
                self._own_dataset = self._made(0, train=True)
            dataset = self._own_dataset
        collate = collate_of(self.request.dataloader_kwargs)[0]
        if isinstance(dataset, IterableDataset):
            samples = list(islice(dataset, size))
            return (collate or default_collate)(samples)
        return batch_reader(dataset, collate)(torch.arange(min(size, _length(dataset))))  # type: ignore[arg-type]

    def fingerprint(self) -> str | None:
        """What a training set for all ranks is known by; None where each rank has its own."""
        if not self.is_shared or self._draws is None:
            return None
        with first_batch():
            return fingerprint(self._train_dataset, self._draws)  # type: ignore[arg-type]

    def validation(self) -> Any:
        """The validation set, made where it is a factory."""
        dataset = self._val_dataset
        if callable(dataset) and not isinstance(dataset, Dataset):
            return self._made(0, train=False)
        return dataset

    # --- which samples a rank sees -------------------------------------------------------------------------

    def source(self, comm: Communicator, remarks: list[str], *, keeps: bool) -> Source:
        """What this rank reads; `keeps`: checkpoints must know its own data again.

        What the user should be warned of is added to `remarks`.
        """
        return self.shared_source(comm.rank) if self.is_shared else self._own_source(comm, remarks, keeps)

    def shared_source(self, rank: int) -> Source:
        """A rank's part of a training set for all."""
        num_ranks, batch_size = self.request.num_nodes, self.request.batch_size
        dataset, reading = self._train_dataset, self._reading(self._draws)
        if isinstance(dataset, IterableDataset):
            return StreamedData(dataset, rank, num_ranks, batch_size, num_ranks, reading)
        assert self._order is not None
        return SharedData(dataset, self._order, rank, num_ranks, batch_size, reading)  # type: ignore[arg-type]

    def _reading(self, draws: Draws | None) -> Reading:
        collate, drop_last, loader = collate_of(self.request.dataloader_kwargs)
        return Reading(self.request.minibatch_size, drop_last, collate, loader, draws)

    def _own_source(self, comm: Communicator, remarks: list[str], keeps: bool) -> Source:
        request = self.request
        prepared = self._own_dataset if comm.rank == 0 else None
        dataset = prepared if prepared is not None else self._made(comm.rank, train=True)
        draws = Draws(dataset, request.seed)
        reading = self._reading(draws)
        if isinstance(dataset, IterableDataset):
            if comm.rank == 0 and (remark := _unused_loader(request)) is not None:
                remarks.append(remark)
            own = (comm.rank, self._agreed_steps(dataset, draws, comm))
            source: Source = StreamedData(
                dataset, 0, 1, request.batch_size, comm.world_size, reading, own=own
            )
        else:
            order = EpochOrder(_length(dataset), request.shuffle, request.seed, comm.rank + 1)
            lengths = self._agreed_lengths(dataset, draws, comm, remarks)
            source = OwnData(dataset, order, lengths, comm.rank, request.batch_size, reading)
        source.known_as = fingerprint(dataset, draws) if keeps else None
        return source

    def _agreed_lengths(
        self, dataset: Dataset[Any], draws: Draws, comm: Communicator, remarks: list[str]
    ) -> list[int]:
        """How many samples each rank has of its own; a remark where they are all the same ones."""
        num_compared = min(self.request.batch_size, _length(dataset))
        with draws.at(comm.rank):
            first = digest_of(dataset[index] for index in range(num_compared))
        with comm.off_clock():
            facts = comm.all_gather_object((_length(dataset), first))
        if comm.world_size > 1 and len({digest for _, digest in facts}) == 1:
            remarks.append(
                "fit: the dataset factory made datasets that begin with the same batch on every rank; "
                "use its `rank` and `num_nodes` to give each rank its own samples"
            )
        return [length for length, _ in facts]

    def _agreed_steps(self, dataset: IterableDataset[Any], draws: Draws, comm: Communicator) -> int | None:
        """After how many steps an epoch ends for all ranks, each with a stream of its own; None: it need not end.

        Streams that do not say how long they are get counted, as far as the run can get, where epochs matter.
        """
        request, length = self.request, stream_length(dataset)
        if length is None and request.num_epochs is not None:
            most = request.limit(None) * request.batch_size
            with draws.at(comm.rank, 0):
                length = sum(1 for _ in islice(dataset, most))
        with comm.off_clock():
            lengths = comm.all_gather_object(length)
        if None in lengths:
            return None
        smallest = min(lengths)
        if not (steps := smallest // request.batch_size):
            raise InputError(
                f"fit: the iterable dataset that the factory made for rank {lengths.index(smallest)} has "
                f"{smallest} samples, too few for a step; return at least {request.batch_size}"
            )
        return int(steps)

    def _made(self, rank: int, *, train: bool) -> Dataset[Any]:
        """The dataset that the user's factory makes."""
        factory = self._train_dataset if train else self._val_dataset
        name = "train_dataset" if train else "val_dataset"
        arguments = {"rank": rank, "num_nodes": self.request.num_nodes, "train_dataset": train}
        assert callable(factory)
        try:
            inspect.signature(factory).bind(**arguments)
        except TypeError as error:
            raise InputError(
                f"fit: the {name} factory cannot be called ({error}); write f(rank, num_nodes, train_dataset)"
            ) from None
        except ValueError:  # no signature to look at
            pass
        # Rank 0's may be made in the parent, the validation set by several ranks: alike, whoever makes it.
        with Draws(None, self.request.seed).at(rank, int(train)):
            dataset = factory(**arguments)
        if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__getitem__"):
            raise InputError(
                f"fit: the {name} factory returned {type(dataset).__name__} for rank {rank}; return a Dataset"
            )
        return dataset


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise InputError(
            f"fit: {type(dataset).__name__} has no len(); give it one, or derive it from IterableDataset"
        ) from None


def _unused_loader(request: FitRequest) -> str | None:
    """What to tell of loader arguments that a stream has no use for."""
    loader = collate_of(request.dataloader_kwargs)[2]
    if not loader:
        return None
    return (
        f"fit: dataloader_kwargs has {', '.join(sorted(loader))}, which an iterable training set does not use: every "
        "rank reads it by itself; leave that out"
    )
