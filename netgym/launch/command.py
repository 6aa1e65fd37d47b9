"""`netgym launch`: a torch.distributed script over a simulated network."""

from __future__ import annotations

import math
import os
import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from exogym_core.names import visible
from netgym.command_options import takes
from netsim.cli.signals import Stoppable
from netsim.cli.terminal import given
from netsim.errors import InputError, locate_errors
from netsim.units import format_count, parse_seconds

if TYPE_CHECKING:
    from netgym.launch.run import Script

__all__ = ["command"]


@click.command("launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@takes()
def command(
    num_ranks: int | None = given("-n", "--nproc-per-node", metavar="N"),
    topology: str = given(metavar="NAME", default="lan"),
    protocol: str | None = given(metavar="NAME"),
    placement: str | None = given(metavar="HOSTS"),
    compute: str = given(metavar="HOW", default="live"),
    record_compute: Path | None = given(metavar="FILE"),
    collectives: str | None = given(metavar="NAME"),
    until: str | None = given(metavar="TIME"),
    clock: str = given(type=click.Choice(["virtual", "host"]), default="virtual"),
    cuda_as_cpu: bool = given(),
    meta: bool = given(),
    is_module: bool = given("-m", "--module"),
    out: Path | None = given(metavar="DIR"),
    trace: bool = given(),
    chakra: bool = given(),
    as_json: bool = given(),
    script: str = given(is_argument=True, required=True),
    arguments: tuple[str, ...] = given(is_argument=True, type=click.UNPROCESSED),
) -> None:
    """Run the torch.distributed program SCRIPT on a simulated network.

    With -n the script runs as under torchrun; without -n as under python, and starts its ranks itself. SCRIPT stays
    unchanged: its collectives exchange real values and take virtual time, whatever backend it names. At the end the
    virtual time is printed, by kind and by line of SCRIPT. Options of netgym go before SCRIPT, the script's own
    after it.

    Args:
        num_ranks: Processes that run SCRIPT, one rank each [one process, which starts its ranks itself].
        topology: A shipped name or a file.
        protocol: Protocol of transfers [the topology's, else gloo; with --cuda-as-cpu nccl-sockets].
        placement: Host names, comma-separated, one per rank.
        compute: Cost of computing: 'live', 'live 0.1' (measured, times a factor), 'flops h100' (FLOPs and bytes on a
            device), 'trace.csv h100' (measured operations, see --record-compute), or 'marks'.
        record_compute: Run SCRIPT on this machine's own devices and write how long each operation takes.
        collectives: A name such as ring, or '{all_reduce: ring}' [auto: gloo's own under gloo, NCCL's choice under
            nccl-sockets, else for each call the fastest by itself].
        until: Stop the run at this virtual time, such as '60 s'.
        clock: Time that SCRIPT reads and sleeps after init_process_group: virtual, or this machine's.
        cuda_as_cpu: Map CUDA devices that SCRIPT names to the CPU.
        meta: Run SCRIPT without values: its tensors have shapes alone, and take no memory.
        is_module: SCRIPT is a module, as for python -m.
        out: A run folder, new or empty.
        trace: Write trace.json.gz into it, for Perfetto.
        chakra: Write Chakra execution traces into it, chakra.RANK.et each.
        as_json: Print one JSON document; SCRIPT prints to stderr.
    """
    from exogym_core.results.run_folder import RunFolder
    from netgym.launch.compute import ComputeClock
    from netgym.launch.program import run_program
    from netgym.launch.recording import RECORDING
    from netgym.launch.report import print_launch, write_launch
    from netgym.launch.run import Launch, Script
    from netsim import Topology

    if script.startswith("-"):
        raise InputError(f"netgym launch: no such option: {visible(script)}: netgym launch --help lists them")
    if num_ranks is not None and num_ranks < 1:
        raise InputError(f"netgym launch: -n {num_ranks}: give a whole number from 1 up")
    if not is_module and not Path(script).is_file():
        raise InputError(f"{visible(script)}: no such script; for a module add -m")
    if not is_module and script.endswith(".py"):
        _check_syntax(script)
    if (trace or chakra) and out is None:
        flag = "--trace" if trace else "--chakra"
        raise InputError(f"netgym launch: {flag} needs a run folder: add --out DIR")
    if record_compute is not None:
        if num_ranks is not None or out is not None or as_json or cuda_as_cpu or meta:
            raise InputError(
                "netgym launch: --record-compute simulates nothing: leave out -n, --out, --json, --cuda-as-cpu and "
                "--meta; for more ranks than one: torchrun --nproc-per-node N --no-python netgym launch "
                "--record-compute FILE SCRIPT"
            )
        _record(Script(script, arguments, is_module, False), record_compute)
        return
    if ComputeClock.parse(compute).kind == "live" and meta:
        raise InputError(
            "netgym launch: --meta computes no values, whose time could be measured: add --compute 'flops DEVICE'"
        )
    if (file := shlex.split(compute)[0]).endswith(".csv"):  # ranks may start in other folders
        compute = compute.replace(file, os.path.abspath(file), 1)
    with locate_errors("netgym launch: --until"):
        until_seconds = math.inf if until is None else parse_seconds(until)
    if until_seconds <= 0:
        raise InputError(f"netgym launch: --until {until}: give a time above 0 s")
    network = Topology.load(topology)
    folder = RunFolder.create(str(out), Path(script).stem) if out is not None else None
    launch = Launch(
        Script(script, arguments, is_module, as_json),
        num_ranks,
        network,
        compute,
        placement.split(",") if placement is not None else None,
        until_seconds=until_seconds,
        trace=folder.path / "trace.json.gz" if folder is not None and trace else None,
        chakra=folder.path if folder is not None and chakra else None,
        recording=folder.path / RECORDING if folder is not None else None,
        protocol=protocol,
        collectives=collectives,
        cuda_as_cpu=cuda_as_cpu,
        clock="host" if clock == "host" else "virtual",
        has_values=not meta,
    )
    with Stoppable() as work:
        report, error = run_program(launch, lambda text: click.echo(f"warning: {text}", err=True))
    if work.is_stopped:
        if folder is not None:
            folder.discard()
        work.end("no rank had joined the simulation, and nothing is left")
    if folder is not None:
        report = write_launch(folder, report)
    print_launch(report, None if folder is None else folder.path, as_json=as_json)
    if error is not None:
        if not cuda_as_cpu and "cuda" in str(error).partition("\n")[0].lower():
            error.add_note(
                "Where the script names CUDA devices and this machine has none, add --cuda-as-cpu."
            )
        raise error
    if report.ending == "interrupted":
        raise KeyboardInterrupt("the figures are those until then")


def _record(script: Script, file: Path) -> None:
    """Run a script in this process as torchrun would, and write the times of its operations."""
    from netgym.launch.kernel_times import KernelRecorder
    from netgym.launch.script import run_script

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    recorder = KernelRecorder()
    try:
        with recorder:
            run_script(script)
    finally:
        if os.environ["RANK"] == "0":
            count = format_count(recorder.write(file), "operation")
            click.echo(f'{count} recorded: use them by --compute "{visible(file)} DEVICE"', err=True)


def _check_syntax(script: str) -> None:
    """Compile a script before any rank does."""
    try:
        with warnings.catch_warnings(action="ignore"):  # ranks print them
            compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    except SyntaxError as error:
        place = f"{visible(script)}:{error.lineno}"
        raise InputError(f"{place}: {type(error).__name__}: {visible(error.msg)}") from None
