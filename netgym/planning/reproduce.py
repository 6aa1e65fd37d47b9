"""Measured runs and their predictions: `netgym reproduce`.

A run is a YAML file: what ran, on which network, who measured it, and cells, each a measured figure and the call or the
plan that predicts it. `measured_runs/` has those that ship; one of your own has the same keys.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from pydantic import AfterValidator, Field

import netsim
from netgym.experiment.experiment import Experiment, apply_values, opened_topology
from netgym.planning.measure import Measured
from netgym.planning.models import MOST_PARAMETERS
from netgym.planning.page import placement_text
from netgym.planning.plan import plan
from netgym.planning.planned import Request, parse_parameters
from netgym.planning.setting import Known
from netsim.errors import InputError, unknown_name
from netsim.files.documents import Document, load_document
from netsim.files.schemas import Schema, validate_document
from netsim.topology.values import Bytes, Duration
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from netsim import Topology
    from netsim.files.documents import KeyPath

__all__ = [
    "BASES",
    "RATES",
    "BasisErrors",
    "MeasuredRun",
    "MissingRecordingsError",
    "ReproducedRun",
    "load_run",
    "reproduce",
    "run_names",
]

FOLDER = Path(__file__).with_name("measured_runs")
ROOT = Path(__file__).parents[2]

#: How far a cell tests the model, the strictest first.
BASES = {
    "before": "predicted before the measured figure was read",
    "known": "predicted with knowledge of the figure; nothing was fitted to it",
    "fitted": "the model or its input was chosen with knowledge of the figure",
    "derived": "the figure follows from other published ones",
    "circular": "the prediction is computed from the figure: a check of consistency",
}

Basis = Literal["before", "known", "fitted", "derived", "circular"]
_WRONG_UNIT = 11.0  # times the measured figure, or a share of it, from which on the unit may be another
#: Bits a second of the units of rates.
RATES = {"Mbit/s": 1e6, "Gbit/s": 1e9, "MB/s": 8e6, "GB/s": 8e9}
_UNITS = {"s": 1.0, "ms": 1e-3, "%": 1e-2, "MB": 1e6, "tokens/s": 1.0, **RATES}
_FIGURES = {
    "MB": "payload_bytes",
    "bit": "parameters",
    "x": "parameters",
    "tokens/s": "tokens_per_second",
}  # else seconds
Unit = Literal["s", "ms", "%", "samples/s", "tokens/s", "MB", "bit", "x", "Mbit/s", "Gbit/s", "MB/s", "GB/s"]


class MissingRecordingsError(InputError):
    """The recordings of a run are not on this machine."""


_Parameters: TypeAlias = list[str | int] | dict[str, Annotated[int, Field(ge=1, le=100_000)]]


def _shapes(parameters: _Parameters) -> list[list[int]]:
    """Shapes of tensors, as `parameters` has them; raises InputError for what is none."""
    shapes = []
    for each in parameters:
        text, times = str(each), parameters[str(each)] if isinstance(parameters, dict) else 1
        sizes = text.split("x")
        if len(sizes) == 1:
            sizes = [str(parse_parameters(text))]
        if not all(size.isascii() and size.isdecimal() and 0 < int(size) < MOST_PARAMETERS for size in sizes):
            raise InputError(f"{text!r} is no shape; write for example 512x512, or a number such as 25M")
        shapes += [[int(size) for size in sizes]] * times
    return shapes


def _checked_shapes(parameters: _Parameters) -> _Parameters:
    _shapes(parameters)
    return parameters


_Positive: TypeAlias = Annotated[float, Field(gt=0)]
_Names: TypeAlias = Annotated[list[str], Field(min_length=1)] | None
_Flag: TypeAlias = Literal[
    "sequence",
    "tokens",
    "devices_per_worker",
    "batch_by_speed",
    "utilisation",
    "dollars_per_hour",
    "memory",
    "micro_batch",
]


class Simulated(Schema):
    """A simulated figure: of a collective (`op`) or of a plan (`experiment`).

    Attributes:
        network: a name of the run's `networks`, a shipped network, a file beside the run's, {line: LINK}, {star: HOSTS,
            link: LINK}, {mesh: {REGION: HOSTS}} or a topology; LINK may be a name of the run's `links`.
        regions: hosts of these regions take part in the collective.
        hosts: these take part, in this order.
        op: collective, such as all_reduce; `netsim collective` names all.
        bytes: of its tensor, such as 100 MB.
        algorithm: without it the fastest.
        protocol: without it the network's.
        repeat: the last of so many equal calls counts.
        pause: idle time before each call but the first, such as 1 s; windows shrink meanwhile.
        times: so many such calls, back to back (see `netsim.collective`'s `calls`), are the figure.
        experiment: an experiment or its file, as `netgym plan` takes it; its first strategy is planned.
        parameters: shapes of a payload in place of the experiment's model: [512x512, 512], numbers such as [25M], or
            SHAPE: HOW OFTEN.
        set: keys of the experiment, or `topology.KEY` of the network, as in --set; a cell's are added to its group's.
        flags: arguments of `netgym plan` by name that are no keys of an experiment, such as devices_per_worker.
        figure: attribute of the plan, such as compute_utilisation, exposed_seconds_per_round, seconds_per_step.
        samples: of a step, for a throughput in samples/s.
        samples_per_second: speed at which such a step computes before it waits for the figure.
        unit: of the figure, and of the measured one; a rate is the tensor's bytes over the time, nccl-tests' algbw.
    """

    network: str | dict[str, Any] | None = None
    regions: _Names = None
    hosts: _Names = None
    op: str | None = None
    bytes: Bytes | None = None
    algorithm: str | None = None
    protocol: str | dict[str, Any] | None = None
    repeat: int = Field(1, ge=1)
    pause: Duration = 0.0
    times: int = Field(1, ge=1)
    experiment: str | dict[str, Any] | None = None
    parameters: Annotated[_Parameters, AfterValidator(_checked_shapes)] | None = None
    set: dict[str, Any] = Field({})
    flags: dict[_Flag, Any] = Field({})
    figure: str | None = None
    samples: _Positive | None = None
    samples_per_second: _Positive | None = None
    unit: Unit | None = None


class Cell(Simulated):
    """A measured figure and its prediction.

    Attributes:
        what: the setting that was measured.
        measured: without it the cell is predicted only; a list of measurements is compared by its median.
        basis: before, known (without it), fitted, derived or circular: how far the cell tests the model.
        first: the prediction that was made before the figure was read; needed where `basis` is before.
        cause: known causes of the error; {other} is the figure with `other`'s keys, {other_error} its error,
            {over_other} the prediction relative to it.
        other: keys that differ in a second simulation.
        plus: figures that are added, each by its own keys: one, or a list.
    """

    what: str | None = None
    measured: _Positive | Annotated[list[_Positive], Field(min_length=1)] | None = None
    basis: Basis = "known"
    first: float | None = None
    cause: str = ""
    other: dict[str, Any] = Field({})
    plus: Simulated | list[Simulated] = Field([])


class CellGroup(Cell):
    """Cells with keys in common, which each cell may replace.

    Attributes:
        cells: of the group.
    """

    cells: list[Cell]


class CellProgram(Schema):
    """Program of NetGym's repository whose `cells(part)` yields cells."""

    file: str
    part: str


class MeasuredRun(Schema):
    """A measured run, or several of one kind.

    Attributes:
        what: model and strategy, or calls, and on which devices.
        network: in words.
        measured_by: who measured, and when.
        source: where the figures are printed, and whether it was read.
        predicted_at: commit of NetGym that made the cells' `first` predictions.
        unknown: inputs that are not published, and what was assumed for them.
        links: of the cells' networks, by name.
        networks: of the cells, by name.
        groups: of cells.
        program: computes the cells of a run that ships with NetGym.
    """

    what: str
    network: str
    measured_by: str
    source: str
    predicted_at: str = ""
    unknown: str
    links: dict[str, dict[str, Any]] = Field({})
    networks: dict[str, dict[str, Any]] = Field({})
    groups: list[CellGroup] = Field([])
    program: CellProgram | None = None


def run_names() -> list[str]:
    """Names of the measured runs that ship."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load_run(name: str) -> tuple[MeasuredRun, Document]:
    """A measured run that ships, by name, or that of a YAML file.

    Raises:
        UnknownNameError: neither exists.
        InputError: mistakes in the file, one line each.
    """
    path = FOLDER / f"{name}.yaml"
    is_own = name.endswith((".yaml", ".yml"))
    if not is_own and name not in run_names():
        raise unknown_name("measured run", name, [*run_names(), "all"])
    document = load_document(name if is_own else path)
    run = validate_document(MeasuredRun, document)
    if is_own and run.program is not None:
        raise document.error(
            ("program",), "only runs that ship with NetGym run programs: give groups of cells"
        )
    if not (run.groups or run.program):
        raise document.error((), "groups: is missing: add a group with cells, see docs/accuracy.md")
    return run, document


def reproduce(
    name: str, known: Known | None = None, *, with_limits: bool = False, **options: Any
) -> Iterator[dict[str, Any]]:
    """Cells of a measured run, each as soon as it is simulated.

    Args:
        name: in `run_names()`, or a YAML file.
        known: cache of plans, shared with other runs.
        with_limits: find the limit of each plan too, by a few more simulations.
        options: of Streaming DiLoCo's table: `params`, `layers`, `step_seconds`.

    Yields:
        `what`, `basis`, `unit`, `measured`, `predicted`, `error` (predicted / measured - 1; None where nothing is
        measured), `first` and `cause`; Streaming's have more, those of YAML files `measured_range` of several
        measurements, and of plans `placement`, `limit` and `remarks`.

    Raises:
        UnknownNameError: there is no such run.
        InputError: mistakes in the file.
    """
    run, document = load_run(name)
    if run.program is not None:
        path = ROOT / run.program.file
        if not path.is_file():
            raise MissingRecordingsError(
                f"{name}: its recordings are in NetGym's repository, not in an installed package: run it in a checkout"
            )
        for cell in _module(path).cells(run.program.part, **options):
            yield {**cell, "error": _error(cell["predicted"], cell["measured"])}
    simulation = _Simulation(run, document, known or Known(), with_limits)
    for place, group in enumerate(run.groups):
        for number, own in enumerate(group.cells):
            of_cell: KeyPath = ("groups", place, "cells", number)
            try:
                found = simulation.cell(("groups", place), of_cell, group, own)
            except InputError as error:
                if error.document == document.where:
                    raise
                raise document.error(of_cell, error) from error
            yield found


def _module(path: Path) -> Any:
    """Module of a file of the repository."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if measured is None or predicted is None else predicted / measured - 1


_Places: TypeAlias = "tuple[KeyPath, ...]"
"""Paths of what may have a cell's keys, the nearest first."""


class _Simulation:
    """Figures of one run's cells; equal set-ups are simulated once."""

    def __init__(self, run: MeasuredRun, document: Document, known: Known, with_limits: bool) -> None:
        self._run, self._document, self._known, self._with_limits = run, document, known, with_limits
        self._folder = Path(document.where).parent

    def cell(self, of_group: KeyPath, of_cell: KeyPath, group: CellGroup, own: Cell) -> dict[str, Any]:
        given = {name: getattr(group, name) for name in group.model_fields_set if name != "cells"}
        given |= {name: getattr(own, name) for name in own.model_fields_set}
        given["set"] = {**group.set, **own.set}
        cell = Cell.model_validate(given, context={})
        if (
            missing := next((key for key in ("what", "unit") if getattr(cell, key) is None), None)
        ) is not None:
            raise self._document.error(
                (*of_cell, missing), "is missing: add this key to the cell or its group"
            )
        if cell.basis == "before" and cell.measured is not None and cell.first is None:
            path = of_group if "basis" in group.model_fields_set - own.model_fields_set else of_cell
            message = (
                "needs the prediction made before the figure was read: add first to each cell, or write known"
            )
            raise self._document.error((*path, "basis"), message)
        if cell.pause and cell.repeat == 1:
            path = of_cell if "pause" in own.model_fields_set else of_group
            message = "has no effect on one call: add repeat, 2 for a call after this pause"
            raise self._document.error((*path, "pause"), message)
        given_times = cell.measured if isinstance(cell.measured, list) else [cell.measured]
        times = [each for each in given_times if each is not None]
        measured = float(np.median(times)) if times else None
        places = (of_cell, of_group)
        found, cause = self._found(cell, places), cell.cause
        predicted = self._sum(cell, places)
        error = _error(predicted, measured)
        if cell.other:
            changed = Cell.model_validate({**given, **cell.other}, context={})
            other = self._sum(changed, ((*of_cell, "other"), (*of_group, "other"), *places))
            of_other = {
                "other": other,
                "other_error": _error(other, measured) or 0.0,
                "over_other": predicted / other - 1,
            }
            try:
                cause = cause.format(**of_other)
            except (KeyError, IndexError, ValueError):
                raise self._document.error(
                    (*of_cell, "cause"),
                    "write {other}, {other_error:+.1%} or {over_other:+.1%}, and {{ for a brace",
                ) from None
        values = {"measured": measured, "predicted": predicted, "error": error, "first": cell.first}
        about = {key: found.get(key) for key in ("placement", "limit", "remarks")}
        about["measured_range"] = [min(times), max(times)] if len(times) > 1 else None
        return {"what": cell.what, "basis": cell.basis, "unit": cell.unit, **values, "cause": cause, **about}

    def _key(self, places: _Places, *key: str) -> KeyPath:
        """Path of a key in the nearest of places that has it, else in the last."""
        paths = [(*place, *key) for place in places]
        return next((path for path in paths if path in self._document.lines), paths[-1])

    def _origin(self, path: KeyPath) -> str:
        """Begin of errors about a key: `FILE:LINE: KEY`."""
        return str(self._document.error(path, "")).removesuffix(": ")

    def _sum(self, cell: Cell, places: _Places) -> float:
        """Figure of the cell and those that it adds."""
        total = self._figure(cell, places)
        for number, plus in enumerate(cell.plus if isinstance(cell.plus, list) else [cell.plus]):
            at: KeyPath = ("plus", number) if isinstance(cell.plus, list) else ("plus",)
            keys = {"unit": cell.unit, "network": plus.network or cell.network}
            total += self._figure(
                plus.model_copy(update=keys), (*((*place, *at) for place in places), *places)
            )
        return total

    def _found(self, cell: Simulated, places: _Places) -> Mapping[str, Any]:
        """Results of the call or the plan, simulated once."""
        if (cell.op is None) == (cell.experiment is None):
            raise self._document.error(
                places[-1], "needs either op and bytes (a collective) or experiment (a plan)"
            )
        kept = set(Simulated.model_fields) - {"figure", "unit", "samples", "samples_per_second"}
        simulate = self._planned if cell.op is None else self._collective
        return self._known.once((self, cell.model_dump(include=kept)), lambda: simulate(cell, places))

    def _figure(self, cell: Simulated, places: _Places) -> float:
        """Figure in the cell's unit."""
        found = self._found(cell, places)
        unit = str(cell.unit)
        name = cell.figure or _FIGURES.get(unit, "seconds")
        if not isinstance(found.get(name), int | float):
            known = [each for each, value in found.items() if isinstance(value, int | float)]
            raise self._document.error(
                self._key(places, "figure" if cell.figure else "unit"), unknown_name("figure", name, known)
            )
        value = float(found[name])
        if unit in ("bit", "x"):  # of a parameter; as many times less than fp32
            bits: float = found["payload_bytes"] * 8 / value
            return bits if unit == "bit" else 32 / bits
        if unit == "samples/s":
            if cell.samples is None or cell.samples_per_second is None:
                raise self._document.error(
                    self._key(places, "unit"), "samples/s needs samples and samples_per_second"
                )
            return cell.samples / (cell.samples / cell.samples_per_second + value)
        if unit in RATES:
            value = found["payload_bytes"] * 8 / value
        return value / _UNITS[unit]

    def _collective(self, cell: Simulated, places: _Places) -> Mapping[str, Any]:
        document = self._on_network(Document(self._document.where, {}), cell, places)
        topology = self._topology(document)
        assert cell.op is not None
        if cell.bytes is None:
            raise self._document.error(
                self._key(places, "bytes"), "is missing: add the size of the tensor, such as 100 MB"
            )
        given = {
            name: each for name in ("algorithm", "protocol") if (each := getattr(cell, name)) is not None
        }
        result = netsim.collective(
            topology,
            cell.op,
            num_bytes=cell.bytes,
            ranks=_hosts(cell, topology),
            repeat=cell.repeat,
            pause_seconds=cell.pause,
            calls=cell.times,
            **given,
        )
        return {"seconds": result.seconds, "payload_bytes": cell.bytes}

    def _on_network(self, document: Document, cell: Simulated, places: _Places) -> Document:
        """Experiment's document with the cell's network, payload and changed keys."""
        changes: dict[KeyPath, tuple[str, Any]] = {}  # by place
        if cell.network is not None:
            path = self._key(places, "network")
            try:
                changes[path] = "topology", self._network(cell.network)
            except (KeyError, TypeError, AttributeError) as error:
                message = "expected {line: LINK}, {star: HOSTS, link: LINK} or {mesh: {REGION: HOSTS}}"
                if isinstance(error, KeyError):
                    message = f"links: has no {error}: add it, or write the link here"
                raise self._document.error(path, message) from None
        if cell.parameters is not None:
            payload = {"name": "payload", "shapes": _shapes(cell.parameters)}
            changes[self._key(places, "parameters")] = "model", payload
        for key in sorted(cell.set, key=lambda key: "." in key):  # whole keys first
            changes[self._key(places, "set", key)] = key, cell.set[key]
        for path, (key, value) in changes.items():
            document = apply_values(document, {key: value}, self._origin(path), self._folder)
        data = document.data
        if isinstance(data, dict) and "topology" not in data:
            raise self._document.error((*places[-1], "network"), "is missing: add this key")
        return document

    def _planned(self, cell: Simulated, places: _Places) -> Mapping[str, Any]:
        if isinstance(cell.experiment, str):
            document = load_document(self._folder / cell.experiment)
        else:  # errors have the line, and keys of the experiment
            document = replace(self._document.part(self._key(places, "experiment")), inside=())
        document = self._on_network(document, cell, places)
        if cell.hosts or cell.regions:
            hosts = _hosts(cell, self._topology(document))
            changes = {"placement": hosts, "workers.count": len(hosts)}
            origin = self._origin(self._key(places, "hosts" if cell.hosts else "regions"))
            document = apply_values(document, changes, origin, self._folder)
        experiment = Experiment.from_document(document, self._folder, Path(self._document.where).stem)
        request = Request.of(experiment, known=self._known, **cell.flags)
        strategy = experiment.build_strategy(experiment.strategies[0])
        setting = request.setting
        made = plan(strategy, setting) if self._with_limits else Measured(strategy, setting).plan
        row = made.to_mapping()
        mfu = row.pop("mfu")
        mean = {"mfu": sum(mfu.values()) / len(mfu)} if mfu else {}
        return {
            **row,
            **mean,
            "seconds": row["seconds_per_round"],
            "parameters": setting.model.num_parameters,
            "placement": placement_text(setting.workers_by_site()),
        }

    def _topology(self, document: Document) -> Topology:
        topology = opened_topology(document, document.data["topology"], self._folder)  # type: ignore[index]
        assert topology is not None
        return topology

    def _network(self, network: str | Mapping[str, Any]) -> str | Mapping[str, Any]:
        """Name or content of a topology."""
        run = self._run
        if isinstance(network, str):
            return self._network(run.networks[network]) if network in run.networks else network
        if "mesh" in network:  # every pair of hosts has its own measured stream, every host its own line
            places = network["mesh"].items()
            placed = [(region, f"{region}-{i}") for region, number in places for i in range(number)]
            wan = [
                {"between": [one, other], **run.links["zone" if here == there else f"{here} - {there}"]}
                for (here, one), (there, other) in combinations(placed, 2)
            ]
            return {"regions": {name: run.links["host"] for _, name in placed}, "wan": wan}
        link = network.get("link", network.get("line"))
        link = run.links[link] if isinstance(link, str) else link
        rest = {key: value for key, value in network.items() if key not in ("line", "star", "link")}
        if "line" in network:
            return {"hosts": ["a", "b"], "links": [{"between": ["a", "b"], **link}], **rest}
        if "star" in network:
            hosts = [f"h{i}" for i in range(network["star"])]
            spokes = [{"between": [host, "switch"], **link} for host in hosts]
            return {"hosts": hosts, "routers": ["switch"], "links": spokes, **rest}
        return network


def _hosts(cell: Simulated, topology: Topology) -> list[str]:
    """Hosts that take part, in order; raises InputError for a region that does not exist."""
    for region in cell.regions or ():
        if region not in topology.regions:
            raise unknown_name("region", region, topology.regions)
    return cell.hosts or [
        host.name
        for region in (cell.regions or (None,))
        for host in topology.rank_hosts
        if region in (None, topology.region_of(host.index))
    ]


class BasisErrors(NamedTuple):
    """Errors of cells of one basis as shares; `largest` and `first_largest` have their sign.

    `p95` is the smallest error that 95 % of the cells do not exceed.
    """

    basis: str
    cells: int
    median: float
    p95: float
    largest: float
    first_median: float | None
    first_largest: float | None


class ReproducedRun(NamedTuple):
    """A measured run and its cells, as `reproduce` yields them."""

    name: str
    run: MeasuredRun
    cells: list[dict[str, Any]]

    def facts(self) -> dict[str, str]:
        """The run in words."""
        return {
            key: getattr(self.run, key) for key in ("what", "network", "measured_by", "source", "unknown")
        }

    def summaries(self) -> list[BasisErrors]:
        """Errors of the measured cells by basis, in the order of `BASES`."""
        found = []
        for basis in BASES:
            own = [cell for cell in self.cells if cell["basis"] == basis and cell["error"] is not None]
            if own:
                errors = [cell["error"] for cell in own]
                first = [cell["first"] / cell["measured"] - 1 for cell in own if cell["first"] is not None]
                of_first = (float(np.median(np.abs(first))), max(first, key=abs)) if first else (None, None)
                sizes = np.abs(errors)
                middle, high = float(np.median(sizes)), float(np.quantile(sizes, 0.95, method="higher"))
                found.append(BasisErrors(basis, len(own), middle, high, max(errors, key=abs), *of_first))
        return found

    def to_mapping(self) -> dict[str, Any]:
        """Mapping of the run and its cells for JSON."""
        summaries = [each._asdict() for each in self.summaries()]
        return {"name": self.name, **self.facts(), "summaries": summaries, "cells": self.cells}

    def short_lines(self) -> list[str]:
        """A line for each basis, and one for cells that are predicted only."""
        waiting = sum(cell["measured"] is None for cell in self.cells)
        only = [f"{self.name:<18} {format_count(waiting, 'figure'):>11}, predicted only"] if waiting else []
        return only + [
            f"{self.name:<18} {format_count(each.cells, 'figure'):>11}, {each.basis + ':':<9} error median "
            f"{each.median:.1%}, {f'95 % within {each.p95:.1%}, ' * (each.cells >= 20)}largest {each.largest:+.1%}"
            for each in self.summaries()
        ]

    def lines(self) -> list[str]:
        """The run in words, then a line for each cell."""
        facts = [
            f"  {key.replace('_', ' ')}: {value}" for key, value in self.facts().items() if key != "what"
        ]
        return [
            f"{self.name}: {self.run.what}",
            *facts,
            *(f"  {each}" for each in self._cell_lines()),
            *(f"  {line}" for line in self.short_lines()),
        ]

    def _cell_lines(self) -> Iterator[str]:
        """Each cell, and below it workers, limit and remarks of its plan where they are not those above."""
        printed = set[str]()
        for cell in self.cells:
            yield _cell_line(cell)
            limit, placement = cell.get("limit"), cell.get("placement")
            notes = [f"workers: {placement}"] if placement else []
            notes += [f"limited by {limit['by']}; {limit['remedy']}"] if limit else []
            for note in [*notes, *(cell.get("remarks") or ())]:
                if note not in printed:
                    yield f"  {note}"
                    printed.add(note)


def _cell_line(cell: Mapping[str, Any]) -> str:
    unit, predicted = cell["unit"], cell["predicted"]
    line = f"{cell['what']}: predicted " + ("above 1000" if predicted is None else f"{predicted:.4g}")
    line += f" {unit}, " + ("not measured" if cell["measured"] is None else f"measured {cell['measured']:g}")
    line += "" if (ends := cell.get("measured_range")) is None else f" ({ends[0]:g} to {ends[1]:g})"
    if (error := cell["error"]) is not None:
        is_far = error + 1 > _WRONG_UNIT or 0 < (error + 1) * _WRONG_UNIT < 1
        line += f" ({error:+.1%}, {cell['basis']})" + ": is the unit right?" * is_far
    if "strategy" in cell:
        own = cell["strategy_gbit_per_second"]
        return f"{line}; {cell['strategy']} {'above 1000' if own is None else f'{own:.1f}'}"
    return f"{line}: {cell['cause']}" if cell["cause"] else line
