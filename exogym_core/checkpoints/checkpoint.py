"""Checkpoints of a whole run: every rank's state, and the log that brings a fresh clock to the same instant.

    DIR/step-00000040/
        manifest.json                             what the run is; size and SHA-256 of the other files
        log-0001.jsonl.gz                         what every rank has requested of the clock so far; after a
                                                  restart it goes on in log-0002.jsonl.gz, and so on
        rank-0000.json, rank-0000.safetensors     rank 0's state, and so on

Ranks write their files into a hidden folder as they get there in host time, and mark a row. When the clock
has played every rank's mark, the process that plays it adds log and manifest and gives the folder its name:
a step folder is complete or not there. The one before it is removed after that.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.checkpoints.log import LogPart, LogWriter, read_logs
from exogym_core.checkpoints.rank_state import FileFacts, damaged, read_state, write_new, write_state
from exogym_core.names import visible
from exogym_core.ranks.journal import Journal
from exogym_core.results.lock import FolderLock
from exogym_core.results.record import RecordError
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import nn

    from netsim.ranks.kernel import StampedRow
    from netsim.ranks.requests import Request

__all__ = ["CheckpointWriter", "RankCheckpoints", "StoredCheckpoint", "find_checkpoint", "run_identity"]

_FORMAT = 2
_MANIFEST = "manifest.json"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


def run_identity(
    model: nn.Module,
    strategy: str,
    options: Mapping[str, Any],
    world_size: int,
    settings: Mapping[str, Any],
    training_set: str | None = None,
) -> dict[str, Any]:
    """What must be equal for one run to go on from another's checkpoint, in plain values.

    Args:
        model: its names, dtypes and shapes count.
        strategy, options: name and arguments of the strategy.
        world_size: number of ranks.
        settings: whatever else changes what is computed.
        training_set: what it is known by; None where each rank has one of its own, and knows it itself.
    """
    shapes = {
        name: f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for name, value in model.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    identity = {
        "format": _FORMAT,
        "versions": {"netgym": metadata.version("netgym"), "torch": str(torch.__version__)},
        "world size": world_size,
        "strategy": strategy,
        "strategy's options": dict(options),
        "model": shapes,
        "training set": training_set,
        "settings": dict(settings),
    }
    # As JSON gives it back; the address of an object in its repr says nothing.
    plain = json.dumps(identity, default=lambda value: re.sub(r" at 0x[0-9a-f]+", "", repr(value)))
    result: dict[str, Any] = json.loads(plain)
    return result


# --- reading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint.

    Attributes:
        path: its step folder.
        step: steps that every rank had done.
        identity: of the run, as `run_identity` told it.
        files: facts of its files but the manifest and the logs.
        logs: how much of which log belongs to it.
    """

    path: Path
    step: int
    identity: dict[str, Any]
    files: FileFacts
    logs: tuple[LogPart, ...] = ()

    @classmethod
    def open(cls, path: Path) -> StoredCheckpoint:
        """The checkpoint in a step folder; its manifest is verified here, other files when they are read.

        Raises:
            RecordError: the manifest is missing or damaged, or a file is missing.
        """
        manifest = path / _MANIFEST
        try:
            text = manifest.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise damaged(manifest, error) from error
        try:
            body = json.loads(text)["body"]
            intact = text == _manifest_text(body)
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(manifest, error) from error
        if not intact:
            raise damaged(manifest, "its SHA-256 is another")
        if body["identity"]["format"] != _FORMAT:
            raise _differ(path, "format", body["identity"]["format"], _FORMAT)
        logs = tuple(map(LogPart.of, body["logs"]))
        for name in [*body["files"], *(part.name for part in logs)]:
            if not (path / name).is_file():
                raise damaged(path / name, "it is missing")
        return cls(path, body["step"], body["identity"], body["files"], logs)

    @property
    def world_size(self) -> int:
        """Number of its ranks."""
        return int(self.identity["world size"])

    def check(self, identity: Mapping[str, Any]) -> None:
        """Refuse a run that is another.

        Raises:
            InputError: naming what differs, with both values.
        """
        for name, mine in self.identity.items():
            other: Any = identity.get(name)
            if not isinstance(mine, dict):
                if mine != other:
                    raise _differ(self.path, name, mine, other)
                continue
            for key in [*mine, *other]:
                if mine.get(key, "absent") != other.get(key, "absent"):
                    told = f"{name}: {key}"
                    raise _differ(self.path, told, mine.get(key, "absent"), other.get(key, "absent"))

    def past(self) -> tuple[list[list[Request]], list[dict[str, Any]]]:
        """What each rank had requested, and what had been observed of the steps before.

        Raises:
            RecordError: a file is missing or damaged.
        """
        return read_logs(self.path, self.logs, self.world_size)

    def rank_state(self, rank: int) -> dict[str, Any]:
        """One rank's state.

        Raises:
            RecordError: one of its files is damaged.
        """
        state: dict[str, Any] = read_state(self.path, _rank_name(rank), self.files)
        return state


def _differ(path: Path, what: str, checkpoint: Any, run: Any) -> InputError:
    return InputError(
        f"{visible(path)}: the checkpoint's {visible(what, 100)} is {visible(checkpoint, 200)}, this run's is "
        f"{visible(run, 200)}; make them equal to go on from it, or start anew"
    )


def find_checkpoint(folder: Path) -> StoredCheckpoint | None:
    """The newest checkpoint in `folder`, or the one that `folder` is; None where there is none yet.

    Raises:
        InputError: there is no such folder.
        RecordError: the checkpoint is damaged.
    """
    if not folder.is_dir():
        raise InputError(f"{visible(folder)}: there is no such folder to resume from")
    if _STEP_FOLDER.fullmatch(folder.name):
        return StoredCheckpoint.open(folder)
    steps = _step_folders(folder)
    return StoredCheckpoint.open(steps[-1]) if steps else None


def _step_folders(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _rank_name(rank: int) -> str:
    return f"rank-{rank:04}"


def _step_name(step: int) -> str:
    return f"step-{step:08}"


def _manifest_text(body: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(body).encode()).hexdigest()
    return json.dumps({"body": body, "sha256": digest}, indent=1) + "\n"


# --- a rank's side -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankCheckpoints:
    """Where ranks put their states, and what they go on from.

    Attributes:
        folder: of the checkpoints; None where none are made.
        every: steps between two.
        resumed: the checkpoint to go on from; None for a run from the start.
    """

    folder: Path | None = None
    every: int | None = None
    resumed: StoredCheckpoint | None = None

    @property
    def home(self) -> Path | None:
        """The folder of this run's checkpoints, old or new; None where there are none."""
        if self.folder is None and self.resumed is not None:
            return self.resumed.path.parent
        return self.folder

    def is_due(self, step: int) -> bool:
        """Whether there is a checkpoint after `step` steps."""
        return self.folder is not None and self.every is not None and step % self.every == 0

    def save(self, step: int, rank: int, state: Any) -> FileFacts:
        """Write one rank's part of the checkpoint of `step`; returns the facts that it must mark.

        Raises:
            InputError: the state holds what cannot be kept.
            RecordError: a file cannot be written.
        """
        assert self.folder is not None
        unfinished = self.folder / f".{_step_name(step)}"
        try:
            unfinished.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise RecordError(f"{visible(unfinished)}: cannot be made: {error.strerror}") from error
        return write_state(unfinished, _rank_name(rank), state)

    def load(self, rank: int) -> dict[str, Any] | None:
        """What this rank goes on from, None from the start."""
        return self.resumed.rank_state(rank) if self.resumed is not None else None


# --- the side that plays the clock -------------------------------------------------------------------------


@dataclass
class _Arriving:
    """A checkpoint of which some ranks' marks have been played."""

    files: FileFacts = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # rank -> length of its log, the mark included


class CheckpointWriter:
    """Completes checkpoints as their marks are played, and everything before them has been observed.

    Args:
        folder: where they go; it exists. None: nothing is kept.
        identity: of the run.
        world_size: number of ranks.
        resumed: what the run goes on from.

    Raises:
        InputError: another process makes checkpoints in the folder.

    Attributes:
        journal: to run the ranks with.
        observed: rows of an earlier part of the run.
    """

    def __init__(
        self,
        folder: Path | None,
        identity: Mapping[str, Any],
        world_size: int,
        resumed: StoredCheckpoint | None = None,
    ) -> None:
        self._folder, self._identity, self._world_size = folder, identity, world_size
        self._lock = FolderLock(folder) if folder is not None else None
        self._arriving: dict[int, _Arriving] = {}
        self._complete: list[tuple[int, int, _Arriving]] = []  # deposits to be observed before, step
        self._resumed_step = resumed.step if resumed is not None else 0
        past, self.observed = resumed.past() if resumed is not None else ([], [])
        self.journal = Journal(past)
        self._tidy()
        self._log: LogWriter | None = None
        if folder is not None:
            earlier = [(resumed.path, part) for part in resumed.logs] if resumed is not None else []
            num_past = [len(own) for own in past] or [0] * world_size
            self._log = LogWriter(folder, earlier, num_past)
            self.journal.on_request = self._log.add

    def add(self, marked: StampedRow, num_deposited: int = 0) -> None:
        """Take in a rank's row, when so many deposits have come.

        Raises:
            RecordError: a file cannot be written; the previous checkpoint is left as it was.
        """
        row = marked.row
        if "checkpoint" not in row or self._log is None or row["step"] <= self._resumed_step:
            return
        arriving = self._arriving.setdefault(row["step"], _Arriving())
        arriving.files.update(row["checkpoint"])
        arriving.lengths[marked.rank] = self._log.length(marked.rank)
        if len(arriving.lengths) == self._world_size:
            self._complete.append((num_deposited, row["step"], self._arriving.pop(row["step"])))

    def add_observed(self, row: Mapping[str, Any]) -> None:
        """Keep a row that was observed."""
        if self._log is not None:
            self._log.add_observed(row)

    def settle(self, num_observed: int = 0) -> None:
        """Complete the checkpoints that nothing is missing of, when so many deposits have been observed.

        Raises:
            RecordError: a file cannot be written; the previous checkpoint is left as it was.
        """
        while self._complete and self._complete[0][0] <= num_observed:
            _, step, arriving = self._complete.pop(0)
            for _ in self.stages(step, arriving.files, arriving.lengths):
                pass

    def stages(self, step: int, files: FileFacts, lengths: Mapping[int, int]) -> Iterator[str]:
        """Complete the checkpoint of `step`, pausing after each stage: whatever ends the process there
        leaves either the previous checkpoint or this one to go on from.

        Args:
            step: whose hidden folder holds every rank's files.
            files: their facts.
            lengths: rank -> how much of its log belongs to the checkpoint.
        """
        assert self._folder is not None
        assert self._log is not None
        unfinished, finished = self._folder / f".{_step_name(step)}", self._folder / _step_name(step)
        in_order = [lengths[rank] for rank in range(self._world_size)]
        logs = self._log.link_into(unfinished, step, in_order)
        yield "log"
        body = {
            "step": step,
            "identity": self._identity,
            "files": dict(sorted(files.items())),
            "logs": [part.to_plain() for part in logs],
        }
        write_new(unfinished / _MANIFEST, _manifest_text(body).encode())
        _sync_folder(unfinished)
        yield "manifest"
        previous = _step_folders(self._folder)
        if finished in previous:  # of an earlier run from this folder that got further than what was resumed
            _remove(finished)
        try:
            unfinished.rename(finished)
        except OSError as error:
            raise RecordError(f"{visible(finished)}: cannot be made: {error.strerror}") from error
        yield "renamed"
        _sync_folder(self._folder)
        yield "complete"
        for path in previous:
            self._log.moved(path, finished)
            if path != finished:
                _remove(path)
        yield "alone"

    def close(self) -> None:
        """Remove what has not been completed."""
        if self._log is not None:
            self._log.close()
        self._tidy()

    def _tidy(self) -> None:
        if self._folder is not None:
            for path in self._folder.glob(".step-*"):
                shutil.rmtree(path, ignore_errors=True)
            for path in self._folder.glob(".log-*"):
                path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let others make checkpoints in the folder."""
        if self._lock is not None:
            self._lock.release()


def _remove(path: Path) -> None:
    """Remove a step folder so that it is never seen in part."""
    hidden = path.with_name(f".{path.name}.old")
    with contextlib.suppress(OSError):
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    """Have the folder's entries on the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # a system on which folders cannot be opened
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise RecordError(f"{visible(path)}: cannot be written: {error.strerror or error}") from error
    finally:
        os.close(descriptor)
