"""Programs of others whose ranks meet outside of our calls, by files, while their calls have time-outs."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from netgym.launch.program import run_program
from netgym.launch.report import LaunchReport, show_summary
from netgym.launch.run import Launch, Script
from netsim import Topology

PROGRAM = """
import datetime, os, sys, time
import torch, torch.distributed as dist
from netgym import advance

dist.init_process_group("netsim", timeout=datetime.timedelta(seconds=100))
folder, rank, size = sys.argv[1], dist.get_rank(), dist.get_world_size()


def meet(name):
    if not folder:
        return
    open(f"{folder}/{name}.{rank}", "w").close()
    while not all(os.path.exists(f"{folder}/{name}.{other}") for other in range(size)):
        os.sched_yield()


CALLS
"""

# Rank 2 makes no call, and the clock needs its next request to get to the end of the others'.
MESSAGES = """
for turn in range(3):
    if rank == 0:
        dist.send(torch.ones(1000), 1)
    if rank == 1:
        advance(0.5)
        dist.recv(torch.zeros(1000), 0)
    meet(turn)
"""

# Rank 0 is through before the others have come, in virtual time and in ours.
COLLECTIVES = """
if rank == 0:
    dist.broadcast(torch.ones(1000), 0)
meet("after the root's")
if rank > 0:
    advance(0.1 * rank)
    dist.broadcast(torch.zeros(1000), 0)
meet("after all")
into = [torch.zeros(10) for _ in range(size)] if rank == 1 else None
dist.gather(torch.ones(10), into, dst=1)
meet("at the end")
dist.barrier()
"""


def launched(calls: str, tmp_path: Path, folder: str) -> LaunchReport:
    """Report of a program of three ranks, run to its end."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("CALLS", calls))
    program = Script(str(script), (folder,))
    launch = Launch(program, 3, Topology.load("wan-4-regions"), compute="marks", protocol="ideal")
    report, error = run_program(launch, lambda line: None)
    assert error is None, error
    return report


def seconds(calls: str, tmp_path: Path, folder: str) -> float:
    """Virtual seconds that a program takes."""
    return launched(calls, tmp_path, folder).virtual_seconds


def test_ranks_that_meet_by_files_between_messages_do_not_stand_still(tmp_path: Path) -> None:
    """They did: two waited for the clock, it for the third, and that for them, busy with looking."""
    met = seconds(MESSAGES, tmp_path, str(tmp_path))
    assert met == seconds(MESSAGES, tmp_path, "")


def test_ranks_that_meet_by_files_between_collectives_do_not_stand_still(tmp_path: Path) -> None:
    met = seconds(COLLECTIVES, tmp_path, str(tmp_path))
    assert met == seconds(COLLECTIVES, tmp_path, "")


# Rank 1 sleeps until rank 0 has learnt from the clock, which needs rank 1, that its message has not joined yet.
ASKS = """
if rank == 0:
    advance(1.0)
    work = dist.irecv(torch.zeros(10), 1)
    assert not work.is_completed()
    open(f"{folder}/go", "w").close()
    work.wait()
if rank == 1:
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.05)
    dist.send(torch.ones(10), 0)
dist.barrier()
"""


@pytest.mark.filterwarnings("ignore:rank 1 makes no call and sleeps")
def test_a_report_says_where_host_time_decided(tmp_path: Path) -> None:
    report = launched(ASKS, tmp_path, str(tmp_path))
    (decision,) = report.host_decisions
    assert (decision.without_ranks, decision.times) == ([1], 1)
    assert "recv" in decision.calls[0]
    shown = Console(record=True, width=200, file=io.StringIO())
    show_summary(report, shown)
    assert "host time   decided once at" in shown.export_text()
    narrow = Console(record=True, width=80, file=io.StringIO())
    show_summary(report, narrow)
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow.export_text()


def test_ranks_that_share_a_host_are_named(tmp_path: Path) -> None:
    report = launched("dist.barrier()", tmp_path, "")
    for hosts, is_named in ((["asia.0", "eu.0", "asia.1"], False), (["asia.0", "eu.0", "asia.0"], True)):
        shown = Console(record=True, width=200, file=io.StringIO())
        show_summary(report.model_copy(update={"placement": hosts}), shown)
        assert ("up to 2 ranks share a host and its link" in shown.export_text()) == is_named
