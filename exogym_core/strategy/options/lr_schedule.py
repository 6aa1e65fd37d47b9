"""Learning-rate schedules of the (inner) optimizer: warm-up with cosine, or any of torch's."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from exogym_core.strategy.options.arguments import number, positive_int
from netsim.files.errors import InputError, unknown_name, unknown_names

__all__ = ["LRSchedulerLike", "build_scheduler", "cosine_factor", "resolve_scheduler", "without_updates"]

LRSchedulerLike: TypeAlias = str | Callable[..., LRScheduler]

_COSINE_OPTIONS = ("cosine_anneal", "floor", "max_steps", "warmup_steps")


def cosine_factor(
    step: int,
    *,
    warmup_steps: int = 1,
    cosine_anneal: bool = False,
    max_steps: int = 1,
    floor: float = 0.1,
) -> float:
    """What "lambda_cosine" multiplies the learning rate with at the 0-based `step`; never 0 before `max_steps`.

    Linear warm-up `(step + 1) / warmup_steps`, then 1, or with `cosine_anneal` half a cosine from 1 down
    to `floor` at `max_steps` (0.1 as in EXO Gym; 0 as in OpenDiLoCo).

    >>> [cosine_factor(step, warmup_steps=4) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if not cosine_anneal:
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def resolve_scheduler(scheduler: LRSchedulerLike, options: Mapping[str, Any]) -> LRSchedulerLike:
    """`scheduler`, its name looked up and its options checked, before any rank starts.

    Raises:
        UnknownNameError: no schedule or option of that name.
        InputError: a schedule that needs a metric, or an option that is wrong or missing.
    """
    if scheduler == "lambda_cosine":
        _check_cosine(options)
        return scheduler
    if isinstance(scheduler, str):
        classes = {name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__}
        if scheduler not in classes:
            raise unknown_name("lr_scheduler", scheduler, ["lambda_cosine", *classes])
        scheduler = classes[scheduler]
    if scheduler is ReduceLROnPlateau:
        raise InputError("lr_scheduler: ReduceLROnPlateau needs a metric; use a schedule that counts steps")
    if not callable(scheduler):
        raise InputError(f"lr_scheduler={scheduler!r} must be 'lambda_cosine' or a torch scheduler class")
    try:
        inspect.signature(scheduler).bind(None, **options)
    except TypeError as error:
        name = getattr(scheduler, "__name__", scheduler)
        raise InputError(f"lr_scheduler_kwargs: {name}: {error}") from None
    except ValueError:  # no signature to look at
        pass
    return scheduler


def _check_cosine(options: Mapping[str, Any]) -> None:
    where = "lr_scheduler_kwargs"
    unknown = [name for name in options if name not in _COSINE_OPTIONS]
    if unknown:
        raise unknown_names("option of lambda_cosine", unknown, _COSINE_OPTIONS)
    for name in ("warmup_steps", "max_steps"):
        if options.get(name) not in (None, 0):
            positive_int(where, name, options[name])
    floor = options.get("floor")
    if floor is not None and number(where, "floor", floor) > 1:
        raise InputError(f"{where}: floor={options['floor']!r} must be a share of the learning rate, 0 to 1")
    if not isinstance(options.get("cosine_anneal"), bool | None):
        raise InputError(f"{where}: cosine_anneal={options['cosine_anneal']!r} must be true or false")


def build_scheduler(
    optimizer: Optimizer, scheduler: LRSchedulerLike, options: Mapping[str, Any], max_steps: int
) -> LRScheduler:
    """The schedule on `optimizer` for a run of `max_steps` steps."""
    if scheduler != "lambda_cosine":
        resolved = resolve_scheduler(scheduler, options)
        assert callable(resolved)
        return resolved(optimizer, **options)
    given = {
        name: value for name, value in options.items() if value is not None
    }  # `null` in a file: the default
    given["max_steps"] = min(given.get("max_steps") or max_steps, max_steps)
    return LambdaLR(optimizer, partial(cosine_factor, **given))


@contextmanager
def without_updates() -> Iterator[None]:
    """Schedules may advance in here though their optimizers have not made a step yet."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        yield
