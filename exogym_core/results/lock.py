"""One owner a folder: a lock that ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING

from exogym_core.names import visible
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK_NAME", "FolderLock", "owner_of"]

LOCK_NAME = ".lock"
"""The file in a folder that says who works in it; gone when nobody does."""

# How long the children of an owner that was killed are given to end with it.
_GRACE_SECONDS = 5.0
_UNSUPPORTED = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}


class FolderLock:
    """Holds a folder for this process and its children until `release`, or until the last of them has ended.

    Args:
        folder: exists.

    Raises:
        InputError: another process works in the folder, or this one does already; the line tells its pid.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK_NAME
        self._descriptor: int | None = None
        if fcntl is None:
            return
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
        """Lock the open file; who has the folder is told."""
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
    """The process that works in a folder; None where nobody does, or nobody can know."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if fcntl is not None:
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
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        found = path.stat(follow_symlinks=False)
    except OSError:
        return False
    mine = os.fstat(descriptor)
    return (found.st_ino, found.st_dev) == (mine.st_ino, mine.st_dev)
