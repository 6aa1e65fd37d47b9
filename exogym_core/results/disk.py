"""Files and folders of runs: written whole or not at all, owned by one process at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.names import file_name, visible
from netsim.errors import InputError, NetsimError
from netsim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "LOCK_NAME",
    "DamagedError",
    "FolderLock",
    "Forgiving",
    "RecordError",
    "RefusedError",
    "append_text",
    "cache_folder",
    "make_folder",
    "owner_of",
    "record_errors",
    "refuse_full_disk",
    "warned",
    "write_whole",
]


class Forgiving:
    """A text stream whose failed writes (a full disk, a closed terminal) are ignored."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write as far as the stream takes it: a closed terminal ends no command."""
        try:
            return int(self._stream.write(text))
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Flush as far as the stream takes it: a closed terminal ends no command."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def cache_folder() -> Path:
    """Folder of files that can be made again: NETGYM_CACHE, or `netgym` in the user's cache folder."""
    if named := os.environ.get("NETGYM_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "netgym"


class RecordError(NetsimError, RuntimeError):
    """A file of a run cannot be written or read: the disk is full, rights are missing, or it is damaged."""


class DamagedError(RecordError):
    """A file of a checkpoint is damaged; the message says how the run continues without it."""


class RefusedError(InputError):
    """A run is refused as it is, here or by its rendezvous; the message says how it continues, if it can."""


@contextmanager
def record_errors(path: Path | str, action: str, num_bytes: int | None = None) -> Iterator[None]:
    """Turn an OSError of the block into "PATH: cannot be `action`: reason".

    Args:
        path: named in the error; a text names an option too.
        action: "written", "made" or "read".
        num_bytes: bytes to write, which a full disk's error names besides those that are free.

    Raises:
        RecordError: as described.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.ENOSPC and num_bytes is not None:
            reason += f": {format_bytes(num_bytes)} needed, {_free(Path(path))} free"
        raise RecordError(f"{visible(path)}: cannot be {action}: {reason}") from error


@contextmanager
def warned(what: str) -> Iterator[None]:
    """Turn an exception of the block into a warning that begins with `what`: nothing that a run has is lost by it."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, NetsimError) else f"{type(error).__name__}: "
        line = " ".join(f"{what}: {kind}{error}".split())
        warnings.warn(visible(line, 500), UserWarning, stacklevel=3)


def _free(path: Path) -> str:
    try:
        return format_bytes(shutil.disk_usage(path.parent).free)
    except OSError:
        return "unknown"


def refuse_full_disk(folder: Path, num_bytes: int, content: str, remedy: str) -> None:
    """Raise RecordError where the disk of `folder`, which need not exist yet, has less than `num_bytes` free."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        needed = f"{content} needs at least {format_bytes(num_bytes)}, and {format_bytes(free)} are free"
        raise RecordError(f"{visible(folder)}: {needed}: {remedy}")


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file so that `path` holds the old content or the new one, never a part; a link is replaced.

    Raises:
        RecordError: it cannot be written; nothing is left behind.
    """
    data = content.encode() if isinstance(content, str) else content
    # In the same folder, since only within one file system is a rename atomic.
    temporary = path.with_name(f".writing-{os.urandom(4).hex()}")
    with record_errors(path, "written"):
        try:
            # A number, since a Ctrl-C between opening and `with` would leave a file object open.
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def append_text(path: Path, text: str, flags: int = 0) -> None:
    """Append to a file that is no link; `flags` of `os.open`, such as O_CREAT, besides those for appending.

    Raises:
        RecordError: it cannot be written.
    """
    with record_errors(path, "written"):
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o666)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(text)


def make_folder(parent: Path, name: str, *, numbered: bool) -> Path:
    """A new folder in `parent`, called `name`, with `-1`, `-2`, ... behind it if `numbered`.

    Without `numbered` the number is added only where the name is taken. Existing files, folders and links
    are never reused. `name` is made safe first.

    Raises:
        RecordError: no folder can be made there.
    """
    name = file_name(name)
    number = 1
    try:
        parent.mkdir(parents=True, exist_ok=True)
        while True:
            path = parent / (f"{name}-{number}" if numbered or number > 1 else name)
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
            else:
                return path
    except OSError as error:
        raise RecordError(
            f"{visible(parent)}: no folder can be made there: {error.strerror or error}"
        ) from error


LOCK_NAME = ".lock"
"""Lock file of a folder with the pid of its owner; removed on release."""

_GRACE_SECONDS = 5.0  # for children of a killed owner to end with it
_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


class FolderLock:
    """Holds a folder for this process and its children until `release`, or until the last of them has ended.

    Args:
        folder: exists.

    Raises:
        InputError: another process works in the folder, or this one does already; the message names its pid.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._descriptor: int | None = None
        while self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                self._take(descriptor, folder)
                if _is_at(descriptor, self._path):  # else its last owner has removed it meanwhile
                    self._descriptor = descriptor
            finally:
                if self._descriptor is None:
                    os.close(descriptor)
        content = f"{os.getpid()}\n".encode()
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))

    def _take(self, descriptor: int, folder: Path) -> None:
        """Lock the open file, or raise InputError with the owner."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while True:
            try:
                # Of the open file, not of the process: ranks that outlive a killed parent for a moment hold it too.
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = _read(descriptor)
                is_ending = owner is not None and not _is_alive(owner)
                if is_ending and time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
                holder = "another process" if owner is None else f"process {owner}"
                raise InputError(
                    f"{visible(folder)}: {holder} works in this folder: let it end, or choose another one"
                ) from None
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                return None  # a file system without locks: as good as it gets

    def release(self) -> None:
        """Let go of the folder; may be called again."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = None


def owner_of(folder: Path) -> int | None:
    """Pid of the process that works in a folder; None where none does, or files cannot be locked."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return None


def _read(descriptor: int) -> int | None:
    """The owner's pid; None where it has not written it yet."""
    content = os.pread(descriptor, 500, 0).decode(errors="replace").strip()
    return int(content) if content.isdecimal() else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return False
    mine = os.fstat(descriptor)
    return (found.st_ino, found.st_dev) == (mine.st_ino, mine.st_dev)
