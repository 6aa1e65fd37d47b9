"""Stages against torch.distributed.pipelining under `netgym launch`: values, messages, times."""

from __future__ import annotations

import gzip
import json
import random
import runpy
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from worlds import star_form

from exogym_core import FitResult, Trainer
from exogym_core.config import yaml_text
from exogym_core.stages.split import StagePart
from exogym_core.strategy import AllReduceStrategy, OptimSpec
from netgym.cli.main import main
from tests.end_to_end.conftest import Launch

PROGRAM = Path(__file__).parent / "programs" / "pipeline.py"


class Chain(nn.Module):
    """The program's stages as one model."""

    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        value = batch[0]
        for stage in self.stages:
            value = stage(value)
        return nn.functional.mse_loss(value, batch[1])

    def pipeline_parts(self) -> list[nn.Module]:
        first, *middle, last = self.stages
        head = StagePart(lambda value, batch: nn.functional.mse_loss(last(value), batch[1]), last)
        return [StagePart(lambda batch: first(batch[0]), first), *middle, head]


def train(
    count: int, micro: int, schedule: str, topology: Any, **options: Any
) -> tuple[FitResult, dict[str, Tensor]]:
    """What the program trains, by `fit`."""
    program = runpy.run_path(str(PROGRAM))
    sgd = OptimSpec(torch.optim.SGD, lr=0.05, momentum=0.9)
    fitted = Trainer(Chain(program["parts"](count)), TensorDataset(*program["samples"]()), None).fit(
        strategy=AllReduceStrategy(optim_spec=sgd),
        stages={"count": count, "microbatches": micro, "schedule": schedule},
        compute=3 * count * program["PASS_SECONDS"],
        batch_size=program["SAMPLES"],
        max_steps=program["STEPS"],
        topology=topology,
        num_nodes=1,
        shuffle=False,
        workers="threads",
        progress=False,
        **options,
    )
    return fitted.fit_result, fitted.state_dict()


def sent(trace: Path) -> dict[str, list[tuple[str, int]]]:
    """Targets and bytes of each host's messages, in order."""
    messages = defaultdict(list)
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event.get("cat") == "sends":
            messages[event["args"]["from"]].append((event["args"]["to"], event["args"]["bytes"]))
    return messages


@pytest.mark.parametrize(
    ("schedule", "count", "micro"), [pytest.param("gpipe", 4, 2, marks=pytest.mark.thorough), ("1f1b", 3, 4)]
)
def test_stages_are_torchs_pipelines(
    launch_here: Launch,
    capfd: pytest.CaptureFixture[str],
    schedule: str,
    count: int,
    micro: int,
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    options = ["-n", str(count), "--topology", "wan-4-regions", "--protocol", "ideal", "--compute", "marks"]
    options += ["--trace", "--out", str(run), str(PROGRAM), "gloo", schedule, str(micro)]
    code, out, err = launch_here(*options)
    assert code == 0, err
    ranks = [json.loads(line) for line in out.splitlines() if line.startswith('{"rank"')]
    ranks.sort(key=lambda row: row["rank"])
    placement = json.loads((run / "launch.json").read_text())["placement"]
    about = {"placement": placement, "protocol": "ideal", "trace": tmp_path / "trace.json.gz"}
    ours, weights = train(count, micro, schedule, "wan-4-regions", **about)

    assert [row["train_loss"] for row in ours.history] == pytest.approx(ranks[-1]["losses"], rel=1e-6)
    theirs = [torch.tensor(value) for row in ranks for value in row["weights"]]
    for value, expected in zip(weights.values(), theirs, strict=True):
        assert torch.allclose(value, expected, atol=1e-6)

    messages, expected_messages = sent(about["trace"]), sent(run / "trace.json.gz")
    for host in placement:
        # Before its first step torch's pipeline agrees on ranks and sends descriptions of its tensors.
        first = len(expected_messages[host]) - len(messages[host])
        assert messages[host] == expected_messages[host][first:]
        assert 2 <= first <= 6

    for seed in range(2):
        draw = random.Random(seed)
        rates = {name: f"{draw.choice([0.05, 0.2, 1, 10])} Mbit/s" for name in placement}
        latencies = {name: f"{draw.choice([0, 1, 10, 60])} ms" for name in placement}
        form = star_form(placement, rates, latencies, protocol=draw.choice(["ideal", "linux-tcp"]))
        (tmp_path / "star.yaml").write_text(yaml_text(form))
        again = ["--topology", str(tmp_path / "star.yaml"), "--protocol", form["protocol"], "--json"]
        assert main(["retime", str(run), *again, "--out", str(tmp_path / f"star-{seed}")]) == 0
        launched = json.loads(capfd.readouterr().out)["steady_state"]["seconds"]
        times = train(count, micro, schedule, str(tmp_path / "star.yaml"), placement=placement)[0].history
        step = (times[-1]["virtual_seconds"] - times[0]["virtual_seconds"]) / (len(times) - 1)
        if schedule == "gpipe":
            assert step == pytest.approx(launched, rel=1e-6)
        else:  # torch's rank waits for its sends, too, before its next pass
            assert step < launched * (1 + 1e-6)
