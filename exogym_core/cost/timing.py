"""Host seconds of a piece of work, alone or where several processes do it at once."""

from __future__ import annotations

import os
import select
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from exogym_core.ranks.processes.children import Children

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from exogym_core.ranks.processes.children import Pipe

__all__ = ["seconds_of"]

_REPEATS = 5
_BUDGET_SECONDS = 1.0  # slow work is not repeated for longer


def seconds_of(work: Callable[[], Any], at_once: int = 1) -> float:
    """Seconds that `work` takes here: the median of up to five times, after one that warms up.

    Where `at_once` processes do it at once each has a core as far as there are cores, caches and memory are shared;
    of more processes than cores each takes that many times as long. Work must then be possible in a forked process.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    with _company(work, min(at_once, cores) - 1):
        return _median(work) * max(1.0, at_once / cores)


def _median(work: Callable[[], Any]) -> float:
    times: list[float] = []
    began = time.perf_counter()
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
        if time.perf_counter() - began > _BUDGET_SECONDS and len(times) > 1:
            break
    return statistics.median(times[1:])


@contextmanager
def _company(work: Callable[[], Any], num: int) -> Iterator[None]:
    """So many processes that do `work` again and again, each once at least before the block begins."""
    if num < 1:
        yield
        return

    def again_and_again(_: int, channel: Pipe) -> None:
        work()
        channel.send(None)
        while not select.select([channel.fileno()], [], [], 0)[0]:  # readable once the parent has left
            work()

    with Children(again_and_again, num, names=["netgym company"] * num) as company:
        for channel in company.channels:
            channel.recv()
        yield
