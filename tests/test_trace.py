"""Traces: what was recorded is what happened; the file is whole, the same each time, and costs no virtual time."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from exogym_core.cli import main
from exogym_core.communicator import Communicator, run_ranks
from netsim.clock import Clock
from netsim.collectives.command import command as collective_command
from netsim.errors import InputError
from netsim.faults import Faults
from netsim.flows import command as flows_command
from netsim.flows import play_flows
from netsim.network import Network
from netsim.topology import Topology
from netsim.trace import Recorder
from netsim.weather import LinkEvent

PAIR = Topology.from_mapping(
    {
        "hosts": {"a": {}, "b": {}},
        "links": [{"between": ["a", "b"], "bandwidth": "8 Mbit/s", "latency": "10 ms"}],
    }
)
WEATHER = {
    "drift": [{"link": ["us", "eu"], "kind": "lognormal", "every": "50 ms", "sigma": 0.5}],
    "background": [{"from": "us.0", "to": "eu.1", "bytes": 10_000, "every": "100 ms"}],
}


def two_sites(**weather: Any) -> Topology:
    region = {"hosts": 2, "nic": "1 Gbit/s", "latency": "50 us"}
    wan = [{"between": ["us", "eu"], "bandwidth": "100 Mbit/s", "rtt": "20 ms"}]
    return Topology.from_mapping({"regions": {"us": region, "eu": region}, "wan": wan, **weather})


def body(comm: Communicator) -> None:
    for step in range(2):
        comm.advance(0.1 * (comm.rank + 1))
        handle = comm.all_reduce(torch.ones(100_000), async_op=True)
        comm.advance(0.05)
        handle.wait()
        comm.mark({"step": step})
    if comm.rank == 0:
        comm.send(torch.ones(1000), 3)
    if comm.rank == 3:
        comm.recv(torch.empty(1000), 0)


def read(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    assert isinstance(events, list)
    return events


def test_transfers_and_the_use_of_links_are_kept_as_they_happen() -> None:
    recorder = Recorder()
    play_flows(PAIR, [(0.0, "a", "b", 1_000_000), (0.5, "a", "b", 250_000)], recorder=recorder)
    first, second = recorder.transfers.values()
    assert (first.begin_seconds, first.arriving_seconds, first.end_seconds) == (0.0, 0.01, 1.26)
    assert (second.begin_seconds, second.arriving_seconds) == (0.5, 0.51)
    assert second.end_seconds == pytest.approx(1.01)
    assert (first.delivered_bytes, second.delivered_bytes) == (1_000_000, 250_000)
    (use,) = recorder.link_use.values()
    assert use == [(0.01, 1e6), (1.26, 0.0)]  # full all the while, whoever uses it


def test_what_a_dead_link_does_is_seen() -> None:
    clock = Clock()
    network = Network(clock, PAIR)
    recorder = Recorder()
    recorder.watch(network)
    faults = Faults(network)
    (link,) = PAIR.route(0, 1)
    faults.add(LinkEvent(0.51, (link,), is_up=False, for_seconds=1.0))
    clock.run(network.transfer(0, 1, 1_000_000))
    assert recorder.link_use[link] == [(0.01, 1e6), (0.51, 0.0), (1.51, 1e6), (2.01, 0.0)]


@pytest.mark.parametrize("protocol", ["ideal", "linux-tcp", "gloo"])
@pytest.mark.parametrize("weather", [{}, WEATHER], ids=["calm", "weather"])
def test_law_6_tracing_changes_no_virtual_time(
    tmp_path: Path, protocol: str, weather: dict[str, Any]
) -> None:
    topology = two_sites(**weather)
    plain = run_ranks(body, 4, topology, protocol=protocol)
    traced = run_ranks(body, 4, topology, protocol=protocol, trace=tmp_path / "t.json.gz")
    assert traced.rank_virtual_seconds == plain.rank_virtual_seconds
    assert traced.exposed_seconds == plain.exposed_seconds
    assert [row.virtual_seconds for row in traced.rows] == [row.virtual_seconds for row in plain.rows]


def test_equal_runs_write_equal_bytes(tmp_path: Path) -> None:
    for name, workers in (("one", "threads"), ("two", "threads"), ("three", "processes")):
        run_ranks(body, 4, two_sites(**WEATHER), workers=workers, trace=tmp_path / f"{name}.json.gz")
    one = (tmp_path / "one.json.gz").read_bytes()
    assert one == (tmp_path / "two.json.gz").read_bytes()
    assert one == (tmp_path / "three.json.gz").read_bytes()
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "one.json.gz",
        "three.json.gz",
        "two.json.gz",
    ]


def test_a_run_shows_ranks_rows_links_and_arrows(tmp_path: Path) -> None:
    run = run_ranks(body, 4, two_sites(**WEATHER), trace=tmp_path / "t.json.gz")
    events = read(tmp_path / "t.json.gz")
    titles = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert titles == {"rank 0 (eu.0)", "rank 1 (eu.1)", "rank 2 (us.0)", "rank 3 (us.1)", "links"}
    rows = {event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 1}
    assert rows >= {"compute", "communication", "wait", "sends", "receives"}
    slices = [event for event in events if event["ph"] == "X"]
    for rank in range(4):
        computing = sum(
            each["dur"] for each in slices if each["pid"] == rank + 1 and each["cat"] == "compute"
        )
        assert computing / 1e6 == pytest.approx(run.compute_seconds[rank], abs=1e-6)
        waiting = sum(each["dur"] for each in slices if each["pid"] == rank + 1 and each["cat"] == "wait")
        assert waiting / 1e6 == pytest.approx(run.exposed_seconds[rank], abs=1e-6)
    assert {event["name"] for event in events if event["ph"] == "C"} >= {"us->eu", "eu->us"}
    check_well_formed(events)


def check_well_formed(events: list[dict[str, Any]]) -> None:
    """Slices of one row do not overlap, and arrows lead from slice to slice."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        row.sort()
        assert all(one[1] <= other[0] + 0.002 for one, other in itertools.pairwise(row))
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        assert start["ts"] <= ends[number]["ts"]
        for end in (start, ends[number]):
            spans = rows[end["pid"], end["tid"]]
            assert any(begin <= end["ts"] <= stop + 0.001 for begin, stop in spans)


def test_hosts_with_several_ranks_have_their_messages_in_a_process_of_their_own(tmp_path: Path) -> None:
    run_ranks(body, 4, PAIR, trace=tmp_path / "t.json")
    titles = {event["args"]["name"] for event in read(tmp_path / "t.json") if event["name"] == "process_name"}
    assert {"host a", "host b", "rank 3 (b)"} <= titles


def test_ranks_without_a_topology_are_traced_too(tmp_path: Path) -> None:
    run_ranks(lambda comm: comm.all_reduce(torch.ones(1)), 2, trace=tmp_path / "t.json")
    assert [event["name"] for event in read(tmp_path / "t.json") if event["ph"] == "X"] == ["all_reduce"] * 2


def test_where_a_trace_cannot_be_written_or_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        run_ranks(lambda comm: None, 1, PAIR, trace=tmp_path / "no" / "t.json")
    with pytest.raises(InputError, match="trace needs transport 'netsim'"):
        run_ranks(lambda comm: None, 1, transport="gloo", trace=tmp_path / "t.json")


def test_the_commands_write_traces(tmp_path: Path) -> None:
    flows = tmp_path / "flows.csv"
    flows.write_text("start_s,src,dst,bytes\n0,oregon.0,tokyo.0,1000000\n0.1,ohio.0,tokyo.1,1000000\n")
    traces = [tmp_path / "flows.json.gz", tmp_path / "collective.json.gz"]
    made = CliRunner().invoke(flows_command, ["wan-10-regions", str(flows), "--trace", str(traces[0])])
    assert made.exit_code == 0, made.output
    arguments = ["wan-10-regions", "all_reduce", "--bytes", "1MB", "--ranks", "oregon.0,tokyo.0,london.0"]
    made = CliRunner().invoke(collective_command, [*arguments, "--trace", str(traces[1]), "--repeat", "2"])
    assert made.exit_code == 0, made.output
    for trace in traces:
        check_well_formed(read(trace))
    assert [event["cat"] for event in read(traces[1]) if event.get("cat") == "communication"] == [
        "communication"
    ] * 6


def test_netgym_run_writes_a_trace_on_request_and_the_same_run_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(
        "{name: small, task: digits, model: {name: mlp, hidden: [8]}, workers: {count: 2, kind: threads},"
        " device: cpu, topology: two-datacenters, compute: 50 ms, steps: 3, batch_size: 4,"
        " evaluate: {every: 2, samples: 8}, strategies: [AllReduce]}"
    )
    assert main(["run", "small.yaml", "--out", "plain"]) == 0
    assert main(["run", "small.yaml", "--out", "traced", "--trace"]) == 0
    assert not Path("plain/trace.json.gz").exists()
    for name in ("summary.json", "metrics/AllReduce.csv", "models/AllReduce.safetensors"):
        assert Path("plain", name).read_bytes() == Path("traced", name).read_bytes()
    trace = Path("traced/trace.json.gz")
    assert trace.stat().st_mode & 0o777 == 0o600
    events = read(trace)
    check_well_formed(events)
    names = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert names.count("compute") >= 3
    assert names.count("all_reduce") >= 3
