"""`Task`: data to train on, data to evaluate on, and a model that fits them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn
    from torch.utils.data import Dataset

__all__ = ["MissingDataError", "Task"]


class MissingDataError(InputError):
    """Data of a task are missing on this machine; its other settings may be right."""


@dataclass(frozen=True)
class Task:
    """Data and the default model for it.

    Attributes:
        train: samples to train on; a factory `f(rank, num_nodes, train_dataset)` is accepted too.
        validation: samples to evaluate on, or None.
        model: the default model's name in `MODELS`, or a callable that makes it.
        model_options: options with which any model fits this data, by model name; they yield to the user's.
        accuracy: `f(model, batch) -> fraction right`, None where there is no such thing.
    """

    train: Dataset[Any] | Callable[..., Dataset[Any]]
    validation: Dataset[Any] | Callable[..., Dataset[Any]] | None
    model: str | Callable[..., nn.Module]
    model_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    accuracy: Callable[[nn.Module, Any], float] | None = None
