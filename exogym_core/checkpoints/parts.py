"""A rank's parts of checkpoints, on a disk of its own that rank 0 does not see.

    DIR/part-00000040/rank-0003.json, rank-0003.safetensors

Rank 0 completes a checkpoint when every rank has told sizes and digests of what lies on its disk, down to the disk;
until it has said so a rank keeps its part of the one before. Whoever goes on from a checkpoint looks first that its
part is there, and whole. DIR is that of rank 0, on the rank's own disk, or lies in the folder that NETGYM_CHECKPOINTS
names.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.checkpoints.checkpoint import StoredCheckpoint, rank_name, step_name
from exogym_core.checkpoints.rank_state import FileFacts, write_state
from exogym_core.names import visible
from exogym_core.results.disk import RecordError
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["VARIABLE", "OwnParts", "mark_of"]

VARIABLE = "NETGYM_CHECKPOINTS"
_PART_FILE = re.compile(r"rank-(\d{4,})\.(?:json|safetensors)")
_PART_FOLDER = re.compile(r"part-(\d{8,})")


def mark_of(folder: Path | None) -> str:
    """Make a file by which other processes see whether they see this folder; returns its name.

    "" without a folder, and where nothing can be written, such as on a disk of old runs: then that there is one of its
    name must do.
    """
    name = f".seen-{secrets.token_hex(8)}"
    try:
        if folder is not None:
            (folder / name).touch()
            return name
    except OSError:
        pass
    return ""


def _none() -> int:
    return -1


@dataclass(frozen=True)
class OwnParts:
    """Where a rank keeps its parts.

    Attributes:
        folder: on its disk.
        place: this process's among so many that torchrun has started: all ranks of the run, or those of a site.
        newest_complete: tells the step of the newest checkpoint that rank 0 has completed; -1 before.
    """

    folder: Path
    place: tuple[int, int]
    newest_complete: Callable[[], int] = _none

    @classmethod
    def where_needed(
        cls, home: Path, mark: str, place: tuple[int, int], newest_complete: Callable[[], int]
    ) -> OwnParts | None:
        """That of a rank that does not see rank 0's folder `home`, in which `mark` is; None where it does.

        Raises:
            RecordError: no folder can be made.
        """
        elsewhere = os.environ.get(VARIABLE, "")
        if not elsewhere and (home / mark).exists():
            return None
        folder = Path(elsewhere).absolute() / home.relative_to(home.anchor) if elsewhere else home
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"{visible(folder)}: cannot be made: {error.strerror or error}") from error
        return cls(folder, place, newest_complete)

    def _part(self, step: int) -> Path:
        return self.folder / step_name(step).replace("step", "part")

    def save(self, step: int, rank: int, state: Any) -> FileFacts:
        """Write the rank's part of the checkpoint of `step`; returns its facts, which tell on which machine it lies.

        Raises:
            InputError: the state holds what cannot be kept.
            RecordError: a file cannot be written.
        """
        self._forget(lambda other: other < self.newest_complete())
        part = self._part(step)
        try:
            part.mkdir(exist_ok=True)
        except OSError as error:
            raise RecordError(f"{visible(part)}: cannot be made: {error.strerror or error}") from error
        facts = write_state(part, rank_name(rank), state)
        return {name: {**about, "host": socket.gethostname()} for name, about in facts.items()}

    def opened(self, checkpoint: StoredCheckpoint) -> StoredCheckpoint:
        """The checkpoint as this rank sees it.

        Raises:
            InputError: its part is not here, or not whole.
        """
        found = replace(checkpoint, path=self._part(checkpoint.step))
        ranks = [int(told[1]) for name in checkpoint.files if (told := _PART_FILE.fullmatch(name))]
        rank = sorted(set(ranks))[self.place[0]]
        try:
            found.rank_state(rank)
        except RecordError as error:
            about = checkpoint.files.get(f"{rank_name(rank)}.json", {})
            raise InputError(
                f"{visible(checkpoint.path)}: rank {rank} on {visible(socket.gethostname())} has not its part: "
                f"{visible(error, 300)}; it was written on {visible(about.get('host', 'a disk that all saw'))}: start "
                "each rank where it was (torchrun --node-rank), or start anew"
            ) from None
        return found

    def keep_only(self, step: int | None) -> None:
        """Remove what belongs to no checkpoint, when all have agreed which one they go on from."""
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
