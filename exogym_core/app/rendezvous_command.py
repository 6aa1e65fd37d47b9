"""`netgym rendezvous`: where sites that may die and come again meet."""

from __future__ import annotations

import json
import time

import click

from exogym_core.app.common_options import debug_flag, plain_json
from exogym_core.meeting_place import parse_address
from exogym_core.names import visible_text
from exogym_core.ranks.rendezvous.service import Meeting
from netsim.files.errors import InputError
from netsim.files.secret import shared_secret
from netsim.files.units import parse_seconds

__all__ = ["rendezvous"]


def _seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    try:
        return parse_seconds(value)
    except InputError as error:
        raise click.BadParameter(f"{value!r}: {error}", context, parameter) from None


@click.command()
@click.option(
    "--sites", metavar="N", type=click.IntRange(1, 4096), required=True, help="How many there can be."
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="127.0.0.1:29400",
    show_default=True,
    help="The address of this machine that the other sites reach: it listens nowhere else.",
)
@click.option(
    "--silent",
    metavar="SECONDS",
    type=click.FloatRange(1.0),
    default=10.0,
    show_default=True,
    help="A site that has not been heard of for so long is lost.",
)
@click.option(
    "--wait",
    metavar="TIME",
    callback=_seconds,
    default="10 min",
    show_default=True,
    help="How long a run's begin waits for all sites, from when the first one comes; but for those of join_at.",
)
@plain_json
@debug_flag
def rendezvous(sites: int, listen: str, silent: float, wait: float, as_json: bool) -> None:
    """Let sites meet that may die, hang, come late and come again; it outlives them and holds no model.

    A site is a process, or a torchrun group, started with NETGYM_RENDEZVOUS=HOST:PORT and the same secret; see
    docs/several-machines.md. Ended and started again, it finds its sites again.
    """
    began = time.monotonic()

    def say(line: str) -> None:
        click.echo(f"{time.monotonic() - began:8.1f} s  {visible_text(line)}", err=as_json)

    meeting = Meeting(sites, parse_address(listen, "--listen"), shared_secret(), silent, say, wait)
    host, port = meeting.address
    is_any = host in ("0.0.0.0", "::")
    host = "ADDRESS" if is_any else host
    told = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if is_any:
        say("it listens on all interfaces: ADDRESS is one of this machine's that the sites reach")
    say(f"listening for {sites} sites; start each with NETGYM_RENDEZVOUS={told}")
    try:
        meeting.serve()
    finally:
        if as_json:
            click.echo(json.dumps({"address": told, "sites": sites, "runs": meeting.told()}))
