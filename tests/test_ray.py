"""Ray: points of a sweep on several nodes, one of which is killed, come to what they come to here."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from experiments import PLACED_ON_LAN, experiment

from exogym_core.communicator.base import Communicator
from exogym_core.results.run_folder import RunFolder
from exogym_core.workers.processes.children import can_fork
from exogym_core.workers.ray import RayCluster
from exogym_core.workers.run import run_ranks
from netgym.cli.main import main
from netsim.errors import InputError, RankError

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore")

NODE = {
    "num_cpus": 1,
    "object_store_memory": 80_000_000,
    "plasma_directory": tempfile.gettempdir(),
}
EXPERIMENT = experiment(
    topology="lan",
    compute="50 ms",
    strategies='[{name: AllReduce, lr: 0.01}, {name: "mine:Own", H: 2}]',
    sweep=f"{{strategies.*.lr: [0.01, 0.02], points: {PLACED_ON_LAN}}}",
)
OWN = """\
import os, time
from exogym_core.strategy import DiLoCoStrategy

class Own(DiLoCoStrategy):
    def __init__(self, **options):
        if "RAY_RAYLET_PID" in os.environ:
            time.sleep(1.0)  # long enough for its node to be killed meanwhile
        super().__init__(**options)
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A cluster that needs nothing of this machine: no fixed port, no /dev/shm, and no other cluster's folder."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray-")  # short: a socket's path has 107 characters at most
    environment = pytest.MonkeyPatch()
    # Or workers end while other programs fill memory.
    environment.setenv("RAY_memory_monitor_refresh_ms", "0")
    environment.delenv("RAY_ADDRESS", raising=False)
    # Ray writes the address of a cluster there, and makes the folder for its own clusters alone.
    os.makedirs("/tmp/ray", exist_ok=True)
    made = Cluster(
        initialize_head=True,
        head_node_args={
            **NODE,
            "temp_dir": folder,
            "include_dashboard": False,
            "dashboard_agent_listen_port": 0,
        },
    )
    yield made
    ray.shutdown()
    made.shutdown()
    environment.undo()
    shutil.rmtree(folder)


@pytest.fixture
def cluster(nodes: Any) -> Any:
    """Two nodes, a core each."""
    if not nodes.worker_nodes:
        nodes.add_node(**NODE)
    return nodes


def test_a_sweep_over_nodes_of_which_one_is_killed_is_the_sweep_that_ran_here(
    tmp_path: Path, cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same digest, same entries in the same order, one's own code included; what fails is marked there as here."""
    path = tmp_path / "small.yaml"
    path.write_text(EXPERIMENT)
    (tmp_path / "mine.py").write_text(OWN)
    here, there = tmp_path / "here", tmp_path / "there"
    assert main(["sweep", str(path), "--out", str(here)]) == 1
    victim = next(iter(cluster.worker_nodes))

    is_over = threading.Event()

    def kill() -> None:
        while not (there / "points" / "0003").is_dir() and not is_over.wait(0.1):
            pass
        is_over.wait(1.0)
        cluster.remove_node(victim, allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    assert main(["sweep", str(path), "--out", str(there), "--on", cluster.address]) == 1
    is_over.set()
    killer.join(30.0)
    assert not killer.is_alive()
    errors = capsys.readouterr().err
    assert "6 points" in errors
    assert "ETA" in errors

    def entries(folder: Path) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text())
        return found

    assert entries(there) == entries(here)
    assert [bool(entry.get("failed")) for entry in entries(there)] == [False, True, False] * 2
    both = ["AllReduce", "mine-Own"]
    assert [entry.get("retimed") for entry in entries(there)] == [None, None, both] * 2
    for name in ("results.csv", "points/0002/log.txt"):
        texts = [(folder / name).read_text(encoding="utf-8") for folder in (here, there)]
        assert texts[1].replace("there", "here") == texts[0]
    for name in ("0000", "0002"):
        runs = [RunFolder(folder / "points" / name) for folder in (here, there)]
        assert runs[0].digest() == runs[1].digest()
        assert runs[0].read_retimed() == runs[1].read_retimed()
        parts = {path.relative_to(runs[0].path) for path in runs[0].path.rglob("*.gz")}
        assert all(runs[1].path.joinpath(part).is_file() for part in parts)


def test_what_a_task_has_measured_is_in_the_experiment_that_stays(
    tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node measures; the folder here keeps the seconds, so that it runs again to the same times, and how
    ranks are carried stays as it was asked for."""
    needs, submit = list[Any](), RayCluster.submit
    monkeypatch.setattr(
        RayCluster, "submit", lambda *given, **how: needs.append(how["needs"]) or submit(*given, **how)
    )
    text = EXPERIMENT.replace("compute: 50 ms", "compute: measured").replace("kind: threads", "kind: auto")
    text = (
        text.replace(', {name: "mine:Own", H: 2}', "").partition("sweep:")[0] + "sweep: {batch_size: [8]}\n"
    )
    path = tmp_path / "small.yaml"
    path.write_text(text)
    assert main(["sweep", str(path), "--out", str(tmp_path / "out"), "--on", cluster.address]) == 0
    point = tmp_path / "out/points/0000"
    stored = yaml.safe_load((point / "experiment.yaml").read_text())
    assert set(stored["compute"]) == {"fixed"}
    assert stored["workers"]["kind"] == "auto"
    assert needs[0]["num_cpus"] == 1
    assert needs[0]["memory"] > 0
    again = tmp_path / "again"
    assert main(["compare", str(point / "experiment.yaml"), "--out", str(again)]) == 0
    assert RunFolder(again).digest() == RunFolder(point).digest()


def test_what_no_node_can_hold_is_refused_and_not_waited_for(cluster: Any) -> None:
    with RayCluster(cluster.address) as joined:
        assert joined.num_cpus >= 2
        with pytest.raises(InputError, match="ray: point 0 needs 64 CPU, and no node has more than 1 CPU"):
            joined.require({"num_cpus": 64}, "point 0")


def test_an_invalid_address_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(EXPERIMENT.replace(', {name: "mine:Own", H: 2}', ""))
    assert main(["sweep", str(path), "--out", str(tmp_path / "o"), "--on", "rya"]) == 2
    assert "--on rya: write --on ray, --on slurm, or the address" in capsys.readouterr().err


def _body(comm: Communicator) -> tuple[list[list[float]], float]:
    """Every operation, small and large, halves and integers, one in flight while another goes on."""
    found: list[torch.Tensor] = []
    for size, dtype in ((3, torch.float32), (300_000, torch.float32), (200_000, torch.bfloat16)):
        mine = torch.randn(size).to(dtype)
        found += [comm.all_reduce(mine.clone(), op=op) for op in ("sum", "avg", "max")]
        found += comm.all_gather(mine)
        handle = comm.all_reduce(mine.clone(), async_op=True)
        found.append(comm.broadcast(mine.clone(), src=1))
        handle.wait()
        parts = list(torch.randn(comm.world_size, size).to(dtype))
        found.append(comm.reduce_scatter(parts))
        found += comm.all_to_all(parts)
        comm.send(mine, (comm.rank + 1) % comm.world_size) if comm.rank % 2 else None
        if comm.rank % 2 == 0:
            found.append(comm.recv(torch.empty(size, dtype=dtype), (comm.rank - 1) % comm.world_size))
        comm.deposit({"rank": comm.rank}, [mine])
    return [[float(each.double().sum()), float(each.double().std())] for each in found], comm.now()


@pytest.mark.thorough
def test_ranks_on_nodes_get_the_bits_and_times_of_threads(
    cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one machine's nodes, whose processors are equal; deposits come too, in each rank's order."""
    monkeypatch.chdir(tmp_path)
    seen: dict[str, list[tuple[int, float]]] = {"threads": [], "ray": []}
    workers = {"kind": "ray", "address": cluster.address}
    runs = {}
    for kind in seen:
        runs[kind] = run_ranks(
            _body,
            4,
            "wan-4-regions",
            workers=workers if kind == "ray" else "threads",
            on_deposit=lambda rank, note, tensors, kind=kind: seen[kind].append(
                (rank, float(tensors[0].double().sum()))
            ),
        )
    assert runs["ray"].results == runs["threads"].results
    assert runs["ray"].virtual_seconds == runs["threads"].virtual_seconds
    assert runs["ray"].link_bytes == runs["threads"].link_bytes
    in_order = {kind: sorted(pairs, key=lambda pair: pair[0]) for kind, pairs in seen.items()}
    assert in_order["ray"] == in_order["threads"]

    # And whole runs: one digest, wherever their ranks are.
    path = tmp_path / "small.yaml"
    path.write_text(
        EXPERIMENT.partition("strategies:")[0]
        + "strategies: [{name: DiLoCo, H: 2}]\ncheckpoint: {every: 2}\nbatch_size: 8\n"
    )
    digests = set()
    ray_workers = f"workers={{count: 4, kind: ray, processes: 2, address: '{cluster.address}'}}"
    for options in ([], ["--set", ray_workers]):
        assert main(["compare", str(path), "--set", "workers.count=4", *options, "--json"]) == 0
        digests.add(json.loads(capsys.readouterr().out)["digest"])
    assert len(digests) == 1

    def fails(comm: Communicator) -> None:
        if comm.rank == 3:
            raise ValueError("no such luck")
        comm.barrier()

    with pytest.raises(RankError, match="no such luck"):
        run_ranks(fails, 4, workers={**workers, "processes": 2})

    def dies(comm: Communicator) -> None:
        if comm.rank == 1:
            os.kill(os.getpid(), 9)
        comm.barrier()

    with pytest.raises(RankError, match=r"ranks? .*1.* ended: lost with its node or killed"):
        run_ranks(dies, 2, workers={**workers, "processes": 2})
    with pytest.raises(InputError, match="need 40 CPU, and the cluster has 2: use fewer"):
        run_ranks(fails, 40, workers={**workers, "processes": 40})


@pytest.mark.thorough
def test_worker_processes_are_spawned_where_ray_has_been_used() -> None:
    """Forked ones crashed in handlers of Ray's C++ core."""

    def body(comm: Communicator) -> list[float]:
        values = torch.ones(2)
        comm.all_reduce(values)
        return values.tolist()

    assert not can_fork()
    assert run_ranks(body, 2, topology="lan", workers="processes").results == [[2.0, 2.0]] * 2
