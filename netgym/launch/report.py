"""Report of a launched run, as `launch.json` holds it, as text, and as a page."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
from pydantic import BaseModel, ConfigDict, Field
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from exogym_core.communicator.exchange import rank_names
from exogym_core.cost.devices import find_device
from exogym_core.names import visible
from exogym_core.results.disk import write_whole
from exogym_core.results.report.network import NetworkSection
from exogym_core.results.report.page import Listing, Page, TextTable, render_page, trace_of
from exogym_core.results.report.table import ResultTable
from netgym.launch.launched import Clock  # noqa: TC001 (pydantic reads it)
from netsim.cli.terminal import PLAIN_WIDTH, plain_console
from netsim.errors import InputError
from netsim.files.plain_files import read_bytes
from netsim.topology.protocol import unlimited_cores
from netsim.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from exogym_core.communicator.simulated.simulation import Simulation
    from exogym_core.results.run_folder import RunFolder
    from netgym.launch.call_sites import CallSite, CallSites, RankCalls, SiteTotals

__all__ = [
    "CallTimes",
    "ComputeAccount",
    "Ending",
    "HostDecision",
    "LaunchReport",
    "RankTimes",
    "SiteSplit",
    "SteadyState",
    "page_of_launch",
    "print_launch",
    "read_launch",
    "report_launch",
    "report_of",
    "show_summary",
    "write_launch",
]

Ending = Literal["finished", "until", "interrupted", "failed"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RankTimes(_Part):
    """Time of a rank: computing, waiting, network and down sum to its virtual seconds."""

    rank: int
    host: str
    startup_seconds: float = Field(description="computing before init_process_group, which is not charged")
    virtual_seconds: float = Field(description="when it ended, from init_process_group on")
    computing_seconds: float
    waiting_seconds: float = Field(description="waiting for ranks that had not posted the call yet")
    network_seconds: float = Field(description="waiting for the network")
    down_seconds: float = Field(description="its host was down, or its computing was lost by that")
    bytes_sent: int = Field(description="payload that left it")
    steps: int = Field(description="calls of step() by the first optimizer that stepped")
    step_seconds: float | None = Field(
        default=None,
        description="its mean step, from the end of the first to the end of the last; null: fewer than two",
    )


class CallTimes(_Part):
    """Calls of one operation at one place of the script; means over all ranks."""

    place: str = Field(description="file:line of the script, for its own folder's files relative to that")
    op: str
    calls: float = Field(description="calls a rank; 0 where the script only waits for calls made elsewhere")
    bytes_per_call: float = Field(description="of the tensor; for gathers and scatters of all parts")
    waiting_seconds: float = Field(description="waited there for other ranks")
    network_seconds: float = Field(description="waited there while the network was at work")
    exposed_seconds: float | None = Field(
        default=None,
        description=(
            "waited there or elsewhere while the network worked on the calls made there, the oldest of a group first; "
            "null: not recorded"
        ),
    )
    hidden_seconds: float | None = Field(
        default=None,
        description="calls made there were under way while their rank did not wait; null: not recorded",
    )


class ComputeAccount(_Part):
    """Computing on a device, means over ranks: each operation counts where its longest bound is."""

    device: str
    product_share: float = Field(description="assumed: of the device's peak, that products reach")
    memory_share: float = Field(description="assumed: of its memory's bandwidth, that operations reach")
    launch_seconds: float = Field(description="assumed: the least that an operation takes")
    flops_per_second: dict[str, float] = Field(description="of products by dtype, at that share of the peak")
    products_seconds: float = Field(description="matrix products, convolutions, attention, recurrent layers")
    memory_seconds: float = Field(description="operations bounded by the bytes that they read and write")
    launches_seconds: float = Field(description="operations that are shorter than a launch")
    measured_seconds: float = Field(description="operations that the trace has")
    estimated: dict[str, float] = Field(
        description="seconds of operations that the trace lacks, of the rank that had most, the longest first"
    )
    num_estimated: int = Field(description="number of operations that the trace lacks")


class SiteSplit(_Part):
    """Calls within and between sites, the regions of the topology; means over all ranks."""

    place: str = Field(
        default="", description="file:line of the script that made them; empty: all of the group"
    )
    op: str = ""
    group: str = Field(description="the process group's name, as the program describes it")
    sent_within_bytes: float = Field(description="payload sent to the rank's own site")
    sent_between_bytes: float = Field(description="payload sent to other sites")
    exposed_within_seconds: float = Field(
        description="waited while the network worked on calls whose members are in one site"
    )
    exposed_between_seconds: float = Field(description="on calls whose members are in several sites")


class SteadyState(_Part):
    """Mean step, over ranks and the steps from the end of the first to the end of the last."""

    steps: int = Field(description="number of steps in the means, of the rank with the fewest")
    told_by: str = Field(description="call that ends a step")
    seconds: float
    computing_seconds: float
    waiting_seconds: float
    network_seconds: float


class HostDecision(_Part):
    """Host time decided: the clock advanced without ranks that slept, as calls of others had time-outs, or answered."""

    virtual_seconds: float = Field(description="the first time")
    times: int
    read_by: list[int] = Field(
        default=[],
        description="ranks that read this time, before the clock had come to theirs; empty: it advanced",
    )
    without_ranks: list[int] = Field(description="asleep for a second of host time, outside of calls")
    calls: list[str] = Field(description="in flight then, which wait for members")


class LaunchReport(_Part):
    """A launched program's run. All seconds are virtual, from init_process_group on, unless a field says otherwise."""

    run_folder: str | None = None
    retimed_from: str | None = Field(
        default=None,
        description="folder, from this one, of the launch whose calls were timed; null: the script ran",
    )
    script: str
    arguments: list[str]
    is_module: bool
    ending: Ending
    error: str | None = Field(default=None, description="the line that says why it failed")
    num_ranks: int
    topology: dict[str, Any] = Field(description="as a topology's file holds it")
    protocol: str
    protocol_from: Literal["option", "topology", "default"]
    protocol_settings: dict[str, Any] = Field(description="every setting; null: without limit")
    placement: list[str] = Field(description="host of each rank")
    algorithms: dict[str, list[str]] = Field(description="those that each operation went by")
    algorithms_from: str = Field(
        description="'auto': gloo's own, NCCL's choice under nccl-sockets, else for each call the fastest by itself"
    )
    compute: str = Field(description="cost of computing, as --compute has it")
    compute_account: ComputeAccount | None = Field(
        default=None, description="of computing on a device; null: computing is live or marked"
    )
    clock: Clock = Field(default="host", description="time that the script read, as --clock has it")
    cuda_as_cpu: bool
    has_values: bool = Field(
        default=True, description="false: tensors had shapes alone, so that no loss is known"
    )
    until_seconds: float | None
    virtual_seconds: float = Field(description="when the last rank ended, or the run did")
    compute_utilisation: float = Field(description="computing / virtual seconds, mean over ranks")
    slowest_rank: int = Field(description="the one that ended last")
    ranks: list[RankTimes]
    steady_state: SteadyState | None = Field(description="null where fewer than two steps were marked")
    calls: list[CallTimes] = Field(description="the longest waiting first")
    splits: list[SiteSplit] = Field(default=[], description="by place, operation and group")
    groups: list[SiteSplit] = Field(default=[], description="by group")
    wan_bytes: int = Field(description="payload of all ranks to other regions")
    link_bytes: dict[str, float] = Field(description="as the network counts them")
    uncharged: list[str] = Field(description="backends used alongside the simulated network, not charged")
    later_weather: str | None = Field(
        default=None, description="weather of the topology that begins after the end and changed nothing"
    )
    unlimited_cores: str | None = Field(
        default=None,
        description="where all links are of 10 Gbit/s and more: cores may limit TCP, not modelled",
    )
    host_decisions: list[HostDecision] = Field(
        default=[], description="where host time decided, so that times may differ from run to run"
    )

    def mean_seconds(self, name: str) -> float:
        """A field of `RankTimes`, as mean over ranks."""
        return float(sum(getattr(rank, name) for rank in self.ranks) / max(len(self.ranks), 1))


def _rank_times(
    rank: int,
    host: str,
    own: RankCalls,
    end: float,
    compute_seconds: float,
    exposed: float,
    at_network: float,
) -> RankTimes:
    """Times of a rank that ended at `end`; it was `exposed` to calls, `at_network` of that time to calls in flight."""
    computing = min(compute_seconds, max(end - exposed, 0.0))  # that under way was counted as a whole
    return RankTimes(
        rank=rank,
        host=host,
        startup_seconds=own.startup_seconds,
        virtual_seconds=end,
        computing_seconds=computing,
        waiting_seconds=exposed - at_network,
        network_seconds=at_network,
        down_seconds=max(end - exposed - computing, 0.0),
        bytes_sent=own.bytes_sent,
        steps=own.steps[1].step if own.steps else 0,
        step_seconds=own.mean_step("virtual_seconds"),
    )


def _call_times(site: CallSite, total: SiteTotals, num_ranks: int) -> CallTimes:
    """Times of the calls of one place, in the mean over ranks."""
    return CallTimes(
        place=site.place,
        op=site.op,
        calls=total.calls / num_ranks,
        bytes_per_call=total.num_bytes / total.calls if total.calls else 0.0,
        waiting_seconds=(total.exposed_seconds - total.network_seconds) / num_ranks,
        network_seconds=total.network_seconds / num_ranks,
        exposed_seconds=total.awaited_seconds / num_ranks,
        hidden_seconds=total.hidden_seconds / num_ranks,
    )


def report_of(
    simulation: Simulation,
    sites: CallSites,
    about: dict[str, Any],
    ending: Ending,
    error: str | None,
    host_decisions: Sequence[HostDecision] = (),
) -> LaunchReport:
    """Report of a run, at its end or when it was stopped.

    Args:
        simulation: that ended, or was left.
        sites: its calls by place.
        about: fields of the report that do not depend on the run.
        ending: how it ended.
        error: why it failed.
        host_decisions: made on the way.
    """
    kernel, network, world = simulation.kernel, simulation.network, simulation.world
    assert network is not None
    assert world.topology is not None
    instant = kernel.until_seconds if ending == "until" else float(kernel.clock.now)
    ends = [instant if rank in kernel.running else end for rank, end in enumerate(kernel.seconds.end)]
    waited = [kernel.exposed_until(rank, end) for rank, end in enumerate(ends)]
    sites.finish(waited, instant)
    size = world.num_ranks
    hosts = [world.topology.hosts[host].name for host in world.hosts]
    ranks = [
        _rank_times(rank, hosts[rank], own, ends[rank], kernel.seconds.compute[rank], *waited[rank])
        for rank, own in enumerate(sites.ranks)
    ]
    whole = max(ends)
    return LaunchReport(
        **about,
        topology=world.topology.to_mapping(),
        protocol=world.protocol.name,
        protocol_settings={
            name: None if value == math.inf else value for name, value in world.protocol.to_mapping().items()
        },
        algorithms_from=", ".join(f"{op} {name}" for op, name in world.collectives.items()) or "auto",
        ending=ending,
        error=error,
        num_ranks=size,
        placement=hosts,
        algorithms={op: sorted(names) for op, names in sorted(simulation.algorithms.items())},
        virtual_seconds=whole,
        compute_utilisation=sum(rank.computing_seconds for rank in ranks) / (whole * size) if whole else 1.0,
        slowest_rank=max(range(size), key=lambda rank: (ends[rank], -rank)),
        ranks=ranks,
        steady_state=_steady_state(sites.ranks),
        calls=[
            _call_times(site, each, size)
            for site, each in sites.totals_by(lambda posted: posted.site).items()
        ],
        splits=[
            _split(each, size, group, *site)
            for (site, group), each in sites.totals_by(lambda posted: (posted.site, posted.group)).items()
            if each.calls
        ],
        groups=[
            _split(each, size, group)
            for group, each in sites.totals_by(lambda posted: posted.group).items()
            if each.calls
        ],
        wan_bytes=sum(own.wan_bytes for own in sites.ranks),
        link_bytes={
            f"{link.source} -> {link.target}": float(count)
            for link, count in zip(world.topology.links, network.link_bytes, strict=True)
            if count
        },
        compute_account=_account([own.account for own in sites.ranks if own.account is not None], size),
        uncharged=list(sites.uncharged),
        later_weather=world.topology.weather.after(whole),
        unlimited_cores=unlimited_cores(world.topology, world.protocol, world.hosts),
        host_decisions=list(host_decisions),
    )


def _account(accounts: Sequence[dict[str, Any]], num_ranks: int) -> ComputeAccount | None:
    """Mean of the ranks' accounts; None where no rank has computed on a device."""
    if not accounts:
        return None
    seconds = sum((Counter(each["seconds"]) for each in accounts), Counter[str]())
    most = max(accounts, key=lambda each: sum(each["estimated"].values()))
    first = accounts[0]
    return ComputeAccount(
        device=first["device"],
        product_share=first["product_share"],
        memory_share=first["memory_share"],
        launch_seconds=find_device(first["device"]).launch_seconds,
        flops_per_second={name: rate for each in accounts for name, rate in each["rates"].items()},
        estimated=most["estimated"],
        num_estimated=most["num_estimated"],
        **{
            f"{part}_seconds": seconds[part] / num_ranks
            for part in ("products", "memory", "launches", "measured")
        },
    )


def _split(each: SiteTotals, size: int, group: str, place: str = "", op: str = "") -> SiteSplit:
    return SiteSplit(
        place=place,
        op=op,
        group=group,
        sent_within_bytes=(each.sent_bytes - each.sent_between_bytes) / size,
        sent_between_bytes=each.sent_between_bytes / size,
        exposed_within_seconds=(each.awaited_seconds - each.awaited_between_seconds) / size,
        exposed_between_seconds=each.awaited_between_seconds / size,
    )


def _steady_state(ranks: Sequence[RankCalls]) -> SteadyState | None:
    """Means over ranks that have reported steps; None where one of them has reported only one."""
    pairs = [own.steps for own in ranks if own.steps]
    fewest = min((end.step - begin.step for begin, end in pairs), default=0)
    if not fewest:
        return None

    def mean(field: str) -> float:
        return sum(own.mean_step(field) or 0.0 for own in ranks if own.steps) / len(pairs)

    network = mean("network_seconds")
    return SteadyState(
        steps=fewest,
        told_by="optimizer.step()",
        seconds=mean("virtual_seconds"),
        computing_seconds=mean("compute_seconds"),
        waiting_seconds=mean("exposed_seconds") - network,
        network_seconds=network,
    )


_FILE = "launch.json"
_NOTE = (
    "Seconds and calls are means over ranks. Waiting for others and the network: waited at this line; exposed: waited, "
    "here or elsewhere, while the network worked on this line's calls, the oldest of a group first; hidden: they were "
    "under way while their rank did not wait."
)
_WIDE = 110  # columns of a console that take headings on one line
_GAP, _LEAST_PLACE = 2, 16  # columns between two of a table, and of the first one: figures are never cut
_MOST_ROWS = 12  # of a table on a console; the file and the page have all
_MOST_ESTIMATED = 5  # operations named there, likewise
_RANK_HEADINGS = (
    *("rank", "host", "ended", "computing", "waiting for others", "network", "start-up", "bytes sent"),
    *("steps", "a step"),
)
_CALL_HEADINGS = ("at", "call", "calls", "bytes each", "waiting for others", "network", "exposed", "hidden")
_SPLIT_HEADINGS = ("group", "sent within", "sent between", "exposed within", "exposed between")
_SPLIT_NOTE = (
    "Within and between sites, the topology's regions; means over ranks. Bytes are those that ranks send; exposed time "
    "is between sites if the call's members are in several."
)
_SOURCES = {"option": "--protocol", "topology": "the topology's", "default": "by default"}
_CLOCKS = {
    "virtual": "virtual: times that the script takes itself are on this clock",
    "host": "host: times that the script takes itself are this machine's; netgym.now() reads the virtual clock",
}
_CHOICES = {
    "": "auto: for each call the fastest by itself, on idle links",
    "gloo": "gloo's own",
    "nccl": "auto: NCCL's choice",
}
"""What `auto` takes, by the protocol's `library`."""
_WITHOUT = "launched without values: tensors had shapes, dtypes and strides alone, and no loss is known"
_ENDINGS = {
    "finished": "",
    "until": "cut at --until",
    "interrupted": "interrupted: the results so far",
    "failed": "failed: the results so far",
}


def write_launch(folder: RunFolder, report: LaunchReport) -> LaunchReport:
    """Write a launched run's report and page into its folder; returns the report with the folder's name."""
    report = report.model_copy(update={"run_folder": str(folder.path)})
    folder.write_text(_FILE, report.model_dump_json(indent=2) + "\n")
    folder.write_text("report.html", page_of_launch(folder.path, report))
    return report


def read_launch(path: Path) -> LaunchReport:
    """Report of a launched run in its folder.

    Raises:
        InputError: it is damaged, or of another version.
    """
    file = path / _FILE
    try:
        return LaunchReport.model_validate_json(read_bytes(file))
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise InputError(f"{visible(file)}: is no report of a launched run: {visible(first, 300)}") from None


def report_launch(path: Path, out: Path | None, *, as_json: bool) -> None:
    """Write the page of a launched run again, and print its summary: `netgym report` of its folder.

    Raises:
        InputError: its report is damaged, or of another version.
    """
    launched = read_launch(path)
    write_whole(out or path / "report.html", page_of_launch(path, launched))
    print_launch(launched, path, as_json=as_json)


def print_launch(report: LaunchReport, path: Path | None, *, as_json: bool) -> None:
    """Print a launched run's report, and the path of its folder if it has one."""
    if as_json:
        click.echo(report.model_dump_json())
        return
    show_summary(report, plain_console(PLAIN_WIDTH))
    if path is not None:
        click.echo(str(path))


def _facts(report: LaunchReport) -> list[tuple[str, str]]:
    """Basis of the figures: network, protocol, algorithms, placement, compute."""
    algorithms = "; ".join(f"{op}: {', '.join(names)}" for op, names in report.algorithms.items()) or "none"
    by = report.algorithms_from
    if by == "auto":
        by = _CHOICES[report.protocol_settings["library"]]
    startup = max((rank.startup_seconds for rank in report.ranks), default=0.0)
    facts = [
        ("script", visible(" ".join([report.script, *report.arguments]), 200)),
        ("ranks", str(report.num_ranks)),
        ("network", visible(str(report.topology.get("name", "")), 80)),
        ("protocol", f"{report.protocol} ({_SOURCES[report.protocol_from]})"),
        ("algorithms", f"{algorithms} ({by})"),
        ("placement", _placement(report.placement)),
        ("compute", report.compute + (", CUDA devices mapped to the CPU" if report.cuda_as_cpu else "")),
        *_computing(report.compute_account),
        ("start-up", f"{format_seconds(startup)} before init_process_group, not counted"),
        ("clock", _CLOCKS[report.clock]),
    ]
    if report.retimed_from is not None:
        facts.append(("retimed", f"calls and computing of the launch in {visible(report.retimed_from)}"))
    if not report.has_values:
        facts.append(("values", _WITHOUT))
    if report.uncharged:
        facts.append(("not charged", ", ".join(map(visible, report.uncharged))))
    if report.later_weather is not None:
        facts.append(("not met", report.later_weather))
    if report.unlimited_cores is not None:
        facts.append(("cores", report.unlimited_cores.removeprefix("cores: ")))
    facts += [("host time", _decided(each)) for each in report.host_decisions]
    return facts


def _computing(account: ComputeAccount | None) -> list[tuple[str, str]]:
    """Bounds of computing on a device, assumptions, and operations that the trace lacks."""
    if account is None:
        return []
    names = {"measured": "measured", "products": "products", "memory": "memory-bound", "launches": "launches"}
    seconds = {name: getattr(account, f"{part}_seconds") for part, name in names.items()}
    whole = sum(seconds.values())
    shares = [f"{name} {taken / whole:.1%}" for name, taken in seconds.items() if taken]
    device, share = find_device(account.device), account.product_share
    rates = ", ".join(f"{name} {rate / 1e12:.4g} TFLOP/s" for name, rate in account.flops_per_second.items())
    measured = " (the best that was measured)" if share == device.best_product else ""
    bandwidth = device.memory_bytes_per_second * account.memory_share
    facts = [
        ("operations", f"{format_seconds(whole)} a rank: {', '.join(shares)}"),
        (
            "assumed",
            f"products reach {share:.1%} of the peak of {account.device}{measured}{': ' if rates else ''}{rates}; all "
            f"else {account.memory_share:.0%} of its memory's bandwidth: {bandwidth / 1e9:.4g} GB/s; a launch takes "
            f"{format_seconds(account.launch_seconds)}",
        ),
    ]
    if account.num_estimated:
        shown = list(account.estimated.items())[:_MOST_ESTIMATED]
        longest = "; ".join(f"{visible(name, 120)} {format_seconds(taken)}" for name, taken in shown)
        facts.append(
            (
                "estimated",
                f"{format_count(account.num_estimated, 'operation')} that the trace lacks: {longest}",
            )
        )
    return facts


def _decided(each: HostDecision) -> str:
    times = "once" if each.times == 1 else f"{each.times} times, first"
    calls = f" (in flight: {visible('; '.join(each.calls), 300)})" if each.calls else ""
    if each.read_by:
        return (
            f"decided {times} at {format_seconds(each.virtual_seconds)}: {rank_names(each.read_by)} read the clock"
            f"{calls}, and were told this time though they may be later: {rank_names(each.without_ranks)} slept, and "
            "may have waited for them"
        )
    return (
        f"decided {times} at {format_seconds(each.virtual_seconds)}: others waited for the clock{calls}, and it "
        f"advanced without {rank_names(each.without_ranks)}, asleep; times may differ from run to run"
    )


def _placement(hosts: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(f"{rank} on {visible(host, 40)}" for rank, host in enumerate(hosts[:most]))
    shown += f" and {len(hosts) - most} more" if len(hosts) > most else ""
    densest = max(Counter(hosts).values())
    return shown + (f"; up to {densest} ranks share a host and its link" if densest > 1 else "")


def _verdict(report: LaunchReport) -> str:
    """Shares of the time, in a sentence."""
    whole = report.virtual_seconds
    shares = {
        "compute": report.mean_seconds("computing_seconds"),
        "wait for others": report.mean_seconds("waiting_seconds"),
        "wait for the network": report.mean_seconds("network_seconds"),
    }
    fewer = {
        "are down": report.mean_seconds("down_seconds"),
        "have ended": whole - report.mean_seconds("virtual_seconds"),
    }
    shares |= {name: seconds for name, seconds in fewer.items() if seconds > whole / 2000}
    parts = [f"{name} {seconds / whole if whole else 0.0:.1%}" for name, seconds in shares.items()]
    ending = f" ({_ENDINGS[report.ending]})" if _ENDINGS[report.ending] else ""
    last = f"; rank {report.slowest_rank} ended last" if report.ending == "finished" else ""
    return f"{format_seconds(whole)} of virtual time{ending}: ranks {', '.join(parts)} of it{last}."


def _steady(report: LaunchReport) -> str:
    steady = report.steady_state
    if steady is None:
        return ""
    of_ranks = [(rank.step_seconds, rank.rank) for rank in report.ranks if rank.step_seconds is not None]
    apart = ""
    if of_ranks:  # earlier reports have none
        least, most = ((format_seconds(seconds), rank) for seconds, rank in (min(of_ranks), max(of_ranks)))
        if least[0] != most[0]:
            apart = f" Ranks take from {least[0]} (rank {least[1]}) to {most[0]} (rank {most[1]})."
    return (
        f"A step takes {format_seconds(steady.seconds)} after the first one: computing "
        f"{format_seconds(steady.computing_seconds)}, waiting for others {format_seconds(steady.waiting_seconds)}, "
        f"network {format_seconds(steady.network_seconds)} (means over ranks and "
        f"{format_count(steady.steps, 'step')}, marked by {steady.told_by}).{apart}"
    )


def _place(place: str, most: int = 80) -> str:
    """A place on one line, shortened from the left: the file's name and the line are at its end.

    >>> _place("a_package/calls.py:104", 20)
    '…ackage/calls.py:104'
    """
    shown = visible(place, len(place) * 10)
    return shown if len(shown) <= most else "\N{HORIZONTAL ELLIPSIS}" + shown[1 - most :]


def _calls(report: LaunchReport) -> list[tuple[str, ...]]:
    return [
        (
            _place(each.place),
            each.op,
            f"{each.calls:.2f}".removesuffix("0").removesuffix(".0"),
            format_bytes(round(each.bytes_per_call)) if each.calls else "-",
            format_seconds(each.waiting_seconds),
            format_seconds(each.network_seconds),
            *(
                format_seconds(seconds) if each.calls and seconds is not None else "-"
                for seconds in (each.exposed_seconds, each.hidden_seconds)
            ),
        )
        for each in report.calls
    ]


def _splits(rows: Sequence[SiteSplit]) -> list[tuple[str, ...]]:
    """Cells of a table; none where all ranks are in one site."""
    if not any(each.sent_between_bytes or each.exposed_between_seconds for each in rows):
        return []
    return [
        (
            *((_place(each.place), each.op) if each.place else ()),
            visible(each.group, 40) or "-",
            *(format_bytes(round(number)) for number in (each.sent_within_bytes, each.sent_between_bytes)),
            *(map(format_seconds, (each.exposed_within_seconds, each.exposed_between_seconds))),
        )
        for each in rows
    ]


def _links(report: LaunchReport) -> list[tuple[str, ...]]:
    links = sorted(report.link_bytes.items(), key=lambda item: -item[1])
    return [(visible(name, 80), format_bytes(count)) for name, count in links]


def show_summary(report: LaunchReport, console: Console) -> None:
    """Print the summary of a run; nothing where nothing was simulated."""
    if not report.calls:
        return
    console.print()
    for name, value in _facts(report):
        console.print(Text(f"{name:<12}{value}"), soft_wrap=True)
    console.print()
    for line in filter(None, (_verdict(report), _steady(report))):
        console.print(Text(line), soft_wrap=True)
    _show_table(console, _CALL_HEADINGS, _calls(report), _NOTE)
    _show_table(console, ("at", "call", *_SPLIT_HEADINGS), _splits(report.splits))
    _show_table(console, _SPLIT_HEADINGS, _splits(report.groups), _SPLIT_NOTE)
    _show_table(console, ("link", "bytes"), _links(report))


def _show_table(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> None:
    if not rows:
        return
    is_narrow = console.width < _WIDE
    shown = [heading.replace(" ", "\n", 1) if is_narrow else heading for heading in headings]
    cells = [shown, *rows[:_MOST_ROWS]]
    widths = [max(map(cell_len, "\n".join(column).split("\n"))) for column in zip(*cells, strict=True)]
    rest = sum(widths[1:]) + _GAP * len(widths[1:])
    widths[0] = min(widths[0], max(console.width - rest, _LEAST_PLACE))
    table = Table(box=None, pad_edge=False, header_style="bold", width=widths[0] + rest)
    for index, heading in enumerate(headings):
        is_left = index == 0 or heading == "call"
        table.add_column(
            shown[index], justify="left" if is_left else "right", no_wrap=True, width=widths[index]
        )
    for first, *others in cells[1:]:
        table.add_row(*map(Text, (_place(first, widths[0]), *others)))
    console.print()
    console.print(table, crop=False)
    more = f"and {len(rows) - _MOST_ROWS} more" if len(rows) > _MOST_ROWS else ""
    for line in filter(None, (more, note)):
        console.print(Text(line))


def page_of_launch(path: Path, report: LaunchReport) -> str:
    """The HTML page of the launched run whose folder is `path`."""
    name = Path(report.script).name
    error = f"It ended with: {visible(report.error, 500)}" if report.error else ""
    page = Page(
        title=f"{visible(name, 60)} on {visible(str(report.topology.get('name', '')), 60)}",
        facts=_facts(report),
        verdict=" ".join(filter(None, (_verdict(report), _steady(report), error))),
        results=ResultTable(list(_CALL_HEADINGS), [(False, cells) for cells in _calls(report)]),
        note=(
            "Calls and waits by line of the script. Waiting for others ends when the last member has posted; the rest "
            f"is the network's. {_NOTE}"
        ),
        status="" if report.ending == "finished" else "This run was stopped before its end.",
        tables=[
            _table(
                "Ranks",
                _RANK_HEADINGS,
                map(_rank_cells, report.ranks),
                "Seconds of virtual time from init_process_group on; start-up before it is not counted. A step: the "
                "rank's mean, from the end of its first one on.",
            ),
            *(
                _table(title, headings, rows, _SPLIT_NOTE)
                for title, headings, rows in (
                    ("Within and between sites", ("at", "call", *_SPLIT_HEADINGS), _splits(report.splits)),
                    ("Process groups within and between sites", _SPLIT_HEADINGS, _splits(report.groups)),
                )
                if rows
            ),
            _table(
                "Links",
                ("link", "bytes"),
                _links(report),
                f"To other regions: {format_bytes(report.wan_bytes)}.",
            ),
        ],
        network=NetworkSection.of(report.topology),
        trace=trace_of(path),
        experiments=[Listing(_FILE, report.model_dump_json(indent=2))],
    )
    return render_page(page)


def _table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], note: str) -> TextTable:
    return TextTable(title, headings, [(cells[0], cells[1:]) for cells in rows], note, is_prose=False)


def _rank_cells(rank: RankTimes) -> list[str]:
    seconds = (rank.virtual_seconds, rank.computing_seconds, rank.waiting_seconds, rank.network_seconds)
    times = map(format_seconds, (*seconds, rank.startup_seconds))
    step = "-" if rank.step_seconds is None else format_seconds(rank.step_seconds)
    ends = format_bytes(rank.bytes_sent), str(rank.steps), step
    return [str(rank.rank), visible(rank.host, 40), *times, *ends]
