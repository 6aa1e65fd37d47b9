"""The comparison as a table, the same cells on a terminal and on the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from exogym_core.names import visible
from exogym_core.results.losses import format_loss
from netsim.files.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from exogym_core.results.report.results import Results, StrategyResult

__all__ = ["ratio", "rich_table", "table_cells", "table_headings"]

_UNKNOWN = "-"
_PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
_GAP = 2  # between columns of a terminal's table
_LEAST_NEEDED = (7, 8, 9, 3, 6, 5)  # columns in the order in which a narrow terminal goes without them


def table_headings(results: Results) -> list[str]:
    """The columns' headings."""
    target = results.target_loss
    return [
        "strategy",
        f"to loss {target:g}" if target is not None else "to target",
        "final loss",
        "accuracy",
        results.clock,
        "compute utilisation",
        "sent per worker",
        "sent over WAN",
        "bytes saved",
        "time per step saved",
    ]


def table_cells(results: Results) -> list[list[str]]:
    """A row of cells for each strategy; savings are how many times less than the baseline, over as many steps.

    Who did fewer steps than the baseline, or did not hold the target, has saved nothing.
    """
    return [_cells(results, result) for result in results.strategies]


def rich_table(
    results: Results, *, winner: str | None = None, width: int = 10_000
) -> tuple[Table, list[str]]:
    """The table for a terminal of `width` columns, and the headings that found no room there.

    The winner's row is bold. Columns of which nothing is known are left out.
    """
    headings, rows = table_headings(results), table_cells(results)
    widths = [
        max(cell_len(text) for text in [*_lines(heading), *(row[column] for row in rows)])
        for column, heading in enumerate(headings)
    ]
    known = [column for column in range(len(headings)) if any(row[column] != _UNKNOWN for row in rows)]
    shown = known or [0]
    for column in _LEAST_NEEDED:
        if sum(widths[each] + _GAP for each in shown) > width:
            shown = [each for each in shown if each != column]
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


def ratio(baseline: float | None, value: float | None) -> str:
    """How many times less `value` is than `baseline`.

    >>> ratio(100.0, 8.0), ratio(100.0, 120.0), ratio(None, 1.0)
    ('12.5x', '0.833x', '-')
    """
    if baseline is None or value is None:
        return _UNKNOWN
    if value == 0:
        return "1x" if baseline == 0 else "all"
    quotient = baseline / value
    if quotient >= 100:
        return f"{quotient:,.0f}x"
    return f"{quotient:.3g}x"


def _seconds_text(results: Results, seconds: float, deviation: float | None) -> str:
    """Seconds in one unit for the whole table, so that rows compare at a glance."""
    longest = max(result.virtual_seconds or 0.0 for result in results.strategies)
    size, unit = (3600.0, "h") if longest >= 20_000 else (1.0, "s")
    value = seconds / size
    text = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{text}{_spread(deviation, lambda each: f'{each / size:.2g}')} {unit}"


def _spread(deviation: float | None, write: Callable[[float], str]) -> str:
    """The deviation behind a mean, where seeds differ."""
    return f" {_PLUS_MINUS} {write(deviation)}" if deviation else ""


def _target_text(results: Results, result: StrategyResult) -> str:
    """When the target was reached, or how not."""
    seconds = result.virtual_seconds_to_target
    if result.target == "held" and seconds is not None:
        return _seconds_text(results, seconds, result.deviations.get("virtual_seconds_to_target"))
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


def _number_text(value: float | None, deviation: float | None, write: Callable[[float], str]) -> str:
    return _UNKNOWN if value is None else f"{write(value)}{_spread(deviation, write)}"


def _saves(results: Results, result: StrategyResult) -> bool:
    """Whether it did the baseline's work: as many steps and, where there is a target, held with every seed."""
    baseline = results.baseline
    if baseline is None or baseline is result or not result.ended or result.steps != baseline.steps:
        return False
    return results.target_loss is None or all(run.target in ("held", None) for run in result.runs)


def _cells(results: Results, result: StrategyResult) -> list[str]:
    baseline = results.baseline if _saves(results, result) else None
    deviations = result.deviations
    seconds = result.virtual_seconds
    return [
        _name_text(result),
        _target_text(results, result),
        _number_text(result.final_loss, deviations.get("final_loss"), format_loss),
        _number_text(result.accuracy, deviations.get("accuracy"), "{:.1%}".format),
        _UNKNOWN if seconds is None else _seconds_text(results, seconds, deviations.get("virtual_seconds")),
        _number_text(result.compute_utilisation, deviations.get("compute_utilisation"), "{:.1%}".format),
        _UNKNOWN if result.bytes_sent_per_worker is None else format_bytes(result.bytes_sent_per_worker),
        _UNKNOWN if result.wan_bytes is None else format_bytes(result.wan_bytes),
        ratio(baseline.bytes_sent_per_worker, result.bytes_sent_per_worker) if baseline else _UNKNOWN,
        ratio(baseline.virtual_seconds, seconds) if baseline else _UNKNOWN,
    ]
