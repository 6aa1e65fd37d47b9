"""The comparison as a table, the same cells on a terminal, on the page and in LaTeX."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from exogym_core.names import visible
from exogym_core.results.progress import loss_format
from exogym_core.results.schema import SUMMARY
from exogym_core.results.seeds import mean_and_deviation
from exogym_core.results.templates import rendered
from netsim.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.results.reading import Results, SeedResult, StrategyResult

__all__ = [
    "ResultTable",
    "comparison_table",
    "count_text",
    "evaluated_every",
    "plus_minus",
    "ratio",
    "short_count",
    "target_table",
    "time_text",
]

_UNKNOWN = "-"
_PLUS_MINUS = "\N{PLUS-MINUS SIGN}"
_GAP = 2  # between columns of a terminal's table
_NAME_WIDTH = 44  # of its first column: longer names are wrapped
_TIME_UNITS = ((3600.0, " h"), (1.0, " s"), (1e-3, " ms"), (1e-6, " us"))
_UNITS = {column.name: column.unit for column in SUMMARY}
_LEAST_NEEDED = (
    *("sent over WAN", "bytes saved", "time per step saved", "accuracy", "sent per worker"),
    *("compute utilisation", "tokens to target", "alive", "took part"),
)
"""Columns in the order in which a narrow terminal drops them."""


class ResultTable(NamedTuple):
    """Table of results as texts, the winners' rows marked.

    Attributes:
        headings: of the columns.
        rows: whether it won, and its cells.
        num_names: columns that name a row, the first ones.
    """

    headings: Sequence[str]
    rows: Sequence[tuple[bool, Sequence[str]]]
    num_names: int = 1

    def filled(self) -> ResultTable:
        """The table without columns in which no row has a value."""
        columns = [
            column
            for column in range(len(self.headings))
            if column < self.num_names or any(cells[column] != _UNKNOWN for _, cells in self.rows)
        ]
        rows = [(is_winner, [cells[column] for column in columns]) for is_winner, cells in self.rows]
        return ResultTable([self.headings[column] for column in columns], rows, self.num_names)

    def rich(self, width: int) -> tuple[Table, list[str]]:
        """The table for a terminal of `width` columns, and the headings that did not fit.

        The winner's row is bold. Columns without a value are left out.
        """
        headings, rows, _ = self.filled()
        lines = [heading.split(" ", 1) for heading in headings]  # narrow: two at most
        widths = [
            max(map(cell_len, [*lines[column], *(cells[column] for _, cells in rows)]), default=0)
            for column in range(len(lines))
        ]
        widths[0] = min(widths[0], _NAME_WIDTH)
        shown = list(range(len(headings)))
        for heading in _LEAST_NEEDED:
            if sum(widths[each] + _GAP for each in shown) > width:
                shown = [each for each in shown if headings[each] != heading]
        table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, padding=(0, _GAP - 1, 0, 0))
        table.add_column(Text("\n".join(lines[0])), max_width=_NAME_WIDTH)
        for column in shown[1:]:
            table.add_column(Text("\n".join(lines[column])), justify="right", no_wrap=True)
        for is_winner, cells in rows:
            # As `Text`, since markup in a name would be obeyed.
            table.add_row(*(Text(cells[column]) for column in shown), style="bold green" if is_winner else "")
        return table, [heading for column, heading in enumerate(headings) if column not in shown]

    def latex(self, caption: str, label: str = "tab:results") -> str:
        """The table for LaTeX, as wide as the text at most; columns without a value are left out, winners are bold."""
        table = self.filled()
        return rendered("results/report/table.tex", caption=caption, label=label, **table._asdict()) + "\n"


def comparison_table(results: Results, winner: str | None = None) -> ResultTable:
    """A row for each strategy; savings are how many times less than the baseline, over as many steps.

    A strategy that did fewer steps than the baseline, or did not hold the target, has saved nothing.
    """
    columns = _columns(results)
    return ResultTable(
        list(columns),
        [
            (result.name == winner, [write(result) for write in columns.values()])
            for result in results.strategies
        ],
    )


def target_table(results: Results, winner: str | None = None) -> ResultTable:
    """Cost of the target: a row for each strategy that held it with every seed, until the first model at it existed."""
    size, baseline = block_size(results), results.baseline
    held = [
        each for each in results.strategies if each.runs and all(run.target == "held" for run in each.runs)
    ]

    def cells(result: StrategyResult) -> list[str]:
        def sent(column: str, write: Callable[[float], str], share: float = 1.0) -> str:
            counts = [counted_to_target(run, results.target_loss, column) for run in result.runs]
            known = [None if count is None else count * share for count in counts]
            return _with_spread(*mean_and_deviation(known), write)

        workers = result.runs[0].num_workers
        return [
            _name_text(result),
            _target_text(results, result),
            _UNKNOWN if baseline is None else ratio(baseline.held_seconds, result.held_seconds),
            sent("step", lambda count: f"{count:,.0f}"),
            sent("bytes_sent", format_bytes, 1 / workers),
            sent("wan_bytes", format_bytes),
            sent("examples_trained", short_count, float(size or 1)),
        ]

    count = "tokens" if size else "samples"
    headings = [
        "strategy",
        "time",
        "speed-up",
        "steps",
        "sent per worker",
        "sent over WAN",
        f"{count} of all workers",
    ]
    return ResultTable(headings, [(each.name == winner, cells(each)) for each in held])


def counted_to_target(run: SeedResult, target_loss: float | None, column: str) -> float | None:
    """A counter of the metrics when the first judged model at the target was made; None where it was not held."""
    crossing = run.crossing(target_loss) if run.target == "held" else None
    return run.at_steps(column).get(crossing.step) if crossing else None


def _columns(results: Results) -> dict[str, Callable[[StrategyResult], str]]:
    """Functions that write a strategy's cell, by heading."""
    target, size = results.target_loss, block_size(results)
    values = {
        results.clock if column.unit == "s" else column.heading: partial(_text, results, column.name)
        for column in SUMMARY
        if column.heading
        and (
            not column.optional or any(getattr(each, column.name) is not None for each in results.strategies)
        )
    }

    def tokens(result: StrategyResult) -> str:
        found = tokens_to_target(result.runs, results.target_loss, size or 1)
        return _with_spread(*mean_and_deviation(found), short_count)

    return {
        "strategy": _name_text,
        f"to loss {target:g}" if target is not None else "to target": partial(_target_text, results),
        **values,
        "bytes saved": partial(_saving, results, "bytes_sent_per_worker"),
        "time per step saved": partial(_saving, results, "virtual_seconds"),
        **({"tokens to target": tokens} if size else {}),
    }


def _name_text(result: StrategyResult) -> str:
    coding = "" if result.coding is None or result.error else f" (coding {result.coding})"
    return visible(result.name) + coding + result.state


def _target_text(results: Results, result: StrategyResult) -> str:
    """Time to the target, or in words how it was missed."""
    if result.held_seconds is not None:
        return _text(results, "virtual_seconds_to_target", result)
    if results.target_loss is None or result.virtual_seconds is None:
        return _UNKNOWN
    targets = [run.target for run in result.runs]
    if "held" in targets:
        return f"with {targets.count('held')} of {len(targets)} seeds"
    return "not held" if "touched" in targets else "never"


def _text(results: Results, column: str, result: StrategyResult) -> str:
    """A value of a column, and the deviation over seeds where they differ."""
    value, deviation = getattr(result, column), result.deviations.get(column)
    if value is None:
        has_diverged = column == "final_loss" and any(
            run.complete and run.final_loss is None for run in result.runs
        )
        return "nan" if has_diverged and result.first_non_finite_step is not None else _UNKNOWN
    if _UNITS[column] == "B":
        return _with_spread(value, deviation, format_bytes)
    if form := _FORMS.get(_UNITS[column]):
        spread = f" {_PLUS_MINUS} {deviation:{form(value)}}" if deviation else ""
        return f"{value:{form(value)}}{spread}"
    # One unit for the table, so that rows compare at a glance.
    longest = max(each.virtual_seconds or 0.0 for each in results.strategies)
    return time_text(value, deviation, longest)


def _share_format(share: float) -> str:
    """Format of a share as a percentage, with one decimal, or with three digits below 1 %."""
    return f".{2 - math.floor(math.log10(100 * share)) if 0 < share < 0.01 else 1}%"


_FORMS: Mapping[str, Callable[[float], str]] = {
    "loss": loss_format,
    "share": _share_format,
    "number": lambda value: ".1f",
}
"""Formats of a value and its deviation, by unit."""


def time_text(seconds: float, deviation: float | None, longest: float) -> str:
    """Time in hours or seconds, as suits the `longest` of a table, and its deviation; less than 0.01 in a smaller unit.

    >>> time_text(8.846, None, 60.0), time_text(10_800.0, 720.0, 40_000.0), time_text(0.0312, None, 40_000.0)
    ('8.846 s', '3.00 \xb1 0.20 h', '0.0312 s')
    """
    units = _TIME_UNITS if longest >= 20_000 else _TIME_UNITS[1:]
    size, unit = (
        next((each for each in units if seconds >= 0.01 * each[0]), units[-1]) if seconds else units[0]
    )
    value = seconds / size
    return plus_minus(value, (deviation or 0.0) / size, unit) or (
        f"{value:,.0f}{unit}" if value >= 1000 else f"{value:.4g}{unit}"
    )


def _with_spread(value: float | None, deviation: float | None, write: Callable[[float], str]) -> str:
    if value is None:
        return _UNKNOWN
    text = write(value)
    if not deviation:
        return text
    size, _ = _scale(value)
    return plus_minus(value / size, deviation / size, text.lstrip("0123456789.")) or text


def plus_minus(value: float, deviation: float, unit: str = "") -> str:
    """A mean and its deviation with the same decimals, which are those of two digits of the deviation.

    Empty where six digits of the mean do not show the deviation.

    >>> plus_minus(0.2, 0.01, " s"), plus_minus(11, 1.414), plus_minus(3400, 230), plus_minus(5, 1e-9)
    ('0.200 \xb1 0.010 s', '11.0 \xb1 1.4', '3,400 \xb1 230', '')
    """
    if not deviation:
        return ""
    digits, most = (math.floor(math.log10(abs(each) or 1.0)) for each in (deviation, value))
    decimals = max(0, min(1 - digits, 5 - most))
    error = f"{deviation:,.{decimals}f}"
    return f"{value:,.{decimals}f} {_PLUS_MINUS} {error}{unit}" if float(error.replace(",", "")) else ""


def _saving(results: Results, column: str, result: StrategyResult) -> str:
    """Ratio of the baseline's value to that of a strategy that did its work.

    That is as many steps and, where there is a target, held with every seed.
    """
    baseline = results.baseline
    if baseline is None or baseline is result or not result.ended or result.steps != baseline.steps:
        return _UNKNOWN
    if results.target_loss is not None and any(run.target not in ("held", None) for run in result.runs):
        return _UNKNOWN
    return ratio(getattr(baseline, column), getattr(result, column))


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


def block_size(results: Results) -> int | None:
    """Tokens a sample of a task that has tokens and a target; else None."""
    size = None if results.target_loss is None else results.setting("task.block_size")
    return size if isinstance(size, int) and size > 0 else None


def tokens_to_target(runs: Sequence[SeedResult], target_loss: float | None, size: int) -> list[float | None]:
    """Tokens of all workers until each run's first evaluation at the target, `size` a sample; None: not held."""
    counts = [counted_to_target(run, target_loss, "examples_trained") for run in runs]
    return [None if count is None else count * size for count in counts]


def short_count(count: float) -> str:
    """A number in three digits.

    >>> short_count(201.4e9), short_count(3.2e12), short_count(5e5)
    ('201B', '3.2T', '500k')
    """
    size, letter = _scale(count)
    return f"{count / size:.3g}{letter}"


def _scale(count: float) -> tuple[float, str]:
    """Size and letter of the largest thousands in a number."""
    return next(
        (each for each in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")) if count >= each[0]), (1.0, "")
    )


def evaluated_every(results: Results) -> str:
    """Interval of a run's evaluations in words: virtual time, or steps; empty where there is none."""
    seconds, steps = (results.setting(f"evaluate.{key}") for key in ("every_seconds", "every"))
    return visible(seconds) if seconds is not None else "" if steps is None else count_text(steps, "step")


def count_text(count: object, noun: str) -> str:
    """A number of things as an experiment has it, which may be edited by hand."""
    return format_count(count, noun) if isinstance(count, int) else f"{visible(count)} {noun}s"
