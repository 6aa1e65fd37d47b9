"""Files that users name: input is read from regular files only; output is written whole, or in place to devices.

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

from netsim.errors import InputError
from netsim.units import format_bytes, printable

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


def read_bytes(path: str | Path, most_bytes: int = 1_000_000_000, advice: str = "", where: str = "") -> bytes:
    """Read all of the regular file `path`; raises as `input_file` does, and InputError where it is larger.

    Args:
        path: the file.
        most_bytes: largest size accepted.
        advice: remedy for a larger one.
        where: name of the file in errors; "": its path.
    """
    with input_file(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        remedy = f": {advice}" if advice else ""
        raise InputError(f"{where or printable(str(path))}: larger than {format_bytes(most_bytes)}{remedy}")
    return content


def read_text(path: str | Path, most_bytes: int, advice: str, where: str = "") -> str:
    """Read all of the regular file `path`, which is text in UTF-8.

    Args:
        path: the file.
        most_bytes: largest size accepted.
        advice: remedy for a larger one.
        where: name of the file in errors; "": its path.

    Raises:
        InputError: it cannot be read, is larger, or is not UTF-8.
    """
    where = where or printable(str(path))
    try:
        content = read_bytes(path, most_bytes, advice, where)
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{where}: cannot be read: {reason}") from None
    try:
        return content.decode().removeprefix("\ufeff")
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
    """Open `path` for writing in binary; the file appears whole at the end of the block, or not at all.

    A link is followed and stays. Pipes, devices and standard output are written in place.

    Raises:
        InputError: it cannot be written.
    """
    try:
        descriptor = _descriptor(Path(path))
        if descriptor is not None:
            sys.stdout.flush()
            descriptor = os.dup(descriptor)
        elif is_written_in_place(path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        with (
            _replace_file(Path(os.path.realpath(path)))
            if descriptor is None
            else os.fdopen(descriptor, "wb") as file
        ):
            yield file
    except OSError as error:
        raise InputError(f"{printable(str(path))}: cannot be written: {error.strerror or error}") from None


def check_output(path: str | Path, *endings: str) -> None:
    """Raise InputError if writing `path` would replace a file whose name has none of `endings`."""
    is_other = os.path.isfile(path) and not str(path).lower().endswith(endings)
    if is_other and os.path.getsize(path) and not is_written_in_place(path):
        kind = " or ".join(endings)
        raise InputError(f"{printable(str(path))}: is there and is no {kind} file: choose another name")


def is_written_in_place(path: str | Path) -> bool:
    """Return whether `path` is an existing device, pipe or descriptor, such as /dev/stdout."""
    if _descriptor(Path(path)) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _descriptor(path: Path) -> int | None:
    """Descriptor that a path such as /dev/stdout stands for; None for other paths."""
    for _ in range(_MOST_LINKS):
        named = _DESCRIPTOR.fullmatch(os.path.abspath(path))
        if named is not None:
            return int(named[1])
        if not path.is_symlink():
            return None
        path = path.parent / os.readlink(path)
    return None


@contextmanager
def _replace_file(path: Path) -> Iterator[BinaryIO]:
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
