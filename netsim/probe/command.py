"""`netsim probe`: measure a network from its hosts."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import click

from netsim.errors import InputError, NetsimError
from netsim.files.signed import PeerAddress, PeerError, shared_secret
from netsim.formats.builder import safe_name
from netsim.probe.station import Station
from netsim.probe.survey import Asked, survey, topology_text
from netsim.units import format_bytes, format_seconds, parse_bytes, shown

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
from netsim.cli.signals import Stoppable
from netsim.cli.terminal import check_new, given, takes, write_new

__all__ = ["command"]

_PORT = 7171


@click.command("probe")
@takes()
def command(
    hosts: tuple[str, ...] = given(is_argument=True, required=True, metavar="NAME=ADDRESS[:PORT]..."),
    me: str | None = given(metavar="NAME"),
    listen: str | None = given(metavar="ADDRESS[:PORT]"),
    seconds: float = given(default=3.0, type=click.FloatRange(0.5, 60)),
    streams: int = given(default=8, type=click.IntRange(2, 64)),
    most: str = given(default="2 GB", metavar="BYTES"),
    wait: float = given(default=60.0, type=click.FloatRange(1, 86400)),
    gloo: bool = given(),
    name: str = given(default="probed"),
    out: Path | None = given(metavar="FILE.yaml"),
) -> None:
    """Measure the network between hosts, and write it as a topology.

    Start the same command on every host, with the same list, in any order:

    \b
        netsim probe us=203.0.113.5 eu=198.51.100.7 asia=192.0.2.9:7200 --out mine.yaml

    The first host of the list coordinates the measurements, one after another, and all hosts write the same file:
    of each pair the round trip and the throughput each way, with one stream and with several; then each host with
    all others at once, which separates its own limit from those of its routes. A comment in the file gives the
    uncertainty of each figure. Leave the network idle while the probe runs.

    Each host listens only at its own address of the list, TCP port 7171 if none is given: open it to the others in
    your firewall (with --gloo all ports). All must share a secret: the same NETGYM_SECRET (openssl rand -hex 32),
    NETGYM_SECRET_FILE, or ~/.config/netgym/secret. Measurements send random bytes, not encrypted.

    Args:
        me: Name of this host; default: the host whose address this machine has.
        listen: Address to listen at, if not this host's entry (behind NAT).
        seconds: Duration of a throughput measurement.
        streams: Streams of the second throughput measurement.
        most: Most bytes that a measurement sends.
        wait: Seconds to wait for all hosts.
        gloo: Time torch's gloo between each pair of hosts too.
        name: Name of the topology.
        out: A new file; default: standard output.
    """
    places = _places(hosts)
    own = _own(places, me)
    where = _place(listen, "--listen") if listen is not None else places[own]
    asked = Asked(seconds, streams, parse_bytes(most), wait, gloo)
    check_new(out)
    with Stoppable() as work:
        text = _probe(own, where, places, asked, name)
    work.end("no topology is written, since it needs every measurement; those made are printed above")
    write_new(out, text)
    if out is not None:
        click.echo(str(out))


def _probe(own: str, where: PeerAddress, places: dict[str, PeerAddress], asked: Asked, name: str) -> str:
    secret = shared_secret()
    with Station(own, where, secret) as station:
        if own != next(iter(places)):
            _print_line(
                f"{own}: listening at {where[0]}:{where[1]}, waiting for {next(iter(places))}, the leading host"
            )
            return station.follow(list(places), asked.wait_seconds, _print_line)
        num = len(places)
        most = asked.most_bytes * asked.num_steps(num)
        _print_line(
            f"{own} leads {num} hosts: {asked.num_steps(num)} measurements, about"
            f" {format_seconds(asked.likely_seconds(num))}, never more than {format_bytes(most)} in all"
        )
        # This host does its own part like the others, in addition to leading them.
        follower = threading.Thread(
            target=_follow_quietly, args=(station, list(places), asked.wait_seconds + 60.0), daemon=True
        )
        follower.start()
        found, channels = survey(places, secret, asked, _print_line)
        text = topology_text(found, name)
        for channel in channels:
            with contextlib.suppress(PeerError):
                channel.send(do="done", text=text)
        follower.join(5.0)
        for channel in channels:
            channel.close()
        return text


def _follow_quietly(station: Station, names: Sequence[str], seconds: float) -> None:
    with contextlib.suppress(NetsimError):  # the leading thread has the same error
        station.follow(names, seconds, _print_line)


def _print_line(text: str) -> None:
    click.echo(text, err=True)


def _places(hosts: Sequence[str]) -> dict[str, PeerAddress]:
    places: dict[str, PeerAddress] = {}
    for text in hosts:
        name, mark, address = text.partition("=")
        if not mark or not name or not address:
            raise InputError(
                f"host {shown(text)}: expected NAME=ADDRESS or NAME=ADDRESS:PORT, such as us=10.0.0.1"
            )
        if safe_name(name, {}) != name:
            raise InputError(f"host {shown(text)}: a name has letters, digits, '_', '.' and '-' only")
        if name in places:
            raise InputError(f"host {shown(text)}: there are two of that name")
        places[name] = _place(address, f"host {name}")
    if len(places) < 2:
        raise InputError("probe: give at least two hosts, the same list on each of them")
    if len(places) > 64:
        raise InputError(
            f"probe: {len(places)} hosts are more than 64, every two of which would be measured alone"
        )
    if len(set(places.values())) < len(places):
        raise InputError("probe: two hosts have the same address and port")
    return places


def _place(text: str, where: str) -> PeerAddress:
    """Parse `ADDRESS`, `ADDRESS:PORT`, `[IPv6]` or `[IPv6]:PORT`."""
    host, port = text, ""
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not host or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
        raise InputError(f"{where}: {shown(text)}: expected ADDRESS or ADDRESS:PORT")
    try:
        found = socket.getaddrinfo(host, int(port or _PORT), type=socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(f"{where}: {shown(host)} is no address: {error.strerror or error}") from None
    return str(found[0][4][0]), int(port or _PORT)


def _own(places: dict[str, PeerAddress], me: str | None) -> str:
    if me is not None:
        if me not in places:
            raise InputError(f"--me {shown(me)}: is not among the hosts {', '.join(places)}")
        return me
    own = [name for name, place in places.items() if _is_here(place[0])]
    if len(own) != 1:
        what = "none of the addresses is" if not own else f"the addresses of {', '.join(own)} are"
        raise InputError(f"probe: {what} this machine's: say which host this is with --me NAME")
    return own[0]


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as opened:
        try:
            opened.bind((address, 0))
        except OSError:
            return False
    return True
