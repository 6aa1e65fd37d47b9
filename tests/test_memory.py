"""Eight workers on a large memory-mapped data set need hardly more memory than one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

DATA_BYTES = 64 * 2**20

# The proportional set size counts a page that several mappings share once, whoever maps it.
SCRIPT = """
import gc, json, re, sys
import torch
from exogym_core import Trainer
from exogym_core.strategy import FedAvgStrategy
from netgym.tasks import build_task

class Probe(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        tokens, targets = batch
        return (self.weight - tokens.float().mean()).square().sum()

def pss():
    return int(re.search(r"Pss:\\s+(\\d+) kB", open("/proc/self/smaps_rollup").read()).group(1)) * 1024

def memory(count, **limits):
    # Before the run, and the most of it while it goes through all data.
    gc.collect()  # the mapping of the last run's data goes
    task = build_task("text", paths=sys.argv[1], block_size=4096)
    steps = len(task.train) // (16 * count)
    before, peak = pss(), []

    def watch(row):
        if row["step"] % 64 == 0 or row["step"] == steps:
            peak.append(pss())

    Trainer(Probe(), task.train).fit(
        num_epochs=1, strategy=FedAvgStrategy("sgd", H=16, lr=0.1), num_nodes=count, batch_size=16,
        device="cpu", workers="threads", on_event=watch, **limits,
    )
    return before, max([*peak, pss()])

torch.set_num_threads(1)
memory(8, max_steps=2)  # what else is imported
eight = memory(8)
print(json.dumps([*eight, *memory(1)]))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is told by Linux only")
def test_eight_workers_in_threads_need_less_than_one_and_a_half_times_the_memory_of_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens.bin"
    np.zeros(DATA_BYTES // 2, np.uint16).tofile(path)
    command = [sys.executable, "-c", SCRIPT, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before_eight, eight, before_one, one = json.loads(done.stdout)
    one -= before_one
    assert one > 0.8 * DATA_BYTES, "the run has read its data, and they count"
    assert eight < 1.5 * (before_eight + one)
    assert eight - before_eight - one < 0.5 * DATA_BYTES, "not even half a copy more"
