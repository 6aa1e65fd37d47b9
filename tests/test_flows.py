"""Lists of transfers: what is read, written and refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from netsim.face.flows import time_flows
from netsim.tools.flows import command
from netsim.topology import Topology

if TYPE_CHECKING:
    from pathlib import Path

TOPOLOGY = """
hosts: {h2: {}, h10: {}}
links: [{between: [h2, h10], bandwidth: 8 Mbit/s, latency: 10 ms}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.yaml").write_text(TOPOLOGY)
    return tmp_path


def run(folder: Path, text: str, *options: str) -> tuple[int, str, str]:
    (folder / "flows.csv").write_text(text)
    result = CliRunner().invoke(command, [str(folder / "net.yaml"), str(folder / "flows.csv"), *options])
    return result.exit_code, result.stdout, result.stderr.replace(f"{folder}/", "")


def test_rows_come_back_with_their_instants(folder: Path) -> None:
    text = 'note,start_s,src,dst,bytes\n"one, two",1.5,h2,h10,1000000\nx,0,h10,h2,0\n'
    code, out, _ = run(folder, text)
    assert code == 0
    assert out == (
        'note,start_s,src,dst,bytes,finish_s\n"one, two",1.5,h2,h10,1000000,2.51\nx,0,h10,h2,0,0.01\n'
    )


def test_results_go_to_a_file_as_a_whole(folder: Path) -> None:
    code, out, _ = run(folder, "start_s,src,dst,bytes\n0,h2,h10,0\n", "--out", str(folder / "out.csv"))
    assert (code, out) == (0, "")
    assert (folder / "out.csv").read_text() == "start_s,src,dst,bytes,finish_s\n0,h2,h10,0,0.01\n"
    assert sorted(path.name for path in folder.iterdir()) == ["flows.csv", "net.yaml", "out.csv"]


def test_a_protocol_can_be_named(folder: Path) -> None:
    _, out, _ = run(folder, "start_s,src,dst,bytes\n0,h2,h10,1000000\n", "--protocol", "linux-tcp")
    assert float(out.split(",")[-1]) == pytest.approx(0.01 + 1e6 / (1e6 * 1448 / 1514), rel=0.01)


def test_transfers_that_a_crash_ends_are_lost_and_told(folder: Path) -> None:
    (folder / "net.yaml").write_text(TOPOLOGY + "events: [{at: 0.5 s, host: h10, crash: true, for: 2 s}]\n")
    code, out, told = run(folder, "start_s,src,dst,bytes\n0,h2,h10,1000000\n1,h2,h10,1000000\n")
    assert code == 0
    assert out == "start_s,src,dst,bytes,finish_s\n0,h2,h10,1000000,inf\n1,h2,h10,1000000,3.5\n"
    assert told == "1 of 2 transfers is lost, since a host of theirs crashed: finish_s is inf\n"


def test_transfers_between_the_same_hosts_share_the_way(folder: Path) -> None:
    _, out, _ = run(folder, "start_s,src,dst,bytes\n0,h2,h10,1000000\n0,h2,h10,1000000\n")
    assert [line.split(",")[-1] for line in out.splitlines()[1:]] == ["2.01", "2.01"]


def test_a_bare_number_is_a_host_in_natural_order_where_no_host_is_called_so(folder: Path) -> None:
    _, out, _ = run(folder, "start_s,src,dst,bytes\n0,0,1,1000000\n")
    assert out.splitlines()[1] == "0,0,1,1000000,1.01"
    (folder / "net.yaml").write_text(TOPOLOGY.replace("h2", "7").replace("[7", "['7'").replace("{7", "{'7'"))
    code, _, error = run(folder, "start_s,src,dst,bytes\n0,0,1,1000000\n")
    assert code == 1
    assert error.startswith("Error: flows.csv:2: column src: unknown host '0'")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "",
            "flows.csv:1: no column start_s, src, dst, bytes: the first line must name start_s,src,dst,bytes",
        ),
        (
            "start_s,src,dst\n",
            "flows.csv:1: no column bytes: the first line must name start_s,src,dst,bytes",
        ),
        ("start_s,src,dst,bytes,src\n", "flows.csv:1: column src is named twice"),
        (
            "start_s,src,dst,bytes,finish_s\n",
            "flows.csv:1: column finish_s is what this command adds: remove it",
        ),
        ("start_s,src,dst,bytes\n\n0,h2,h10\n", "flows.csv:3: expected 4 cells, got 3"),
        (
            "start_s,src,dst,bytes\n-1,h2,h10,5\n",
            "flows.csv:2: column start_s: expected a number of seconds, zero or more, got '-1'",
        ),
        (
            "start_s,src,dst,bytes\n0,h2,h10,many\n",
            "flows.csv:2: column bytes: expected a number of bytes, zero or more, got 'many'",
        ),
        (
            "start_s,src,dst,bytes\n0,h2,h10,5.5\n",
            "flows.csv:2: column bytes: expected whole bytes, got '5.5'",
        ),
        (
            "start_s,src,dst,bytes\n0,h2,h10,nan\n",
            "flows.csv:2: column bytes: expected a number of bytes, zero or more, got 'nan'",
        ),
        (
            "start_s,src,dst,bytes\n0,h1,h10,5\n",
            "flows.csv:2: column src: unknown host 'h1': did you mean 'h10'? Accepted: h10, h2",
        ),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(folder: Path, text: str, line: str) -> None:
    code, out, error = run(folder, text)
    assert (code, out) == (1, "")
    assert error == f"Error: {line}\n"


def test_unreadable_files_are_told(folder: Path) -> None:
    result = CliRunner().invoke(command, [str(folder / "net.yaml"), str(folder / "none.csv")])
    assert result.exit_code == 1
    assert "none.csv: cannot be read: No such file or directory" in result.stderr


def test_from_python_hosts_are_names_or_indices() -> None:
    topology = Topology.from_mapping(
        {
            "hosts": {"x": {}, "y": {}},
            "links": [{"between": ["x", "y"], "bandwidth": "8 Mbit/s", "latency": "0 s"}],
        }
    )
    assert time_flows(topology, [(0.0, "x", 1, 1e6), (3.0, 0, "y", 0)]).tolist() == [1.0, 3.0]
