"""The log of a run on disk: what ranks have requested of the clock, and what was observed, appended as it comes.

It is one file a stretch between restarts, of compressed pieces of lines. Checkpoints of the stretch share it (their
folders hold links to it): each knows how far it goes, and how many of each rank's requests belong to it, since ranks
pass a step one after the other. Nothing is written twice.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import secrets
import shutil
import zlib
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from exogym_core.checkpoints.rank_state import damaged
from exogym_core.names import visible
from exogym_core.ranks.journal import request_from_record, request_to_line
from exogym_core.results.disk import RecordError
from netsim.files.errors import InputError
from netsim.files.plain_files import input_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from netsim.ranks.requests import Request

__all__ = ["LogPart", "LogWriter", "read_logs"]

_PIECE_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 24
_MOST_LINES = 300_000_000
_OBSERVED = -1  # where the rank stands in a request's line


@dataclass(frozen=True)
class LogPart:
    """How much of a log belongs to a checkpoint.

    Attributes:
        name: of the file.
        num_bytes, sha256: of its beginning.
        lengths: how many of each rank's requests in it.
        observed: which of the rows observed, by their steps: ranges, first and end.
    """

    name: str
    num_bytes: int
    sha256: str
    lengths: tuple[int, ...]
    observed: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> LogPart:
        """What `to_plain` told."""
        observed = tuple((first, end) for first, end in plain["observed"])
        return cls(plain["name"], plain["num_bytes"], plain["sha256"], tuple(plain["lengths"]), observed)

    def to_plain(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self) | {"lengths": list(self.lengths), "observed": list(map(list, self.observed))}


class LogWriter:
    """Appends to a hidden file of `folder`, to which checkpoints link.

    Args:
        folder: of the checkpoints.
        earlier: parts of former stretches, and where they lie.
        num_past: how many of each rank's requests are in them: these are not written again when they are served.
    """

    def __init__(
        self, folder: Path, earlier: Sequence[tuple[Path, LogPart]], num_past: Sequence[int]
    ) -> None:
        self._earlier, self._to_skip = list(earlier), list(num_past)
        self._name = f"log-{len(earlier) + 1:04}.jsonl.gz"
        self._path = folder / f".log-{secrets.token_hex(4)}"
        self._lengths = [0] * len(num_past)
        self._lines: list[str] = []
        self._num_characters = self._num_bytes = 0
        self._digest = hashlib.sha256()
        self._descriptor: int | None = None

    def length(self, rank: int) -> int:
        """How many of a rank's requests are in it by now."""
        return self._lengths[rank]

    def add(self, rank: int, request: Request) -> None:
        """Append a request.

        Raises:
            InputError: a marked row holds what cannot be kept.
            RecordError: the file cannot be written.
        """
        if self._to_skip[rank]:
            self._to_skip[rank] -= 1
            return
        self._lengths[rank] += 1
        self._append(request_to_line(rank, request))

    def add_observed(self, row: Mapping[str, Any]) -> None:
        """Append a row that was observed."""
        self._append(json.dumps([_OBSERVED, row], separators=(",", ":")))

    def _append(self, line: str) -> None:
        self._lines.append(line)
        self._num_characters += len(line)
        if self._num_characters >= _PIECE_BYTES:
            self._flush()

    def _flush(self) -> None:
        text = "".join(f"{line}\n" for line in self._lines)
        self._lines, self._num_characters = [], 0
        piece = gzip.compress(text.encode(), compresslevel=4, mtime=0)
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            written = 0
            while written < len(piece):
                written += os.write(self._descriptor, piece[written:])
        except OSError as error:
            raise RecordError(
                f"{visible(self._path)}: cannot be written: {error.strerror or error}"
            ) from error
        self._num_bytes += len(piece)
        self._digest.update(piece)

    def link_into(
        self, folder: Path, lengths: Sequence[int], observed: tuple[tuple[int, int], ...]
    ) -> list[LogPart]:
        """Have all parts in the folder of a checkpoint, down to the disk; returns them.

        Args:
            folder: the checkpoint's.
            lengths: how many of each rank's requests belong to it.
            observed: which rows, as `LogPart` has them.

        Raises:
            RecordError: a file cannot be written.
        """
        self._flush()
        assert self._descriptor is not None
        parts = []
        try:
            os.fsync(self._descriptor)
            for home, part in self._earlier:
                _link(home / part.name, folder / part.name)
                parts.append(part)
            _link(self._path, folder / self._name)
        except OSError as error:
            raise RecordError(f"{visible(folder)}: cannot be written: {error.strerror or error}") from error
        digest = self._digest.hexdigest()
        own = LogPart(self._name, self._num_bytes, digest, tuple(lengths), observed)
        return [*parts, own]

    def moved(self, old: Path, new: Path) -> None:
        """The folder with earlier parts is another now."""
        self._earlier = [(new if home == old else home, part) for home, part in self._earlier]

    def close(self) -> None:
        """Let go of the file; what checkpoints link to stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        with contextlib.suppress(OSError):
            self._path.unlink()


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # not on this file system, or to another one
        shutil.copyfile(source, target)


def read_logs(
    folder: Path, parts: Sequence[LogPart], num_ranks: int
) -> tuple[list[list[Request]], list[dict[str, Any]]]:
    """What each rank had requested, and what had been observed.

    Raises:
        RecordError: a file is missing or damaged.
    """
    streams: list[list[Request]] = [[] for _ in range(num_ranks)]
    observed: list[dict[str, Any]] = []
    # Rows that say the same are one object, and so are calls: a log repeats itself all the time.
    seen: dict[str, Request] = {}
    for part in parts:
        packed = _read(folder / part.name, part)
        try:
            left = list(part.lengths)
            if sum(left) > _MOST_LINES:
                raise ValueError(f"it says to have more than {_MOST_LINES:,} lines")
            for line in _lines(packed):
                rank_text, _, rest = line[1:].partition(",")
                rank = int(rank_text)
                if rank == _OBSERVED:
                    row = json.loads(f"[{rest}")[0]
                    if any(first <= row["step"] < end for first, end in part.observed):
                        observed.append(row)
                elif left[rank]:
                    left[rank] -= 1
                    request = seen.get(rest)
                    if request is None:
                        request = seen[rest] = request_from_record(json.loads(f"[{rest}"))
                    streams[rank].append(request)
            if any(left):
                raise ValueError("requests are missing")
        except (
            OSError,
            EOFError,
            ValueError,
            IndexError,
            KeyError,
            TypeError,
            RecursionError,
            zlib.error,
        ) as error:
            raise damaged(folder / part.name, error) from error
    return streams, observed


def _lines(packed: bytes) -> Iterator[str]:
    """One after the other, so that a few bytes cannot fill the memory."""
    with gzip.open(BytesIO(packed)) as file:
        while line := file.readline(_MOST_LINE_BYTES):
            if len(line) == _MOST_LINE_BYTES:
                raise ValueError(f"it has a line of {_MOST_LINE_BYTES:,} bytes")
            yield line.decode().rstrip("\n")


def _read(path: Path, part: LogPart) -> bytes:
    try:
        with input_file(path) as file:
            content = file.read(part.num_bytes)
    except InputError as error:
        raise damaged(path, error) from error
    except OSError as error:
        raise RecordError(f"{visible(path)}: cannot be read: {error.strerror or error}") from error
    if len(content) < part.num_bytes:
        raise damaged(path, f"{len(content)} bytes, {part.num_bytes} were written")
    if hashlib.sha256(content).hexdigest() != part.sha256:
        raise damaged(path, "its SHA-256 is another")
    return content
