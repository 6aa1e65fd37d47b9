"""Traces: what was recorded is what happened, whole, the same each time, at no virtual time; Chakra's too."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import chakra_schema
import pytest
import torch
from click.testing import CliRunner
from worlds import chain, regions_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.workers.journal import Journal
from netgym.cli.main import main
from netgym.launch.chakra import ExecutionTraces
from netsim import Recorder, Topology
from netsim.cli.flows import flows_command
from netsim.cli.timing import collective_command
from netsim.errors import DeadlockError, InputError
from netsim.network.trace import write_trace
from netsim.transfers import time_flows

PAIR = chain()
WEATHER = {
    "drift": [{"link": ["us", "eu"], "kind": "lognormal", "every": "50 ms", "sigma": 0.5}],
    "background": [{"from": "us.0", "to": "eu.1", "bytes": 10_000, "every": "100 ms"}],
}


def two_sites(**weather: Any) -> Topology:
    return Topology.from_mapping(regions_form({"us": 2, "eu": 2}, rtt="20 ms", protocol="ideal", **weather))


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
    document = json.loads(text, parse_constant=pytest.fail, object_pairs_hook=without_doubles)
    events = document.pop("traceEvents")
    assert document == {"displayTimeUnit": "ms"}
    assert isinstance(events, list)
    return events


def without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_equal_runs_write_equal_bytes(tmp_path: Path) -> None:
    for name, workers in (("one", "threads"), ("two", "processes")):
        run_ranks(body, 4, two_sites(**WEATHER), workers=workers, trace=tmp_path / f"{name}.json.gz")
    one = (tmp_path / "one.json.gz").read_bytes()
    assert one == (tmp_path / "two.json.gz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json.gz", "two.json.gz"]


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


NUMBER = (int, float)
PLACE = {"pid": int, "tid": int}
TIMED = {**PLACE, "name": str, "cat": str, "ts": NUMBER}
# What an event of each phase has: no more, no less (Trace Event Format).
FIELDS: dict[str, dict[str, Any]] = {
    "X": {**TIMED, "dur": NUMBER, "args": dict},
    "s": {**TIMED, "id": int},
    "f": {**TIMED, "id": int, "bp": str},
    "C": {"pid": int, "name": str, "ts": NUMBER, "args": dict},
}
METADATA = {"process_name": str, "process_sort_index": int, "thread_name": str, "thread_sort_index": int}


def nanoseconds(micros: float) -> int:
    """What a reader that counts in nanoseconds makes of it; nothing is lost."""
    whole = round(micros * 1000)
    assert whole >= 0
    assert whole / 1000 == pytest.approx(micros, rel=1e-12)
    return whole


def check_well_formed(events: list[dict[str, Any]]) -> None:
    """Read as a strict reader does: fields and types; every row named, once; slices of a row apart; arrows from
    slice to slice, forward; counters in order of time."""
    names: dict[tuple[Any, ...], Any] = {}
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    arrows: dict[tuple[str, int], dict[str, Any]] = {}
    counted: dict[tuple[int, str], int] = {}
    for event in events:
        phase = event["ph"]
        if phase == "M":
            kind = METADATA[event["name"]]
            (value,) = event["args"].values()
            assert type(value) is kind
            key = (event["name"], event["pid"], event.get("tid"))
            assert key not in names
            names[key] = value
            continue
        assert event.keys() == {"ph", *FIELDS[phase]}
        for name, kind in FIELDS[phase].items():
            assert isinstance(event[name], kind), (name, event)
        place = (event["pid"], event.get("tid"))
        assert ("process_name", event["pid"], None) in names
        assert phase == "C" or ("thread_name", *place) in names
        now = nanoseconds(event["ts"])
        if phase == "X":
            rows[event["pid"], event["tid"]].append((now, now + nanoseconds(event["dur"])))
        elif phase == "C":
            assert all(isinstance(value, NUMBER) and value >= 0 for value in event["args"].values())
            assert counted.get((event["pid"], event["name"]), -1) <= now
            counted[event["pid"], event["name"]] = now
        else:
            assert (phase, event["id"]) not in arrows
            assert phase == "s" or event["bp"] == "e"
            arrows[phase, event["id"]] = event
    for row in rows.values():
        row.sort()
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(row))
    assert {number for phase, number in arrows if phase == "s"} == {
        number for phase, number in arrows if phase == "f"
    }
    for (phase, number), event in arrows.items():
        assert arrows["s", number]["ts"] <= event["ts"] <= arrows["f", number]["ts"]
        assert arrows["s", number]["name"] == arrows["f", number]["name"]
        now = nanoseconds(event["ts"])
        assert any(begin <= now <= end for begin, end in rows[event["pid"], event["tid"]]), phase


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
    events = read(trace)
    check_well_formed(events)
    names = [event["name"] for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert names.count("compute") >= 3
    assert names.count("all_reduce") >= 3


# -- runs that are cut short -------------------------------------------------------------------------------------


def slices(path: Path, process: int, kind: str) -> list[tuple[str, float, float]]:
    """Names, begins and ends in seconds."""
    return [
        (event["name"], event["ts"] / 1e6, round((event["ts"] + event["dur"]) / 1e6, 9))
        for event in read(path)
        if event["ph"] == "X" and event["pid"] == process and event["cat"] == kind
    ]


def forlorn(comm: Communicator) -> None:
    """All compute; then rank 1 waits for a message that rank 0 never sends."""
    comm.advance(1.0)
    comm.all_reduce(torch.ones(1))
    if comm.rank == 0:
        comm.advance(2.0)
        comm.flush()
    elif comm.rank == 1:
        comm.recv(torch.empty(1), 0)


@pytest.mark.parametrize("workers", ["threads", {"kind": "processes", "processes": 2}])
def test_a_deadlock_leaves_a_trace_of_what_happened_until_then(tmp_path: Path, workers: Any) -> None:
    path = tmp_path / "t.json.gz"
    with pytest.warns(UserWarning, match=f"{path}: what happened until the"), pytest.raises(DeadlockError):
        run_ranks(forlorn, 2, PAIR, workers=workers, trace=path)
    assert slices(path, 1, "compute")[0] == ("compute", 0.0, 1.0)
    check_well_formed(read(path))


def test_a_trace_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    path.mkdir()
    with pytest.warns(UserWarning, match="trace: .* cannot be written"), pytest.raises(DeadlockError):
        run_ranks(forlorn, 2, PAIR, trace=path)
    with pytest.raises(InputError, match="cannot be written"):
        run_ranks(lambda comm: None, 1, PAIR, trace=tmp_path / "no" / "t.json")
    assert [each.name for each in tmp_path.iterdir()] == ["t.json.gz"]


def test_weather_is_in_the_trace(tmp_path: Path) -> None:
    events = [
        {"at": "1 s", "link": ["a", "b"], "down": True, "for": "2 s"},
        {"at": "5 s", "link": ["a", "b"], "bandwidth": "5 Mbit/s"},
    ]
    link = {"between": ["a", "b"], "up": "10 Mbit/s", "down": "1 Gbit/s", "latency": "5 ms"}
    mapping = {"hosts": ["a", "b"], "links": [link], "protocol": "ideal", "events": events}
    recorder, path = Recorder(), tmp_path / "trace.json"
    time_flows(Topology.from_mapping(mapping), [(0.0, "a", "b", 10_000_000)], recorder=recorder)
    write_trace(recorder, path)
    rows = json.loads(path.read_text())["traceEvents"]
    down = [(row["ts"], row["dur"]) for row in rows if row["ph"] == "X" and row["name"] == "a->b down"]
    assert down == [(1e6, 2e6)]
    capacity = [
        row for row in rows if row["ph"] == "C" and row["name"] == "a->b capacity" and row["ts"] == 5e6
    ]
    assert len(capacity) == 1


# --- chakra execution traces --------------------------------------------------------------------------------


def attributes(node: Any) -> dict[str, Any]:
    return {each.name: getattr(each, each.WhichOneof("value")) for each in node.attr}


def three_ranks(comm: Communicator) -> None:
    comm.advance(0.25)
    handle = comm.all_reduce(torch.zeros(300), async_op=True)
    comm.advance(0.5)
    handle.wait()
    comm.advance(1.0)
    if comm.rank < 2:
        (comm.isend if comm.rank == 0 else comm.irecv)(
            torch.zeros(7, dtype=torch.float64), 1 - comm.rank
        ).wait()
    comm.group([0, 2]).barrier() if comm.rank != 1 else None


def test_a_trace_has_what_was_computed_and_sent_and_what_waited_for_what(tmp_path: Path) -> None:
    traces = ExecutionTraces(3)
    run_ranks(three_ranks, 3, "two-datacenters", journal=Journal(on_request=traces.take))
    traces.write(tmp_path)
    read = [chakra_schema.read((tmp_path / f"chakra.{rank}.et").read_bytes()) for rank in range(3)]
    assert {metadata.version for metadata, _ in read} == {"0.0.4"}
    nodes = [(node.id, node.name, node.type, node.duration_micros) for node in read[0][1]]
    assert nodes == [
        (1, "compute", 4, 250_000),
        (2, "all_reduce", 7, 0),
        (3, "compute", 4, 500_000),
        (4, "compute", 4, 1_000_000),
        (5, "send", 5, 0),
        (6, "barrier", 7, 0),
    ]
    depends = [(list(node.ctrl_deps), list(node.data_deps)) for node in read[0][1]]
    assert depends == [([], []), ([1], []), ([1], []), ([3], [2]), ([4], []), ([4], [5])], (
        "overlap stays overlap"
    )
    _, reduced, _, _, sent, barrier = read[0][1]
    assert attributes(reduced) == {"comm_size": 1200, "comm_type": 0, "pg_name": "0", "is_cpu_op": False}
    assert attributes(sent)["comm_size"] == 56
    assert attributes(sent)["comm_dst"] == 1
    assert [node.name for node in read[1][1]][-1] == "recv"
    assert attributes(barrier)["comm_type"] == 9
