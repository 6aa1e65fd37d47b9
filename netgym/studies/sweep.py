"""Runs a sweep: every point as a comparison of its own; failed points are marked and the others run.

A `PointRunner` runs points: `run_here` on this machine, side by side, or `ClusterRunner.run` (runners.py) on a cluster.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections import Counter
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from exogym_core.names import visible
from exogym_core.results.disk import RecordError
from exogym_core.results.progress import format_loss, warnings_to
from exogym_core.results.run_folder import RunFolder
from exogym_core.workers.processes.jobs import Job, run_jobs
from exogym_core.workers.spec import IN_ONE_PROCESS
from netgym.command_options import first_line
from netgym.experiment.comparison import TaskCache, TrainedRun, compare, jobs_at_once
from netgym.experiment.experiment import Experiment, retimable, trainings_of
from netgym.studies.points import batches_of
from netgym.studies.report import StudyReport
from netsim.cli.signals import raise_lost_interrupt
from netsim.errors import InputError
from netsim.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from netgym.experiment.comparison import Listener
    from netgym.studies.points import Point
    from netgym.studies.study import Study

__all__ = [
    "Estimate",
    "Found",
    "PointProgress",
    "PointQueue",
    "PointRun",
    "PointRunner",
    "Probe",
    "SweepProgress",
    "cpu_seconds",
    "estimate",
    "estimated",
    "failed_by",
    "found_by",
    "objective",
    "probe",
    "run_here",
    "run_sweep",
    "settle",
    "train_in",
]

_SECONDS_BETWEEN_LINES = 5.0
_TIMED_STEPS = 8
_MORE_STEPS = 40  # where one takes less than these seconds
_SHORT_SECONDS = 0.2
_MOST_NAMED = 20  # points on a line
_BYTES_OF_A_POINT = 1e9  # where none was measured
_TRUST = 0.1  # share of a sweep at which measured time outweighs its estimate


class PointQueue:
    """Points in the order in which they may run: trainings first; one that retimes others waits until these have ended.

    Points that retime the same trainings follow each other, so that they share a task.

    Args:
        points: to run.

    Attributes:
        waiting: those that have not been taken.
    """

    def __init__(self, points: Sequence[PointRun]) -> None:
        self.waiting = list(points)
        self._left = {each.number for each in points}

    def take(self) -> PointRun | None:
        """The next point; None: one that runs has to end first."""
        ready = [each for each in self.waiting if not each.awaited & self._left]
        if not ready:
            return None
        each = min(ready, key=lambda each: (bool(each.trained), sorted(each.awaited)))
        self.waiting.remove(each)
        return each

    def end(self, point: PointRun) -> None:
        """Note the end of a point."""
        self._left.remove(point.number)


def run_here(
    points: Sequence[PointRun], num_jobs: int | None = 1, measured: Probe | None = None
) -> Iterator[tuple[int, Found]]:
    """Run points on this machine, each in a job from `begin` to `end`; yields (number, result) as they end.

    Points that others wait for train several of their runs at once, where these points leave jobs idle.

    Args:
        points: to run.
        num_jobs: points at once; None: as many as cores and memory allow.
        measured: the probe of a point, with the memory that one takes; None: not measured.
    """
    running: dict[int, tuple[PointRun, RunFolder]] = {}
    queue, tasks = PointQueue(points), TaskCache()

    def jobs(num_points: int, runs_at_once: int) -> Iterator[Job | None]:
        while len(points) - len(queue.waiting) < num_points:
            each = queue.take()
            if each is None:
                yield None
                continue
            folder, progress = each.begin()
            running[each.number] = each, folder
            if each.trained:
                try:
                    tasks.get(each.study.experiment_at(each.point))  # which its process then has
                except Exception as error:  # the point will report it
                    raise_lost_interrupt(error)

            def train(report: PointProgress, each: PointRun = each, folder: RunFolder = folder) -> Found:
                def run() -> list[dict[str, Any]]:
                    experiment = each.experiment(folder)
                    asked = 1 if runs_at_once == 1 else None  # as many as can share the machine, up to these
                    at_once = _at_once(experiment, runs_at_once, asked, measured)
                    return train_in(folder, experiment, report, at_once, each.sources, tasks)

                return found_by(run, folder)

            yield Job(str(each.number), train, progress)

    try:
        at_once = _at_once(points[0].study.base(), len(points), num_jobs, measured) if points else 1
        num_trained = sum(not each.trained for each in points)
        runs_at_once = _runs_at_once(num_trained, at_once)
        phases = [(num_trained, num_trained, runs_at_once)] if runs_at_once > 1 else []
        phases.append((len(points), at_once, 1))
        for num_points, points_at_once, runs_of_each in phases:
            with closing(run_jobs(jobs(num_points, runs_of_each), points_at_once)) as ends:
                for job, end in ends:
                    each, folder = running.pop(int(job.name))
                    queue.end(each)
                    if isinstance(end.error, RecordError):
                        folder.release()
                        raise end.error
                    found = end.result if end.error is None else failed_by(end.error, folder)
                    yield each.number, each.end(folder, found)
    finally:
        for _, folder in running.values():
            folder.release()


def _at_once(experiment: Experiment, num_points: int, num_jobs: int | None, measured: Probe | None) -> int:
    if num_jobs is None and experiment.compute.is_measured:  # each point measures for itself
        return 1
    num_bytes = _BYTES_OF_A_POINT if measured is None else measured.memory_bytes
    return jobs_at_once(experiment, num_points, num_jobs, lambda: num_bytes)


def _runs_at_once(num_trained: int, at_once: int) -> int:
    """Runs of a point to train at once while `num_trained` points train and all others wait for them."""
    return max(at_once // num_trained, 1) if num_trained else 1


def run_sweep(study: Study, progress: SweepProgress, run: PointRunner) -> int:
    """Run the points that are not finished; returns the number of failed ones.

    A point that was interrupted resumes, one that failed is tried again. A full disk and Ctrl-C end the sweep; points
    that finished are kept, unless the experiment was changed since: then those of another one are run again.
    """
    begun = 0
    trained: dict[str, tuple[int, str]] = {}  # by training: the point that others retime, and the label there
    for points, report in batches_of(study.sweep):
        values: dict[int, float | None] = {}
        left = []
        if study.is_changed and begun:  # the first ones are settled before the estimate
            settle(study, begun, points, progress.report)
        # What is finished, or was begun, has recordings already.
        order = sorted(enumerate(points, start=begun), key=lambda each: _newness(study, each[0]))
        found = {number: _sources(study, number, point, trained) for number, point in order}
        for number, point in enumerate(points, start=begun):
            sources, again = found[number]
            if (known := study.finished(number)) is None:
                left.append(PointRun(study, number, point, progress, sources, again))
            else:
                progress.skip(number)
                values[number] = _value(study, known)
        values |= {number: _value(study, result) for number, result in run(left)}
        # So that a resumed search proposes the same points.
        report([values[number] for number in sorted(values)])
        begun += len(points)
    beyond = [number for each in study.entries if (number := int(each["name"])) >= begun]
    for number in beyond:
        study.discard(number)
    if beyond:
        left_out = ", ".join(str(number + 1) for number in beyond[:_MOST_NAMED])
        progress.report(f"removed, as the sweep has {format_count(begun, 'point')} now: point {left_out}")
    return sum(bool(entry.get("failed")) for entry in study.entries)


def _newness(study: Study, number: int) -> int:
    """0 of a finished point, 1 of one that was begun, 2 of others."""
    entry = study.entry(number)
    return 0 if study.finished(number) else 1 if entry is not None and not entry.get("failed") else 2


def settle(study: Study, first: int, points: Sequence[Point], write: Callable[[str], None]) -> None:
    """Give begun points the numbers that they have in a changed sweep, and remove those of another experiment.

    Points that lack added seeds continue with these. What happens is written in lines.
    """
    study.begin_change()
    study.finish_change()
    moved = {}
    if study.sweep.search != "optuna":  # which may propose a point twice
        now = {_plain_text(point): number for number, point in enumerate(points, start=first)}
        begun = {int(entry["name"]): _plain_text(entry["point"]) for entry in study.entries}
        moved = {number: now[text] for number, text in begun.items() if text in now}
    changed, gone, extended = {}, [], []

    def check(number: int) -> None:
        """Remove the begun point of that number, if it is of another experiment than the sweep has there."""
        point = points[number - first]
        try:
            key = None
            if study.extend(number, point):
                extended.append(str(number + 1))
            else:
                key = study.difference(number, point)
        except InputError:
            key = "experiment"  # which the point will report
        if key is not None:
            changed[number] = key
            study.discard(number)

    for entry in list(study.entries):
        number = int(entry["name"])
        if first <= number < first + len(points) and number not in moved:
            if number in moved.values():
                gone.append(number)
                study.discard(number)
            else:
                check(number)
    if moved:
        study.renumber(moved)
    for number in sorted(moved.values()):
        check(number)
    if changed:
        named = [f"{number + 1} (another {key})" for number, key in sorted(changed.items())[:_MOST_NAMED]]
        more = len(changed) - len(named)
        named += [f"{more} more"] if more else []
        write(f"run again, as the experiment was changed since: point {', '.join(named)}")
    if gone:
        removed = ", ".join(str(number + 1) for number in gone[:_MOST_NAMED])
        write(f"removed, as the sweep does not have it any more: former point {removed}")
    others = [f"{old + 1} (now {new + 1})" for old, new in sorted(moved.items()) if old != new]
    if others:
        write(f"kept under another number: point {', '.join(others[:_MOST_NAMED])}")
    if extended:
        write(f"continued with the seeds that were added: point {', '.join(extended[:_MOST_NAMED])}")
    if study.sweep.search != "optuna" or first + len(points) >= study.sweep.num_points:
        study.end_change()


def _plain_text(point: Point) -> str:
    """A point as text, equal for one that is read back."""
    return json.dumps(json.loads(json.dumps(point, default=str)), sort_keys=True)


def _sources(
    study: Study, number: int, point: Point, trained: dict[str, tuple[int, str]]
) -> tuple[dict[str, tuple[int, str]], dict[str, str]]:
    """Earlier point with the training of each strategy, by label, and the label there; new ones go into `trained`.

    Strategies that have to be trained again come apart, by label, with the reason.
    """
    sources, again = {}, {}
    try:
        trainings = trainings_of(study.experiment_at(point))
    except InputError:  # the point will fail
        trainings = {}
    for label, (key, reason) in trainings.items():
        source = trained.setdefault(key, (number, label))
        if source[0] != number and reason is None:
            sources[label] = source
        elif source[0] != number and reason is not None:
            again[label] = reason
    return sources, again


def _value(study: Study, found: Mapping[str, Any]) -> float | None:
    return None if found.get("failed") else objective(study.sweep.minimise, found["strategies"])


def objective(field: str | None, entries: Sequence[Mapping[str, Any]]) -> float:
    """Number that a search minimises: the best strategy's; infinite where none has one.

    A time to the target counts only where the target was held.

    Raises:
        InputError: summaries have no such field.

    >>> objective("final_loss", [{"final_loss": 0.4}, {"final_loss": 0.2}, {"final_loss": None}])
    0.2
    """
    if field is None:
        return 0.0
    if entries and not any(field in entry for entry in entries):
        numbers = sorted(
            {key for entry in entries for key, value in entry.items() if isinstance(value, int | float)}
        )
        raise InputError(f"minimise {field}: the summary has no such field: choose from {', '.join(numbers)}")
    values = [
        entry[field]
        for entry in entries
        if isinstance(entry.get(field), int | float)
        and not entry.get("failed")
        and (field != "virtual_seconds_to_target" or entry.get("target") == "held")
    ]
    return min(values, default=math.inf)


Found = dict[str, Any]
"""Result of a point: `strategies` (its summary), and `failed` with `error` where something failed."""

PointRunner: TypeAlias = "Callable[[Sequence[PointRun]], Iterator[tuple[int, Found]]]"
"""Runs each of the points from `begin` to `end`, and yields its number and result."""


@dataclass(frozen=True)
class PointRun:
    """A point to run.

    Attributes:
        study: its sweep.
        number: of the point in the sweep, from 0.
        point: values by key path.
        progress: of the sweep.
        trained: of strategies that an earlier point trains alike, by label: its number, and the label there.
        again: strategies that this point trains again all the same, by label: why.
    """

    study: Study
    number: int
    point: Point
    progress: SweepProgress
    trained: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    again: Mapping[str, str] = field(default_factory=dict)

    @property
    def awaited(self) -> set[int]:
        """Points that it retimes."""
        return {number for number, _ in self.trained.values()}

    @property
    def sources(self) -> dict[str, TrainedRun]:
        """Folders of the trainings that it retimes, by label."""
        return {
            label: TrainedRun(self.study.point_folder(number).path, other)
            for label, (number, other) in self.trained.items()
        }

    def begin(self) -> tuple[RunFolder, PointProgress]:
        """Mark the point as begun; returns its folder, locked until `end`, and its progress."""
        num_done = _num_finished(self.study, self.number).total()
        listener = self.progress.point(self.number, self.study.point_text(self.point), num_done)
        self.study.note(self.number, self.point, {"incomplete": True})
        return self.study.point_folder(self.number).owned(), listener

    def experiment(self, folder: RunFolder) -> Experiment:
        """The point's experiment, written to its folder; where it was begun before, with the times measured then.

        Raises:
            InputError: the point makes no valid experiment.
        """
        folder.clean()
        if folder.read_summary():
            experiment = Experiment.load(folder.path / "experiment.yaml", trust=True)
            folder.seal()  # which a process that was killed may not have done
        else:
            experiment = self.study.experiment_at(self.point)
            folder.write_text("experiment.yaml", experiment.to_yaml())
            folder.write_environment(experiment.code_folder)
        if code := self.study.folder.read_code():
            folder.note_code(code)  # a point is resumed and retimed by itself too
        return replace(experiment, edited_code=self.study.edited_code)

    def end(self, folder: RunFolder, found: Found) -> Found:
        """Record the point's result."""
        for label, reason in self.again.items() if found["strategies"] else ():
            folder.log(f"{visible(label)} is trained again: {reason}")
            folder.note_trained_again(label, reason)
        folder.release()
        if retimed := folder.read_retimed():
            found["retimed"] = sorted(retimed)
        if again := folder.read_trained_again():
            found["trained_again"] = again
        if found.get("failed"):
            found["error"] = found["error"].removeprefix(f"point {self.study.point_text(self.point)}: ")
        self.study.note(self.number, self.point, found)
        result = f"failed: {found['error']}" if found.get("failed") else _result_line(found["strategies"])
        self.progress.finish(self.number, result)
        return found


def train_in(
    folder: RunFolder,
    experiment: Experiment,
    listener: Listener,
    jobs: int | None = 1,
    sources: Mapping[str, TrainedRun] | None = None,
    tasks: TaskCache | None = None,
) -> list[dict[str, Any]]:
    """Train, or retime, the strategies that are not finished in `folder`; warnings go to its log."""
    with warnings_to(folder.log):
        return compare(experiment, folder, listener, resume=True, jobs=jobs, sources=sources, tasks=tasks)


def found_by(run: Callable[[], list[dict[str, Any]]], folder: RunFolder) -> Found:
    """Result of a run in `folder`, failed or not; only errors of the disk are raised."""
    try:
        entries = run()
    except RecordError:
        raise
    except Exception as error:
        raise_lost_interrupt(error)
        return failed_by(error, folder)
    failed = [entry for entry in entries if entry.get("failed")]
    if not failed:
        return {"strategies": entries}
    line = f"{failed[0]['name']}: {failed[0].get('error')}"
    return {"strategies": entries, "failed": True, "error": line}


def failed_by(error: Exception, folder: RunFolder) -> Found:
    """Result of a point that an exception ended."""
    return {"failed": True, "error": visible(first_line(error), 500), "strategies": folder.read_summary()}


def _result_line(entries: Sequence[Mapping[str, Any]]) -> str:
    """A point's result on one line."""
    words = []
    for entry in entries:
        loss, seconds = entry.get("final_loss"), entry.get("virtual_seconds_to_target")
        text = str(visible(entry["name"]))
        if loss is not None:
            text += f" {format_loss(loss)}"
        if seconds is not None and entry.get("target") == "held":
            text += f" (target at {format_seconds(seconds)})"
        words.append(text)
    return "; ".join(words[:6]) + ("; ..." if len(words) > 6 else "")


class SweepProgress:
    """Progress of a sweep, a line every few seconds.

    The time left is that of an estimate, corrected by the time taken as more of the work is done.

    Args:
        write: takes a line, the number of finished points and that of all.
        num_points: of the sweep.
        estimate: of the points that are left; None: all take equally long.
    """

    def __init__(
        self, write: Callable[[str, float, int], None], num_points: int, estimate: Estimate | None = None
    ) -> None:
        self._write, self._num_points, self._estimate = write, num_points, estimate
        self._begun = self._last = time.monotonic()
        self._waited = ""
        self._left = {number: self._weight(number) for number in range(num_points)}
        self._old = 0  # points finished by earlier processes
        self._all = sum(self._left.values())  # work for this process
        self._shares: dict[int, float] = {}  # completed share of each running point

    def _weight(self, number: int) -> float:
        return 1.0 if self._estimate is None else self._estimate.of_points.get(number, 0.0)

    def skip(self, number: int) -> None:
        """Count a point that an earlier process finished."""
        self._all -= self._left.pop(number)
        self._old += 1

    def point(self, number: int, text: str, num_done: int = 0) -> PointProgress:
        """Report the start of the point of `text`, which has `num_done` finished runs; numbers count from 0."""
        self._shares[number] = 0.0
        name = f"point {number + 1} of {self._num_points}"
        self._write(f"{name}: {visible(text, 200)}", self._done(), self._num_points)
        return PointProgress(self, number, name, num_done)

    def finish(self, number: int, result: str) -> None:
        """Report the end of a point."""
        self._shares.pop(number, None)
        self._left.pop(number, None)
        self._report(f"point {number + 1} of {self._num_points}: {result}")

    def step(self, number: int, share: float, line: Callable[[], str]) -> None:
        """Report the completed `share` of a running point, every few seconds."""
        self._shares[number] = share
        if time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._report(line())

    def report(self, line: str) -> None:
        """Write a line about the sweep."""
        self._write(line, self._done(), self._num_points)

    def waiting(self, num_submitted: int) -> None:
        """Report the number of finished points and of those that a cluster has, once until it changes."""
        points = format_count(self._num_points, "point")
        line = f"{self._num_points - len(self._left)} of {points} finished, {num_submitted} submitted"
        if line != self._waited and time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._waited = line
            self._report(line)

    def _report(self, line: str) -> None:
        self._last = time.monotonic()
        if (left := self.seconds_left(self._last - self._begun)) is not None:
            line += f", ETA {format_seconds(round(left))}"
        self._write(line, self._done(), self._num_points)

    def seconds_left(self, taken: float) -> float | None:
        """Host time until the end, where `taken` seconds have passed; None: not known, or no point is left."""
        left = sum(weight * (1 - self._shares.get(number, 0.0)) for number, weight in self._left.items())
        if not self._left or not self._all:
            return None
        done = 1 - left / self._all
        if self._estimate is not None:
            return (taken + _TRUST * self._estimate.seconds) / (done + _TRUST) * (1 - done)
        return taken / done * (1 - done) if done >= _TRUST else None

    def _done(self) -> float:
        return self._num_points - len(self._left) + sum(self._shares.values())


class PointProgress:
    """Progress of one point: the `Listener` of its comparison."""

    def __init__(self, sweep: SweepProgress, number: int, name: str, num_done: int) -> None:
        self._sweep, self._number, self._name, self._num_done = sweep, number, name, num_done
        self._run, self._runs, self._steps, self._label = 1, 1, 1, ""
        self._shares: dict[int, float] = {}  # completed share of each run, for all copies

    def begin(self, label: str, position: int, num_strategies: int, num_steps: int) -> PointProgress:
        """Progress of a run of the point, alongside others."""
        run = copy(self)
        run._run, run._runs, run._steps, run._label = position, num_strategies, num_steps, visible(label)
        return run

    def event(self, row: Mapping[str, Any]) -> None:
        """Report the share of the point that a step completes."""
        if row["kind"] == "step":
            self._shares[self._run] = row["step"] / self._steps
            self._sweep.step(
                self._number,
                sum(self._shares.values()) / max(self._runs - self._num_done, 1),
                lambda: (
                    f"{self._name}: {self._label}: step {row['step']} of {self._steps}, "
                    f"loss {format_loss(row['train_loss'])}"
                ),
            )

    def end(self, words: str) -> None:
        """Ignore the end of a run of the point."""


@dataclass(frozen=True)
class Probe:
    """Processor seconds of the parts of one run, and its peak memory.

    Attributes:
        start_seconds: before the first step: data, processes, and at the end files.
        step_seconds: of one step of all workers.
        evaluation_seconds: of one evaluation.
        memory_bytes: of this process and its children.
        others_seconds: the first two of the other strategies, by label.
        task_seconds: of loading data, of a point's own files, and of checks before its first step.
        retimed_seconds: of retiming a run of one step, and of each step more.
        page_seconds: of drawing and writing the page.
        slowdown: host seconds that a processor second takes, with what else this machine does.
    """

    start_seconds: float
    step_seconds: float
    evaluation_seconds: float
    memory_bytes: int
    others_seconds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    task_seconds: float = 0.0
    retimed_seconds: tuple[float, float] = (0.0, 0.0)
    page_seconds: float = 0.0
    slowdown: float = 1.0


@dataclass(frozen=True)
class Estimate:
    """Host time and memory of a sweep.

    Attributes:
        seconds: of this machine, for all points, `at_once` of them side by side.
        memory_bytes: of a point, at the peak.
        num_runs: points, times strategies, times seeds.
        at_once: points side by side.
        num_retimed: those of the runs that are not trained but timed on another network.
        of_points: processor seconds of each point that is left, by number.
    """

    seconds: float
    memory_bytes: int
    num_runs: int
    at_once: int = 1
    num_retimed: int = 0
    of_points: Mapping[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        memory = format_bytes(float(f"{self.memory_bytes:.2g}"))
        retimed = f", {self.num_retimed} of them by retiming" if self.num_retimed else ""
        return (
            f"about {format_seconds(float(f'{self.seconds:.2g}'))} of this machine for "
            f"{format_count(self.num_runs, 'run')}{retimed}, {format_count(self.at_once, 'point')} at once "
            f"with {memory} of memory each (a few steps of each strategy were timed)"
        )


class _Stopwatch:
    """Times the runs of a comparison: its `Listener`.

    Attributes:
        marks: processor seconds of this process when the comparison begins, each run begins, and all have ended.
        host_seconds, processor_seconds: of the last training.
    """

    def __init__(self) -> None:
        self.marks = [cpu_seconds()]
        self.host_seconds = self.processor_seconds = self._began = 0.0

    def begin(self, label: str, position: int, num_strategies: int, num_steps: int) -> _Stopwatch:
        """Note the beginning of a run."""
        self.marks.append(cpu_seconds())
        self._began = time.perf_counter()
        return self

    def event(self, row: Mapping[str, Any]) -> None:
        """Take a row of the run; only its time counts here."""

    def end(self, words: str) -> None:
        """Note the end of a training, before its files are written."""
        self.host_seconds = time.perf_counter() - self._began
        self.processor_seconds = cpu_seconds() - self.marks[-1]

    def runs(self) -> list[float]:
        """Processor seconds of each run, its files included."""
        return [later - earlier for earlier, later in pairwise(self.marks[1:])]


def probe(experiment: Experiment) -> Probe:
    """Compare the strategies for a few steps and time their runs, with their files and page; these are not kept.

    A comparison over one step goes first, so that imports and compilation are not timed. Whole runs are timed, one of
    them evaluated at every step: rows of several steps, and of evaluations, may be reported at once.
    """
    settings, label = experiment.settings, str(experiment.strategies[0].label)
    evaluate = settings.evaluate.model_copy(update={"every": 10**9})
    every = experiment.with_settings(evaluate=evaluate, loggers=[], checkpoint=None, seeds=None)
    is_retimed, num_steps = label in retimable(experiment), min(_TIMED_STEPS, settings.steps)
    retimed = []
    with TemporaryDirectory(prefix="netgym-probe-") as place:
        folders = [RunFolder(Path(place, name)) for name in ("trained", "retimed")]
        for folder in folders:
            folder.path.mkdir()
            folder.write_text("experiment.yaml", experiment.to_yaml())
            folder.write_environment()
        trained = TrainedRun(folders[0].path, label)

        def timed(what: Experiment, steps: int) -> _Stopwatch:
            """Time a comparison over some steps, and the retiming of its first run."""
            what = what.with_settings(steps=steps)
            watches = [_Stopwatch(), _Stopwatch()]
            for folder, watch, sources in zip(folders, watches, ({}, {label: trained}), strict=True):
                watch.marks = [cpu_seconds()]
                if not sources or is_retimed:
                    with warnings_to(folder.log):
                        compare(what.only(label) if sources else what, folder, watch, sources=sources)
                watch.marks.append(cpu_seconds())
            retimed.append(watches[1].runs()[0] if is_retimed else 0.0)
            return watches[0]

        timed(every, 1)
        one = timed(every, 1)
        if one.runs()[0] < _SHORT_SECONDS:
            num_steps = min(_MORE_STEPS, settings.steps)
        # Processor time: what else the machine does adds to host time, more than some steps take.
        took = timed(every, num_steps).runs()
        evaluate = settings.evaluate.model_copy(update={"every": 1})
        last = timed(every.only(label).with_settings(evaluate=evaluate), num_steps)
        evaluation_seconds = max(last.runs()[0] - took[0], 0.0) / max(num_steps - 1, 1)
        # Memory at the peak of this process, and of as many of its largest child as run at once.
        workers, num_children = settings.workers, 0
        if workers.kind not in IN_ONE_PROCESS:
            num_children = min(workers.processes or os.cpu_count() or 1, workers.count)
        own, child = (
            resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        began = cpu_seconds()
        # With the imports of plots, which the curves of more points outweigh.
        with contextlib.suppress(InputError):
            StudyReport([folders[0].path]).html()
        page_seconds = cpu_seconds() - began
    of_steps = [
        max(all_ - first, 0.0) / max(num_steps - 1, 1) for first, all_ in zip(one.runs(), took, strict=True)
    ]
    starts = [  # without the two evaluations of a run of one step
        max(first - step - 2 * evaluation_seconds, 0.0)
        for first, step in zip(one.runs(), of_steps, strict=True)
    ]
    others = [str(entry.label) for entry in experiment.strategies[1:]]
    return Probe(
        start_seconds=starts[0],
        step_seconds=of_steps[0],
        evaluation_seconds=evaluation_seconds,
        memory_bytes=(1 if sys.platform == "darwin" else 1024) * (own + child * num_children),
        others_seconds=dict(zip(others, zip(starts[1:], of_steps[1:], strict=True), strict=True)),
        task_seconds=one.marks[1] - one.marks[0],
        retimed_seconds=(retimed[1], max(sum(retimed[2:]) / 2 - retimed[1], 0.0) / max(num_steps - 1, 1)),
        page_seconds=page_seconds,
        slowdown=last.host_seconds / (last.processor_seconds or last.host_seconds or 1.0),
    )


def cpu_seconds() -> float:
    """Processor seconds of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def _num_finished(study: Study, number: int) -> Counter[str]:
    """Number of a point's finished runs, by label."""
    summary = study.point_folder(number).read_summary() if study.entry(number) is not None else []
    runs = ((entry["name"], run) for entry in summary for run in entry.get("by_seed") or [entry])
    return Counter(name for name, run in runs if not (run.get("incomplete") or run.get("failed")))


def estimated(study: Study, jobs: int | None = None) -> tuple[str, Probe | None, Estimate | None]:
    """Line with host time, memory and the points that are refused already; the probe; the estimate; of what is left.

    Args:
        study: in its folder.
        jobs: points at once; None: as many as cores and memory allow.

    Raises:
        InputError: every point is refused.
    """
    is_grid = study.sweep.search == "grid"
    points = study.sweep.grid() if is_grid else next(batches_of(study.sweep))[0][:1]
    experiments: dict[int, Experiment] = {}
    refused = []
    for number, point in enumerate(points):
        try:
            experiments[number] = study.experiment_at(point)
        except InputError as error:
            refused.append(error)
    if not experiments:
        raise refused[0]
    if not is_grid:
        experiments = dict.fromkeys(range(study.sweep.num_points), experiments[0])
    measured = found = None
    # As trainings are looked for: what is finished, or was begun, has recordings.
    experiments = {
        number: experiments[number] for number in sorted(experiments, key=partial(_newness, study))
    }
    done = {number: _num_finished(study, number) for number in experiments}
    left = [each for number, each in experiments.items() if study.finished(number) is None]
    num_left, first = len(left), (left or [*experiments.values()])[0]
    try:
        measured = probe(first)
        num_free = num_left if study.sweep.search != "optuna" else study.sweep.at_once or 1
        at_once = _at_once(first, num_free, jobs, measured)
        found = estimate(measured, experiments, first, at_once, retimes=is_grid, done=done)
        text = str(found)
    except Exception as error:  # the sweep will mark the point, and may do the others
        raise_lost_interrupt(error)
        text = f"no estimate: {visible(error, 200)}"
    of_all = f"{num_left} of " if num_left < len(experiments) else ""
    line = f"{of_all}{format_count(study.sweep.num_points, 'point')}: {text}"
    if refused:
        line += f"; {len(refused)} of them will be marked as failed: {str(refused[0]).partition(chr(10))[0]}"
    return line, measured, found


def estimate(
    measured: Probe,
    experiments: Mapping[int, Experiment],
    measured_on: Experiment,
    at_once: int = 1,
    *,
    retimes: bool = True,
    done: Mapping[int, Mapping[str, int]] | None = None,
) -> Estimate:
    """Scale a probe to a sweep: a step's seconds are taken to grow with workers and samples alone.

    Points that retime others follow the trainings, and the longest point of either kind takes its time; of trainings
    that have several runs at once, the longest run.

    Args:
        measured: the probe.
        experiments: of the points, by number.
        measured_on: the experiment that was probed.
        at_once: points side by side.
        retimes: equal trainings are done once.
        done: number of finished runs of each point by label, which take no more time.
    """
    num_runs = num_retimed = 0
    of_points: dict[int, float] = {}
    # Seconds of each point's runs, by whether it waits for others.
    by_kind: dict[bool, list[list[float]]] = {False: [], True: []}
    first_with: dict[str, int] = {}  # by training, the point that has it first
    samples = measured_on.settings.workers.count * measured_on.settings.batch_size
    for number, experiment in experiments.items():
        settings, num_done = experiment.settings, (done or {}).get(number, {})
        trainings = retimable(experiment) if retimes else {}
        # In steps of the probe.
        work = settings.steps * settings.workers.count * settings.batch_size / samples
        evaluations = settings.steps // settings.evaluate.every + 1
        of_runs, waits = [], False
        for label in (str(entry.label) for entry in experiment.strategies):
            runs = len(experiment.seeds) - num_done.get(label, 0)
            num_runs += runs
            key = trainings.get(label)
            if key is not None and first_with.setdefault(key, number) != number:
                first, more = measured.retimed_seconds
                num_retimed, waits = num_retimed + runs, waits or runs > 0
                of_runs += [first + settings.steps * more] * runs
            else:
                start, step = measured.others_seconds.get(
                    label, (measured.start_seconds, measured.step_seconds)
                )
                of_runs += [start + work * step + evaluations * measured.evaluation_seconds] * runs
        if not of_runs:
            continue
        by_kind[waits].append(of_runs)
        of_points[number] = measured.task_seconds + sum(of_runs)
    total, num_trained = measured.page_seconds, len(by_kind[False])
    for waits, points in by_kind.items():
        runs_at_once = 1 if waits else _runs_at_once(num_trained, at_once)
        each_takes = [
            measured.task_seconds + max(sum(of_runs) / runs_at_once, max(of_runs)) for of_runs in points
        ]
        total += max(sum(each_takes) / at_once, max(each_takes, default=0.0))
    seconds = total * measured.slowdown
    return Estimate(seconds, measured.memory_bytes, num_runs, at_once, num_retimed, of_points)
