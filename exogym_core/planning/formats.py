"""JSON Schemas of the documents of `netgym plan --json` and `netgym advise --json`."""

from __future__ import annotations

import typing
from typing import Any

from pydantic import TypeAdapter

from exogym_core.planning.measure import Plan

__all__ = ["advice_schema", "plan_schema"]

_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
_WHOLE = {"type": "integer"}
_POINT = {"type": "object", "additionalProperties": _TEXT, "description": "values of swept keys"}


def _or_none(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _object(fields: dict[str, Any], optional: typing.Collection[str] = ()) -> dict[str, Any]:
    required = [name for name in fields if name not in optional]
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def _list(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


def _figures() -> dict[str, Any]:
    """Fields of a plan."""
    figures: dict[str, Any] = TypeAdapter(Plan).json_schema()["properties"]
    return {
        name: {key: of[key] for key in of if key not in ("title", "default")} for name, of in figures.items()
    }


def plan_schema() -> dict[str, Any]:
    """JSON Schema of the document of `netgym plan --json`, and of `plan.json`: a list, or an object of a sweep."""
    refused = {
        "name": _TEXT,
        "refused": {**_TEXT, "description": "why it cannot be planned"},
        "point": _POINT,
    }
    own = {"without": _or_none(_TEXT), "place": _or_none(_WHOLE), "point": _POINT}
    row = {"anyOf": [_object({"name": _TEXT, **_figures(), **own}, ["point"]), _object(refused, ["point"])]}
    pair = {"first": _TEXT, "second": _TEXT, "key": _TEXT, "at": _NUMBER}
    sides = {"sooner_below": _TEXT, "sooner_above": _TEXT, "point": _POINT}
    sweep = {
        "plans": _list(row),
        "break_even": _list(_object({**pair, **sides})),
        "sooner_throughout": _list(_object({"sooner": _TEXT, "later": _TEXT, "key": _TEXT, "point": _POINT})),
        "step_ratios": _list(
            _object({"faster": _TEXT, "slower": _TEXT, "steps_ratio": _NUMBER, "point": _POINT})
        ),
    }
    return {"anyOf": [_list(row), _object(sweep)]}


def advice_schema() -> dict[str, Any]:
    """JSON Schema of the document of `netgym advise --json`."""
    options, names = {"type": "object"}, _or_none(_list(_list(_TEXT)))
    named = {
        "strategy": _TEXT,
        "options": options,
        "streams": _or_none(_WHOLE),
        "left_out": _or_none(_TEXT),
        "groups": names,
    }
    ratio = dict.fromkeys(("mean", "low"), _NUMBER) | {"high": _or_none(_NUMBER), "source": _TEXT}
    found = {
        **_figures(),
        **named,
        "workers": _WHOLE,
        "worker_hours": _NUMBER,
        "alike": _list(options),
        "steps_ratio": _object({**ratio, "is_law": {"type": "boolean"}}),
    }
    ranked = {"place": _WHOLE, "pareto": {"type": "boolean"}}
    worth = {"worth_low": _or_none(_NUMBER), "worth": _NUMBER, "worth_high": _NUMBER}
    seconds = dict.fromkeys(("seconds", "natural_seconds", "bound_seconds"), _NUMBER)
    return _object(
        {
            "ranked": _list(_object({**found, **ranked, **worth}, worth)),
            "budget": {"anyOf": [_object({"tokens": _NUMBER}), _object({"dollars": _NUMBER})]},
            "protocol": _TEXT,
            "placement": {"type": "object", "additionalProperties": _WHOLE},
            "dominated": _list(_object(found)),
            "not_simulated": _list(_object({**named, "days_at_least": _NUMBER, "reason": _TEXT})),
            "ring": _or_none(_object({"sites": _list(_TEXT), **seconds, "exact": {"type": "boolean"}})),
            "explained": _list(_TEXT),
            "unknown": _list(_TEXT),
        }
    )
