"""Who listens to a run started with `fit(run_name=...)` or `fit(wandb_project=...)`."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from exogym_core.results.disk import make_folder, write_whole
from exogym_core.results.record import TRAIN_COLUMNS, VALIDATION_COLUMNS
from exogym_core.results.table import Table
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping


__all__ = ["X_AXES", "FolderLogger", "Logger", "WandbLogger"]

X_AXES: Mapping[str, str] = {
    "step": "step",
    "examples": "examples_trained",
    "virtual_seconds": "virtual_seconds",
}
"""What `log_x_axis` can be -> the column."""


_MOST_STEPS_BEHIND = 4096


class Logger(Protocol):
    """Takes a run's rows as they come."""

    def event(self, row: Mapping[str, Any]) -> None:
        """One row with its `kind`: step, validation or correlation."""

    def close(self, state: str = "FINISHED") -> None:
        """The run is FINISHED, FAILED or KILLED."""


class FolderLogger:
    """`logs/<run_name>/` with train.csv, validation.csv and config.json, as EXO Gym writes them.

    A name that is taken gets a number behind it. Rows are appended at each evaluation, after each thousand of them, and
    at the end.

    Attributes:
        path: the folder.
    """

    def __init__(self, run_name: str, config: Mapping[str, Any], parent: Path = Path("logs")) -> None:
        self.path = make_folder(parent, run_name, numbered=False)
        write_whole(self.path / "config.json", json.dumps(config, indent=2, default=str) + "\n")
        self._tables = {
            "step": Table(self.path / "train.csv", TRAIN_COLUMNS),
            "validation": Table(self.path / "validation.csv", VALIDATION_COLUMNS),
        }

    def event(self, row: Mapping[str, Any]) -> None:
        """Keep the row; an evaluation brings the files up to date."""
        kind = row["kind"]
        if kind not in self._tables:
            self._tables[kind] = Table(self.path / f"{kind}.csv", ["step", kind])
        self._tables[kind].add({name: value for name, value in row.items() if name != "kind"})
        if kind == "validation":
            self.close()

    def close(self, state: str = "FINISHED") -> None:
        """Write what there is."""
        for table in self._tables.values():
            table.flush()


class WandbLogger:
    """Rows as metrics of a Weights & Biases run, with EXO Gym's names.

    Args:
        project: where the run appears.
        run_name: its name; None lets wandb choose.
        config: shown beside it.
        x_axis: `step`, `examples` or `virtual_seconds`.
        id_file: keeps the run's id: where it is there, that run is gone on with, and rows up to its last step
            are not logged again.
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
        try:
            wandb = importlib.import_module("wandb")
        except ImportError:
            raise InputError(
                "fit: wandb_project needs wandb, which is not installed; run: pip install 'netgym[tracking]'"
            ) from None
        known = id_file is not None and id_file.is_file()
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file is not None and known else None
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
        self._examples_at: dict[int, int] = {0: 0}  # of steps that may yet be told to have been judged

    def event(self, row: Mapping[str, Any]) -> None:
        """Log the row's numbers; what is seen of a model may come when more steps have been done."""
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
        """Finish the wandb run, as one that came to its end or as one that did not."""
        self._run.finish(exit_code=0 if state == "FINISHED" else 1)
