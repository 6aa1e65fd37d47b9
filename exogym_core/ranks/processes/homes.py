"""Where blocks of ranks live, as the simulation sees them: who has sent something, and who stands idle."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, Protocol

from exogym_core.ranks.watch import SECONDS_OF_SILENCE, spent_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["Homes", "ready_in_time", "ready_or_idle"]

# A process with a busy rank says so this often at least, as long as its Python runs (host time).
_SECONDS_OF_SILENCE = 1.5 * SECONDS_OF_SILENCE
# Ranks are idle whose processes sleep, or use less than this share of a processor, at most of the looks at them.
_SECONDS_A_LOOK, _BUSY_SHARE = 0.1, 0.3


class Homes(Protocol):
    """Where blocks of ranks live, each with a channel; `Children` says what is meant."""

    @property
    def channels(self) -> Sequence[Any]:
        """One each."""

    @property
    def pids(self) -> Sequence[Any]:
        """What each is called by who wants to end it."""

    def ready(self, indices: Iterable[int], timeout_seconds: float | None = None) -> list[int]:
        """Those that have sent something or ended, waiting for the first."""

    def describe_exit(self, index: int, timeout_seconds: float = 0.0) -> str | None:
        """How one ended; None while it runs."""

    def is_stopped(self, index: int) -> bool:
        """Whether a signal has stopped it."""


def ready_in_time(
    homes: Homes, live: Sequence[int], can_go_on: Callable[[int], bool], names: Callable[[int], str]
) -> list[int]:
    """Those that have sent something, waiting for the first; those that say nothing for long are told of.

    Args:
        homes: all of them.
        live: those whose ranks have not ended.
        can_go_on: whether a rank of one can.
        names: of one's ranks.
    """
    ready = homes.ready(live, _SECONDS_OF_SILENCE)
    if ready:
        return ready
    for index in filter(can_go_on, live):
        pid = homes.pids[index]
        state = (
            f"is stopped: kill -CONT {pid} has it go on"
            if homes.is_stopped(index)
            else "sends nothing: it is busy in a call that holds Python's lock"
        )
        warnings.warn(f"the process of {names(index)} ({pid}) {state}", UserWarning, stacklevel=2)
    return homes.ready(live)


def ready_or_idle(
    homes: Homes, live: Sequence[int], can_go_on: Callable[[int], bool], seconds: float
) -> list[int]:
    """Those that have sent something; none when the others' processes have stood idle for so long.

    Where a rank has given a call a time, others may wait outside of our calls for what it does when that is up.
    """
    num_looks = math.ceil(seconds / _SECONDS_A_LOOK)
    while True:
        num_busy, spent = 0, _spent_seconds(homes, live, can_go_on)[0]
        for _ in range(num_looks):
            ready = homes.ready(live, seconds / num_looks)
            if ready:
                return ready
            now, is_asleep = _spent_seconds(homes, live, can_go_on)
            num_busy += not is_asleep or now - spent > _BUSY_SHARE * seconds / num_looks
            spent = now
        if num_busy < num_looks / 2:
            return []


def _spent_seconds(homes: Homes, live: Sequence[int], can_go_on: Callable[[int], bool]) -> tuple[float, bool]:
    """Of the processors' time, by the processes of ranks that can go on; and whether all of them sleep."""
    seen = [spent_seconds(homes.pids[index]) for index in filter(can_go_on, live)]
    return sum(spent for spent, _ in seen), all(is_asleep for _, is_asleep in seen)
