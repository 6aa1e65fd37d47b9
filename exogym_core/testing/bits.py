"""`assert_same_bits`: the first difference of two runs, by strategy, row, column or parameter."""

from __future__ import annotations

import csv
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from exogym_core.results.fit_result import FitResult
from exogym_core.results.run_folder import RunFolder
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["assert_same_bits", "first_difference"]

_TABLES = ("history", "validation", "correlation", "link_history")
_STATES = ("judged_state", "mean_state")
_OF_THE_PLACE = ("checkpoint_folder", "resumed_step", "wall_seconds")


def assert_same_bits(run_a: FitResult | str | Path, run_b: FitResult | str | Path) -> None:
    """Raise AssertionError that names the first difference of two runs: strategy, row, column or parameter.

    Args:
        run_a, run_b: results of `fit`, or folders of runs: their metrics, links, models and summaries are compared.

    Raises:
        AssertionError: they differ.
        InputError: one is no result and no run's folder, or they are of two kinds.

    >>> assert_same_bits(FitResult(strategy="DiLoCo", bytes_sent=8), FitResult(strategy="DiLoCo", bytes_sent=9))
    Traceback (most recent call last):
    AssertionError: DiLoCo: bytes_sent is 8 and 9
    """
    if found := first_difference(run_a, run_b):
        raise AssertionError(found)


def first_difference(run_a: FitResult | str | Path, run_b: FitResult | str | Path) -> str:
    """The line of `assert_same_bits`; "" where there is no difference."""
    if isinstance(run_a, FitResult) and isinstance(run_b, FitResult):
        return _of_results(run_a, run_b)
    for run in (run_a, run_b):
        if not isinstance(run, str | Path):
            raise InputError(
                f"assert_same_bits: {type(run).__name__}: give two results of fit, or two folders of runs"
            )
    return _of_folders(*(RunFolder.open(run).path for run in (run_a, run_b) if isinstance(run, str | Path)))


def _of_results(one: FitResult, other: FitResult) -> str:
    for name in _TABLES:
        if found := _of_rows(getattr(one, name), getattr(other, name)):
            return f"{one.strategy}: {name}: {found}"
    if len(one.rank_states) != len(other.rank_states):
        return f"{one.strategy}: there are {len(one.rank_states)} and {len(other.rank_states)} ranks"
    states = [
        (f"rank {at}", *pair) for at, pair in enumerate(zip(one.rank_states, other.rank_states, strict=True))
    ]
    for name, first, second in [
        *states,
        *((name, getattr(one, name), getattr(other, name)) for name in _STATES),
    ]:
        if found := _of_states(first, second):
            return f"{one.strategy}: {name}: {found}"
    rest = [
        each.name
        for each in fields(one)
        if each.name not in (*_TABLES, *_STATES, *_OF_THE_PLACE, "rank_states")
    ]
    found = _of_values(
        {name: getattr(one, name) for name in rest}, {name: getattr(other, name) for name in rest}
    )
    return f"{one.strategy}: {found}" if found else ""


def _of_folders(one: Path, other: Path) -> str:
    patterns = ("metrics/*.csv", "links/*.csv", "models/*.safetensors", "summary.json")
    names, others = (
        [path.relative_to(folder).as_posix() for pattern in patterns for path in sorted(folder.glob(pattern))]
        for folder in (one, other)
    )
    if missing := [name for name in [*names, *others] if (name in names) != (name in others)]:
        return f"{missing[0]} is in {one if missing[0] in names else other} alone"
    for name in names:
        paths = [folder / name for folder in (one, other)]
        if all(path.read_bytes() == paths[0].read_bytes() for path in paths):
            continue
        if name.endswith(".csv"):
            tables = [list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) for path in paths]
            found = _of_rows(*tables)
        elif name.endswith(".safetensors"):
            found = _of_states(*(load_file(path) for path in paths))
        else:
            entries = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
            pairs = zip(*entries, strict=False)
            lines = (f"{pair[0].get('name')}: {line}" for pair in pairs if (line := _of_values(*pair)))
            found = next(lines, f"there are {len(entries[0])} and {len(entries[1])} strategies")
        return f"{name}: {found or 'the bytes differ'}"
    return ""


def _of_rows(one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> str:
    for number, (row, again) in enumerate(zip(one, other, strict=False), start=1):
        if found := _of_values(row, again):
            step = f" (step {row['step']})" if "step" in row else ""
            return f"row {number}{step}: {found}"
    return f"there are {len(one)} and {len(other)} rows" if len(one) != len(other) else ""


def _of_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    for name in [*one, *(name for name in other if name not in one)]:
        first, second = (repr(each[name]) if name in each else "missing" for each in (one, other))
        if first != second:
            return f"{name} is {first} and {second}"
    return ""


def _of_states(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    for name in [*one, *(name for name in other if name not in one)]:
        first, second = one.get(name), other.get(name)
        if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
            if found := _of_values({name: first}, {name: second}):
                return f"parameter {found}"
        elif (first.dtype, first.shape) != (second.dtype, second.shape):
            return (
                f"parameter {name} is {first.dtype}{list(first.shape)} and {second.dtype}{list(second.shape)}"
            )
        else:
            bits = [
                each.detach().cpu().contiguous().reshape(-1, 1).view(torch.uint8) for each in (first, second)
            ]
            differing = (bits[0] != bits[1]).any(dim=1)
            if differing.any():
                at = int(differing.int().argmax())
                place = [int(index) for index in torch.unravel_index(torch.tensor(at), first.shape)]
                values = " and ".join(repr(each.reshape(-1)[at].item()) for each in (first, second))
                return f"parameter {name}{place} is {values} ({int(differing.sum())} of {first.numel()} values differ)"
    return ""
