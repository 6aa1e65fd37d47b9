"""Knowing data again: a short text that other samples, fewer samples or another order of them would change."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from exogym_core.data.streams import stream_length

if TYPE_CHECKING:
    from collections.abc import Iterable

    from exogym_core.data.draws import Draws

__all__ = ["digest_of", "fingerprint"]

_NUM_SAMPLES = 32  # looked at, evenly spaced
_WHOLE_BYTES = 64 * 2**20  # tensors up to this size are looked at whole


def digest_of(values: Iterable[Any]) -> str:
    """A digest of tensors, arrays, numbers, texts, and lists and mappings of them."""
    digest = hashlib.sha256()
    for value in values:
        _feed(digest, value)
    return digest.hexdigest()


def fingerprint(dataset: Dataset[Any], draws: Draws) -> str:
    """What a dataset is known by: its kind, how many samples it has, and a digest of some of them.

    Tensors up to 64 MiB count whole; of other datasets 32 samples that are spread over them, of iterable ones the
    first 32.
    What cannot be read twice alike (drawn from the system's entropy, say) is known by kind and length alone.
    """
    kind = type(dataset).__name__
    length = stream_length(dataset)
    told = kind if length is None else f"{kind} of {length} samples"
    first, second = (_digest(dataset, length, draws) for _ in range(2))
    return f"{told} ({first[:12]})" if first == second else told


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
