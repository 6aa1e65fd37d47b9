"""Files that users name: input is read from regular files alone; output is written whole, or in place where it must be.

with input_file("flows.csv") as file:     # a pipe or a device is refused at once, and never waited for
    content = file.read()
with output_file("results.csv") as file:  # there as a whole or not at all; a link stays a link
    file.write(content)                   # what is no regular file, /dev/stdout or a pipe, is written to as it is
"""

from __future__ import annotations

import os
import re
import stat
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from netsim.errors import InputError, printable
from netsim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_output", "input_file", "is_written_in_place", "output_file", "read_bytes", "read_text"]

_DESCRIPTOR = re.compile(r"(?:/dev/fd|/proc/(?:self|\d+)/fd)/(\d+)")
_MOST_LINKS = 40
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def input_file(path: str | Path) -> BinaryIO:
    """Open the regular file `path` to be read in binary.

    Raises:
        InputError: it is a pipe, a device or a socket.
        OSError: it cannot be opened, or is a folder.
    """
    _refuse_others(path, os.stat(path).st_mode)  # before it is opened: to open a device may do something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = os.fdopen(descriptor, "rb")  # refuses a folder
    try:
        _refuse_others(path, os.fstat(descriptor).st_mode)
    except InputError:
        file.close()
        raise
    return file


def read_bytes(path: str | Path, most_bytes: int = 1_000_000_000) -> bytes:
    """Read all of the regular file `path`; raises as `input_file` does, and InputError where it is larger.

    Args:
        path: the file.
        most_bytes: a larger one is refused.
    """
    with input_file(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise InputError(f"{printable(str(path))}: larger than {format_bytes(most_bytes)}")
    return content


def read_text(path: str | Path, most_bytes: int, advice: str, where: str = "") -> str:
    """Read all of the regular file `path`, which is text in UTF-8.

    Args:
        path: the file.
        most_bytes: a larger one is refused.
        advice: on a larger one.
        where: name of the file in errors; "": its path.

    Raises:
        InputError: it cannot be read, is larger, or no such text.
    """
    where = where or printable(str(path))
    try:
        with input_file(path) as file:
            content = file.read(most_bytes + 1)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{where}: cannot be read: {reason}") from None
    if len(content) > most_bytes:
        raise InputError(f"{where}: larger than {format_bytes(most_bytes)}: {advice}")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{where}:{line}: not UTF-8 text: save the file as UTF-8") from None


def _refuse_others(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise InputError(
            f"{printable(str(path))}: is not a regular file but {kind}: write it to a file first"
        )


@contextmanager
def output_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open `path` to be written in binary: there as a whole or not at all, with the rights the umask leaves.

    A link is followed and stays. Pipes, devices and standard output are written to and never replaced; what they have
    been given when an exception comes they keep.

    Raises:
        InputError: it cannot be written.
    """
    try:
        in_place = _opened_in_place(Path(path))
        if in_place is not None:
            with in_place as file:
                yield file
            return
        with _replaced(Path(os.path.realpath(path))) as file:
            yield file
    except OSError as error:
        raise InputError(f"{printable(str(path))}: cannot be written: {error.strerror or error}") from None


def check_output(path: str | Path, *endings: str) -> None:
    """Raise InputError where writing `path` would replace a file of another kind, whose name has none of `endings`."""
    is_other = os.path.isfile(path) and not str(path).lower().endswith(endings)
    if is_other and os.path.getsize(path) and not is_written_in_place(path):
        kind = " or ".join(endings)
        raise InputError(f"{printable(str(path))}: is there and is no {kind} file: choose another name")


def is_written_in_place(path: str | Path) -> bool:
    """Return whether output to `path` goes to something that is there and is no regular file, such as /dev/stdout."""
    if _descriptor(Path(path)) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _opened_in_place(path: Path) -> BinaryIO | None:
    """Open what is there if it is no regular file; None if it is one, or nothing is there."""
    descriptor = _descriptor(path)
    if descriptor is not None:
        sys.stdout.flush()
        return os.fdopen(os.dup(descriptor), "wb")
    if not is_written_in_place(path):
        return None
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CLOEXEC), "wb")


def _descriptor(path: Path) -> int | None:
    """The number N of a path that means /dev/fd/N of this process, such as /dev/stdout does."""
    for _ in range(_MOST_LINKS):
        named = _DESCRIPTOR.fullmatch(os.path.abspath(path))
        if named is not None:
            return int(named[1])
        if not path.is_symlink():
            return None
        path = path.parent / os.readlink(path)
    return None


@contextmanager
def _replaced(path: Path) -> Iterator[BinaryIO]:
    partial = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    try:
        with open(partial, "xb") as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            yield file
        if path.is_dir():
            raise IsADirectoryError(None, "Is a directory")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
