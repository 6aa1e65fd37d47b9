"""The rows of a run, kept by the rendezvous for sites that come later."""

from __future__ import annotations

from collections import Counter
from tempfile import TemporaryFile

__all__ = ["RowLog"]


class RowLog:
    """All rows of all sites, in the order in which they came, in a file of no name."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115
        self._ends = [0]
        self._num_of: Counter[str] = Counter()  # of each session

    def add(self, session: str, first: int, rows: list[str]) -> None:
        """Rows of a session, of which the first has that number; those known already are left out."""
        known = self._num_of[session]
        for row in rows[max(known - first, 0) :]:
            data = row.encode()
            self._file.seek(self._ends[-1])
            self._file.write(data)
            self._ends.append(self._ends[-1] + len(data))
            self._num_of[session] += 1

    def __len__(self) -> int:
        return len(self._ends) - 1

    def rows(self, start: int, number: int) -> list[str]:
        """So many from a number on."""
        stop = min(start + number, len(self))
        self._file.seek(self._ends[start])
        return [
            self._file.read(self._ends[place + 1] - self._ends[place]).decode()
            for place in range(start, stop)
        ]

    def num_of(self, session: str) -> int:
        """How many rows of a session there are."""
        return self._num_of[session]

    def close(self) -> None:
        """Forget everything."""
        self._file.close()
