"""`import netgym`: comparisons from Python, their tables, figures and pages."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import netgym
from netgym.cli.main import main
from netsim.errors import InputError

HOSTILE = "<script>alert(1)</script>"
EXPERIMENT: dict[str, Any] = {
    "name": "small",
    "task": "digits",
    "workers": {"count": 2, "kind": "threads"},
    "device": "cpu",
    "topology": "two-datacenters",
    "compute": "50 ms",
    "steps": 6,
    "evaluate": {"every": 2},
    "strategies": ["AllReduce", {"name": "DiLoCo", "label": HOSTILE, "H": 3}],
}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> netgym.Comparison:
    """A comparison of a mapping, in a folder that stays."""
    return netgym.compare(EXPERIMENT, out=tmp_path_factory.mktemp("runs") / "small", progress=False)


def test_a_comparison_has_a_row_a_strategy(result: netgym.Comparison) -> None:
    assert [entry["name"] for entry in result.summary] == ["AllReduce", HOSTILE]
    table = result.table()
    assert list(table["name"]) == ["AllReduce", HOSTILE]
    assert list(table.columns) == list(result.summary[0])
    assert {"final_loss", "virtual_seconds", "bytes_sent"} <= set(table.columns)
    assert result.winner in list(table["name"])
    assert str(result.winner) in result.verdict
    rows = result.to_pandas()
    assert set(rows["strategy"]) == {"AllReduce", HOSTILE}
    assert list(rows[rows["strategy"] == "AllReduce"]["step"]) == [0, 2, 4, 6]


def test_the_figure_has_a_line_a_strategy(result: netgym.Comparison) -> None:
    (axes,) = result.plot().axes
    assert [line.get_label() for line in axes.lines] == ["AllReduce", HOSTILE]
    assert axes.get_xlabel().startswith("virtual time, s")
    assert axes.lines[0].get_xdata()[-1] == pytest.approx(result.summary[0]["virtual_seconds"])


def test_labels_are_escaped_in_a_notebook(result: netgym.Comparison) -> None:
    html = result._repr_html_()
    assert "<script" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert html.count("<tr>") == 3


def test_a_file_and_its_command_give_the_same_run(
    result: netgym.Comparison, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(EXPERIMENT | {"steps": 400}))
    loaded = netgym.compare(tmp_path / "small.yaml", overrides={"steps": 6}, out=tmp_path / "python")
    assert "AllReduce" in capsys.readouterr().err, "progress"
    assert loaded.summary == result.summary
    assert (
        main(["compare", str(tmp_path / "small.yaml"), "--set", "steps=6", "--out", str(tmp_path / "run")])
        == 0
    )
    for name in ("summary.json", "experiment.yaml", "metrics/AllReduce.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (loaded.folder / name).read_bytes()
    assert netgym.load(tmp_path / "run").verdict == loaded.verdict


def test_a_comparison_on_several_networks_trains_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    networks = ["lan", netgym.Topology.load("two-datacenters")]
    options: dict[str, Any] = {"out": tmp_path / "python", "seeds": [3], "progress": False}
    found = netgym.compare(tmp_path / "small.yaml", strategy="AllReduce", topology=networks, **options)
    assert isinstance(found, netgym.SweepResult)
    assert ["retimed" in entry for entry in found.summary] == [False, True]
    alone = netgym.compare(
        tmp_path / "small.yaml", strategy="AllReduce", topology="two-datacenters", seeds=[3]
    )
    (entry,) = found.summary[1]["strategies"]
    assert {**entry, "retimed": None} == {**alone.summary[0], "retimed": None}
    with pytest.raises(InputError, match="topology is an empty list"):
        netgym.compare(EXPERIMENT, topology=[])


def test_a_temporary_folder_is_gone_after_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    found = netgym.run(
        EXPERIMENT, strategy="AllReduce", topology=netgym.Topology.load("lan"), seeds=[3], progress=False
    )
    folder = found.folder
    assert [entry["name"] for entry in found.summary] == ["AllReduce"]
    assert yaml.safe_load((folder / "experiment.yaml").read_text())["topology"]["name"] == "lan"
    assert capsys.readouterr().err == ""
    del found
    gc.collect()
    assert not folder.parent.exists()


def test_a_sweep_has_a_row_a_point_and_the_command_gives_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = EXPERIMENT | {"steps": 2, "strategies": ["AllReduce"], "evaluate": {"every": 1}}
    found = netgym.sweep(
        changed, over={"strategies.*.lr": [0.01, 0.03]}, out=tmp_path / "python" / "swept", progress=False
    )
    assert capsys.readouterr().err == ""
    table = found.table()
    assert list(table["strategies.*.lr"]) == [0.01, 0.03]
    assert table["final_loss"].notna().all()
    assert sorted(set(found.to_pandas()["point"])) == ["0000", "0001"]
    assert sorted(str(line.get_label()) for line in found.plot().axes[0].lines) == [
        "0.01, AllReduce",
        "0.03, AllReduce",
    ]
    assert found.verdict in found._repr_html_()
    assert isinstance(netgym.load(found.folder), netgym.SweepResult)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(changed))
    command = ["sweep", str(tmp_path / "small.yaml"), "--vary", "strategies.*.lr=[0.01, 0.03]"]
    assert main([*command, "--out", str(tmp_path / "command" / "swept")]) == 0
    for name in ("summary.json", "results.csv", "points/0001/summary.json"):
        assert (tmp_path / "command" / "swept" / name).read_bytes() == (found.folder / name).read_bytes()
    with pytest.raises(InputError, match=r"experiment: has no 'sweep'"):
        netgym.sweep(changed, out=tmp_path / "none")


def test_plans_come_as_objects() -> None:
    (row,) = netgym.plan(
        model="llama-7b", strategies=["DiLoCo"], topology="wan-4-regions", tokens="1B", device="h100"
    )
    assert row["name"] == "DiLoCo"
    assert row["days"] > 0


def test_a_missing_extra_is_reported(result: netgym.Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'netgym\[pandas\]'"):
        result.table()
