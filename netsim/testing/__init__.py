"""Tests of collective algorithms: networks, calls and weather drawn by hypothesis, and laws that every algorithm keeps.

    from netsim.testing import check_schedule

    def test_my_ring():
        check_schedule(my_ring, "all_reduce")

Strategies and `check_schedule` need the extra `test` (hypothesis); a `Case` does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from netsim.testing.laws import CallShape, Case, LawError, TopologyMapping
from netsim.testing.schedules import ScheduleReport, ScheduleTimes, check_schedule, compare_schedules

if TYPE_CHECKING:
    from netsim.testing.worlds import calls as calls
    from netsim.testing.worlds import cases as cases
    from netsim.testing.worlds import placements as placements
    from netsim.testing.worlds import protocols as protocols
    from netsim.testing.worlds import topologies as topologies
    from netsim.testing.worlds import weather as weather

_DRAWN = ("calls", "cases", "placements", "protocols", "topologies", "weather")

__all__ = [
    "Case",
    "CallShape",
    "ScheduleTimes",
    "LawError",
    "ScheduleReport",
    "TopologyMapping",
    "check_schedule",
    "compare_schedules",
    *_DRAWN,
]


def __getattr__(name: str) -> object:
    if name not in _DRAWN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.worlds"), name)
