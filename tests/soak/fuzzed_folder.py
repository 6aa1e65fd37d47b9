"""Where damaged files are written, and what it is to be refused as one should be."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exogym_core.results.disk import RecordError
from netsim.errors import InputError

__all__ = ["FOLDER", "accepted"]

_LONGEST_LINE = 3000


class Folder:
    """A private folder in memory, made when it is first needed and emptied at the end of the process."""

    def __init__(self) -> None:
        self._made: tempfile.TemporaryDirectory[str] | None = None

    @property
    def path(self) -> Path:
        if self._made is None:
            shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
            self._made = tempfile.TemporaryDirectory(prefix="netgym-fuzz-", dir=shared)
        return Path(self._made.name)

    def write(self, name: str, content: bytes) -> Path:
        path = self.path / name
        path.write_bytes(content)
        return path

    def remove(self) -> None:
        if self._made is not None:
            self._made.cleanup()


FOLDER = Folder()


def accepted(path: Path | None, read: Callable[[], Any]) -> Any:
    """What `read` returns, or None where it refuses as it should, in a line that names `path`."""
    try:
        return read()
    except (InputError, RecordError) as error:
        line, *more = str(error).splitlines()
        assert all(map(str.isprintable, (line, *more))), f"a line that is not printable: {(line, *more)!r}"
        assert len(line) <= _LONGEST_LINE, f"a first line of {len(line)} characters"
        assert path is None or path.name in line, f"the file is not named: {line!r}"
        return None
