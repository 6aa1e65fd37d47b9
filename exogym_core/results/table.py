"""A CSV file that grows with its run: rows are appended, and nothing of it is kept in memory."""

from __future__ import annotations

import csv
import io
import os
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from exogym_core.results.disk import RecordError, write_whole
from exogym_core.results.record import csv_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Table"]

_MOST_WAITING = 1000


class Table:
    """A CSV file, begun with its header alone.

    It holds what `csv_text` makes of the same rows; only where a row brings a column that the header does not have is
    it written anew.

    Args:
        path: of the file.
        first_columns: see `csv_text`.

    Raises:
        RecordError: the file cannot be written; so do the methods.
    """

    def __init__(self, path: Path, first_columns: Sequence[str]) -> None:
        self._path, self._first = path, first_columns
        self._columns: list[str] = []
        self._waiting: list[Mapping[str, Any]] = []
        self._write([])

    @property
    def num_waiting(self) -> int:
        """Rows that are not in the file yet; never more than a thousand."""
        return len(self._waiting)

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row; it is in the file after the next `flush`."""
        self._waiting.append(row)
        if len(self._waiting) >= _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        """Have all rows in the file."""
        rows, self._waiting = self._waiting, []
        if not rows:
            return
        if not all(row.keys() <= set(self._columns) for row in rows):
            with self._path.open(encoding="utf-8", newline="") as file:
                self._write([*csv.DictReader(file), *rows])
            return
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([row.get(column) for column in self._columns] for row in rows)
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "a", encoding="utf-8") as file:
                file.write(text.getvalue())
        except OSError as error:
            raise RecordError(
                f"{visible(self._path)}: cannot be written: {error.strerror or error}"
            ) from error

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        text = csv_text(rows, self._first)
        self._columns = next(csv.reader(io.StringIO(text)))
        write_whole(self._path, text)
