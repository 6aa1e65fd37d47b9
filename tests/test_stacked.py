"""`workers: stacked`: the runs of threads, with all replicas as one batched model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym_core import Trainer
from exogym_core.strategy import (
    AllReduceStrategy,
    AsyncDiLoCoStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    OptimSpec,
    Strategy,
    StreamingDiLoCoStrategy,
)


class Classifier(nn.Module):
    """A model that can be stacked, with a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("scale", torch.full((6,), 0.5))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        features, classes = batch
        hidden = torch.relu(self.first(self.frozen(features) * self.scale))
        return nn.functional.cross_entropy(self.last(hidden), classes)


class WithNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))  # type: ignore[assignment]


class WithDropout(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5))  # type: ignore[assignment]


class WithBranch(Classifier):
    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().forward(batch)
        return loss * 2 if loss > 0.5 else loss


class Scaled(Classifier):
    """A model with a parameter of no dimension, and one of no values."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.zeros(0))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().forward((batch[0] * self.factor, batch[1])) + self.none.sum()


class Attending(nn.Module):
    """Attention whose keys have a bias: softmax cancels it, so that its gradient is rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(1, 8), nn.Linear(8, 3)
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        hidden = self.inputs(batch[0][..., None])
        parts = self.query(hidden), self.key(hidden), self.value(hidden)
        hidden = nn.functional.scaled_dot_product_attention(*(each[:, None] for each in parts))
        return nn.functional.cross_entropy(self.outputs(hidden.mean((1, 2))), batch[1])


@pytest.fixture(scope="module")
def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(500, 6, generator=generator)
    return TensorDataset(features, features[:, :3].argmax(1))


def train(
    data: TensorDataset, strategy: Strategy, kind: str, model: type[nn.Module] = Classifier, **options: Any
) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "num_nodes": 5,
        "max_steps": 12,
        "batch_size": 8,
        "topology": "wan-4-regions",
        "compute": {"fixed": "50 ms", "jitter": 0.3},
        "val_size": 32,
        "val_interval": 4,
        "progress": False,
    }
    trainer = Trainer(model(), data, data, device="cpu")
    return trainer.fit(strategy=strategy, workers=kind, seed=5, **settings | options).fit_result


def losses(result: Any) -> list[float]:
    return [row["train_loss"] for row in result.history]


ROWS: dict[str, Callable[[], Strategy]] = {
    "all-reduce": AllReduceStrategy,
    "clipped, with a schedule": partial(AllReduceStrategy, max_norm=0.5, lr_scheduler="lambda_cosine"),
    "DiLoCo": partial(DiLoCoStrategy, H=3),
    "streaming": partial(StreamingDiLoCoStrategy, H=4, num_fragments=2),
    "DeMo, whose optimizer is its own": partial(DeMoStrategy, compression_chunk=8, compression_topk=4),
    "without rounds": partial(AsyncDiLoCoStrategy, H=3),
    "Lion": partial(DiLoCoStrategy, H=3, optim_spec=OptimSpec("lion", lr=0.003, weight_decay=0.1)),
}


@pytest.mark.parametrize("make", ROWS.values(), ids=ROWS)
def test_stacked_replicas_have_the_clock_and_the_losses_of_threads(
    samples: TensorDataset, make: Callable[[], Strategy]
) -> None:
    single, stacked = (train(samples, make(), kind) for kind in ("threads", "stacked"))
    assert stacked.virtual_seconds == single.virtual_seconds
    assert [row["virtual_seconds"] for row in stacked.history] == [
        row["virtual_seconds"] for row in single.history
    ]
    assert stacked.bytes_sent == single.bytes_sent
    assert losses(stacked) == pytest.approx(losses(single), rel=1e-4)


@pytest.mark.parametrize(("model", "autocast"), [(Scaled, False), (Attending, "bf16")])
def test_models_of_all_shapes_are_stacked(
    samples: TensorDataset, model: type[nn.Module], autocast: bool | str
) -> None:
    strategy = partial(AllReduceStrategy, max_norm=0.5)
    single = train(samples, strategy(), "threads", model, autocast=autocast)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it runs in threads, or torch takes one replica at a time
        stacked = train(samples, strategy(), "stacked", model, autocast=autocast)
    assert stacked.virtual_seconds == single.virtual_seconds
    assert losses(stacked) == pytest.approx(losses(single), rel=2e-2 if autocast else 1e-4)


def test_gradients_and_updates_are_computed_once_for_all_replicas(
    samples: TensorDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, forward = {"forward": 0}, Classifier.forward

    def counted_forward(self: Classifier, batch: Any) -> Tensor:
        calls["forward"] += 1
        return forward(self, batch)

    monkeypatch.setattr(Classifier, "forward", counted_forward)
    train(samples, DiLoCoStrategy(H=3), "threads", val_interval=100)
    single = calls["forward"]
    calls["forward"] = 0
    train(samples, DiLoCoStrategy(H=3), "stacked", val_interval=100)
    assert single - calls["forward"] >= 4 * 12 - 2  # five forward passes a step are one; two were a trial


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (AllReduceStrategy, {"num_nodes": 6, "max_steps": 35, "num_epochs": 4, "val_interval": 15}),
        (
            partial(DiLoCoStrategy, H=2),
            {"minibatch_size": 4, "num_epochs": 1, "max_steps": None, "batch_size": 32},
        ),
    ],
    ids=["epochs", "micro-batches"],
)
def test_batches_of_several_sizes_and_last_ones_that_are_not_full(
    samples: TensorDataset, make: Callable[[], Strategy], options: dict[str, Any]
) -> None:
    single, stacked = (train(samples, make(), kind, **options) for kind in ("threads", "stacked"))
    assert losses(stacked) == pytest.approx(losses(single), rel=1e-4)
    assert [row["examples_trained"] for row in stacked.history] == [
        row["examples_trained"] for row in single.history
    ]
    assert stacked.virtual_seconds == single.virtual_seconds
    assert [row["step"] for row in stacked.validation] == [row["step"] for row in single.validation]
    assert stacked.final_loss == pytest.approx(single.final_loss, rel=1e-4)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(
    samples: TensorDataset, tmp_path: Path
) -> None:
    whole = train(samples, DiLoCoStrategy(H=3), "stacked")
    first = train(
        samples, DiLoCoStrategy(H=3), "stacked", max_steps=7, checkpoint_interval=5, save_dir=tmp_path
    )
    resumed = train(samples, DiLoCoStrategy(H=3), "stacked", resume_from=first.checkpoint_folder)
    assert losses(resumed)[-5:] == losses(whole)[-5:]
    assert resumed.virtual_seconds == whole.virtual_seconds


@pytest.mark.parametrize(
    ("model", "strategy", "reason"),
    [
        (WithNorm, partial(DiLoCoStrategy, H=4), "buffers change"),
        (WithDropout, partial(DiLoCoStrategy, H=4), "draws random numbers"),
        (WithBranch, partial(DiLoCoStrategy, H=4), "vectorise"),
    ],
    ids=["batch normalisation", "dropout", "control flow by data"],
)
def test_replicas_that_cannot_be_stacked_run_in_threads_and_say_why(
    samples: TensorDataset, model: type[nn.Module], strategy: Callable[[], Strategy], reason: str
) -> None:
    with pytest.warns(UserWarning, match=f"ranks run in threads: .*{reason}"):
        stacked = train(samples, strategy(), "stacked", model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        single = train(samples, strategy(), "threads", model)
    assert losses(stacked) == losses(single)
