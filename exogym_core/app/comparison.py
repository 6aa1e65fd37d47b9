"""Runs an experiment's strategies one after the other, on equal terms, and records each as it ends."""

from __future__ import annotations

import math
import re
from collections.abc import Sized
from typing import TYPE_CHECKING, Any, Protocol

from exogym_core.app.tracking import open_loggers
from exogym_core.cost.compute import Compute
from exogym_core.results.history import FitResult
from exogym_core.training.trainer import Trainer
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from exogym_core.app.experiment import Experiment, StrategySettings
    from exogym_core.results.record import RunFolder
    from exogym_core.tasks import Task

__all__ = ["Audience", "compare", "summary_entry"]

_SAMPLES_OF_A_STREAM = 256  # evaluated on where the validation set has no length and no number is given


_KEYS = {"max_steps": "steps", "devices": "device", "num_nodes": "workers", "val_size": "evaluate"}
"""Argument of `fit` -> the key of an experiment that it comes from."""


class Audience(Protocol):
    """Who is told what happens, in host time."""

    def begin(self, label: str, position: int, num_strategies: int, num_steps: int) -> None:
        """A strategy starts; `position` counts from 1."""

    def event(self, row: Mapping[str, Any]) -> None:
        """A row of metrics, with its `kind`."""

    def end(self, result: FitResult) -> None:
        """The strategy is through, or was stopped."""


def compare(
    experiment: Experiment,
    folder: RunFolder,
    audience: Audience,
    *,
    resume: bool = False,
    trace: bool = False,
) -> list[dict[str, Any]]:
    """Train with each strategy from the same initial parameters, on the same data in the same order.

    Whatever ends the run early, what was done is saved, marked incomplete, and the exception goes on. With
    `resume`, strategies that were finished in this folder are kept, and one that was not goes on from its
    last checkpoint. With `trace`, `trace.json.gz` tells what the last strategy did.

    Returns:
        The summary: one object a strategy.

    Raises:
        InputError: the task, the model or an option is wrong.
    """
    entries = folder.finished() if resume else []
    folder.write_summary(entries)
    task = experiment.build_task()
    for position, entry in enumerate(experiment.strategies, start=1):
        if any(finished["name"] == entry.label for finished in entries):
            continue
        trainer = Trainer(experiment.build_model(task), task.train, task.validation)
        audience.begin(str(entry.label), position, len(experiment.strategies), experiment.settings.steps)
        try:
            model = _fit(trainer, experiment, task, entry, folder, audience, trace=trace)
        except BaseException as error:
            stopped = trainer.result or FitResult()
            if stopped.history or not isinstance(error, InputError):
                audience.end(stopped)
                _save(folder, experiment, entry, stopped, None, entries)
            raise
        result = trainer.result or FitResult()
        audience.end(result)
        experiment = _settled(experiment, result, folder)
        _save(folder, experiment, entry, result, model.state_dict(), entries)
    return entries


def _settled(experiment: Experiment, result: FitResult, folder: RunFolder) -> Experiment:
    """What the first strategy found out: all others, and whoever runs the stored experiment, take the same."""
    measured = experiment.compute.is_measured and result.compute is not None
    found = experiment.settings.minibatch_size == "auto" and result.minibatch_size is not None
    if measured:
        experiment = experiment.with_compute(Compute.parse(result.compute))
    if found:
        experiment = experiment.with_minibatch(result.minibatch_size or 1)
    if measured or found:
        folder.write_text("experiment.yaml", experiment.to_yaml())
    return experiment


def summary_entry(experiment: Experiment, entry: StrategySettings, result: FitResult) -> dict[str, Any]:
    """One strategy's object in the summary; see DESIGN's 'Columns' for the meanings."""
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
    }
    if result.first_non_finite_step is not None or (loss is not None and not math.isfinite(loss)):
        summary["first_non_finite_step"] = result.first_non_finite_step
    if result.dropped_peers is not None:
        summary["dropped_peers"] = result.dropped_peers
    if not result.complete:
        summary["incomplete"] = True
    return summary


def _fit(
    trainer: Trainer,
    experiment: Experiment,
    task: Task,
    entry: StrategySettings,
    folder: RunFolder,
    audience: Audience,
    *,
    trace: bool,
) -> Any:
    settings = experiment.settings
    device: dict[str, Any] = {}
    if isinstance(settings.device, list):
        device["devices"] = settings.device
    elif settings.device != "auto":
        device["device"] = settings.device
    workers = settings.workers.model_dump(exclude={"count"})
    checkpoints: dict[str, Any] = {}
    if settings.checkpoint is not None:
        path = folder.make_folder("checkpoints", str(entry.label))
        checkpoints = {"checkpoint_interval": settings.checkpoint.every, "resume_from": path}
    with open_loggers(experiment, folder, str(entry.label)) as loggers:

        def tell(row: Mapping[str, Any]) -> None:
            audience.event(row)
            for logger in loggers:
                logger.event(row)

        try:
            return trainer.fit(
                strategy=experiment.build_strategy(entry),
                num_nodes=settings.workers.count,
                max_steps=settings.steps,
                num_epochs=None,
                batch_size=settings.batch_size,
                minibatch_size=settings.minibatch_size,
                shuffle=settings.shuffle,
                autocast=settings.autocast,
                val_size=_num_samples(settings.evaluate.samples, task.validation),
                val_interval=settings.evaluate.every,
                correlation_interval=settings.evaluate.correlation_every,
                seed=settings.seed,
                topology=experiment.topology,
                placement=settings.placement,
                protocol=settings.protocol,
                compute=experiment.compute if experiment.topology is not None else None,
                workers=workers,
                target_loss=settings.target_loss,
                accuracy=task.accuracy,
                on_event=tell,
                trace=folder.path / "trace.json.gz" if trace else None,
                **checkpoints,
                **device,
            )
        except InputError as error:
            raise _placed(experiment, error) from error


def _placed(experiment: Experiment, error: InputError) -> InputError:
    """What `fit` refuses, told with the place of the key that says so."""
    told = re.match(r"fit: (\w+)", str(error))
    key = _KEYS.get(told[1], told[1]) if told else ""
    path = (key,) if key in type(experiment.settings).model_fields else ()
    return experiment.document.error(path, error)


def _save(
    folder: RunFolder,
    experiment: Experiment,
    entry: StrategySettings,
    result: FitResult,
    state: Mapping[str, Any] | None,
    entries: list[dict[str, Any]],
) -> None:
    folder.write_strategy(str(entry.label), result.history, result.validation, state, result.correlation)
    entries.append(summary_entry(experiment, entry, result))
    folder.write_summary(entries)


def _num_samples(wanted: int | None, validation: Any) -> int:
    if wanted is not None:
        return wanted
    return len(validation) if isinstance(validation, Sized) else _SAMPLES_OF_A_STREAM


def _whole(value: float) -> float | int:
    return int(value) if value == int(value) else value
