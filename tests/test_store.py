"""Exchanges through an object store: times, bytes and dollars by hand, and the same in plans, retimed and resumed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from experiments import fit_until, json_of, mlp, outcome, samples
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import PEERS

from exogym_core import Trainer
from exogym_core.strategy import SparseLoCoStrategy, StreamingDiLoCoStrategy
from netsim import Clock, Network, Topology, start_collective
from netsim.collectives.schedules.direct import store_exchange

STORE = {"name": "store", "host": "r2"}
RELAYED = {"name": "store", "host": "r2", "relays": ["edge"]}
MEGABYTE = 1_000_000


def ends(
    places: list[int], arrivals: list[float], part: int = MEGABYTE, protocol: Any = "ideal"
) -> tuple[list[float], Network]:
    """When each rank is through, of ranks that arrive at different instants, and the network."""
    topology = Topology.from_mapping({**PEERS, "protocol": protocol})
    num_places = 1 + max(places)
    hosts = [0, 1, 2, *[topology.host_index(name) for name in ("r2", "edge")[:num_places] for _ in range(3)]]
    hosts = [topology.host_index(f"h{i}") for i in range(3)] + hosts[3:]
    clock, done = Clock(), [0.0] * 3
    network = Network(clock, topology)

    def note(rank: int) -> None:
        done[rank] = clock.now

    made = store_exchange("all_gather", part, places, num_places)
    exchange = start_collective(network, made, hosts, group="g", on_done=note)
    for instant, rank in sorted(zip(arrivals, range(3), strict=True)):
        if instant > clock.now:
            clock.run(until=instant)
        exchange.arrive(rank)
    clock.run()
    return done, network


def test_ranks_upload_once_and_download_what_is_there_by_hand() -> None:
    # Uploads end after 1 s + 10 ms (h2: 22 ms), are there 30 ms later, and answered as long as they took.
    # Then a request and its answer, 30 ms, and 2 MB at 10 MB/s; the last copy is there at 1.052 s.
    done, network = ends([0, 0, 0], [0, 0, 0])
    assert done[0] == done[1] == pytest.approx(1.05 + 0.01 + 0.03 + 0.01 + 0.2)
    assert done[2] == pytest.approx(1.074 + 0.022 + 0.03 + 0.022 + 0.2)
    carried = network.topology.bytes_by_name(network.link_bytes)
    assert carried["h0->x"] == carried["h2->edge"] == MEGABYTE
    assert carried["x->h0"] == carried["edge->h2"] == 2 * MEGABYTE
    assert (carried["r2->x"], carried["r2->edge"]) == (4 * MEGABYTE, 2 * MEGABYTE)
    assert network.topology.egress_dollars(network.link_bytes) == pytest.approx(6e6 * 0.1e-9)


def test_a_late_rank_keeps_others_waiting_for_its_copy_alone() -> None:
    done, _ = ends([0, 0, 0], [0, 0, 5])
    # The request waits at the store.
    assert done[0] == done[1] == pytest.approx(5 + 1.022 + 0.03 + 0.01 + 0.1)
    assert done[2] == pytest.approx(5 + 1.074 + 0.022 + 0.03 + 0.022 + 0.2)  # it had nothing before


def test_connections_to_a_store_have_all_streams_of_nccl() -> None:
    """NCCL divides its streams among its channels between two ranks, and no other connection."""
    window = {"window": "128 KiB"}  # what limits a stream
    (one, _), (own, _) = (
        ends([0, 0, 0], [0, 0, 0], protocol={"preset": preset, "streams": 2, **window})
        for preset in ("linux-tcp", "nccl-sockets")
    )
    assert own == pytest.approx(one)
    assert ends([0, 0, 0], [0, 0, 0], protocol={"preset": "linux-tcp", **window})[0] > one


def test_relays_get_each_copy_once() -> None:
    done, network = ends([0, 0, 1], [0, 0, 0])
    carried = network.topology.bytes_by_name(network.link_bytes)
    assert (carried["r2->edge"], carried["edge->h2"]) == (2 * MEGABYTE, 2 * MEGABYTE)
    assert carried["edge->r2"] == MEGABYTE  # h2's upload, through the edge's link
    # Copies leave the store at 1.04 s, 20 ms and 2 MB at 100 MB/s; h2 has its answer at 1.074 s, after which it asks.
    assert done[2] == pytest.approx(1.074 + 0.002 + 0.001 + 0.002 + 0.2, abs=0.011)


@settings(max_examples=25, deadline=None)
@given(
    places=st.lists(st.sampled_from([0, 1]), min_size=3, max_size=3),
    arrivals=st.lists(st.floats(0, 3), min_size=3, max_size=3),
    part=st.integers(1, 300_000),
)
def test_nothing_is_downloaded_before_it_is_uploaded_or_asked_for(
    places: list[int], arrivals: list[float], part: int
) -> None:
    done, network = ends(places, arrivals, part)
    upload, download = part / 1e6, 2 * part / 1e7
    assert all(end >= max(arrivals) + upload + part / 1e7 for end, own in zip(done, arrivals, strict=True))
    assert all(end >= own + upload + download for end, own in zip(done, arrivals, strict=True))
    into = {rank: f"{'edge' if rank == 2 else 'x'}->h{rank}" for rank in range(3)}
    carried = network.topology.bytes_by_name(network.link_bytes)
    assert [carried[link] for link in into.values()] == [2 * part] * 3
    assert network.num_in_flight == 0


def trained(strategy: Any, stop_at: int | None = None, **options: Any) -> Any:
    given = {"num_nodes": 3, "max_steps": 6, "val_interval": 3, "batch_size": 4, "workers": "threads"}
    given |= {"device": "cpu", "topology": PEERS, "compute": {"fixed": "50 ms"}, "collectives": "ring"}
    trainer = Trainer(mlp(hidden=8), samples(), samples(12, 1))
    return fit_until(trainer, stop_at, strategy=strategy, **(given | options))


def same_values(one: Any, other: Any) -> bool:
    return all(torch.equal(value, other.mean_state[name]) for name, value in one.mean_state.items())


def test_training_sends_each_payload_once_and_equals_the_direct_exchange_bit_for_bit() -> None:
    stored, direct = (trained(SparseLoCoStrategy(H=2, exchange=each)) for each in (STORE, "direct"))
    assert same_values(stored, direct)
    assert stored.bytes_sent == 3 * stored.payload_bytes == direct.bytes_sent / 2
    assert stored.wan_bytes == 3 * stored.bytes_sent  # and each rank's downloads of two others'
    assert stored.collectives == {"all_gather": ["store"]}


@pytest.mark.parametrize("exchange", [STORE, RELAYED], ids=["store", "relayed"])
def test_rounds_under_way_are_retimed_and_resumed_to_the_bit(exchange: Any, tmp_path: Path) -> None:
    strategy = StreamingDiLoCoStrategy(H=4, num_fragments=2, tau=1, exchange=exchange)
    slower = copy.deepcopy(PEERS)
    slower["links"][0]["up"] = "4 kbit/s"
    whole = trained(strategy)
    retimed, there = whole.retime(topology=slower), trained(strategy, topology=slower)
    assert outcome(retimed) == outcome(there)
    assert there.virtual_seconds > whole.virtual_seconds
    stopped = trained(strategy, 4, checkpoint_interval=1, save_dir=tmp_path)
    resumed = trained(strategy, resume_from=stopped.checkpoint_folder)
    assert resumed.resumed_step == 3
    assert outcome(resumed) == outcome(whole)


def planned(network: Any, exchange: Any, folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> Any:
    """The plan of DiLoCo through a store."""
    path = folder / "peers.yaml"
    path.write_text(yaml.safe_dump(network))
    flags = f"plan --json --parameters 100k --strategy DiLoCo --topology {path}"
    flags += " --tokens 96k --sequence 32 --batch-size 10"
    asked = [f"strategies.DiLoCo.exchange={exchange}", "strategies.DiLoCo.H=5", "compute=50 ms", *more]
    (row,) = json_of([*flags.split(), *(word for each in asked for word in ("--set", each))], capsys)
    return row


def test_a_plan_adds_requests_and_egress_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = planned(PEERS, RELAYED, tmp_path, capsys, "protocol={preset: linux-tcp, streams: 64}")
    assert (row["rounds"], row["bytes_per_worker"], row["wan_bytes"]) == (20, 400_000, 11 * 400_000)
    # A round: 3 uploads; r2 sends h0 and h1 two parts each, and the edge two, which sends them to h2.
    requests = 3 * 5e-6 + 6 * 1e-6 + 2 * 2e-6
    assert row["cost"] == pytest.approx(20 * (requests + 6 * 400_000 * 0.1e-9))
    (spare,) = (
        line for line in row["remarks"] if line.startswith("streams: 64 bring large transfers no more than")
    )
    assert {*spare.split()} & {"r2", "edge"}, spare  # workers send to no other


def test_a_plan_names_the_latency_of_a_store_where_it_is_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A request of each kind a round: half of twice 20 s is saved."""
    late = copy.deepcopy(PEERS)
    late["hosts"]["r2"]["store"]["latency"] = "20 s"
    row = planned(late, STORE, tmp_path, capsys)
    assert row["limit"]["by"] == "latency of stores"
    assert row["limit"]["saves_seconds_per_round"] == pytest.approx(20, rel=1e-6)


def test_stores_are_read_written_and_get_no_ranks() -> None:
    topology = Topology.from_mapping(PEERS)
    assert Topology.from_mapping(topology.to_mapping()) == topology
    assert [topology.hosts[host].name for host in topology.place(4)] == ["h0", "h0", "h1", "h2"]
