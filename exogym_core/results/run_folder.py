"""The folder of a run: every file written whole or not at all, sealed with its user's secret.

    folder = RunFolder.create(None, "digits")          # runs/digits-1
    folder.write_text("experiment.yaml", experiment.to_yaml())
    folder.write_result("DiLoCo", result)
    folder.write_model("DiLoCo", state)
    folder.write_summary(entries)
    folder.digest()                                     # of the results: equal for equal experiments

Metrics and summary hold no host time, no path and no name of this machine.

The seal in environment.json covers experiment.yaml and the folder of the code that it names. Another user's folder, or
one whose experiment was edited, has no valid seal.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import hmac
import json
import os
import platform
import shutil
import warnings
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.names import file_name, seeded_name, visible
from exogym_core.results.disk import (
    LOCK_NAME,
    FolderLock,
    RecordError,
    append_text,
    make_folder,
    record_errors,
    write_whole,
)
from exogym_core.results.loggers import LOGGERS
from exogym_core.results.schema import MOST, TRAIN, VALIDATION, can_hold, csv_text, finite, header
from netsim.errors import InputError
from netsim.files.plain_files import read_bytes
from netsim.files.signed import user_secret

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from exogym_core.results.fit_result import FitResult

__all__ = [
    "RUN_FILES",
    "RunFolder",
    "code_folder_of",
    "is_own",
    "is_run_folder",
    "relative_to",
    "require_folder",
    "require_own",
    "seal_of",
]

_ENVIRONMENT = "environment.json"
RUN_FILES = {
    "": "metrics/{}.csv",
    "validation": "metrics/{}.validation.csv",
    "correlation": "metrics/{}.correlation.csv",
    "links": "links/{}.csv",
    "requests": "streams/{}.gz",
    "model": "models/{}.safetensors",
    "checkpoints": "checkpoints/{}",
    "tensorboard": "tensorboard/{}",
}
"""Files and folders of a run by what they hold; `{}` is for its name (`seeded_name`)."""
_VERSIONS = ("netgym", "torch", "numpy", "simpy", "scikit-learn")


def is_run_folder(path: Path) -> bool:
    """True if a run has begun in this folder."""
    return (path / "experiment.yaml").is_file()


def require_folder(path: Path) -> None:
    """Raise InputError where nothing lies at the path of a run, sweep or tuning.

    Raises:
        InputError: nothing does.
    """
    if not path.exists():
        raise InputError(f"{visible(path)}: there is no such folder")


class RunFolder:
    """The folder of one run; docs/experiment.md lists its files.

    Attributes:
        path: where it is.
        is_new: made by this process, which may remove it; a folder that was opened stays.
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self.path: Path = path
        self.is_new = is_new
        self._lock: FolderLock | None = None

    @classmethod
    def create(cls, out: str | Path | None, name: str) -> RunFolder:
        """A new folder: `out`, which must be new or empty, else `runs/<name>-<n>`; it is this process's.

        Raises:
            InputError: `out` cannot be made or holds something already, or another process has just taken it.
        """
        if out is None:
            return cls(make_folder(Path("runs"), name, numbered=True), is_new=True).owned()
        path = Path(out)
        folder = cls(path, is_new=True)
        try:
            if path.exists() and not path.is_dir():
                raise InputError(f"--out {visible(out)}: is a file: choose a new or empty folder")
            folder._require_empty(out)
            path.mkdir(parents=True, exist_ok=True)
        except InputError:
            raise
        except (OSError, ValueError) as error:  # a ValueError: of a name that no file system takes
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"--out {visible(out)}: cannot be made: {reason}") from error
        folder.owned()
        try:
            folder._require_empty(out)  # of a process that came first and has ended
        except InputError:
            folder.release()
            raise
        return folder

    def _require_empty(self, out: str | Path) -> None:
        if self.path.is_dir() and any(entry.name != LOCK_NAME for entry in self.path.iterdir()):
            raise InputError(f"--out {visible(out)}: the folder is not empty: choose a new or empty one")

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of a run.

        Raises:
            InputError: there is no run at `path`.
        """
        folder = Path(path)
        require_folder(folder)
        if not is_run_folder(folder):
            if (folder / "train.csv").is_file() and (folder / "config.json").is_file():
                raise InputError(
                    f"{visible(path)}: holds the tables train.csv and validation.csv of fit(run_name=...), no run: "
                    "for a page, train with fit(out=...), netgym compare EXPERIMENT or netgym.compare(...)"
                )
            raise InputError(f"{visible(path)}: is no run folder: it has no experiment.yaml")
        return cls(folder)

    def place(self, kind: str, name: str) -> Path:
        """Path of the file or folder of a run in which a `kind` of RUN_FILES lies."""
        return self.path / RUN_FILES[kind].format(file_name(name))

    # --- ownership -----------------------------------------------------------------------------------------

    def owned(self) -> RunFolder:
        """This folder, from now on this process's alone, until `release` or the process's end.

        Raises:
            InputError: another process works in it; the message names its pid.
            RecordError: it cannot be written to.
        """
        with record_errors(self.path, "written"):
            self._lock = FolderLock(self.path)
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
        for name in names:
            path = path / file_name(name)
            _make_unlinked(path)
        return path

    def write_text(self, relative: str, text: str | bytes) -> Path:
        """Write one file whole, and return its path; folders on the way are made."""
        path = self.path / relative
        for parent in list(Path(relative).parents)[-2::-1]:
            _make_unlinked(self.path / parent)
        write_whole(path, text)
        if relative == "experiment.yaml" and (self.path / _ENVIRONMENT).is_file():
            self.seal()
        return path

    def seal(self) -> None:
        """Seal the experiment that lies here now, which another user may have written or this one edited."""
        self._seal(_facts(self.path))

    def write_environment(self, code_folder: Path | None = None) -> None:
        """Versions, platform and settings that decide the last bits; no names of people or machines.

        Args:
            code_folder: folder of the modules that the experiment names, if it names any.
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
        self._seal(facts)

    def _seal(self, facts: dict[str, Any]) -> None:
        """Write environment.json with this user's seal of the experiment that lies here now."""
        self._write_facts(facts, seal=seal_of(self.path, facts.get("code")))

    def _write_facts(self, facts: dict[str, Any], **changes: Any) -> None:
        self.write_text(_ENVIRONMENT, json.dumps(facts | changes, indent=2) + "\n")

    def write_result(self, label: str, result: FitResult, *, seed: int | None = None) -> None:
        """Metrics of one strategy, comparisons of replicas and traffic of links, if any.

        `seed` is given where the run has several: each has files of its own.
        """
        name = seeded_name(label, seed)
        tables = {
            "": csv_text(result.history, header(TRAIN)),
            "validation": csv_text(result.validation, header(VALIDATION)),
            "correlation": result.correlation and csv_text(result.correlation, ("step", "correlation")),
            "links": result.link_history and csv_text(result.link_history, ("virtual_seconds",)),
            "requests": result.recording and result.recording.to_bytes(),
        }
        for kind, content in tables.items():
            if content:
                self.write_text(RUN_FILES[kind].format(name), content)

    def note_retimed(self, name: str, source: str) -> None:
        """Note in environment.json that a strategy's run was not trained here, but is that of `source` retimed."""
        self._note("retimed", name, source)

    def read_retimed(self) -> dict[str, str]:
        """Runs that were retimed, by the names in their files: the folder that each was trained in."""
        return self._noted("retimed")

    def replace_sources(self, sources: Mapping[str, str]) -> None:
        """Note the folders in which retimed runs were trained, by run: they have other names now."""
        if (self.path / _ENVIRONMENT).is_file():
            self._write_facts(_facts(self.path), retimed=dict(sources))

    def note_source(self, source: str) -> None:
        """Note in environment.json the folder whose runs are retimed here, also after an interruption."""
        self._write_facts(_facts(self.path), source=source)

    def read_source(self) -> str | None:
        """Folder whose runs are retimed here; None: not noted."""
        found = _facts(self.path).get("source")
        return found if isinstance(found, str) else None

    def note_trained_again(self, label: str, reason: str) -> None:
        """Note in environment.json why a strategy was trained here, although another run has the same training."""
        self._note("trained_again", label, reason)

    def read_trained_again(self) -> dict[str, str]:
        """Strategies that another run trained with all the same values, by label: why they were trained here."""
        return self._noted("trained_again")

    def _note(self, kind: str, name: str, value: str) -> None:
        noted = {**self._noted(kind), name: value}
        self._write_facts(_facts(self.path), **{kind: dict(sorted(noted.items()))})

    def _noted(self, kind: str) -> dict[str, str]:
        found = _facts(self.path).get(kind)
        return found if isinstance(found, dict) else {}

    def note_code(self, digests: Mapping[str, str]) -> None:
        """Note in environment.json the digests of the user's code that trains here."""
        facts = _facts(self.path)
        self._write_facts(facts, code_digests=dict(sorted({**self.read_code(), **digests}.items())))

    def read_code(self) -> dict[str, str]:
        """Digests of the user's code that has trained here, by name; empty where none are noted."""
        return self._noted("code_digests")

    def write_model(self, label: str, state: Mapping[str, Any], *, seed: int | None = None) -> None:
        """The tensors of a model's state; a warning names what else is in it."""
        from safetensors.torch import save
        from torch import is_tensor

        name = seeded_name(label, seed)
        # Cloned, because tied weights share memory and the format refuses that.
        tensors = {
            key: value.detach().cpu().clone().contiguous()
            for key, value in sorted(state.items())
            if is_tensor(value)
        }
        path = self.write_text(RUN_FILES["model"].format(name), save(tensors))
        if others := [visible(key) for key in state if key not in tensors]:
            warnings.warn(
                f"{visible(path)}: has the model's tensors, not its {', '.join(others[:3])}: that is in "
                "fit_result.judged_state",
                UserWarning,
                stacklevel=2,
            )

    def remove_strategy(self, label: str, seed: int) -> None:
        """Remove the files of a strategy's run with one of several seeds."""
        name = seeded_name(label, seed)
        for place in (*RUN_FILES.values(), *_files_of_loggers(".rows")):  # loggers get all rows again
            path = self.path / place.format(name)
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def rename_run(self, name: str, other: str) -> None:
        """Give the files of a run another name, as `seeded_name` makes them; does nothing where they have it."""
        for place in (*RUN_FILES.values(), *_files_of_loggers("", ".rows")):
            before, after = (self.path / place.format(each) for each in (name, other))
            if before.exists() and not after.exists():
                before.rename(after)
        if name in (retimed := self.read_retimed()):
            self.replace_sources({other if run == name else run: place for run, place in retimed.items()})

    def write_summary(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Write an object for each strategy; null in place of numbers that are not finite, which JSON lacks."""
        plain = [{key: finite(value) for key, value in entry.items()} for entry in entries]
        self.write_text("summary.json", json.dumps(plain, indent=2, allow_nan=False) + "\n")

    def log(self, line: str) -> None:
        """Add one line to `log.txt`."""
        append_text(self.path / "log.txt", visible(line, 2000) + "\n", os.O_CREAT)

    def has_trained(self) -> bool:
        """True if a run can resume here; a killed one may have checkpoints and no summary."""
        files = [*(self.path / "checkpoints").glob("*/step-*"), *(self.path / "metrics").glob("*")]
        return bool(self.read_summary() or files)

    def discard_if_untrained(self) -> bool:
        """Remove a new folder in which nothing has been trained; returns whether nothing has."""
        is_untrained = not self.has_trained()
        if is_untrained:
            self.discard()
        return is_untrained

    def discard(self) -> None:
        """Release a new folder, and remove only what a run writes at its start; leave one that was opened."""
        if not self.is_new:
            return
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

    def record_tables(self, *, are_final: bool) -> None:
        """Record the digest of tables and summary in environment.json at the end of a run; drop it before one."""
        facts = _facts(self.path)
        if are_final or "tables" in facts:
            self._write_facts(facts, tables=self._digest_of("metrics/*.csv") if are_final else None)

    # --- reading -------------------------------------------------------------------------------------------

    def check_tables(self) -> None:
        """Raise InputError where tables or summary are no longer what the run left.

        Raises:
            InputError: a file was changed since.
        """
        if _facts(self.path).get("tables") not in (None, self._digest_of("metrics/*.csv")):
            raise InputError(
                f"{visible(self.path)}: metrics or summary.json were changed since the run wrote them: restore "
                'them, or remove "tables" from environment.json to read them as they are'
            )

    def finished(self) -> list[dict[str, Any]]:
        """The summary's objects of the strategies that ended, neither stopped nor failed.

        Raises:
            InputError: the summary is damaged.
        """
        return _finished(self.read_summary())

    def finished_runs(self) -> list[dict[str, Any]]:
        """Objects of the summaries here, and in folders inside, of runs that have finished, one a seed.

        Raises:
            InputError: a summary is damaged.
        """
        summaries = [RunFolder(path.parent).read_summary() for path in self.path.rglob("summary.json")]
        entries = [entry for entries in summaries for entry in entries]
        # Of a sweep's points.
        entries = [each for entry in entries for each in entry.get("strategies", [entry])]
        return _finished(run for entry in entries for run in entry.get("by_seed") or [entry])

    def read_summary(self) -> list[dict[str, Any]]:
        """The summary's objects; an empty list where no strategy has ended yet.

        Raises:
            InputError: the file is damaged.
        """
        path = self.path / "summary.json"
        if not path.is_file():
            return []
        try:
            entries = json.loads(read_bytes(path))
        except (OSError, ValueError, RecursionError) as error:
            remedy = "move it away, and --resume writes it again from what else the folder has"
            raise InputError(f"{visible(path)}: cannot be read: {error}: {remedy}") from None
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries
        ):
            raise InputError(f"{visible(path)}: is no summary: expected a list of objects with a name")
        return entries

    def read_metrics(self, label: str, kind: str = "", seed: int | None = None) -> list[dict[str, float]]:
        """Rows of one strategy's metrics (`kind` "") or validation metrics ("validation"), numbers only.

        `seed` names the run where there are several.

        Raises:
            InputError: the file is damaged.
        """
        return self._read_numbers(self.place(kind, seeded_name(label, seed)), "step")

    def read_links(self, label: str, seed: int | None = None) -> list[dict[str, float]]:
        """Bytes that had crossed each link by each of some `virtual_seconds`; empty where there was no network.

        Raises:
            InputError: the file is damaged.
        """
        return self._read_numbers(self.place("links", seeded_name(label, seed)), "virtual_seconds")

    def _read_numbers(self, path: Path, key: str) -> list[dict[str, float]]:
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
        for number, row in enumerate(rows, start=2):
            if key not in row:
                raise InputError(f"{visible(path)}:{number}: column {key}: has no value")
            for name, value in row.items():
                if not can_hold(name, value):
                    raise InputError(
                        f"{visible(path)}:{number}: column {visible(name)}: expected a number from 0 to {MOST:g}, got "
                        f"{value!r}"
                    )
        return rows

    def digest(self) -> str:
        """SHA-256 over metrics, summary and models: the same for equal experiments, wherever they ran."""
        return self._digest_of("metrics/*.csv", "models/*.safetensors")

    def _digest_of(self, *patterns: str) -> str:
        """SHA-256 over files of these patterns and the summary."""
        total = hashlib.sha256()
        files = [path for pattern in patterns for path in self.path.glob(pattern)]
        for path in sorted([*files, self.path / "summary.json"]):
            if path.is_file():
                total.update(f"{path.relative_to(self.path).as_posix()}\n".encode())
                total.update(hashlib.sha256(path.read_bytes()).digest())
        return total.hexdigest()


def _finished(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [run for run in runs if not (run.get("incomplete") or run.get("failed"))]


def _files_of_loggers(*ends: str) -> list[str]:
    """Files that loggers keep of a run, as in RUN_FILES."""
    return [f"{RUN_FILES['checkpoints']}.{logger}{end}" for logger in LOGGERS for end in ends]


def _make_unlinked(path: Path) -> None:
    """Make a folder inside a run's, where it is not there.

    Raises:
        RecordError: it cannot be made, or is a link: files written through it would leave the run's folder.
    """
    if path.is_symlink():
        raise RecordError(f"{visible(path)}: is a link, which could lead anywhere: put a folder in its place")
    with record_errors(path, "made"):
        path.mkdir(exist_ok=True)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# --- the seal -----------------------------------------------------------------------------------------------


def seal_of(folder: Path, code_folder: str | None) -> str | None:
    """This user's seal of the run in `folder`; None where this machine can keep no secret for them."""
    try:
        secret, experiment = user_secret(), read_bytes(folder / "experiment.yaml")
    except (InputError, OSError):
        return None
    text = json.dumps([hashlib.sha256(experiment).hexdigest(), code_folder])
    return hmac.new(secret, f"run folder {text}".encode(), "sha256").hexdigest()


def is_own(folder: Path) -> bool:
    """True if this user made the run in `folder`, and its experiment has not been changed since."""
    facts = _facts(folder)
    expected, found = seal_of(folder, facts.get("code")), str(facts.get("seal"))
    return expected is not None and hmac.compare_digest(found.encode(), expected.encode())


def require_own(folder: Path, kind: str) -> None:
    """Raise InputError for a folder of this `kind`, such as a run, that is another user's or was edited.

    Raises:
        InputError: it is not this user's.
    """
    opened = RunFolder.open(folder)
    if not (folder / _ENVIRONMENT).exists() and not opened.has_trained():
        raise InputError(
            f"{visible(folder)}: this {kind} ended before it had begun: remove it, and start again"
        )
    if not is_own(folder):
        raise InputError(
            f"{visible(folder)}: another user made this {kind}, or its experiment.yaml was changed since: it may "
            "name code, which runs with your permissions; read it, then add --trust"
        )


def code_folder_of(folder: Path) -> Path | None:
    """Folder of the modules that the experiment of this user's run names; None: the run's folder alone."""
    code = _facts(folder).get("code")
    return folder / code if isinstance(code, str) else None


def relative_to(folder: Path, code_folder: Path) -> str:
    """`code_folder` as `code_folder_of` finds it from `folder`, which says less about this machine."""
    return os.path.relpath(code_folder.resolve(), folder.resolve())


def _facts(folder: Path) -> dict[str, Any]:
    try:
        facts = json.loads(read_bytes(folder / "environment.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}
