"""A small experiment, its data, and runs of it: what most tests of training begin with and compare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from exogym_core import DiLoCoOptimizer, Trainer
from exogym_core.communicator.base import Communicator
from exogym_core.results.fit_result import FitResult
from exogym_core.results.report import Results, comparison_table, verdict
from exogym_core.strategy import AllReduceStrategy, OptimSpec
from netgym.cli.main import main
from netgym.tasks import build_model
from netsim.collectives.schedules.algorithms import ALGORITHMS

SMALL = {
    "name": "small",
    "task": "digits",
    "model": "{name: mlp, hidden: [4]}",
    "workers": "{count: 2, kind: threads}",
    "device": "cpu",
    "steps": 4,
    "evaluate": "{every: 2, samples: 32}",
    "strategies": "[AllReduce, {name: DiLoCo, H: 2}]",
}


#: An experiment as users write it, a line a key.
FILE = """\
task: digits
workers: {count: 2}
topology: two-datacenters
compute: 50 ms
steps: 6
strategies:
  - AllReduce
  - {name: DiLoCo, H: 3}
"""


# Points of a sweep, of which the second fails: its network has no such hosts.
_ON_LAN = "placement: [lan.0, lan.1]"
PLACED_ON_LAN = (
    f"[{{topology: lan, {_ON_LAN}}}, {{topology: home-tiers, {_ON_LAN}}}, {{topology: home-tiers}}]"
)

# Of each operation, so that none has to be found for a training that is shorter than the search.
FIRST_ALGORITHMS = {op: next(iter(names)) for op, names in ALGORITHMS.items()}


def experiment(**keys: object) -> str:
    """Text of a small experiment, a key a line; `keys` are YAML, and None leaves a key out."""
    return "".join(f"{key}: {value}\n" for key, value in (SMALL | keys).items() if value is not None)


def stored(entries: Iterable[Any], **settings: object) -> dict[str, Any]:
    """The experiment of a run folder that is written by hand, a strategy for each of its entries' names."""
    plain = {
        "name": "digits",
        "task": {"name": "digits"},
        "workers": {"count": 2},
        "steps": 4,
        "topology": None,
    }
    return (
        plain
        | {"strategies": [{"name": str(name)} for name in entries], "target_loss": 0.3, "seed": 0}
        | settings
    )


def one_weight(
    comm: Communicator, num_values: int, num_steps: int, **options: Any
) -> tuple[nn.Parameter, Any]:
    """A rank's parameter, and its DiLoCo with rounds of `num_steps` steps."""
    weight = nn.Parameter(torch.zeros(num_values))
    inner = partial(torch.optim.SGD, lr=0.1)
    options |= {"batch_size": 1, "num_inner_steps": num_steps, "inner_optimizer": inner, "params": [weight]}
    return weight, DiLoCoOptimizer(communicator=comm, **options)


def three_steps(comm: Communicator) -> list[float]:
    """Three steps of a second each, and when each ended."""
    ends = []
    for _ in range(3):
        comm.advance(1.0)
        ends.append(comm.now())
    return ends


def samples(count: int = 40, seed: int = 0) -> TensorDataset:
    """Six random numbers each, and which of the first three is the largest."""
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs[:, :3].argmax(dim=1))


def mlp(seed: int = 0, hidden: int = 5) -> torch.nn.Module:
    """A classifier of `samples`."""
    return build_model("mlp", inputs=6, hidden=[hidden], classes=3, seed=seed)


class Squares(torch.nn.Module):
    """A linear layer, and the mean square of its error, or of its output where a batch has no targets."""

    def __init__(self, inputs: int = 6, outputs: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(inputs, outputs)

    def forward(self, batch: Any) -> torch.Tensor:
        """The loss."""
        inputs, *targets = batch
        return (self.layer(inputs) - (targets[0] if targets else 0)).square().mean()


def fit(model: Any = None, data: Any = None, validation: Any = None, **options: Any) -> torch.nn.Module:
    """Train two ranks for three steps on the CPU, in threads; `options` are `Trainer.fit`'s."""
    given: dict[str, Any] = {"num_nodes": 2, "batch_size": 4, "max_steps": 3, "device": "cpu"}
    given |= {"workers": "threads", "strategy": AllReduceStrategy(optim_spec=OptimSpec("sgd", lr=0.1))}
    return Trainer(model or mlp(), data or samples(), validation).fit(**(given | options))


def fitted(*arguments: Any, **options: Any) -> FitResult:
    """The result of `fit`."""
    return fit(*arguments, **options).fit_result  # type: ignore[return-value]


def json_of(command: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """JSON that a command of `netgym` prints; it has to end well."""
    assert main(command) == 0
    return json.loads(capsys.readouterr().out)


def results_of(folder: Path) -> dict[str, bytes]:
    """Contents of the files that equal runs have equal, by path."""
    files = [*folder.glob("metrics/*"), *folder.glob("models/*"), folder / "summary.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


VERDICTS = yaml.safe_load(Path(__file__).with_name("verdicts.yaml").read_text(encoding="utf-8"))


def entry(name: str, **given: Any) -> dict[str, Any]:
    """What the summary of a run says of a strategy."""
    return {
        "name": name,
        "final_loss": 0.2,
        "accuracy": 0.95,
        "virtual_seconds": 100.0,
        "virtual_seconds_to_target": 50.0,
        "compute_utilisation": 0.5,
        "bytes_sent_per_worker": 1_000_000,
        "wan_bytes": 2_000_000,
        "strategy": name,
        "steps": 4,
    } | given


def check_verdict(results: Results, row: dict[str, Any]) -> None:
    """Fail where the verdict is not what a row of verdicts.yaml expects."""
    decision = verdict(results)
    assert decision.winner == row.get("winner")
    text = decision.text
    assert text == row.get("is", text)
    assert text.startswith(row.get("starts", "")), text
    assert text.endswith(row.get("ends", "")), text
    assert [part for part in row.get("has", ()) if part not in text] == [], text
    assert row.get("lacks", "\n") not in text
    assert "once" not in row or text.count(row["once"]) == 1
    if "row" in row:
        line, column, cell = row["row"]
        assert comparison_table(results).rows[line][1][column] == cell


# --- what equal runs have in common, to the bit -------------------------------------------------------------


def fit_until(trainer: Trainer, stop_at: int | None, **arguments: Any) -> FitResult:
    """The result of a fit that Ctrl-C ends at a step, where one is given."""

    def press(row: Mapping[str, Any]) -> None:
        if row["kind"] == "step" and row["step"] == stop_at:
            raise KeyboardInterrupt

    try:
        trainer.fit(on_event=press, **arguments)
    except KeyboardInterrupt:
        assert stop_at is not None
    assert trainer.result is not None
    return trainer.result


def digest(value: Any) -> Any:
    """The bits of a nested value, in a form that can be compared."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.numpy().tobytes())
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: digest(item) for key, item in value.items()}
    return [digest(item) for item in value] if isinstance(value, list | tuple) else repr(value)


def outcome(result: FitResult) -> Any:
    assert result.complete
    fields = {**vars(result)}
    for name in ("checkpoint_folder", "resumed_step"):
        del fields[name]
    return digest(fields)
