"""`netgym plan`, `netgym advise`, `netgym reproduce`: what a strategy needs, before anything is paid."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from netsim import DelayedProgress
from netsim.errors import InputError, unknown_name
from netsim.units import format_count, format_seconds, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from exogym_core.planning.advise import Advice
    from exogym_core.planning.planned import Request

__all__ = ["advise", "by_site", "devices", "dollars", "plan", "plan_rows", "reproduce", "share"]

T = TypeVar("T")


def by_site(text: str, flag: str, number: Callable[[str], T]) -> T | dict[str, T]:
    """Parse one number for all, or one for each named host or region.

    Args:
        text: what was given.
        flag: where, for errors.
        number: parses one; ValueError says what is expected.

    Raises:
        InputError: it is neither.

    >>> by_site("4", "--devices-per-worker", devices), by_site("fra=4, ore=2", "--devices-per-worker", devices)
    (4, {'fra': 4, 'ore': 2})
    """
    found: dict[str, T] = {}
    try:
        if "=" not in text:
            return number(text)
        for part in text.split(","):
            site, sign, value = (word.strip() for word in part.partition("="))
            if not sign or not site or site in found:
                raise ValueError("SITE=NUMBER,SITE=NUMBER,..., each site once")
            found[site] = number(value)
    except ValueError as error:
        raise InputError(f"{flag} {text}: expected {error}") from None
    return found


def devices(text: str) -> int:
    """A whole number from 1 on."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise ValueError("a whole number from 1 on, or such as fra=4,ore=2")
    return int(text)


def dollars(text: str) -> float:
    """Dollars, from 0 on."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < 1e12:
        raise ValueError("dollars of a worker's hour, such as 20 or fra=20,ore=8")
    return found


def share(text: str) -> float:
    """A number above 0, up to 1."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= 1:
        raise ValueError("a share of the peak above 0, up to 1, such as 0.4 or fra=0.5,ore=0.35")
    return found


_SECONDS_A_LINE = 10.0  # of progress, where standard error is no terminal


def _options(*options: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _by_site(number: Callable[[str], Any]) -> Callable[..., Any]:
    def read(_: click.Context, parameter: click.Parameter, text: str | None) -> Any:
        return None if text is None else by_site(text, parameter.opts[0], number)

    return read


def _memory(_: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    from exogym_core.planning.models import MEMORY_CHOICES

    choices = tuple(word.strip() for word in text.split(",") if word.strip())
    for choice in choices:
        if choice not in MEMORY_CHOICES:
            raise unknown_name("choice of --memory", choice, MEMORY_CHOICES)
    return choices


_BUDGET = click.option(
    "--budget",
    metavar="DOLLARS",
    help="In place of --tokens: money to spend, such as 500000; tokens and days are those that it pays for.",
)

_WHERE = (
    click.option("--device", metavar="NAME", help="Every worker's device [the hosts' own]."),
    click.option(
        "--utilisation",
        metavar="SHARE|SITE=SHARE,...",
        callback=_by_site(share),
        help="Share of the device's peak that computing reaches [0.4]; by host or region where they differ.",
    ),
    click.option(
        "--devices-per-worker",
        metavar="N|SITE=N,...",
        default="1",
        show_default=True,
        callback=_by_site(devices),
        help="That act as one; by host or region where they differ.",
    ),
    click.option(
        "--memory",
        metavar="bf16|8bit|offload|checkpointing,...",
        default="",
        callback=_memory,
        help="How workers keep less in memory.",
    ),
    click.option(
        "--micro-batch",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Sequences that a device computes at once, for its activations' memory.",
    ),
    click.option(
        "--batch-by-speed",
        is_flag=True,
        help="Share all workers' sequences of a step out by their devices' speed.",
    ),
    click.option(
        "--batch-size",
        type=click.IntRange(1),
        help="Sequences of a worker in a step [the experiment's, else 256].",
    ),
    click.option(
        "--sequence",
        type=click.IntRange(1),
        help="Tokens of a sequence of --model [the task's block_size, else 2048].",
    ),
    click.option("--protocol", metavar="NAME", help="Another protocol."),
    click.option(
        "--price",
        metavar="DOLLARS|SITE=DOLLARS,...",
        callback=_by_site(dollars),
        help="Of a worker's hour, for the cost; by host or region where they differ.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)


@click.command()
@click.argument("experiment", type=click.Path(path_type=Path), required=False)
@_options(
    click.option("--model", metavar="NAME", help="Such as llama-13b; see: netgym list 'planned models'."),
    click.option("--strategy", "strategies", metavar="NAME", multiple=True, help="May be repeated."),
    click.option("--topology", metavar="NAME", help="A shipped network or a file."),
    click.option("--workers", type=click.IntRange(1), help="How many [one a host]."),
    click.option("--tokens", metavar="NUMBER", help="The budget, such as 200B, for days and cost."),
    _BUDGET,
    click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="As netgym run has it."),
    click.option(
        "--sweep",
        "sweeps",
        metavar="KEY=A,B,...",
        multiple=True,
        help="Plan for each value; keys as in --set, and wan.bandwidth. May be repeated.",
    ),
    click.option(
        "--without",
        "lost",
        metavar="SITE",
        multiple=True,
        help="Plan without this site as well. May be repeated: each is left out by itself, then all.",
    ),
    click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Write a page with plots."),
    *_WHERE,
)
def plan(
    experiment: Path | None,
    sweeps: tuple[str, ...],
    lost: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    **words: Any,
) -> None:
    """Say what the strategies of EXPERIMENT need: seconds, bytes, memory, days and money. Nothing is trained.

    EXPERIMENT is a file, or the folder of a run, with what that measured. Without it: --model, --strategy, --topology.
    """
    if out is not None:
        _check_folder(out)
    from exogym_core.planning.measure import placed
    from exogym_core.planning.planned import request_of
    from exogym_core.planning.setting import Known
    from exogym_core.planning.sweep import grid

    rows: list[dict[str, Any]] = []
    known = Known()
    asked = [(point, request_of(experiment, point, known=known, **words)) for point in grid(sweeps)]
    total = sum(len(request.experiment.strategies) * len(_left_out(lost)) for _, request in asked)
    is_cut = False
    with DelayedProgress("planning", total, every_seconds=_SECONDS_A_LINE) as progress:
        try:
            for point, request in asked:
                for row in plan_rows(request, lost, progress, _said(point)):
                    rows.append({**row, "point": point} if sweeps else row)
                    progress.advance()
        except KeyboardInterrupt:
            if not rows:
                raise
            is_cut = True
    if all("refused" in row for row in rows):
        raise InputError(rows[0]["refused"])
    _print_plans(placed(rows), sweeps, as_json, out, asked[0][1].about(), is_cut=is_cut)
    if is_cut:
        click.echo(f"interrupted: {len(rows)} of {total} plans were made", err=True)
        raise KeyboardInterrupt


def _said(point: Mapping[str, str]) -> str:
    text = ", ".join(f"{key}={value}" for key, value in point.items())
    return f" at {text}" if text else ""


def _print_plans(
    every: list[dict[str, Any]],
    sweeps: Sequence[str],
    as_json: bool,
    out: Path | None,
    about: Sequence[str],
    *,
    is_cut: bool,
) -> None:
    """Print the plans; `is_cut`: points of a sweep are missing, so lines through them are left out."""
    from exogym_core.planning.sweep import break_even, is_axis, sooner_throughout, step_ratio_lines

    rows = [row for row in every if "refused" not in row]
    refused = [row["refused"] for row in every if "refused" in row]
    if not sweeps:
        return _print_rows(rows, every, refused, as_json, out, about)
    keys = [text.partition("=")[0].strip() for text in sweeps]
    axes = [key for key in keys if is_axis(rows, key) and not is_cut]
    values = {
        "plans": every,
        "break_even": [line for key in axes for line in break_even(rows, key)],
        "sooner_throughout": [line for key in axes for line in sooner_throughout(rows, key)],
        "step_ratios": step_ratio_lines(rows),
    }
    return _print_rows(rows, values, refused, as_json, out, about)


def plan_rows(
    request: Request, lost: Sequence[str], progress: DelayedProgress, where: str = ""
) -> Iterator[dict[str, Any]]:
    """Plan each strategy where it is to run, then without sites that may be lost; `progress` shows which is next."""
    from exogym_core.planning.measure import RefusedPlanError
    from exogym_core.planning.plan import plan as planned

    setting = request.setting()
    for label, strategy in request.strategies():
        for sites in _left_out(lost):
            missing = " and ".join(sites) or None
            name = f"{label} without {missing}" if missing else label
            progress.now(f"planning {name}{where}")
            try:
                made = planned(strategy, setting.without(sites) if sites else setting, name).to_mapping()
            except RefusedPlanError as error:
                yield {"name": name, "refused": str(error)}
            else:
                yield {"name": name, **made, "strategy": label, "without": missing}


def _left_out(lost: Sequence[str]) -> list[Sequence[str]]:
    """Sites left out of each plan: none, each by itself, and all that were named."""
    return [(), *((site,) for site in lost), *([lost] if len(lost) > 1 else [])]


def _check_folder(out: Path) -> None:
    """Before anything is planned, since it would be lost.

    Raises:
        InputError: nothing can be written there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"--out {out}: cannot be written to ({why}); name another folder") from None


def _print_rows(
    rows: list[dict[str, Any]],
    plain: Any,
    refused: Sequence[str],
    as_json: bool,
    out: Path | None,
    about: Sequence[str],
) -> None:
    from exogym_core.planning.page import print_table, write_page

    if out is not None:
        write_page(out, rows, plain, about)
    if as_json:
        click.echo(json.dumps(plain, indent=2, allow_nan=False))
    else:
        print_table(rows, plain, about)
        for reason in refused:
            click.echo(f"not planned: {reason.removeprefix('plan: ')}")
    if out is not None:
        click.echo(str(out), err=as_json)


@click.command()
@click.argument("name", required=False)
@click.option("--params", type=float, help="Of the Streaming table: parameters [1e9].")
@click.option("--layers", type=int, help="Of the Streaming table: layers [24].")
@click.option("--step", metavar="DURATION", help="Of the Streaming table: a step's computing [0.1s].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def reproduce(
    name: str | None, params: float | None, layers: int | None, step: str | None, as_json: bool
) -> None:
    """Compute a published result and compare it with the printed one. Without NAME: list them."""
    from exogym_core.planning.published import PUBLISHED
    from exogym_core.planning.published import reproduce as reproduced

    if name is None:
        listed = [{"name": known, "source": source} for known, (source, _) in PUBLISHED.items()]
        lines = [f"{entry['name']:<18} {entry['source']}" for entry in listed]
        return click.echo(json.dumps(listed, indent=2) if as_json else "\n".join(lines))
    sizes = {"params": params, "layers": layers, "step_seconds": step and parse_seconds(step)}
    given = {key: value for key, value in sizes.items() if value is not None}
    if given and name != "streaming-diloco":
        raise InputError(f"reproduce {name}: --params, --layers and --step are for streaming-diloco alone")
    with DelayedProgress(f"reproducing {name}"):
        result = reproduced(name, **given)
    if as_json:
        return click.echo(json.dumps(result, indent=2))
    click.echo(f"{result['name']}: {result['source']}")
    for cell in result["cells"]:
        click.echo(_cell_line(cell))
    if not result["cells"]:
        click.echo("  no cells: it needs a strategy that is not here yet")
    return None


def _cell_line(cell: dict[str, Any]) -> str:
    if "method" in cell:
        reached = cell["gbit_per_second"]
        ours = "above 1000" if reached is None else f"{reached:.1f}"
        line = f"  {cell['method']:<28} {cell['target']:>4.0%}  {ours:>10} Gbit/s"
        line += f"  (printed {cell['published']:g})" if "published" in cell else ""
        own = cell["strategy_gbit_per_second"]
        return f"{line}  {cell['strategy']} {'above 1000' if own is None else f'{own:.1f}'}"
    figures = f"{cell['basis']} {cell['published']:g}, ours {cell['ours']:.4g} {cell['unit']}"
    return f"  {cell['what']}: {figures} ({cell['residual']:+.1%}): {cell['cause']}"


@click.command()
@click.argument("topology")
@_options(
    click.option("--model", metavar="NAME", required=True, help="As netgym plan has it."),
    click.option("--tokens", metavar="NUMBER", help="The budget, such as 200B; or give --budget."),
    _BUDGET,
    click.option("--workers", type=click.IntRange(2), help="How many [one a host]."),
    click.option(
        "--set",
        "overrides",
        metavar="KEY=VALUE",
        multiple=True,
        help="As netgym plan has it: failures.mtbf=8h.",
    ),
    click.option(
        "--runs", metavar="DIR", help="A run of yours: its strategies' steps to a loss are applied."
    ),
    *_WHERE,
)
def advise(topology: str, runs: str | None, as_json: bool, **words: Any) -> None:
    """Search strategies, rounds, codecs, streams, sites and the ring's order for the soonest way to a budget."""
    from exogym_core.planning.advise import Advice
    from exogym_core.planning.planned import request_of
    from exogym_core.planning.step_ratio import step_ratios

    if words["tokens"] is None and words["budget"] is None:
        raise InputError("advise: add --tokens, such as --tokens 200B, or --budget with dollars to spend")
    setting = request_of(None, {}, strategies=("AllReduce",), topology=topology, **words).setting()
    ratios = step_ratios(runs) if runs is not None else None
    is_cut = False
    with DelayedProgress("planning", every_seconds=_SECONDS_A_LINE) as progress:
        advice = Advice(
            setting,
            ratios,
            lambda made, about, name: progress.now(
                f"plan {made + 1} of about {about}: {name}{_best_so_far(advice)}"
            ),
        )
        try:
            advice.search()
        except KeyboardInterrupt:
            if not advice.rows:
                raise
            is_cut = True
    _print_advice(advice.result(), as_json)
    if is_cut:
        click.echo(f"interrupted: the best of {len(advice.rows)} plans so far", err=True)
        raise KeyboardInterrupt


def _best_so_far(advice: Advice) -> str:
    best = advice.best()
    if best is None:
        return ""
    worth = f", {_worth(best)}" if "worth" in best else ""
    return f"; best so far: {_advice_name(best)}, {_days(best)}{worth}"


def _print_advice(advice: dict[str, Any], as_json: bool) -> None:
    from exogym_core.planning.page import MODEL_SIZE, placement_text

    if as_json:
        return click.echo(json.dumps(advice, indent=2, allow_nan=False))
    shown = _without_variants(advice["ranked"])
    if "dollars" in advice["budget"]:
        click.echo(f"for {advice['budget']['dollars']:,.0f} dollars:")
    names = [_advice_name(row) for row in shown]
    for name, row in zip(names, shown, strict=True):
        mark = "*" if row["pareto"] else " "
        click.echo(f"{row['place']:>3} {mark} {name:<{max(map(len, names))}} {_advice_figures(row)}")
    if others := len(advice["ranked"]) - len(shown):
        click.echo(
            f"{others} more rows differ from these in {_searched_names()} alone, and are later; --json has them"
        )
    if advice["dominated"]:
        click.echo(
            f"{len(advice['dominated'])} more rows are later and dearer than one of these; --json has them"
        )
    if advice["not_simulated"]:
        click.echo(
            "not simulated, as computing and bytes alone take longer than one of these, the days at the least: "
            + "; ".join(f"{_named(row)} {row['days_at_least']:.3g}" for row in advice["not_simulated"])
        )
    ring = advice["ring"]
    click.echo(f"protocol {advice['protocol']}, but for rows that name their streams")
    click.echo(f"workers: {placement_text(advice['placement'])}")
    click.echo(
        f"a ring over the sites: {' - '.join(ring['sites'])}, {'exact' if ring['exact'] else 'heuristic'}"
    )
    click.echo(
        f"  {ring['seconds']:.4g} s an all-reduce in fp32, {ring['natural_seconds']:.4g} s in natural order; no "
        f"algorithm is below {ring['bound_seconds']:.4g} s"
    )
    for line in advice["explained"]:
        click.echo(line)
    if "dollars" in advice["budget"]:
        click.echo(MODEL_SIZE)
    click.echo("*: nothing else is surely both sooner and cheaper; rows of one place are equal. Not known:")
    for line in advice["unknown"]:
        click.echo(f"  {line}")
    return None


def _without_variants(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of the rows that differ in searched options alone."""
    from exogym_core.planning.advise import SEARCHED

    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        names = SEARCHED.get(row["strategy"], ())
        fixed = {key: value for key, value in row["options"].items() if key not in names}
        found.setdefault(repr((row["strategy"], fixed, row["groups"], row["left_out"])), row)
    return list(found.values())


def _searched_names() -> str:
    from exogym_core.planning.advise import SEARCHED

    return ", ".join(dict.fromkeys([*(name for names in SEARCHED.values() for name in names), "streams"]))


def _advice_name(row: dict[str, Any]) -> str:
    from exogym_core.planning.advise import SEARCHED, alike_text

    return _named(row) + alike_text(row, SEARCHED) + (" (does not fit)" if row["fits"] is False else "")


def _named(row: Mapping[str, Any]) -> str:
    options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
    streams = f", {format_count(row['streams'], 'stream')}" if row["streams"] else ""
    return f"{row['strategy']}({options}){streams}" + (
        f", without {row['left_out']}" if row["left_out"] else ""
    )


def _tokens(number: float) -> str:
    from exogym_core.planning.page import short_tokens

    return short_tokens(number)


def _advice_figures(row: dict[str, Any]) -> str:
    high = None if row["days_high"] is None else row["days_high"] / row["days"]
    low = row["days_low"] / row["days"]
    money = f"{_band(row['worker_hours'], low, high)} worker hours"
    if row["cost"] is not None:
        money = f"{_band(row['cost'], low, high)} dollars"
        if row["cost_by"].get("workers") is None:
            money += " (traffic alone)"
        elif row["cost_by"].get("egress"):
            money += f" ({_band(row['cost_by']['egress'], low, high)} of it for traffic)"
    if "worth" in row:
        money = (
            f"{_tokens(row['tokens'])} tokens ({row['tokens_per_parameter']:.3g} a parameter), worth "
            + _worth(row)
        )
    return f"{_days(row):>22}  {row['compute_utilisation']:>6.1%} computing  {money:>18}"


def _worth(row: dict[str, Any]) -> str:
    """Band of data-parallel's tokens to the same loss."""
    low, high = row["worth_low"], row["worth_high"]
    first, last = "?" if low is None else _tokens(low), _tokens(high)
    return f"{first if first == last else f'{first} to {last}'} of data-parallel's"


def _days(row: dict[str, Any]) -> str:
    """A band of days, of short ones in hours and less."""
    low, high = row["days_low"], row["days_high"]
    if row["days"] >= 1:
        first, last = f"{low:,.1f}", "?" if high is None else f"{high:,.1f}"
        return f"{first} days" if first == last else f"{first} to {last} days"
    first, last = format_seconds(low * 86_400), "?" if high is None else format_seconds(high * 86_400)
    return first if first == last else f"{first} to {last}"


def _band(amount: float, low: float, high: float | None) -> str:
    places = 0 if amount >= 10 else 2
    first, last = f"{amount * low:,.{places}f}", "?" if high is None else f"{amount * high:,.{places}f}"
    return first if first == last else f"{first} to {last}"
