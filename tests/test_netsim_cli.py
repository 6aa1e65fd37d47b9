"""`netsim` from the command line and from Python: what it prints, how it fails, that both say the same."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from rich.console import Console
from worlds import chain_form

import exogym_core
import netsim
from netgym.cli.main import main as netgym
from netsim import shipped_topologies
from netsim.cli import main as cli
from netsim.cli.flows import flows_command as command
from netsim.cli.terminal import DelayedProgress

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", sorted(shipped_topologies()))
def test_show(name: str, capsys: Capture) -> None:
    assert cli.main(["show", name]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(name)
    assert "source:" in printed


def test_a_reader_that_leaves_is_no_error() -> None:
    code = "import sys; from netsim.cli import main as cli; sys.exit(cli.main(['show', 'wan-10-regions']))"
    command = f'{sys.executable} -c "{code}" | head -1'
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.stdout == "wan-10-regions\n"
    assert result.stderr == ""


MISTYPED = """
hosts:
  home: {device: rtx-409O}
  office: {device: RTX_4090}
regions:
  us: {hosts: 2, nic: 1 Gbit/s, latency: 1 ms, device: h10}
links:
  - {between: [home, office], bandwidth: 1 Gbit/s, latency: 1 ms}
  - {between: [home, us], bandwidth: 1 Gbit/s, latency: 1 ms}
"""


def test_unknown_devices_are_reported(tmp_path: Path, capsys: Capture) -> None:
    """A network runs without devices, so `netsim` warns; who computes on hosts needs them, so `netgym` refuses."""
    file = tmp_path / "network.yaml"
    file.write_text(MISTYPED)
    assert cli.main(["validate", str(file)]) == 0
    captured = capsys.readouterr()
    assert "valid" in captured.out
    assert captured.err.splitlines()[0].startswith(
        f"warning: {file}: host home: unknown device 'rtx-409O': did you mean 'rtx-4090'? Accepted: "
    )
    assert captured.err.splitlines()[1].startswith(
        f"warning: {file}: host us.0: unknown device 'h10': did you mean 'h100'?"
    )
    assert len(captured.err.splitlines()) == 2
    assert netgym(["validate", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(
        f"error: {file}:3: hosts.home.device: unknown device 'rtx-409O': did you mean 'rtx-4090'?"
    )
    assert f"{file}:6: regions.us.device: unknown device 'h10'" in lines[1]


# --- import netsim ------------------------------------------------------------------------------------------

PAIR = chain_form("ab", "10 Gbit/s", "20 ms")


def test_flows_by_name_by_key_and_from_a_file(tmp_path: Path) -> None:
    rows = [(0.0, "a", "b", 10_000_000), (0.5, "a", "b", 5_000_000)]
    keyed = [dict(zip(("start_s", "src", "dst", "bytes"), row, strict=True)) for row in rows]
    path = tmp_path / "flows.csv"
    path.write_text("start_s,src,dst,bytes\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    finish = netsim.flows(PAIR, rows).finish_seconds
    assert finish == pytest.approx([0.02 + 0.008, 0.5 + 0.02 + 0.004])
    assert netsim.flows(PAIR, keyed).finish_seconds == finish
    assert netsim.flows(PAIR, str(path)).finish_seconds == finish
    assert netsim.flows(PAIR, [("0 s", "a", "b", "10 MB"), ("500 ms", 0, 1, "5 MB")]).finish_seconds == finish


@pytest.mark.parametrize("package", [netsim, exogym_core])
def test_dir_shows_what_is_public_and_nothing_else(package: Any) -> None:
    """What the package itself imports was listed as if it were part of its face."""
    shown = [name for name in dir(package) if not name.startswith("__")]
    assert shown == sorted(package.__all__)


def test_a_window_that_limits_is_reported_with_the_remedy_and_the_remedy_helps() -> None:
    """40 ms and 4 MiB in flight are 839 Mbit/s, however fast the line; streams or a larger window fill it."""
    took = netsim.collective(PAIR, "all_reduce", num_bytes="1 GB", protocol="linux-tcp", repeat=2)
    limit = took.window_limit
    assert limit.window_bits_per_second == pytest.approx(4 * 2**20 * 8 / 0.04)
    assert "streams: 12 or window: 46 MiB" in str(limit)
    for remedy in ({"streams": limit.streams}, {"window": limit.window_bytes}):
        better = netsim.collective(
            PAIR, "all_reduce", num_bytes="1 GB", protocol={"preset": "linux-tcp", **remedy}, repeat=2
        )
        assert better.window_limit is None
        assert better.seconds < took.seconds / 1.5
    shown = CliRunner().invoke(cli.cli, ["collective", "opendiloco-4-sites", "all_reduce", "--bytes", "1GB"])
    assert shown.exit_code == 0
    assert netsim.collective(PAIR, "all_reduce", num_bytes="1 MB", protocol="linux-tcp").window_limit is None
    assert netsim.collective(PAIR, "all_reduce", num_bytes="1 GB", protocol="ideal").window_limit is None
    assert netsim.flows(PAIR, [(0, "a", "b", 10**9)], "linux-tcp").window_limit is not None


# --- lists of transfers -------------------------------------------------------------------------------------

TOPOLOGY = yaml.safe_dump(chain_form(["h2", "h10"]))


@pytest.fixture
def flows_folder(tmp_path: Path) -> Path:
    (tmp_path / "net.yaml").write_text(TOPOLOGY)
    return tmp_path


def run_flows(flows_folder: Path, text: str, *options: str) -> tuple[int, str, str]:
    (flows_folder / "flows.csv").write_text(text)
    result = CliRunner().invoke(
        command, [str(flows_folder / "net.yaml"), str(flows_folder / "flows.csv"), *options]
    )
    return result.exit_code, result.stdout, result.stderr.replace(f"{flows_folder}/", "")


def test_rows_come_back_with_their_instants(flows_folder: Path) -> None:
    text = 'note,start_s,src,dst,bytes\n"one, two",1.5,h2,h10,1000000\nx,0,h10,h2,0\n'
    code, out, _ = run_flows(flows_folder, text)
    assert code == 0
    assert out == (
        'note,start_s,src,dst,bytes,finish_s\n"one, two",1.5,h2,h10,1000000,2.51\nx,0,h10,h2,0,0.01\n'
    )


def test_results_go_to_a_file_as_a_whole(flows_folder: Path) -> None:
    code, out, _ = run_flows(
        flows_folder, "start_s,src,dst,bytes\n0,h2,h10,0\n", "--out", str(flows_folder / "out.csv")
    )
    assert (code, out) == (0, "")
    assert (flows_folder / "out.csv").read_text() == "start_s,src,dst,bytes,finish_s\n0,h2,h10,0,0.01\n"
    assert sorted(path.name for path in flows_folder.iterdir()) == ["flows.csv", "net.yaml", "out.csv"]


class Written(io.StringIO):
    """Text, and whether anything was written."""

    def __init__(self) -> None:
        super().__init__()
        self.is_begun = threading.Event()

    def write(self, text: str) -> int:
        done = super().write(text)
        self.is_begun.set()
        return done


def test_work_that_is_soon_done_loads_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with DelayedProgress("counting", 3, seconds=60.0) as progress:
        progress.advance()


def test_progress_counts_what_was_done_before_it_is_shown() -> None:
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    with DelayedProgress("counting", 3, seconds=60.0, console=terminal) as progress:
        progress.advance()
        progress._show()
        progress.advance()
        progress.now("still counting")
        progress._reported -= 1000
        progress.part(1, 3, "parts")
        assert re.fullmatch(r"still counting: 1 of 3 parts, 33 min .* left", progress._description())
        progress.part(2, 3, "parts")
        assert re.fullmatch(r"still counting: 2 of 3 parts, (8 min|500) .* left", progress._description())
    assert {"1/3", "2/3"} <= set(re.findall(r"\d/\d", terminal.file.getvalue()))
    assert "still counting" in terminal.file.getvalue()


def test_progress_is_a_line_where_there_is_no_terminal() -> None:
    out = Written()
    with DelayedProgress("counting", 3, 0.0, Console(file=out), every_seconds=60.0) as progress:
        assert out.is_begun.wait(30)
        progress.advance()
    assert out.getvalue() == "counting, 0 of 3 done, 0 s\n"


def test_transfers_that_a_crash_ends_are_lost_and_reported(flows_folder: Path) -> None:
    (flows_folder / "net.yaml").write_text(
        TOPOLOGY + "events: [{at: 0.5 s, host: h10, crash: true, for: 2 s}]\n"
    )
    code, out, errors = run_flows(flows_folder, "start_s,src,dst,bytes\n0,h2,h10,1000000\n1,h2,h10,1000000\n")
    assert code == 0
    assert out == "start_s,src,dst,bytes,finish_s\n0,h2,h10,1000000,inf\n1,h2,h10,1000000,3.51\n"
    assert (
        errors
        == "protocol: ideal\n1 of 2 transfers is lost, since a host of theirs crashed: finish_s is inf\n"
    )
