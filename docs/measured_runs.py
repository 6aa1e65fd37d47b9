"""Writes `measured-runs.md`, the table at the top of `accuracy.md`, and the README's figures on runs of others.

python docs/measured_runs.py              # after a change of the model or of a run: a minute of processor time
python docs/measured_runs.py --history    # prints the commits that show predictions before measured figures
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from netgym.planning.measure import NETWORK_RANGE
from netgym.planning.reproduce import BASES, RATES, ReproducedRun, load_run, reproduce, run_names
from netgym.planning.setting import Known
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

DOCS = Path(__file__).parent
CELLS, TABLE, README = DOCS / "measured-runs.md", DOCS / "accuracy.md", DOCS.parent / "README.md"
BEGIN, END = "<!-- measured runs -->\n", "<!-- end of measured runs -->"
BEGIN_OTHERS, END_OTHERS = "<!-- runs of others -->\n", "<!-- end of runs of others -->"
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
            high = f"{own.p95:.1%}; " if own.cells >= 20 else ""
            today = f"{own.median:.1%}; {high}{own.largest:+.1%}"
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
        lines += [
            "**Predicted only**: measured figures are not compared, as most have not been read yet.",
            "",
        ]
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


def of_others(found: Sequence[ReproducedRun]) -> str:
    """Errors of predictions that were made before, over all figures that others measured."""
    runs = [made for made in found if "NetGym" not in made.run.measured_by]
    cells = [cell for made in runs for cell in made.cells if cell["error"] is not None]
    before = [cell for cell in cells if cell["basis"] == "before"]
    today = np.array([cell["error"] for cell in before])
    first = np.array([cell["first"] / cell["measured"] - 1 for cell in before])
    (middle, high), (new_middle, new_high) = (
        np.quantile(np.abs(each), (0.5, 0.95), method="higher") for each in (first, today)
    )
    speeds = ("samples/s", "tokens/s", "%", *RATES)
    fast = [cell["error"] > 0.1 if cell["unit"] in speeds else cell["error"] < -0.1 for cell in before]
    text = (
        f"Of {len(before)} figures that others had measured, predictions made before they were read were off by "
        f"{middle:.0%} in the median and {high:.0%} at the 95th percentile; the present model, which has learnt "
        f"from some, by {new_middle:.0%} and {new_high:.0%}, more than 10% too optimistic in {np.mean(fast):.0%}."
    )
    return text.replace("%", " %")


def band(found: Sequence[ReproducedRun]) -> tuple[int, float, float]:
    """Number of times of communication by others, and the 10 and 90 % quantile of measured over predicted ones."""
    ratios = []
    for made in found:
        for cell in made.cells:
            if (
                cell["error"] is None
                or cell["basis"] not in ("before", "known")
                or "NetGym" in made.run.measured_by
            ):
                continue
            if cell["unit"] in RATES:
                ratios.append(1 + cell["error"])
            elif cell["unit"] in ("s", "ms") and made.name != "computing-a100":
                ratios.append(1 / (1 + cell["error"]))
    return (len(ratios), *np.quantile(ratios, (0.1, 0.9)).tolist())


def history() -> str:
    """For each run with first predictions, the commits in which predictions and measured figures first stand."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=DOCS, capture_output=True, text=True, check=True
        ).stdout

    lines = ["run                     predicted  measured"]
    for name in run_names():
        if not any(cell.first is not None for group in load_run(name)[0].groups for cell in group.cells):
            continue
        stands: dict[str, str] = {}
        for commit in git("log", "--reverse", "--format=%h", "--", f":/*/{name}.yaml").split():
            path = git(
                "ls-tree", "-r", "--name-only", "--full-tree", commit, "--", "netgym/planning/measured_runs"
            )
            if f"netgym/planning/measured_runs/{name}.yaml" not in path.split():
                continue
            groups = yaml.safe_load(git("show", f"{commit}:netgym/planning/measured_runs/{name}.yaml"))[
                "groups"
            ]
            for key in ("first", "measured"):
                if any(key in cell for group in groups for cell in group["cells"]):
                    stands.setdefault(key, commit)
            if len(stands) == 2:
                break
        lines.append(f"{name:23} {stands['first']}   {stands.get('measured', 'not read')}")
    return "\n".join(lines)


def between(text: str, begin: str, new: str, end: str) -> str:
    """`text` with `new` between two marks."""
    before, _, rest = text.partition(begin)
    return before + begin + new + end + rest.partition(end)[2]


def main() -> None:
    """Reproduce all runs and write the pages."""
    known = Known()
    runs = {
        name: load_run(name)[0] for name in run_names()
    }  # mistakes of all files before the first simulation
    found = [ReproducedRun(name, run, list(reproduce(name, known))) for name, run in runs.items()]
    CELLS.write_text("\n".join([HEAD, *map(section, found)]), encoding="utf-8")
    number, low, high = band(found)
    others = (
        f"{of_others(found)} In eight of ten of the {number} times and rates of communication by others that are "
        f"*before* or *known*, the measured time is {low:.2f} to {high:.2f} times the predicted one: "
        "the [bands of plans](planning.md)."
    )
    tables = f"{textwrap.fill(others, 125)}\n\n{table(found)}"
    TABLE.write_text(between(TABLE.read_text(encoding="utf-8"), BEGIN, tables, END), encoding="utf-8")
    words = textwrap.fill(of_others(found), 125) + "\n"
    README.write_text(
        between(README.read_text(encoding="utf-8"), BEGIN_OTHERS, words, END_OTHERS), encoding="utf-8"
    )
    if (bands := (round(low, 2), round(high, 2))) != NETWORK_RANGE:
        print(
            f"NETWORK_RANGE of netgym/planning/measure.py is {NETWORK_RANGE}: write {bands}, and into planning.md"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--history", action="store_true")
    try:
        print(history()) if parser.parse_args().history else main()
    except InputError as error:
        sys.exit(f"error: {error}")
