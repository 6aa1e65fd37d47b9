"""A launched run for people: lines and tables on a console, and its page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from exogym_core.names import visible
from exogym_core.results.report.document import Listing, Page, TextTable, encoded, render_page
from exogym_core.results.report.network import draw_network, network_matrix
from exogym_core.torch_backend.report import LaunchReport
from netsim.files.errors import InputError
from netsim.files.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from exogym_core.results.record import RunFolder

__all__ = ["page_of_launch", "read_launch", "show_summary", "write_launch"]

_FILE = "launch.json"
_MOST_ROWS = 12  # of a table on a console; the file and the page have all
_TRACE = "trace.json.gz"
_MOST_EMBEDDED_BYTES = 1_500_000  # a larger trace is a file alongside the page
_CALL_HEADINGS = ("at", "call", "calls", "bytes each", "waiting for others", "network")
_SOURCES = {"option": "--protocol", "topology": "the topology's", "default": "by default"}
_ENDINGS = {
    "finished": "",
    "until": "cut at --until",
    "interrupted": "interrupted: the answer so far",
    "failed": "failed: the answer so far",
}


def write_launch(folder: RunFolder, report: LaunchReport) -> None:
    """Write a launched run's report and page into its folder."""
    folder.write_text(_FILE, report.model_dump_json(indent=2) + "\n")
    folder.write_text("report.html", page_of_launch(folder.path, report))


def read_launch(path: Path) -> LaunchReport:
    """The report that lies in a run folder.

    Raises:
        InputError: it is damaged, or of another version.
    """
    file = path / _FILE
    try:
        return LaunchReport.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValidationError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise InputError(f"{visible(file)}: is no report of a launched run: {visible(first, 300)}") from None


def _facts(report: LaunchReport) -> list[tuple[str, str]]:
    """Basis of the figures: network, protocol, algorithms, placement, compute."""
    algorithms = "; ".join(f"{op}: {', '.join(names)}" for op, names in report.algorithms.items()) or "none"
    by = "the fastest of each call" if report.algorithms_from == "auto" else report.algorithms_from
    startup = max((rank.startup_seconds for rank in report.ranks), default=0.0)
    facts = [
        ("script", visible(" ".join([report.script, *report.arguments]), 200)),
        ("ranks", str(report.num_ranks)),
        ("network", visible(str(report.topology.get("name", "")), 80)),
        ("protocol", f"{report.protocol} ({_SOURCES[report.protocol_from]})"),
        ("algorithms", f"{algorithms} ({by})"),
        ("placement", _placement(report.placement)),
        (
            "compute",
            report.compute + (", CUDA devices stood in for by the CPU" if report.cuda_as_cpu else ""),
        ),
        ("start-up", f"{format_seconds(startup)} before init_process_group, not counted"),
    ]
    if report.uncharged:
        facts.append(("not charged", ", ".join(map(visible, report.uncharged))))
    return facts


def _placement(hosts: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(f"{rank} on {visible(host, 40)}" for rank, host in enumerate(hosts[:most]))
    return shown + (f" and {len(hosts) - most} more" if len(hosts) > most else "")


def _verdict(report: LaunchReport) -> str:
    """Shares of the time, in a sentence."""
    whole = format_seconds(report.virtual_seconds)
    parts = [
        f"{name} {_share(report, field)}"
        for name, field in (
            ("compute", "computing_seconds"),
            ("wait for others", "waiting_seconds"),
            ("wait for the network", "network_seconds"),
        )
    ]
    ending = f" ({_ENDINGS[report.ending]})" if _ENDINGS[report.ending] else ""
    last = f"; rank {report.slowest_rank} ended last" if report.ending == "finished" else ""
    return f"{whole} of virtual time{ending}: ranks {', '.join(parts)} of it{last}."


def _share(report: LaunchReport, field: str) -> str:
    whole = report.virtual_seconds
    return f"{report.mean_seconds(field) / whole if whole else 0.0:.1%}"


def _steady(report: LaunchReport) -> str:
    steady = report.steady_state
    if steady is None:
        return ""
    return (
        f"A step takes {format_seconds(steady.seconds)} after the first one: computing "
        f"{format_seconds(steady.computing_seconds)}, waiting for others {format_seconds(steady.waiting_seconds)}, "
        f"network {format_seconds(steady.network_seconds)} (means over {steady.steps} step{'s' * (steady.steps > 1)}, "
        f"told by {steady.told_by})."
    )


def _calls(report: LaunchReport) -> list[tuple[str, ...]]:
    return [
        (
            visible(each.place, 80),
            each.op,
            f"{each.calls:.10g}",
            format_bytes(round(each.bytes_per_call)) if each.calls else "-",
            format_seconds(each.waiting_seconds),
            format_seconds(each.network_seconds),
        )
        for each in report.calls
    ]


def _links(report: LaunchReport) -> list[tuple[str, ...]]:
    links = sorted(report.link_bytes.items(), key=lambda item: -item[1])
    return [(visible(name, 80), format_bytes(count)) for name, count in links]


def show_summary(report: LaunchReport, console: Console) -> None:
    """Print what a run came to; nothing, where nothing was simulated."""
    if not report.calls:
        return
    console.print()
    for name, value in _facts(report):
        console.print(Text(f"{name:<12}{value}"), soft_wrap=True)
    console.print()
    for line in filter(None, (_verdict(report), _steady(report))):
        console.print(Text(line), soft_wrap=True)
    _show_table(console, _CALL_HEADINGS, _calls(report), "Seconds and calls are means over ranks.")
    _show_table(console, ("link", "bytes"), _links(report))


def _show_table(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> None:
    if not rows:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 or heading == "call" else "right")
    for row in rows[:_MOST_ROWS]:
        table.add_row(*map(Text, row))
    console.print()
    console.print(table)
    more = f"and {len(rows) - _MOST_ROWS} more" if len(rows) > _MOST_ROWS else ""
    for line in filter(None, (more, note)):
        console.print(Text(line))


def page_of_launch(path: Path, report: LaunchReport) -> str:
    """The HTML page of the launched run whose folder is `path`."""
    return render_page(_page(path, report))


def _page(path: Path, report: LaunchReport) -> Page:
    trace = path / _TRACE
    name = Path(report.script).name
    return Page(
        title=f"{visible(name, 60)} on {visible(str(report.topology.get('name', '')), 60)}",
        facts=_facts(report),
        verdict=" ".join(filter(None, (_verdict(report), _steady(report), _error(report)))),
        headings=list(_CALL_HEADINGS),
        rows=[(False, cells) for cells in _calls(report)],
        note=(
            "Where the script called, and waited: seconds and calls are means over ranks. Waiting for others ends when "
            "the last member has come; the rest is the network's."
        ),
        status="" if report.ending == "finished" else "This run was stopped before its end.",
        tables=[_ranks_table(report), _links_table(report)],
        network=network_matrix(report.topology),
        drawings=draw_network(report.topology),
        trace=(_TRACE, encoded(trace.read_bytes()) if trace.stat().st_size <= _MOST_EMBEDDED_BYTES else None)
        if trace.is_file()
        else None,
        experiments=[Listing(_FILE, report.model_dump_json(indent=2))],
    )


def _error(report: LaunchReport) -> str:
    return f"It ended with: {visible(report.error, 500)}" if report.error else ""


def _ranks_table(report: LaunchReport) -> TextTable:
    fields = ("virtual", "computing", "waiting", "network", "startup")
    return TextTable(
        "Ranks",
        [
            "rank",
            "host",
            "ended",
            "computing",
            "waiting for others",
            "network",
            "start-up",
            "bytes sent",
            "steps",
        ],
        [
            (
                str(rank.rank),
                [
                    visible(rank.host, 40),
                    *(format_seconds(getattr(rank, f"{field}_seconds")) for field in fields),
                    format_bytes(rank.bytes_sent),
                    str(rank.steps),
                ],
            )
            for rank in report.ranks
        ],
        "Seconds of virtual time from init_process_group on; start-up before it is not counted.",
    )


def _links_table(report: LaunchReport) -> TextTable:
    rows = [(name, [count]) for name, count in _links(report)]
    return TextTable("Links", ["link", "bytes"], rows, f"To other regions: {format_bytes(report.wan_bytes)}.")
