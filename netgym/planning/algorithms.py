"""Collective algorithms judged by whole rounds; `auto` judges each call alone, on idle links with warm connections."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from netgym.planning.measure import algorithms_to_try
from netsim.collectives.choice import parse_collectives

if TYPE_CHECKING:
    from collections.abc import Callable

    from exogym_core.strategy.base import Strategy
    from netgym.planning.setting import Setting

__all__ = ["algorithm_flags", "algorithm_text", "by_algorithm"]

R = TypeVar("R")

_WITHIN = 1.5  # times as long as `auto`'s alone: such a call may be the faster in a round
_SOONER = 0.995  # times as long: rounds that differ by less are equal, and `auto` stays


def by_algorithm(
    strategy: Strategy,
    setting: Setting,
    planned: Callable[[Setting], R | None],
    pace: Callable[[R], float],
    every: bool = False,
) -> list[R]:
    """Plans with the setting's `collectives`, and with single algorithms in place of those that `auto` chose.

    Operations are searched one after the other, with the best algorithms found so far. An algorithm is tried if a
    single call takes at most 1.5 times as long with it as with the chosen one.

    Args:
        strategy: not set up.
        setting: setting of the plan; operations with a given algorithm keep it.
        planned: plans a setting that differs in `collectives`; returns None if it cannot.
        pace: speed of a plan, higher is faster.
        every: try all algorithms, since slower ones may be cheaper.

    Returns:
        The fastest plan first (`auto`'s unless another is noticeably faster), then the others; empty without any.
    """
    if (best := planned(setting)) is None:
        return []
    others = []
    fixed = parse_collectives(setting.collectives)
    for op, names in algorithms_to_try(strategy, setting, math.inf if every else _WITHIN).items():
        kept = fixed
        for name in names:
            trial = planned(replace(setting, collectives={**kept, op: name}))
            if trial is not None and pace(trial) * _SOONER > pace(best):
                best, trial, fixed = trial, best, {**kept, op: name}
            others += [] if trial is None else [trial]
    return [best, *others]


def algorithm_text(collectives: str | Mapping[str, str]) -> str:
    """`collectives` in few words.

    >>> algorithm_text("auto"), algorithm_text({"all_reduce": "ring"})
    ('auto', 'all_reduce=ring')
    """
    if not isinstance(collectives, Mapping):
        return collectives
    return ", ".join(f"{op}={name}" for op, name in collectives.items())


def algorithm_flags(collectives: str | Mapping[str, str]) -> str:
    """Command-line options that set `collectives`.

    >>> algorithm_flags("ring"), algorithm_flags({"all_reduce": "ring"})
    ('--set collectives=ring', '--set collectives.all_reduce=ring')
    """
    if not isinstance(collectives, Mapping):
        return f"--set collectives={collectives}"
    return " ".join(f"--set collectives.{op}={name}" for op, name in collectives.items())
