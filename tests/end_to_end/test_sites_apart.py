"""Sites as processes: one is killed while it trains, one comes late, and the rest goes on."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from forks import Fork, run_script

from netgym.cli.main import main

SCRIPT = """
import time
import torch
from exogym_core import DiLoCoOptimizer
from netgym.sites.communicator import SiteCommunicator

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
    shared = {"NETGYM_SECRET": "known to this test alone"}
    with ExitStack() as opened:

        def start(body: Callable[..., Any], *arguments: Any, **more: str) -> Fork:
            process = Fork(body, *arguments, folder=tmp_path, environment=shared | more)
            opened.callback(process.kill)
            return process

        options = ["--sites", "3", "--wait", "3 s", "--listen", "127.0.0.1:0"]
        at = start(main, ["rendezvous", *options])
        at.wait_for(lambda: "\n" in at.out)
        found = re.search(r"NETGYM_RENDEZVOUS=(\S+)", at.out)
        assert found is not None
        first, victim = (
            start(run_script, "site.py", NETGYM_RENDEZVOUS=found[1], NETGYM_SITE=number) for number in "01"
        )
        first.wait_for(lambda: re.search(r"^\d+ \[.*(0|0, 1)\] ", first.out, re.MULTILINE) is not None)
        assert " [0, 1] " in first.out
        victim.send_signal(signal.SIGKILL)
        first.wait_for(lambda: " [0] " in first.out)
        late = start(run_script, "site.py", NETGYM_RENDEZVOUS=found[1], NETGYM_SITE="2")
        rest, output = first.end(), late.end()
        assert (rest.returncode, output.returncode) == (0, 0), rest.stderr + output.stderr
        rounds = {line.partition(" ")[0]: line for line in rest.stdout.splitlines()}
        assert any(" [0] " in line for line in rounds.values())
        *_, last = output.stdout.splitlines()
        assert " [0, 2] " in last
        assert all(rounds[line.partition(" ")[0]] == line for line in output.stdout.splitlines())
        at.send_signal(signal.SIGINT)
        log = at.end()
    assert log.returncode == 130
    assert "site 1 is lost: " in log.stdout + log.stderr
    assert "site 0 has finished" in log.stdout + log.stderr
