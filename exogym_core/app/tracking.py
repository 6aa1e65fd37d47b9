"""The `loggers` of an experiment: who else hears of its metrics besides the CSV files of the run folder."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from exogym_core.names import file_name, visible
from exogym_core.results.disk import write_whole
from exogym_core.results.loggers import WandbLogger
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from exogym_core.app.experiment import Experiment
    from exogym_core.results.loggers import Logger
    from exogym_core.results.record import RunFolder

__all__ = ["MLflowLogger", "TensorBoardLogger", "flat_config", "open_loggers"]


_METRICS_AT_ONCE = 1000  # MLflow takes no more in one call


class TensorBoardLogger:
    """Scalars for TensorBoard, by step and, where there is virtual time, by virtual milliseconds too.

    Args:
        path: a folder for the event file.

    Raises:
        InputError: TensorBoard is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "loggers: tensorboard is not installed: run: pip install 'netgym[tracking]'"
            ) from None
        self._writer: Any = SummaryWriter(str(path))

    def event(self, row: Mapping[str, Any]) -> None:
        """One scalar for each number of the row."""
        seconds = row.get("virtual_seconds")
        for key, value in row.items():
            if key in ("kind", "step") or not isinstance(value, int | float):
                continue
            self._writer.add_scalar(key, value, row["step"])
            if seconds is not None and key != "virtual_seconds":
                # The axis takes whole numbers only, so virtual time is in milliseconds.
                self._writer.add_scalar(f"by_virtual_ms/{key}", value, round(seconds * 1000))

    def close(self, state: str = "FINISHED") -> None:
        """Write what is left."""
        self._writer.close()


class MLflowLogger:
    """Metrics of an MLflow run, one a strategy and seed, in the experiment's name.

    A metric's step is the training step, and its timestamp the run's start plus virtual time, so that MLflow's
    relative time axis is virtual time. `by_virtual_ms/...` has virtual milliseconds as steps.

    Args:
        experiment: what is run; its settings are the run's parameters.
        label: the strategy's, with the seed where there are several.
        group: the run folder's name, by which runs are grouped (tag `run_folder`).
        id_file: keeps the run's id: where it is there, that run is gone on with, and rows up to its last step
            are not logged again.

    Raises:
        InputError: MLflow is not installed, or its server cannot be reached.
    """

    def __init__(self, experiment: Experiment, label: str, group: str, id_file: Path) -> None:
        try:
            from mlflow.entities import Metric, Param, RunTag
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError:
            raise InputError(
                "loggers: mlflow is not installed: run: pip install 'netgym[tracking]'"
            ) from None
        self._metric = Metric
        try:
            self._client = MlflowClient()
            self._run_id, self._last_step = self._known(id_file)
            if self._run_id is None:
                name = str(experiment.settings.name)
                found = self._client.get_experiment_by_name(name)
                number = found.experiment_id if found is not None else self._client.create_experiment(name)
                self._run_id = self._client.create_run(number, run_name=label).info.run_id
                write_whole(id_file, f"{self._run_id}\n")
                tags = {"run_folder": group, "strategy": label}
                settings = {key: str(value)[:500] for key, value in flat_config(experiment, label).items()}
                self._client.log_batch(
                    self._run_id,
                    params=[Param(*pair) for pair in settings.items()],
                    tags=[RunTag(*pair) for pair in tags.items()],
                )
            self._begun = int(self._client.get_run(self._run_id).info.start_time)
        except MlflowException as error:
            told = visible(str(error).partition("\n")[0], 300)
            raise InputError(
                f"loggers: mlflow: {told} (its server is that of MLFLOW_TRACKING_URI)"
            ) from error
        self._waiting: list[Any] = []

    def _known(self, id_file: Path) -> tuple[str | None, int]:
        """The run of before an interruption, and its last step."""
        if not id_file.is_file():
            return None, -1
        run_id = id_file.read_text(encoding="utf-8").strip()
        return run_id, int(self._client.get_run(run_id).data.metrics.get("last_step", -1))

    def event(self, row: Mapping[str, Any]) -> None:
        """One metric for each number of the row."""
        step, seconds = row["step"], row.get("virtual_seconds")
        if step <= self._last_step:
            return
        milliseconds = round(seconds * 1000) if seconds is not None else 0
        at = self._begun + milliseconds
        for key, value in row.items():
            if key in ("kind", "step") or not isinstance(value, int | float):
                continue
            self._waiting.append(self._metric(key, float(value), at, step))
            if seconds is not None and key != "virtual_seconds":
                self._waiting.append(self._metric(f"by_virtual_ms/{key}", float(value), at, milliseconds))
        if row["kind"] == "step":
            self._waiting.append(self._metric("last_step", float(step), at, step))
        if len(self._waiting) > _METRICS_AT_ONCE // 2:
            self._flush()

    def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_METRICS_AT_ONCE], self._waiting[_METRICS_AT_ONCE:]
            self._client.log_batch(self._run_id, metrics=batch)

    def close(self, state: str = "FINISHED") -> None:
        """Log what is left, and end the run: FINISHED, FAILED or KILLED."""
        self._flush()
        self._client.set_terminated(self._run_id, state)


def _wandb_logger(experiment: Experiment, folder: RunFolder, label: str, axis: str) -> WandbLogger:
    """Goes on with the run that this strategy had before an interruption, known by a file in the folder."""
    path = folder.make_folder("checkpoints") / f"{file_name(label)}.wandb"
    name = str(experiment.settings.name)
    return WandbLogger(name, label, flat_config(experiment, label), axis, path, group=folder.path.name)


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
    return dict(_flat(plain))


def _flat(plain: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{where}{key}.")
        elif value is not None:
            yield f"{where}{key}", value


def _state(error: type[BaseException] | None) -> str:
    """Status of a run at its end, in MLflow's words; signals and Ctrl-C are no `Exception`."""
    return "FINISHED" if error is None else "FAILED" if issubclass(error, Exception) else "KILLED"


def _closing(logger: Logger) -> Callable[..., None]:
    def close(error: type[BaseException] | None, *_: object) -> None:
        logger.close(_state(error))

    return close


@contextmanager
def open_loggers(experiment: Experiment, folder: RunFolder, label: str) -> Iterator[list[Logger]]:
    """The loggers that the experiment names, for one of its strategies; closed at the end.

    `csv` needs none: the run folder's metrics are always written.
    """
    loggers: list[Logger] = []
    with ExitStack() as stack:
        for name in dict.fromkeys(experiment.settings.loggers):
            if name == "tensorboard":
                loggers.append(TensorBoardLogger(folder.path / name / file_name(label)))
            elif name == "wandb":
                axis = "virtual_seconds" if experiment.topology is not None else "step"
                loggers.append(_wandb_logger(experiment, folder, label, axis))
            elif name == "mlflow":
                path = folder.make_folder("checkpoints") / f"{file_name(label)}.mlflow"
                loggers.append(MLflowLogger(experiment, label, folder.path.name, path))
            else:
                continue
            stack.push(_closing(loggers[-1]))
        yield loggers
