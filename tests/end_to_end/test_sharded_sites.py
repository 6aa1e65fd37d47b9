"""The example of sharded sites: what crosses between them is what it says, to the byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from exogym_core.strategy.parts.codecs import Int8Codec
from netgym.cli.main import main as netgym
from netgym.experiment.experiment import Experiment

EXAMPLE = Path(__file__).parents[2] / "examples" / "sharded_sites.yaml"
STEPS = 40  # two rounds of DiLoCo


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each strategy's entry of the summary."""
    out = tmp_path_factory.mktemp("runs") / "out"
    assert netgym(["compare", str(EXAMPLE), "--set", f"steps={STEPS}", "--out", str(out)]) == 0
    return {entry["name"]: entry for entry in json.loads((out / "summary.json").read_text())}


def num_values() -> int:
    experiment = Experiment.load(EXAMPLE)
    return sum(p.numel() for p in experiment.build_model(experiment.build_task()).parameters())


def test_bytes_are_those_of_the_formulas(run: dict[str, dict[str, Any]]) -> None:
    """The model has 50,826 values, which two ranks cut evenly and four with two of padding."""
    total = num_values()
    of_four, of_two = 4 * (-(-total // 4) * 4), 4 * (-(-total // 2) * 2)
    # The norm of all gradients, for clipping, is one number of 4 bytes that goes around all who share a model.
    assert run["FSDP"]["bytes_sent"] == STEPS * (3 * 3 * of_four + 2 * 3 * 4)
    in_sites = 3 * 2 * of_two + 2 * 2 * 4
    assert run["hybrid"]["bytes_sent"] == STEPS * (in_sites + 2 * of_two)
    assert run["hybrid"]["wan_bytes"] == STEPS * 2 * of_two
    rounds, shard = STEPS // 20, of_two // 8
    # Of each of the two shards, one of the two sites adds up one half and the other the other.
    encoded = 2 * sum(Int8Codec().encoded_bytes(half) for half in (shard // 2, shard - shard // 2))
    assert run["DiLoCo of sites"]["wan_bytes"] == rounds * 2 * encoded
    assert run["DiLoCo of sites"]["bytes_sent"] == STEPS * in_sites + rounds * 2 * encoded


def test_what_crosses_less_is_sooner_and_dividing_a_model_changes_no_loss(
    run: dict[str, dict[str, Any]],
) -> None:
    seconds = [run[name]["virtual_seconds"] for name in ("FSDP", "hybrid", "DiLoCo of sites")]
    assert seconds[0] > 1.5 * seconds[1] > 1.5**2 * seconds[2]
    assert run["FSDP"]["final_loss"] == pytest.approx(run["hybrid"]["final_loss"], rel=1e-3)
