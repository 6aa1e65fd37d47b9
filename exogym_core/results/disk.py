"""Files and folders of runs, each written whole or not at all, with the rights that the user's umask leaves."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from exogym_core.names import file_name, visible
from netsim.files.errors import NetsimError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RecordError", "make_folder", "write_whole"]


class RecordError(NetsimError, RuntimeError):
    """A file of a run cannot be written or read: the disk is full, rights are missing, or it is damaged."""


def write_whole(path: Path, content: bytes | str) -> None:
    """Write a file so that `path` holds the old content or the new one, never a part; a link is replaced.

    Raises:
        RecordError: it cannot be written; nothing is left behind.
    """
    data = content.encode() if isinstance(content, str) else content
    # In the same folder, since only within one file system is a rename atomic.
    temporary = path.with_name(f".writing-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise RecordError(f"{visible(path)}: cannot be written: {error.strerror or error}") from error
        raise


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
