"""The formats as JSON Schema: what is shipped fits them, mistakes do not, and every shipped file names its own."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import click
import pytest
from experiments import json_of

from netgym.cli.inspect_commands import documented, formats, schema_of, sections
from netgym.cli.main import cli, main
from netsim import Topology, shipped_topologies
from netsim.files.documents import load_document, parse_document

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("topologies", "examples") for path in sorted((ROOT / folder).rglob("*.yaml"))]

EXPERIMENT = """\
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
    name = "topology" if path.parent.name == "topologies" else "experiment"
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
    plain: Any = parse_document(EXPERIMENT).data
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
