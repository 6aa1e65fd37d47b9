"""`netsim flows`: the times of transfers."""

from __future__ import annotations

import io
import math
import sys
from typing import TYPE_CHECKING

import click

from netsim.cli.signals import Stoppable
from netsim.cli.terminal import DelayedProgress, OneLineCommand, given, plain_lines, takes
from netsim.files.plain_files import output_file
from netsim.network.trace import tracing
from netsim.topology.protocol import Protocol, spare_streams, unlimited_cores, window_limit
from netsim.topology.topology import Topology
from netsim.transfers import later_weather, read_flows, simulate_flows
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from netsim.topology.protocol import WindowLimit

__all__ = ["flows_command", "remarks_on_times", "timing_progress"]

_SECONDS_A_LINE = 10.0  # of progress where standard error is no terminal


@click.command("flows", cls=OneLineCommand)
@takes()
def flows_command(
    topology: str = given(is_argument=True, required=True, metavar="TOPOLOGY.yaml"),
    flows: Path = given(is_argument=True, required=True, metavar="FLOWS.csv"),
    protocol: str | None = given(metavar="NAME"),
    out: Path | None = given(metavar="RESULTS.csv"),
    trace: Path | None = given(metavar="FILE"),
) -> None:
    """Simulate the transfers listed in FLOWS.csv and print when each is delivered.

    FLOWS.csv has the columns start_s, src, dst and bytes ("100 ms", "10 MB"; bare numbers are seconds and
    bytes); the result has the same rows and finish_s. The protocol and the links that limit transfers are printed on
    stderr.

    Args:
        out: Default: standard output.
        trace: Write a trace for Perfetto, such as t.json.gz.
    """
    network = Topology.load(topology)
    parsed = Protocol.resolve(protocol, network.protocol)
    table = read_flows(flows, network)
    recording = tracing(trace, (), lambda line: click.echo(plain_lines(line), err=True))
    finish = [math.inf] * len(table.flows)
    with (
        Stoppable() as work,
        recording as recorder,
        timing_progress("transfers", len(table.flows)) as progress,
    ):
        simulate_flows(network, table.flows, parsed, finish, on_delivered=progress.advance, recorder=recorder)
    if work.is_stopped:  # lost or not yet delivered
        finish = [each if each < math.inf else math.nan for each in finish]
    click.echo(f"protocol: {parsed.describe()}", err=True)
    num_lost = finish.count(math.inf)
    if num_lost:
        message = (
            f"{num_lost} of {format_count(len(finish), 'transfer')} {'is' if num_lost == 1 else 'are'} lost"
        )
        click.echo(f"{message}, since a host of theirs crashed: finish_s is inf", err=True)
    limit = window_limit(network, parsed, (flow[1:] for flow in table.flows))
    late = None if work.is_stopped else later_weather(network, finish)
    hosts = {host for flow in table.flows for host in flow[1:3]}
    for line in remarks_on_times(network, parsed, hosts, limit, late):
        click.echo(line, err=True)
    if out is None:
        table.write(finish, sys.stdout)
    else:
        with output_file(out) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
            table.write(finish, text)
    delivered = sum(map(math.isfinite, finish))
    work.end(f"{delivered} of {format_count(len(finish), 'transfer')} delivered")


def remarks_on_times(
    topology: Topology, protocol: Protocol, hosts: Iterable[int], limit: WindowLimit | None, late: str | None
) -> list[str]:
    """Lines on windows and cores that limit transfers between `hosts`, spare streams, and weather after the end."""
    after = None if late is None else f"ignored: weather that begins after the end: {late}"
    hosts = list(hosts)
    spare, cores = (each(topology, protocol, hosts) for each in (spare_streams, unlimited_cores))
    remarks = (limit, spare, cores, after)
    return [str(remark) for remark in remarks if remark is not None]


def timing_progress(what: str, total: int | None = None) -> DelayedProgress:
    """On a terminal after two seconds; in a log a line after ten, and then ever more rarely."""
    seconds = 2.0 if sys.stderr.isatty() else _SECONDS_A_LINE
    return DelayedProgress(what, total, seconds, every_seconds=_SECONDS_A_LINE)
