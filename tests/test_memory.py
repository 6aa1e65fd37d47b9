"""Eight workers on a large memory-mapped data set need hardly more memory than one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

DATA_BYTES = 96 * 2**20

# The proportional set size counts a page that several mappings share once, whoever maps it.
SCRIPT = """
import json, re, sys
import torch
from exogym_core import Trainer
from exogym_core.strategy import FedAvgStrategy
from exogym_core.tasks import build_task

class Probe(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch):
        tokens, targets = batch
        return (self.weight - tokens.float().mean()).square().sum()

def pss():
    return int(re.search(r"Pss:\\s+(\\d+) kB", open("/proc/self/smaps_rollup").read()).group(1)) * 1024

torch.set_num_threads(1)
task = build_task("text", paths=sys.argv[1], block_size=4096)
before, peak = pss(), 0

def watch(row):
    global peak
    if row["step"] % 64 == 0 or row["step"] == steps:
        peak = max(peak, pss())

count = int(sys.argv[2])
steps = len(task.train) // (16 * count)
Trainer(Probe(), task.train).fit(
    num_epochs=1, strategy=FedAvgStrategy("sgd", H=16, lr=0.1), num_nodes=count, batch_size=16,
    device="cpu", workers="threads", on_event=watch,
)
print(json.dumps([before, max(peak, pss())]))
"""


def memory(path: Path, num_workers: int) -> tuple[int, int]:
    """PSS in bytes before the run, and the most of it while it goes through all data."""
    command = [sys.executable, "-c", SCRIPT, str(path), str(num_workers)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, peak = json.loads(done.stdout)
    return before, peak


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is told by Linux only")
def test_eight_workers_in_threads_need_less_than_one_and_a_half_times_the_memory_of_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens.bin"
    np.zeros(DATA_BYTES // 2, np.uint16).tofile(path)
    before, one = memory(path, 1)
    _, eight = memory(path, 8)
    assert one - before > 0.8 * DATA_BYTES, "the run has read its data, and they count"
    assert eight < 1.5 * one
    assert eight - one < 0.5 * DATA_BYTES, "not even half a copy more"
