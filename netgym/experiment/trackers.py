"""Loggers that an experiment names, one of each a strategy and seed."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from exogym_core.names import file_name
from exogym_core.results.loggers import (
    Logger,
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
    close_logger,
    flat,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from exogym_core.results.run_folder import RunFolder
    from netgym.experiment.experiment import Experiment

__all__ = ["flat_config", "open_loggers"]


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
    project, config = str(experiment.settings.name), flat_config(experiment, label)
    loggers: list[Logger] = []
    with ExitStack() as stack:
        for name in dict.fromkeys(experiment.settings.loggers):
            if name in ("wandb", "mlflow"):
                id_file = folder.make_folder("checkpoints") / f"{file_name(label)}.{name}"
            if name == "tensorboard":
                loggers.append(TensorBoardLogger(folder.path / name / file_name(label)))
            elif name == "wandb":
                axis = "virtual_seconds" if experiment.topology is not None else "step"
                loggers.append(WandbLogger(project, label, config, axis, id_file, group=folder.path.name))
            elif name == "mlflow":
                loggers.append(MLflowLogger(project, label, config, folder.path.name, id_file))
            else:
                continue
            stack.push(partial(close_logger, loggers[-1]))
        yield loggers
