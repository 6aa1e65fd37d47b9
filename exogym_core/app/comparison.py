"""Runs an experiment's strategies one after the other, on equal terms, and records each as it ends."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Sized
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

from exogym_core.app.launched import under_torchrun
from exogym_core.app.tracking import open_loggers
from exogym_core.cost.compute import Compute
from exogym_core.meeting_place import is_at_rendezvous
from exogym_core.names import file_name, seeded_name, visible
from exogym_core.ranks.torchrun.rank import agreed
from exogym_core.results.disk import RecordError
from exogym_core.results.fit_result import FitResult
from exogym_core.results.seeds import Tally
from exogym_core.training.options import OPTIONS
from exogym_core.training.resumption import mark_of_folder
from exogym_core.training.trainer import Trainer
from netsim.files.errors import InputError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.app.experiment import Experiment
    from exogym_core.app.settings import StrategySettings
    from exogym_core.results.record import RunFolder
    from exogym_core.tasks import Task

__all__ = ["Listener", "compare", "follow", "summary_entry", "tell_finished_runs"]

_SAMPLES_OF_A_STREAM = 256  # evaluated on where the validation set has no length and no number is given


class Listener(Protocol):
    """Who is told what happens, in host time."""

    def begin(self, label: str, position: int, num_strategies: int, num_steps: int) -> None:
        """A strategy starts (with several seeds, one of them); `position` of so many counts from 1."""

    def event(self, row: Mapping[str, Any]) -> None:
        """A row of metrics, with its `kind`."""

    def end(self, result: FitResult) -> None:
        """The strategy is through, or was stopped."""


def compare(
    experiment: Experiment,
    folder: RunFolder,
    listener: Listener,
    *,
    resume: bool = False,
    trace: bool = False,
) -> list[dict[str, Any]]:
    """Train with each strategy and each seed: from the same initial parameters, on the same data in the same order.

    All strategies meet a seed before any meets the next. One that fails is marked and warned of, is not tried
    with further seeds, and the others go on. Whatever else ends the run early, what was done is saved, marked
    incomplete, and the exception goes on. With `resume`, what was finished in this folder is kept, and what was
    not, or failed, goes on from its last checkpoint. With `trace`, `trace.json.gz` tells what the last run did.

    Returns:
        The summary: one object a strategy.

    Raises:
        InputError: the task, the model or an option is wrong, such that nothing can be trained.
        RankError: the only strategy failed.
    """
    tally = Tally([str(entry.label) for entry in experiment.strategies], experiment.seeds)
    if resume:
        tally.take_finished(folder.read_summary())
        for line in tell_finished_runs(experiment, folder) if is_at_rendezvous() else ():
            warnings.warn(line, UserWarning, stacklevel=2)
    folder.write_summary(tally.summary())
    if under_torchrun():
        pairs = [(str(entry.label), seed) for seed, entry in product(experiment.seeds, experiment.strategies)]
        agreed([pair for pair in pairs if not tally.knows(*pair)])
    task = experiment.build_task()
    failures: list[Exception] = []
    for number, (seed, entry) in enumerate(product(experiment.seeds, experiment.strategies), start=1):
        if tally.knows(str(entry.label), seed) or tally.has_failed(str(entry.label)):
            continue
        run = _Run(experiment, entry, seed, task, folder, tally)
        try:
            experiment = run.train(listener, number, trace=trace)
        except RecordError:
            raise
        except Exception as error:
            failures.append(error)
            if _concerns_all(failures, tally) or len(experiment.strategies) == 1:
                raise
            run.fail(error)
            label = visible(entry.label, 40)
            warnings.warn(
                f"{label} failed: {_first_line(error)}; the others go on", UserWarning, stacklevel=2
            )
    if len(failures) == len(experiment.strategies):
        raise failures[0]
    return tally.summary()


def _concerns_all(failures: Sequence[Exception], tally: Tally) -> bool:
    """Whether nothing was trained yet and two strategies were refused in the same words: the experiment is wrong."""
    refused = all(isinstance(error, InputError) for error in failures)
    if not refused or len(failures) < 2 or str(failures[0]) != str(failures[-1]):
        return False
    return all(entry.get("failed") and not entry["steps"] for entry in tally.summary())


@dataclass(frozen=True)
class _Run:
    """One strategy with one seed."""

    experiment: Experiment
    entry: StrategySettings
    seed: int
    task: Task
    folder: RunFolder
    tally: Tally

    @property
    def file_seed(self) -> int | None:
        """The seed as it stands in the names of files: only where there are several."""
        return self.seed if len(self.experiment.seeds) > 1 else None

    @property
    def name(self) -> str:
        """What its files are called."""
        return seeded_name(str(self.entry.label), self.file_seed)

    def train(self, listener: Listener, number: int, *, trace: bool) -> Experiment:
        """Train and save; returns the experiment with what was found out."""
        experiment = self.experiment.with_seed(self.seed)
        trainer = Trainer(experiment.build_model(self.task), self.task.train, self.task.validation)
        num_runs = len(self.experiment.strategies) * len(self.experiment.seeds)
        told = str(self.entry.label) + (f" seed {self.seed}" if self.file_seed is not None else "")
        listener.begin(told, number, num_runs, experiment.settings.steps)
        try:
            model = _fit(trainer, experiment, self, listener, trace=trace)
        except BaseException as error:
            stopped = trainer.result or FitResult()
            is_refused = isinstance(error, (InputError, KeyboardInterrupt)) or is_at_rendezvous()
            if stopped.history or not is_refused:
                listener.end(stopped)
                self.save(stopped, None)
            raise
        result = trainer.result or FitResult()
        listener.end(result)
        settled = _settled(self.experiment, result, self.folder)
        self.save(result, {name: result.judged_state[name] for name in model.state_dict()})
        return settled

    def save(self, result: FitResult, state: Mapping[str, Any] | None) -> None:
        """Metrics, model and summary."""
        self.folder.write_strategy(
            str(self.entry.label),
            result.history,
            result.validation,
            state,
            result.correlation,
            seed=self.file_seed,
        )
        if result.link_history:
            self.folder.write_links(str(self.entry.label), result.link_history, seed=self.file_seed)
        self._note(summary_entry(self.experiment, self.entry, result))

    def fail(self, error: Exception) -> None:
        """Mark it as failed, with what is known of it."""
        label = str(self.entry.label)
        if not self.tally.knows(label, self.seed):
            self._note(summary_entry(self.experiment, self.entry, FitResult()))
        for line in str(error).splitlines()[1:]:
            self.folder.log(line)
        known = self.tally.entry(label, self.seed)
        known.pop("incomplete", None)
        self._note(known | {"failed": True, "error": visible(_first_line(error), 500)})

    def _note(self, entry: dict[str, Any]) -> None:
        self.tally.add(str(self.entry.label), self.seed, entry)
        self.folder.write_summary(self.tally.summary())


def _first_line(error: Exception) -> str:
    text = str(error) if isinstance(error, NetsimError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0]


def _settled(experiment: Experiment, result: FitResult, folder: RunFolder) -> Experiment:
    """What the first strategy found out: all others, and whoever runs the stored experiment, take the same."""
    compute = Compute.parse(result.compute) if result.compute is not None else experiment.compute
    measured = compute != experiment.compute and experiment.compute.may_become(compute)
    found = experiment.settings.minibatch_size == "auto" and result.minibatch_size is not None
    if measured:
        experiment = experiment.with_compute(compute)
    if found:
        experiment = experiment.with_minibatch(result.minibatch_size or 1)
    if measured or found:
        folder.write_text("experiment.yaml", experiment.to_yaml())
    return experiment


def summary_entry(experiment: Experiment, entry: StrategySettings, result: FitResult) -> dict[str, Any]:
    """One strategy's object in the summary; docs/experiment.md tells what each field means."""
    loss = result.final_loss
    summary: dict[str, Any] = {
        "name": entry.label,
        "final_loss": loss,
        "accuracy": result.accuracy,
        "virtual_seconds": result.virtual_seconds,
        "virtual_seconds_to_target": result.virtual_seconds_to_target,
        "compute_utilisation": result.compute_utilisation,
        "bytes_sent_per_worker": _whole(result.bytes_sent / experiment.settings.workers.count),
        "wan_bytes": result.wan_bytes,
        "strategy": entry.name,
        "steps": len(result.history),
        "bytes_sent": result.bytes_sent,
        "payload_bytes": result.payload_bytes,
        "target_loss": experiment.settings.target_loss,
        "collectives": result.collectives,
        "target": result.target,
        "judged": result.judged,
        **({"window_limit": result.window_limit} if result.window_limit is not None else {}),
        **({"coding": result.coding} if result.coding == "not charged" else {}),
        "mean_of_replicas_loss": result.mean_of_replicas_loss,
        "computing_seconds": result.computing_seconds,
        "network_seconds": result.network_seconds,
        "waiting_seconds": result.waiting_seconds,
    }
    if result.first_non_finite_step is not None or (loss is not None and not math.isfinite(loss)):
        summary["first_non_finite_step"] = result.first_non_finite_step
    if result.dropped_peers is not None:
        summary["dropped_peers"] = result.dropped_peers
    if result.wall_seconds is not None:
        summary["wall_seconds"] = result.wall_seconds
    if not result.complete:
        summary["incomplete"] = True
    return summary


def _fit(trainer: Trainer, experiment: Experiment, run: _Run, listener: Listener, *, trace: bool) -> Any:
    task, entry, folder = run.task, run.entry, run.folder
    given = _arguments(experiment, task)
    if experiment.settings.checkpoint is not None:
        given["resume_from"] = folder.make_folder("checkpoints", run.name)
    with open_loggers(experiment, folder, run.name) as loggers:

        def tell(row: Mapping[str, Any]) -> None:
            listener.event(row)
            for logger in loggers:
                logger.event(row)

        try:
            return trainer.fit(
                strategy=experiment.build_strategy(entry),
                accuracy=task.accuracy,
                on_event=tell,
                trace=folder.path / "trace.json.gz" if trace else None,
                progress=False,
                **given,
            )
        except InputError as error:
            raise _placed(experiment, error) from error


def _arguments(experiment: Experiment, task: Task) -> dict[str, Any]:
    """Those of `fit` that the experiment says; under torchrun the network and the clock are the real ones."""
    given = experiment.fit_arguments()
    given.setdefault("val_size", _num_samples(task.validation))
    if under_torchrun() or is_at_rendezvous():
        for name in ("topology", "placement", "protocol", "compute"):
            given.pop(name, None)
        given["transport"] = "gloo"
    return given


def follow(experiment: Experiment) -> None:
    """What the ranks besides rank 0 do under torchrun while that one compares: train, and keep nothing."""
    runs = agreed(None)
    task = experiment.build_task()
    for label, seed in runs:
        seeded, (entry,) = experiment.with_seed(seed), experiment.only(label).strategies
        trainer = Trainer(seeded.build_model(task), task.train, task.validation)
        trainer.fit(
            strategy=seeded.build_strategy(entry),
            accuracy=task.accuracy,
            progress=False,
            **_arguments(seeded, task),
        )


def tell_finished_runs(experiment: Experiment, folder: RunFolder) -> list[str]:
    """Tell the rendezvous which runs are finished here, so that no other site goes on with one alone.

    Returns:
        For people: of which runs nobody could be told.

    Raises:
        InputError: the environment's address or number of this site is wrong.
    """
    from exogym_core.communicator.elastic.finished import tell_finished

    tally = Tally([str(entry.label) for entry in experiment.strategies], experiment.seeds)
    tally.take_finished(folder.read_summary())
    lines = []
    for seed, entry in product(experiment.seeds, experiment.strategies):
        label = str(entry.label)
        if not tally.knows(label, seed):
            continue
        name = seeded_name(label, seed if len(experiment.seeds) > 1 else None)
        mark = mark_of_folder(folder.path / "checkpoints" / file_name(name))
        told = "it keeps no checkpoints" if mark is None else tell_finished(mark)
        if told:
            lines.append(f"other sites were not told that {visible(label, 40)} is finished here: {told}")
    return lines


def _placed(experiment: Experiment, error: InputError) -> InputError:
    """What `fit` refuses, told with the place of the key that says so."""
    if str(error).startswith(("environment: ", "rendezvous")):
        return error  # nothing in the file says so
    told = re.match(r"fit: (\w+)", str(error))
    if told is None and is_at_rendezvous():
        return error
    option = OPTIONS.get("device" if told[1] == "devices" else told[1]) if told else None
    path = (option.key.split(".")[0],) if option is not None and option.key is not None else ()
    return experiment.document.error(path, error)


def _num_samples(validation: Any) -> int:
    return len(validation) if isinstance(validation, Sized) else _SAMPLES_OF_A_STREAM


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value
