"""What a run leaves on disk: one folder, every file written whole or not at all.

    folder = RunFolder.create(None, "digits")          # runs/digits-1
    folder.write_text("experiment.yaml", experiment.to_yaml())
    folder.write_strategy("DiLoCo", history, validation, state)
    folder.write_summary(entries)
    folder.digest()                                     # of the results: equal for equal experiments

Metrics and summary hold no host time, no path and no name of this machine.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.names import file_name, seeded_name, visible
from exogym_core.results.disk import RecordError, make_folder, write_whole
from exogym_core.results.lock import LOCK_NAME, FolderLock
from exogym_core.results.seal import relative_to, seal_of
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

__all__ = [
    "TRAIN_COLUMNS",
    "VALIDATION_COLUMNS",
    "RunFolder",
    "csv_text",
]

TRAIN_COLUMNS = (
    *("step", "examples_trained", "train_loss", "train_perplexity", "lr"),  # EXO Gym's
    *("virtual_seconds", "bytes_sent", "payload_bytes", "wan_bytes"),
)
"""First columns of a strategy's training metrics."""

VALIDATION_COLUMNS = (
    *("step", "local_loss", "local_perplexity", "global_loss", "global_perplexity"),  # EXO Gym's
    *("virtual_seconds", "judged_loss", "judged_virtual_seconds", "judged_step"),
)
"""First columns of a strategy's validation metrics."""

_MOST = 1e24  # of steps, bytes and seconds; no run has so many
_COUNTED = ("examples_trained", "compute_utilisation")
_ENVIRONMENT = "environment.json"
_VERSIONS = ("netgym", "torch", "numpy", "simpy", "scikit-learn")


def csv_text(rows: Sequence[Mapping[str, Any]], first_columns: Iterable[str]) -> str:
    """Rows as CSV: `first_columns`, then whatever else the rows hold, in order of appearance.

    Floats are written so that they read back exactly; None is an empty field.

    >>> csv_text([{"loss": 0.1, "step": 1}], ["step"])
    'step,loss\\n1,0.1\\n'
    """
    first = list(first_columns)
    if any(
        "wall_seconds" in row for row in rows
    ):  # a real transport's clock stands where the virtual one would
        first = [column.replace("virtual_seconds", "wall_seconds") for column in first]
    columns = dict.fromkeys(first)
    for row in rows:
        columns.update(dict.fromkeys(row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([row.get(column) for column in columns] for row in rows)
    return text.getvalue()


class RunFolder:
    """The folder of one run. docs/experiment.md tells what lies where.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FolderLock | None = None

    @classmethod
    def create(cls, out: str | Path | None, name: str, parent: str | Path = "runs") -> RunFolder:
        """A new folder: `out`, which must be new or empty, else `parent/<name>-<n>`; it is this process's.

        Raises:
            InputError: `out` holds something already, or another process has just taken it.
            RecordError: it cannot be made.
        """
        if out is None:
            return cls(make_folder(Path(parent), name, numbered=True)).owned()
        path = Path(out)
        try:
            if path.exists() and not path.is_dir():
                raise InputError(f"--out {visible(out)}: is a file: choose a new or empty folder")
            if path.is_dir() and any(entry.name != LOCK_NAME for entry in path.iterdir()):
                raise InputError(f"--out {visible(out)}: the folder is not empty: choose a new or empty one")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(exist_ok=True)
        except OSError as error:
            raise RecordError(f"--out {visible(out)}: cannot be made: {error.strerror or error}") from error
        except InputError:
            raise
        except ValueError as error:
            raise RecordError(f"--out {visible(out)}: cannot be made: {error}") from error
        folder = cls(path).owned()
        if any(entry.name != LOCK_NAME for entry in path.iterdir()):  # of one who came first, and is through
            folder.release()
            raise InputError(f"--out {visible(out)}: the folder is not empty: choose a new or empty one")
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run.

        Raises:
            InputError: there is no run at `path`.
        """
        folder = Path(path)
        if not (folder / "experiment.yaml").is_file():
            raise InputError(f"{visible(path)}: is no run folder: it has no experiment.yaml")
        return cls(folder)

    # --- who works in it -----------------------------------------------------------------------------------

    def owned(self) -> RunFolder:
        """This folder, from now on this process's alone, until `release` or the process's end.

        Raises:
            InputError: another process works in it; the line tells its pid.
            RecordError: it cannot be written to.
        """
        try:
            self._lock = FolderLock(self.path)
        except OSError as error:
            raise RecordError(
                f"{visible(self.path)}: cannot be written: {error.strerror or error}"
            ) from error
        return self

    def release(self) -> None:
        """Let others work in it."""
        if self._lock is not None:
            self._lock.release()

    # --- writing -------------------------------------------------------------------------------------------

    def make_folder(self, *names: str) -> Path:
        """The folder `names[0]/names[1]/...`, made where it is not there.

        Raises:
            RecordError: it cannot be made.
        """
        path = self.path
        try:
            for name in names:
                path = path / file_name(name)
                path.mkdir(exist_ok=True)
        except OSError as error:
            raise RecordError(f"{visible(path)}: cannot be made: {error.strerror}") from error
        return path

    def write_text(self, relative: str, text: str | bytes) -> Path:
        """Write one file whole, and return its path; folders on the way are made."""
        path = self.path / relative
        try:
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise RecordError(f"{visible(path.parent)}: cannot be made: {error.strerror}") from error
        write_whole(path, text)
        if relative == "experiment.yaml" and (self.path / _ENVIRONMENT).is_file():
            self._write_facts(json.loads((self.path / _ENVIRONMENT).read_text(encoding="utf-8")))
        return path

    def write_environment(self, code_folder: Path | None = None) -> None:
        """Versions, platform and what decides the last bits; no names of people or machines.

        Args:
            code_folder: where the modules lie that the experiment names, if it names any.
        """
        versions = {name: version for name in _VERSIONS if (version := _version(name))}
        facts = {
            "versions": versions,
            "python": platform.python_version(),
            "system": platform.system(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "MKL_CBWR": os.environ.get("MKL_CBWR"),
        }
        if code_folder is not None:
            facts["code"] = relative_to(self.path, code_folder)
        self._write_facts(facts)

    def _write_facts(self, facts: dict[str, Any]) -> None:
        """Facts, under this user's seal of the experiment that lies here now."""
        facts["seal"] = seal_of(self.path, facts.get("code"))
        self.write_text(_ENVIRONMENT, json.dumps(facts, indent=2) + "\n")

    def write_strategy(
        self,
        label: str,
        history: Sequence[Mapping[str, Any]],
        validation: Sequence[Mapping[str, Any]],
        state: Mapping[str, Tensor] | None,
        correlation: Sequence[Mapping[str, Any]] = (),
        *,
        seed: int | None = None,
    ) -> None:
        """Metrics of one strategy, and the model's state and comparisons of replicas, if any.

        `seed` is given where the run has several: each has files of its own.
        """
        name = seeded_name(label, seed)
        self.write_text(f"metrics/{name}.csv", csv_text(history, TRAIN_COLUMNS))
        self.write_text(f"metrics/{name}.validation.csv", csv_text(validation, VALIDATION_COLUMNS))
        if correlation:
            self.write_text(f"metrics/{name}.correlation.csv", csv_text(correlation, ("step", "correlation")))
        if state is not None:
            from safetensors.torch import save

            # Cloned, because tied weights share memory and the format refuses that.
            tensors = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in state.items()}
            self.write_text(f"models/{name}.safetensors", save(dict(sorted(tensors.items()))))

    def write_links(self, label: str, rows: Sequence[Mapping[str, Any]], *, seed: int | None = None) -> None:
        """What had crossed each link in the course of a run: `virtual_seconds`, and bytes by link."""
        self.write_text(f"links/{seeded_name(label, seed)}.csv", csv_text(rows, ("virtual_seconds",)))

    def write_summary(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """One object a strategy. What is not finite is written as null, since JSON has no NaN."""
        plain = [{key: _finite(value) for key, value in entry.items()} for entry in entries]
        self.write_text("summary.json", json.dumps(plain, indent=2, allow_nan=False) + "\n")

    def log(self, line: str) -> None:
        """Add one line to `log.txt`."""
        path = self.path / "log.txt"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                file.write(visible(line, 2000) + "\n")
        except OSError as error:
            raise RecordError(f"{visible(path)}: cannot be written: {error.strerror}") from error

    def has_trained(self) -> bool:
        """Whether there is anything to go on from; a killed run may have checkpoints and no summary."""
        files = [*(self.path / "checkpoints").glob("*/step-*"), *(self.path / "metrics").glob("*")]
        return bool(self.read_summary() or files)

    def discard(self) -> None:
        """Remove a folder in which nothing has been trained: only what a run writes at its start."""
        for name in ("experiment.yaml", "environment.json", "summary.json", "log.txt"):
            (self.path / name).unlink(missing_ok=True)
        self.release()
        checkpoints = self.path / "checkpoints"
        with contextlib.suppress(OSError):  # not empty: something else was put there
            for path in [*checkpoints.glob("*"), checkpoints] if checkpoints.is_dir() else []:
                path.rmdir()
            self.path.rmdir()

    def clean(self) -> None:
        """Remove what a killed process was writing."""
        for path in [*self.path.glob(".writing-*"), *self.path.glob("*/.writing-*")]:
            path.unlink(missing_ok=True)

    # --- reading -------------------------------------------------------------------------------------------

    def finished(self) -> list[dict[str, Any]]:
        """The summary's objects of the strategies that came to their end.

        Raises:
            InputError: the summary is damaged.
        """
        return [
            entry for entry in self.read_summary() if not (entry.get("incomplete") or entry.get("failed"))
        ]

    def read_summary(self) -> list[dict[str, Any]]:
        """The summary's objects; an empty list where no strategy has ended yet.

        Raises:
            InputError: the file is damaged.
        """
        path = self.path / "summary.json"
        if not path.is_file():
            return []
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{visible(path)}: cannot be read: {error}") from None
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries
        ):
            raise InputError(f"{visible(path)}: is no summary: expected a list of objects with a name")
        return entries

    def read_metrics(self, label: str, kind: str = "", seed: int | None = None) -> list[dict[str, float]]:
        """Rows of one strategy's metrics (`kind` "") or validation metrics ("validation"), numbers only.

        `seed` says whose where the run has several.

        Raises:
            InputError: the file is damaged.
        """
        return self._read_numbers(
            f"metrics/{seeded_name(label, seed)}{'.' if kind else ''}{kind}.csv", "step"
        )

    def read_links(self, label: str, seed: int | None = None) -> list[dict[str, float]]:
        """What `write_links` wrote; empty where there was no network.

        Raises:
            InputError: the file is damaged.
        """
        return self._read_numbers(f"links/{seeded_name(label, seed)}.csv", "virtual_seconds")

    def _read_numbers(self, relative: str, key: str, clocks: Sequence[str] = ()) -> list[dict[str, float]]:
        path = self.path / relative
        if not path.is_file():
            return []
        try:
            with path.open(encoding="utf-8", newline="") as file:
                rows = [
                    {name: float(value) for name, value in row.items() if name and value}
                    for row in csv.DictReader(file, strict=True)
                ]
        except (OSError, ValueError, TypeError, csv.Error) as error:
            raise InputError(f"{visible(path)}: is no table of numbers: {visible(error)}") from None
        needed = {key, *(name for name in clocks if any(name in row for row in rows))}
        for number, row in enumerate(rows, start=2):
            for name in sorted(needed - row.keys()):
                raise InputError(f"{visible(path)}:{number}: column {name}: has no value")
            for name, value in row.items():
                if not _can_be(name, value):
                    raise InputError(
                        f"{visible(path)}:{number}: column {visible(name)}: expected a number from 0 to {_MOST:g}, got "
                        f"{value!r}"
                    )
        return rows

    def digest(self) -> str:
        """SHA-256 over metrics, summary and models: the same for equal experiments, wherever they ran."""
        total = hashlib.sha256()
        files = [*self.path.glob("metrics/*.csv"), *self.path.glob("models/*.safetensors")]
        for path in sorted([*files, self.path / "summary.json"]):
            if path.is_file():
                total.update(f"{path.relative_to(self.path).as_posix()}\n".encode())
                total.update(hashlib.sha256(path.read_bytes()).digest())
        return total.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _can_be(column: str, value: float) -> bool:
    """Whether a number is one that `column` can hold; losses may be infinite, and no numbers."""
    is_counted = (
        column in _COUNTED or column.endswith(("step", "seconds")) or "bytes" in column or "->" in column
    )
    return not is_counted or 0 <= value <= _MOST


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
