"""Sites as processes: one is killed while it trains, one comes late, and the rest goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SCRIPT = """
import time
import torch
from exogym_core import DiLoCoOptimizer
from exogym_core.communicator import SiteCommunicator

with SiteCommunicator.from_environment() as comm:
    weight = torch.nn.Parameter(torch.zeros(1000))
    optimizer = DiLoCoOptimizer(
        communicator=comm, batch_size=1, num_inner_steps=5, params=[weight],
        inner_optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        averaging_timeout="30 s", timeout_waiting_for_peers="3 s",
    )
    while optimizer.local_epoch < 400 and (optimizer.local_epoch < 8 or len(optimizer.averaged_ranks) < 2):
        weight.grad = weight.detach() - (1.0 + comm.rank)
        optimizer.step()
        time.sleep(0.01)
        if optimizer.local_step % 5 == 0:
            print(optimizer.local_epoch, optimizer.averaged_ranks, round(weight[7].item(), 5), flush=True)
"""


def test_sites_continue_without_a_killed_one_and_with_a_late_one(tmp_path: Path) -> None:
    (tmp_path / "site.py").write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    clean |= {"OMP_NUM_THREADS": "1", "NETGYM_SECRET": "known to this test alone"}
    with ExitStack() as opened:

        def start(*command: str, **more: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=tmp_path,
                env=clean | more,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            opened.callback(process.stdout.close)  # type: ignore[union-attr]
            opened.callback(process.wait)
            opened.callback(process.kill)
            return process

        at = start(
            "-m", "exogym_core", "rendezvous", "--sites", "3", "--wait", "3 s", "--listen", "127.0.0.1:0"
        )
        assert at.stdout is not None
        found = re.search(r"NETGYM_RENDEZVOUS=(\S+)", at.stdout.readline())
        assert found is not None
        first, victim = (
            start("site.py", NETGYM_RENDEZVOUS=found[1], NETGYM_SITE=number) for number in ("0", "1")
        )
        assert first.stdout is not None
        assert victim.stdout is not None
        lines = [first.stdout.readline()]
        while " [0, 1] " not in lines[-1] and not re.match(r"\d+ \[0\] ", lines[-1]):
            lines.append(first.stdout.readline())
        late = start("site.py", NETGYM_RENDEZVOUS=found[1], NETGYM_SITE="2")
        victim.send_signal(signal.SIGKILL)
        rest, _ = first.communicate(timeout=120)
        output, _ = late.communicate(timeout=120)
        assert (first.returncode, late.returncode) == (0, 0), rest + output
        rounds = {line.partition(" ")[0]: line for line in [*lines, *rest.splitlines()]}
        assert " [0, 1] " in lines[-1]
        assert any(" [0] " in line for line in rounds.values())
        *_, last = output.splitlines()
        assert " [0, 2] " in last
        assert all(rounds[line.partition(" ")[0]] == line for line in output.splitlines())
        at.send_signal(signal.SIGINT)
        log, _ = at.communicate(timeout=60)
    assert at.returncode == 130
    assert "site 1 is lost: " in log
    assert "site 0 has finished" in log
