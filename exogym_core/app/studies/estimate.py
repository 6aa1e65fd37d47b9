"""What a sweep will cost this machine, before it starts: a few steps of one point are run and timed."""

from __future__ import annotations

import os
import resource
import sys
import time
import warnings
from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exogym_core.training.trainer import Trainer
from netsim.files.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from exogym_core.app.experiment import Experiment
    from exogym_core.tasks import Task

__all__ = ["Estimate", "Probe", "estimate", "probe"]

_STEPS = 4


@dataclass(frozen=True)
class Probe:
    """Host seconds of one run's parts, and bytes of memory at its peak.

    Attributes:
        start_seconds: until the first step is through: data, processes, the first look.
        step_seconds: of one step of all workers.
        look_seconds: of one evaluation and of the end, at most.
        memory_bytes: of this process and its children.
    """

    start_seconds: float
    step_seconds: float
    look_seconds: float
    memory_bytes: int


@dataclass(frozen=True)
class Estimate:
    """Host time and memory of a sweep.

    Attributes:
        seconds: of this machine, for all points.
        memory_bytes: at the peak.
        num_runs: trainings: points, times strategies, times seeds.
    """

    seconds: float
    memory_bytes: int
    num_runs: int

    def __str__(self) -> str:
        return (
            f"about {format_seconds(float(f'{self.seconds:.2g}'))} of this machine and "
            f"{format_bytes(float(f'{self.memory_bytes:.2g}'))} of memory for {self.num_runs} runs "
            f"(a few steps of the first were timed)"
        )


def probe(experiment: Experiment) -> Probe:
    """Run the first strategy for a few steps and time them; nothing is written.

    What only the first run of a process waits for (imports, compilation) is left out: one step goes before.
    """
    task = experiment.build_task()
    stamps: list[float] = []
    begun = ended = 0.0
    for steps in (1, min(_STEPS, experiment.settings.steps)):
        stamps.clear()
        begun = time.perf_counter()
        _train(experiment, task, steps, lambda: stamps.append(time.perf_counter()))
        ended = time.perf_counter()
    first, last = (stamps[0], stamps[-1]) if stamps else (ended, ended)
    return Probe(
        start_seconds=first - begun,
        step_seconds=(last - first) / max(len(stamps) - 1, 1),
        look_seconds=ended - last,
        memory_bytes=_peak_bytes(experiment),
    )


def _train(experiment: Experiment, task: Task, steps: int, stepped: Callable[[], None]) -> None:
    trainer = Trainer(experiment.build_model(task), task.train, task.validation)
    given = experiment.fit_arguments()
    given.setdefault("val_size", len(task.validation) if isinstance(task.validation, Sized) else 256)
    given |= {"max_steps": steps, "val_interval": 10**9}
    given.pop("checkpoint_interval", None)

    def tell(row: Mapping[str, Any]) -> None:
        if row["kind"] == "step":
            stepped()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(
            strategy=experiment.build_strategy(experiment.strategies[0]),
            on_event=tell,
            progress=False,
            **given,
        )


def _peak_bytes(experiment: Experiment) -> int:
    """This process's peak, and as many of the largest child's as there may be."""
    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    workers = experiment.settings.workers
    num_children = 0
    if workers.kind != "threads":
        num_children = min(workers.processes or os.cpu_count() or 1, workers.count)
    return unit * (own + child * num_children)


def estimate(measured: Probe, experiments: Iterable[Experiment], measured_on: Experiment) -> Estimate:
    """Scale a probe to a sweep: seconds of a step grow with workers and samples; what else a point changes is left.

    Args:
        measured: what one run took.
        experiments: one a point.
        measured_on: the experiment that was probed.
    """
    seconds, num_runs = 0.0, 0
    work = _work(measured_on)
    for experiment in experiments:
        runs = len(experiment.strategies) * len(experiment.seeds)
        steps = experiment.settings.steps
        looks = steps // experiment.settings.evaluate.every + 1
        one = measured.start_seconds + looks * measured.look_seconds
        one += steps * measured.step_seconds * _work(experiment) / work
        seconds += runs * one
        num_runs += runs
    return Estimate(seconds, measured.memory_bytes, num_runs)


def _work(experiment: Experiment) -> int:
    return experiment.settings.workers.count * experiment.settings.batch_size
