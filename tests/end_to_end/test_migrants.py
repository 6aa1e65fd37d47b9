"""People who bring their own: EXO Gym's example scripts ported by the table of docs/migrating.md, and others.

The scripts are shortened retellings: the same imports, strategies, data and calls of `fit`, few steps of small models.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments import Squares
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from exogym_core import Trainer
from exogym_core.strategy import AllReduceStrategy, DiLoCoStrategy
from netsim.errors import InputError

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([^`]+)`(?:, from exogym[\w.]*)? \| `([^`]+)`", PAGE, re.MULTILINE)
LINES = ("from ", "device", "train_dataset", "val_dataset", "gpt_config", "model = ")
TABLE = {there: here for there, here in ROWS if there.startswith(LINES)}

COMMON = """
import random, torch, torch.nn as nn, torch.nn.functional as F
from functools import partial
from torch.utils.data import Dataset, Subset, TensorDataset

class Pictures(Dataset):
    '''Augmented at random, as torchvision's transforms do: from `random` and from torch.'''
    def __init__(self, count, augmented):
        generator = torch.Generator().manual_seed(0)
        self.pictures = torch.randn(count, 1, 8, 8, generator=generator)
        self.labels = (self.pictures.mean(dim=(1, 2, 3)) > 0).long()
        self.augmented = augmented

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        picture = self.pictures[index]
        if self.augmented:
            picture = picture * random.uniform(0.9, 1.1) + 0.05 * torch.randn(1, 8, 8)
        return picture, int(self.labels[index])

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.25),
            nn.Flatten(), nn.Linear(64, 2),
        )

    def forward(self, batch):
        pictures, labels = batch
        return F.cross_entropy(self.layers(pictures), labels)

results = []
"""

MNIST = """
from exogym.trainer import Trainer
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.sparta import SPARTAStrategy
from exogym.strategy.strategy import SimpleReduceStrategy
from exogym.strategy.optim import OptimSpec

train, val = Pictures(96, True), Pictures(32, False)
for name, Strat, options in [
    ("ddp", SimpleReduceStrategy, {}), ("diloco", DiLoCoStrategy, {"H": 2}),
    ("sparta", SPARTAStrategy, {"p_sparta": 0.05}),
]:
    strategy = Strat(
        optim_spec=OptimSpec(torch.optim.AdamW, lr=3e-3, weight_decay=1e-4),
        lr_scheduler="lambda_cosine",
        lr_scheduler_kwargs={"warmup_steps": 2, "cosine_anneal": True},
        **options,
    )
    trainer = Trainer(Net(), train, val)
    results.append(trainer.fit(
        max_steps=5, strategy=strategy, num_nodes=4, device="cpu", batch_size=4, minibatch_size=2, shuffle=True,
        val_size=16, val_interval=2, run_name=f"mnist_{name}",
    ))
"""

NANOGPT = """
from exogym.trainer import Trainer
from nanogpt import GPT, GPTConfig, get_dataset
from exogym.strategy.optim import OptimSpec
from exogym.strategy.strategy import SimpleReduceStrategy
from exogym.strategy.federated_averaging import FedAvgStrategy
from exogym.strategy.sparta import SPARTAStrategy
from exogym.strategy.diloco import DiLoCoStrategy
from exogym.strategy.demo import DeMoStrategy
from exogym.strategy.sparta_diloco import SPARTADiLoCoStrategy

task = text(block_size=16, num_bytes=20_000)
common = dict(
    lr_scheduler="lambda_cosine", lr_scheduler_kwargs={"warmup_steps": 2, "cosine_anneal": True}, max_norm=1.0
)
inner = OptimSpec(torch.optim.AdamW, lr=1e-3)
outer = OptimSpec(torch.optim.SGD, lr=0.7, nesterov=True, momentum=0.9)
strategies = {
    "ddp": SimpleReduceStrategy(optim_spec=inner, **common),
    "fedavg": FedAvgStrategy(inner_optim_spec=inner, H=2, island_size=2, **common),
    "sparta": SPARTAStrategy(optim_spec=inner, p_sparta=0.05, **common),
    "diloco": DiLoCoStrategy(optim_spec=inner, outer_optim_spec=outer, H=2, **common),
    "demo": DeMoStrategy(
        optim_spec=DEMO_OPTIMIZER, compression_decay=0.999, compression_topk=8, compression_chunk=16, **common
    ),
    "diloco_sparta": SPARTADiLoCoStrategy(
        inner_optim_spec=inner, outer_optim_spec=outer, H=2, p_sparta=0.05, sparta_interval=1, **common
    ),
}
for name, strategy in strategies.items():
    torch.manual_seed(0)
    model = GPT(num_layers=1, width=16, num_heads=2, vocab_size=256, block_size=16)
    trainer = Trainer(model, task.train, task.validation, start_port=12355)
    results.append(trainer.fit(
        num_epochs=1, max_steps=3, strategy=strategy, num_nodes=2, device="", batch_size=4, minibatch_size=2,
        shuffle=True, val_size=8, val_interval=2, correlation_interval=2, save_dir="checkpoints", wandb_project=None,
        run_name=f"nanogpt_{name}", log_x_axis="examples",
    ))
    torch.save(results[-1].state_dict(), f"{name}.pt")
"""

# Every line of example/playground.py but its choice of a data set; calls are on fewer lines.
PLAYGROUND = """
import torch
from exogym.trainer import Trainer
from exogym.strategy.optim import OptimSpec
from nanogpt import GPT, GPTConfig, get_dataset

NUM_NODES = 4

def main():
    dataset = "shakespeare"
    train_dataset, vocab_size = get_dataset(dataset, block_size=1024, device="cpu", start_pc=0.0, end_pc=0.99)
    val_dataset, vocab_size = get_dataset(dataset, block_size=1024, device="cpu", start_pc=0.99, end_pc=1.0)
    device = get_device()
    gpt_config = GPTConfig.gpt2_small()
    gpt_config.dropout = 0.2
    gpt_config.vocab_size = vocab_size
    model = GPT(gpt_config)
    trainer = Trainer(model, train_dataset, val_dataset)
    from exogym.strategy.diloco import DiLoCoStrategy
    strategy = DiLoCoStrategy(
        optim_spec=OptimSpec(torch.optim.AdamW, lr=0.0004), lr_scheduler="lambda_cosine",
        lr_scheduler_kwargs={"warmup_steps": 1000, "cosine_anneal": True}, max_norm=1.0, H=200,
    )
    results.append(trainer.fit(
        num_epochs=1, max_steps=5000, strategy=strategy, num_nodes=NUM_NODES, device=device, batch_size=16,
        minibatch_size=8, shuffle=False, val_size=256, val_interval=100,
    ))

if __name__ == "__main__":
    main()
"""
SMALLER = {
    "=1024": "=16",
    "=5000": "=4",
    "H=200": "H=2",
    "=16,\n": "=4,\n",
    "=8,": "=2,",
    "=256": "=8",
    "=100,": "=2,",
}

IMAGES = """
from exogym.trainer import Trainer
from exogym.strategy.optim import OptimSpec
from exogym.strategy.diloco import DiLoCoStrategy

def factory(subset, seed, batch_size, rank, num_nodes, train_dataset):
    dataset = Pictures(160, train_dataset)
    if train_dataset and subset < 1.0:
        random.seed(seed)
        indices = list(range(len(dataset)))
        random.shuffle(indices)
        dataset = Subset(dataset, indices[: int(len(indices) * subset)])
    if train_dataset and num_nodes > 1:
        share = len(dataset) // num_nodes
        dataset = Subset(dataset.dataset, dataset.indices[rank * share : (rank + 1) * share])
    return dataset

made = partial(factory, 0.5, 0, 4)
trainer = Trainer(Net(), made, made)
results.append(trainer.fit(
    num_epochs=1, max_steps=30, strategy=DiLoCoStrategy(optim_spec=OptimSpec(torch.optim.AdamW, lr=1e-3), H=3),
    num_nodes=2, device="", batch_size=8, minibatch_size=4, shuffle=True, val_size=16, val_interval=3,
    run_name="image_diloco", dataloader_kwargs=dict(num_workers=1, persistent_workers=True, prefetch_factor=2),
))
"""


def ported(script: str) -> str:
    """The script with what the table says in the place of what stands there."""
    for there, here in TABLE.items():
        script = script.replace(there, here)
    assert "exogym." not in script
    assert "nanogpt import" not in script
    return script


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # forks of a process with threads
@pytest.mark.parametrize(
    ("script", "num_runs"),
    [
        (MNIST, 3),
        pytest.param(NANOGPT, 6, marks=pytest.mark.thorough),
        (PLAYGROUND, 1),
        pytest.param(IMAGES, 1, marks=pytest.mark.thorough),
    ],
    ids=["mnist", "nanogpt_train", "playground", "image_train"],
)
def test_exo_gyms_examples_run_by_the_table_alone(
    script: str, num_runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if script is PLAYGROUND:
        script = ported(script)
        for large, small in SMALLER.items():
            script = script.replace(large, small)
    demo = "OptimSpec(torch.optim.SGD, lr=1e-3, weight_decay=0.0)"  # DeMo's own rule, as the page's E28 says
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(COMMON + ported(script).replace("DEMO_OPTIMIZER", demo), "script", "exec"), scope)
    assert len(scope["results"]) == num_runs
    for model in scope["results"]:
        result = model.fit_result
        assert result.complete
        assert result.validation
        assert all(row["train_loss"] == row["train_loss"] for row in result.history)
    if script is MNIST:
        rows = (tmp_path / "logs" / "mnist_diloco" / "validation.csv").read_text().splitlines()
        assert rows[0].startswith("step,")
        assert len(rows) == len(scope["results"][1].fit_result.validation) + 1


# --- others ----------------------------------------------------------------------------------------------------


class DictModel(nn.Module):
    """As Hugging Face's: keywords in, an object with `loss` out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        logits = self.head(self.table(input_ids) * attention_mask[..., None])
        return SimpleNamespace(
            loss=nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits
        )


class AsLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Any:
        return self.model(**batch).loss


class Rows(Dataset[Any]):
    """Rows of unequal length, padded by a collator."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": [(index + place) % 11 for place in range(2 + index % 4)]}


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    tokens = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": tokens, "labels": tokens, "attention_mask": (tokens > 0).long()}


def fit(model: nn.Module, data: Any, validation: Any = None, **options: Any) -> Any:
    given = {"num_nodes": 2, "max_steps": 4, "batch_size": 4, "device": "cpu", "val_interval": 2} | options
    return Trainer(model, data, validation).fit(strategy=DiLoCoStrategy(H=2), **given)


def test_a_model_of_dicts_trains_in_a_wrapper_of_two_lines() -> None:
    result = fit(AsLoss(DictModel()), Rows(), Rows(), dataloader_kwargs={"collate_fn": collate}).fit_result
    assert result.complete
    assert len(result.validation) == 3


def test_a_model_of_dicts_without_a_wrapper_is_reported_how_to_wrap_it() -> None:
    """torch's own words say nothing of batches."""
    with pytest.raises(InputError) as error:
        fit(DictModel(), Rows(), dataloader_kwargs={"collate_fn": collate})
    line = str(error.value).splitlines()[0]
    assert line.startswith("fit: a first batch fails: TypeError: ")
    assert line.endswith(
        "this one takes input_ids, labels, attention_mask: wrap it in a module whose forward(batch) returns "
        "model(**batch).loss)"
    )


def test_all_data_fit_in_one_batch_and_one_rank() -> None:
    inputs = torch.randn(5, 6)
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    trainer = Trainer(Squares(), data, data)
    assert trainer.fit(2, AllReduceStrategy(), 1, device="cpu", batch_size=64).fit_result.complete
