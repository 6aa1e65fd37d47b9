"""`netsim export`: a topology in the formats of others."""

from __future__ import annotations

from pathlib import Path

import click

from netsim.files.errors import InputError, NetsimError
from netsim.tools.writing import check_new, write_new
from netsim.topology.foreign.astrasim import write_astrasim
from netsim.topology.foreign.netem import address_file, shaping_script
from netsim.topology.foreign.simgrid import write_simgrid
from netsim.topology.topology import Topology

__all__ = ["command"]

_FORMATS = {"simgrid": write_simgrid, "astra-sim": write_astrasim}


@click.command("export")
@click.argument("topology")
@click.option("--format", "form", required=True, type=click.Choice([*_FORMATS, "tc"]), help="Whose.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="PATH", help="A new file; for tc a new folder."
)
def command(topology: str, form: str, out: Path | None) -> None:
    """Write TOPOLOGY as SimGrid's XML, as ASTRA-sim's network YAML, or as shell scripts with tc commands.

    `tc` writes a folder with a script for each host, which shapes what leaves it (rate, latency and loss to each
    other host), and addresses.sh, where you say who they are.
    """
    try:
        net = Topology.load(topology)
        if form != "tc":
            text = _FORMATS[form](net)
            if out is None:
                click.echo(text, nl=False)
            else:
                write_new(out, text)
            return
        if out is None:
            raise InputError("export: tc is a script for each host: say where with --out FOLDER")
        _make_folder(out)
        write_new(out / "addresses.sh", address_file(net))
        for host in net.hosts:
            write_new(out / f"{host.name}.sh", shaping_script(net, host.index))
    except NetsimError as error:
        raise click.ClickException(str(error)) from None


def _make_folder(path: Path) -> None:
    if path.is_dir():
        return
    check_new(path)
    try:
        path.mkdir()
    except OSError as error:
        raise InputError(f"--out {path}: cannot be written: {error.strerror}") from None
