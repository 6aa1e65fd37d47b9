"""Commands on formats, strategies and this installation: `netgym schema`, `check`, `doctor`, and sections of `list`."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import os
import platform
import re
import resource
import sys
from functools import partial
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from exogym_core.names import visible
from exogym_core.results.loggers import LOGGERS
from netgym.command_options import takes
from netsim.cli.signals import Stoppable
from netsim.cli.terminal import PLAIN_WIDTH, DelayedProgress, given, plain_console
from netsim.errors import InputError, unknown_name
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from exogym_core.cost.devices import Device
    from netgym.strategy_check import CheckReport

__all__ = ["check", "doctor", "documented", "formats", "schema", "schema_of", "sections"]


Section = list[tuple[str, str]]


_FOLDER = Path(__file__).parents[2]


def _text(package: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted((_FOLDER / package).rglob("*.py")))


def documented(package: str, registry: str) -> dict[str, str]:
    """Docstring of each member of a registry of a package, read from the files without importing torch.

    Args:
        package: such as `strategy`.
        registry: `STRATEGIES`, to which classes add themselves by `name=`, or a dictionary of imported ones.
    """
    text = _text(package)
    if registry == "STRATEGIES":
        return {name: inspect.cleandoc(docstring) for name, _, docstring in _STRATEGY.findall(text)}
    table = re.search(rf"^{registry}: .*= (\{{[^}}]*\}})", text, re.MULTILINE)
    makers = re.findall(r'"(\w+)": (\w+)', table[1] if table else "")

    def docstring(name: str) -> str:
        found = re.search(rf'^(?:class|def) {name}\b.*?\n    r?"""(.*?)"""', text, re.MULTILINE | re.DOTALL)
        return inspect.cleandoc(found[1]) if found else ""

    return {name: docstring(maker) for name, maker in makers}


# A registered class and its docstring. Parsing the files takes ten times as long.
_STRATEGY = re.compile(
    r'^class \w+Strategy\([^)]*\bname="([^"]+)"(, experimental=True)?\):\n    r?"""(.*?)"""',
    re.MULTILINE | re.DOTALL,
)


def _summaries(package: str, registry: str) -> Section:
    """Names of a registry, each with its first line and papers cited elsewhere in its docstring."""
    rows = []
    for name, text in sorted(documented(package, registry).items(), key=lambda item: item[0].casefold()):
        line = text.partition("\n")[0]
        found = re.findall(r"(arXiv|openreview)\s+(\d{4}\.\d{5}|\w{8,})", text)
        papers = dict.fromkeys(f"{where} {number}" for where, number in found if number not in line)
        rows.append((name, f"{line} [{', '.join(papers)}]" if papers else line))
    return rows


def _strategies(*, every: bool) -> Section:
    """Strategies; experimental ones, marked, only where `every` is true."""
    package = "exogym_core/strategy"
    marked = {name for name, is_experimental, _ in _STRATEGY.findall(_text(package)) if is_experimental}
    rows = _summaries(package, "STRATEGIES")
    return [
        (name, f"(experimental) {line}" if name in marked else line)
        for name, line in rows
        if every or name not in marked
    ]


def _topologies() -> Section:
    """Shipped topologies with their hosts and regions, without a check of anything else."""
    from netsim import shipped_topologies
    from netsim.files.documents import load_document

    rows = []
    for name, path in shipped_topologies().items():
        data: Any = load_document(path).data
        regions = data.get("regions", {})
        hosts = len(data.get("hosts", ())) + sum(region["hosts"] for region in regions.values())
        within = f" in {len(regions)} regions" if len(regions) > 1 else ""
        rows.append((name, format_count(hosts, "host") + within))
    return rows


def sections(*, every: bool = False) -> dict[str, Callable[[], Section]]:
    """Functions that list (name, line) pairs, by section; with `every` experimental strategies too."""
    from exogym_core.cost.devices import DEVICES
    from netgym.planning.tables import listed_models
    from netsim.topology.protocol import PRESETS

    def speeds(device: Device) -> str:
        flops = ", ".join(f"{dtype} {speed / 1e12:g}" for dtype, speed in device.flops.items())
        memory = f"memory {device.memory_bytes_per_second / 1e9:g} GB/s"
        _, _, unsourced = device.source.partition("unsourced: ")
        return "; ".join((f"{flops} Tflop/s", memory, *([f"unsourced: {unsourced}"] if unsourced else ())))

    return {
        "strategies": partial(_strategies, every=every),
        "tasks": partial(_summaries, "netgym/tasks", "TASKS"),
        "models": partial(_summaries, "netgym/tasks", "MODELS"),
        "topologies": _topologies,
        "planned models": listed_models,
        "devices": lambda: [(name, speeds(device)) for name, device in DEVICES.items()],
        "protocols": lambda: [(name, "") for name in PRESETS],
    }


_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def _makers() -> dict[str, Callable[[], dict[str, Any]]]:
    """Function that makes the schema, by format."""
    return {"topology": _topology, "experiment": _experiment, "flows": _flows, "launch": _launch}


def _launch() -> dict[str, Any]:
    from netgym.launch.report import LaunchReport

    return LaunchReport.model_json_schema()


def formats() -> list[str]:
    """Names of the formats that have a schema."""
    return list(_makers())


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema of a format.

    It gives editors keys, types and descriptions. `netgym validate` checks more: names that exist, units, routes.

    Raises:
        UnknownNameError: there is no such format.
    """
    makers = _makers()
    if name not in makers:
        raise unknown_name("format", name, makers)
    made = makers[name]()
    return {"$schema": _DIALECT, "title": f"NetGym {name}", **{k: v for k, v in made.items() if k != "title"}}


def _topology() -> dict[str, Any]:
    from netsim.topology.file import TopologyFile

    made = TopologyFile.model_json_schema()
    hosts = made["properties"]["hosts"]
    for pipe in ("LinkEntry", "RegionEntry"):  # a rate alone is short for {rate: RATE}
        stream = made["$defs"][pipe]["properties"]["stream"]
        stream["anyOf"].insert(0, made["$defs"]["StreamEntry"]["properties"]["rate"]["anyOf"][0])
    names = {"type": "array", "items": {"type": ["string", "integer"]}}
    hosts["additionalProperties"] = {"anyOf": [hosts["additionalProperties"], {"type": "null"}]}
    made["properties"]["hosts"] = {
        "anyOf": [{key: value for key, value in hosts.items() if key not in ("title", "default")}, names],
        "default": {},
    }
    return made


def _experiment() -> dict[str, Any]:
    from exogym_core.config import Settings
    from netgym.studies.points import sweep_schema, tune_schema

    made = Settings.model_json_schema()
    properties, parts = made["properties"], made["$defs"]
    for name in ("Named", "StrategySettings"):  # a plain name stands for {name: ...}
        parts[f"{name}OrText"] = {"anyOf": [{"type": "string"}, {"$ref": f"#/$defs/{name}"}]}
    text = json.dumps({"properties": properties})
    for name in ("Named", "StrategySettings"):
        text = text.replace(f'"#/$defs/{name}"', f'"#/$defs/{name}OrText"')
    made["properties"] = properties = json.loads(text)["properties"]
    for key, schema_of_key in (("sweep", sweep_schema), ("tune", tune_schema)):
        of_key = schema_of_key()
        parts |= of_key.pop("$defs", {})
        properties[key] = {"anyOf": [of_key, {"type": "null"}], "default": None}
    topology = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}], "default": None}
    properties["topology"] = topology
    return made


def _flows() -> dict[str, Any]:
    """Schema of the rows of the CSV file, as objects."""
    seconds = {"type": "number", "minimum": 0}
    row = {
        "type": "object",
        "properties": {
            "start_s": {**seconds, "description": "when it starts, seconds"},
            "src": {"type": ["string", "integer"], "description": "the sending host"},
            "dst": {"type": ["string", "integer"], "description": "the receiving host"},
            "bytes": {"type": "integer", "minimum": 0, "description": "payload"},
            "finish_s": {**seconds, "description": "in the output only: when its last byte has arrived"},
        },
        "required": ["start_s", "src", "dst", "bytes"],
    }
    return {"type": "array", "items": row, "description": "rows of a CSV file with these columns"}


@click.command()
@takes()
def schema(
    name: str = given(is_argument=True, required=True, metavar=f"[{'|'.join(formats())}]"),
    as_json: bool = given(),
) -> None:
    """Print the JSON Schema of a file format.

    Args:
        as_json: Accepted for scripts: a schema is always JSON.
    """
    click.echo(json.dumps(schema_of(name), indent=2))


_EXTRAS = {
    "demo": (("sklearn",), "the digits data of README's comparison"),
    "pandas": (("pandas", "pyarrow"), "tables as data frames"),
    "ray": (("ray", "optuna"), "studies and ranks over machines, searches"),
    "slurm": (("submitit",), "points of a sweep as jobs of Slurm"),
    "text": (("datasets", "tokenizers"), "text data and tokenizers"),
    "tracking": (tuple(name for name, opened in LOGGERS.items() if opened), "trackers"),
}
"""By extra: its modules, and what they bring."""


@click.command()
@takes()
def doctor(as_json: bool = given()) -> None:
    """Show versions, cores, limits, whether the network engine is compiled, and extras."""
    facts = _facts()
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            for key, each in value.items():
                click.echo(f"{name + ' ' + key:<24} {each}")
        else:
            click.echo(f"{name:<24} {value}")


def _facts() -> dict[str, str | int | dict[str, str]]:
    from importlib import metadata

    from netsim.network.build import engine_state

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    extras = {}
    for name, (modules, what) in _EXTRAS.items():
        missing = [module for module in modules if util.find_spec(module) is None]
        extras[name] = f"missing {', '.join(missing)}: {what}" if missing else "installed"
    return {
        "netgym": metadata.version("netgym"),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "open files": f"{soft}, at most {hard}",
        "network engine": engine_state(),
        "extra": extras,
    }


_SECONDS_A_LINE = 2.0  # of progress, where standard error is no terminal
_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


@click.command()
@takes()
def check(
    checked: str = given(is_argument=True, required=True, metavar="MODULE:OBJECT"),
    options: tuple[str, ...] = given(is_argument=True, metavar="[KEY=VALUE]..."),
    settings: tuple[str, ...] = given("--set", metavar="KEY=VALUE"),
    kind: str | None = given("--as", type=click.Choice(["strategy", "collective", "communicator"])),
    operation: str | None = given("--operation", "--like", metavar="NAME"),
    workers: int = given(default=4, type=click.IntRange(1)),
    steps: int = given(default=20, type=click.IntRange(3)),
    cases: int = given(default=100, type=click.IntRange(1)),
    seed: int = given(default=0),
    as_json: bool = given(),
) -> int:
    """Test a strategy, a function on ranks or a communicator against the laws that all of its kind obey.

    OBJECT is a strategy's class, or a shipped name: it trains a small model, then again with one change at a time: the
    same run repeated, in processes, over real sockets, resumed after a stop. Or a function(comm, tensor), which is
    compared with the collective it stands for, on drawn networks. Or a transport, or a class or function(comm) that
    wraps a communicator. A broken law is reported with the difference and the remedy, or a program that shows it; the
    exit code is 1.

    Args:
        settings: An option of the strategy, such as H=10, or of the check, such as is_uneven=true; the same as
            KEY=VALUE.
        kind: What it is; default: recognised.
        operation: Of a function on ranks: the collective that it stands for; default: all_reduce.
        workers: Number of workers of a strategy.
        steps: Local steps of each worker.
        cases: Number of drawn programs of a function on ranks.
        seed: Seed of the draws.
    """
    from exogym_core.workers.run import Transport
    from netgym.experiment.own_code import find_own_code

    read = _read([*options, *settings])
    made: object = checked
    file, _, name = checked.partition(":")
    if file.endswith(".py"):
        meant = visible(f"{Path(file).stem}:{name or 'MyStrategy'}", 100)
        raise InputError(f"check: {visible(checked)}: is a file: write module:object, such as {meant}")
    if ":" in checked:
        code = find_own_code(
            checked, kind or "object", [Path(), *(Path(place) for place in sys.path if place)]
        )
        click.echo(f"code: {code.what} {visible(code, 500)}", err=True)
        made = code.load(wrapped=False, also=Transport)
    kind = kind or ("collective" if operation is not None else _kind_of(made))
    if kind == "strategy":
        return _check_strategy(checked, made, read, workers, steps, as_json)
    if kind == "collective":
        read = {"like": operation or "all_reduce", "cases": cases, "seed": seed} | read
    return _check_on_ranks(checked, made, kind, read, as_json)


def _kind_of(made: object) -> str:
    """Whether an object is a communicator, a collective (a function of one and more), or what makes a strategy."""
    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy import Strategy
    from exogym_core.workers.run import Transport

    if isinstance(made, Transport):
        return "communicator"
    if isinstance(made, str | Strategy) or not callable(made):
        return "strategy"
    if isinstance(made, type) and issubclass(made, Communicator | Strategy):
        return "communicator" if issubclass(made, Communicator) else "strategy"
    names = list(inspect.signature(made).parameters)
    if not names or names[0] not in ("comm", "communicator", "group"):
        return "strategy"
    return "collective" if len(names) > 1 and not isinstance(made, type) else "communicator"


def _check_on_ranks(checked: str, made: object, kind: str, options: dict[str, Any], as_json: bool) -> int:
    """Check a function on ranks or a communicator; print what came of it."""
    from exogym_core.workers.run import run_ranks
    from netgym.testing import check_collective, check_communicator
    from netsim.testing import LawError

    check: Any = check_collective if kind == "collective" else check_communicator
    known = {*inspect.signature(check).parameters} - {"function", "factory", "on_case", "options", "calls"}
    if kind == "communicator":
        known |= {*inspect.signature(run_ranks).parameters} - {"body", "num_ranks", "transport"}
    if unknown := [name for name in options if name not in known]:
        raise unknown_name(f"option of {check.__name__}", unknown[0], known)
    if isinstance(options.get("dtypes"), list):
        import torch

        options["dtypes"] = [getattr(torch, str(name), name) for name in options["dtypes"]]
    played, found = itertools.count(1), None
    with DelayedProgress("check", every_seconds=_SECONDS_A_LINE) as progress:
        on_case = {"on_case": lambda: progress.now(f"check: case {next(played)}")}
        try:
            report = check(made, **options, **on_case)
        except LawError as error:
            found = error
    if as_json:
        about = {"line": found.problem, "program": found.program} if found is not None else {}
        click.echo(json.dumps({"checked": checked, "as": kind, "passed": found is None, **about}, indent=2))
    elif found is not None:
        click.echo(found.program, nl=False)
        click.echo(f"error: {found.problem}", err=True)
    else:
        click.echo(report)
    return int(found is not None)


def _check_strategy(
    strategy: str, made: object, options: dict[str, object], workers: int, steps: int, as_json: bool
) -> int:
    """Check a strategy; print its rows."""
    from netgym.strategy_check import LAWS, checking

    sizes = {"num_workers": workers, "num_steps": steps}
    reports: list[CheckReport] = []
    with Stoppable() as work, DelayedProgress("check", every_seconds=_SECONDS_A_LINE) as progress:

        def show(law: str, position: int, count: int) -> None:
            progress.now(f"check: {law} ({position} of {count})")

        reports.extend(checking(made, options, progress=show, **sizes))  # type: ignore[arg-type]
    if not reports:
        work.end("no law was tried to its end")
    report = reports[-1]
    if as_json:
        rows = [dataclasses.asdict(row) for row in report.rows]
        plain = {
            name: value if isinstance(value, str | int | float | bool | None | list | dict) else repr(value)
            for name, value in report.options.items()
        }
        passed = report.passed and not work.is_stopped
        found = {"strategy": strategy, "options": plain, "passed": passed, "rows": rows}
        click.echo(json.dumps(found, indent=2))
    else:
        _print(strategy, report)
    work.end(f"{len(report.rows)} of {len(LAWS)} laws were tried")
    return 0 if report.passed else 1


def _read(texts: Iterable[str]) -> dict[str, object]:
    """Options from KEY=VALUE texts, whose values are read as in an experiment."""
    from netsim.files.documents import parse_document

    options = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier():
            raise InputError(f"check: {visible(text)}: expected KEY=VALUE, such as H=10")
        options[key] = parse_document(value, f"check: {key}").data
    return options


def _print(strategy: str, report: CheckReport) -> None:
    console = plain_console(PLAIN_WIDTH)
    options = ", ".join(f"{name}={value!r}" for name, value in report.options.items())
    console.print(Text(visible(f"{strategy}({options})", 500), style="bold"))
    for row in report.rows:
        line = Text.assemble(
            (f"  {row.status:<8}", _STYLES[row.status]),
            f" {row.law:<10} {visible(row.line or row.about, 2000)}",
        )
        console.print(line, soft_wrap=True)
    failed = sum(row.status == "failed" for row in report.rows)
    passed = sum(row.status == "passed" for row in report.rows)
    console.print(Text(f"{passed} of {len(report.rows)} laws passed, {failed} failed"))
