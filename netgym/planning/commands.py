"""`netgym plan`, `netgym advise`, `netgym reproduce`: costs of a strategy before anything is paid."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import click

from exogym_core.config import MOST_WORKERS
from exogym_core.uncompiled import without_compiler
from netgym.command_options import first_line, takes
from netgym.planning.tables import LONGEST_SEQUENCE, MEMORY_CHOICES
from netsim.cli.signals import Stoppable
from netsim.cli.terminal import DelayedProgress, given
from netsim.errors import InputError, unknown_name
from netsim.network.clock import raised_gc_threshold
from netsim.units import format_count, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from netgym.planning.planned import Request

__all__ = ["advise", "plan", "plan_rows", "reproduce"]


class _BySite(click.ParamType):  # type: ignore[type-arg]
    """One number for all, or one for each named host or region.

    >>> devices = _BySite(int, 1, 10**6, "a whole number")
    >>> devices.convert("4", None, None), devices.convert("fra=4, ore=2", None, None)
    (4, {'fra': 4, 'ore': 2})
    """

    name = "number"

    def __init__(
        self, kind: type[int | float], least: float, most: float, expected: str, word: str | None = None
    ) -> None:
        self._kind, self._least, self._most, self._expected, self._word = kind, least, most, expected, word

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text of a flag.

        Raises:
            InputError: it is neither.
        """
        found: dict[str, int | float] = {}
        if self._word is not None and value.strip() == self._word:
            return self._word
        try:
            if "=" not in value:
                return self._number(value)
            for part in value.split(","):
                site, sign, text = (word.strip() for word in part.partition("="))
                if not sign or not site or site in found:
                    raise ValueError("SITE=NUMBER,SITE=NUMBER,..., each site once")
                found[site] = self._number(text)
        except ValueError as error:
            raise InputError(f"{param.opts[0] if param else ''} {value}: expected {error}") from None
        return found

    def _number(self, text: str) -> int | float:
        with suppress(ValueError):
            found = self._kind(text)
            if self._least <= found <= self._most and (self._kind is float or text.strip().isdecimal()):
                return found
        raise ValueError(self._expected)


_DEVICES = _BySite(int, 1, math.inf, "a whole number from 1 on, or such as fra=4,ore=2")
_DOLLARS = _BySite(float, 0.0, 1e12, "dollars of a worker's hour, such as 20 or fra=20,ore=8")
_SHARE = _BySite(
    float,
    math.ulp(0.0),
    1.0,
    "a share of the peak above 0, up to 1, such as 0.4 or fra=0.5,ore=0.35, or published",
    "published",
)


_SECONDS_A_LINE = 8.0  # of progress, where standard error is no terminal


def _memory(_: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    choices = tuple(word.strip() for word in text.split(",") if word.strip())
    for choice in choices:
        if choice not in MEMORY_CHOICES:
            raise unknown_name("choice of --memory", choice, MEMORY_CHOICES)
    return choices


@dataclass(frozen=True)
class _TrainingArguments:
    """Command-line arguments of `plan` and `advise` on what is trained, and by how many workers.

    Attributes:
        parameters: Parameters of a model that has no name, such as 51.2M, sent as one tensor.
        shapes: File with the shapes of a model's parameters: .safetensors, or one such as 1024x4096 a line.
        tokens: Tokens to train on, such as 200B, for days and dollars.
        budget: Money to spend, such as 500000, instead of --tokens: plan the tokens that it pays for.
        workers: Number of workers [one per host].
        overrides: Change one key, as in netgym run, such as failures.mtbf=8h. May be repeated.
    """

    parameters: str | None = given(metavar="NUMBER")
    shapes: Path | None = given(metavar="FILE")
    tokens: str | None = given(metavar="NUMBER")
    budget: str | None = given(metavar="DOLLARS")
    workers: int | None = given(type=click.IntRange(1, MOST_WORKERS))
    overrides: tuple[str, ...] = given("--set", metavar="KEY=VALUE")


@dataclass(frozen=True)
class _PlanArguments(_TrainingArguments):
    """All arguments that `plan` and `advise` share: also devices, batches and network.

    Attributes:
        device: Device of every worker [the hosts' own].
        utilisation: Share of the device's peak that computing reaches [0.4], by host or region, or published.
        devices_per_worker: Devices that share a worker's batch; by host or region where they differ.
        memory: Methods of workers that save memory.
        micro_batch: Sequences that a device computes at once, for its activations' memory.
        batch_by_speed: Divide all workers' sequences of a step by the devices' speed.
        batch_size: Sequences of a worker in a step [the experiment's, else 256].
        sequence: Tokens of a sequence of --model [the task's block_size, else 2048].
        protocol: ideal, linux-tcp, nccl-sockets, gloo or hivemind [the topology's, else linux-tcp].
        price: Price of a worker's hour; by host or region where they differ.
    """

    device: str | None = given(metavar="NAME")
    utilisation: Any = given(metavar="SHARE|SITE=SHARE,...|published", type=_SHARE)
    devices_per_worker: Any = given(metavar="N|SITE=N,...", default="1", type=_DEVICES)
    memory: Any = given(metavar="bf16|8bit|offload|checkpointing,...", default="", callback=_memory)
    micro_batch: int = given(default=1, type=click.IntRange(1))
    batch_by_speed: bool = given()
    batch_size: int | None = given(type=click.IntRange(1))
    sequence: int | None = given(type=click.IntRange(1, LONGEST_SEQUENCE))
    protocol: str | None = given(metavar="NAME")
    price: Any = given(metavar="DOLLARS|SITE=DOLLARS,...", type=_DOLLARS)


@click.command()
@takes(_PlanArguments)
@raised_gc_threshold(is_last=True)
@without_compiler()
def plan(
    asked: _PlanArguments,
    experiment: Path | None = given(is_argument=True),
    model: str | None = given(metavar="NAME"),
    strategies: tuple[str, ...] = given("--strategy", metavar="NAME"),
    topology: str | None = given(metavar="NAME"),
    sweeps: tuple[str, ...] = given("--sweep", metavar="KEY=A,B,..."),
    lost: tuple[str, ...] = given("--without", metavar="SITE"),
    out: Path | None = given(metavar="DIR"),
    trust: bool = given(),
    as_json: bool = given(),
) -> None:
    """Plan the strategies of EXPERIMENT: seconds, bytes, memory, days and money. Nothing is trained.

    EXPERIMENT is a file, or the folder of a run, with its measured times. Without it: --model, --strategy, --topology.

    Args:
        model: Model, such as llama-13b; see: netgym list 'planned models'.
        strategies: Strategy. May be repeated.
        topology: Network: a shipped name or a file.
        sweeps: Plan each value; keys as in --set, wan.bandwidth, and flags such as topology and price. May be repeated.
        lost: Plan without this site too. May be repeated: each is left out alone, then all.
        out: Write a page with plots.
        trust: Run the code that the run EXPERIMENT names, even if another user has made it.
    """
    words = {**vars(asked), "model": model, "strategies": strategies, "topology": topology, "trust": trust}
    if out is not None:  # before anything is planned that would be lost
        try:
            TemporaryFile(dir=next(each for each in (out, *out.absolute().parents) if each.exists())).close()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"--out {out}: cannot be written to ({why}); name another folder") from None
    from netgym.planning.planned import request_of
    from netgym.planning.setting import Known
    from netgym.planning.sweep import grid, placed

    rows: list[dict[str, Any]] = []
    failures: list[Exception] = []
    known = Known()
    points = []
    for point in grid(sweeps):
        keys, flags = _flags_of(point, words)
        points.append((point, request_of(experiment, keys, known=known, **flags)))
    every = {site for _, request in points for site in request.setting.sites()}
    points = [(point, request.of_own_sites(every)) for point, request in points]
    total = sum(len(request.experiment.strategies) * len(_left_out(lost)) for _, request in points)
    with (
        Stoppable() as work,
        DelayedProgress("planning", total, every_seconds=_SECONDS_A_LINE) as progress,
    ):
        known.on_round = progress.part
        for point, request in points:
            where = ", ".join(f"{key}={value}" for key, value in point.items())
            for row in plan_rows(request, lost, progress, f" at {where}" if where else "", failures=failures):
                rows.append({**row, "point": point} if sweeps else row)
                progress.advance()
    made = f"{len(rows) - len(failures)} of {total} plans were made"
    if len(failures) == len(rows):
        work.end("; ".join([made, *map(first_line, failures)]))
        raise failures[0]
    # Of a sweep that was interrupted some points are missing, so it has no break-even lines.
    requests = [request for _, request in points]
    _print_plans(placed(rows), [] if work.is_stopped else sweeps, bool(sweeps), as_json, out, requests)
    work.end(made)


def _flags_of(point: Mapping[str, str], words: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Values of the experiment's swept keys, and flags with their swept values.

    Raises:
        InputError: a flag is swept and given.
    """
    from netgym.planning.sweep import FLAGS

    context = click.get_current_context()
    parameters = {option.removeprefix("--"): each for each in plan.params for option in each.opts}
    flags = {}
    for key in FLAGS:
        if key in point:
            parameter = parameters[key]
            source = context.get_parameter_source(parameter.name or "")
            if source is not click.core.ParameterSource.DEFAULT:
                raise InputError(f"--sweep {key}: --{key} is given too: leave one of them out")
            flags[parameter.name or ""] = parameter.process_value(context, point[key])
    return {key: value for key, value in point.items() if key not in FLAGS}, {**words, **flags}


def _print_plans(
    every: list[dict[str, Any]],
    sweeps: Sequence[str],
    is_swept: bool,
    as_json: bool,
    out: Path | None,
    requests: Sequence[Request],
) -> None:
    """Print the plans and write their page to `out`; break-even lines are shown for `sweeps`."""
    from netgym.planning.page import at_text, print_table, write_page
    from netgym.planning.sweep import (
        break_even,
        is_axis,
        sooner_throughout,
        step_ratio_lines,
        without_effect,
    )

    rows = [row for row in every if "refused" not in row]
    keys = [text.partition("=")[0].strip() for text in sweeps]
    axes = [key for key in keys if is_axis(rows, key)]
    values = {
        "plans": every,
        "break_even": [line for key in axes for line in break_even(rows, key)],
        "sooner_throughout": [line for key in axes for line in sooner_throughout(rows, key)],
        "step_ratios": step_ratio_lines(rows),
    }
    plain = values if is_swept else every
    title = "; ".join(dict.fromkeys(request.title() for request in requests))
    shared = set.intersection(*(set(request.facts()) for request in requests))
    facts = [fact for fact in requests[0].facts() if fact in shared]  # points differ in the others
    if as_json:
        click.echo(json.dumps(plain, indent=2, allow_nan=False))
        for key in keys:
            if without_effect(rows, key):
                click.echo(f"warning: --sweep {key}: changes nothing in any row", err=True)
    else:
        print_table(rows, values, title, facts)
        for row in every:
            if "refused" in row:
                where = f" (at {at})" if (at := at_text(row.get("point", {}))) else ""
                click.echo(f"not planned: {row['refused'].removeprefix('plan: ')}{where}")
    if out is not None:
        write_page(out, rows, values, title, facts, plain)
        click.echo(str(out), err=as_json)


def plan_rows(
    request: Request,
    lost: Sequence[str],
    progress: DelayedProgress,
    where: str = "",
    *,
    failures: list[Exception],
) -> Iterator[dict[str, Any]]:
    """Plan each strategy on all sites, then without each lost site; `progress` names the next.

    A strategy that fails is a row with `refused`, the reason; the exception is added to `failures`.
    """
    from netgym.planning.measure import refusal
    from netgym.planning.plan import plan as planned

    setting = request.setting
    places = [(sites, setting.without(sites) if sites else setting) for sites in _left_out(lost)]
    for entry in request.experiment.strategies:
        label = str(entry.label)
        for sites, place in places:
            missing = " and ".join(sites) or None
            name = f"{label} without {missing}" if missing else label
            progress.now(f"planning {name}{where}")
            try:
                strategy = request.experiment.build_strategy(entry)
                made = planned(strategy, place, name).to_mapping()
            except Exception as error:
                reason = refusal(error)
                failures.append(error)
                if label not in reason:
                    reason = f"{name}: {reason.removeprefix('plan: ')}"
                yield {"name": name, "refused": reason}
            else:
                yield {"name": name, **made, "strategy": label, "without": missing}


def _left_out(lost: Sequence[str]) -> list[Sequence[str]]:
    """Sites left out of each plan: none, each by itself, and all that were named."""
    return [(), *((site,) for site in lost), *([lost] if len(lost) > 1 else [])]


@click.command()
@takes()
@raised_gc_threshold(is_last=True)
@without_compiler()
def reproduce(
    name: str | None = given(is_argument=True),
    params: float | None = given(),
    layers: int | None = given(type=click.IntRange(3, 299)),
    step: str | None = given(metavar="DURATION"),
    as_json: bool = given(),
) -> None:
    """Predict measured runs and show the errors: NAME, all, or a YAML file of your own. Without NAME: list them.

    Args:
        params: Parameters in streaming-diloco's table [1e9].
        layers: Layers in streaming-diloco's table [24].
        step: Computing time of a step in streaming-diloco's table [0.1s].
    """
    from netgym.planning.reproduce import MissingRecordingsError, ReproducedRun, load_run, run_names
    from netgym.planning.reproduce import reproduce as cells_of
    from netgym.planning.setting import Known

    if name is None:
        listed = [ReproducedRun(each, load_run(each)[0], []).to_mapping() for each in run_names()]
        lines = [f"{entry['name']:<18} {entry['what']} ({entry['measured_by']})" for entry in listed]
        return click.echo(json.dumps(listed, indent=2) if as_json else "\n".join(lines))
    seconds = None
    if step is not None:
        try:
            seconds = parse_seconds(step)
        except InputError as error:
            raise InputError(f"--step {step}: {error}") from None
        if not 1e-6 <= seconds <= 1e6:
            raise InputError(f"--step {step}: expected a time from 1 us to 1e6 s")
    if params is not None and not 1 <= params <= 1e11:  # a minute
        remedy = "; divide --params and --step by the same number: the table stays the same"
        text = f"--params {params:g}: expected a number of parameters from 1 to 1e11"
        raise InputError(text + (remedy if 1e11 < params < math.inf else ""))
    sizes = {"params": params, "layers": layers, "step_seconds": seconds}
    given = {key: value for key, value in sizes.items() if value is not None}
    if given and name != "streaming-diloco":
        raise InputError(f"reproduce {name}: --params, --layers and --step are for streaming-diloco alone")
    names, known, found = run_names() if name == "all" else [name], Known(), list[ReproducedRun]()
    with Stoppable() as work, DelayedProgress(f"reproducing {name}", len(names)) as progress:
        for each in names:
            found.append(ReproducedRun(each, load_run(each)[0], []))
            progress.now(f"reproducing {each}")
            try:
                found[-1].cells.extend(cells_of(each, known, with_limits=name != "all", **given))
            except MissingRecordingsError as error:
                if name != "all":
                    raise
                click.echo(f"left out: {error}", err=True)
                found.pop()
            progress.advance()
    if as_json:
        data = [each.to_mapping() for each in found]
        click.echo(json.dumps(data if name == "all" else data[0], indent=2))
    else:
        for made in found:
            click.echo("\n".join(made.short_lines() if name == "all" else made.lines()))
    work.end(f"{format_count(sum(len(each.cells) for each in found), 'figure')} so far")
    return None


@click.command()
@takes(_PlanArguments)
@raised_gc_threshold(is_last=True)
@without_compiler()
def advise(
    asked: _PlanArguments,
    topology: str = given(is_argument=True, required=True),
    model: str = given(metavar="NAME", required=True),
    runs: str | None = given(metavar="DIR"),
    as_json: bool = given(),
) -> None:
    """Search the strategy, rounds, codec, streams and sites that finish a budget first.

    Args:
        model: Model, such as llama-13b; see: netgym list 'planned models'.
        runs: Folder of a run of yours: rank by its steps to a loss.
    """
    from netgym.planning.advice_text import advice_lines, best_so_far
    from netgym.planning.advise import Advice
    from netgym.planning.planned import request_of
    from netgym.planning.step_ratio import step_ratios

    if asked.tokens is None and asked.budget is None:
        raise InputError("advise: add --tokens, such as --tokens 200B, or --budget with dollars to spend")
    words = {**vars(asked), "model": model, "topology": topology}
    request = request_of(None, {}, strategies=("AllReduce",), **words)
    setting = request.of_own_sites(request.setting.sites()).setting
    ratios = step_ratios(runs) if runs is not None else None
    with Stoppable() as work, DelayedProgress("planning", every_seconds=_SECONDS_A_LINE) as progress:
        advice = Advice(
            setting,
            ratios,
            lambda made, name: progress.now(f"plan {made + 1}: {name}{best_so_far(advice)}"),
        )
        setting.known.on_round = progress.part
        advice.search()
    if not advice.rows:
        work.end("no plan was made")  # or nothing fits
    result = advice.result()
    if not result["ranked"] and not result["explained"] and result["not_simulated"]:
        reasons = dict.fromkeys(row["reason"] for row in result["not_simulated"])
        raise InputError(f"advise: nothing can be ranked: {'; '.join(reasons)}")
    click.echo(json.dumps(result, indent=2, allow_nan=False) if as_json else "\n".join(advice_lines(result)))
    work.end(f"the best of {len(advice.rows)} plans so far")
