"""The network still answers what it did when the corpus was frozen: a fixed part of it; `make.py compare` has all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import frozen_runs
import pytest
import torch
from frozen_runs import CARRIERS
from make import PARTS, compare, frozen

from exogym_core.strategy import STRATEGIES


@pytest.mark.parametrize("part", PARTS)
def test_answers_are_as_frozen(part: str) -> None:
    names = list(PARTS[part].names())
    assert sorted(frozen(part)) == sorted(["", *names])
    wrong = [
        str(difference)
        for name in PARTS[part].tested(names)
        for difference in compare(part, name)
        if not difference.is_allowed
    ]
    assert not wrong, "\n".join(wrong[:20])


def test_threads_processes_and_resumed_runs_were_the_same() -> None:
    kept = {tuple(name.rsplit(" ", 1)): answer for name, answer in frozen("runs").items() if name}
    for (run, _), answer in kept.items():
        for carrier in CARRIERS:
            assert kept[run, carrier] == answer, run


# --- tiny runs of every strategy on a CUDA device -----------------------------------------------------------

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")


def run(strategy: str, device: str = "cuda", **more: Any) -> dict[str, Any]:
    return frozen_runs.metrics(frozen_runs.fit(strategy, "linux-tcp", device=device, **more))


@on_cuda
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_strategy_on_cuda(strategy: str, tmp_path: Path) -> None:
    expected, found = run(strategy, "cpu"), run(strategy)
    assert found["times"] == expected["times"]
    assert found["bytes"] == expected["bytes"]
    assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-3)
    assert run(strategy) == found
    stopped = frozen_runs.resumed(strategy, "linux-tcp", str(tmp_path), device="cuda")
    assert frozen_runs.metrics(stopped) == found
    processes = {"kind": "processes", "processes": 2}
    assert run(strategy, workers=processes) == found


@on_cuda
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cuda_graphs_change_no_result(strategy: str) -> None:
    """A first pass is computed, the second captured, the third compared, and three graphs are launched."""
    graphs, single = (
        run(strategy, workers={"kind": "stacked", "cuda_graphs": each}) for each in (True, False)
    )
    # Rounds in another way where a graph gives memory of another alignment.
    assert graphs.pop("losses")[0] == pytest.approx(single.pop("losses")[0], rel=1e-5)
    assert graphs == single
