"""Learning-rate schedules of the (inner) optimizer: warm-up with cosine, or any of torch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from netsim.errors import InputError, unknown_name

__all__ = ["LRSchedulerLike", "build_scheduler", "cosine_factor", "resolve_scheduler"]

LRSchedulerLike: TypeAlias = str | Callable[..., LRScheduler]

_COSINE_FLOOR = 0.1


def cosine_factor(
    step: int, *, warmup_steps: int = 1, cosine_anneal: bool = False, max_steps: int = 1
) -> float:
    """What "lambda_cosine" multiplies the learning rate with at the 0-based `step`; never 0.

    Linear warm-up `(step + 1) / warmup_steps`, then 1, or with `cosine_anneal` half a cosine from 1 down
    to 0.1 at `max_steps`.

    >>> [cosine_factor(step, warmup_steps=4) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if not cosine_anneal:
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return _COSINE_FLOOR + (1 - _COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def resolve_scheduler(scheduler: LRSchedulerLike, options: Mapping[str, Any]) -> LRSchedulerLike:
    """`scheduler`, its name looked up and its options checked, before any rank starts.

    Raises:
        UnknownNameError: no schedule or option of that name.
        InputError: a schedule that needs a metric.
    """
    if scheduler == "lambda_cosine":
        for name in options:
            if name not in (accepted := ("cosine_anneal", "max_steps", "warmup_steps")):
                raise unknown_name("option of lambda_cosine", name, accepted)
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
    return scheduler


def build_scheduler(
    optimizer: Optimizer, scheduler: LRSchedulerLike, options: Mapping[str, Any], max_steps: int
) -> LRScheduler:
    """The schedule on `optimizer` for a run of `max_steps` steps."""
    if scheduler != "lambda_cosine":
        resolved = resolve_scheduler(scheduler, options)
        assert callable(resolved)
        return resolved(optimizer, **options)
    options = {**options, "max_steps": min(options.get("max_steps") or max_steps, max_steps)}
    return LambdaLR(optimizer, partial(cosine_factor, **options))
