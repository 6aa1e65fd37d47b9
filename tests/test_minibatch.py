"""The micro-batch that fits: what memory is counted, what is chosen, where it is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from experiments import fitted
from torch import nn
from torch.utils.data import TensorDataset

from exogym_core import Trainer
from exogym_core.run import learner as minibatch
from exogym_core.run.learner import fitting_size, memory_limit, saved_bytes
from exogym_core.strategy import AllReduceStrategy
from netgym.cli.main import main
from netsim.errors import InputError

INPUTS = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(INPUTS)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(10, 100), nn.Sigmoid(), nn.Linear(100, 1))

    def forward(self, batch: tuple[torch.Tensor]) -> torch.Tensor:
        return self.layers(batch[0]).mean()


def batch(size: int) -> tuple[torch.Tensor]:
    return (INPUTS[:size].clone(),)


def test_what_autograd_keeps_is_counted() -> None:
    # The inputs, and the sigmoid's output, which the second layer keeps too; the mean keeps nothing.
    assert saved_bytes(Wide(), batch(8)) == 8 * (10 + 100) * 4
    assert saved_bytes(Wide(), batch(16)) == 16 * (10 + 100) * 4


@pytest.mark.parametrize(("room", "size"), [(1, 1), (3, 3), (5.5, 4), (11.9, 6), (12, 12), (100, 12)])
def test_the_largest_divisor_that_fits_is_chosen(room: float, size: int) -> None:
    model = Wide()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    limit = 3 * 1.3 * (5 * weights + room * 110 * 4) + 1e-6
    assert fitting_size(model, batch, 12, num_ranks=3, limit_bytes=limit) == size


def test_too_little_for_one_sample_is_reported() -> None:
    with pytest.warns(UserWarning, match="3 ranks need .* GB even with one sample at a time"):
        assert fitting_size(Wide(), batch, 12, num_ranks=3, limit_bytes=1.0) == 1


def test_half_of_this_machine_is_the_limit() -> None:
    assert 1e7 < memory_limit(torch.device("cpu")) < 1e14


def fit(size: Any, **options: Any) -> Any:
    return fitted(Wide(), DATA, DATA, batch_size=8, minibatch_size=size, **options)


def limited(monkeypatch: pytest.MonkeyPatch, room: float) -> None:
    weights = sum(parameter.nbytes for parameter in Wide().parameters())
    monkeypatch.setattr(minibatch, "memory_limit", lambda device: 2 * 1.3 * (5 * weights + room * 440) + 1e-6)


def test_auto_is_the_same_as_giving_the_size_that_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, room=4)
    found, given = fit("auto"), fit(4)
    assert found.minibatch_size == 4
    assert found.history == given.history


def test_a_resumed_run_takes_the_size_that_was_found_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limited(monkeypatch, room=4)
    stopped = fit("auto", checkpoint_interval=1, save_dir=tmp_path)
    limited(monkeypatch, room=8)
    resumed = fit("auto", resume_from=stopped.checkpoint_folder)
    assert resumed.minibatch_size == 4
    assert resumed.history == stopped.history


def test_an_error_of_the_model_comes_out_at_once() -> None:
    class Broken(Wide):
        def forward(self, batch: tuple[torch.Tensor]) -> torch.Tensor:
            raise KeyError("labels")

    trainer = Trainer(Broken(), DATA, device="cpu")
    with pytest.raises(InputError, match=r"^fit: a first batch fails: KeyError: 'labels'"):
        trainer.fit(strategy=AllReduceStrategy(), num_nodes=2, minibatch_size="auto", workers="threads")


def test_an_experiment_stores_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("exogym_core.results.report.write_report", lambda folder: None)
    Path("small.yaml").write_text(
        "task: digits\nmodel: {name: mlp, hidden: [4]}\nworkers: {count: 2, kind: threads}\ndevice: cpu\n"
        "steps: 2\nbatch_size: 6\nminibatch_size: auto\nstrategies: [AllReduce]\n"
    )
    assert main(["run", "small.yaml", "--out", "out"]) == 0
    assert yaml.safe_load(Path("out/experiment.yaml").read_text())["minibatch_size"] == 6
