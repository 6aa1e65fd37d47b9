"""What a user hands to the trainer, looked at before ranks start: a model, data, and one batch of them."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import nn
from torch.utils.data import DataLoader

from exogym_core.ranks.failures import own_frames
from netsim.files.errors import InputError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["first_batch", "refuse_wrong_parts"]


def refuse_wrong_parts(model: object, **datasets: object) -> None:
    """Raise InputError for what is no model or no data set; `datasets` by argument's name, None for none."""
    if isinstance(model, type):
        raise InputError(f"fit: model is the class {model.__name__}; pass one: {model.__name__}()")
    if not isinstance(model, nn.Module):
        raise InputError(f"fit: model is a {type(model).__name__}; pass a torch.nn.Module")
    if all(not parameter.requires_grad for parameter in model.parameters()):
        raise InputError("fit: the model has no parameter to train; set requires_grad on some")
    for name, dataset in datasets.items():
        if isinstance(dataset, DataLoader):
            raise InputError(
                f"fit: {name} is a DataLoader; pass its dataset (the trainer makes batches of it)"
            )
        if not (
            dataset is None
            or callable(dataset)
            or hasattr(dataset, "__getitem__")
            or hasattr(dataset, "__iter__")
        ):
            raise InputError(f"fit: {name} is a {type(dataset).__name__}; pass a torch Dataset")


@contextmanager
def first_batch(model: nn.Module | None = None) -> Iterator[None]:
    """What a user's data set or model raises inside becomes one line, with the traceback below it.

    Args:
        model: which is given the batch, if one is.

    Raises:
        InputError: as told.
    """
    try:
        yield
    except NetsimError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        trace = "\n".join(own_frames(error))
        raise InputError(
            f"fit: a first batch fails: {what} (a model takes a batch as the data set yields it, in one "
            f"argument, and returns its mean loss{_inputs_of(model)})\n{trace}"
        ) from None


def _inputs_of(model: nn.Module | None) -> str:
    """What to do with a model that takes parts of a batch by name, as Hugging Face's do; "" for others."""
    if model is None:
        return ""
    try:
        names = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):  # of a module that is no Python
        return ""
    if len(names) < 2:
        return ""
    listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"; this one takes {listed}: wrap it in a module whose forward(batch) returns model(**batch).loss"
