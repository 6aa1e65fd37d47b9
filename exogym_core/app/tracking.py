"""The `loggers` of an experiment: who else hears of its metrics besides the CSV files of the run folder."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from exogym_core.names import file_name
from exogym_core.results.loggers import WandbLogger
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from exogym_core.app.experiment import Experiment
    from exogym_core.results.loggers import Logger
    from exogym_core.results.record import RunFolder

__all__ = ["TensorBoardLogger", "open_loggers"]


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

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


def _wandb_logger(experiment: Experiment, folder: RunFolder, label: str, axis: str) -> WandbLogger:
    """Goes on with the run that this strategy had before an interruption, known by a file in the folder."""
    path = folder.make_folder("checkpoints") / f"{file_name(label)}.wandb"
    return WandbLogger(str(experiment.settings.name), label, experiment.to_mapping(), axis, path)


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
            else:
                continue
            stack.callback(loggers[-1].close)
        yield loggers
