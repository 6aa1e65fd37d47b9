"""Writes the tables of columns in `experiment.md` from `exogym_core.results.schema`.

python docs/columns.py    # after a column has changed
"""

from __future__ import annotations

from pathlib import Path

from exogym_core.results.schema import SUMMARY, TRAIN, VALIDATION, Column

PAGE = Path(__file__).with_name("experiment.md")
TABLES = {"training metrics": TRAIN, "validation metrics": VALIDATION, "summary": SUMMARY}
UNITS = {"s": "seconds", "B": "bytes", "share": "0 to 1", "count": "", "number": "", "loss": ""}


def table(columns: tuple[Column, ...]) -> str:
    """Markdown table of columns: name, meaning and unit."""
    lines = ["| column | meaning | unit |", "|---|---|---|"]
    lines += [
        f"| `{column.name}` | {column.meaning} | {UNITS.get(column.unit, column.unit)} |"
        for column in columns
    ]
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """The page with its tables as the schema has them."""
    for name, columns in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + table(columns) + "\n" + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
