"""Batches: made of samples, and moved onto a device."""

from __future__ import annotations

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

__all__ = [
    "PRECISIONS",
    "Reader",
    "as_tuple",
    "autocast_to",
    "batch_layout",
    "batch_reader",
    "batch_tensors",
    "collate_of",
    "device_of",
    "joined_batch",
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
