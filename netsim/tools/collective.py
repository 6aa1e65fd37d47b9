"""`netsim collective`: time one collective on a topology."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from netsim.collectives.schedules.algorithms import OPERATIONS, algorithm_names, default_algorithm
from netsim.collectives.times.bound import lower_bound_seconds
from netsim.collectives.times.choose import schedule
from netsim.collectives.times.timing import Timing, time_collective
from netsim.files.errors import InputError, NetsimError
from netsim.files.units import (
    format_bits_per_second,
    format_bytes,
    format_seconds,
    parse_bytes,
    parse_seconds,
)
from netsim.tools.trace import tracing
from netsim.tools.usage import plain_lines
from netsim.topology.protocol import Protocol
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from netsim.collectives.schedules.schedule import Schedule

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
        chosen = Protocol.parse(net.protocol if protocol is None else protocol)
        pause_seconds = parse_seconds(pause)
        hosts = _hosts(net, ranks, op)
        made = _schedule(net, chosen, op, hosts, size, algorithm, root)
        with tracing(trace, hosts, lambda line: click.echo(plain_lines(line), err=True)) as recorder:
            timing = time_collective(
                net, chosen, made, hosts, repeat=repeat, pause_seconds=pause_seconds, recorder=recorder
            )
    except NetsimError as error:
        raise click.ClickException(str(error)) from None
    bound = lower_bound_seconds(made, hosts, net)
    if as_json:
        click.echo(json.dumps(_as_mapping(net, made, chosen, timing, bound)))
    else:
        _print(net, made, chosen, hosts, timing, bound)


def _hosts(topology: Topology, ranks: str | None, op: str) -> tuple[int, ...]:
    if ranks is None:
        hosts = tuple(range(len(topology.hosts)))
        return hosts[:2] if op == "sendrecv" else hosts
    return tuple(topology.host_index(name.strip()) for name in ranks.split(","))


def _schedule(
    topology: Topology,
    protocol: Protocol,
    op: str,
    hosts: tuple[int, ...],
    size: str | None,
    algorithm: str,
    root: str | None,
) -> Schedule:
    algorithm_names(op)  # an unknown operation is told before anything else
    if op == "sendrecv" and len(hosts) != 2:
        raise InputError(f"sendrecv: {len(hosts)} ranks given; name two with --ranks FROM,TO")
    if size is None and op != "barrier":
        raise InputError(f"{op}: say how much with --bytes, such as --bytes 25MB")
    num_bytes = 0 if size is None or op == "barrier" else parse_bytes(size)
    if op == "all_to_all":
        num_bytes *= len(hosts)
    root_at = 0 if root is None else _root(topology, hosts, root)
    if algorithm == "auto" and protocol.rendezvous:
        algorithm = default_algorithm(op, gloo=True)
    return schedule(
        op,
        len(hosts),
        num_bytes=num_bytes,
        algorithm=algorithm,
        root=root_at,
        # Elements matter to gloo, which rounds its segments to them; everybody else cuts to the byte.
        element_bytes=4 if algorithm == "gloo" and num_bytes % 4 == 0 else 1,
        hosts=hosts,
        topology=topology,
        protocol=protocol,
    )


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


def _as_mapping(
    topology: Topology, made: Schedule, protocol: Protocol, timing: Timing, bound: float
) -> dict[str, object]:
    return {
        "op": made.op,
        "algorithm": made.algorithm,
        "protocol": protocol.name,
        "bytes": made.num_bytes // made.num_ranks if made.op == "all_to_all" else made.num_bytes,
        "seconds": timing.seconds,
        "rank_seconds": timing.rank_seconds,
        "link_bytes": _named(topology, timing.link_bytes),
        "background_link_bytes": _named(topology, timing.background_link_bytes),
        "lower_bound_seconds": bound,
    }


def _print(
    topology: Topology,
    made: Schedule,
    protocol: Protocol,
    hosts: tuple[int, ...],
    timing: Timing,
    bound: float,
) -> None:
    console = Console()
    console.print(_ranks_table(topology, hosts, timing))
    console.print(_links_table(topology, timing))
    repeated = "" if len(timing.seconds) == 1 else f" (of {len(timing.seconds)}, the last)"
    over = f", {timing.seconds[-1] / bound:.3g} times the least" if bound else ""
    console.print(
        f"{made.op} of {format_bytes(made.num_bytes)} by {made.algorithm} among {made.num_ranks} ranks"
        f" ({protocol.name}): {format_seconds(timing.seconds[-1])}{repeated};"
        f" at least {format_seconds(bound)}{over}",
        highlight=False,
        soft_wrap=True,
    )
    if len(timing.seconds) > 1:
        listed = ", ".join(format_seconds(each) for each in timing.seconds)
        console.print(f"each repetition: {listed}", highlight=False, soft_wrap=True)


def _ranks_table(topology: Topology, hosts: tuple[int, ...], timing: Timing) -> Table:
    ranks = sorted(range(len(hosts)), key=lambda rank: -timing.rank_seconds[rank])[:_MOST_ROWS]
    title = "completion by rank"
    if len(ranks) < len(hosts):
        title += f", the last {len(ranks)} of {len(hosts)}"
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
