"""Writes `measured-runs.md` and the table at the top of `accuracy.md`: every measured run and today's prediction.

python docs/measured_runs.py    # after a change of the model or of a run: a minute of processor time
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from netgym.planning.reproduce import BASES, ReproducedRun, load_run, reproduce, run_names
from netgym.planning.setting import Known

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCS = Path(__file__).parent
CELLS, TABLE = DOCS / "measured-runs.md", DOCS / "accuracy.md"
BEGIN, END = "<!-- measured runs -->\n", "<!-- end of measured runs -->"
MOST_ROWS = 60  # of a run's table; recordings of more have the largest errors only

LEARNT = ", by *first prediction*; the model of *today* may have learnt from it"

HEAD = """# Measured runs, cell by cell

Written by `python docs/measured_runs.py`; `netgym reproduce NAME` prints one, `--json` all of it. An error is
predicted / measured - 1. *First* is the prediction that was made before the figure was read; *predicted* is today's.
*Tests*: how far a cell tests the model, *before*, *known*, *fitted*, *derived*, *circular* ([the words](accuracy.md)).
"""


def table(found: Sequence[ReproducedRun]) -> str:
    """Markdown tables of runs, one for each basis."""
    lines = []
    for basis, words in BASES.items():
        rows = [(made, own) for made in found for own in made.summaries() if own.basis == basis]
        if not rows:
            continue
        heads = (
            "run",
            "what ran",
            "network",
            "measured by",
            "figures",
            "first prediction",
            "today",
            "not known",
        )
        lines += [
            f"**{basis.capitalize()}**: {words}{LEARNT * (basis == 'before')}.",
            "",
            f"| {' | '.join(heads)} |",
            "|---" * len(heads) + "|",
        ]
        for made, own in rows:
            run = made.run
            first = "" if own.first_median is None else f"{own.first_median:.1%}; {own.first_largest:+.1%}"
            today = f"{own.median:.1%}; {own.p95:.1%}; {own.largest:+.1%}"
            texts = (
                f"[`{made.name}`](measured-runs.md#{made.name})",
                run.what,
                run.network,
                f"{run.measured_by}; {run.source}",
            )
            lines.append(f"| {' | '.join((*texts, str(own.cells), first, today, run.unknown))} |")
        lines.append("")
    open_runs = [made for made in found if any(cell["measured"] is None for cell in made.cells)]
    if open_runs:
        lines += ["**Predicted only**: the measured figure has not been read yet.", ""]
        lines += [f"- [`{each.name}`](measured-runs.md#{each.name}): {each.run.what}" for each in open_runs]
        lines.append("")
    return "\n".join(lines)


def section(made: ReproducedRun) -> str:
    """A run with its cells."""
    run, cells = made.run, made.cells
    lines = [f"## `{made.name}`", "", f"{run.what[0].upper()}{run.what[1:]}.", ""]
    lines += [
        f"- *network*: {run.network}",
        f"- *measured by*: {run.measured_by}",
        f"- *source*: {run.source}",
    ]
    lines += [f"- *not known*: {run.unknown}"]
    lines += [f"- *first predictions*: at commit {run.predicted_at}"] if run.predicted_at else []
    if len(cells) > MOST_ROWS:
        cells = sorted(
            (cell for cell in cells if cell["error"] is not None), key=lambda cell: -abs(cell["error"])
        )
        lines.append(f"- the {MOST_ROWS // 6} largest errors of {len(cells)}")
        cells = cells[: MOST_ROWS // 6]
    lines += ["", "| what | unit | measured | first | predicted | error | tests | cause |", "|---" * 8 + "|"]
    return "\n".join([*lines, *map(row, cells), ""])


def row(cell: dict[str, Any]) -> str:
    """A cell's row."""
    measured, first = (
        "" if cell[key] is None else f"{cell[key]:g}" if key == "first" else f"{cell[key]:.5g}"
        for key in ("measured", "first")
    )
    predicted = "" if cell["predicted"] is None else f"{cell['predicted']:.4g}"
    error = "" if cell["error"] is None else f"{cell['error']:+.1%}"
    texts = (cell["what"], cell["unit"], measured, first, predicted, error, cell["basis"], cell["cause"])
    return f"| {' | '.join(texts)} |"


def with_table(text: str, found: Sequence[ReproducedRun]) -> str:
    """The page with its table as the runs have it."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table(found) + END + rest.partition(END)[2]


def main() -> None:
    """Reproduce all runs and write both pages."""
    known = Known()
    found = [ReproducedRun(name, load_run(name)[0], list(reproduce(name, known))) for name in run_names()]
    CELLS.write_text("\n".join([HEAD, *map(section, found)]), encoding="utf-8")
    TABLE.write_text(with_table(TABLE.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
