"""`netgym schema`: the formats as JSON Schema, for editors and for programs that write such files."""

from __future__ import annotations

import json
from typing import Any

import click

from exogym_core.app.studies.points import Range
from netsim.files.errors import unknown_name

__all__ = ["FORMATS", "schema", "schema_of"]

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
FORMATS = ("topology", "experiment", "flows", "launch")
"""What there are schemas of."""


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema of a format.

    It tells an editor keys, types and what they mean. `netgym validate` knows more: names that exist, units, routes.

    Args:
        name: one of FORMATS.

    Raises:
        UnknownNameError: there is no such format.
    """
    if name not in FORMATS:
        raise unknown_name("format", name, FORMATS)
    made = {"topology": _topology, "experiment": _experiment, "flows": _flows, "launch": _launch}[name]()
    return {"$schema": _DIALECT, "title": f"NetGym {name}", **{k: v for k, v in made.items() if k != "title"}}


def _topology() -> dict[str, Any]:
    from netsim.topology.schema import TopologyFile

    made = TopologyFile.model_json_schema()
    hosts = made["properties"]["hosts"]
    names = {"type": "array", "items": {"type": ["string", "integer"]}}
    hosts["additionalProperties"] = {"anyOf": [hosts["additionalProperties"], {"type": "null"}]}
    made["properties"]["hosts"] = {
        "anyOf": [{key: value for key, value in hosts.items() if key not in ("title", "default")}, names],
        "default": {},
    }
    return made


def _experiment() -> dict[str, Any]:
    from exogym_core.app.settings import Settings

    made = Settings.model_json_schema()
    properties, parts = made["properties"], made["$defs"]
    for name in ("Named", "StrategySettings"):  # a plain name stands for {name: ...}
        parts[f"{name}OrText"] = {"anyOf": [{"type": "string"}, {"$ref": f"#/$defs/{name}"}]}
    text = json.dumps({"properties": properties})
    for name in ("Named", "StrategySettings"):
        text = text.replace(f'"#/$defs/{name}"', f'"#/$defs/{name}OrText"')
    made["properties"] = properties = json.loads(text)["properties"]
    parts["Range"] = Range.model_json_schema()
    values = {"anyOf": [{"type": "array", "minItems": 1}, {"$ref": "#/$defs/Range"}]}
    own: dict[str, Any] = {
        "points": {"type": "array", "minItems": 1, "items": {"type": "object"}},
        "search": {"enum": ["grid", "random", "optuna"]},
        "trials": {"type": "integer", "minimum": 1},
        "minimise": {"type": "string"},
        "search_seed": {"type": "integer", "minimum": 0},
        "seeds": {},
    }
    sweep = {"type": "object", "minProperties": 1, "properties": own, "additionalProperties": values}
    properties["sweep"] = {"anyOf": [sweep, {"type": "null"}], "default": None}
    topology = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}], "default": None}
    properties["topology"] = topology
    return made


def _flows() -> dict[str, Any]:
    """Of the rows of the CSV file, as objects."""
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


def _launch() -> dict[str, Any]:
    """Of `launch.json`, and of what `netgym launch --json` prints."""
    from exogym_core.torch_backend.report import LaunchReport

    return LaunchReport.model_json_schema()


@click.command()
@click.argument("name", metavar=f"[{'|'.join(FORMATS)}]")
@click.option("--json", "is_json", is_flag=True, help="As it is anyway.")
def schema(name: str, is_json: bool) -> None:
    """Print a format as a JSON Schema."""
    click.echo(json.dumps(schema_of(name), indent=2))
