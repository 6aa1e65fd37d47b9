"""Lines that tell how far a sweep is, one point after the other or many side by side."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from exogym_core.app.studies.points import point_text
from exogym_core.names import visible
from exogym_core.results.losses import format_loss
from netsim.files.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from exogym_core.app.studies.points import Point
    from exogym_core.results.fit_result import FitResult

__all__ = ["PointProgress", "SweepProgress"]

_SECONDS_BETWEEN_LINES = 5.0


class SweepProgress:
    """How far a sweep is.

    Args:
        write: takes a line.
        num_points: how many there are in all.
    """

    def __init__(self, write: Callable[[str], None], num_points: int) -> None:
        self._write, self._num_points = write, num_points
        self._begun = self._last = time.monotonic()
        self._old = self._over = 0  # points that were done before, and since
        self._waited = ""
        self._shares: dict[int, float] = {}  # of those under way, how much is done

    def skip(self) -> None:
        """A point was done before this process began."""
        self._old += 1

    def point(self, number: int, point: Point) -> PointProgress:
        """A point begins; numbers count from 0."""
        self._shares[number] = 0.0
        name = f"point {number + 1} of {self._num_points}"
        self._write(f"{name}: {visible(point_text(point), 200)}")
        return PointProgress(self, number, name)

    def over(self, number: int, told: str) -> None:
        """A point has ended."""
        self._shares.pop(number, None)
        self._over += 1
        self._tell(f"point {number + 1} of {self._num_points}: {told}")

    def step(self, number: int, share: float, told: Callable[[], str]) -> None:
        """Of a point that is under way, `share` is done; tells it every few seconds."""
        self._shares[number] = share
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._tell(told())

    def waiting(self) -> None:
        """Nothing has ended for a moment; tells it after a few seconds, once."""
        line = (
            f"{self._old + self._over} of {self._num_points} points are done, {len(self._shares)} under way"
        )
        if line != self._waited and time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._waited = line
            self._tell(line)

    def say(self, line: str) -> None:
        """Anything else."""
        self._write(line)

    def _tell(self, line: str) -> None:
        self._last = time.monotonic()
        done = self._over + sum(self._shares.values())
        left = self._num_points - self._old - done
        if done and left > 0:
            line += f", ETA {format_seconds(round((self._last - self._begun) / done * left))}"
        self._write(line)


class PointProgress:
    """The `Listener` of one point's comparison."""

    def __init__(self, sweep: SweepProgress, number: int, name: str) -> None:
        self._sweep, self._number, self._name = sweep, number, name
        self._run, self._runs, self._steps, self._label = 1, 1, 1, ""

    def begin(self, label: str, position: int, num_strategies: int, num_steps: int) -> None:
        """One of its runs begins."""
        self._run, self._runs, self._steps = position, num_strategies, num_steps
        self._label = visible(label, 40)

    def event(self, row: Mapping[str, Any]) -> None:
        """A row of metrics."""
        if row["kind"] == "step":
            share = (self._run - 1 + row["step"] / self._steps) / self._runs
            self._sweep.step(
                self._number,
                share,
                lambda: (
                    f"{self._name}: {self._label}: step {row['step']} of {self._steps}, "
                    f"loss {format_loss(row['train_loss'])}"
                ),
            )

    def end(self, result: FitResult) -> None:
        """One of its runs ended; the point's end tells what came of all."""
