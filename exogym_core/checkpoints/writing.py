"""Writing checkpoints: each rank's part, and completing one when every rank's mark has been served.

A rank that does not see rank 0's disk keeps its parts on its own:

    DIR/part-00000040/rank-0003.json, rank-0003.safetensors

Rank 0 completes a checkpoint when every rank has reported sizes and digests of what lies on its disk; until then a rank
keeps its part of the one before. A resume first checks that each part is there, and whole. DIR is that of rank 0, on
the rank's own disk, or lies in the folder that NETGYM_CHECKPOINTS names.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.checkpoints.checkpoint import (
    LETTERS,
    MANIFEST,
    StoredCheckpoint,
    manifest_text,
    rank_name,
    step_folders,
    step_name,
)
from exogym_core.checkpoints.files import FileFacts, LogWriter, write_new, write_state
from exogym_core.events import Grid
from exogym_core.names import visible
from exogym_core.results.disk import FolderLock, RecordError, record_errors
from exogym_core.workers.journal import MessagesInFlight
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from exogym_core.events import Finding, Saved
    from exogym_core.workers.journal import MessageName
    from netsim.ranks import StampedRow


__all__ = ["VARIABLE", "CheckpointWriter", "OwnParts", "RankCheckpoints", "mark_of"]

VARIABLE = "NETGYM_CHECKPOINTS"
_PART_FILE = re.compile(r"rank-(\d{4,})\.(?:json|safetensors)")
_PART_FOLDER = re.compile(r"part-(\d{8,})")


def mark_of(folder: Path | None) -> str:
    """Make a file that shows other processes whether they see this folder; returns its name.

    "" without a folder, and where no file can be made, such as on a read-only disk: then a folder of that name must do.
    """
    name = f".seen-{secrets.token_hex(8)}"
    try:
        if folder is not None:
            (folder / name).touch()
            return name
    except OSError:
        pass
    return ""


@dataclass(frozen=True)
class OwnParts:
    """Folder for the parts of a rank that does not see rank 0's disk.

    Attributes:
        folder: on its disk.
        place: this process's among so many that torchrun has started: all ranks of the run, or those of a site.
        newest_complete: returns the step of the newest checkpoint that rank 0 has completed; -1 before.
    """

    folder: Path
    place: tuple[int, int]
    newest_complete: Callable[[], int] = lambda: -1

    @classmethod
    def where_needed(
        cls, home: Path, mark: str, place: tuple[int, int], newest_complete: Callable[[], int]
    ) -> OwnParts | None:
        """Parts of a rank that does not see rank 0's folder `home`, in which `mark` is; None where it does.

        Raises:
            RecordError: no folder can be made.
        """
        elsewhere = os.environ.get(VARIABLE, "")
        if not elsewhere and (home / mark).exists():
            return None
        folder = Path(elsewhere).absolute() / home.relative_to(home.anchor) if elsewhere else home
        with record_errors(folder, "made"):
            folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, place, newest_complete)

    def _part(self, step: int) -> Path:
        return self.folder / step_name(step).replace("step", "part")

    def save(self, step: int, rank: int, state: Any) -> FileFacts:
        """Write the rank's part of the checkpoint of `step`; returns its facts, which name the machine.

        Raises:
            InputError: the state holds a value that cannot be stored.
            RecordError: a file cannot be written.
        """
        self._forget(lambda other: other < self.newest_complete())
        part = self._part(step)
        with record_errors(part, "made"):
            part.mkdir(exist_ok=True)
        facts = write_state(part, rank_name(rank), state)
        return {name: {**about, "host": socket.gethostname()} for name, about in facts.items()}

    def opened(self, checkpoint: StoredCheckpoint) -> StoredCheckpoint:
        """The checkpoint with this rank's part.

        Raises:
            InputError: its part is not here, or not whole.
        """
        found = replace(checkpoint, path=self._part(checkpoint.step))
        ranks = [int(part[1]) for name in checkpoint.files if (part := _PART_FILE.fullmatch(name))]
        rank = sorted(set(ranks))[self.place[0]]
        try:
            found.rank_state(rank)
        except RecordError as error:
            about = checkpoint.files.get(f"{rank_name(rank)}.json", {})
            raise InputError(
                f"{visible(checkpoint.path)}: rank {rank} on {visible(socket.gethostname())} lacks its part: "
                f"{visible(error, 300)}; it was written on {visible(about.get('host', 'a disk that all saw'))}: start "
                "each rank where it was (torchrun --node-rank), or start again"
            ) from None
        return found

    def keep_only(self, step: int | None) -> None:
        """Remove parts of other checkpoints, when all ranks have agreed which one they resume from."""
        self._forget(lambda other: other != step)

    def _forget(self, is_over: Callable[[int], bool]) -> None:
        for step, part in list(self._kept()):
            if is_over(step):
                for path in list(part.iterdir()):
                    named = _PART_FILE.fullmatch(path.name)
                    if named is not None and int(named[1]) % self.place[1] == self.place[0]:
                        path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # other ranks of this machine have theirs there
                    part.rmdir()

    def _kept(self) -> Iterator[tuple[int, Path]]:
        for path in self.folder.iterdir():
            found = _PART_FOLDER.fullmatch(path.name)
            if found is not None:
                yield int(found[1]), path


@dataclass(frozen=True)
class RankCheckpoints:
    """Folder for the states of ranks, and the checkpoint to resume from.

    Attributes:
        folder: of the checkpoints; None where none are made.
        every: steps between two; None where none are made.
        resumed: the checkpoint to resume from; None for a run from the start.
        own: keeps this rank's parts, where `folder` is on a disk that it does not see.
    """

    folder: Path | None = None
    every: int | None = None
    resumed: StoredCheckpoint | None = None
    own: OwnParts | None = None

    @property
    def home(self) -> Path | None:
        """Folder of this run's checkpoints, old or new; None where there are none."""
        if self.folder is None and self.resumed is not None:
            return self.resumed.path.parent
        return self.folder

    def begun(self, after: int) -> list[int]:
        """Steps after `after` whose checkpoints some rank has begun."""
        if self.folder is None:
            return []
        steps = [int(path.name.removeprefix(".step-")) for path in self.folder.glob(".step-????????")]
        return sorted(step for step in steps if step > after)

    def save(self, step: int, rank: int, state: Any) -> FileFacts:
        """Write one rank's part of the checkpoint of `step`; returns the facts that it must mark.

        Raises:
            InputError: the state holds a value that cannot be stored.
            RecordError: a file cannot be written.
        """
        if self.own is not None:
            return self.own.save(step, rank, state)
        assert self.folder is not None
        unfinished = self.folder / f".{step_name(step)}"
        with record_errors(unfinished, "made"):
            unfinished.mkdir(exist_ok=True)
        return write_state(unfinished, rank_name(rank), state)


@dataclass
class _Arriving:
    """Checkpoint of which some ranks' marks have been served."""

    files: FileFacts = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # rank -> length of its log, the mark included
    # (of ranks whose parts are elsewhere: as far as it has come when the last part is here)
    num_deposited: dict[int, int] = field(default_factory=dict)  # snapshots of each rank before its mark
    num_timed: int = 0  # evaluations by the clock that some rank had reached


class CheckpointWriter:
    """Completes checkpoints as their marks are served, and everything before them has been evaluated.

    Args:
        folder: for the checkpoints; it exists.
        identity: of the run.
        world_size: number of ranks.
        resumed: the checkpoint that the run resumes from.
        num_parts: number of ranks' parts in a checkpoint, which then has the others' rows so far; None: those
            of all.

    Raises:
        InputError: another process makes checkpoints in the folder.

    Attributes:
        requested: called with each rank and request as the clock serves it.
        in_flight: messages in flight.
        on_complete: called with the step of each complete checkpoint.
    """

    on_complete: Callable[[int], None] = staticmethod(lambda step: None)

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        world_size: int,
        resumed: StoredCheckpoint | None = None,
        num_parts: int | None = None,
    ) -> None:
        self._num_parts = world_size if num_parts is None else num_parts
        self._folder, self._identity, self._world_size = folder, identity, world_size
        self._lock = FolderLock(folder)
        self._arriving: dict[int, _Arriving] = {}
        self._complete: list[tuple[int, _Arriving]] = []  # by step; to be evaluated first: what was deposited
        self._num_timed = 0  # evaluations by the clock that have been reported
        self._resumed_step = resumed.step if resumed is not None else 0
        self.in_flight = MessagesInFlight()
        self._tidy()
        earlier = [(resumed.path, part) for part in resumed.logs] if resumed is not None else []
        self._log = LogWriter(folder, world_size, earlier)
        self.requested = self._log.add

    def add(self, marked: StampedRow) -> None:
        """Take a rank's `Saved`.

        Raises:
            RecordError: a file cannot be written; the previous checkpoint is left as it was.
        """
        saved: Saved = marked.row
        if saved.step <= self._resumed_step:
            return
        arriving = self._arriving.setdefault(saved.step, _Arriving())
        arriving.files.update(saved.files)
        arriving.lengths[marked.rank] = self._log.length(marked.rank)
        arriving.num_deposited[marked.rank] = saved.num_deposited
        arriving.num_timed = max(arriving.num_timed, saved.num_timed)
        if len(arriving.lengths) == self._num_parts:
            for rank in range(self._world_size):
                arriving.lengths.setdefault(rank, self._log.length(rank))
            self._complete.append((saved.step, self._arriving.pop(saved.step)))

    def add_found(self, found: Finding) -> None:
        """Store a finding of the evaluator."""
        self._log.add_found(found)
        if found.point.grid is Grid.CLOCK:
            self._num_timed = found.point.number + 1

    def settle(self, num_taken: Mapping[int, int]) -> None:
        """Complete the checkpoints whose earlier snapshots are all evaluated; `num_taken` counts those by rank.

        Raises:
            RecordError: a file cannot be written; the previous checkpoint is left as it was.
        """
        while self._complete:
            step, arriving = self._complete[0]
            if self._num_timed < arriving.num_timed or any(
                num_taken.get(rank, 0) < number for rank, number in arriving.num_deposited.items()
            ):
                return
            del self._complete[0]
            if messages := self.in_flight.complete(step):
                arriving.files.update(self._write(step, messages))
            for _ in self.stages(step, arriving.files, arriving.lengths, arriving.num_timed):
                pass
            # Some rank has none of that step.
            for earlier in [each for each in self._arriving if each < step]:
                del self._arriving[earlier]
                shutil.rmtree(self._folder / f".{step_name(earlier)}", ignore_errors=True)
            self.on_complete(step)

    def _write(self, step: int, messages: Mapping[MessageName, tuple[Tensor, ...]]) -> FileFacts:
        kept = [
            {"box": box, "source": source, "number": number, "tensors": list(tensors)}
            for ((box, source), number), tensors in messages.items()
        ]
        return write_state(self._folder / f".{step_name(step)}", LETTERS, kept)

    def stages(
        self, step: int, files: FileFacts, lengths: Mapping[int, int], num_timed: int = 0
    ) -> Iterator[str]:
        """Complete the checkpoint of `step`, pausing after each stage: whatever ends the process there
        leaves either the previous checkpoint or this one to resume from.

        Args:
            step: its hidden folder holds every rank's files.
            files: their facts.
            lengths: rank -> how much of its log belongs to the checkpoint.
            num_timed: evaluations by the clock whose findings belong to it, besides those of steps before.
        """
        unfinished, finished = self._folder / f".{step_name(step)}", self._folder / step_name(step)
        in_order = [lengths[rank] for rank in range(self._world_size)]
        logs = self._log.link_into(unfinished, in_order, (step, num_timed))
        yield "log"
        body = {
            "step": step,
            "identity": self._identity,
            "files": dict(sorted(files.items())),
            "logs": [part.model_dump(mode="json") for part in logs],
        }
        write_new(unfinished / MANIFEST, manifest_text(body).encode())
        _sync_folder(unfinished)
        yield "manifest"
        previous = step_folders(self._folder)
        if finished in previous:  # of an earlier run from this folder that got further than what was resumed
            _remove(finished)
        with record_errors(finished, "made"):
            unfinished.rename(finished)
        yield "renamed"
        _sync_folder(self._folder)
        yield "complete"
        for path in previous:
            self._log.moved(path, finished)
            if path != finished:
                _remove(path)
        yield "alone"

    def close(self) -> None:
        """Close the log and remove checkpoints that were not completed."""
        self._log.close()
        self._tidy()

    def _tidy(self) -> None:
        for path in self._folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self._folder.glob(".log-*"):
            path.unlink(missing_ok=True)

    def release(self) -> None:
        """Release the folder to other processes."""
        self._lock.release()


def _remove(path: Path) -> None:
    """Remove a step folder so that it is never seen in part."""
    hidden = path.with_name(f".{path.name}.old")
    with contextlib.suppress(OSError):
        path.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    """Write the folder's entries down to the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:  # a system on which folders cannot be opened
        return
    try:
        with record_errors(path, "written"):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
