"""Loggers of a run: CSV files, Weights & Biases, MLflow and TensorBoard."""

from __future__ import annotations

import csv
import importlib
import io
import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from exogym_core.names import file_name, visible
from exogym_core.results.disk import append_text, make_folder, warned, write_whole
from exogym_core.results.schema import TRAIN, VALIDATION, csv_text, header
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.results.run_folder import RunFolder


__all__ = [
    "LOGGERS",
    "X_AXES",
    "FolderLogger",
    "Logger",
    "LoggerName",
    "MLflowLogger",
    "NewRows",
    "Table",
    "TensorBoardLogger",
    "TrackedRun",
    "WandbLogger",
    "close_logger",
    "flat",
]

_MOST_WAITING = 1000


class Table:
    """A CSV file, begun with its header alone.

    It equals `csv_text` of the same rows. A row with a column that the header lacks rewrites the file.

    Args:
        path: of the file.
        first_columns: see `csv_text`.

    Raises:
        RecordError: the file cannot be written; so do the methods.
    """

    def __init__(self, path: Path, first_columns: Sequence[str]) -> None:
        self._path, self._first = path, first_columns
        self._columns: list[str] = []
        self._waiting: list[Mapping[str, Any]] = []
        self._write([])

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row; it is in the file after the next `flush`."""
        self._waiting.append(row)
        if len(self._waiting) >= _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Write the rows that wait."""
        rows, self._waiting = self._waiting, []
        if not rows:
            return
        if not all(row.keys() <= set(self._columns) for row in rows):
            with self._path.open(encoding="utf-8", newline="") as file:
                self._write([*csv.DictReader(file), *rows])
            return
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([row.get(column) for column in self._columns] for row in rows)
        append_text(self._path, text.getvalue())

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = csv_text(rows, self._first)
        self._columns = next(csv.reader(io.StringIO(text)))
        write_whole(self._path, text)


X_AXES: Mapping[str, str] = {
    "step": "step",
    "examples": "examples_trained",
    "virtual_seconds": "virtual_seconds",
}
"""Column for each choice of `log_x_axis`."""

_MOST_STEPS_BEHIND = 4096  # of an evaluation behind the newest step


class Logger(Protocol):
    """Takes a run's rows as they come."""

    def event(self, row: Mapping[str, Any]) -> None:
        """Log a row with its `kind`: step, validation or correlation."""

    def close(self, state: str = "FINISHED") -> None:
        """End the run as FINISHED, FAILED or KILLED."""


class NewRows:
    """Logger that passes on rows which another has not had before an interruption.

    A resumed run gives all rows up to its checkpoint again, and trains those after it again. After a kill, when nothing
    was closed, a logger gets them unless its tracker knows its last step, as those of W&B and MLflow do.

    Args:
        logger: gets the rows.
        path: keeps the last step of each kind of row that it had.

    Attributes:
        logger: see above.
    """

    def __init__(self, logger: Logger, path: Path) -> None:
        self.logger, self._path = logger, path
        self._before: dict[str, int] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self._last = dict(self._before)

    def event(self, row: Mapping[str, Any]) -> None:
        """Pass on the row if it is new."""
        kind, step = row["kind"], row["step"]
        if step > self._before.get(kind, -1):
            self._last[kind] = max(step, self._last.get(kind, -1))
            self.logger.event(row)

    def close(self, state: str = "FINISHED") -> None:
        """End the run, and keep what it has."""
        self.logger.close(state)
        if self._last != self._before:
            write_whole(self._path, json.dumps(self._last) + "\n")


@contextmanager
def _tracking_extra(where: str, package: str) -> Iterator[None]:
    """Turn an ImportError of the block into an InputError with the command that installs the package."""
    try:
        yield
    except ImportError:
        raise InputError(
            f"{where}: {package} is not installed: run: pip install 'netgym[tracking]'"
        ) from None


def _kept_id(id_file: Path | None) -> str | None:
    """Id of the tracker's run before an interruption."""
    return id_file.read_text(encoding="utf-8").strip() if id_file is not None and id_file.is_file() else None


def _scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float, int]]:
    """Name, value and step of each number of a row; once more by virtual milliseconds where there is virtual time."""
    seconds = row.get("virtual_seconds")
    for name, value in row.items():
        if name not in ("kind", "step") and isinstance(value, int | float):
            yield name, value, row["step"]
            if seconds is not None and name != "virtual_seconds":
                # Axes take whole numbers only, so virtual time is in milliseconds.
                yield f"by_virtual_ms/{name}", value, round(seconds * 1000)


class FolderLogger:
    """`logs/<run_name>/` with train.csv, validation.csv and config.json, as EXO Gym writes them.

    A name that is taken gets a number behind it. Rows are appended at each evaluation, after each thousand of them, and
    at the end.

    Attributes:
        path: the folder.
    """

    def __init__(self, run_name: str, config: Mapping[str, Any]) -> None:
        self.path = make_folder(Path("logs"), run_name, numbered=False)
        write_whole(self.path / "config.json", json.dumps(config, indent=2, default=str) + "\n")
        self._tables = {
            "step": Table(self.path / "train.csv", header(TRAIN)),
            "validation": Table(self.path / "validation.csv", header(VALIDATION)),
        }

    def event(self, row: Mapping[str, Any]) -> None:
        """Keep the row; an evaluation brings the files up to date."""
        kind = row["kind"]
        if kind not in self._tables:
            self._tables[kind] = Table(self.path / f"{kind}.csv", ["step", kind])
        self._tables[kind].add(
            {key: value for key, value in row.items() if key not in ("kind", "dropped_peers")}
        )
        if kind == "validation":
            self.close()

    def close(self, state: str = "FINISHED") -> None:
        """Write all rows that wait."""
        for table in self._tables.values():
            table.flush()


class WandbLogger:
    """Rows as metrics of a Weights & Biases run, with EXO Gym's names.

    Args:
        project: where the run appears.
        run_name: its name; None lets wandb choose.
        config: shown with it.
        x_axis: `step`, `examples` or `virtual_seconds`.
        id_file: keeps the run's id: where it exists, that run continues, and rows up to its last step are not
            logged again.
        group: under which the run appears with others, such as the other strategies'.

    Raises:
        InputError: wandb is not installed.
    """

    def __init__(
        self,
        project: str,
        run_name: str | None,
        config: Mapping[str, Any],
        x_axis: str = "step",
        id_file: Path | None = None,
        group: str | None = None,
    ) -> None:
        with _tracking_extra("fit: wandb_project", "wandb"):
            wandb = importlib.import_module("wandb")
        run_id = _kept_id(id_file)
        resumed = {} if run_id is None else {"id": run_id, "resume": "allow"}
        grouped = {} if group is None else {"group": group}
        self._run = wandb.init(project=project, name=run_name, config=dict(config), **grouped, **resumed)
        if id_file is not None:
            write_whole(id_file, f"{self._run.id}\n")
        last_step = None if run_id is None else self._run.summary.get("step")
        self._last_step = -1 if last_step is None else int(last_step)
        self._axis = X_AXES[x_axis]
        self._run.define_metric(self._axis)
        self._run.define_metric("*", step_metric=self._axis)
        self._examples = 0
        self._examples_at: dict[int, int] = {0: 0}  # of steps whose evaluations may still come

    def event(self, row: Mapping[str, Any]) -> None:
        """Log the row's numbers; an evaluation may come after rows of later steps."""
        if "examples_trained" in row:
            self._examples = self._examples_at[row["step"]] = row["examples_trained"]
            if len(self._examples_at) > _MOST_STEPS_BEHIND:
                del self._examples_at[next(iter(self._examples_at))]
        examples = self._examples_at.get(row["step"], self._examples)
        if row["step"] <= self._last_step:
            return
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        self._run.log({"examples_trained": examples, **numbers})

    def close(self, state: str = "FINISHED") -> None:
        """Finish the wandb run, as successful or as failed."""
        self._run.finish(exit_code=0 if state == "FINISHED" else 1)


_METRICS_AT_ONCE = 1000  # MLflow takes no more in one call


class TensorBoardLogger:
    """Scalars for TensorBoard, by step and, where there is virtual time, by virtual milliseconds too.

    Args:
        path: a folder for the event file.

    Raises:
        InputError: TensorBoard is not installed.
    """

    def __init__(self, path: Path) -> None:
        with _tracking_extra("loggers", "tensorboard"):
            from torch.utils.tensorboard import SummaryWriter
        self._writer: Any = SummaryWriter(str(path))

    def event(self, row: Mapping[str, Any]) -> None:
        """Write a scalar for each number of the row."""
        for scalar in _scalars(row):
            self._writer.add_scalar(*scalar)

    def close(self, state: str = "FINISHED") -> None:
        """Close the event file."""
        self._writer.close()


class MLflowLogger:
    """Metrics of an MLflow run, one a strategy and seed, in the experiment's name.

    A metric's step is the training step, and its timestamp the run's start plus virtual time, so that MLflow's
    relative time axis is virtual time. `by_virtual_ms/...` has virtual milliseconds as steps.

    Args:
        experiment: name of the experiment.
        label: the strategy's, with the seed where there are several.
        config: the run's parameters, by key path.
        group: the run folder's name, by which runs are grouped (tag `run_folder`).
        id_file: as for `WandbLogger`.

    Raises:
        InputError: MLflow is not installed, or its server cannot be reached.
    """

    def __init__(
        self, experiment: str, label: str, config: Mapping[str, Any], group: str, id_file: Path
    ) -> None:
        with _tracking_extra("loggers", "mlflow"):
            from mlflow.entities import Metric, Param, RunTag
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        self._metric = Metric
        try:
            self._client = MlflowClient()
            kept, self._last_step = _kept_id(id_file), -1
            if kept is not None:
                self._run_id = kept
                metrics = self._client.get_run(self._run_id).data.metrics
                self._last_step = int(metrics.get("last_step", -1))
            else:
                found = self._client.get_experiment_by_name(experiment)
                number = (
                    found.experiment_id if found is not None else self._client.create_experiment(experiment)
                )
                self._run_id = self._client.create_run(number, run_name=label).info.run_id
                write_whole(id_file, f"{self._run_id}\n")
                tags = {"run_folder": group, "strategy": label}
                settings = {key: str(value)[:500] for key, value in config.items()}
                self._client.log_batch(
                    self._run_id,
                    params=[Param(*pair) for pair in settings.items()],
                    tags=[RunTag(*pair) for pair in tags.items()],
                )
            self._begun = int(self._client.get_run(self._run_id).info.start_time)
        except MlflowException as error:
            reason = visible(str(error).partition("\n")[0], 300)
            raise InputError(
                f"loggers: mlflow: {reason} (its server is that of MLFLOW_TRACKING_URI)", about=("loggers",)
            ) from error
        self._waiting: list[Any] = []

    def event(self, row: Mapping[str, Any]) -> None:
        """Log a metric for each number of the row."""
        step = row["step"]
        if step <= self._last_step:
            return
        at = self._begun + round((row.get("virtual_seconds") or 0.0) * 1000)
        for name, value, place in _scalars(row):
            self._waiting.append(self._metric(name, float(value), at, place))
        if row["kind"] == "step":
            self._waiting.append(self._metric("last_step", float(step), at, step))
        if len(self._waiting) > _METRICS_AT_ONCE // 2:
            self._flush()

    def _flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_METRICS_AT_ONCE], self._waiting[_METRICS_AT_ONCE:]
            self._client.log_batch(self._run_id, metrics=batch)

    def close(self, state: str = "FINISHED") -> None:
        """Log the metrics that wait, and end the run."""
        self._flush()
        self._client.set_terminated(self._run_id, state)


@dataclass(frozen=True)
class TrackedRun:
    """One strategy's run of an experiment, as its loggers name it.

    Attributes:
        project: the experiment's name.
        label: the strategy's, with the seed where there are several.
        config: its settings, by key path.
        folder: the run folder, by whose name runs are grouped.
        x_axis: one of X_AXES.
    """

    project: str
    label: str
    config: Mapping[str, Any]
    folder: RunFolder
    x_axis: str

    def kept_file(self, name: str) -> Path:
        """File of what a logger continues with after an interruption: its run's id, or the last steps that it had."""
        return self.folder.make_folder("checkpoints") / f"{file_name(self.label)}.{name}"


LOGGERS: Mapping[str, Callable[[TrackedRun], Logger] | None] = {
    "csv": None,
    "tensorboard": lambda run: TensorBoardLogger(run.folder.place("tensorboard", run.label)),
    "wandb": lambda run: WandbLogger(
        run.project, run.label, run.config, run.x_axis, run.kept_file("wandb"), run.folder.path.name
    ),
    "mlflow": lambda run: MLflowLogger(
        run.project, run.label, run.config, run.folder.path.name, run.kept_file("mlflow")
    ),
}
"""By name in experiment files, which is that of its package: how it is opened; None: the run folder has it anyway."""

if TYPE_CHECKING:
    LoggerName: TypeAlias = str
else:
    LoggerName = Literal[tuple(LOGGERS)]


def flat(plain: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested mappings by their key paths, such as `strategy.lr`; without those that are None."""
    for key, value in plain.items():
        if isinstance(value, dict):
            yield from flat(value, f"{where}{key}.")
        elif value is not None:
            yield f"{where}{key}", value


def close_logger(logger: Logger, error: type[BaseException] | None, *_: object) -> None:
    """End a logger as `error` ended the run; a failure of its own is a warning."""
    named = logger.logger if isinstance(logger, NewRows) else logger
    with warned(f"{type(named).__name__}: has not taken the last rows"):
        # In MLflow's words; signals and Ctrl-C are no `Exception`.
        logger.close("FINISHED" if error is None else "FAILED" if issubclass(error, Exception) else "KILLED")
