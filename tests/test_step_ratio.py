"""DiLoCo's published scaling law: its printed losses follow from it, and it is applied where it was fitted only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from exogym_core.cost.compute import Compute
from exogym_core.strategy import build_strategy
from netgym.planning.advise import advise
from netgym.planning.measure import NETWORK_ERROR, Setting
from netgym.planning.models import SequenceModel, planned_model
from netgym.planning.page import print_table
from netgym.planning.plan import plan
from netgym.planning.step_ratio import (
    BENCHMARK_STEPS,
    LOSS_LAW,
    PRINTED_LOSSES,
    Ratio,
    law_ratio,
    relative_loss,
    steps_range,
)
from netsim import Topology

CELLS = [
    (size, workers, row[place] / row[0])
    for size, row in PRINTED_LOSSES.items()
    for place, workers in enumerate((1, 2, 4, 8), 1)
    if place < len(row)
]


@pytest.mark.parametrize(("size", "workers", "printed"), CELLS)
def test_printed_losses_are_those_of_the_law(size: float, workers: int, printed: float) -> None:
    """Relative to data-parallel: within 0.3 % where it was fitted, 0.65 % at 4B and 10B, the range of ratios."""
    error = abs(relative_loss(size, workers) / printed - 1)
    assert error < (0.003 if size < 3e9 else 0.0065)
    found = law_ratio("DiLoCo", {"H": 30}, size, workers, None)
    needed = printed ** (2 / -LOSS_LAW[0][1])
    assert found.low <= needed <= found.high


def test_a_number_of_workers_between_is_between() -> None:
    two, three, four = (relative_loss(1e9, workers) for workers in (2, 3, 4))
    assert two < three < four
    assert math.log(three) == pytest.approx(
        math.log(two) + (math.log(four) - math.log(two)) * math.log2(1.5), rel=1e-12
    )


OUTSIDE: list[tuple[str, Mapping[str, Any], float, int, float]] = [
    ("SparseLoCo", {"H": 30}, 1e9, 4, 20e9),
    ("DiLoCo", {"H": 10}, 1e9, 4, 20e9),
    ("DiLoCo", {"H": 30}, 2e7, 4, 4e8),
    ("DiLoCo", {"H": 30}, 7e10, 4, 1.4e12),
    ("DiLoCo", {"H": 30}, 1e9, 9, 20e9),
    ("DiLoCo", {"H": 30}, 1e9, 4, 5e9),
    ("DiLoCo", {"H": 30}, 1e9, 4, 1e12),
]


@pytest.mark.parametrize(("name", "options", "size", "workers", "tokens"), OUTSIDE, ids=str)
def test_outside_of_what_was_fitted_it_says_nothing(
    name: str, options: Mapping[str, Any], size: float, workers: int, tokens: float
) -> None:
    assert law_ratio("DiLoCo", {"H": 30}, 1e9, 4, 20e9) is not None
    assert law_ratio(name, options, size, workers, tokens) is None


def test_what_it_does_not_know_is_named() -> None:
    plain = law_ratio("DiLoCo", {"H": 30}, 1e9, 4, 20e9)
    far = law_ratio("StreamingDiLoCo", {"H": 100, "codec": "int8"}, 1e9, 4, 20e9)
    assert (plain.mean, plain.low, plain.high) == (far.mean, far.low, far.high)
    assert plain.source.endswith("is 0.54% above data-parallel's at 1B parameters")
    assert far.source.endswith(
        "; it does not cover H = 100 and codec int8 and fragments, which may need more"
    )


def _setting() -> Setting:
    """A small model that says it has as many parameters as the law is about."""
    small = planned_model("llama-2m", 64)
    model = SequenceModel(small.model, small.length, small.sequence_flops)
    model.num_parameters = 35_000_000
    return Setting(model, Topology.load("wan-4-regions"), Compute.parse("1 s"), 4, 8, 20 * 35e6)


def test_advice_applies_it_where_there_are_no_own_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Days and their range are multiplied, and a line says so; a run of the user's takes its place."""
    chosen = (("AllReduce", {}), ("DiLoCo", {"H": 30}), ("DiLoCo", {"H": 500}))
    monkeypatch.setattr("netgym.planning.advise.SEARCHED", {})
    monkeypatch.setattr("netgym.planning.advise.CANDIDATES", chosen)
    advice = advise(_setting())
    ratio = law_ratio("DiLoCo", {"H": 30}, 35e6, 4, 700e6)
    every = [*advice["ranked"], *advice["dominated"]]
    (row,) = [row for row in every if row["options"] == {"H": 30} and not row["left_out"]]
    assert row["steps_ratio"] == vars(ratio)
    waiting = 1 - row["compute_utilisation"]
    assert row["days_low"] / row["days"] == pytest.approx(
        ratio.low / ratio.mean * (1 - waiting * NETWORK_ERROR)
    )
    assert row["days_high"] / row["days"] == pytest.approx(
        ratio.high / ratio.mean * (1 + waiting * NETWORK_ERROR)
    )
    assert {row["strategy"] for row in every if row["steps_ratio"]["high"] == 1} == {"AllReduce"}
    assert any("arXiv 2503.09799, table 7" in line for line in advice["unknown"])
    own = advise(_setting(), {"DiLoCo": Ratio(1.1, 1.0, 1.2, "runs/mine")})
    ratios = {row["steps_ratio"]["mean"] for row in [*own["ranked"], *own["dominated"]]}
    assert ratios == {1.0, 1.1}
    assert any("1.00 to 1.20 times data-parallel's steps (runs/mine)" in line for line in own["unknown"])


def test_a_law_does_not_put_a_strategy_before_those_of_which_it_says_nothing() -> None:
    """At 10B parameters it has DiLoCo need 0.93 times data-parallel's steps: that counts as 1, its range is printed."""
    law = law_ratio("DiLoCo", {"H": 30}, 10e9, 4, 200e9)
    assert law.mean == pytest.approx(0.928, rel=1e-3)
    taken = steps_range("DiLoCo", {"H": 30}, 10e9, 4, 200e9)
    assert (taken.low, taken.mean, taken.high) == (law.low, 1.0, law.high)


def test_an_unmeasured_strategy_has_a_range() -> None:
    """From no more steps to the most that our own benchmark took; without an end where it missed a target."""
    where = (70e9, 4, 1.4e12)
    sparse = steps_range("SparseLoCo", {"H": 30}, *where)
    assert (sparse.low, sparse.high) == (1.0, 3.0)
    assert "1.20 and 3.00 times" in sparse.source
    far = steps_range("StreamingDiLoCo", {"H": 100}, 1e9, 4, 20e9)
    law = law_ratio("StreamingDiLoCo", {"H": 100}, 1e9, 4, 20e9)
    assert (far.low, far.high) == (law.low, 2.7)
    assert math.isinf(steps_range("DelayedDiLoCo", {}, *where).high)
    assert steps_range("DelayedDiLoCo", {}, *where).to_json()["high"] is None
    assert math.isinf(steps_range("Own", {}, *where).high)
    assert steps_range("AllReduce", {"bucket_bytes": 1}, *where).high == 1.0
    assert steps_range("AllReduce", {"codec": "bf16"}, *where).high == pytest.approx(1.2)


def test_the_benchmarks_page_says_the_same() -> None:
    """The ranges' ends are the table of docs/benchmark.md."""
    page = (Path(__file__).parents[1] / "docs" / "benchmark.md").read_text(encoding="utf-8")
    table = page.partition("| strategy | digits: rate |")[2].partition("\n\n")[0]
    rows = {
        cells[0].strip(): cells for cells in (line.strip("| ").split("|") for line in table.splitlines()[2:])
    }

    def steps(cell: str) -> int | None:
        return int(cell) if cell.strip().isdigit() else None

    for name, ratios in BENCHMARK_STEPS.items():
        assert (steps(rows[name][2]), steps(rows[name][4])) == ratios, name


def test_a_plan_tells_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole, in the table too."""
    planned = plan(build_strategy("DiLoCo", H=30), _setting())
    (remark,) = [each for each in planned.remarks if each.startswith("to the same loss it needs 1.47 times")]
    row = {"name": "DiLoCo", "place": 1, **planned.to_mapping()}
    print_table([row], {key: [] for key in ("break_even", "sooner_throughout", "step_ratios")})
    assert f"DiLoCo: {remark}" in capsys.readouterr().out
    assert not any("same loss" in remark for remark in plan(build_strategy("AllReduce"), _setting()).remarks)
