"""`netsim flows`: simulate a list of transfers, and tell when each is delivered."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import click
import numpy as np

from netsim.face.flows import read_flows, time_flows
from netsim.files.errors import NetsimError
from netsim.files.plain_files import output_file
from netsim.tools.sign_of_life import SignOfLife
from netsim.tools.trace import tracing
from netsim.tools.usage import plain_lines
from netsim.topology.protocol import Protocol
from netsim.topology.topology import Topology
from netsim.topology.windows import window_limit

__all__ = ["command"]


@click.command("flows")
@click.argument("topology", metavar="TOPOLOGY.yaml")
@click.argument("flows", metavar="FLOWS.csv", type=click.Path(path_type=Path))
@click.option("--protocol", metavar="NAME", help="ideal, linux-tcp or gloo; default: what the topology says.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="RESULTS.csv", help="Default: standard output."
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write what happened, such as to t.json.gz.",
)
def command(topology: str, flows: Path, protocol: str | None, out: Path | None, trace: Path | None) -> None:
    """Simulate the transfers listed in FLOWS.csv and tell when each is delivered.

    FLOWS.csv has the columns start_s, src, dst and bytes; the result has the same rows and finish_s.
    """
    try:
        _run(topology, flows, protocol, out, trace)
    except NetsimError as error:
        raise click.ClickException(str(error)) from None


def _run(topology: str, flows: Path, protocol: str | None, out: Path | None, trace: Path | None) -> None:
    network = Topology.load(topology)
    parsed = Protocol.parse(network.protocol if protocol is None else protocol)
    table = read_flows(flows, network)
    recording = tracing(trace, (), lambda line: click.echo(plain_lines(line), err=True))
    with recording as recorder, SignOfLife("transfers", len(table.flows)) as progress:
        finish = time_flows(network, table.flows, parsed, on_delivered=progress.advance, recorder=recorder)
    num_lost = int(np.isinf(finish).sum())
    if num_lost:
        told = f"{num_lost} of {len(finish)} transfers {'is' if num_lost == 1 else 'are'} lost"
        click.echo(f"{told}, since a host of theirs crashed: finish_s is inf", err=True)
    limit = window_limit(network, parsed, [(flow.src, flow.dst, flow.num_bytes) for flow in table.flows])
    if limit is not None:
        click.echo(str(limit), err=True)
    if out is None:
        table.write(finish, sys.stdout)
    else:
        with output_file(out) as file, io.TextIOWrapper(file, encoding="utf-8", newline="") as text:
            table.write(finish, text)
