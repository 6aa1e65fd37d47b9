"""`netsim collective`: time one collective on a topology."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from netsim.collectives.schedules.algorithms import OPERATIONS, algorithm_names
from netsim.face.calls import collective
from netsim.files.errors import InputError, NetsimError
from netsim.files.units import (
    format_bits_per_second,
    format_bytes,
    format_seconds,
    parse_seconds,
)
from netsim.tools.sign_of_life import SignOfLife
from netsim.tools.trace import tracing
from netsim.tools.usage import plain_lines
from netsim.topology.protocol import Protocol
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from netsim.collectives.timing import Timing
    from netsim.face.calls import CollectiveTimes

__all__ = ["command"]

_MOST_ROWS = 32


@click.command("collective")
@click.argument("topology", metavar="TOPOLOGY.yaml")
@click.argument("op", metavar="|".join(OPERATIONS))
@click.option("--bytes", "size", metavar="SIZE", help="Such as 25MB; not needed for barrier. See below.")
@click.option(
    "--algorithm", metavar="NAME", default="auto", show_default=True, help="auto: the fastest here."
)
@click.option("--ranks", metavar="HOST,...", help="Hosts in rank order; default: all in natural order.")
@click.option("--root", metavar="HOST", help="Default: the first rank.")
@click.option("--protocol", metavar="NAME", help="ideal, linux-tcp or gloo; default: what the topology says.")
@click.option("--repeat", default=1, show_default=True, type=click.IntRange(1), help="Repetitions.")
@click.option("--pause", default="50ms", show_default=True, metavar="TIME", help="Between repetitions.")
@click.option("--trace", type=click.Path(), metavar="FILE", help="Write what happened, such as to t.json.gz.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    topology: str,
    op: str,
    size: str | None,
    algorithm: str,
    ranks: str | None,
    root: str | None,
    protocol: str | None,
    repeat: int,
    pause: str,
    trace: str | None,
    as_json: bool,
) -> None:
    """Time a collective on TOPOLOGY: completion by rank, bytes by link, and the least time possible.

    SIZE is the whole tensor for all_reduce, broadcast and reduce; the sum over ranks for all_gather, gather,
    scatter and reduce_scatter; what each rank has for all others together for all_to_all; the message for
    sendrecv, which goes from the first rank to the second.
    """
    try:
        net = Topology.load(topology)
        algorithm_names(op)  # an unknown operation is told before anything else
        if size is None and op != "barrier":
            raise InputError(f"{op}: say how much with --bytes, such as --bytes 25MB")
        hosts = None if ranks is None else tuple(net.host_index(name.strip()) for name in ranks.split(","))
        placed = tuple(range(len(net.hosts))) if hosts is None else hosts
        root_at = 0 if root is None else _root(net, placed, root)
        pause_seconds = parse_seconds(pause)
        recording = tracing(trace, placed, lambda line: click.echo(plain_lines(line), err=True))
        with recording as recorder, SignOfLife(f"timing {op}"):
            times = collective(
                net,
                op,
                num_bytes=size or 0,
                algorithm=algorithm,
                ranks=hosts,
                root=root_at,
                protocol=protocol,
                repeat=repeat,
                pause_seconds=pause_seconds,
                recorder=recorder,
            )
    except NetsimError as error:
        raise click.ClickException(str(error)) from None
    chosen = Protocol.parse(net.protocol if protocol is None else protocol)
    if as_json:
        click.echo(json.dumps(_as_mapping(net, chosen, times)))
    else:
        _print(net, chosen, placed, times)


def _root(topology: Topology, hosts: tuple[int, ...], root: str) -> int:
    host = topology.host_index(root)
    if host not in hosts:
        raise InputError(f"--root {root}: it is not among the ranks; add it to --ranks")
    return hosts.index(host)


def _link_name(topology: Topology, index: int) -> str:
    link = topology.links[index]
    return f"{link.source}->{link.target}"


def _named(topology: Topology, link_bytes: list[float]) -> dict[str, int]:
    """Bytes by link, of those that carry any."""
    return {
        _link_name(topology, index): round(num_bytes)
        for index, num_bytes in enumerate(link_bytes)
        if round(num_bytes)
    }


def _as_mapping(topology: Topology, protocol: Protocol, times: CollectiveTimes) -> dict[str, object]:
    made, limit = times.schedule, times.window_limit
    return {
        "op": made.op,
        "algorithm": made.algorithm,
        "protocol": protocol.name,
        "bytes": made.num_bytes // made.num_ranks if made.op == "all_to_all" else made.num_bytes,
        "seconds": times.repeat_seconds,
        "rank_seconds": times.rank_seconds,
        "link_bytes": times.link_bytes,
        "background_link_bytes": _named(topology, times.timing.background_link_bytes),
        "lower_bound_seconds": times.bound_seconds,
        "dollars": times.dollars,
        "window_limit": asdict(limit) if limit is not None else None,
    }


def _print(topology: Topology, protocol: Protocol, hosts: tuple[int, ...], times: CollectiveTimes) -> None:
    made, timing, bound = times.schedule, times.timing, times.bound_seconds
    console = Console()
    console.print(_ranks_table(topology, hosts, timing))
    console.print(_links_table(topology, timing))
    repeated = "" if len(timing.seconds) == 1 else f" (of {len(timing.seconds)}, the last)"
    over = f", {times.seconds / bound:.3g} times the least" if bound else ""
    lines = [
        f"{made.op} of {format_bytes(made.num_bytes)} by {made.algorithm} among {made.num_ranks} ranks"
        f" ({protocol.name}): {format_seconds(times.seconds)}{repeated};"
        f" no algorithm takes less than {format_seconds(bound)}{over}"
    ]
    if len(timing.seconds) > 1:
        lines.append(f"each repetition: {', '.join(format_seconds(each) for each in timing.seconds)}")
    if times.window_limit is not None:
        lines.append(str(times.window_limit))
    if times.dollars:
        lines.append(f"its traffic costs {times.dollars:.4g} $")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


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
            _link_name(topology, index),
            format_bits_per_second(topology.links[index].bits_per_second),
            format_bytes(round(timing.link_bytes[index])),
            f"{share:.0%}",
        )
    return table
