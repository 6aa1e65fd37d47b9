"""Plans as a table for terminals, and as a page with plots."""

from __future__ import annotations

import io
import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from exogym_core.names import visible
from exogym_core.results.report.curves import COLOURS
from exogym_core.results.report.figures import Picture
from exogym_core.results.report.page import Figure, Page, render_page
from exogym_core.results.report.table import ResultTable, short_count
from netgym.planning.coding import is_large, order_may_change, uncharged_seconds
from netgym.planning.measure import NETWORK_RANGE
from netgym.planning.sweep import (
    concerns,
    is_axis,
    is_of_model,
    number,
    once,
    pace,
    short_keys,
    without_effect,
)
from netsim.cli.terminal import plain_console
from netsim.units import format_bits_per_second, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = [
    "MODEL_SIZE",
    "OWN_BACKENDS",
    "algorithm_text",
    "at_text",
    "placement_text",
    "print_table",
    "write_page",
]

_ALIKE = 1.005  # a ratio of steps that rounds to one says nothing
MODEL_SIZE = (
    "model size: computing is spent best at about 20 tokens a parameter (Hoffmann et al. 2022, arXiv 2203.15556); with "
    "fewer a smaller model would reach a lower loss for the money, with more a larger one: compare with another --model"
)
OWN_BACKENDS = (
    "collectives: auto under linux-tcp chooses among all algorithms, as no backend of torch.distributed does; its "
    "programs may wait many times as long: plan them with --protocol gloo, or nccl-sockets on GPUs"
)
_FEW_DAYS, _SHORT_DAYS = 10, 0.01  # shorter ones are shown in minutes and less
_MOST_NAMED = 3
_MOST_SITES = 8
_WIDEST = 22  # characters of a page's cell


def placement_text(workers: Mapping[str, int]) -> str:
    """Number of workers at each site, or of sites where there are many.

    >>> placement_text({"eu": 2, "us": 1}), placement_text({f"home{i}": 1 for i in range(20)})
    ('eu 2, us 1', '20 sites, 1 each')
    """
    if len(workers) <= _MOST_SITES:
        return ", ".join(f"{site} {number}" for site, number in workers.items())
    ends = dict.fromkeys((min(workers.values()), max(workers.values())))
    return f"{len(workers)} sites, {' to '.join(map(str, ends))} each"


# --- cells of the table ---------------------------------------------------------------------------------------


def _name(row: Mapping[str, Any]) -> str:
    return visible(row["name"])


def _round(row: Mapping[str, Any]) -> str:
    """Seconds and steps of a round, the budget's whole rounds, and its steps after them."""
    steps, number = row["steps_per_round"], ""
    if row["steps"] is not None:
        whole, rest = divmod(row["steps"], steps)
        number = f" x {whole:,}" + (f" + {rest:,}" if rest else "")
    return f"{format_seconds(row['seconds_per_round'])} / {format_count(steps, 'step')}{number}"


def _mfu(row: Mapping[str, Any]) -> str:
    """Model FLOP utilisation of the sites, from the least to the most."""
    found = [f"{share:.1%}" for share in sorted(row["mfu"].values())]
    return " to ".join(dict.fromkeys((found[0], found[-1]))) if found else "-"


def _whole(amount: float) -> str:
    return f"{amount:,.0f}"


def _days(days: float) -> str:
    if days < _SHORT_DAYS:
        return format_seconds(days * 86_400)
    return f"{days:,.1f}" if days >= _FEW_DAYS else f"{days:.3g}"


def _banded(row: Mapping[str, Any], name: str, text: Callable[[float], str]) -> str:
    """Amount with its band in brackets where the ends differ; `-` without a band."""
    if row[name] is None or row[f"{name}_low"] is None:
        return "-"
    low, high = text(row[f"{name}_low"]), text(row[f"{name}_high"])
    return text(row[name]) + ("" if low == high else f" ({low} to {high})")


def _dollars(row: Mapping[str, Any]) -> str:
    """Dollars with their band, and the share that is for traffic."""
    egress = row["cost_by"].get("egress")
    of_traffic = " (traffic only)" if _is_traffic_only(row) else f" ({egress:,.0f} traffic)" if egress else ""
    return _banded(row, "cost", _whole) + of_traffic


def _coding(row: Mapping[str, Any]) -> str:
    """Coding that is not charged, with its time where that is a large share of a round."""
    if is_large(row):
        return f"not charged (+{format_seconds(uncharged_seconds(row))} a round)"
    return "not charged" if row["coding"] == "not charged" else "-"


def _is_traffic_only(row: Mapping[str, Any]) -> bool:
    """True if the dollars pay for traffic and stores' requests only."""
    return row["cost"] is not None and row["cost_by"].get("workers") is None


#: Text of a row in each column; one in which no row has a value is left out.
_COLUMNS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "strategy": _name,
    "place": lambda row: "-" if row["place"] is None else str(row["place"]),
    "tokens": lambda row: _banded(row, "tokens", short_count),
    "tokens a parameter": lambda row: (
        "-" if row["tokens_low"] is None else f"{row['tokens_per_parameter']:.3g}"
    ),
    "days": lambda row: _banded(row, "days", _days),
    "dollars": _dollars,
    "step": lambda row: format_seconds(row["seconds_per_step"]),
    "round": _round,
    "utilisation": lambda row: f"{row['compute_utilisation']:.1%}",
    "algorithm": lambda row: "-" if row["algorithm"] == "auto" else algorithm_text(row["algorithm"]),
    "MFU": _mfu,
    "tokens/s": lambda row: _whole(row["tokens_per_second"]),
    "sent per worker and round": lambda row: (
        format_bytes(round(row["bytes_per_worker"])) + (" expected" if row["expected_bytes"] else "")
    ),
    "coding": _coding,
    "memory": lambda row: (
        format_bytes(row["memory_per_worker"]) + (" (too much)" if row["fits"] is False else "")
    ),
    "limit": lambda row: str(row["limit"]["by"]),
}


def _table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Headings, swept keys first, and the cells of each row."""
    keys = _swept(rows)
    columns = {name: [text(row) for row in _once(rows)] for name, text in _COLUMNS.items()}
    columns = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
    cells = [
        [*(row["point"][key] if concerns(row, key) else "any" for key in keys), *line]
        for row, *line in zip(_once(rows), *columns.values(), strict=True)
    ]
    return [*keys.values(), *columns], cells


# --- points of a sweep ----------------------------------------------------------------------------------------


def _swept(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Swept keys, each with the name of its column."""
    return short_keys(rows[0].get("point", {})) if rows else {}


def _once(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Rows by strategy, one for each set of swept values that can change it."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    return sorted(once(rows), key=lambda row: names.index(row["name"])) if _swept(rows) else list(rows)


def at_text(point: Mapping[str, str]) -> str:
    """A point in few words, such as `H=100, codec=int8`."""
    return ", ".join(f"{name}={point[key]}" for key, name in short_keys(point).items())


def _point(row: Mapping[str, Any]) -> str:
    return at_text({key: value for key, value in row.get("point", {}).items() if concerns(row, key)})


def _name_at(row: Mapping[str, Any]) -> str:
    return _name(row) + (f" at {point}" if (point := _point(row)) else "")


# --- notes ----------------------------------------------------------------------------------------------------


def _notes(rows: Sequence[Mapping[str, Any]], values: Mapping[str, Any], *, short: bool = False) -> list[str]:
    """Notes on plans; `short`: only on the fastest point of each strategy."""
    every, is_of_money = _once(rows), any(row["tokens_low"] is not None for row in rows)
    shown = every
    if short and _swept(rows):
        best: dict[str, Mapping[str, Any]] = {}
        for row in sorted(every, key=lambda row: -pace(row)):
            best.setdefault(row["name"], row)
        shown = [best[name] for name in dict.fromkeys(row["name"] for row in every)]
    notes = [note for row in shown for note in _notes_of(row)]
    names: dict[str, dict[str, None]] = {}
    for row in shown:
        for remark in row["remarks"]:
            names.setdefault(visible(remark, 1000), {})[_name_at(row)] = None
    for remark, of in names.items():
        more = f" and {len(of) - _MOST_NAMED} more" if len(of) > _MOST_NAMED else ""
        text = "all plans" if 1 < len(shown) == len(of) else "; ".join(list(of)[:_MOST_NAMED]) + more
        notes.append(f"{text}: {remark}")
    notes += _crossing_notes(values, is_of_money, short=short) + _ratio_notes(
        values["step_ratios"], short=short
    )
    if any(line["slower"].startswith("AllReduce") for line in values["step_ratios"]):
        notes.append("AllReduce is planned as given; netgym advise searches its codec, buckets and streams")
    if len(shown) < len(every):
        notes += [
            f"{_name_at(row)}: {_does_not_fit(row)}"
            for row in every
            if row["fits"] is False and row not in shown
        ]
        notes.append(
            "limits and remarks are those of each strategy's best point, and of variants the best with the others; "
            "--json and the page of --out have all"
        )
    notes += [f"{key} changes nothing in any row" for key in _swept(rows) if without_effect(rows, key)]
    if any(_is_traffic_only(row) for row in shown):
        notes.append(
            "dollars: traffic alone, as links and stores charge for it, requests included; --price DOLLARS, of a "
            "worker's hour, adds theirs"
        )
    most = max(shown, key=lambda row: row["memory_per_worker"])
    parts, others = (
        ", ".join(f"{name} {format_bytes(size)}" for name, size in most[key].items() if name != "total")
        for key in ("memory", "memory_with")
    )
    notes.append(f"memory: {parts} ({_name(most)}); in all with one --memory alone: {others}")
    if most["stages"]:
        notes.append(
            f"stages of the first worker ({_name(most)}): {'; '.join(map(_stage_text, most['stages']))}"
        )
    if len(places := [row["place"] for row in rows if row["place"] is not None]) > len(set(places)):
        notes.append(
            f"rows of one place{' and model' if any(map(is_of_model, _swept(rows))) else ''} are equal: "
            f"their bands of {'tokens' if is_of_money else 'days'} overlap"
        )
    if large := [_name(row) for row in every if is_large(row)]:
        notes.append(order_may_change(large))
    if any(row["protocol"].startswith("linux-tcp") for row in rows):
        notes.append(OWN_BACKENDS)
    if is_of_money:
        notes.append(MODEL_SIZE)
    if any(row["days"] is not None for row in rows):
        low, high = NETWORK_RANGE
        notes.append(
            f"bands: eight of ten measured runs communicated for {low} to {high} times as long as predicted"
        )
    notes.append("not known: the loss at this scale; steps to a loss may differ from strategy to strategy")
    return notes


def _stage_text(stage: Mapping[str, Any]) -> str:
    """A rank of a chain: its host, computing, memory, and bytes and dollars on the boundary to the next."""
    hourly, traffic = stage["dollars_per_hour"], stage["boundary_dollars"]
    return (
        f"{stage['host']} {stage['computing']:.0%} of computing, idle for {stage['idle']:.0%} of a step, "
        f"{format_bytes(stage['memory'])}, {format_bytes(stage['boundary_bytes'])}"
        + (f" for {traffic:.3g} dollars" if traffic else "")
        + " a step to and from the next"
        + (f", {hourly:g} dollars an hour" if hourly is not None else "")
    )


def algorithm_text(collectives: str | Mapping[str, str]) -> str:
    """`collectives` in few words.

    >>> algorithm_text("auto"), algorithm_text({"all_reduce": "ring"})
    ('auto', 'all_reduce=ring')
    """
    if not isinstance(collectives, Mapping):
        return collectives
    return ", ".join(f"{op}={name}" for op, name in collectives.items())


def _notes_of(row: Mapping[str, Any]) -> list[str]:
    """Notes on a row's limit, cheaper collectives, missing memory and crashes."""
    notes = [f"limited by {row['limit']['by']}; {row['limit']['remedy']}"]
    if (cheaper := row["cheaper"]) is not None:
        algorithms = " ".join(f"--set collectives.{op}={name}" for op, name in cheaper["collectives"].items())
        more = (cheaper["days"] - row["days"]) * 86_400
        notes.append(
            f"{algorithms} costs {cheaper['cost']:,.0f} dollars ({cheaper['egress']:,.0f} of it for "
            f"traffic) in {cheaper['days']:.3g} days: {row['cost'] - cheaper['cost']:,.2f} dollars less, "
            f"{format_seconds(abs(more))} {'later' if more >= 0 else 'sooner'}"
        )
    if row["fits"] is False:
        notes.append(_does_not_fit(row))
    if (crashes := row["failures"]) is not None:
        lost, number = crashes["tokens_lost_per_crash"], crashes.get("restarts")
        notes.append(
            f"{crashes['crashes_per_day']:.3g} crashes a day, each of which takes "
            + format_seconds(crashes["seconds_lost_per_crash"])
            + (f" and {lost:,.0f} tokens" if lost else "")
            + (
                f" ({number:,.{0 if number >= _FEW_DAYS else 2}f} restarts in all)"
                if number is not None
                else ""
            )
            + f": {crashes['times_as_long']:.3g} times as long as without, which tokens/s and days contain"
        )
    return [f"{_name_at(row)}: {note}" for note in notes]


def _does_not_fit(row: Mapping[str, Any]) -> str:
    needed, available = (format_bytes(round(row[key])) for key in ("memory_per_worker", "memory_available"))
    enough = "; or ".join(row["fits_with"]) or "none of the options of a plan"
    return f"does not fit: {needed} of a worker's {available}; enough would be {enough}"


def _grouped(
    lines: Sequence[Mapping[str, Any]], names: Sequence[str], *, short: bool
) -> list[list[Mapping[str, Any]]]:
    """Each line alone; `short`: grouped with those of the same two strategies at other points."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        key = tuple(line[name] for name in names)
        groups.setdefault(key if short else (*key, at_text(line["point"])), []).append(line)
    return list(groups.values())


def _crossing_notes(values: Mapping[str, Any], is_of_money: bool, *, short: bool) -> list[str]:
    """Break-even lines, and the better strategy of pairs without any."""
    notes = []
    leads = "has more tokens" if is_of_money else "is sooner"
    names = ("first", "second", "key", "sooner_below")
    for lines in _grouped(values["break_even"], names, short=short):
        line, found = lines[0], [each["at"] for each in lines]
        key, above = line["key"], line["sooner_above"]
        quantity = format_bits_per_second if key.endswith("bandwidth") else "{:.4g}".format
        places = " to ".join(dict.fromkeys(map(quantity, (min(found), max(found)))))
        notes.append(
            f"{line['sooner_below']} and {above} break even at {key} = {places}: "
            f"{above} {leads} beyond{_where(lines)}"
        )
    for lines in _grouped(values["sooner_throughout"], ("sooner", "later", "key"), short=short):
        sooner, later, key = (lines[0][name] for name in ("sooner", "later", "key"))
        if not (short and _is_of_variants(sooner, later)):
            notes.append(f"{sooner} {leads} than {later} at every {key} that was planned{_where(lines)}")
    return notes


def _is_of_variants(first: str, second: str) -> bool:
    """True if a line compares two variants of one strategy, which are named by their differences."""
    return "=" in first and "=" in second


def _where(lines: Sequence[Mapping[str, Any]]) -> str:
    point = lines[0]["point"]
    if not point:
        return ""
    return f" ({at_text(point)})" if len(lines) == 1 else f" (at {len(lines)} points)"


def _ratio_notes(lines: Sequence[Mapping[str, Any]], *, short: bool) -> list[str]:
    """Notes on ratios of steps; `short`: of variants, only those of the one that is most often faster."""
    notes = []
    best: dict[str, str] = {}
    for name, _ in Counter(line["faster"] for line in lines).most_common():
        best.setdefault(name.partition("=")[0], name)
    for those in _grouped(lines, ("faster", "slower"), short=short):
        faster, slower = those[0]["faster"], those[0]["slower"]
        ratios = sorted(line["steps_ratio"] for line in those)
        is_best = best[faster.partition("=")[0]] == faster
        if ratios[-1] < _ALIKE or (short and _is_of_variants(faster, slower) and not is_best):
            continue
        text = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1])))
        notes.append(
            f"{faster} stays ahead of {slower} while it needs less than {text} times the steps{_where(those)}"
        )
    return notes


# --- output ---------------------------------------------------------------------------------------------------


_TABLE_WIDTH, _LEAST_WIDTH, _LIMIT_WIDTH = 240, 16, 32


def print_table(
    rows: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
    title: str = "",
    facts: Sequence[tuple[str, str]] = (),
) -> None:
    """Print plans as a table, then remedies, remarks and break-even lines; of many points, those of the best.

    Args:
        rows: plans.
        values: `break_even`, `sooner_throughout` and `step_ratios`.
        title: model and network.
        facts: names and values that all plans share.
    """
    columns, cells = _table(rows)
    table = Table(box=None, pad_edge=False)
    for place, column in enumerate(columns):
        is_left = column in ("strategy", "limit") or place < len(_swept(rows))
        is_text = column in ("strategy", "limit")  # no line breaks inside a time or a band
        table.add_column(
            column,
            justify="left" if is_left else "right",
            no_wrap=not is_text,
            min_width=min(_LEAST_WIDTH, max((len(line[place]) for line in cells), default=0))
            if is_text
            else None,
            max_width=_LIMIT_WIDTH if is_text else None,
        )
    for row_of_cells in cells:
        table.add_row(*row_of_cells)
    console = plain_console(_TABLE_WIDTH)
    for line in [title, *(f"{name}: {value}" for name, value in facts)]:
        console.print(line, soft_wrap=True, highlight=False)
    console.print(table)
    for line in _notes(rows, values, short=True):
        console.print(line, soft_wrap=True, highlight=False)


def write_page(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    values: Mapping[str, Any],
    title: str,
    facts: Sequence[tuple[str, str]],
    plain: Any,
) -> None:
    """`plan.json`, `plan.html` (which needs no other file) and `utilisation.png` in `folder`, which is made.

    Args:
        folder: where.
        rows, values, title, facts: see `print_table`.
        plain: content of `plan.json`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    picture = Picture(_plot(rows, 7.0, 3), _plot(rows, 4.2, 1))
    (folder / "utilisation.png").write_bytes(picture.wide)
    columns, cells = _table(rows)
    page = Page(
        title,
        facts,
        verdict="",
        results=ResultTable(columns, [(False, [_in_lines(cell) for cell in line]) for line in cells]),
        note="",
        figures=[Figure("Compute utilisation.", picture)],
        notes=_notes(rows, values),
    )
    (folder / "plan.html").write_text(render_page(page), encoding="utf-8")


def _in_lines(cell: str) -> str:
    """Cell with its band, steps and named links on separate lines."""
    lines = cell.replace(" (", "\n(").replace(" / ", " /\n").splitlines()
    return "\n".join(textwrap.fill(line, _WIDEST, break_on_hyphens=False) for line in lines)


def _plot(rows: Sequence[Mapping[str, Any]], inches: float, panels_a_row: int) -> bytes:
    """PNG of the utilisation over a swept quantity, one line per strategy; bars without a sweep."""
    from matplotlib.figure import Figure as Plot

    keys = list(_swept(rows))
    values = {key: len({row["point"][key] for row in rows}) for key in keys if is_axis(rows, key)}
    # A bandwidth, else the quantity with most values.
    axis = max(values, key=lambda key: (key.endswith("bandwidth"), values[key]), default=None)
    shown = _once(rows)[::-1]
    figure = Plot(figsize=(inches, 0.8 + 0.3 * len(shown)), layout="constrained", dpi=110)
    if axis is None:
        axes = figure.subplots()
        labels = [", ".join(filter(None, [row["name"], _point(row)])) for row in shown]
        axes.barh(labels, [row["compute_utilisation"] for row in shown])
        axes.set_xlabel("compute utilisation")
        axes.set_xlim(0, 1.02)
    else:
        _draw_panels(figure, rows, keys, axis, panels_a_row)
    file = io.BytesIO()
    figure.savefig(file, metadata={"Software": None})
    return file.getvalue()


def _draw_panels(
    figure: Any, rows: Sequence[Mapping[str, Any]], keys: Sequence[str], axis: str, panels_a_row: int
) -> None:
    """Draw a panel for each value of one other key, with a line for each strategy and value of the remaining keys."""
    others = [key for key in keys if key != axis]
    apart = min(others, key=lambda key: len({row["point"][key] for row in rows}), default=None)
    panels: dict[str, dict[str, dict[float, float]]] = {}
    for row in rows:
        own = {key: row["point"][key] for key in others if key != apart and concerns(row, key)}
        title = "" if apart is None else at_text({apart: row["point"][apart]})
        lines = panels.setdefault(title, {})
        points = lines.setdefault(", ".join(filter(None, [row["name"], at_text(own)])), {})
        points[number(row["point"][axis])] = row["compute_utilisation"]
    width = min(len(panels), panels_a_row)
    height = -(-len(panels) // width)
    legend_inches = 0.15 * max(map(len, panels.values()))
    figure.set_size_inches(max(4.2 * width, figure.get_figwidth()), (3.6 + legend_inches) * height)
    for place, (title, lines) in enumerate(panels.items(), start=1):
        axes = figure.add_subplot(height, width, place)
        axes.set_prop_cycle(color=COLOURS)
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=name)
        axes.set_xscale("log")
        axes.set_xlabel(short_keys(keys)[axis] + (" (bit/s)" if axis.endswith("bandwidth") else ""))
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("compute utilisation")
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.2))
