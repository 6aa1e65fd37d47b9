"""Time of coding that a plan does not charge."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

from netsim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

__all__ = [
    "coding_remark",
    "direct_remark",
    "is_large",
    "order_may_change",
    "uncharged_lines",
    "uncharged_seconds",
]

_BYTES_PER_SECOND = 2e9  # of fp32 values: the speed of examples/strategies.yaml
_SPEED = f"{format_bytes(_BYTES_PER_SECOND)}/s"
_LARGE_SHARE = 0.1  # of a round: uncharged coding that may change the order of rows
_CHARGE_IT = f"--set compute.coding='{_SPEED}' charges it"


def _seconds(coding_bytes: float) -> float:
    return coding_bytes / _BYTES_PER_SECOND


def uncharged_seconds(row: Mapping[str, Any]) -> float:
    """Seconds that coding would add to a round; 0 where it is charged."""
    return _seconds(row["coding_bytes"]) if row["coding"] == "not charged" else 0.0


def _uncharged_share(row: Mapping[str, Any]) -> float:
    return uncharged_seconds(row) / (row["seconds_per_round"] or math.inf)


def is_large(row: Mapping[str, Any]) -> bool:
    """True if uncharged coding may change a row's place."""
    return _uncharged_share(row) > _LARGE_SHARE


def order_may_change(names: Iterable[str]) -> str:
    """Remark on rows with large uncharged coding."""
    return (
        f"the order may change by coding that is not charged, at {_SPEED} more than {_LARGE_SHARE:.0%} of a round: "
        + ", ".join(dict.fromkeys(names))
    )


def direct_remark(hosts: Sequence[Hashable]) -> str | None:
    """Remark on encoded means of workers that share hosts, which load a host's links more than a ring does.

    >>> direct_remark(["a", "b"])
    >>> print(direct_remark(["a"] * 8 + ["b"] * 8))  # doctest: +ELLIPSIS
    encoded values go from each worker to each: with 8 on a host 4.3 times the bytes of a ring leave it; ...
    """
    most, others = max(Counter(hosts).values(), default=1), len(hosts) - 1
    if most < 2 or most > others:
        return None
    return (
        f"encoded values go from each worker to each: with {most} on a host {most * (others + 1 - most) / others:.1f} "
        "times the bytes of a ring leave it; of DDP's fp16 and bf16 hooks and Horovod's fp16, which add around NCCL's "
        "ring, plan half of the parameters without a codec, or --set collectives=ring"
    )


def coding_remark(coding_bytes: float) -> str:
    """Remark on coding that is not charged, with the time that it would take.

    >>> print(coding_remark(4e9))  # doctest: +ELLIPSIS
    coding is not charged: a worker encodes and decodes 4 GB of fp32 values a round, which takes 2 s at 2 GB/s; ...
    """
    if not coding_bytes:
        return "coding is not charged: it sends encoded values, and calls neither `charged` nor `charge`"
    return (
        f"coding is not charged: a worker encodes and decodes {format_bytes(round(coding_bytes))} of fp32 values a "
        f"round, which takes {format_seconds(_seconds(coding_bytes))} at {_SPEED}; {_CHARGE_IT}, or the speed of your "
        "codec and device"
    )


def uncharged_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Lines on rows whose coding is not charged: the most that it would add by strategy, and whether that is much."""
    rows = [row for row in rows if row["coding"] == "not charged"]
    most: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        most[row["strategy"]] = max(most.get(row["strategy"], row), row, key=_uncharged_share)
    if not most:
        return []
    added = ", ".join(
        f"{name} {format_seconds(uncharged_seconds(row))} of a round of {format_seconds(row['seconds_per_round'])}"
        for name, row in most.items()
    )
    line = (
        f"the time of coding, which is not charged: at {_SPEED} of fp32 values a worker it would add, at the most, "
        f"{added}; {_CHARGE_IT}"
    )
    large = [row["strategy"] for row in rows if is_large(row)]
    return [line, order_may_change(large)] if large else [line]
