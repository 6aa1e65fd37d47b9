"""Reports of a program's ranks, and ranks that meet by files."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from netgym.launch.compute import ComputeClock
from netgym.launch.program import run_program
from netgym.launch.report import LaunchReport, show_summary
from netgym.launch.run import Launch, Script
from netsim import Topology
from netsim.errors import InputError

# --- ranks that meet outside of our calls -------------------------------------------------------------------

PROGRAM = """
import datetime, os, sys, threading, time
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


def launched(
    calls: str, tmp_path: Path, folder: str, clock: Literal["virtual", "host"] = "host"
) -> LaunchReport:
    """Report of a program of three ranks, run to its end."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("CALLS", calls))
    program, network = Script(str(script), (folder,)), Topology.load("wan-4-regions")
    launch = Launch(program, 3, network, compute="marks", protocol="ideal", clock=clock)
    report, error = run_program(launch, lambda line: None)
    assert error is None, error
    return report


def test_ranks_that_meet_by_files_between_calls_do_not_stand_still(tmp_path: Path) -> None:
    """They did: two waited for the clock, it for the third, and that for them, busy with looking."""
    met, alone = (launched(COLLECTIVES, tmp_path, folder).virtual_seconds for folder in (str(tmp_path), ""))
    assert met == alone


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
    text = shown.export_text()
    assert "host time   decided once at" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    where = "a_package/of_calls/program.py"
    calls, splits = (
        [each.model_copy(update={"place": each.place.replace("program.py", where)}) for each in rows]
        for rows in (report.calls, report.splits)
    )
    narrow = Console(record=True, width=80, file=io.StringIO())
    show_summary(report.model_copy(update={"calls": calls, "splits": splits}), narrow)
    whole, cut = (
        [line.split() for line in shown.splitlines() if re.search(r"program.py:\d", line)]
        for shown in (text, narrow.export_text())
    )
    assert [words[1:] for words in cut] == [words[1:] for words in whole]  # figures are never cut
    assert all(words[0].endswith(place) for words, (place, *_) in zip(cut, whole, strict=True))


def test_a_sleep_on_the_clock_waits_for_the_file_that_another_rank_writes(tmp_path: Path) -> None:
    """Rank 1 looks for it every 50 ms of virtual time, until rank 0 has got there."""
    report = launched(ASKS, tmp_path, str(tmp_path), "virtual")
    assert not report.host_decisions
    assert 1.0 <= report.ranks[1].computing_seconds < 1.1


STEPS = """
first, second = (torch.optim.SGD([torch.zeros(1)], lr=1.0) for _ in range(2))
for optimizer in (first, second, first, second, first):
    advance(float(rank))
    optimizer.step()
dist.barrier()
"""


def test_steps_are_those_of_the_first_optimizer_that_steps(tmp_path: Path) -> None:
    """Other figures of ranks and places are in end_to_end/test_launch_programs.py."""
    report = launched(STEPS, tmp_path, "")
    assert [(rank.steps, rank.step_seconds) for rank in report.ranks] == [(3, 0), (3, 2), (3, 4)]
    assert report.steady_state is not None
    assert report.steady_state.seconds == 2
    shown = Console(record=True, width=200, file=io.StringIO())
    show_summary(report, shown)
    assert "(means over ranks and 2 steps" in (text := shown.export_text())
    assert "Ranks take from 0 s (rank 0) to 4 s (rank 2)." in text
    earlier = [rank.model_copy(update={"step_seconds": None}) for rank in report.ranks]
    show_summary(report.model_copy(update={"ranks": earlier}), shown)
    assert "Ranks take" not in shown.export_text()


def test_ranks_that_share_a_host_are_named(tmp_path: Path) -> None:
    report = launched("dist.barrier()", tmp_path, "")
    for hosts, is_named in ((["asia.0", "eu.0", "asia.1"], False), (["asia.0", "eu.0", "asia.0"], True)):
        shown = Console(record=True, width=200, file=io.StringIO())
        line = "cores: not modelled" if is_named else None
        show_summary(report.model_copy(update={"placement": hosts, "unlimited_cores": line}), shown)
        assert ("cores       not modelled" in shown.export_text(clear=False)) == is_named
        assert ("up to 2 ranks share a host and its link" in shown.export_text()) == is_named


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("{0}/columns.csv h100", "columns.csv:1: is no trace of kernels: it has no column ns"),
        ("{0}/times.csv h100", "times.csv:3: ns -4: give nanoseconds above 0"),
    ],
)
def test_wrong_costs_of_computing_are_a_line(spec: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "columns.csv").write_text("op,shapes,dtypes,calls\n")
    (tmp_path / "times.csv").write_text("op,shapes,dtypes,calls,ns\na,1,b,1,7\na,2,b,1,-4\n")
    with pytest.raises(InputError) as caught:
        ComputeClock.parse(spec.format(tmp_path))
    assert line in str(caught.value).partition("\n")[0]
