"""Tasks and models by name, or by `module:callable`; all but data sets of a hub are there offline.

>>> build_model("mlp", hidden=[32]).logits(torch.zeros(2, 64)).shape
torch.Size([2, 10])
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from exogym_core.data.partition import Partition
from exogym_core.successors import refuse_unknown_options
from netgym.tasks.decoders import GPT, GPT_PRESETS, LLAMA_PRESETS, Decoder, Llama
from netgym.tasks.images import CNN, MLP, Classifier, classification_accuracy, digits, mnist
from netgym.tasks.task import Task
from netgym.tasks.text import TokenFile, TokenWindows, text
from netsim.errors import InputError, about_option, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "CNN",
    "GPT",
    "GPT_PRESETS",
    "LLAMA_PRESETS",
    "MLP",
    "MODELS",
    "TASKS",
    "Classifier",
    "Decoder",
    "Llama",
    "Task",
    "TokenFile",
    "TokenWindows",
    "build_model",
    "build_task",
    "classification_accuracy",
    "digits",
    "load_callable",
    "mnist",
    "text",
]

TASKS: Mapping[str, Callable[..., Task]] = {"digits": digits, "mnist": mnist, "text": text}
"""Task makers by name."""

MODELS: Mapping[str, Callable[..., nn.Module]] = {"cnn": CNN, "gpt": GPT, "llama": Llama, "mlp": MLP}
"""Model makers by name."""


def load_callable(reference: str, what: str) -> Callable[..., Any]:
    """Import the callable of a `module:name`; `what` is its kind in errors.

    Raises:
        InputError: the module cannot be imported, or has no such callable.
    """
    module_name, _, name = reference.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(
            f"{what} '{reference}': cannot import '{module_name}' ({error}); is its folder in PYTHONPATH?"
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise InputError(
            f"{what} '{reference}': '{module_name}' has no callable '{name}'; write module:callable"
        )
    return found  # type: ignore[no-any-return]


def _maker(what: str, name: str, registry: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if ":" in name:
        return load_callable(name, what)
    if name not in registry:
        raise unknown_name(what, name, [*registry, "module:callable"])
    return registry[name]


def _made(what: str, maker: Callable[..., Any], options: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Call `maker(**options)`; errors of shipped makers name the options that the user has given."""
    try:
        return maker(**options)
    except InputError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        if maker not in [*TASKS.values(), *MODELS.values()]:
            raise
        listed = ", ".join(f"{name}={value!r}" for name, value in given.items()) or "no options"
        raise InputError(f"{what} cannot be made with {listed}: {error}", about=[*given]) from error


def build_task(name: str | Callable[..., Task], **options: Any) -> Task:
    """Make the task of this name, or of a `module:callable` or callable that returns a `Task`.

    Args:
        name: of the task.
        options: of the task; and, for every task of labelled samples, `partition`, see
            `exogym_core.data.partition:Partition`.

    Raises:
        UnknownNameError: no such task or option.
        InputError: the task cannot be made with these options.
    """
    maker = _maker("task", name, TASKS) if isinstance(name, str) else name
    name = name if isinstance(name, str) else getattr(name, "__name__", "task")
    partition = options.pop("partition", None)
    refuse_unknown_options(f"option of task {name}", maker, options)
    task = _made(f"task {name}", maker, options, options)
    if not isinstance(task, Task):
        raise InputError(f"task '{name}': returned {type(task).__name__}; return a netgym.tasks.Task")
    with about_option("partition"):
        return task if partition is None else replace(task, train=Partition.of(task.train, partition))


def build_model(
    name: str | Callable[..., nn.Module] | None = None,
    task: Task | None = None,
    seed: int | None = None,
    **options: Any,
) -> nn.Module:
    """Make the model of this name to fit `task`; without a name, the task's default model.

    Args:
        name: a name in `MODELS`, a `module:callable`, or a callable.
        task: gives defaults for sizes such as the number of classes; `options` override them.
        seed: of the initial parameters; leaves the global random state as it was. None draws from that state.
        options: arguments of the model.

    Raises:
        UnknownNameError: no such model or option.
        InputError: the model does not fit the task, or cannot be made with these options.
    """
    chosen = name if name is not None else (task.model if task is not None else None)
    if chosen is None:
        raise InputError("build_model: neither a name nor a task is given; pass one of them")
    label = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", "model")
    maker = _maker("model", chosen, MODELS) if isinstance(chosen, str) else chosen
    if task is not None and task.model_options and label in set(MODELS) - {*task.model_options, task.model}:
        raise InputError(
            f"model {label} does not take this task's samples; use {' or '.join(task.model_options)}"
        )
    merged = {**(task.model_options.get(label, {}) if task is not None else {}), **options}
    refuse_unknown_options(f"option of model {label}", maker, merged)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        model = _made(f"model {label}", maker, merged, options)
    if not isinstance(model, nn.Module):
        raise InputError(f"model '{label}': returned {type(model).__name__}; return a torch.nn.Module")
    return model
