"""`netgym retime`: time a finished run, or a launched program, on another network."""

from __future__ import annotations

from functools import partial
from pathlib import Path  # noqa: TC003 (read from the annotations)
from typing import Any

import click

from exogym_core.names import visible
from netgym.cli.run_commands import echo_code, exit_if_failed, reported, show_report, train_new
from netgym.command_options import not_empty, takes
from netsim.cli.terminal import given
from netsim.errors import InputError

__all__ = ["retime"]


@click.command()
@takes()
def retime(
    folder: Path = given("run", is_argument=True, required=True, metavar="RUN"),
    topology: str | None = given(metavar="NAME", callback=not_empty),
    protocol: str | None = given(metavar="NAME", callback=not_empty),
    overrides: tuple[str, ...] = given("--set", metavar="KEY=VALUE"),
    out: str | None = given(metavar="DIR", callback=not_empty),
    trust: bool = given(),
    jobs: int | None = given(type=click.IntRange(1)),
    as_json: bool = given(),
) -> None:
    """Time the finished RUN on another network, to the bit as if trained there; what depends on times is trained again.

    RUN may be a program's (netgym launch --out): its calls and computing are replayed, and the script does not run.

    Args:
        overrides: Set a key of the network, such as placement, collectives, compute.jitter or protocol.streams.
        protocol: Replace the protocol: ideal, linux-tcp, nccl-sockets or gloo.
        out: The new run's folder, new or empty [runs/<name>-retimed-<n>].
        trust: Accept a RUN that another user made or changed.
    """
    from exogym_core.config import resolved_protocol
    from exogym_core.results.run_folder import RunFolder, code_folder_of, require_own
    from netgym.experiment.comparison import edited_code_of
    from netgym.experiment.experiment import (
        Experiment,
        apply_overrides,
        differing_training,
        opened_topology,
    )

    if (folder / "launch.json").is_file():  # it names no code
        from netgym.launch.retiming import retime_launch

        retime_launch(folder, topology, protocol, overrides, out, as_json=as_json)
        return
    if not trust:
        require_own(folder, "run")
    source = RunFolder.open(folder)
    flags = {"topology": topology, "protocol": protocol}
    changed: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    stored = Experiment.load(folder / "experiment.yaml", trust=True)
    is_networks_own = stored.settings.protocol == resolved_protocol(None, stored.topology)
    if topology is not None and protocol is None and is_networks_own:
        # The stored form names it even where the experiment did not; another network has a protocol of its own.
        there = opened_topology(
            apply_overrides(stored.document, (), changed, folder=folder), topology, folder
        )
        changed["protocol"] = resolved_protocol(None, there)
    document = apply_overrides(stored.document, overrides, changed, folder=folder)
    experiment = Experiment.from_document(document, folder, "experiment", code_folder_of(folder))
    if (key := differing_training(stored, experiment)) is not None:
        raise InputError(
            f"retime: {key} is another than in {visible(folder)}, which changes the training: use: netgym compare"
        )
    made = RunFolder.create(out, f"{experiment.settings.name}-retimed")
    show = partial(show_report, made, as_json=as_json, jobs=jobs)
    again = f"netgym retime {visible(folder)}"
    with reported(made, show, again, made.discard_if_untrained):
        echo_code(experiment.own_code)
        if edited := edited_code_of(source, experiment.own_code):
            line = (
                f"{visible(edited[0], 100)} was edited since: rows that are retimed are of the recorded code"
            )
            click.echo(f"{visible(folder)}: {line}", err=True)
        train_new(experiment, made, jobs=jobs, source=source)
    exit_if_failed(made.read_summary())
