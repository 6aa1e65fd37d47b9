"""The comparison as a table, the same cells on a terminal and on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from exogym_core.names import visible
from exogym_core.results.progress import format_loss
from exogym_core.results.schema import SUMMARY
from exogym_core.results.seeds import mean_and_deviation
from netsim.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from exogym_core.results.reading import Results, StrategyResult

__all__ = ["count_text", "latex_table", "latex_text", "ratio", "rich_table", "table_cells", "table_headings"]

_UNKNOWN = "-"
_PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
_GAP = 2  # between columns of a terminal's table
_SHOWN = [column for column in SUMMARY if column.heading]
_UNITS = {column.name: column.unit for column in SUMMARY}
_SAVINGS = ("bytes saved", "time per step saved")
_WRITERS: Mapping[str, Callable[[float], str]] = {
    "loss": format_loss,
    "share": "{:.1%}".format,
    "B": format_bytes,
}
_LEAST_NEEDED = (
    "sent over WAN",
    *_SAVINGS,
    "accuracy",
    "sent per worker",
    "compute utilisation",
    "tokens to target",
)
"""Columns in the order in which a narrow terminal drops them."""


def table_headings(results: Results) -> list[str]:
    """Column headings of the rows of `table_cells`."""
    target = results.target_loss
    return [
        "strategy",
        f"to loss {target:g}" if target is not None else "to target",
        *(results.clock if column.unit == "s" else column.heading for column in _SHOWN),
        *_SAVINGS,
        *(["tokens to target"] if _block_size(results) else []),
    ]


def table_cells(results: Results) -> list[list[str]]:
    """A row of cells for each strategy; savings are how many times less than the baseline, over as many steps.

    A strategy that did fewer steps than the baseline, or did not hold the target, has saved nothing.
    """
    return [_cells(results, result) for result in results.strategies]


def _block_size(results: Results) -> int | None:
    """Tokens a sample of a task that has tokens and a target; else None."""
    task = results.settings.get("task")
    size = task.get("block_size") if isinstance(task, dict) and results.target_loss is not None else None
    return size if isinstance(size, int) and size > 0 else None


def _tokens_text(results: Results, result: StrategyResult, block_size: int) -> str:
    """Tokens of all workers until the first evaluation at the target, of a strategy that held it with every seed."""
    tokens: list[float | None] = []
    for run in result.runs:
        examples = run.at_steps("examples_trained")
        reached = next((step for step, loss in run.losses if loss <= (results.target_loss or 0.0)), None)
        found = None if run.target != "held" or reached is None else examples.get(reached)
        tokens.append(None if found is None else found * block_size)
    return _with_spread(*mean_and_deviation(tokens), _count)


def _count(count: float) -> str:
    """A number in three digits, such as 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.3g}"


def latex_table(headings: Sequence[str], rows: Iterable[tuple[bool, Sequence[str]]], caption: str) -> str:
    """A table for LaTeX with `booktabs`; the first column is text, names of winners are bold.

    Args:
        headings: of the columns; a column without a value in any row is left out.
        rows: whether it won, and its cells.
        caption: one sentence.
    """
    rows = list(rows)
    shown = [0, *(i for i in range(1, len(headings)) if any(cells[i] != _UNKNOWN for _, cells in rows))]
    lines = [" & ".join(latex_text(headings[column]) for column in shown) + r" \\", r"\midrule"]
    for is_winner, cells in rows:
        texts = [latex_text(cells[column]) for column in shown]
        name = (
            rf"\textbf{{{texts[0]}}}" if is_winner else texts[0]
        )  # its figures need not be the best of their columns
        lines.append(" & ".join([name, *texts[1:]]) + r" \\")
    body = "\n".join(f"    {line}" for line in lines)
    return (
        "% \\usepackage{booktabs}\n\\begin{table}\n  \\centering\n"
        f"  \\caption{{{latex_text(caption)}}}\n"
        f"  \\begin{{tabular}}{{l{'r' * (len(shown) - 1)}}}\n    \\toprule\n{body}\n    \\bottomrule\n"
        "  \\end{tabular}\n\\end{table}\n"
    )


_LATEX = str.maketrans(
    {each: f"\\{each}" for each in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {_PLUS_MINUS: r"$\pm$", "<": r"$<$", ">": r"$>$"}
)


def latex_text(text: str) -> str:
    """The text with LaTeX's special characters escaped."""
    return text.translate(_LATEX)


def rich_table(
    results: Results, *, winner: str | None = None, width: int = 10_000
) -> tuple[Table, list[str]]:
    """The table for a terminal of `width` columns, and the headings that did not fit.

    The winner's row is bold. Columns without a value are left out.
    """
    headings, rows = table_headings(results), table_cells(results)
    widths = [
        max(cell_len(text) for text in [*_lines(heading), *(row[column] for row in rows)])
        for column, heading in enumerate(headings)
    ]
    known = [column for column in range(len(headings)) if any(row[column] != _UNKNOWN for row in rows)]
    shown = known or [0]
    for heading in _LEAST_NEEDED:
        if sum(widths[each] + _GAP for each in shown) > width:
            shown = [each for each in shown if headings[each] != heading]
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, _GAP - 1, 0, 0))
    for column in shown:
        justify: Literal["left", "right"] = "right" if column else "left"
        table.add_column(Text("\n".join(_lines(headings[column]))), justify=justify, no_wrap=True)
    for result, cells in zip(results.strategies, rows, strict=True):
        # As `Text`, since markup in a name would be obeyed.
        style = "bold green" if result.name == winner else ""
        table.add_row(*(Text(cells[column]) for column in shown), style=style)
    return table, [headings[column] for column in known if column not in shown]


def _lines(heading: str) -> list[str]:
    """Narrow: one word a line, two at the most in all."""
    return heading.split(" ", 1)


def count_text(count: object, noun: str) -> str:
    """A number of things as an experiment has it, which may be edited by hand."""
    return format_count(count, noun) if isinstance(count, int) else f"{visible(count)} {noun}s"


def ratio(baseline: float | None, value: float | None) -> str:
    """Ratio of `baseline` to `value` as a text.

    >>> ratio(100.0, 8.0), ratio(100.0, 120.0), ratio(None, 1.0)
    ('12.5x', '0.833x', '-')
    """
    if baseline is None or value is None:
        return _UNKNOWN
    if value == 0:
        return "1x" if baseline == 0 else "all"
    quotient = baseline / value
    return f"{quotient:,.0f}x" if quotient >= 100 else f"{quotient:.3g}x"


def _text(results: Results, column: str, value: float | None, deviation: float | None) -> str:
    """A value of a column, and the deviation over seeds where they differ."""
    if value is None:
        return _UNKNOWN
    if write := _WRITERS.get(_UNITS[column]):
        return _with_spread(value, deviation, write)
    # One unit for the whole table, so that rows compare at a glance.
    longest = max(result.virtual_seconds or 0.0 for result in results.strategies)
    size, name = (3600.0, "h") if longest >= 20_000 else (1.0, "s")
    spread = _spread(deviation, lambda each: f"{each / size:.2g}")
    return f"{_seconds(value / size)}{spread} {name}"


def _seconds(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _spread(deviation: float | None, write: Callable[[float], str]) -> str:
    return f" {_PLUS_MINUS} {write(deviation)}" if deviation else ""


def _with_spread(value: float | None, deviation: float | None, write: Callable[[float], str]) -> str:
    return _UNKNOWN if value is None else f"{write(value)}{_spread(deviation, write)}"


def _target_text(results: Results, result: StrategyResult) -> str:
    """Time to the target, or in words how it was missed."""
    seconds = result.virtual_seconds_to_target
    if result.target == "held" and seconds is not None:
        name = "virtual_seconds_to_target"
        return _text(results, name, seconds, result.deviations.get(name))
    if results.target_loss is None or result.virtual_seconds is None:
        return _UNKNOWN
    held = sum(run.target == "held" for run in result.runs)
    if held:
        return f"with {held} of {len(result.runs)} seeds"
    return "not held" if any(run.target == "touched" for run in result.runs) else "never"


def _name_text(result: StrategyResult) -> str:
    name = visible(result.name, 40)
    if result.error is not None:
        return f"{name} (failed)"
    if result.coding is not None:
        name = f"{name} (coding {result.coding})"
    return f"{name} (incomplete)" if result.incomplete else name


def _saves(results: Results, result: StrategyResult) -> bool:
    """True if it did the baseline's work: as many steps and, where there is a target, held with every seed."""
    baseline = results.baseline
    if baseline is None or baseline is result or not result.ended or result.steps != baseline.steps:
        return False
    return results.target_loss is None or all(run.target in ("held", None) for run in result.runs)


def _cells(results: Results, result: StrategyResult) -> list[str]:
    baseline = results.baseline if _saves(results, result) else None
    cells = [_name_text(result), _target_text(results, result)]
    for column in _SHOWN:
        deviation = result.deviations.get(column.name)
        cells.append(_text(results, column.name, getattr(result, column.name), deviation))
    names = ("bytes_sent_per_worker", "virtual_seconds")
    cells += [
        ratio(getattr(baseline, name), getattr(result, name)) if baseline else _UNKNOWN for name in names
    ]
    block_size = _block_size(results)
    return [*cells, _tokens_text(results, result, block_size)] if block_size else cells
