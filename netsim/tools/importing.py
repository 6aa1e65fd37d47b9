"""`netsim import`: from measurements and descriptions of others to a topology file."""

from __future__ import annotations

from pathlib import Path

import click

from netsim.files.errors import NetsimError
from netsim.files.units import parse_bits_per_second, parse_seconds
from netsim.tools.writing import write_new
from netsim.topology.foreign.draft import Assumed
from netsim.topology.foreign.reading import read_foreign

__all__ = ["command"]


@click.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME", help="Of the topology; default: the file's.")
@click.option("--only", metavar="PLACE,...", default="", help="Of the measured places these alone.")
@click.option("--hosts", default=1, show_default=True, type=click.IntRange(1, 1000), help="Of each place.")
@click.option("--nic", default="10 Gbit/s", show_default=True, metavar="RATE", help="Each host's own link.")
@click.option("--bandwidth", metavar="RATE", help="Of ways for which no rate is told, such as '1 Gbit/s'.")
@click.option("--latency", metavar="TIME", help="One way, of ways for which none is told.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE.yaml", help="Default: standard output.")
def command(
    files: tuple[Path, ...],
    name: str | None,
    only: str,
    hosts: int,
    nic: str,
    bandwidth: str | None,
    latency: str | None,
    out: Path | None,
) -> None:
    """Make a topology of what you have measured, or of another tool's network file.

    Measurements, together: iperf3 -J (a run a file, called FROM--TO.json, or by address), ping's output
    (FROM--TO.txt), tables of round trip, throughput and loss as CSV (columns from,to,rtt,throughput,loss; or a square
    whose first cell says 'rtt ms') or JSON; CloudPing's, WonderNetwork's and skyplane's tables. Descriptions, alone:
    GraphML and GML (Topology Zoo), ASTRA-sim's YAML, SimGrid's XML. What had to be assumed is said in the file.
    """
    try:
        assumed = Assumed(
            parse_bits_per_second(bandwidth) if bandwidth is not None else None,
            parse_seconds(latency) if latency is not None else None,
            parse_bits_per_second(nic),
            hosts,
        )
        places = [place.strip() for place in only.split(",") if place.strip()]
        text = read_foreign(files, name, assumed, places).to_yaml()
        if out is None:
            click.echo(text, nl=False)
        else:
            write_new(out, text)
    except NetsimError as error:
        raise click.ClickException(str(error)) from None
