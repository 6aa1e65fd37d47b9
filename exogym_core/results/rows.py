"""Rows of numbers kept as columns: they read like a list of dicts, and a row costs eight bytes a column."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, MutableSequence

__all__ = ["Rows"]

_ABSENT = object()  # in the place of a value that a row does not have
_CODES = {int: "q", float: "d"}  # types that fit an array, exactly


class Rows(Sequence[dict[str, Any]]):
    """A sequence of rows, of which only the end grows.

    A row that is read is a dict made anew: changing it changes nothing here. Values come back as they were given, type
    included; a column of whole numbers or of floats alone is packed.

    >>> rows = Rows([{"step": 1, "loss": 0.5}])
    >>> rows.append({"step": 2, "loss": None})
    >>> rows[-1], len(rows), rows.column("step")
    ({'step': 2, 'loss': None}, 2, [1, 2])
    >>> rows == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None}]
    True
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._columns: dict[str, MutableSequence[Any]] = {}
        self._num_rows = 0
        self.extend(rows)

    def append(self, row: Mapping[str, Any]) -> None:
        """Add a row behind the others."""
        for name, value in row.items():
            if name not in self._columns:
                self._columns[name] = [_ABSENT] * self._num_rows if self._num_rows else _column_for(value)
            column = self._columns[name]
            if isinstance(column, array) and not _fits(column, value):
                column = self._columns[name] = list(column)
            column.append(value)
        self._num_rows += 1
        if len(row) < len(self._columns):
            for name in self._columns.keys() - row.keys():
                column = self._columns[name] = list(self._columns[name])
                column.append(_ABSENT)

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Add rows behind the others."""
        for row in rows:
            self.append(row)

    def column(self, name: str) -> list[Any]:
        """One value of every row that has it.

        Raises:
            KeyError: no row has it.
        """
        return [value for value in self._columns[name] if value is not _ABSENT]

    @overload
    def __getitem__(self, place: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, place: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, place: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(self._num_rows))]
        if not -self._num_rows <= place < self._num_rows:
            raise IndexError(f"there are {self._num_rows} rows")
        row = {name: column[place] for name, column in self._columns.items()}
        return {name: value for name, value in row.items() if value is not _ABSENT}

    def __len__(self) -> int:
        return self._num_rows

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(map(dict.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Rows({list(self)!r})"


def _column_for(value: object) -> MutableSequence[Any]:
    code = _CODES.get(type(value))
    return array(code) if code is not None and _fits(array(code), value) else []


def _fits(column: array[Any], value: object) -> bool:
    if _CODES.get(type(value)) != column.typecode:
        return False
    return not isinstance(value, int) or -(1 << 63) <= value < 1 << 63
