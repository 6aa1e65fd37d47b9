"""Where rows of metrics go while a run goes on: CSV files as EXO Gym writes them, TensorBoard, Weights & Biases.

A logger is anything with `write(row)` and `close()`. Rows have a `kind`: step, validation or correlation.
"""

from __future__ import annotations

import json
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from exogym_core.names import file_name
from exogym_core.record import TRAIN_COLUMNS, VALIDATION_COLUMNS, csv_text, make_private_folder, write_whole
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from exogym_core.experiment import Experiment
    from exogym_core.record import RunFolder

__all__ = ["FolderLogger", "Logger", "TensorBoardLogger", "WandbLogger", "open_loggers"]

_NOT_METRICS = ("kind", "step")


class Logger(Protocol):
    """Takes rows as they come."""

    def write(self, row: Mapping[str, Any]) -> None:
        """One row; `kind` tells what it is of."""

    def close(self) -> None:
        """No more rows come."""


class FolderLogger:
    """`logs/<run_name>/` with train.csv, validation.csv and config.json, as EXO Gym lays it out.

    A name that is taken gets a number behind it: runs are never mixed. The files grow as rows come.

    Args:
        run_name: of the folder; made safe first.
        config: plain values to keep with the metrics.
        parent: where the folder is made.

    Attributes:
        path: the folder.

    Raises:
        RecordError: the folder or a file cannot be written.
    """

    def __init__(self, run_name: str, config: Mapping[str, Any], parent: str | Path = "logs") -> None:
        self.path = make_private_folder(Path(parent), run_name, numbered=False)
        write_whole(self.path / "config.json", json.dumps(dict(config), indent=2, default=str) + "\n")
        self._columns = {"step": TRAIN_COLUMNS, "validation": VALIDATION_COLUMNS, "correlation": ("step",)}
        self._files = {"step": "train.csv", "validation": "validation.csv", "correlation": "correlation.csv"}
        self._open: dict[str, Any] = {}

    def write(self, row: Mapping[str, Any]) -> None:
        """Add the row to the file of its kind."""
        kind = str(row.get("kind", "step"))
        plain = {key: value for key, value in row.items() if key != "kind"}
        text = csv_text([plain], self._columns[kind])
        if kind not in self._open:
            # The first row settles the columns of the file.
            self._columns[kind] = tuple(dict.fromkeys([*self._columns[kind], *plain]))
            path = self.path / self._files[kind]
            write_whole(path, "")
            self._open[kind] = path.open("a", encoding="utf-8", newline="")
        else:
            text = text.split("\n", 1)[1]
        self._open[kind].write(text)
        self._open[kind].flush()

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


class TensorBoardLogger:
    """Scalars for TensorBoard, against virtual milliseconds where there is virtual time, else against steps.

    Args:
        path: a folder for the event file.

    Raises:
        InputError: TensorBoard is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError(
                "loggers: tensorboard is not installed: run: pip install 'netgym[tracking]'"
            ) from None
        self._writer = SummaryWriter(str(path))

    def write(self, row: Mapping[str, Any]) -> None:
        """One scalar a number of the row, once by step and once by virtual time."""
        seconds = row.get("virtual_seconds")
        for key, value in _metrics(row):
            self._writer.add_scalar(key, value, row["step"])
            if seconds is not None:
                # Its axis takes whole numbers only, so virtual time is in milliseconds.
                self._writer.add_scalar(f"by_virtual_ms/{key}", value, round(seconds * 1000))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class WandbLogger:
    """A Weights & Biases run, offline unless the environment says otherwise; virtual seconds are its step axis.

    Args:
        project: of the run.
        name: of the run.
        config: plain values to keep with it.
        path: a folder for its files.

    Raises:
        InputError: wandb is not installed.
    """

    def __init__(self, project: str, name: str, config: Mapping[str, Any], path: str | Path) -> None:
        try:
            import wandb
        except ImportError:
            raise InputError("loggers: wandb is not installed: run: pip install 'netgym[tracking]'") from None
        import os

        mode = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=project, name=name, config=dict(config), dir=str(path), mode=mode, reinit="create_new"
        )
        self._run.define_metric("virtual_seconds")
        self._run.define_metric("*", step_metric="virtual_seconds")

    def write(self, row: Mapping[str, Any]) -> None:
        """All numbers of the row at once."""
        self._run.log(dict(_metrics(row)) | {"step": row["step"]})

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def _metrics(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if key not in _NOT_METRICS and isinstance(value, int | float) and not isinstance(value, bool):
            yield key, value


@contextmanager
def open_loggers(
    names: Sequence[str], folder: RunFolder, label: str, experiment: Experiment
) -> Iterator[list[Logger]]:
    """The loggers of these names for one strategy of a run, closed at the end.

    `csv` needs none: the run folder's metrics are always written.
    """
    loggers: list[Logger] = []
    with ExitStack() as stack:
        for name in names:
            path = folder.path / name / file_name(label)
            if name == "tensorboard":
                loggers.append(TensorBoardLogger(path))
            elif name == "wandb":
                path.mkdir(parents=True, mode=0o700, exist_ok=True)
                config = experiment.to_mapping()
                loggers.append(WandbLogger(str(experiment.settings.name), label, config, path))
            else:
                continue
            stack.callback(loggers[-1].close)
        yield loggers
