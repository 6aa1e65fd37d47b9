"""`netsim validate`: check a topology file."""

from __future__ import annotations

import json

import click

from netsim.files.errors import InputError
from netsim.topology.devices import device_name
from netsim.topology.schema import TopologyFile
from netsim.topology.topology import Topology

__all__ = ["command"]


@click.command("validate")
@click.argument("file", metavar="FILE", required=False)
@click.option("--json-schema", is_flag=True, help="Print the format as a JSON Schema, for editors.")
def command(file: str | None, json_schema: bool) -> None:
    """Check a topology FILE; every mistake is told by file, line and key."""
    if json_schema:
        click.echo(json.dumps(TopologyFile.model_json_schema(), indent=2))
        return
    if file is None:
        raise click.UsageError("Missing argument 'FILE'.")
    topology = Topology.load(file)
    counts = [(len(topology.hosts), "host"), (len(topology.regions), "region"), (len(topology.links), "link")]
    text = ", ".join(f"{number:,} {noun}{'' if number == 1 else 's'}" for number, noun in counts)
    click.echo(f"{file}: valid: {text} (one direction each)")
    _warn_of_devices(file, topology)


def _warn_of_devices(file: str, topology: Topology) -> None:
    """A network needs no devices, but whoever computes on its hosts by FLOPs does."""
    unlike = {host.device: host.name for host in reversed(topology.hosts) if host.device is not None}
    for device, host in reversed(unlike.items()):
        try:
            device_name(device, f"host {host}: ")
        except InputError as error:
            click.echo(f"warning: {file}: {error}", err=True)
