"""`netsim collective`: the times of one collective."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.table import Table

from netsim.cli.flows import remarks_on_times, timing_progress
from netsim.cli.signals import Stoppable
from netsim.cli.terminal import OneLineCommand, given, plain_console, plain_lines, takes
from netsim.collectives.collective import collective, resolve_request, ring_seconds
from netsim.collectives.operations import OPERATIONS
from netsim.docstrings import documented_lines
from netsim.errors import locate_errors
from netsim.network.trace import tracing
from netsim.topology.protocol import Protocol, spare_streams
from netsim.topology.topology import Topology
from netsim.units import (
    format_bits_per_second,
    format_bytes,
    format_count,
    format_seconds,
    parse_bytes,
    parse_seconds,
)

if TYPE_CHECKING:
    from netsim.collectives.collective import CollectiveTimes
    from netsim.collectives.start import Timing

__all__ = ["collective_command"]

_MOST_ROWS = 32


@click.command("collective", cls=OneLineCommand)
@takes(size=documented_lines(collective, "Args")["num_bytes"])
def collective_command(
    topology: str = given(is_argument=True, required=True, metavar="TOPOLOGY.yaml"),
    op: str = given(is_argument=True, required=True, metavar="|".join(OPERATIONS)),
    size: str | None = given("--bytes", metavar="SIZE"),
    algorithm: str = given(metavar="NAME", default="auto"),
    ranks: str | None = given(metavar="HOST,..."),
    root: str | None = given(metavar="HOST"),
    protocol: str | None = given(metavar="NAME"),
    repeat: int = given(default=1, type=click.IntRange(1)),
    pause: str = given(default="50ms", metavar="TIME"),
    trace: str | None = given(metavar="FILE"),
    as_json: bool = given(),
) -> None:
    """Time a collective on TOPOLOGY: completion by rank, bytes by link, and a lower bound of the time.

    Args:
        size: SIZE is {size}
        algorithm: Algorithm; auto is the fastest for this call, under gloo, hivemind and nccl-sockets the
            library's own.
        ranks: Hosts in rank order; default: all in natural order.
        root: Host of the root; default: the first rank's.
        repeat: Number of repetitions.
        pause: Pause between repetitions.
        trace: Write a trace for Perfetto, such as t.json.gz.
    """
    net = Topology.load(topology)
    names = None if ranks is None else [name.strip() for name in ranks.split(",")]
    with locate_errors(f"--bytes {size}"):
        given_bytes = None if size is None else parse_bytes(size)
    hosts, num_bytes, root_at = resolve_request(net, op, given_bytes, names, root or 0)
    with locate_errors(f"--pause {pause}"):
        pause_seconds = parse_seconds(pause)
    recording = tracing(trace, hosts, lambda line: click.echo(plain_lines(line), err=True))
    chosen, ring = Protocol.resolve(protocol, net.protocol), None
    with (
        Stoppable() as work,
        recording as recorder,
        timing_progress(f"timing {op}") as progress,
    ):
        times = collective(
            net,
            op,
            num_bytes=num_bytes,
            algorithm=algorithm,
            ranks=hosts,
            root=root_at,
            protocol=protocol,
            repeat=repeat,
            pause_seconds=pause_seconds,
            recorder=recorder,
        )
        if algorithm == "auto":
            progress.now("timing a ring, to compare")
            ring = ring_seconds(times.schedule, hosts, net, chosen, repeat)
    work.end(f"{op} was not timed to its end")
    if as_json:
        click.echo(json.dumps({**_as_mapping(net, chosen, hosts, times), "ring_seconds": ring}))
        return
    made, timing, bound = times.schedule, times.timing, times.bound_seconds
    console = plain_console()
    console.print(_ranks_table(net, hosts, timing))
    console.print(_links_table(net, timing))
    repeated = "" if len(timing.seconds) == 1 else f" (of {len(timing.seconds)}, the last)"
    over = f" (this took {times.seconds / bound:.3g} times that)" if bound else ""
    lines = [
        f"{made.op} of {format_bytes(made.size)} by {made.algorithm} among {format_count(made.num_ranks, 'rank')}"
        f" ({chosen.describe()}): {format_seconds(times.seconds)}{repeated};"
        f" lower bound of any algorithm {format_seconds(bound)}{over}"
    ]
    if ring is not None:
        lines.append(
            f"auto chose {made.algorithm}; a ring, as most libraries run it, takes {format_seconds(ring)}"
        )
    if len(timing.seconds) > 1:
        lines.append(f"each repetition: {', '.join(format_seconds(each) for each in timing.seconds)}")
    if times.estimate is not None:
        lines.append(f"estimated, of {made.num_messages:,} messages: {times.estimate}")
    lines += remarks_on_times(net, chosen, hosts, times.window_limit, times.later_weather)
    if times.dollars:
        lines.append(f"its traffic costs {times.dollars:.4g} $")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _as_mapping(
    topology: Topology, protocol: Protocol, hosts: tuple[int, ...], times: CollectiveTimes
) -> dict[str, object]:
    made, limit = times.schedule, times.window_limit
    spare = spare_streams(topology, protocol, hosts)
    return {
        "op": made.op,
        "algorithm": made.algorithm,
        "protocol": protocol.name,
        "streams": protocol.streams,
        "placement": [topology.hosts[host].name for host in hosts],
        "bytes": made.size,
        "seconds": times.repeat_seconds,
        "rank_seconds": times.rank_seconds,
        "link_bytes": times.link_bytes,
        "background_link_bytes": topology.bytes_by_name(times.timing.background_link_bytes),
        "lower_bound_seconds": times.bound_seconds,
        "dollars": times.dollars,
        "window_limit": asdict(limit) if limit is not None else None,
        **({"spare_streams": spare} if spare is not None else {}),
        **({"later_weather": times.later_weather} if times.later_weather is not None else {}),
        **({"estimate": times.estimate} if times.estimate is not None else {}),
    }


def _ranks_table(topology: Topology, hosts: tuple[int, ...], timing: Timing) -> Table:
    ranks = sorted(range(len(timing.rank_seconds)), key=lambda rank: -timing.rank_seconds[rank])[:_MOST_ROWS]
    title = "completion by rank"
    if len(ranks) < len(timing.rank_seconds):
        title += f", the last {len(ranks)} of {len(timing.rank_seconds)}"
    else:
        ranks.sort()
    table = Table("rank", "host", title=title, title_justify="left")
    table.add_column("done after", justify="right")
    for rank in ranks:
        done = format_seconds(timing.rank_seconds[rank])
        table.add_row(str(rank), topology.hosts[hosts[rank]].name, done)
    return table


def _links_table(topology: Topology, timing: Timing) -> Table:
    def busy_seconds(index: int) -> float:
        return timing.link_bytes[index] * 8 / topology.links[index].bits_per_second

    used = [index for index, num_bytes in enumerate(timing.link_bytes) if num_bytes]
    shown = sorted(used, key=busy_seconds, reverse=True)[:_MOST_ROWS]
    title = "payload by link, the busiest first"
    if len(shown) < len(used):
        title += f", {len(shown)} of {len(used)}"
    table = Table("link", title=title, title_justify="left")
    for name in ("bandwidth", "payload", "busy"):
        table.add_column(name, justify="right")
    for index in shown:
        share = busy_seconds(index) / timing.seconds[-1] if timing.seconds[-1] else 0.0
        table.add_row(
            topology.links[index].name,
            format_bits_per_second(topology.links[index].bits_per_second),
            format_bytes(round(timing.link_bytes[index])),
            f"{share:.0%}",
        )
    return table
