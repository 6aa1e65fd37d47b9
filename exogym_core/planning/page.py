"""Plans as a table for terminals, and as a page with plots."""

from __future__ import annotations

import base64
import html
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from rich.table import Table

from exogym_core.cli.run_commands import stdout
from exogym_core.names import visible
from exogym_core.planning.sweep import concerns, is_axis, is_of_model, number, short_keys, step_ratio_lines
from netsim.units import format_bits_per_second, format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["MODEL_SIZE", "placement_text", "print_table", "short_tokens", "write_page"]

_COLUMNS = (
    "strategy",
    "place",
    "step",
    "round",
    "utilisation",
    "MFU",
    "tokens/s",
    "days",
    "dollars",
    "sent a worker and round",
    "memory",
    "limit",
)

_OF_MONEY = ("tokens", "tokens a parameter")  # further columns, where a budget is dollars

_ALIKE = 1.005  # a ratio of steps that rounds to one says nothing
MODEL_SIZE = (
    "model size: computing is spent best at about 20 tokens a parameter (Hoffmann et al. 2022, arXiv 2203.15556); with "
    "fewer a smaller model would reach a lower loss for the money, with more a larger one: compare with another --model"
)
_PANELS_A_ROW = 3
_FEW_DAYS = 10
_MOST_NAMED = 3
_MOST_SITES = 8


def _columns(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Columns of a table; with tokens where they are what a budget of dollars pays for."""
    is_of_money = any(row["tokens_low"] is not None for row in rows)
    return _COLUMNS[:2] + _OF_MONEY + _COLUMNS[2:] if is_of_money else _COLUMNS


def _tokens_cells(row: Mapping[str, Any]) -> list[str]:
    if row["tokens_low"] is None:
        return ["-", "-"]
    tokens, low, high = (short_tokens(row[name]) for name in ("tokens", "tokens_low", "tokens_high"))
    return [f"{tokens} ({low} to {high})", f"{row['tokens_per_parameter']:.3g}"]


def short_tokens(number: float) -> str:
    """A large number of tokens.

    >>> short_tokens(201.4e9), short_tokens(3.2e12), short_tokens(5e5)
    ('201B', '3.2T', '0.5M')
    """
    scale, unit = next(
        ((size, unit) for size, unit in ((1e12, "T"), (1e9, "B")) if number >= size), (1e6, "M")
    )
    return f"{number / scale:,.3g}{unit}"


def _cells(row: dict[str, Any], columns: Sequence[str]) -> list[str]:
    days, cost = row["days"], row["cost"]
    return [
        visible(row["name"], 40),
        "-" if row["place"] is None else str(row["place"]),
        *(_tokens_cells(row) if _OF_MONEY[0] in columns else ()),
        format_seconds(row["seconds_per_step"]),
        _round(row),
        f"{row['compute_utilisation']:.1%}",
        _mfu(row),
        f"{row['tokens_per_second']:,.0f}",
        "-" if days is None else _in_days(days) + _band(row, "days"),
        "-" if cost is None else f"{cost:,.0f}" + _band(row, "cost") + _egress(row),
        format_bytes(round(row["bytes_per_worker"])) + (" expected" if row["expected_bytes"] else ""),
        format_bytes(row["memory_per_worker"]) + (" (too much)" if row["fits"] is False else ""),
        row["limit"]["by"],
    ]


def _in_days(days: float) -> str:
    return f"{days:,.1f}" if days >= _FEW_DAYS else f"{days:.3g}"


def _band(row: Mapping[str, Any], name: str) -> str:
    """The band of a row's days or cost, in brackets."""
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    shown = [_in_days(end) if name == "days" else f"{end:,.0f}" for end in (low, high)]
    if shown[0] == shown[1]:
        return ""
    return f" ({shown[0]} to {shown[1]})"


def placement_text(workers: Mapping[str, int]) -> str:
    """Number of workers at each site, or of sites where there are many.

    >>> placement_text({"eu": 2, "us": 1}), placement_text({f"home{i}": 1 for i in range(20)})
    ('eu 2, us 1', '20 sites, 1 each')
    """
    if len(workers) <= _MOST_SITES:
        return ", ".join(f"{site} {number}" for site, number in workers.items())
    ends = dict.fromkeys((min(workers.values()), max(workers.values())))
    return f"{len(workers)} sites, {' to '.join(map(str, ends))} each"


def _round(row: Mapping[str, Any]) -> str:
    number = "" if row["rounds"] is None else f" x {row['rounds']:,}"
    steps = row["steps_per_round"]
    return f"{format_seconds(row['seconds_per_round'])} / {format_count(steps, 'step')}{number}"


def _mfu(row: Mapping[str, Any]) -> str:
    """Model FLOP utilisation of the sites, from the least to the most."""
    found = [f"{share:.1%}" for share in sorted(row["mfu"].values())]
    return " to ".join(dict.fromkeys((found[0], found[-1]))) if found else "-"


def _egress(row: Mapping[str, Any]) -> str:
    """Share of a row's dollars that is for traffic."""
    if _is_egress_only(row):
        return " (egress only)"
    egress = row["cost_by"].get("egress")
    return f" ({egress:,.0f} egress)" if egress else ""


def _is_egress_only(row: Mapping[str, Any]) -> bool:
    """True if the dollars are for traffic alone."""
    return row["cost"] is not None and row["cost_by"].get("workers") is None


def _swept(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Swept keys, each with the name of its column."""
    return short_keys(rows[0].get("point", {})) if rows else {}


def _values(row: dict[str, Any], keys: Mapping[str, str]) -> list[str]:
    """Value of each swept key, or `any` where it cannot change this strategy."""
    return [row["point"][key] if concerns(row, key) else "any" for key in keys]


def _once(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by strategy, without those that say of one what another has said of it already."""
    keys = _swept(rows)
    if not keys:
        return list(rows)
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        found.setdefault((row["name"], *_values(row, keys)), row)
    names = list(dict.fromkeys(row["name"] for row in rows))
    return sorted(found.values(), key=lambda row: names.index(row["name"]))


def _at(point: Mapping[str, str]) -> str:
    """A point in few words, such as `H=100, codec=int8`."""
    return ", ".join(f"{name}={point[key]}" for key, name in short_keys(point).items())


def _point(row: dict[str, Any]) -> str:
    return _at({key: value for key, value in row.get("point", {}).items() if concerns(row, key)})


def print_table(rows: Sequence[dict[str, Any]], plain: Any, about: Sequence[str] = ()) -> None:
    """Table of plans, one row each, then remedies, remarks, and break-even lines; of many points those of the best.

    Args:
        rows: plans.
        plain: the same with lines of break-even, where something was swept.
        about: lines that say what is planned.
    """
    keys = _swept(rows)
    table = Table(box=None, pad_edge=False)
    columns = _columns(rows)
    for column in [*keys.values(), *columns]:
        left = column in ("strategy", "limit") or column in keys.values()
        table.add_column(column, justify="left" if left else "right")
    for row in _once(rows):
        table.add_row(*_values(row, keys), *_cells(row, columns))
    console = stdout(180)
    for line in about:
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(table)
    for text in _notes(rows, plain, short=True):
        console.print(text, soft_wrap=True, markup=False, highlight=False)


def _notes(rows: Sequence[dict[str, Any]], plain: Any, *, short: bool = False) -> list[str]:
    """Notes on plans; `short`: of a strategy's points, on the soonest alone."""
    shown = _once(rows)
    if short and _swept(rows):
        shown = _soonest(shown)
    notes = [note for row in shown for note in _notes_of(row)] + _remarks(shown)
    if isinstance(plain, dict):
        notes += _crossing_notes(plain, short=short)
    notes += _ratio_notes(step_ratio_lines(rows), short=short)
    if short and len(shown) < len(_once(rows)):
        notes.append(
            "limits and remarks are those of each strategy's soonest point, and of variants the soonest with the "
            "others; --json and the page of --out have all"
        )
    if any(_is_egress_only(row) for row in shown):
        notes.append(
            "dollars: traffic that links charge for alone; --price DOLLARS, of a worker's hour, adds theirs"
        )
    notes.append(_memory_note(shown))
    is_of_money = any(row["tokens_low"] is not None for row in rows)
    if len(places := [row["place"] for row in rows if row["place"] is not None]) > len(set(places)):
        notes.append(
            f"rows of one place{' and model' if any(map(is_of_model, _swept(rows))) else ''} are equal: "
            f"their bands of {'tokens' if is_of_money else 'days'} overlap"
        )
    if is_of_money:
        notes.append(MODEL_SIZE)
    notes.append("not known: the loss at this scale; steps to a loss may differ from strategy to strategy")
    return notes


def _remarks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Each remark once, with the plans of which it is made."""
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        point = _point(row)
        for remark in row["remarks"]:
            name = visible(row["name"], 40) + (f" at {point}" if point else "")
            names.setdefault(visible(remark, 1000), {})[name] = None
    lines = []
    for remark, of in names.items():
        text = "all plans" if 1 < len(rows) == len(of) else "; ".join(list(of)[:_MOST_NAMED])
        more = f" and {len(of) - _MOST_NAMED} more" if text != "all plans" and len(of) > _MOST_NAMED else ""
        lines.append(f"{text}{more}: {remark}")
    return lines


def _memory_note(rows: Sequence[Mapping[str, Any]]) -> str:
    """Contents of memory, and its size by choice, for the row that needs most."""
    most = max(rows, key=lambda row: row["memory_per_worker"])
    parts = ", ".join(
        f"{name} {format_bytes(size)}" for name, size in most["memory"].items() if name != "total"
    )
    others = ", ".join(f"{name} {format_bytes(size)}" for name, size in most["memory_with"].items())
    return f"memory: {parts} ({visible(most['name'], 40)}); in all with --memory {others}"


def _span(seconds: float) -> str:
    return f"{format_seconds(abs(seconds))} {'later' if seconds >= 0 else 'sooner'}"


def _soonest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["name"] not in best or row["tokens_per_second"] > best[row["name"]]["tokens_per_second"]:
            best[row["name"]] = row
    return list(best.values())


def _notes_of(row: dict[str, Any]) -> list[str]:
    point = _point(row)
    name = visible(row["name"], 40) + (f" at {point}" if point else "")
    notes = [f"{name}: limited by {row['limit']['by']}; {row['limit']['remedy']}"]
    if row["cheaper"] is not None:
        found = row["cheaper"]
        ways = ", ".join(f"{op}={name}" for op, name in found["collectives"].items())
        notes.append(
            f"{name}: --set collectives.{ways} costs {found['cost']:,.0f} dollars ({found['egress']:,.0f} of it for "
            f"traffic) in {found['days']:.3g} days: {row['cost'] - found['cost']:,.2f} dollars less, "
            f"{_span((found['days'] - row['days']) * 86_400)}"
        )
    if row["fits"] is False:
        notes.append(
            f"{name}: does not fit: a worker's devices have {format_bytes(round(row['memory_available']))}; "
            "more devices a worker, or shard or offload states"
        )
    if row.get("failures") is not None:
        found = row["failures"]
        text = f"{name}: {found['crashes_per_day']:.3g} crashes a day, each of which takes "
        text += format_seconds(found["seconds_lost_per_crash"])
        if found["tokens_lost_per_crash"]:
            text += f" and {found['tokens_lost_per_crash']:,.0f} tokens"
        if "restarts" in found:
            text += f" ({found['restarts']:,.0f} restarts in all)"
        notes.append(
            f"{text}: {found['times_as_long']:.3g} times as long as without, which tokens/s and days contain"
        )
    return notes


def _grouped(
    lines: Sequence[dict[str, Any]], names: Sequence[str], *, short: bool
) -> list[list[dict[str, Any]]]:
    """Lines one by one; `short`: with those of the same two at other points."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for line in lines:
        key = tuple(line[name] for name in names)
        groups.setdefault(key if short else (*key, _at(line["point"])), []).append(line)
    return list(groups.values())


def _crossing_notes(plain: Mapping[str, Any], *, short: bool) -> list[str]:
    """Break-even lines, and the faster strategy of pairs without any."""
    notes = []
    names = ("first", "second", "key", "sooner_below")
    for lines in _grouped(plain["break_even"], names, short=short):
        line, found = lines[0], [each["at"] for each in lines]
        places = dict.fromkeys(_quantity(line["key"], value) for value in (min(found), max(found)))
        notes.append(
            f"{line['sooner_below']} and {line['sooner_above']} break even at {line['key']} = {' to '.join(places)}: "
            f"{line['sooner_above']} is sooner beyond{_where(lines)}"
        )
    for lines in _grouped(plain["sooner_throughout"], ("sooner", "later", "key"), short=short):
        line = lines[0]
        if short and _is_of_variants(line["sooner"], line["later"]):
            continue
        notes.append(
            f"{line['sooner']} is sooner than {line['later']} at every {line['key']} that was planned{_where(lines)}"
        )
    return notes


def _is_of_variants(first: str, second: str) -> bool:
    """True if a line compares two variants of one strategy, which are named by their differences."""
    return "=" in first and "=" in second


def _quantity(key: str, value: float) -> str:
    return format_bits_per_second(value) if key.endswith("bandwidth") else f"{value:.4g}"


def _where(lines: Sequence[Mapping[str, Any]]) -> str:
    point = lines[0]["point"]
    if not point:
        return ""
    return f" ({_at(point)})" if len(lines) == 1 else f" (at {len(lines)} points)"


def _ratio_notes(lines: Sequence[dict[str, Any]], *, short: bool) -> list[str]:
    """Ratios of steps; `short`: of variants those of the one that is most often the sooner alone."""
    notes = []
    often = Counter(line["faster"] for line in lines)
    best: dict[str, str] = {}
    for name, _ in often.most_common():
        best.setdefault(name.partition("=")[0], name)
    for those in _grouped(lines, ("faster", "slower"), short=short):
        faster, slower = those[0]["faster"], those[0]["slower"]
        if short and _is_of_variants(faster, slower) and best[faster.partition("=")[0]] != faster:
            continue
        ratios = sorted(line["steps_ratio"] for line in those)
        if ratios[-1] < _ALIKE:
            continue
        text = " to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1])))
        notes.append(
            f"{faster} stays ahead of {slower} while it needs less than {text} times the steps{_where(those)}"
        )
    return notes


_STYLE = (
    "body{font:16px/1.45 system-ui,sans-serif;margin:1.5em auto;padding:0 1em;max-width:75em}h1{font-size:1.5em}"
    "table{border-collapse:collapse}th,td{padding:.25em .7em;text-align:right;border-bottom:1px solid #ddd}"
    "th:first-child,td:first-child{text-align:left}img{max-width:100%;height:auto}"
    "li{margin:.4em 0;overflow-wrap:anywhere}"
    "@media(max-width:60em){table,tbody,tr,td{display:block}tr{margin-bottom:1em}tr.head{display:none}"
    "td{text-align:left;border:0;overflow-wrap:anywhere}td::before{content:attr(data-of) ': ';color:#666}"
    "td:first-child{font-weight:bold}}"
)


def write_page(
    folder: Path, rows: Sequence[dict[str, Any]], plain: Any, about: Sequence[str] = ("Plan",)
) -> None:
    """`plan.json`, `plan.html` (which needs no other file) and `utilisation.png` in `folder`, which is made.

    Args:
        folder: where.
        rows, plain: as of `print_table`.
        about: the page's title, and lines below it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    plot = folder / "utilisation.png"
    _plot(plot, rows)
    keys = _swept(rows)
    named = _columns(rows)
    columns = [html.escape(column) for column in (*keys.values(), *named)]
    body = "".join(
        "<tr>"
        + "".join(
            f"<td data-of='{column}'>{html.escape(cell)}</td>"
            for column, cell in zip(columns, (*_values(row, keys), *_cells(row, named)), strict=True)
        )
        + "</tr>"
        for row in _once(rows)
    )
    title, *lines = (html.escape(line) for line in about)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in _notes(rows, plain))
    picture = base64.b64encode(plot.read_bytes()).decode("ascii")
    page = (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title>"
        f"<meta name='viewport' content='width=device-width,initial-scale=1'><style>{_STYLE}</style>"
        f"<h1>{title}</h1>{''.join(f'<p>{line}</p>' for line in lines)}"
        f"<table><tr class='head'>{''.join(f'<th>{column}</th>' for column in columns)}</tr>{body}</table>"
        f"<p><img src='data:image/png;base64,{picture}' alt='compute utilisation'></p><ul>{notes}</ul></html>\n"
    )
    (folder / "plan.html").write_text(page, encoding="utf-8")


def _plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Utilisation against what was swept, a line a strategy; bars where nothing was."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    keys = list(_swept(rows))
    axis = _axis(rows, keys)
    if axis is None:
        figure, axes = plt.subplots(figsize=(7, 4))
        labels = [", ".join([row["name"], *filter(None, [_point(row)])]) for row in _once(rows)]
        axes.barh(labels[::-1], [row["compute_utilisation"] for row in _once(rows)][::-1])
        axes.set_xlabel("compute utilisation")
        axes.set_xlim(0, 1.02)
    else:
        figure = _panels(plt, rows, keys, axis)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _axis(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> str | None:
    """The swept quantity that goes along: a bandwidth, else what has most values; None where none is a quantity."""
    found = {key: len({row["point"][key] for row in rows}) for key in keys if is_axis(rows, key)}
    return max(found, key=lambda key: (key.endswith("bandwidth"), found[key]), default=None)


def _panels(plt: Any, rows: Sequence[dict[str, Any]], keys: Sequence[str], axis: str) -> Any:
    """A panel for each value of one other key, in it a line for each strategy and value of the rest."""
    others = [key for key in keys if key != axis]
    apart = min(others, key=lambda key: len({row["point"][key] for row in rows}), default=None)
    values = list(dict.fromkeys(row["point"][apart] for row in rows)) if apart is not None else [None]
    rest = [key for key in others if key != apart]
    width = min(len(values), _PANELS_A_ROW)
    height = -(-len(values) // width)
    figure, grid = plt.subplots(
        height, width, figsize=(max(4.2 * width, 7), 3.6 * height), sharey=True, squeeze=False
    )
    for axes, value in zip(grid.flat, values, strict=False):
        lines: dict[str, dict[float, float]] = {}
        for row in rows:
            if apart is None or row["point"][apart] == value:
                own = {key: row["point"][key] for key in rest if concerns(row, key)}
                name = ", ".join([row["name"], *filter(None, [_at(own)])])
                lines.setdefault(name, {})[number(row["point"][axis])] = row["compute_utilisation"]
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points.items()), strict=True), marker="o", label=name)
        axes.set_xscale("log")
        axes.set_xlabel(short_keys(keys)[axis] + (" (bit/s)" if axis.endswith("bandwidth") else ""))
        axes.set_title("" if apart is None else _at({apart: str(value)}), fontsize=9)
        axes.legend(fontsize=7)
    for axes in list(grid.flat)[len(values) :]:
        axes.set_visible(False)
    for row_of_axes in grid:
        row_of_axes[0].set_ylabel("compute utilisation")
    grid[0][0].set_ylim(0, 1.02)
    return figure
