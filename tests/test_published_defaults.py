"""Strategies under their names, with what their papers and their authors' code have as defaults."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import exogym_core.strategy
from exogym_core.communicator import run_ranks
from exogym_core.strategy import STRATEGIES, Strategy, build_strategy
from exogym_core.strategy.parts.rounds import layers_of

PUBLISHED: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("published_defaults.yaml").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", STRATEGIES)
def test_defaults_are_those_that_were_published(name: str) -> None:
    defaults = build_strategy(name).arguments
    got = {key: getattr(value, "given", value) for key, value in defaults.items()}
    assert {key: got[key] for key in PUBLISHED["defaults"][name]} == PUBLISHED["defaults"][name]


@pytest.mark.parametrize("name", PUBLISHED["inner"])
def test_inner_optimizers_have_the_published_rates(name: str) -> None:
    def body(comm: Any) -> dict[str, Any]:
        strategy = build_strategy(name)
        strategy.setup(torch.nn.Sequential(torch.nn.Linear(4, 4)), comm, 1, 0)
        return dict(strategy.optim.param_groups[0])

    group = run_ranks(body, 1).results[0]
    assert {key: group[key] for key in PUBLISHED["inner"][name]} == PUBLISHED["inner"][name]


def test_outer_steps_have_nesterovs_momentum() -> None:
    """DiLoCo's 0.7 and 0.9 where no paper has others; Streaming's 0.4 and 0.9."""
    for name, rate in {
        "DiLoCo": 0.7,
        "DelayedDiLoCo": 0.7,
        "EagerDiLoCo": 0.7,
        "StreamingDiLoCo": 0.4,
        "CoCoDC": 0.4,
    }.items():
        spec = type(build_strategy(name)).Options().outer_optim()
        assert spec.kwargs == {"lr": rate, "momentum": 0.9, "nesterov": True}, name


@pytest.mark.parametrize("name", PUBLISHED["synonyms"])
def test_torchfts_names_are_understood(name: str) -> None:
    ours = {"sync_every": "H", "fragment_sync_delay": "tau", "fragment_update_alpha": "alpha"}
    strategy = build_strategy(name, **PUBLISHED["synonyms"][name])
    assert {theirs: getattr(strategy, ours[theirs]) for theirs in PUBLISHED["synonyms"][name]} == PUBLISHED[
        "synonyms"
    ][name]


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_is_a_class_of_its_name_with_a_paper_and_a_short_file(name: str) -> None:
    kind = getattr(exogym_core.strategy, f"{name.replace('+', '')}Strategy")
    assert kind is STRATEGIES[name]
    assert "arXiv" in kind.__doc__ or "openreview" in kind.__doc__
    if "Options" in vars(kind):
        assert kind().arguments.keys() >= set(kind.Options.names()) - {*Strategy.Options.names()}, (
            "logs tell every default"
        )
    assert len(Path(inspect.getfile(kind)).read_text(encoding="utf-8").splitlines()) < 200
    assert len([base for base in kind.__mro__ if base.__module__.startswith("exogym_core")]) <= 4
    assert kind().round_steps is not None or name == "CoCoDC", "its fragments are known after setup"


def test_a_third_of_the_layers_is_a_fragment() -> None:
    """Of 24 blocks, an embedding and a head: 8 fragments."""
    names = ["embed.weight", *(f"blocks.{i}.weight" for i in range(24)), "head.weight"]
    assert len(layers_of(names)) // 3 == 8


def test_the_docs_tell_how_long_their_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """To within ten lines; `python benchmarks/strategies.py` makes the table."""
    root = Path(__file__).parents[1]
    monkeypatch.syspath_prepend(root / "benchmarks")
    lines = runpy.run_path(str(root / "benchmarks" / "strategies.py"))["lines"]
    text = (root / "docs" / "strategies.md").read_text(encoding="utf-8")
    for name in STRATEGIES:
        row = re.search(rf"^\| {re.escape(name)} \| (\d+) \| (\d+) \| ", text, re.MULTILINE)
        assert row, name
        for documented, counted in zip(map(int, row.groups()), lines(name), strict=True):
            assert abs(documented - counted) <= 10, f"{name}: {counted} lines, documented as {documented}"
