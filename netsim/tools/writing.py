"""Writing what a command has made to a new file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from netsim.files.errors import InputError
from netsim.files.plain_files import is_written_in_place, output_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["check_new", "write_new"]


def check_new(path: Path) -> None:
    """Check that `--out` names something new in a folder that is there, or a pipe or device; raises InputError."""
    if is_written_in_place(path):
        return
    if os.path.lexists(path):
        raise InputError(f"--out {path}: is there already: choose another name")
    if not os.path.isdir(path.parent):
        raise InputError(f"--out {path}: cannot be written: there is no folder {path.parent}")


def write_new(path: Path, text: str) -> None:
    """Write what `--out` asks for, into a folder that is there.

    Raises:
        InputError: it is there already, its folder is not, or it cannot be written.
    """
    check_new(path)
    if is_written_in_place(path):
        with output_file(path) as out:
            out.write(text.encode())
        return
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(f"--out {path}: is there already: choose another name") from None
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written: {error.strerror}") from None
