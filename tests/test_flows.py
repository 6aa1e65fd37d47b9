"""Lists of transfers: what is read, written and refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from worlds import chain, chain_form

from netsim.cli.timing import flows_command as command
from netsim.transfers import time_flows

TOPOLOGY = yaml.safe_dump(chain_form(["h2", "h10"]))


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


def test_cells_may_have_their_unit(folder: Path) -> None:
    code, out, _ = run(folder, "start_s,src,dst,bytes\n500 ms,h2,h10,1 MB\n0.5,h10,h2,1e6\n")
    assert code == 0
    assert [line.split(",")[-1] for line in out.splitlines()[1:]] == ["1.51", "1.51"]


def test_results_go_to_a_file_as_a_whole(folder: Path) -> None:
    code, out, _ = run(folder, "start_s,src,dst,bytes\n0,h2,h10,0\n", "--out", str(folder / "out.csv"))
    assert (code, out) == (0, "")
    assert (folder / "out.csv").read_text() == "start_s,src,dst,bytes,finish_s\n0,h2,h10,0,0.01\n"
    assert sorted(path.name for path in folder.iterdir()) == ["flows.csv", "net.yaml", "out.csv"]


def test_a_protocol_can_be_named(folder: Path) -> None:
    _, out, errors = run(folder, "start_s,src,dst,bytes\n0,h2,h10,1000000\n", "--protocol", "linux-tcp")
    assert errors.startswith("protocol: linux-tcp, 1 stream a transfer\n")
    assert float(out.split(",")[-1]) == pytest.approx(0.01 + 1e6 / (1e6 * 1448 / 1514), rel=0.01)


def test_transfers_that_a_crash_ends_are_lost_and_reported(folder: Path) -> None:
    (folder / "net.yaml").write_text(TOPOLOGY + "events: [{at: 0.5 s, host: h10, crash: true, for: 2 s}]\n")
    code, out, errors = run(folder, "start_s,src,dst,bytes\n0,h2,h10,1000000\n1,h2,h10,1000000\n")
    assert code == 0
    assert out == "start_s,src,dst,bytes,finish_s\n0,h2,h10,1000000,inf\n1,h2,h10,1000000,3.5\n"
    assert (
        errors
        == "protocol: ideal\n1 of 2 transfers is lost, since a host of theirs crashed: finish_s is inf\n"
    )


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


def test_from_python_hosts_are_names_or_indices() -> None:
    topology = chain("xy", latency="0 s")
    assert time_flows(topology, [(0.0, "x", 1, 1e6), (3.0, 0, "y", 0)]).tolist() == [1.0, 3.0]
