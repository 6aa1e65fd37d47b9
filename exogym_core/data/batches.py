"""Batches: made of samples, moved onto a device, and the loss that a model returns for one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from netsim.errors import InputError, unknown_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from exogym_core.data.samples import Draws


__all__ = [
    "PRECISIONS",
    "Reader",
    "StepReader",
    "as_tuple",
    "autocast_to",
    "batch_layout",
    "batch_reader",
    "batch_tensors",
    "collate_of",
    "device_of",
    "joined_batch",
    "loss_and_count",
    "move_batch",
]

Reader: TypeAlias = "Callable[[Tensor], Any]"
"""Fetches the samples of some indices as one batch."""

_OURS = {
    "batch_size": "batch_size",
    "shuffle": "shuffle",
    "sampler": "a dataset factory",
    "batch_sampler": "a dataset factory",
    "generator": "seed",
    "dataset": "Trainer's train_dataset",
}


def batch_reader(dataset: Dataset[Any], collate: Callable[[list[Any]], Any] | None = None) -> Reader:
    """Function that fetches the samples of some indices as one batch.

    Tensors are indexed at once, also through `Subset`; a dataset with a method `batch(indices)` makes its own
    batches; all others go sample by sample through `collate`, torch's default where none is given.
    """
    if collate is None:
        if type(dataset) is TensorDataset:
            return dataset.__getitem__
        if type(dataset) is Subset:
            inner, chosen = batch_reader(dataset.dataset), torch.as_tensor(dataset.indices)
            return lambda indices: inner(chosen[indices])
        if callable(own := getattr(dataset, "batch", None)):
            return own  # type: ignore[no-any-return]
    gather = collate if collate is not None else default_collate
    fetch_all = getattr(dataset, "__getitems__", None)
    if callable(fetch_all):
        return lambda indices: as_tuple(gather(fetch_all(indices.tolist())))
    return lambda indices: as_tuple(gather([dataset[index] for index in indices.tolist()]))


def as_tuple(batch: Any) -> Any:
    """Turn a collated list into a tuple, as EXO Gym's models get it."""
    return tuple(batch) if type(batch) is list else batch


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
        if self.is_plain:
            return list(map(self._reader, pieces))
        with self._draws.at(*place):
            return [self._reader(piece) for piece in pieces]  # a StopIteration of a data set would end a map

    def __getitems__(self, asked: tuple[Sequence[int], Sequence[Any]]) -> list[Any]:
        """Read for a DataLoader, by indices in arrays."""
        place, pieces = asked
        return self.read(place, list(map(torch.from_numpy, pieces)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


def device_of(model: nn.Module) -> torch.device:
    """Device of a model's parameters; the CPU where it has none."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Half precisions of `autocast`, by name."""


def autocast_to(precision: str | None, device: torch.device) -> AbstractContextManager[object]:
    """A context in which forward passes compute in that key of PRECISIONS; None changes nothing."""
    return nullcontext() if precision is None else torch.autocast(device.type, PRECISIONS[precision])


def move_batch(batch: Any, device: torch.device) -> Any:
    """`batch` with its tensors on `device`, through mappings, lists, tuples and named tuples."""
    return joined_batch([batch], lambda parts: parts[0].to(device) if hasattr(parts[0], "to") else parts[0])


def joined_batch(batches: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """The containers of batches of one layout, with the parts in each place joined.

    >>> joined_batch([{"a": (1, 2)}, {"a": (3, 4)}], sum)
    {'a': (4, 6)}
    """
    first = batches[0]
    if isinstance(first, Mapping):
        joined = {key: joined_batch([batch[key] for batch in batches], join) for key in first}
        return joined if type(first) is dict else type(first)(joined)  # type: ignore[call-arg]
    if not isinstance(first, list | tuple):
        return join(batches)
    parts = [joined_batch(each, join) for each in zip(*batches, strict=True)]
    return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)


def batch_layout(batch: Any) -> object:
    """Containers, shapes and dtypes of a batch, and all in it that is no tensor."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, batch_layout(value)) for key, value in batch.items())
    if isinstance(batch, tuple | list):
        return type(batch), tuple(map(batch_layout, batch))
    return batch


def batch_tensors(batch: Any) -> list[Tensor]:
    """Tensors of a batch, in the order of its containers."""
    found: list[Any] = []
    joined_batch([batch], found.extend)
    return [part for part in found if isinstance(part, Tensor)]


def collate_of(dataloader_kwargs: Mapping[str, Any] | None) -> tuple[Any, bool, dict[str, Any]]:
    """A user's DataLoader arguments as (collate_fn, drop_last, others); no others without workers or pinning.

    Raises:
        InputError: an argument that is fit's own; the line names it.
        UnknownNameError: one that DataLoader has not.
    """
    rest = dict(dataloader_kwargs or {})
    if unknown := sorted(rest.keys() - _LOADER_ARGUMENTS - _OURS.keys()):
        raise unknown_names("argument of DataLoader", unknown, sorted(_LOADER_ARGUMENTS))
    for name in _OURS:
        if name in rest:
            raise InputError(
                f"fit: dataloader_kwargs has {name!r}, which the trainer sets; use {_OURS[name]}"
            )
    collate, drop_last = rest.pop("collate_fn", None), rest.pop("drop_last", False)
    if not isinstance(drop_last, bool):
        raise InputError(f"fit: dataloader_kwargs has drop_last {drop_last!r}; give True or False")
    workers = rest.get("num_workers", 0)
    if not isinstance(workers, int) or workers < 0:
        raise InputError(f"fit: dataloader_kwargs has num_workers {workers!r}; give a whole number from 0 up")
    return collate, drop_last, rest if workers or rest.get("pin_memory") else {}


_LOADER_ARGUMENTS = signature(DataLoader).parameters.keys() - _OURS.keys()


def loss_and_count(output: Any, where: str, *, with_gradient: bool = False) -> tuple[Tensor, float | None]:
    """A model's output: its mean loss, a scalar tensor, and what that is the mean of, where the model says so.

    Args:
        output: the loss, `(loss, count)`, or a mapping with `loss` and perhaps `count`; a count is the number of
            tokens or samples that count in the batch. In a tuple it is an int or a tensor of whole numbers, which no
            accuracy is.
        where: begins the errors' lines.
        with_gradient: refuse a loss without a gradient.

    Raises:
        InputError: it is something else.
    """
    loss, count = output, None
    if isinstance(output, Mapping) and "loss" in output:
        loss, count = output["loss"], output.get("count")
    elif isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], int | Tensor):
        whole = not isinstance(output[1], Tensor) or not (
            output[1].is_floating_point() or output[1].is_complex()
        )
        loss, count = output if whole else (output, None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        is_tensor = isinstance(loss, Tensor)
        what = f"a tensor of shape {list(loss.shape)}" if is_tensor else type(loss).__name__
        if isinstance(loss, tuple):
            what = f"({', '.join(type(each).__name__ for each in loss)})"
        raise InputError(
            f"{where}: the model returned {what}; it must return the batch's mean loss, a scalar tensor, alone or as "
            "(loss, count) with a whole number"
        )
    if with_gradient and not loss.requires_grad:
        raise InputError(f"{where}: the model returned a loss without a gradient; do not detach it")
    if count is None:
        return loss, None
    if isinstance(count, Tensor) and count.numel() == 1:
        count = 1 if count.is_meta else count.item()
    if not isinstance(count, int | float) or not 0 <= count < math.inf:
        what = f"a tensor of shape {list(count.shape)}" if isinstance(count, Tensor) else repr(count)
        raise InputError(
            f"{where}: the model returned a loss with count {what}; it must be the number of tokens or samples that "
            "the loss is the mean of"
        )
    return loss, float(count)
