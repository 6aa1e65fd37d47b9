"""Writing checkpoints: each rank's part, and completing one when every rank's mark has been served."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass, field
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
from exogym_core.checkpoints.log import LogWriter
from exogym_core.checkpoints.rank_state import FileFacts, write_new, write_state
from exogym_core.names import visible
from exogym_core.ranks.crossing import CrossingLetters
from exogym_core.ranks.journal import Journal
from exogym_core.results.disk import RecordError
from exogym_core.results.lock import FolderLock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from exogym_core.checkpoints.parts import OwnParts
    from exogym_core.ranks.crossing import LetterName
    from netsim.ranks.kernel import StampedRow
    from netsim.ranks.requests import Request

__all__ = ["CheckpointWriter", "RankCheckpoints"]


@dataclass(frozen=True)
class RankCheckpoints:
    """Where ranks put their states, and what they go on from.

    Attributes:
        folder: of the checkpoints; None where none are made.
        every: steps between two.
        resumed: the checkpoint to go on from; None for a run from the start.
        own: keeps this rank's parts, where `folder` is on a disk that it does not see.
    """

    folder: Path | None = None
    every: int | None = None
    resumed: StoredCheckpoint | None = None
    own: OwnParts | None = None

    @property
    def home(self) -> Path | None:
        """The folder of this run's checkpoints, old or new; None where there are none."""
        if self.folder is None and self.resumed is not None:
            return self.resumed.path.parent
        return self.folder

    def is_due(self, step: int) -> bool:
        """Whether there is a checkpoint after `step` steps."""
        return self.folder is not None and self.every is not None and step % self.every == 0

    def next_step(self, last: int) -> int | None:
        """The step of the checkpoint after that of `last`; None where none are made."""
        return None if self.folder is None or self.every is None else last + self.every

    def begun(self, after: int) -> list[int]:
        """Steps after this one whose checkpoints some rank has begun."""
        if self.folder is None:
            return []
        steps = [int(path.name.removeprefix(".step-")) for path in self.folder.glob(".step-????????")]
        return sorted(step for step in steps if step > after)

    def save(self, step: int, rank: int, state: Any) -> FileFacts:
        """Write one rank's part of the checkpoint of `step`; returns the facts that it must mark.

        Raises:
            InputError: the state holds what cannot be kept.
            RecordError: a file cannot be written.
        """
        if self.own is not None:
            return self.own.save(step, rank, state)
        assert self.folder is not None
        unfinished = self.folder / f".{step_name(step)}"
        try:
            unfinished.mkdir(exist_ok=True)
        except OSError as error:
            raise RecordError(f"{visible(unfinished)}: cannot be made: {error.strerror}") from error
        return write_state(unfinished, rank_name(rank), state)

    def load(self, rank: int) -> dict[str, Any] | None:
        """What this rank goes on from, None from the start."""
        return self.resumed.rank_state(rank) if self.resumed is not None else None


@dataclass
class _Arriving:
    """A checkpoint of which some ranks' marks have been served."""

    files: FileFacts = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # rank -> length of its log, the mark included
    # (of ranks whose parts are elsewhere: as far as it has come when the last part is here)
    num_deposited: int = 0  # by all, when the last rank had come
    looks: tuple[int, int] = (0, 0)  # looks by the clock that some rank had deposited for: first key and end


class CheckpointWriter:
    """Completes checkpoints as their marks are served, and everything before them has been observed.

    Args:
        folder: where they go; it exists. None: nothing is kept.
        identity: of the run.
        world_size: number of ranks.
        resumed: what the run goes on from.
        num_parts: how many ranks' parts make a checkpoint, which then has what has come of the others' rows; None:
            those of all.

    Raises:
        InputError: another process makes checkpoints in the folder.

    Attributes:
        journal: to run the ranks with.
        observed: rows of an earlier part of the run.
        on_complete: called with the step of a checkpoint that is complete.
    """

    on_complete: Callable[[int], None] = staticmethod(lambda step: None)

    def __init__(
        self,
        folder: Path | None,
        identity: Mapping[str, Any],
        world_size: int,
        resumed: StoredCheckpoint | None = None,
        num_parts: int | None = None,
    ) -> None:
        self._num_parts = world_size if num_parts is None else num_parts
        self._folder, self._identity, self._world_size = folder, identity, world_size
        self._lock = FolderLock(folder) if folder is not None else None
        self._arriving: dict[int, _Arriving] = {}
        self._complete: list[tuple[int, _Arriving]] = []  # by step; to be observed first: what was deposited
        self._last_look = -1  # by the clock, that has been observed
        self._resumed_step = resumed.step if resumed is not None else 0
        past, self.observed = resumed.past() if resumed is not None else ([], [])
        kept = resumed.letters() if resumed is not None else {}
        self._letters = CrossingLetters(self._resumed_step, kept)
        self.journal = Journal(past)
        if folder is not None or resumed is not None:
            self.journal.on_request, self.journal.letters = self._requested, self._letters
        self._tidy()
        self._log: LogWriter | None = None
        if folder is not None:
            earlier = [(resumed.path, part) for part in resumed.logs] if resumed is not None else []
            num_past = [len(own) for own in past] or [0] * world_size
            self._log = LogWriter(folder, earlier, num_past)

    def _requested(self, rank: int, request: Request) -> None:
        if self._log is not None:
            self._log.add(rank, request)
        self._letters.requested(rank, request)

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
        arriving.looks = max(arriving.looks, tuple(row.get("looks", (0, 0))))
        if len(arriving.lengths) == self._num_parts:
            for rank in range(self._world_size):
                arriving.lengths.setdefault(rank, self._log.length(rank))
            arriving.num_deposited = num_deposited
            self._complete.append((row["step"], self._arriving.pop(row["step"])))

    def add_observed(self, row: Mapping[str, Any]) -> None:
        """Keep a row that was observed."""
        if self._log is not None:
            self._log.add_observed(row)
            self._last_look = max(self._last_look, row["step"])

    def settle(self, num_observed: int = 0) -> None:
        """Complete the checkpoints that nothing is missing of, when so many deposits have been observed.

        Raises:
            RecordError: a file cannot be written; the previous checkpoint is left as it was.
        """
        while self._complete:
            step, arriving = self._complete[0]
            if num_observed < arriving.num_deposited or self._last_look < arriving.looks[1] - 1:
                return
            del self._complete[0]
            if letters := self._letters.complete(step):
                arriving.files.update(self._write(step, letters))
            for _ in self.stages(step, arriving.files, arriving.lengths, arriving.looks):
                pass
            self.on_complete(step)

    def _write(self, step: int, letters: Mapping[LetterName, tuple[Tensor, ...]]) -> FileFacts:
        assert self._folder is not None
        kept = [
            {"box": box, "source": source, "number": number, "tensors": list(tensors)}
            for ((box, source), number), tensors in letters.items()
        ]
        return write_state(self._folder / f".{step_name(step)}", LETTERS, kept)

    def stages(
        self, step: int, files: FileFacts, lengths: Mapping[int, int], looks: tuple[int, int] = (0, 0)
    ) -> Iterator[str]:
        """Complete the checkpoint of `step`, pausing after each stage: whatever ends the process there
        leaves either the previous checkpoint or this one to go on from.

        Args:
            step: whose hidden folder holds every rank's files.
            files: their facts.
            lengths: rank -> how much of its log belongs to the checkpoint.
            looks: rows of looks by the clock that belong to it too, first and end.
        """
        assert self._folder is not None
        assert self._log is not None
        unfinished, finished = self._folder / f".{step_name(step)}", self._folder / step_name(step)
        in_order = [lengths[rank] for rank in range(self._world_size)]
        logs = self._log.link_into(unfinished, in_order, ((0, step), looks))
        yield "log"
        body = {
            "step": step,
            "identity": self._identity,
            "files": dict(sorted(files.items())),
            "logs": [part.to_plain() for part in logs],
        }
        write_new(unfinished / MANIFEST, manifest_text(body).encode())
        _sync_folder(unfinished)
        yield "manifest"
        previous = step_folders(self._folder)
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
