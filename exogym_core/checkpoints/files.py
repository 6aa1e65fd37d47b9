"""Files of a checkpoint: states of ranks, and the log of their requests to the clock.

    facts = write_state(folder, "rank-0000", state)    # size and digest of the two files it makes
    state = read_state(folder, "rank-0000", facts)     # refuses files that are not those

Tensors are safetensors, everything else is JSON, with what JSON cannot say written as `exogym_core.plain` does; nothing
is pickled. A log is one file between two restarts, of compressed pieces of lines. Checkpoints of that stretch share it
(their folders hold links to it): each records its own length of the log, and how many of each rank's requests belong to
it, since ranks pass a step one after the other. Nothing is written twice.
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
from io import BytesIO
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
from safetensors.torch import load, save

from exogym_core.events import Finding, from_record, to_record
from exogym_core.names import visible
from exogym_core.plain import decode, encode
from exogym_core.results.disk import DamagedError, record_errors
from exogym_core.workers.journal import request_from_record, request_to_line
from netsim.errors import InputError
from netsim.files.plain_files import input_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    import torch
    from torch import Tensor

    from netsim.ranks import Request

__all__ = [
    "Count",
    "FileFacts",
    "FileName",
    "LogPart",
    "LogWriter",
    "damaged",
    "decode",
    "encode",
    "read_checked",
    "read_logs",
    "read_state",
    "write_new",
    "write_state",
]


FileFacts = dict[str, dict[str, Any]]
"""Name of a file -> its `num_bytes` and `sha256`."""


# --- files -------------------------------------------------------------------------------------------------


def write_new(path: Path, content: bytes) -> FileFacts:
    """Write a file that is not there yet, down to the disk, and return its facts.

    Raises:
        RecordError: it cannot be written.
    """
    with record_errors(path, "written", len(content)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    return {path.name: {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}


def read_checked(path: Path, facts: FileFacts, most_bytes: int = -1) -> bytes:
    """Content of the file, of a growing one the first bytes, checked against its facts.

    Raises:
        RecordError: it is missing or damaged.
    """
    with record_errors(path, "read"):
        try:
            with input_file(path) as file:
                content = file.read(most_bytes)
        except InputError as error:
            raise damaged(path, error) from error
    expected = facts.get(path.name)
    if expected is None or hashlib.sha256(content).hexdigest() != expected["sha256"]:
        size = f"{len(content)} bytes" if expected is None or len(content) != expected["num_bytes"] else ""
        written = f", {expected['num_bytes']} were written" if expected is not None and size else ""
        raise damaged(path, f"{size}{written}" or "its SHA-256 differs")
    return content


def damaged(path: Path, reason: object) -> DamagedError:
    """Error for a file whose content is not the one written."""
    return DamagedError(
        f"{visible(path)}: is damaged ({visible(reason, 200)}): delete {visible(path.parent)} to continue from "
        "an older checkpoint or, where there is none, from the start"
    )


def write_state(folder: Path, name: str, state: Any) -> FileFacts:
    """Write `state` as two new files of that name.

    Raises:
        InputError: it holds a value that cannot be stored.
        RecordError: a file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(encode(state, tensors, f"checkpoint: {name}"), separators=(",", ":"))
    facts = write_new(folder / f"{name}.json", plain.encode())
    return {**facts, **write_new(folder / f"{name}.safetensors", save(tensors))}


def read_state(folder: Path, name: str, facts: FileFacts, device: torch.device | None = None) -> Any:
    """The state that `write_state` wrote under that name; tensors from an accelerator come on `device`, if given.

    Raises:
        RecordError: a file is missing or damaged.
    """
    path = folder / f"{name}.json"
    plain, stored = read_checked(path, facts), read_checked(folder / f"{name}.safetensors", facts)
    try:
        return decode(json.loads(plain), load(stored), device)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise damaged(path, error) from error


_PIECE_BYTES = 1 << 20
_MOST_LINE_BYTES = 1 << 24
_MOST_LINES = 300_000_000
_FOUND = -1  # where the rank stands in a request's line


Count = Annotated[int, Field(ge=0, strict=True)]
# In the same folder, and nowhere else.
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=200)]


class LogPart(BaseModel):
    """Part of a log that belongs to a checkpoint.

    Attributes:
        model_config: pydantic's settings.
        name: of the file.
        num_bytes, sha256: of its beginning.
        lengths: number of each rank's requests in it.
        observed: number of steps whose findings belong to it, and of evaluations by the clock.
    """

    model_config = ConfigDict(frozen=True)

    name: FileName
    num_bytes: Count
    sha256: str
    lengths: tuple[Count, ...]
    observed: tuple[Count, Count]


class LogWriter:
    """Appends to a hidden file of `folder`, to which checkpoints link.

    Args:
        folder: of the checkpoints.
        num_ranks: number of ranks.
        earlier: parts of former stretches, and their folders; their requests are not written again as they are served.
    """

    def __init__(self, folder: Path, num_ranks: int, earlier: Sequence[tuple[Path, LogPart]]) -> None:
        self._earlier = list(earlier)
        self._to_skip = [sum(part.lengths[rank] for _, part in earlier) for rank in range(num_ranks)]
        self._name = f"log-{len(earlier) + 1:04}.jsonl.gz"
        self._path = folder / f".log-{secrets.token_hex(4)}"
        self._lengths = [0] * num_ranks
        self._lines: list[str] = []
        self._num_characters = self._num_bytes = 0
        self._digest = hashlib.sha256()
        self._descriptor: int | None = None

    def length(self, rank: int) -> int:
        """Number of a rank's requests in it so far."""
        return self._lengths[rank]

    def add(self, rank: int, request: Request) -> None:
        """Append a request of a rank to its log.

        Raises:
            InputError: a marked row holds a value that cannot be stored.
            RecordError: the file cannot be written.
        """
        if self._to_skip[rank]:
            self._to_skip[rank] -= 1
            return
        self._lengths[rank] += 1
        self._append(request_to_line(rank, request))

    def add_found(self, found: Finding) -> None:
        """Append a finding of the evaluator."""
        self._append(json.dumps([_FOUND, to_record(found)], separators=(",", ":")))

    def _append(self, line: str) -> None:
        self._lines.append(line)
        self._num_characters += len(line)
        if self._num_characters >= _PIECE_BYTES:
            self._flush()

    def _flush(self) -> None:
        text = "".join(f"{line}\n" for line in self._lines)
        self._lines, self._num_characters = [], 0
        piece = gzip.compress(text.encode(), compresslevel=4, mtime=0)
        with record_errors(self._path, "written", len(piece)):
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            written = 0
            while written < len(piece):
                written += os.write(self._descriptor, piece[written:])
        self._num_bytes += len(piece)
        self._digest.update(piece)

    def link_into(self, folder: Path, lengths: Sequence[int], observed: tuple[int, int]) -> list[LogPart]:
        """Link all parts into the folder of a checkpoint, down to the disk; returns them.

        Args:
            folder: the checkpoint's.
            lengths: number of each rank's requests that belong to it.
            observed: as `LogPart` has it.

        Raises:
            RecordError: a file cannot be written.
        """
        self._flush()
        assert self._descriptor is not None
        parts = []
        with record_errors(folder, "written"):
            os.fsync(self._descriptor)
            for home, part in self._earlier:
                _link(home / part.name, folder / part.name)
                parts.append(part)
            _link(self._path, folder / self._name)
        own = LogPart(
            name=self._name,
            num_bytes=self._num_bytes,
            sha256=self._digest.hexdigest(),
            lengths=tuple(lengths),
            observed=observed,
        )
        return [*parts, own]

    def moved(self, old: Path, new: Path) -> None:
        """Note that the folder with earlier parts was renamed."""
        self._earlier = [(new if home == old else home, part) for home, part in self._earlier]

    def close(self) -> None:
        """Close the file; checkpoints keep their links to it."""
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


_MALFORMED = (OSError, EOFError, ValueError, LookupError, TypeError, RecursionError, zlib.error)


def read_logs(
    folder: Path, parts: Sequence[LogPart], num_ranks: int
) -> tuple[list[list[Request]], list[Finding]]:
    """Requests of each rank, and findings of the evaluator.

    Raises:
        RecordError: a file is missing or damaged.
    """
    streams: list[list[Request]] = [[] for _ in range(num_ranks)]
    found: list[Finding] = []
    # Rows that say the same are one object, and so are calls: a log repeats itself all the time.
    seen: dict[str, Request] = {}
    for part in parts:
        facts = {part.name: part.model_dump(include={"num_bytes", "sha256"})}
        packed = read_checked(folder / part.name, facts, part.num_bytes)
        try:
            left = list(part.lengths)
            if sum(left) > _MOST_LINES:
                raise ValueError(f"it claims more than {_MOST_LINES:,} lines")
            for line in _lines(packed):
                rank_text, _, rest = line[1:].partition(",")
                rank = int(rank_text)
                if rank == _FOUND:
                    finding: Finding = from_record(json.loads(f"[{rest}")[0])
                    if finding.point.number < (*part.observed, 0)[finding.point.grid]:
                        found.append(finding)
                elif left[rank]:
                    left[rank] -= 1
                    request = seen.get(rest)
                    if request is None:
                        request = seen[rest] = request_from_record(json.loads(f"[{rest}"))
                    streams[rank].append(request)
            if any(left):
                raise ValueError("requests are missing")
        except _MALFORMED as error:
            raise damaged(folder / part.name, error) from error
    return streams, found


def _lines(packed: bytes) -> Iterator[str]:
    """Lines one after the other, so that a few bytes cannot fill the memory."""
    with gzip.open(BytesIO(packed)) as file:
        while line := file.readline(_MOST_LINE_BYTES):
            if len(line) == _MOST_LINE_BYTES:
                raise ValueError(f"it has a line of {_MOST_LINE_BYTES:,} bytes")
            yield line.decode().rstrip("\n")
