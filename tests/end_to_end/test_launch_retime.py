"""A launched run timed on other networks: the report of launching there, or a line that says why not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from netgym.cli.main import main

PROGRAM = """
import torch, torch.distributed as dist, netgym
dist.init_process_group("gloo")
rank = dist.get_rank()
layers = [torch.nn.Linear(200, 200), torch.nn.Linear(200, 10)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.05)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
pair = dist.new_group([0, 1])
for step in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 200)).sum().backward()
    optimizer.step()
    netgym.advance(0.01 * (1 + rank))
    if rank < 2:
        work = dist.all_reduce(torch.ones(50_000), group=pair, async_op=True)
    if rank == 2:
        dist.send(torch.ones(5), 0)
    if rank == 0:
        dist.recv(torch.ones(5), 2)
    if rank < 2:
        work.wait()
LAST
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """The command line, from this process, which has imported torch already."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        return code, *capfd.readouterr()

    return run


def launched(run: Run, folder: Path, *options: str, last: str = "") -> dict[str, Any]:
    """Report of the program on three ranks, launched into `folder`."""
    script = folder.parent / "program.py"
    script.write_text(PROGRAM.replace("LAST", last))
    asked = ["launch", "-n", "3", "--out", str(folder), "--json", *options, str(script)]
    code, out, err = run(*asked)
    assert code == 0, err
    return json.loads(out)  # type: ignore[no-any-return]


def results_on(page: str) -> str:
    """The page from its first table on, without the report that it is made of."""
    return page[page.index("<table") : page.index("<h2>Experiment")]


def test_a_retimed_launch_has_the_report_of_launching_there(run: Run, tmp_path: Path) -> None:
    """Times, bytes, lines of the script, ranks and algorithms are equal to the bit, by marks and by the roofline."""
    for number, (compute, options) in enumerate(
        [
            ("marks", ["--topology", "wan-4-regions"]),
            ("flops h100 0.4", ["--topology", "two-datacenters", "--protocol", "nccl-sockets"]),
        ]
    ):
        here, there, made = (tmp_path / f"{name}-{number}" for name in ("here", "there", "made"))
        first = launched(run, here, "--compute", compute)
        expected = launched(run, there, "--compute", compute, *options)
        code, out, err = run("retime", str(here), "--out", str(made), "--json", *options)
        assert code == 0, err
        report = json.loads(out)
        source = f"../{here.name}"
        assert report == expected | {"run_folder": str(made), "retimed_from": source}
        assert report["virtual_seconds"] != first["virtual_seconds"]
        page = (there / "report.html").read_text().replace(str(there), str(made))
        own = (made / "report.html").read_text()
        assert f"calls and computing of the launch in {source}" in own
        assert results_on(own) == results_on(page)


def test_placement_and_collectives_of_a_launched_run_can_be_set(run: Run, tmp_path: Path) -> None:
    here, places = tmp_path / "here", "lan.2,lan.0,lan.0"
    launched(run, here, "--compute", "marks")
    options = ["--placement", places, "--collectives", "{all_reduce: tree}"]
    expected = launched(run, tmp_path / "there", "--compute", "marks", *options)
    options = ["--set", f"placement={places}", "--set", "collectives={all_reduce: tree}"]
    code, out, err = run("retime", str(here), "--out", str(tmp_path / "made"), "--json", *options)
    assert code == 0, err
    assert json.loads(out) == expected | {"run_folder": str(tmp_path / "made"), "retimed_from": "../here"}
    code, _, err = run("retime", str(here), "--set", "compute.jitter=0.2")
    assert (code, err.count("\n")) == (2, 1)
    assert "--set compute.jitter: of a launched run placement and collectives can be set" in err


READS = {  # from line 22 of the program on, and the reason
    "now": ("if rank == 0: netgym.now()", "rank 0 reads netgym.now() at program.py:22: launch"),
    "time": (
        "import logging, time\nlogging.error('first')\nif rank == 1: time.time()",
        "rank 1 reads the clock at program.py:24 (where the script only prints times, record it with --clock host): l",
    ),
    "any": (
        "dist.send(torch.ones(1), 0) if rank == 1 else dist.recv(torch.ones(1)) if rank == 0 else None",
        "rank 0 receives from any rank at program.py:22: launch",
    ),
}


@pytest.mark.parametrize("read", READS)
def test_a_program_that_learns_the_time_is_launched_again(run: Run, read: str, tmp_path: Path) -> None:
    last, reason = READS[read]
    launched(run, tmp_path / "here", "--compute", "marks", last=last)
    code, out, err = run("retime", str(tmp_path / "here"), "--topology", "wan-4-regions")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert reason in err
    assert err.endswith("launch it on that network instead\n")


# From line 22 on; calls take up to about a second on wan-4-regions.
LIMITED = """
import datetime, logging
late = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=LIMIT))
for step in range(3):
    logging.error("step")
    dist.all_reduce(torch.ones(1), group=late)
    work = [dist.isend(torch.ones(5), 1, group=late)] if rank == 0 else []
    work += [dist.irecv(torch.ones(5), 0, group=late)] if rank == 1 else []
    for each in work:
        each.wait()
"""


def test_shown_times_and_time_outs_that_do_not_expire_are_retimed(run: Run, tmp_path: Path) -> None:
    """The report is that of launching there; the first call that would be late there is named."""
    there = ["--topology", "wan-4-regions"]
    for limit in ("50", "0.05"):
        here = tmp_path / limit
        launched(run, here, "--compute", "marks", last=LIMITED.strip().replace("LIMIT", limit))
        code, out, err = run("retime", str(here), "--out", str(tmp_path / f"made-{limit}"), "--json", *there)
        if limit == "50":
            last = LIMITED.strip().replace("LIMIT", limit)
            expected = launched(run, tmp_path / "there", "--compute", "marks", *there, last=last)
            of_made = {"run_folder": str(tmp_path / "made-50"), "retimed_from": "../50"}
            assert json.loads(out) == expected | of_made
    assert (code, out, err.count("\n")) == (2, "", 1)
    late = r"retime: there rank \d's call at program.py:26 takes [1-9][.\d]* m?s, and its time-out is 50 ms: launch"
    assert re.search(late, err)


def test_runs_without_an_end_or_a_whole_recording_are_refused(run: Run, tmp_path: Path) -> None:
    here = tmp_path / "here"
    launched(run, here, "--compute", "marks", "--until", "20 ms")
    code, _, err = run("retime", str(here))
    assert (code, "did not finish (until)" in err) == (2, True)
    launched(run, tmp_path / "whole", "--compute", "marks")
    file = tmp_path / "whole" / "requests.bin"
    content = file.read_bytes()
    for damaged in (content[:-20], content.replace(b'"format": 1', b'"format": 9'), b"nothing"):
        file.write_bytes(damaged)
        code, _, err = run("retime", str(tmp_path / "whole"))
        assert (code, err.count("\n")) == (2, 1)
        assert "requests.bin: is damaged" in err
    file.unlink()
    code, _, err = run("retime", str(tmp_path / "whole"))
    assert (code, "has no recording of its requests: launch it again with --out" in err) == (2, True)
