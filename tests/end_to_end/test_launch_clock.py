"""Time that launched programs read: figures of their own, equal to the page's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from netgym.launch import clock
from netgym.launch.clock import CLOCKS, DATES, HOST_TIME, POLL_SECONDS, VIRTUAL_TIME

Launch = Callable[..., tuple[int, str, str]]


def output(
    launch_here: Launch, options: Sequence[str], *script: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Report of a script, and what its ranks have printed: `{rank: object}` a line."""
    code, out, err = launch_here(*options, "--json", *script)
    assert code == 0, err
    *lines, report = out.splitlines()
    printed: dict[str, Any] = {}
    for line in [*lines, *err.splitlines()]:  # of ranks whose stdout is pytest's, or --json's stderr
        if line.startswith("{"):  # else a warning that this machine was too busy
            printed |= json.loads(line)
    return json.loads(report), printed


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script whose ranks `say(object)`; returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(
            "import datetime, json, sys, threading, time\nfrom time import perf_counter\n"
            "import torch, torch.distributed as dist, netgym\n"
            "before = [getattr(time, name)() for name in CLOCKS]\n"
            "dist.init_process_group('gloo')\n"
            "rank = dist.get_rank()\n"
            "def say(thing): sys.stdout.write(json.dumps({str(rank): thing}) + '\\n')\n".replace(
                "CLOCKS", repr(CLOCKS)
            )
            + text
        )
        return str(path)

    return write


OPTIONS = ("-n", "3", "--topology", "wan-4-regions", "--compute", "marks")

STEPS = """
x, seconds, before = torch.ones(10_000), [], time.process_time()
for step in range(3):
    netgym.advance(0.01 * (1 + rank))
    begin = perf_counter()
    dist.all_reduce(x)
    seconds.append(perf_counter() - begin)
    [time.time() for _ in range(1000)]
say([seconds, netgym.now(), time.process_time() - before])
"""


def test_a_script_measures_what_the_page_says_to_the_digit_and_changes_nothing(
    launch_here: Launch, written: Callable[[str], str]
) -> None:
    script = written(STEPS)
    report, said = output(launch_here, OPTIONS, script)
    for rank in report["ranks"]:
        seconds, end, computing = said[str(rank["rank"])]
        assert sum(seconds) == rank["waiting_seconds"] + rank["network_seconds"]
        assert end == rank["virtual_seconds"]
        assert computing == pytest.approx(rank["computing_seconds"], abs=1e-8)
    assert output(launch_here, OPTIONS, script) == (report, said), "the same bits again"
    by_host, _ = output(launch_here, [*OPTIONS, "--clock", "host"], script)
    assert by_host | {"clock": "virtual"} == report, "looking at the clock takes no time"


def test_every_clock_of_python_reads_the_same_time_and_goes_on_from_the_hosts(
    launch_here: Launch, written: Callable[[str], str]
) -> None:
    script = written(
        "def read():\n"
        "    clocks = [getattr(time, name)() for name in CLOCKS]\n"
        "    dates = datetime.datetime.now(), datetime.datetime.now(datetime.timezone.utc), datetime.datetime.today()\n"
        "    in_nanoseconds = [getattr(time, f'{name}_ns')() for name in CLOCKS]\n"
        "    return clocks, in_nanoseconds, *(each.timestamp() for each in dates)\n"
        "first = read()\n"
        "dist.barrier()\n"
        "time.sleep(2.5)\n"
        "date = str(datetime.date.fromtimestamp(first[2]))\n"
        "say([before, first, read(), str(datetime.date.today()), date])\n".replace("CLOCKS", repr(CLOCKS))
    )
    report, said = output(launch_here, OPTIONS, script)
    for rank in report["ranks"]:
        before, first, last, today, date = said[str(rank["rank"])]
        assert today >= date
        elapsed = rank["virtual_seconds"]
        for index, name in enumerate(CLOCKS):
            computes = name in ("process_time", "thread_time")
            whole = 2.5 if computes else elapsed
            assert last[0][index] - first[0][index] == pytest.approx(whole, abs=1e-6)
            assert (last[1][index] - first[1][index]) / 1e9 == pytest.approx(whole, abs=2e-9)
            assert 0 <= first[0][index] - before[index] < 60, "monotonic, and near"
        assert [after - at for at, after in zip(first[2:], last[2:], strict=True)] == pytest.approx(
            [elapsed] * 3, abs=2e-6
        )


def test_libraries_that_wait_and_threads_of_the_script_keep_host_time(
    launch_here: Launch, written: Callable[[str], str]
) -> None:
    script = written(
        "import logging, queue, subprocess, timeit\n"
        "netgym.advance(1000.0)\n"
        "def in_thread(): read.append(time.monotonic()); time.sleep(0.01); read.append(time.monotonic())\n"
        "read = []\n"
        "thread = threading.Thread(target=in_thread); thread.start(); thread.join(60)\n"
        "try: queue.Queue().get(timeout=0.01)\n"
        "except queue.Empty: pass\n"
        "subprocess.run([sys.executable, '-c', ''], timeout=60)\n"
        "dist.barrier()\n"
        "record = logging.makeLogRecord({})\n"
        "say([read[1] - read[0], read[1] - before[2], record.created - before[0], timeit.timeit('pass', number=1)])\n"
    )
    _, said = output(launch_here, OPTIONS, script)
    for in_thread, since, logged, timed in said.values():
        assert 0.01 <= in_thread < 60
        assert since < 500, "a thread of the script is no rank"
        assert 1000 <= logged < 1500
        assert timed == 0.0


SPINS = """
import os
dist.barrier()
spins = []
for clock, seconds in ((time.monotonic, 0.02), (time.perf_counter, 0.0053), (time.process_time, 0.01)):
    begin = clock()
    end = begin + seconds
    while (seen := clock()) < end: pass
    spins.append([seconds, seen - begin, clock() - begin])
dist.barrier()
if rank == 0:
    time.sleep(0.03)
    open(sys.argv[1], "w").close()
while not os.path.exists(sys.argv[1]): time.monotonic()
say([spins, netgym.now()])
"""


@pytest.mark.parametrize("compute", ["marks", "live 0.0001"])
def test_a_loop_that_only_reads_the_clock_ends_at_the_first_quantum(
    launch_here: Launch,
    written: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compute: str,
) -> None:
    """It lets other ranks act, and further readings take no time."""
    monkeypatch.setattr(clock, "MOST_READINGS", 2000)
    script, options = written(SPINS), ["-n", "2", *OPTIONS[2:-1], compute]
    _, said = output(launch_here, options, script, str(tmp_path / "file"))
    rounding = 1e-6 if compute == "marks" else POLL_SECONDS
    for spins, found_at in said.values():
        for seconds, seen, after in spins:
            assert 0 <= seen - seconds < POLL_SECONDS + rounding
            assert after == pytest.approx(seen, abs=0 if compute == "marks" else rounding)
        assert 0 <= found_at - said["0"][1] < POLL_SECONDS + rounding
    if compute == "marks":
        # Each process's clocks start where the host's stood, so the last digits of differences are its own.
        for rank, again in output(launch_here, options, script, str(tmp_path / "other"))[1].items():
            assert again[1] == said[rank][1]
            for spin, first in zip(again[0], said[rank][0], strict=True):
                assert spin == pytest.approx(first, rel=0, abs=1e-9)


def test_events_of_cuda_and_torchs_benchmark_read_it(
    launch_here: Launch, written: Callable[[str], str]
) -> None:
    script = written(
        "from torch.utils.benchmark import Timer\n"
        "begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "begin.record(); netgym.advance(0.125); end.record()\n"
        "timed = Timer('netgym.advance(0.25)', globals=globals()).timeit(2).mean\n"
        "dist.barrier()\n"
        "say([begin.elapsed_time(end), timed])\n"
    )
    _, said = output(launch_here, [*OPTIONS, "--cuda-as-cpu"], script)
    assert set(map(tuple, said.values())) == {(125.0, 0.25)}


def test_the_lists_of_the_docs_are_those_of_the_program() -> None:
    """Who keeps host time is declared once."""
    text = (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
    assert all(f"`{name}`" in text for name in DATES)
    for start, declared in (("packages keep host time:", HOST_TIME), ("read virtual time:", VIRTUAL_TIME)):
        listed = text[text.index(start) + len(start) :].partition("`.")[0] + "`"
        assert re.findall(r"`([\w.]+)`", listed) == [
            name for name in declared if name != "netgym.launch.cuda_on_cpu"
        ]
