"""Plans as a table for terminals, and as a page with plots."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

from rich.table import Table

from exogym_core.app.runs import stdout
from exogym_core.names import visible
from netsim.files.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["print_table", "write_page"]

_COLUMNS = (
    "strategy",
    "step",
    "round",
    "utilisation",
    "tokens/s",
    "days",
    "dollars",
    "sent a worker and round",
    "memory",
    "limit",
)


def _cells(row: dict[str, Any]) -> list[str]:
    days, cost = row["days"], row["cost"]
    return [
        visible(row["name"], 40),
        format_seconds(row["seconds_per_step"]),
        f"{format_seconds(row['seconds_per_round'])} / {row['steps_per_round']} steps",
        f"{row['compute_utilisation']:.1%}",
        f"{row['tokens_per_second']:,.0f}",
        "-" if days is None else f"{days:,.1f}",
        "-" if cost is None else f"{cost:,.0f}",
        format_bytes(round(row["bytes_per_worker"])) + (" expected" if row["expected_bytes"] else ""),
        format_bytes(row["memory_per_worker"]) + (" (too much)" if row["fits"] is False else ""),
        row["limit"]["by"],
    ]


def _point(row: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in row.get("point", {}).items())


def print_table(rows: Sequence[dict[str, Any]], plain: Any) -> None:
    """One row a plan, then remedies, remarks, and break-even lines."""
    table = Table(box=None, pad_edge=False)
    swept = any("point" in row for row in rows)
    for column in [*(["at"] if swept else []), *_COLUMNS]:
        table.add_column(column, justify="left" if column in ("at", "strategy", "limit") else "right")
    for row in rows:
        table.add_row(*([_point(row)] if swept else []), *_cells(row))
    console = stdout(180)
    console.print(table)
    for text in _notes(rows, plain):
        console.print(text, soft_wrap=True, markup=False, highlight=False)


def _notes(rows: Sequence[dict[str, Any]], plain: Any) -> list[str]:
    notes = []
    for row in rows:
        at = f" at {_point(row)}" if "point" in row else ""
        name = visible(row["name"], 40)
        notes.append(f"{name}{at}: limited by {row['limit']['by']}; {row['limit']['remedy']}")
        if row["fits"] is False:
            notes.append(
                f"{name}{at}: does not fit: a worker's devices have {format_bytes(round(row['memory_available']))}; "
                "more devices a worker, or shard or offload states"
            )
        notes += [f"{name}{at}: {visible(remark)}" for remark in row["remarks"]]
    if isinstance(plain, dict):
        notes += [
            f"{line['first']} and {line['second']} break even at {line['key']} = {line['at']:.4g}"
            for line in plain["break_even"]
        ]
        notes += [
            f"{line['faster']} stays ahead of {line['slower']} while it needs less than "
            f"{line['steps_ratio']:.2f} times the steps ({_point(line) or 'here'})"
            for line in plain["step_ratios"]
        ]
    else:
        for line in _ratios(rows):
            notes.append(line)
    notes.append("memory: weights, gradients and states; activations are not counted")
    notes.append("not known: the loss at this scale; steps to a loss may differ from strategy to strategy")
    return notes


def _ratios(rows: Sequence[dict[str, Any]]) -> list[str]:
    from exogym_core.planning.sweep import step_ratio_lines

    return [
        f"{line['faster']} stays ahead of {line['slower']} while it needs less than {line['steps_ratio']:.2f} "
        "times the steps"
        for line in step_ratio_lines(rows)
    ]


def write_page(folder: Path, rows: Sequence[dict[str, Any]], plain: Any) -> None:
    """`plan.json`, `plan.html` and `utilisation.png` in `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    _plot(folder / "utilisation.png", rows)
    head = "".join(f"<th>{html.escape(column)}</th>" for column in ("at", *_COLUMNS))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in (_point(row), *_cells(row))) + "</tr>"
        for row in rows
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in _notes(rows, plain))
    page = (
        "<!doctype html><meta charset='utf-8'><title>Plan</title>"
        "<style>body{font-family:sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}</style>"
        f"<h1>Plan</h1><table><tr>{head}</tr>{body}</table><p><img src='utilisation.png' alt='compute "
        f"utilisation'></p><ul>{notes}</ul>\n"
    )
    (folder / "plan.html").write_text(page, encoding="utf-8")


def _plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Utilisation against what was swept, a line a strategy; bars where nothing was."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    if not any("point" in row for row in rows):
        axes.bar([row["name"] for row in rows], [row["compute_utilisation"] for row in rows])
    else:
        lines: dict[str, list[tuple[str, float]]] = {}
        for row in rows:
            *rest, last = row["point"].items()
            name = ", ".join([row["name"], *(f"{key}={value}" for key, value in rest)])
            lines.setdefault(name, []).append((last[1], row["compute_utilisation"]))
            axes.set_xlabel(last[0])
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.legend(fontsize=7)
    axes.set_ylabel("compute utilisation")
    axes.set_ylim(0, 1.02)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
