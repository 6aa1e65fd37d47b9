"""Somebody's program on a simulated network: its processes, the simulation, and its report."""

from __future__ import annotations

import math
import os
import signal
import tempfile
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.ranks.processes.arena import Arena
from exogym_core.ranks.processes.children import Children
from exogym_core.ranks.processes.rank_block import RankBlock
from exogym_core.torch_backend.guests import Guests, listen
from exogym_core.torch_backend.hooks import become_launched
from exogym_core.torch_backend.launched import Launched
from exogym_core.torch_backend.run import LaunchedRun, nothing_simulated
from exogym_core.torch_backend.script import run_rank, run_script
from netsim.files.errors import InputError, NetsimError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable

    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
    from exogym_core.communicator.simulated.simulation import World
    from exogym_core.ranks.processes.channel import Pipe
    from exogym_core.torch_backend.launch import Launch, Script
    from exogym_core.torch_backend.report import LaunchReport

__all__ = ["run_program"]


def run_program(launch: Launch, warn: Callable[[str], None]) -> tuple[LaunchReport, NetsimError | None]:
    """Run a program to its end, or as far as it gets.

    Args:
        launch: what runs where.
        warn: called with a line about what else is to be known.

    Returns:
        What it came to, however it ended, and why it failed.

    Raises:
        NetsimError: it never got to the simulation.
        InputError: an argument is wrong, or the program makes no call that could be simulated.
        KeyboardInterrupt: before any rank had come.
    """
    # Programs of others may well compute for long between two calls.
    warnings.filterwarnings("ignore", message=".* sends nothing: ")
    with tempfile.TemporaryDirectory(prefix="netgym-") as folder:
        devices = (launch.num_ranks or len(launch.topology.hosts)) if launch.cuda_as_cpu else 0
        launched = Launched(folder, launch.num_ranks or 0, launch.compute, devices)
        run = _start_ranks if launch.num_ranks else _let_ranks_start
        ran = run(launch, launched, warn)
        ran.refuse(launched.refusal)
        return ran.report(launch.about()), ran.error


def _start_ranks(launch: Launch, launched: Launched, warn: Callable[[str], None]) -> LaunchedRun:
    """A process a rank, as torchrun starts them."""
    world = launch.world(launched.num_ranks)
    body = partial(run_rank, script=launch.script, launched=launched)
    arena = Arena(num_regions=world.num_ranks + 1)
    try:
        run = _run_in(world, arena, launch)
        with Children(partial(_be_rank, world.num_ranks, body), world.num_ranks) as children:
            for channel in children.channels:
                channel.send_fds([arena.fd])
                channel.reads_ahead = True
            run.serve(children)
    finally:
        arena.close()
    run.write_traces(launch.trace, launch.chakra, warn)
    return run


def _be_rank(num_ranks: int, body: Callable[[SimulatedCommunicator], Any], index: int, channel: Pipe) -> None:
    arena = Arena(channel.recv_fds(1)[0], num_regions=num_ranks + 1, region=index + 1)
    channel.reads_ahead = True
    torch.set_num_threads(1)
    RankBlock.alone(num_ranks, index, channel, arena).run(body)


def _let_ranks_start(launch: Launch, launched: Launched, warn: Callable[[str], None]) -> LaunchedRun:
    """One process, whose own children come as ranks."""
    with (
        listen(launched.socket) as listener,
        Children(partial(_be_script, launch.script, launched), 1) as children,
    ):

        def ended() -> str:
            how = children.describe_exit(0)
            return "" if how is None else f"{launch.script.name} has ended ({how})"

        try:
            guests = Guests.let_in(listener, math.inf, ended)
        except TimeoutError as error:
            raise InputError(launched.refusal or nothing_simulated(str(error))) from None
        listener.close()  # later connections are refused
        with guests:
            run = _serve_guests(launch, guests, warn)
            if run.ending != "finished":  # all at once: it would tell of its dead children
                os.kill(children.pids[0], signal.SIGKILL)
                guests.end()
        if run.ending == "finished":
            _finish_script(run, launch.script.name, children)
    return run


def _be_script(script: Script, launched: Launched, index: int, channel: Pipe) -> None:
    torch.set_num_threads(1)
    launched.to_environment()
    become_launched()
    run_script(script)


def _serve_guests(launch: Launch, guests: Guests, warn: Callable[[str], None]) -> LaunchedRun:
    num_ranks = len(guests.channels)
    try:
        world = launch.world(num_ranks)
    except InputError as error:
        guests.refuse(str(error))
        raise
    arena = Arena(num_regions=num_ranks + 1)
    try:
        run = _run_in(world, arena, launch)
        guests.welcome(arena.fd)
        run.serve(guests)
    finally:
        arena.close()
    run.write_traces(launch.trace, launch.chakra, warn)
    return run


def _run_in(world: World, arena: Arena, launch: Launch) -> LaunchedRun:
    traced = launch.trace is not None or launch.chakra is not None
    return LaunchedRun(world, arena, until_seconds=launch.until_seconds, traced=traced)


def _finish_script(run: LaunchedRun, name: str, children: Children) -> None:
    """Wait for the script itself, whose ranks have ended."""
    how = None
    try:
        while how is None:
            how = children.describe_exit(0, timeout_seconds=3600.0)
    except KeyboardInterrupt:
        run.ending = "interrupted"
        return
    if how != "exit code 0":
        run.fail(RankError(f"{name} ended after its ranks: {how}", 0))
