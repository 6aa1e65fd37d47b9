"""Strategies under their names, with what their papers and their authors' code have as defaults."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import exogym_core.strategy
from exogym_core.communicator import run_ranks
from exogym_core.strategy import STRATEGIES, build_strategy
from exogym_core.strategy.parts.fragments import layers_of

#: Arguments as published; `lr` and the like are the inner optimizer's. What a source leaves open is not here.
PUBLISHED: dict[str, dict[str, Any]] = {
    "ADPSGD": {"interval": 1},
    "AllReduce": {"bucket_bytes": 25 * 2**20},
    "AsyncDiLoCo": {"H": 50, "outer_lr": 0.7, "outer_momentum": 0.9, "momentum_share": 0.0, "buffer": None},
    "AsyncSPARTA": {"p_sparta": 0.05, "interval": 20, "delay": 10},
    "CoCoDC": {
        "H": 100,
        "outer_lr": 0.4,
        "tau": 5,
        "transmissions": 8,
        "compensation": 0.5,
        "pattern": "strided",
    },
    "DecoupledDiLoCo": {"H": 24, "num_fragments": 24},
    "DelayedDiLoCo": {"H": 100},
    "DeMo": {
        "compression_topk": 32,
        "compression_chunk": 64,
        "compression_decay": 0.999,
        "weight_decay": 0.0,
    },
    "DESLOC": {"Ku": None, "Kv": None},
    "DGC": {"density": 0.001, "momentum": 0.9},
    "DiLoCo": {"H": 100},
    "Dion": {"mu": 0.95},
    "DPSGD": {"graph": "ring"},
    "EagerDiLoCo": {"H": 100},
    "FedAvg": {"H": 1},
    "GASLoC": {},
    "HALoS": {
        **{"H": 8, "K": 32, "local_lr": 0.2, "local_momentum": 0.9, "local_buffer": 16},
        **{"global_lr": 0.15, "global_momentum": 0.5, "global_buffer": 2, "merge": 0.25},
    },
    "HeLoCo": {"confidence": 3.0},
    "LocalSGD": {"H": 8},
    "MuLoCo": {"H": 30, "outer_lr": 0.7, "outer_momentum": 0.6, "error_decay": 0.9},
    "NoLoCo": {"H": 50, "group_size": 2, "outer_momentum": 0.5, "outer_lr": 0.7, "gamma": None},
    "OneBitAdam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "freeze_step": None},
    "PowerSGD": {"approximation_rank": 2},
    "QSGD": {"bits": 4, "bucket": 512},
    "QsparseLocalSGD": {},
    "SGP": {"graph": "exponential"},
    "SignSGD": {"momentum": 0.9},
    "SlowMo": {"H": 48, "outer_lr": 1.0, "outer_momentum": 0.5},
    "SparseLoCo": {"H": 30, "k": 64, "chunk": 64, "bits": 2, "error_decay": 0.95, "outer_lr": 1.0},
    "SPARTA": {"p_sparta": 0.005, "interval": 1},
    "SPARTA+DiLoCo": {"p_sparta": 0.005, "interval": 1, "H": 100},
    "StreamingDiLoCo": {"H": 100, "outer_lr": 0.4, "tau": 1, "alpha": 0.5, "pattern": "strided"},
}
#: Of the optimizers' first groups, as they are built.
INNER = {
    "Dion": {"lr": 0.01, "weight_decay": 0.01},
    "DGC": {"lr": 0.1},
    "MuLoCo": {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.01},
    "SignSGD": {"lr": 1e-4},
}
#: torch.distributed's, EXO Gym's and torchft's words for arguments that have others here.
SYNONYMS = {
    "StreamingDiLoCo": {"sync_every": 40, "fragment_sync_delay": 3, "fragment_update_alpha": 0.25},
    "DiLoCo": {"sync_every": 40},
    "CoCoDC": {"sync_every": 40, "fragment_sync_delay": 3},
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_defaults_are_those_that_were_published(name: str) -> None:
    defaults = build_strategy(name).arguments
    got = {key: getattr(value, "given", value) for key, value in defaults.items()}
    assert {key: got[key] for key in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize("name", INNER)
def test_inner_optimizers_have_the_published_rates(name: str) -> None:
    def body(comm: Any) -> dict[str, Any]:
        strategy = build_strategy(name)
        strategy.setup(torch.nn.Sequential(torch.nn.Linear(4, 4)), comm, 1, 0)
        return dict(strategy.optim.param_groups[0])

    group = run_ranks(body, 1).results[0]
    assert {key: group[key] for key in INNER[name]} == INNER[name]


def test_outer_steps_have_nesterovs_momentum() -> None:
    """DiLoCo's 0.7 and 0.9 where no paper has others; Streaming's 0.4 and 0.9."""
    for name, rate in {
        "DiLoCo": 0.7,
        "DelayedDiLoCo": 0.7,
        "EagerDiLoCo": 0.7,
        "StreamingDiLoCo": 0.4,
    }.items():
        spec = type(build_strategy(name)).Options().outer_optim()
        assert spec.kwargs == {"lr": rate, "momentum": 0.9, "nesterov": True}, name


@pytest.mark.parametrize("name", SYNONYMS)
def test_torchfts_names_are_understood(name: str) -> None:
    ours = {"sync_every": "H", "fragment_sync_delay": "tau", "fragment_update_alpha": "alpha"}
    options: Any = build_strategy(name, **SYNONYMS[name]).modules[-1].options  # type: ignore[attr-defined]
    assert {theirs: getattr(options, ours[theirs]) for theirs in SYNONYMS[name]} == SYNONYMS[name]


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_is_a_class_of_its_name_with_a_paper_and_a_short_file(name: str) -> None:
    kind = getattr(exogym_core.strategy, f"{name.replace('+', '')}Strategy")
    assert kind is STRATEGIES[name]
    assert "arXiv" in kind.__doc__ or "openreview" in kind.__doc__
    if "Options" in vars(kind):
        assert kind().arguments.keys() >= set(kind.Options.names()), "logs tell every default"
    assert len(Path(inspect.getfile(kind)).read_text(encoding="utf-8").splitlines()) < 175


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
