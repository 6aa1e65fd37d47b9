"""Writes the tables of columns in `experiment.md` and of keys of measured runs in `accuracy.md` from their schemas.

python docs/columns.py    # after a column or a key of `netgym/planning/reproduce.py` has changed
"""

from __future__ import annotations

from pathlib import Path

from exogym_core.results.schema import SUMMARY, TRAIN, VALIDATION, Column
from netgym.planning.reproduce import Cell, CellGroup, MeasuredRun, Simulated
from netsim.docstrings import documented_lines

PAGE, RUNS = (Path(__file__).with_name(f"{name}.md") for name in ("experiment", "accuracy"))
KEYS = {
    "of a file": MeasuredRun,
    "of a group": CellGroup,
    "of a cell or its group": Cell,
    "of these, and of their `other` and `plus`": Simulated,
}
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


def with_keys(text: str) -> str:
    """The page of measured runs with its table of keys as the schema has them."""
    begin, end = "<!-- keys of measured runs -->\n", "<!-- end of keys of measured runs -->"
    before, _, rest = text.partition(begin)
    lines = ["| key | meaning |", "|---|---|"]
    for place, schema in KEYS.items():
        lines.append(f"| *{place}* | |")
        for names, meaning in documented_lines(schema).items():
            lines.append(f"| `{names}` | {meaning} |")
    return before + begin + "\n".join(lines) + "\n" + end + rest.partition(end)[2]


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    RUNS.write_text(with_keys(RUNS.read_text(encoding="utf-8")), encoding="utf-8")
