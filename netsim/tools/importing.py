"""`netsim import`: from measurements and descriptions of others to a topology file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from netsim.files.errors import InputError, NetsimError
from netsim.files.units import parse_bits_per_second, parse_seconds
from netsim.tools.usage import plain_lines
from netsim.tools.writing import check_new, write_new
from netsim.topology.foreign.draft import Assumed
from netsim.topology.foreign.reading import read_foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["command"]

T = TypeVar("T")

_MOST_HOSTS = 1000


@click.command("import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME", help="Of the topology; default: the file's.")
@click.option("--only", metavar="PLACE,...", default="", help="Of the measured places these alone.")
@click.option(
    "--hosts",
    multiple=True,
    metavar="[PLACE=]NUMBER",
    help="Of each place, or of this one; may be repeated.  [default: 1]",
)
@click.option(
    "--nic",
    multiple=True,
    metavar="[PLACE=]RATE[:RATE]",
    help="Each host's own link (up:down), everywhere or at this place; may be repeated.  [default: 10 Gbit/s]",
)
@click.option("--bandwidth", metavar="RATE", help="Of ways for which no rate is told, such as '1 Gbit/s'.")
@click.option("--latency", metavar="TIME", help="One way, of ways for which none is told.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE.yaml", help="Default: standard output.")
def command(
    files: tuple[Path, ...],
    name: str | None,
    only: str,
    hosts: tuple[str, ...],
    nic: tuple[str, ...],
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
        if out is not None:
            check_new(out)
        number, hosts_of = _by_place("--hosts", hosts, _number, 1)
        line, nics = _by_place("--nic", nic, _rates, (10e9, 10e9))
        if line[0] != line[1]:
            raise InputError(
                f"--nic {nic[-1]}: up:down is for one place: say which, such as --nic home={nic[-1]}"
            )
        assumed = Assumed(
            parse_bits_per_second(bandwidth) if bandwidth is not None else None,
            parse_seconds(latency) if latency is not None else None,
            line[0],
            number,
            nics,
            hosts_of,
        )
        places = [place.strip() for place in only.split(",") if place.strip()]
        draft = read_foreign(files, name, assumed, places)
        text = draft.to_yaml()
        for remark in draft.remarks:
            click.echo(plain_lines(f"note: {remark}"), err=True)
        if out is None:
            click.echo(text, nl=False)
        else:
            write_new(out, text)
    except NetsimError as error:
        raise click.ClickException(str(error)) from None


def _by_place(
    option: str, given: Sequence[str], read: Callable[[str], T], default: T
) -> tuple[T, dict[str, T]]:
    """What holds for all places, and what for some of them; the last of several counts."""
    those: dict[str, T] = {}
    for text in given:
        place, mark, value = text.rpartition("=")
        try:
            read_value = read(value.strip())
        except InputError as error:
            raise InputError(f"{option} {text}: {error}") from None
        if mark:
            those[place.strip()] = read_value
        else:
            default = read_value
    return default, those


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= _MOST_HOSTS:
        raise InputError(f"expected a whole number from 1 to {_MOST_HOSTS:,}, or PLACE=NUMBER")
    return int(text)


def _rates(text: str) -> tuple[float, float]:
    """One rate both ways, or `up:down`."""
    up, mark, down = text.partition(":")
    return parse_bits_per_second(up.strip()), parse_bits_per_second((down if mark else up).strip())
