"""`netgym run` and `netgym compare`: train as an experiment file says, or go on with a run."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exogym_core.app.common_options import debug_flag, not_empty, results_json
from exogym_core.app.runs import resume_run, train
from exogym_core.names import visible
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from exogym_core.app.experiment import Experiment

__all__ = ["compare", "run"]


def _or_resume(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """EXPERIMENT is needed unless there is --resume."""
    if value is None and context.params.get("resume") is None:
        raise click.MissingParameter(ctx=context, param=parameter, param_hint="'EXPERIMENT'")
    return value


@dataclass(frozen=True)
class RunArguments:
    """What `run` and `compare` are both told on the command line."""

    experiment: Path | None
    resume: Path | None
    trust: bool
    edited_code: bool
    topology: str | None
    protocol: str | None
    scale: str | None
    overrides: tuple[str, ...]
    out: str | None
    seeds: int | list[int] | None
    as_json: bool

    def resumed(self, **others: object) -> Path | None:
        """The run to go on with, which it does as it was begun: nothing else may be given."""
        if self.resume is None:
            for name in ("trust", "edited_code"):
                if getattr(self, name):
                    raise InputError(f"--{name.replace('_', '-')}: goes with --resume: leave it out")
            return None
        given = {name: getattr(self, name) for name in ("experiment", "topology", "protocol")}
        given |= {"set": self.overrides, "scale": self.scale, "out": self.out, "seeds": self.seeds, **others}
        for name, value in given.items():
            if value:
                told = "EXPERIMENT" if name == "experiment" else f"--{name}"
                raise InputError(
                    f"--resume {visible(self.resume)}: goes on as it was begun: leave out {told}"
                )
        return self.resume

    def load(self) -> Experiment:
        """The experiment, with what replaces its keys."""
        from exogym_core.app.experiment import Experiment

        assert self.experiment is not None
        topology = self.topology
        if topology is not None and os.path.isfile(topology):
            # A path in the experiment is relative to its file, one on the command line to where we are.
            topology = str(Path(topology).resolve())
        given = {"topology": topology, "protocol": self.protocol, "seeds": self.seeds}
        options = {key: value for key, value in given.items() if value is not None}
        return Experiment.load(self.experiment, list(self.overrides), options, self.scale)


def _seeds(context: click.Context, parameter: click.Parameter, value: str | None) -> int | list[int] | None:
    """A number of seeds, or a list of them."""
    if value is None:
        return None
    numbers = [number.strip() for number in value.split(",")]
    if not all(number.isascii() and number.isdigit() for number in numbers):
        told = f"{value!r} is no number of seeds and no list of them: write 3, or 0,3,4"
        raise click.BadParameter(told, context, parameter)
    return [int(number) for number in numbers] if "," in value else int(value)


def _run_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `run` and `compare` have in common; they get it as one `RunArguments`."""

    @wraps(command)
    def called(**given: Any) -> None:
        asked = RunArguments(**{each.name: given.pop(each.name) for each in fields(RunArguments)})
        command(asked, **given)

    for option in reversed(
        [
            click.argument(
                "experiment", type=click.Path(path_type=Path), required=False, callback=_or_resume
            ),
            click.option(
                "--resume",
                metavar="DIR",
                type=click.Path(path_type=Path),
                is_eager=True,  # known when it is asked whether EXPERIMENT is missing
                help="Go on with the run in this folder, from its last checkpoint.",
            ),
            click.option(
                "--trust", is_flag=True, help="With --resume: though somebody else has made or changed it."
            ),
            click.option(
                "--edited-code",
                is_flag=True,
                help="With --resume: though code of your own was edited since the checkpoint.",
            ),
            click.option(
                "--topology",
                metavar="NAME",
                callback=not_empty,
                help="Another network: a shipped name or a file.",
            ),
            click.option("--protocol", metavar="NAME", callback=not_empty, help="Another protocol."),
            click.option(
                "--scale", metavar="NAME", help="Change the keys that EXPERIMENT lists under scales: NAME."
            ),
            click.option(
                "--set",
                "overrides",
                metavar="KEY=VALUE",
                multiple=True,
                help="Change one key, such as steps=20 or strategies.DiLoCo.H=50. May be repeated.",
            ),
            click.option(
                "--out",
                metavar="DIR",
                callback=not_empty,
                help="The run's folder, new or empty [runs/<name>-<n>].",
            ),
            click.option(
                "--seeds",
                metavar="N",
                callback=_seeds,
                help="Each strategy with N seeds, counted up from the experiment's, or with a list such as 0,3,4.",
            ),
            results_json,
            debug_flag,
        ]
    ):
        called = option(called)
    return called


@click.command()
@_run_options
@click.option("--strategy", metavar="NAME", help="Which of the experiment's strategies [the only one].")
@click.option("--trace", is_flag=True, help="Write trace.json.gz, to look at with Perfetto.")
def run(asked: RunArguments, strategy: str | None, trace: bool) -> None:
    """Train with one strategy of EXPERIMENT, or go on with a run."""
    resumed = asked.resumed(strategy=strategy)
    if resumed is not None:
        return resume_run(
            resumed, trust=asked.trust, edited_code=asked.edited_code, trace=trace, as_json=asked.as_json
        )
    loaded = asked.load()
    if strategy is not None:
        loaded = loaded.only(strategy)
    elif len(loaded.strategies) > 1:
        names = ", ".join(visible(entry.label, 40) for entry in loaded.strategies)
        raise InputError(
            f"{visible(asked.experiment)}: has several strategies: add --strategy with one of {names}, "
            "or use: netgym compare"
        )
    return train(loaded, asked.out, trace=trace, as_json=asked.as_json)


@click.command()
@_run_options
def compare(asked: RunArguments) -> None:
    """Train with every strategy of EXPERIMENT and tell which wins, and why; or go on with a run."""
    resumed = asked.resumed()
    if resumed is not None:
        return resume_run(resumed, trust=asked.trust, edited_code=asked.edited_code, as_json=asked.as_json)
    return train(asked.load(), asked.out, as_json=asked.as_json)
