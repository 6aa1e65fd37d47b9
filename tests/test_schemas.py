"""The formats as JSON Schema: what is shipped fits them, mistakes do not, and every shipped file names its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest

from exogym_core.app.cli import cli, main
from exogym_core.app.schema_command import FORMATS, schema_of
from netsim.files.documents import load_document, parse_document

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[1]
SHIPPED = ("examples", "exogym_core/app/bench")
FILES = [path for folder in ("topologies", *SHIPPED) for path in sorted((ROOT / folder).rglob("*.yaml"))]

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
    """The first line is a modeline, by which editors complete keys and tell mistakes."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    before, _, named = first.partition("$schema=")
    assert before == "# yaml-language-server: "
    name = "topology" if path.parent.name == "topologies" else "experiment"
    assert (path.parent / named).resolve() == ROOT / "schemas" / f"{name}.json"
    errors = [error.message for error in validator(name).iter_errors(load_document(path).data)]
    assert errors == []


@pytest.mark.parametrize("name", FORMATS)
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


def test_an_unknown_format_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "topologie"]) == 2
    assert "did you mean 'topology'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_every_command_prints_json_on_request(name: str) -> None:
    options = [
        option for each in cli.commands[name].params for option in each.opts if isinstance(each, click.Option)
    ]
    assert "--json" in options


def test_documents_of_commands_that_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "protocols", "--json"]) == 0
    assert "ideal" in json.loads(capsys.readouterr().out)["protocols"]
    assert main(["validate", str(ROOT / "topologies/lan.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["valid"] is True
