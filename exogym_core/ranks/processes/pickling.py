"""Sending objects to child processes by value, with an error that names what cannot be sent."""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import cloudpickle
import torch
from torch import Tensor

from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["dumps_for_child"]

_FAILURES = (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError, RuntimeError)
_MAX_DEPTH = 6


def dumps_for_child(obj: Any) -> bytes:
    """`obj` as a pickle that needs no module but installed ones to load.

    Raises:
        InputError: it cannot be pickled; the first line names the part of it that cannot, and the remedy.
    """
    try:
        file = io.BytesIO()
        _Pickler(file, protocol=5).dump(obj)
        return file.getvalue()
    except _FAILURES as error:
        path, part = _culprit(obj, getattr(obj, "__qualname__", type(obj).__qualname__))
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{path} ({type(part).__qualname__}) cannot be sent to another process ({reason}): "
            f"create it inside the function that ranks run, or use workers.kind=threads"
        ) from error


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Writes tensors of torch's newer dtypes as bytes: its own pickles of them cannot be read."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.dtype in _WITHOUT_STORAGE and obj.layout == torch.strided:
            line = obj.detach().cpu().contiguous().view(-1).view(torch.uint8)
            return _viewed, (line, obj.dtype, tuple(obj.shape))
        return super().reducer_override(obj)


_NEWER = (
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
_WITHOUT_STORAGE = frozenset(getattr(torch, name) for name in _NEWER if hasattr(torch, name))


def _viewed(line: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return line.view(dtype).view(shape)


def _culprit(obj: Any, path: str, depth: int = 0) -> tuple[str, Any]:
    """The innermost part of `obj` that cannot be pickled, with the path that leads to it."""
    if depth < _MAX_DEPTH:
        for suffix, part in _parts(obj):
            try:
                cloudpickle.dumps(part, protocol=5)
            except _FAILURES:
                return _culprit(part, path + suffix, depth + 1)
    return path, obj


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """What `obj` is made of: captured variables, arguments, attributes, items."""
    if isinstance(obj, functools.partial):
        yield from ((f".args[{index}]", part) for index, part in enumerate((obj.func, *obj.args), start=-1))
        yield from ((f".{name}", part) for name, part in obj.keywords.items())
    elif isinstance(obj, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in obj.items())
    elif isinstance(obj, Sequence) and not isinstance(obj, (str, bytes)):
        yield from ((f"[{index}]", part) for index, part in enumerate(obj))
    elif closure := getattr(obj, "__closure__", None):
        yield from (
            (f" -> {name}", cell.cell_contents)
            for name, cell in zip(obj.__code__.co_freevars, closure, strict=True)
        )
    elif attributes := getattr(obj, "__dict__", None):
        yield from ((f".{name}", part) for name, part in attributes.items())
