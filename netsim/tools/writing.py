"""Writing what a command has made to a new file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netsim.files.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_new"]


def write_new(path: Path, text: str) -> None:
    """Write what `--out` asks for, with the folders above it.

    Raises:
        InputError: it is there already, or cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InputError(f"--out {path}: is there already: choose another name") from None
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written: {error.strerror}") from None
