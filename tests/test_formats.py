"""The pages on the two file formats: their examples load, and they list every key."""

from __future__ import annotations

import importlib
import re
import runpy
from collections.abc import Iterable
from pathlib import Path

import pytest

from exogym_core.config import Settings
from exogym_core.cost.compute import Compute
from exogym_core.results.schema import SUMMARY, TRAIN, VALIDATION
from netgym.experiment.experiment import Experiment
from netsim import Protocol, Topology
from netsim.files.documents import parse_document
from netsim.files.schemas import Schema
from netsim.topology import file as topology_schema

DOCS = Path(__file__).parent.parent / "docs"
TOPOLOGY = (DOCS / "topology.md").read_text(encoding="utf-8")
EXPERIMENT = (DOCS / "experiment.md").read_text(encoding="utf-8")


def example(page: str) -> str:
    found = re.search(r"^```yaml\n(.*?)^```", page, re.S | re.M)
    assert found
    return found[1]


def documented(page: str) -> set[str]:
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
    assert wanted - documented(page) == set()


def test_tables_of_columns_follow_from_the_schema() -> None:
    written = runpy.run_path(str(DOCS / "columns.py"))["with_tables"](EXPERIMENT)
    assert written == EXPERIMENT, "run python docs/columns.py"
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
    given |= {"queue": 10, "software": "1 ms"}
    assert names == set(given)
    Protocol.parse(given)


def test_every_compute_key_is_one() -> None:
    names = re.findall(r"^\| `(\w+)` \|", EXPERIMENT.split("**`compute`**")[1].split("##")[0], re.M)
    assert " ".join(names) == "fixed flops measured jitter stragglers coding updates shared_cores"
    Compute.parse(
        {"flops": {"utilisation": "40 %", "device": "a100", "dtype": "fp32"}, "jitter": 0.1, "coding": "free"}
    )
