"""`netgym launch`: somebody's training script over a simulated network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from exogym_core.names import visible
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from exogym_core.torch_backend.report import ProgramReport

__all__ = ["command"]

_MOST_PLACES = 12  # in the table; the file has all


@click.command("launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--nproc-per-node", "num_ranks", metavar="N", type=int, required=True, help="Ranks.")
@click.option(
    "--topology", metavar="NAME", default="lan", show_default=True, help="A shipped name or a file."
)
@click.option("--protocol", metavar="NAME", help="How transfers use links [the topology's].")
@click.option("--placement", metavar="HOSTS", help="Host names, one a rank, with commas between.")
@click.option(
    "--compute",
    metavar="HOW",
    default="live",
    show_default=True,
    help="What computing costs: 'live', 'live 0.1' (measured, times a factor), 'flops h100 0.4', or 'marks'.",
)
@click.option("--collectives", metavar="NAME", help="Algorithm of all collectives [the fastest here].")
@click.option(
    "--replace-backend",
    metavar="NAMES",
    help="Backends that the script asks for and gets netsim instead, such as gloo,nccl.",
)
@click.option("-m", "--module", "is_module", is_flag=True, help="SCRIPT is a module, as for python -m.")
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="A run folder, new or empty.")
@click.option("--trace", is_flag=True, help="Write trace.json.gz into it, to look at with Perfetto.")
@click.option("--chakra", is_flag=True, help="Write Chakra execution traces into it, chakra.RANK.et each.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    num_ranks: int,
    topology: str,
    protocol: str | None,
    placement: str | None,
    compute: str,
    collectives: str | None,
    replace_backend: str | None,
    is_module: bool,
    out: Path | None,
    trace: bool,
    chakra: bool,
    as_json: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run the torch.distributed program SCRIPT as torchrun would, on a simulated network.

    The script is not changed: it sees torchrun's variables and a backend called netsim, whose collectives carry real
    values and cost virtual time. At the end it is told how long the run took, where ranks waited, and what went over
    which link. Options of netgym go before SCRIPT, the script's own after it.
    """
    from exogym_core.results.record import RunFolder
    from exogym_core.torch_backend.program import LaunchedProgram, run_program
    from exogym_core.torch_backend.session import ComputeClock
    from netsim.topology import Topology

    if num_ranks < 1:
        raise InputError(f"netgym launch: -n {num_ranks}: give a whole number from 1 up")
    if not is_module and not Path(script).is_file():
        raise InputError(f"{visible(script)}: no such script; for a module add -m")
    if (trace or chakra) and out is None:
        flag = "--trace" if trace else "--chakra"
        raise InputError(f"netgym launch: {flag} needs a run folder: add --out DIR")
    replaced = tuple(name.strip() for name in (replace_backend or "").split(",") if name.strip())
    folder = RunFolder.create(str(out), Path(script).stem) if out is not None else None
    report = run_program(
        LaunchedProgram(script, arguments, is_module, replaced),
        num_ranks,
        Topology.load(topology),
        compute=ComputeClock.parse(compute),
        placement=placement.split(",") if placement is not None else None,
        protocol=protocol,
        collectives=collectives,
        trace=folder.path / "trace.json.gz" if folder is not None and trace else None,
        chakra=folder.path if folder is not None and chakra else None,
        warn=lambda text: click.echo(f"warning: {text}", err=True),
    )
    document = {"run_folder": str(folder.path) if folder is not None else None, **report.as_json()}
    if folder is not None:
        folder.write_text("launch.json", json.dumps(document, indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(document))
        return
    _tell(report)
    if folder is not None:
        click.echo(str(folder.path))


def _tell(report: ProgramReport) -> None:
    from netsim.files.units import format_bytes, format_seconds

    console = Console(highlight=False)
    console.print(
        f"\n{format_seconds(report.virtual_seconds)} of virtual time, ranks compute "
        f"{report.compute_utilisation:.1%} of it; rank {report.slowest_rank} ended last"
    )
    _table(
        console,
        ("waited at", "in", "seconds, mean over ranks"),
        [(place, op, format_seconds(seconds)) for place, op, seconds in report.exposed_seconds],
    )
    links = sorted(report.link_bytes.items(), key=lambda item: -item[1])
    _table(console, ("link", "bytes"), [(name, format_bytes(count)) for name, count in links])


def _table(console: Console, headings: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        return
    table = Table(*headings, box=None, pad_edge=False, header_style="bold")
    table.columns[-1].justify = "right"
    for row in rows[:_MOST_PLACES]:
        table.add_row(*(visible(str(cell)) for cell in row))
    console.print()
    console.print(table)
    if len(rows) > _MOST_PLACES:
        console.print(f"and {len(rows) - _MOST_PLACES} more")
