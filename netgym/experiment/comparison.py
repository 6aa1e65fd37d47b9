"""Comparison of an experiment's strategies on equal terms: its runs, side by side, each recorded as it ends."""

from __future__ import annotations

import importlib
import json
import math
import os
import time
import warnings
from collections import deque
from collections.abc import Sized
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from exogym_core.checkpoints.checkpoint import edited_names, source_digests
from exogym_core.cost.compute import Compute
from exogym_core.learner import memory_limit
from exogym_core.meeting_place import is_at_rendezvous, under_torchrun
from exogym_core.names import seeded_name, visible
from exogym_core.results.disk import RecordError
from exogym_core.results.fit_result import FitResult
from exogym_core.results.loggers import LOGGERS, Logger, NewRows, TrackedRun, close_logger, flat
from exogym_core.results.progress import ending
from exogym_core.results.run_folder import RunFolder
from exogym_core.results.seeds import Tally
from exogym_core.run.monitor import StoppedError
from exogym_core.run.resumption import mark_of_folder, refuse_edited_code
from exogym_core.run.retiming import RecordedTraining, TrainAgainError
from exogym_core.run.trainer import Trainer
from exogym_core.workers.processes.children import can_fork
from exogym_core.workers.processes.jobs import Job, run_jobs
from exogym_core.workers.torchrun.rank import agreed
from netgym.command_options import first_line
from netsim.cli.signals import raise_lost_interrupt
from netsim.errors import InputError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from exogym_core.config import StrategySettings
    from netgym.experiment.experiment import Experiment
    from netgym.experiment.own_code import OwnCode
    from netgym.tasks import Task

__all__ = [
    "Listener",
    "RunListener",
    "TaskCache",
    "TrainedRun",
    "add_seeds",
    "compare",
    "edited_code_of",
    "flat_config",
    "follow",
    "jobs_at_once",
    "judged_otherwise",
    "open_loggers",
    "report_finished_runs",
    "settle_code",
]

_COPIES = 8  # of a replica's weights: gradients, the optimizer's and the strategy's state, snapshots
_PROCESS_BYTES = 3e8  # of a forked process that shares torch's own memory
_SAMPLES_OF_A_STREAM = 256  # evaluated on where the validation set has no length and no number is given


class TrainedRun(NamedTuple):
    """Run folder with a training, and the label of its strategy there."""

    folder: Path
    label: str


class TaskCache:
    """Last task of retimed runs, and a model for it: these runs read lengths and shapes alone, and change neither."""

    def __init__(self) -> None:
        self._key: object = None
        self._kept: tuple[Task, nn.Module] | None = None

    def get(self, experiment: Experiment) -> tuple[Task, nn.Module]:
        """Task and model as the experiment names them, of any seed.

        Raises:
            InputError: they cannot be built.
        """
        settings = experiment.settings
        options = [each and each.to_mapping() for each in (settings.task, settings.model)]
        key = json.dumps(options, default=repr), experiment.own_code
        if self._kept is None or self._key != key:
            self._kept = None  # the former one may be large
            task = experiment.build_task()
            self._key, self._kept = key, (task, experiment.build_model(task))
        return self._kept


class RunListener(Protocol):
    """Receives the progress of one run, in host time."""

    def event(self, row: Mapping[str, Any]) -> None:
        """Take a row of metrics, with its `kind`."""

    def end(self, words: str) -> None:
        """Take the end of the run in `words`, empty where it has not begun to train."""


class Listener(Protocol):
    """Receives the progress of a comparison, in host time."""

    def begin(self, label: str, position: int, num_strategies: int, num_steps: int) -> RunListener:
        """Take the start of a strategy (with several seeds, of one of them); `position` counts from 1."""


def compare(
    experiment: Experiment,
    folder: RunFolder,
    listener: Listener,
    *,
    resume: bool = False,
    trace: bool = False,
    jobs: int | None = 1,
    sources: Mapping[str, TrainedRun] | None = None,
    tasks: TaskCache | None = None,
) -> list[dict[str, Any]]:
    """Train with each strategy and each seed: from the same initial parameters, on the same data in the same order.

    All strategies meet a seed before any meets the next; side by side, the slowest begins a further seed first. One
    that fails is marked and warned of, is not tried with further seeds, and the others continue. If anything else ends
    the run early, results so far are saved, marked incomplete, and the exception is raised. With `resume`, finished
    strategies of this folder are kept, and the others continue from their last checkpoints. With `trace`,
    `trace.json.gz` records the last run.

    Args:
        jobs: runs at once, to the same results; None: as many as cores and memory allow.
        sources: by label, the same training on another network, which is retimed if it can be.
        tasks: of comparisons whose runs are retimed; None: of this one.

    Returns:
        The summary: one object a strategy.

    Raises:
        InputError: the task, the model or an option is wrong, such that nothing can be trained; or `jobs` is.
        RankError: the only strategy failed.
    """
    sources = sources or {}
    experiment.check_runs(trained=sources.keys())
    tally = Tally([str(entry.label) for entry in experiment.strategies], experiment.seeds)
    if resume:
        summary = folder.read_summary()
        tally.take_finished(summary, experiment.seeds[0])
        if len(experiment.seeds) == 1:  # a process may have been killed while it added seeds
            for entry in experiment.strategies:
                label = str(entry.label)
                folder.rename_run(seeded_name(label, experiment.seeds[0]), seeded_name(label, None))
        for label in judged_otherwise(experiment, summary):
            for seed in experiment.seeds:
                tally.drop(label, seed)
            line = f"{visible(label)} is trained again: an earlier version judged another model"
            warnings.warn(line, UserWarning, stacklevel=2)
        for line in report_finished_runs(experiment, folder) if is_at_rendezvous() else ():
            warnings.warn(line, UserWarning, stacklevel=2)
    folder.record_tables(are_final=False)
    folder.write_summary(tally.summary())
    if under_torchrun():
        pairs = [(str(entry.label), seed) for seed, entry in product(experiment.seeds, experiment.strategies)]
        agreed([pair for pair in pairs if not tally.has(*pair)])
    comparison = _Comparison(experiment, folder, listener, tally, trace, sources, tasks or TaskCache())
    comparison.build()
    num_jobs = 1 if trace else jobs_at_once(experiment, len(comparison.left), jobs, comparison.memory_bytes)
    with closing(run_jobs(comparison.jobs(num_jobs), num_jobs)) as ends:
        for job, end in ends:
            comparison.end(job.report, end.error)
            if num_jobs > 1 and not comparison.left:
                importlib.import_module("matplotlib.figure")  # of the page; a core is idle now
    if num_jobs > 1:
        folder.clean()  # processes of dropped runs may have been killed while they wrote a file
    folder.record_tables(are_final=True)
    return tally.summary()


def judged_otherwise(experiment: Experiment, summary: Iterable[Mapping[str, Any]]) -> list[str]:
    """Labels of shipped strategies of which earlier versions judged another model: their runs are no replicates."""
    found, entries = [], {str(each.label): each for each in experiment.strategies if not each.own_code}
    for entry in summary:
        before = {run.get("judged") for run in entry.get("by_seed") or [entry]} - {None}
        if before and entry["name"] in entries:
            with suppress(InputError):  # the run will report it
                if before != {experiment.build_strategy(entries[entry["name"]]).judged}:
                    found.append(entry["name"])
    return found


def add_seeds(folder: RunFolder, stored: Experiment, seeds: Sequence[int]) -> Experiment:
    """Have the run of `stored` continue with `seeds`, of which it keeps those that it has; returns its experiment.

    Args:
        folder: of the run, owned by this process.
        stored: its experiment.
        seeds: several.
    """
    more = stored.with_settings(seed=seeds[0], seeds=list(seeds))
    labels = [str(entry.label) for entry in stored.strategies]
    tally = Tally(labels, more.seeds)
    tally.take_finished(folder.read_summary(), stored.seeds[0])
    folder.record_tables(are_final=False)
    folder.write_summary(tally.summary())  # incomplete: no run that is finished
    if len(stored.seeds) == 1:  # whose files have no seed in their names
        for label in labels:
            folder.rename_run(seeded_name(label, None), seeded_name(label, stored.seeds[0]))
    # Last: what a killed process leaves can be done again, or undone.
    folder.write_text("experiment.yaml", more.to_yaml())
    return more


def edited_code_of(folder: RunFolder, own_code: Collection[OwnCode]) -> list[str]:
    """Names of modules and classes of the user's that were edited since they trained in `folder`; runs `own_code`."""
    for code in own_code:
        with suppress(InputError):  # the run will report it
            code.load()
    return edited_names(folder.read_code(), source_digests())


def settle_code(folder: RunFolder, own_code: Collection[OwnCode], *, accepted: bool = False) -> None:
    """Note the code that trains in `folder`, of a run or of several; where results of its former state are, refuse it.

    Args:
        folder: owned by this process.
        own_code: code that the experiment names, which is run.
        accepted: keep these results, and train the rest with the current code.

    Raises:
        InputError: the code was edited since the first results, which is not accepted.
    """
    if not own_code:
        return
    edited = edited_code_of(folder, own_code)
    # Where strategies alone are the user's, shipped ones have run none of the code; a Chain may have.
    is_shared = any(code.what != "strategy" for code in own_code)
    names = [str(run.get("strategy", ":")) for run in folder.finished_runs()] if edited else []
    if any(is_shared or ":" in name or name == "Chain" for name in names):
        refuse_edited_code(folder.path, edited, "its first results", accepted=accepted)
    folder.note_code(source_digests())


def jobs_at_once(
    experiment: Experiment, num_runs: int, asked: int | None, memory_bytes: Callable[[], float]
) -> int:
    """Runs of an experiment to train at once on this machine.

    Args:
        experiment: of the runs.
        num_runs: to train.
        asked: number that the user wants; None: as many as cores and memory allow, one where runs cannot share them.
        memory_bytes: estimates the memory of one run.

    Raises:
        InputError: more than one was asked for, and runs cannot share the machine.
    """
    if asked == 1:
        return 1
    if (reason := _reason_alone(experiment)) is not None:
        if asked is None:
            return 1
        raise InputError(f"--jobs {asked}: {reason}: leave --jobs out")
    if asked is not None:
        return max(min(asked, num_runs), 1)
    workers = experiment.settings.workers
    num_cores = len(os.sched_getaffinity(0))
    cores = min(workers.processes or num_cores, workers.count) if workers.kind == "processes" else 1
    most = min(num_cores // cores, num_runs)
    return max(min(most, int(memory_limit(torch.device("cpu")) / memory_bytes())), 1) if most > 1 else 1


def _reason_alone(experiment: Experiment) -> str | None:
    """The reason for which runs of an experiment are trained one after the other; None: they can share the machine."""
    settings = experiment.settings
    if under_torchrun() or is_at_rendezvous() or settings.workers.kind == "ray":
        return "runs use other processes than those of this machine"
    devices = settings.device if isinstance(settings.device, list) else [settings.device]
    # Asked for `auto` alone: to ask starts CUDA, after which no job can be forked.
    is_auto = "auto" in devices and (torch.cuda.is_available() or torch.backends.mps.is_available())
    if is_auto or not {"cpu", "auto"}.issuperset(devices):
        return f"runs share the device {', '.join(devices)}"
    if settings.workers.intra_op_threads > 1:
        return "workers.intra_op_threads above 1 uses several cores a run"
    if not can_fork():
        return "this process cannot be forked"
    return None


@dataclass(eq=False)
class _Comparison:
    """Runs of an experiment: starts them in order, and handles failures in that order however runs end.

    Attributes:
        experiment: with what runs have measured.
        left: runs that have not been started.
        step_seconds: host time of a step of each strategy that has begun; infinite before its first row.
    """

    experiment: Experiment
    folder: RunFolder
    listener: Listener
    tally: Tally
    trace: bool
    sources: Mapping[str, TrainedRun]
    tasks: TaskCache
    left: list[_Run] = field(init=False)
    step_seconds: dict[str, float] = field(default_factory=dict)
    _started: deque[_Run] = field(default_factory=deque)  # and not examined for failures yet
    _failures: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        pairs = enumerate(product(self.experiment.seeds, self.experiment.strategies), start=1)
        runs = (_Run(self, entry, seed, number) for number, (seed, entry) in pairs)
        self.left = [run for run in runs if not self.tally.has(run.label, run.seed)]

    @cached_property
    def task(self) -> Task:
        """Task of runs that train."""
        return self.experiment.build_task()

    def build(self) -> None:
        """Build the tasks of the runs: mistakes end the comparison, and processes of runs share the data."""
        is_retimed = {run.label in self.sources for run in self.left}
        if True in is_retimed:
            self.tasks.get(self.experiment)
        if is_retimed != {True}:
            _ = self.task

    def memory_bytes(self) -> float:
        """Estimate of a run's memory, without activations."""
        model = self.experiment.build_model(self.task)
        weights = sum(each.nbytes for each in model.state_dict().values())
        return float(_COPIES * weights * self.experiment.settings.workers.count + _PROCESS_BYTES)

    def jobs(self, num_jobs: int) -> Iterator[Job | None]:
        """Runs to start; None while the first one measures compute time or micro-batch for the others."""
        num_runs = len(self.experiment.strategies) * len(self.experiment.seeds)
        while self.left:
            settings = self.experiment.settings
            is_open = self.experiment.compute.is_measured or settings.minibatch_size == "auto"
            if is_open and not all(run.has_ended for run in self._started):
                yield None
                continue
            run = self.left.pop(self._next() if num_jobs > 1 else 0)
            if run.is_dropped:
                continue
            run.progress = self.listener.begin(run.title, run.number, num_runs, settings.steps)
            run.began = time.monotonic()
            self.step_seconds.setdefault(run.label, math.inf)
            run.job = Job(visible(run.title), run.train, run)
            self._started.append(run)
            yield run.job

    def _next(self) -> int:
        """Index of the next run: the slowest of its seed, so that no run is left alone at the end."""
        of_seed = [index for index, run in enumerate(self.left) if run.seed == self.left[0].seed]
        return max(of_seed, key=lambda index: self.step_seconds.get(self.left[index].label, 0.0))

    def end(self, run: _Run, error: Exception | None) -> None:
        """Handle the end of a run.

        Raises:
            Exception: the error of a run that ends the comparison.
        """
        run.has_ended, run.error = True, error
        run.end("")
        if run.is_dropped:
            run.drop()  # it may have written since
        elif isinstance(error, RecordError):
            raise error
        while self._started and self._started[0].has_ended:
            first = self._started.popleft()
            if first.error is not None and not first.is_dropped:
                self._fail(first, first.error)

    def _fail(self, run: _Run, error: Exception) -> None:
        """Mark a strategy as failed, and drop its runs with further seeds."""
        self._failures.append(error)
        strategies = self.experiment.strategies
        # Nothing was trained yet and two strategies were refused in the same words: the experiment is wrong.
        refused = [str(each) for each in self._failures if isinstance(each, InputError)]
        is_wrong = len(refused) == len(self._failures) > 1 and refused[0] == refused[-1]
        untrained = all(entry.get("failed") and not entry["steps"] for entry in self.tally.summary())
        if len(strategies) == 1 or (is_wrong and untrained):
            raise error
        for other in [*self._started, *self.left]:
            if other.label == run.label:
                other.drop()
        run.fail(error)  # writes the summary, without those
        line = f"{visible(run.label)} failed: {first_line(error)}; the others continue"
        warnings.warn(line, UserWarning, stacklevel=2)
        if len(self._failures) == len(strategies):
            raise self._failures[0]

    def use_measured(self, compute: Mapping[str, Any] | None, minibatch_size: int | None) -> None:
        """Store what the first run measured; all others, and runs of the stored experiment, use the same."""
        experiment = self.experiment
        found = Compute.parse(compute) if compute is not None else experiment.compute
        if found != experiment.compute and experiment.compute.may_become(found):
            experiment = experiment.with_settings(compute=found)
        if experiment.settings.minibatch_size == "auto" and minibatch_size is not None:
            experiment = experiment.with_settings(minibatch_size=minibatch_size)
        if experiment is not self.experiment:
            self.experiment = experiment
            self.folder.write_text("experiment.yaml", experiment.to_yaml())


@dataclass(eq=False)
class _Run:
    """Run of a strategy with a seed: `train` reports to another copy of it where it runs in a process of its own."""

    comparison: _Comparison
    entry: StrategySettings
    seed: int
    number: int
    progress: RunListener | None = None
    job: Job | None = None
    began: float = 0.0
    has_ended: bool = False
    is_dropped: bool = False
    error: Exception | None = None

    @property
    def label(self) -> str:
        """Label of its strategy."""
        return str(self.entry.label)

    @property
    def title(self) -> str:
        """Label, with the seed where there are several."""
        return self.label if self.file_seed is None else f"{self.label} seed {self.seed}"

    @property
    def file_seed(self) -> int | None:
        """Seed in the names of files; None for a single one."""
        return self.seed if len(self.comparison.experiment.seeds) > 1 else None

    def event(self, row: Mapping[str, Any]) -> None:
        """Pass on a row of metrics."""
        self.comparison.step_seconds[self.label] = (time.monotonic() - self.began) / max(row["step"], 1)
        if self.progress is not None:
            self.progress.event(row)

    def end(self, words: str) -> None:
        """Pass on the end of the run."""
        if self.progress is not None:
            self.progress.end(words)
            self.progress = None

    def use_measured(self, compute: Mapping[str, Any] | None, minibatch_size: int | None) -> None:
        """Pass on values that the run has measured."""
        self.comparison.use_measured(compute, minibatch_size)

    def note_retimed(self, name: str, place: str) -> None:
        """Note where the run was trained that this one retimes."""
        self.comparison.folder.note_retimed(name, place)
        self.comparison.folder.log(f"{visible(self.title)} is retimed: it was trained in {visible(place)}")

    def note(self, entry: dict[str, Any]) -> None:
        """Write the run's object of the summary, after its files."""
        self.comparison.tally.add(self.label, self.seed, entry)
        self.comparison.folder.write_summary(self.comparison.tally.summary())

    def fail(self, error: Exception) -> None:
        """Mark it as failed in the summary."""
        comparison = self.comparison
        if not comparison.tally.has(self.label, self.seed):
            nothing = FitResult(target_loss=comparison.experiment.settings.target_loss)
            self.note(nothing.summary(self.label, self.entry.name))
        for line in str(error).splitlines()[1:]:
            comparison.folder.log(line)
        known = comparison.tally.entry(self.label, self.seed)
        known.pop("incomplete", None)
        self.note(known | {"failed": True, "error": visible(first_line(error), 500)})

    def drop(self) -> None:
        """End it, and remove its files."""
        self.is_dropped = True
        if self.job is not None:
            self.job.is_dropped = True
            self.comparison.tally.drop(self.label, self.seed)
            self.comparison.folder.remove_strategy(self.label, seed=self.seed)

    def train(self, report: _Run) -> None:
        """Train and write the run's files."""
        experiment = self.comparison.experiment.with_seed(self.seed)
        source = self.comparison.sources.get(self.label)
        trainer, task = self._trainer(experiment, is_shared=source is not None)
        try:
            if source is not None and not self._retime(trainer, task, experiment, report, source):
                trainer, task = self._trainer(experiment)
                source = None
            if source is None:
                self._fit(trainer, task, experiment, report)
        except BaseException as error:
            stopped = trainer.result or FitResult()
            is_refused = isinstance(error, (InputError, KeyboardInterrupt)) or is_at_rendezvous()
            if stopped.history or not is_refused:
                self._save(stopped, None, report)
            raise
        result = trainer.result or FitResult()
        judged = result.judged_state
        self._save(
            result, {name: judged[name] for name in trainer.model.state_dict() if name in judged}, report
        )

    def _trainer(self, experiment: Experiment, *, is_shared: bool = False) -> tuple[Trainer, Task]:
        """Trainer and its task; those that retimed runs share, or for a training its own model."""
        if is_shared:
            task, model = self.comparison.tasks.get(experiment)
        else:
            task = self.comparison.task
            model = experiment.build_model(task)
        return Trainer(model, task.train, task.validation), task

    def _retime(
        self, trainer: Trainer, task: Task, experiment: Experiment, report: _Run, source: TrainedRun
    ) -> bool:
        """Retime the source's run with this strategy and seed; False: it has to be trained."""
        comparison = self.comparison
        place = os.path.relpath(source.folder.resolve(), comparison.folder.path.resolve())
        try:
            recording = RecordedTraining.of_run(source.folder, seeded_name(source.label, self.file_seed))
            if recording is None:
                raise TrainAgainError(f"{visible(place)} has no recording of it")
            entries = [
                each for each in RunFolder(source.folder).read_summary() if each["name"] == source.label
            ]
            if judged_otherwise(comparison.experiment, [{**each, "name": self.label} for each in entries]):
                raise TrainAgainError("an earlier version judged another model")
            if experiment.compute.is_measured and recording.compute is not None:
                experiment = experiment.with_settings(compute=recording.compute)
            self._fit(trainer, task, experiment, report, recording)
        except StoppedError:
            raise
        except NetsimError as error:  # where the network stops the run, training has what there is until then
            reason = visible(first_line(error), 300).removeprefix("retime: ")
            comparison.folder.log(f"{visible(self.title)} is trained: {reason}")
            short = reason.removeprefix("this run has to be trained again: ")
            comparison.folder.note_trained_again(self.label, short)
            return False
        report.note_retimed(seeded_name(self.label, self.file_seed), place)
        return True

    def _fit(
        self,
        trainer: Trainer,
        task: Task,
        experiment: Experiment,
        report: _Run,
        recording: RecordedTraining | None = None,
    ) -> None:
        folder, name = self.comparison.folder, seeded_name(self.label, self.file_seed)
        given: dict[str, Any] = {"trace": folder.path / "trace.json.gz" if self.comparison.trace else None}
        if experiment.settings.checkpoint is not None and recording is None:
            given["resume_from"] = folder.make_folder("checkpoints", name)
        fit = trainer.fit if recording is None else partial(trainer.retime, recording)
        is_measured = False
        with open_loggers(experiment, folder, name) as loggers:

            def emit(row: Mapping[str, Any]) -> None:
                nonlocal is_measured
                if not is_measured and trainer.result is not None:
                    report.use_measured(trainer.result.compute, trainer.result.minibatch_size)
                    is_measured = True
                raise_lost_interrupt()
                report.event(row)
                for logger in loggers:
                    logger.event(row)

            try:
                _fit(fit, experiment, self.entry, task, on_event=emit, **given)
            except TrainAgainError:
                raise
            except InputError as error:
                raise experiment.placed(error) from error

    def _save(self, result: FitResult, state: Mapping[str, Any] | None, report: _Run) -> None:
        """Write metrics and model; report the end and the summary's object."""
        report.end(ending(result))
        folder = self.comparison.folder
        folder.write_result(self.label, result, seed=self.file_seed)
        if state is not None:
            folder.write_model(self.label, state, seed=self.file_seed)
        report.note(result.summary(self.label, self.entry.name))


def _fit(
    fit: Callable[..., Any], experiment: Experiment, entry: StrategySettings, task: Task, **others: Any
) -> None:
    """Train with a strategy of the experiment; under torchrun network and clock are the real ones."""
    given = experiment.fit_arguments(entry)
    validation = task.validation
    given.setdefault("val_size", len(validation) if isinstance(validation, Sized) else _SAMPLES_OF_A_STREAM)
    if under_torchrun() or is_at_rendezvous():
        for name in ("topology", "placement", "protocol", "collectives", "compute"):
            given.pop(name, None)
        given["transport"] = "gloo"
    fit(accuracy=task.accuracy, progress=False, **given, **others)


def follow(experiment: Experiment) -> None:
    """Train as one of torchrun's ranks other than rank 0, and write nothing."""
    runs = agreed(None)
    task = experiment.build_task()
    for label, seed in runs:
        seeded, (entry,) = experiment.with_seed(seed), experiment.only(label).strategies
        trainer = Trainer(seeded.build_model(task), task.train, task.validation)
        _fit(trainer.fit, seeded, entry, task)


def report_finished_runs(experiment: Experiment, folder: RunFolder) -> list[str]:
    """Report finished runs to the rendezvous, so that no other site continues one alone.

    Returns:
        Lines on runs that could not be reported.

    Raises:
        InputError: the environment's address or number of this site is wrong.
    """
    from netgym.sites.link import report_finished

    tally = Tally([str(entry.label) for entry in experiment.strategies], experiment.seeds)
    tally.take_finished(folder.read_summary(), experiment.seeds[0])
    lines = []
    for seed, entry in product(experiment.seeds, experiment.strategies):
        label = str(entry.label)
        if not tally.has(label, seed):
            continue
        name = seeded_name(label, seed if len(experiment.seeds) > 1 else None)
        mark = mark_of_folder(folder.place("checkpoints", name))
        reason = "it keeps no checkpoints" if mark is None else report_finished(mark)
        if reason:
            lines.append(f"could not report to other sites that {visible(label)} is finished: {reason}")
    return lines


def flat_config(experiment: Experiment, label: str) -> dict[str, Any]:
    """The settings of one strategy's run, one value a key path: `strategy.lr`, `compute.fixed`; the topology's name.

    Args:
        experiment: resolved, with the run's seed.
        label: the strategy's, with the seed where there are several.
    """
    plain = experiment.to_mapping()
    strategies = plain.pop("strategies")
    own = [each for each in strategies if label in (each["label"], f"{each['label']}.seed-{plain['seed']}")]
    plain["strategy"] = (own or strategies)[0]
    if experiment.topology is not None:
        plain["topology"] = experiment.topology.name
    return dict(flat(plain))


@contextmanager
def open_loggers(experiment: Experiment, folder: RunFolder, label: str) -> Iterator[list[Logger]]:
    """The loggers that the experiment names, for one of its strategies; closed at the end.

    `csv` needs none: the run folder's metrics are always written.
    """
    axis = "virtual_seconds" if experiment.topology is not None else "step"
    config = flat_config(experiment, label)
    run = TrackedRun(str(experiment.settings.name), label, config, folder, axis)
    loggers: list[Logger] = []
    with ExitStack() as stack:
        for name in dict.fromkeys(experiment.settings.loggers):
            if (opened := LOGGERS[name]) is not None:
                loggers.append(NewRows(opened(run), run.kept_file(f"{name}.rows")))
                stack.push(partial(close_logger, loggers[-1]))
        yield loggers
