"""One point of a sweep, from its folder's first file to what is told of it; wherever its ranks run."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exogym_core.app.comparison import compare
from exogym_core.app.experiment import Experiment
from exogym_core.app.studies.points import point_text
from exogym_core.names import visible
from exogym_core.results.disk import RecordError
from netsim.files.errors import NetsimError
from netsim.files.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.app.comparison import Listener
    from exogym_core.app.studies.points import Point
    from exogym_core.app.studies.progress import PointProgress, SweepProgress
    from exogym_core.app.studies.study import Study
    from exogym_core.results.record import RunFolder

__all__ = ["Found", "PointRun", "failed_by", "found_by", "train_in"]

Found = dict[str, Any]
"""What came of a point: `strategies` (its summary), and `failed` with `error` where something did."""


@dataclass(frozen=True)
class PointRun:
    """A point that is to be run.

    Attributes:
        study: whose.
        number: in it, counted from 0.
        point: what it changes.
        progress: is told.
    """

    study: Study
    number: int
    point: Point
    progress: SweepProgress

    def begin(self) -> tuple[RunFolder, PointProgress]:
        """Note that it has begun; its folder, which is this process's until `end`."""
        listener = self.progress.point(self.number, self.point)
        self.study.note(self.number, self.point, {"incomplete": True})
        return self.study.point_folder(self.number).owned(), listener

    def experiment(self, folder: RunFolder) -> Experiment:
        """Its experiment, written to its folder; where it was begun before, with what was measured then.

        Raises:
            InputError: the point makes no valid experiment.
        """
        folder.clean()
        if folder.read_summary():
            return Experiment.load(folder.path / "experiment.yaml", trust=True)
        experiment = self.study.experiment_at(self.point)
        folder.write_text("experiment.yaml", experiment.to_yaml())
        folder.write_environment(next((code.folder for code in experiment.own_code if code.folder), None))
        return experiment

    def end(self, folder: RunFolder, found: Found) -> Found:
        """Note what came of it."""
        folder.release()
        if found.get("failed"):
            found["error"] = found["error"].removeprefix(f"point {point_text(self.point)}: ")
        self.study.note(self.number, self.point, found)
        told = f"failed: {found['error']}" if found.get("failed") else _told(found["strategies"])
        self.progress.over(self.number, told)
        return found


def train_in(folder: RunFolder, experiment: Experiment, listener: Listener) -> list[dict[str, Any]]:
    """Train the experiment's strategies in its folder, or what is left of them; warnings go to its log."""

    def note(message: Warning | str, *_: object, **__: object) -> None:
        folder.log(f"warning: {visible(message, 500)}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = note
        return compare(experiment, folder, listener, resume=True)


def found_by(run: Callable[[], list[dict[str, Any]]], folder: RunFolder) -> Found:
    """What came of a run in `folder`, whatever that was; only what the disk refuses is raised."""
    try:
        entries = run()
    except RecordError:
        raise
    except Exception as error:
        return failed_by(error, folder)
    failed = [entry for entry in entries if entry.get("failed")]
    if not failed:
        return {"strategies": entries}
    return {
        "strategies": entries,
        "failed": True,
        "error": f"{failed[0]['name']}: {failed[0].get('error')}",
    }


def failed_by(error: Exception, folder: RunFolder) -> Found:
    """What is noted of a point that an exception has ended."""
    text = str(error) if isinstance(error, NetsimError) else f"{type(error).__name__}: {error}"
    told = visible(text.partition("\n")[0], 500)
    return {"failed": True, "error": told, "strategies": folder.read_summary()}


def _told(entries: Sequence[Mapping[str, Any]]) -> str:
    """What came of a point, in a few words."""
    words = []
    for entry in entries:
        loss, seconds = entry.get("final_loss"), entry.get("virtual_seconds_to_target")
        told = str(visible(entry["name"], 40))
        if loss is not None:
            told += f" {loss:.4g}"
        if seconds is not None and entry.get("target") == "held":
            told += f" (target at {format_seconds(seconds)})"
        words.append(told)
    return "; ".join(words[:6]) + ("; ..." if len(words) > 6 else "")
