"""The two file formats: pages whose examples load and which list every key, and their JSON Schemas."""

from __future__ import annotations

import importlib
import inspect
import re
import runpy
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from experiments import json_of

from exogym_core.config import Settings
from exogym_core.cost.compute import Compute
from exogym_core.results.schema import SUMMARY, TRAIN, VALIDATION, Column
from netgym.cli.inspect_commands import documented, formats, schema_of, sections
from netgym.cli.main import cli, main
from netgym.experiment.experiment import Experiment
from netsim import Protocol, Topology, shipped_topologies
from netsim.files.documents import load_document, parse_document
from netsim.files.schemas import Schema
from netsim.topology import file as topology_schema

DOCS = Path(__file__).parent.parent / "docs"
TOPOLOGY = (DOCS / "topology.md").read_text(encoding="utf-8")
EXPERIMENT = (DOCS / "experiment.md").read_text(encoding="utf-8")


def example(page: str) -> str:
    found = re.search(r"^```yaml\n(.*?)^```", page, re.S | re.M)
    assert found
    return found[1]


def words_of(page: str) -> set[str]:
    """What stands in code quotes, word by word."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.S | re.M)
    return {word for quoted in re.findall(r"`([^`]+)`", prose) for word in re.findall(r"\w+", quoted)}


def keys(models: Iterable[type[Schema]]) -> set[str]:
    return {info.alias or name for model in models for name, info in model.model_fields.items()}


def type_of(group: str) -> type[Schema]:
    return Settings.model_fields[group].annotation  # type: ignore[return-value]


def test_the_topology_loads(tmp_path: Path) -> None:
    path = tmp_path / "network.yaml"
    path.write_text(example(TOPOLOGY))
    topology = Topology.load(path)
    assert (len(topology.hosts), topology.protocol) == (9, "linux-tcp")


def test_the_experiment_loads_and_runs_again(tmp_path: Path) -> None:
    path = tmp_path / "regions.yaml"
    path.write_text(example(EXPERIMENT))
    experiment = Experiment.load(path)
    assert set(Settings.model_fields) == set(experiment.document.data or ())  # type: ignore[call-overload]
    stored = Experiment.from_document(parse_document(experiment.to_yaml()))
    assert stored.to_yaml() == experiment.to_yaml()
    assert Experiment.load(path, scale="tiny").settings.steps == 4


@pytest.mark.parametrize(
    ("page", "wanted"),
    [
        (
            TOPOLOGY,
            keys(
                [
                    *(topology_schema.TopologyFile, topology_schema.HostEntry, topology_schema.LinkEntry),
                    *(topology_schema.RegionEntry, topology_schema.RouteEntry),
                ]
            ),
        ),
        (EXPERIMENT, keys([Settings, *(type_of(key) for key in ("workers", "evaluate"))])),
    ],
)
def test_every_key_is_reported(page: str, wanted: set[str]) -> None:
    assert wanted - words_of(page) == set()


def test_the_worst_of_seeds_needs_an_order() -> None:
    with pytest.raises(ValueError, match="column loss: over_seeds='worst' orders by choices"):
        Column("loss", "a number", "loss", over_seeds="worst")


def test_tables_of_columns_follow_from_the_schema() -> None:
    written = runpy.run_path(str(DOCS / "columns.py"))["with_tables"](EXPERIMENT)
    assert written == EXPERIMENT, "run python docs/columns.py"
    accuracy = (DOCS / "accuracy.md").read_text()
    keyed = runpy.run_path(str(DOCS / "columns.py"))["with_keys"](accuracy)
    assert keyed == accuracy, "run python docs/columns.py"
    for column in (*TRAIN, *VALIDATION, *SUMMARY):
        assert f"| `{column.name}` | {column.meaning} |" in EXPERIMENT


def test_pages_of_the_python_interface_have_every_public_name() -> None:
    """After a change of public names: python docs/api_tables.py."""
    tables = runpy.run_path(str(DOCS / "api_tables.py"))
    for page, modules in tables["PAGES"].items():
        text = (DOCS / "api" / f"{page}.md").read_text(encoding="utf-8")
        for module in modules:
            rows = text.split(f"<!-- names of {module} -->")[1].split(f"<!-- end of names of {module} -->")[0]
            names = set(re.findall(r"^\| `(\w+)[(`]", rows, re.M))
            assert names == set(importlib.import_module(module).__all__), page


def test_every_protocol_key_is_one() -> None:
    table = TOPOLOGY.split("**A protocol**")[1].split("##")[0]
    names = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    given = {"preset": "linux-tcp", "streams": 2, "window": "1 MiB", "connections": "per-transfer"}
    given |= {"congestion": "cubic", "queue": 10, "mtu": 1500, "software": "1 ms", "core": "9 Gbit/s"}
    assert names == {*given, "card"}
    Protocol.parse(given)
    Protocol.parse({"preset": "nccl-sockets", "card": "10 Gbit/s"})


def test_every_compute_key_is_one() -> None:
    names = re.findall(r"^\| `(\w+)` \|", EXPERIMENT.split("**`compute`**")[1].split("##")[0], re.M)
    assert " ".join(names) == "fixed flops measured jitter stragglers coding updates shared_cores"
    Compute.parse(
        {"flops": {"utilisation": "40 %", "device": "a100", "dtype": "fp32"}, "jitter": 0.1, "coding": "free"}
    )


# --- the formats as JSON Schema -----------------------------------------------------------------------------

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("topologies", "examples") for path in sorted((ROOT / folder).rglob("*.yaml"))]

FITTING = """\
name: a
task: digits
workers: {count: 2}
steps: 3
strategies: [AllReduce, {name: DiLoCo, H: 4, label: often}]
minibatch_size: auto
seeds: 3
topology: lan
sweep: {seeds: [0, 1], strategies.*.lr: [1e-3, 1], steps: {low: 1, high: 9}, search: random, trials: 3}
"""


@cache
def validator(name: str) -> Any:
    found = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(found)
    return jsonschema.Draft202012Validator(found)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_shipped_files_fit_the_schema_that_they_name(path: Path) -> None:
    """The first line is a modeline, by which editors complete keys and mark errors."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    before, _, named = first.partition("$schema=")
    assert before == "# yaml-language-server: "
    name = Path(named).stem
    assert name in ("topology", "experiment")
    assert (path.parent / named).resolve() == ROOT / "schemas" / f"{name}.json"
    errors = [error.message for error in validator(name).iter_errors(load_document(path).data)]
    assert errors == []


@pytest.mark.parametrize("name", formats())
def test_the_stored_schemas_are_what_the_command_prints(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a change of a format: netgym schema NAME > schemas/NAME.json."""
    assert main(["schema", name]) == 0
    assert capsys.readouterr().out == (ROOT / "schemas" / f"{name}.json").read_text(encoding="utf-8")


def test_an_experiment_fits_and_its_mistakes_do_not() -> None:
    check = validator("experiment")
    plain: Any = parse_document(FITTING).data
    assert [error.message for error in check.iter_errors(plain)] == []
    for change in (
        {"stepz": 3},
        {"steps": "three"},
        {"steps": 0},
        {"workers": {"count": 2, "kind": "fibres"}},
        {"strategies": []},
        {"strategies": [{"H": 4}]},
        {"sweep": {"steps": 3}},
        {"loggers": ["paper"]},
    ):
        assert not check.is_valid(plain | change), change
    assert not check.is_valid({key: value for key, value in plain.items() if key != "task"})


def test_flows_and_topologies_fit_and_their_mistakes_do_not() -> None:
    flow = {"start_s": 0.5, "src": "a", "dst": "b", "bytes": 10}
    assert validator("flows").is_valid([flow, flow | {"finish_s": 1.0}])
    assert not validator("flows").is_valid([flow | {"bytes": -1}])
    assert not validator("flows").is_valid([{"src": "a"}])
    link = {"between": ["a", "b"], "bandwidth": "1 Gbit/s", "rtt": "2 ms"}
    assert validator("topology").is_valid({"hosts": ["a", "b"], "links": [link]})
    assert validator("topology").is_valid({"hosts": {"a": None, "b": {"devices": 2}}, "links": [link]})
    assert not validator("topology").is_valid({"hosts": ["a", "b"], "links": [link | {"bandwith": 1}]})


CONTEXT = click.Context(cli)


@pytest.mark.parametrize("name", cli.list_commands(CONTEXT))
def test_every_command_prints_json_on_request(name: str) -> None:
    command = cli.get_command(CONTEXT, name)
    options = [option for each in command.params for option in each.opts if isinstance(each, click.Option)]
    assert "--json" in options


@pytest.mark.parametrize(
    ("package", "registry"),
    [
        ("exogym_core.strategy", "STRATEGIES"),
        ("netgym.tasks", "TASKS"),
        ("netgym.tasks", "MODELS"),
    ],
)
def test_listed_docstrings_are_those_of_the_classes(package: str, registry: str) -> None:
    """`netgym list` reads them from the files."""
    made = getattr(importlib.import_module(package), registry)
    assert documented(package.replace(".", "/"), registry) == {
        name: inspect.getdoc(each) or "" for name, each in made.items()
    }


def test_experimental_strategies_are_listed_on_request_alone() -> None:
    kinds = importlib.import_module("exogym_core.strategy").STRATEGIES
    listed = {every: dict(sections(every=every)["strategies"]()) for every in (False, True)}
    assert listed[True].keys() == kinds.keys()
    marked = {name for name, line in listed[True].items() if line.startswith("(experimental)")}
    assert (
        marked
        == {name for name, kind in kinds.items() if kind.experimental}
        == listed[True].keys() - listed[False]
    )
    assert marked == {"AsyncSPARTA", "CoCoDC", "DecoupledDiLoCo", "DESLOC", "GASLoC", "HeLoCo"}


def test_listed_sizes_are_those_of_the_shipped_topologies() -> None:
    """`netgym list` counts in the files."""
    listed = dict(sections()["topologies"]())
    assert listed.keys() == shipped_topologies().keys()
    for name, line in listed.items():
        network = Topology.load(name)
        where = f" in {len(network.regions)} regions" if len(network.regions) > 1 else ""
        assert line == f"{len(network.hosts)} hosts{where}"


def test_documents_of_commands_that_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ideal" in json_of(["list", "protocols", "--json"], capsys)["protocols"]
    assert json_of(["validate", str(ROOT / "topologies/lan.yaml"), "--json"], capsys)["valid"] is True
