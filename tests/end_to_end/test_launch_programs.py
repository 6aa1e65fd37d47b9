"""Other people's programs, unmodified, on the simulated backend: gloo's losses, and a clock."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import chakra_schema
import jsonschema
import pytest
import torch
from forks import Fork, ranks, run_script

import exogym_core
from netgym.cli.inspect_commands import schema_of
from netgym.cli.main import main
from netgym.launch.joining import connect
from netsim.errors import InputError

PROGRAMS = Path(__file__).parent / "programs"
FEATURES = re.compile(r"^([a-zA-Z]\w+) (-?[\d.]+)$", re.MULTILINE)
LOSSES = re.compile(r"loss \d+ [\d.]+")
PATH = str(Path(exogym_core.__file__).parent.parent)


Launch = Callable[..., tuple[int, str, str]]


def launch(*arguments: str) -> tuple[int, str, str]:
    done = Fork(main, ["launch", *arguments], stdin="typed").end()
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("name", "num_ranks"), [("ddp.py", 3), ("fsdp.py", 2)])
def test_training_programs_have_gloos_losses_and_a_clock(name: str, num_ranks: int) -> None:
    """The same script on gloo prints the same losses; here it also takes a WAN's time."""
    script = str(PROGRAMS / name)
    real = ranks(num_ranks, run_script, script, "gloo", seconds=30.0)[0]
    # Its losses count, not its exit code: torch's gloo now and then aborts a process that has ended.
    assert len(LOSSES.findall(real.stdout)) == (4 if name == "ddp.py" else 3), real.stderr
    options = ["-n", str(num_ranks), "--topology", "wan-4-regions", "--compute", "marks", "--json"]
    code, out, err = launch(*options, script, "netsim")
    assert code == 0, err
    assert LOSSES.findall(err) == LOSSES.findall(real.stdout), "with --json a script prints to stderr"
    report = json.loads(out)
    assert report["virtual_seconds"] > 0.5
    assert {call["place"].partition(":")[0] for call in report["calls"]} == {name}
    assert sum(report["link_bytes"].values()) > 0
    if name == "ddp.py":  # once will do: four processes
        again = json.loads(launch(*options, script, "gloo")[1])
        assert again | {"arguments": ["netsim"]} == report, "deterministic, whatever it calls its backend"
        _check_where_the_time_went(report)


def _check_where_the_time_went(report: dict[str, Any]) -> None:
    """Of ddp.py on three ranks of wan-4-regions, in four steps."""
    assert (report["protocol"], report["protocol_from"]) == ("gloo", "default")
    assert report["placement"] == ["asia.0", "eu.0", "us-east.0"]
    assert report["algorithms"]["all_reduce"] == ["gloo"]
    calls = {(call["place"], call["op"]): call for call in report["calls"]}
    assert calls["ddp.py:24", "all_reduce"]["calls"] == 4
    assert calls["ddp.py:24", "all_reduce"]["bytes_per_call"] == 4
    for rank in report["ranks"]:
        parts = ("computing", "waiting", "network", "down")
        assert sum(rank[f"{part}_seconds"] for part in parts) == pytest.approx(rank["virtual_seconds"])
        assert rank["steps"] == 4
    for part in ("waiting_seconds", "network_seconds"):
        seconds = sum(call[part] for call in report["calls"])
        assert seconds == pytest.approx(sum(rank[part] for rank in report["ranks"]) / 3)
    assert report["steady_state"]["steps"] == 3
    assert 0 < report["steady_state"]["seconds"] < report["virtual_seconds"] / 4


def both(num_ranks: int, script: str, prepare: Callable[[], Any]) -> tuple[list[CompletedProcess[str]], Any]:
    """A program's ranks on gloo, and its launch: in forks of a process that has imported what each would."""

    def run() -> None:
        prepare()
        real = ranks(num_ranks, run_script, script, "gloo", seconds=100.0)
        launched = launch("-n", str(num_ranks), "--compute", "marks", script, "netsim")
        print(json.dumps([[(each.stdout, each.stderr) for each in real], launched]))

    real, (code, out, err) = json.loads(Fork(run).end().stdout)
    assert code == 0, err
    return [CompletedProcess([], 0, *each) for each in real], out


def test_what_lies_above_c10d_gives_what_it_gives_on_gloo() -> None:
    """Hooks, sharded optimizers, meshes, tensor parallel, pipelines, checkpoints: gloo's results but for rounding."""

    def prepare() -> None:
        for name in ("checkpoint", "optim", "pipelining", "tensor.parallel"):
            importlib.import_module(f"torch.distributed.{name}")

    real, out = both(2, str(PROGRAMS / "features.py"), prepare)
    results = [dict(FEATURES.findall(text)) for text in (real[0].stdout, out)]
    assert len(results[0]) == 18, real[0].stderr
    expected = {name: pytest.approx(float(value), rel=1e-4) for name, value in results[0].items()}
    assert {name: float(value) for name, value in results[1].items()} == expected


# Rows of programs/table.py that differ from gloo's, with the reason.
OTHER_THAN_GLOO = {"extreme float16 AVG 0": "halves are added up in fp32, where gloo's sum overflows"}


def test_every_call_dtype_reduction_and_mistake_ends_as_on_gloo() -> None:
    """Values to the bit; of errors the class, and whether the call or its wait raises."""
    script = str(PROGRAMS / "table.py")
    real = "".join(rank.stdout for rank in ranks(2, run_script, script, "gloo", seconds=100.0))
    code, _, err = launch("-n", "2", "--compute", "marks", "--json", script, "gloo")
    assert code == 0, err[-2000:]
    tables: list[list[dict[str, object]]] = [[{}, {}], [{}, {}]]
    for table, text in zip(tables, (real, err), strict=True):
        for line in text.splitlines():
            if line.startswith(('[0, "', '[1, "')):
                rank, name, found = json.loads(line)
                table[rank][name] = found
    names = list(tables[0][0])
    assert len(names) > 900
    assert [list(table[rank]) for table in tables for rank in (0, 1)] == [names] * 4
    differ = [
        f"rank {rank}, {name}: {tables[0][rank][name]} on gloo, {tables[1][rank][name]}"
        for name in names
        for rank in (0, 1)
        if tables[0][rank][name] != tables[1][rank][name] and name not in OTHER_THAN_GLOO
    ]
    assert not differ, "\n".join([f"{len(differ)} rows differ", *differ[:20]])


def test_overlap_is_charged_and_flops_count(tmp_path: Path) -> None:
    """10 kB over a line of 80 kbit/s take a second: hidden behind a second of computing, exposed without."""
    topology = tmp_path / "line.yaml"
    topology.write_text("hosts: [a, b]\nlinks:\n  - {between: [a, b], bandwidth: 80 kbit/s, latency: 0 s}\n")
    script = tmp_path / "overlap.py"
    script.write_text(
        "import sys, torch, torch.distributed as dist, netgym\n"
        "netgym.advance(7.0)  # start-up, which the clock does not count\n"
        "dist.init_process_group('netsim')\n"
        "tensor = torch.zeros(10_000, dtype=torch.uint8)\n"
        "work = dist.broadcast(tensor, 0, async_op=True)\n"
        "netgym.advance(float(sys.argv[1]))\n"
        "work.wait()\n"
        "print(netgym.now() if dist.get_rank() else sys.stdin.read())\n"
    )
    ends = []
    for seconds in ("0", "1.5"):
        options = ["-n", "2", "--topology", str(topology), "--compute", "marks", "--json"]
        options += ["--protocol", "ideal"]
        code, out, err = launch(*options, str(script), seconds)
        assert (code, sorted(err.split())) == (0, sorted(["typed", f"{max(1.0, float(seconds))}"]))
        assert json.loads(out)["ranks"][0]["startup_seconds"] == 7.0
        ends.append(json.loads(out)["ranks"][1]["virtual_seconds"])
        (made,) = (row for row in json.loads(out)["calls"] if row["calls"])
        hidden = 1.0 if float(seconds) else 0.0  # the network's second, on either end
        assert made["hidden_seconds"] == pytest.approx(hidden)
        assert made["exposed_seconds"] == pytest.approx(1.0 - hidden)
    assert ends == [pytest.approx(1.0), pytest.approx(1.5)]


@pytest.mark.parametrize("compute", ["live 0.5", "marks"])
def test_what_computing_costs(launch_here: Launch, compute: str, tmp_path: Path) -> None:
    """Rank 1 multiplies matrices of 512."""
    script = tmp_path / "compute.py"
    script.write_text(
        "import torch, torch.distributed as dist, netgym\n"
        "square = torch.ones(512, 512)\n"
        "dist.init_process_group('netsim')\n"
        "for _ in range(10 * dist.get_rank()): square @ square\n"
        "netgym.advance(0.25)\n"
        "dist.barrier()\n"
    )
    code, out, err = launch_here("-n", "2", "--topology", "lan", "--compute", compute, "--json", str(script))
    assert code == 0, err
    report = json.loads(out)
    whole = report["virtual_seconds"]
    computed = report["compute_utilisation"] * whole * 2  # of both ranks
    if compute == "marks":
        assert computed == pytest.approx(0.5, abs=1e-8)
        assert report["compute_account"] is None
    else:
        assert computed > 0.5


RATES = """
import netgym
x = torch.ones(512, 512, requires_grad=True)
big = torch.zeros(3000, 1000)
dist.barrier()
with torch.autocast("cpu", dtype=torch.bfloat16):
    y = x @ x  # after two casts: shorter than a launch
y.sum().backward()  # two products in bf16
double = torch.ones(512, 512, dtype=torch.float64)
double @ double
x @ x
torch.backends.cuda.matmul.allow_tf32 = True
x @ x
big.add_(1.0)  # reads and writes 12 MB
dist.barrier()
"""


def test_operations_cost_what_their_dtype_and_bytes_do_and_the_output_says_so(
    launch_here: Launch, tmp_path: Path
) -> None:
    """All were charged at the peak in bf16, fp32 at 15 times its speed, and what only moves bytes at nothing."""
    compute = "flops raspberry-pi-5 0.5 0.8"
    options = ["-n", "2", "--topology", "lan", "--compute", compute, "--out", str(tmp_path / "run")]
    code, out, err = launch_here(*options, failing(tmp_path, RATES))
    assert code == 0, err
    assert f"compute     {compute}\n" in out
    rates = (
        "bf16 as fp32 0.0768 TFLOP/s, fp64 0.0384 TFLOP/s, fp32 0.0768 TFLOP/s, tf32 as fp32 0.0768 TFLOP/s"
    )
    assert (
        f"assumed     products reach 50.0% of the peak of raspberry-pi-5: {rates}; all else 80% of its memory's "
        "bandwidth: 13.68 GB/s; a launch takes 1 us\n" in out
    )
    account = json.loads((tmp_path / "run" / "launch.json").read_text())["compute_account"]
    assert account["products_seconds"] == pytest.approx(2 * 512**3 * (5 / 76.8e9 + 1 / 38.4e9))
    # Ones, their cast to bf16, the sum, that of two gradients and its cast back, ones in fp64; zeros and the addition.
    moved = 512**2 * (4 + (4 + 2) + 2 + 3 * 2 + (2 + 4) + 8) + 3_000_000 * (4 + 8)
    assert account["memory_seconds"] == pytest.approx(moved / (17.1e9 * 0.8), rel=1e-6)
    assert 0 < account["launches_seconds"] < 5e-6
    assert account["measured_seconds"] == account["num_estimated"] == 0
    assert "clock       virtual: times that the script takes itself are on this clock" in out


RECORDED = """
import sys
torch.manual_seed(0)
model = torch.nn.Linear(64, 32)
for _ in range(3):
    model(torch.ones(128, 64)).relu().sum().backward()
if len(sys.argv) > 1: torch.ones(9, 9) @ torch.ones(9, 9)
dist.barrier()
print("rank", dist.get_rank(), "of", dist.get_world_size())
"""


def test_recorded_operations_are_used_and_those_that_lack_are_estimated(tmp_path: Path) -> None:
    script, trace = failing(tmp_path, RECORDED), tmp_path / "trace.csv"
    Path(script).write_text(Path(script).read_text().replace("'netsim'", "'gloo'"))
    code, out, err = launch("--record-compute", str(trace), script)
    assert (code, out) == (0, "rank 0 of 1\n"), err
    assert f'recorded: use them by --compute "{trace} DEVICE"' in err
    rows = list(csv.DictReader(trace.read_text().splitlines()))
    (product,) = [row for row in rows if row["op"] == "aten.addmm"]
    assert product["shapes"] == "32 128x64 64x32 -> 128x32"
    assert (product["dtypes"], product["calls"]) == ("float32 float32 float32 -> float32", "3")
    assert all(float(row["ns"]) > 0 for row in rows)
    assert not [row for row in rows if row["op"] in ("aten.t", "aten.view", "aten.detach", "aten.expand")]
    trace.write_text(
        "op,shapes,dtypes,calls,ns\n"
        + "".join(
            f"{row['op']},{row['shapes']},{row['dtypes']},1,1000000\n"
            for row in rows
            if row["op"] != "aten.relu"
        )
    )
    options = ["-n", "2", "--topology", "lan", "--json", "--compute", f"{trace} h100"]
    code, out, err = launch(*options, script, "more")
    assert code == 0, err
    account = json.loads(out)["compute_account"]
    calls = sum(int(row["calls"]) for row in rows if row["op"] != "aten.relu")
    assert account["measured_seconds"] == pytest.approx(calls * 1e-3)
    assert "aten.relu 128x32 -> 128x32 (float32 -> float32)" in account["estimated"]
    assert "aten.mm 9x9 9x9 -> 9x9 (float32 float32 -> float32)" in account["estimated"]
    # Three relus, the product, and twice its ones.
    assert account["launches_seconds"] == pytest.approx(5e-6 * 6)


MESH = """
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
for name in ("tp", "dp"):
    dist.all_reduce(torch.ones(100_000), group=mesh.get_group(name))
pair = dist.new_group([0, 3], group_desc="corner")
if dist.get_rank() == 0: dist.send(torch.ones(100_000), 3, group=pair)
if dist.get_rank() == 3: dist.recv(torch.ones(100_000), 0, group=pair)
"""


def test_bytes_and_exposed_time_are_split_by_sites_and_by_groups(launch_here: Launch, tmp_path: Path) -> None:
    """A ring of two sends 400 kB from each: tensor parallel pairs share a site, data parallel ones do not."""
    hosts = "east.0,east.1,west.0,west.1"
    options = ["-n", "4", "--topology", "two-datacenters", "--placement", hosts, "--compute", "marks"]
    code, out, err = launch_here(*options, "--out", str(tmp_path / "run"), failing(tmp_path, MESH))
    assert code == 0, err
    report = json.loads((tmp_path / "run" / "launch.json").read_text())
    sent = {row["group"]: (row["sent_within_bytes"], row["sent_between_bytes"]) for row in report["groups"]}
    assert sent == {"mesh_tp": (400_000, 0), "mesh_dp": (0, 400_000), "corner": (0, 100_000)}
    for row in report["groups"]:
        within, between = row["exposed_within_seconds"], row["exposed_between_seconds"]
        assert (within > 0, between > 0) == ((True, False) if row["group"] == "mesh_tp" else (False, True))
    for rows in (report["groups"], report["splits"]):
        exposed = sum(row["exposed_within_seconds"] + row["exposed_between_seconds"] for row in rows)
        assert exposed == pytest.approx(sum(call["exposed_seconds"] for call in report["calls"]))
        assert sum(row["sent_between_bytes"] for row in rows) * 4 == report["wan_bytes"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Process groups within and between sites" in page
    assert all(name in out and name in page for name in sent)


def test_a_module_runs_as_torchrun_would_run_it(tmp_path: Path) -> None:
    """It is __main__ with its own arguments and torchrun's variables, and its nccl is ours; nothing is said."""
    (tmp_path / "trainmod.py").write_text(
        "import os, sys, torch, torch.distributed as dist, netgym\n"
        "dist.init_process_group('nccl')\n"
        "dist.all_reduce(tensor := torch.ones(1000))\n"
        "netgym.advance(0.5 * dist.get_rank())\n"
        "if dist.get_rank():\n"
        "    print(sys.argv[1:], __name__, *(os.environ[name] for name in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')))\n"
        "    print(dist.get_backend(), tensor[0].item())\n"
    )
    options = ["--nproc-per-node", "2", "--topology", "two-datacenters", "--compute", "marks"]
    options += ["--protocol", "ideal", "--out", "run", "--trace", "-m", "trainmod", "--lr", "0.1"]
    done = Fork(main, ["launch", *options], folder=tmp_path, environment={"PYTHONPATH": PATH}).end()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:2] == ["['--lr', '0.1'] __main__ 1 1 2", "nccl 2.0"]
    files = sorted(file.name for file in (tmp_path / "run").glob("[!.]*"))
    assert files == ["launch.json", "report.html", "requests.bin", "trace.json.gz"]
    report = json.loads((tmp_path / "run" / "launch.json").read_text())
    assert (report["script"], report["arguments"], report["is_module"]) == ("trainmod", ["--lr", "0.1"], True)
    assert report["slowest_rank"] == 1
    (call,) = report["calls"]
    assert (call["place"], call["op"], call["calls"]) == ("trainmod.py:3", "all_reduce", 1)
    assert call["bytes_per_call"] == 4000
    waited = call["waiting_seconds"] + call["network_seconds"]
    assert report["virtual_seconds"] == pytest.approx(waited + 0.5, abs=1e-8)
    assert report["compute_utilisation"] == pytest.approx(0.25 / report["virtual_seconds"])
    assert sum(rank["bytes_sent"] for rank in report["ranks"]) == report["wan_bytes"] == 8000
    assert set(report["link_bytes"].values()) == {4000.0}
    events = json.loads(gzip.decompress((tmp_path / "run" / "trace.json.gz").read_bytes()))["traceEvents"]
    for kind in ("communication", "wait"):
        assert {each["args"]["at"] for each in events if each.get("cat") == kind} == {"trainmod.py:3"}
    jsonschema.validate(report, schema_of("launch"))
    (tmp_path / "run" / "report.html").unlink()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "trainmod.py:3" in (tmp_path / "run" / "report.html").read_text()


def test_ranks_that_torchrun_has_started_find_the_simulation(tmp_path: Path) -> None:
    """No launcher of ours: rank 0 starts the simulation, the others find it in torchrun's store."""
    out = tmp_path / "run"
    environment = {"NETGYM_TOPOLOGY": "two-datacenters", "NETGYM_COMPUTE": "marks", "NETGYM_OUT": str(out)}
    script = tmp_path / "program.py"
    script.write_text(
        "import torch, torch.distributed as dist, netgym.launch\n"
        "dist.init_process_group('netsim')\n"
        "dist.all_reduce(ranks := torch.tensor([1 + dist.get_rank()]))\n"
        "print(f'the sum is {ranks.item()}')\n"
    )
    errors = tmp_path / "stderr"

    def run() -> None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        run_script(str(script))

    ends = ranks(2, run, **environment)
    assert [(end.returncode, end.stdout) for end in ends] == [(0, "the sum is 3\n")] * 2, errors.read_text()
    for _ in range(200):  # the simulation's process writes when the last rank has gone
        if "of virtual time: ranks compute" in errors.read_text():
            break
        time.sleep(0.05)
    assert "of virtual time: ranks compute" in errors.read_text()
    assert json.loads((out / "launch.json").read_text())["virtual_seconds"] > 0.02


TIMED_OUT = """
import datetime, netgym
group = GROUP
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=2), group)
if dist.get_rank():
    netgym.advance(20.0)
try:
    dist.all_reduce(torch.ones(2), group=group)
    print("done")
except RuntimeError as error:
    print(f"{netgym.now():.0f} s: {str(error).rpartition(': ')[2]}")
"""


@pytest.mark.parametrize("group", ["None", "dist.new_group([0, 1])"], ids=["world", "group"])
def test_a_time_out_set_on_a_group_holds(launch_here: Launch, group: str, tmp_path: Path) -> None:
    script = failing(tmp_path, TIMED_OUT.replace("GROUP", group))
    code, out, err = launch_here("-n", "2", "--compute", "marks", script)
    assert code == 0, err
    assert {"2 s: Timed out waiting 2000ms", "20 s: Connection closed by peer"} <= set(out.splitlines())
    assert "Set timeout" not in err


ENDS_EARLY = """
import sys, netgym
rank = dist.get_rank()
left = dist.new_group([0, 1, 3])
if rank == 2:
    netgym.advance(3.0)
    sys.exit(0)
netgym.advance(float(rank))
for call in (
    lambda: dist.all_reduce(torch.ones(2)),
    lambda: dist.barrier(),
    lambda: dist.recv(torch.ones(2), 2),
    lambda: dist.all_reduce(torch.ones(2), async_op=True).wait(),
):
    try:
        call()
        print("done")
    except RuntimeError as error:
        print(f"{netgym.now():.1f} s: {str(error).partition(':')[0]}")
x = torch.ones(2)
dist.all_reduce(x, group=left)
assert x[0] == 3
"""


def test_a_rank_that_ends_early_can_be_caught_without_a_time_out(launch_here: Launch, tmp_path: Path) -> None:
    """It was reported as a deadlock of the others, which ended the run."""
    code, out, err = launch_here("-n", "4", "--compute", "marks", failing(tmp_path, ENDS_EARLY))
    assert code == 0, err
    assert out.count("3.0 s: Connection closed by peer") == 12
    assert "done" not in out


COALESCED = """
import warnings
warnings.simplefilter("ignore")
rank, x, y = dist.get_rank(), torch.arange(4.0), torch.ones(2)
z, part, whole = torch.zeros(2), torch.zeros(2), torch.zeros(4)
for calls in (
    [lambda: dist.all_reduce(x), lambda: dist.all_reduce(y)],
    [lambda: dist.reduce_scatter_tensor(part, torch.arange(4.0))],
    [lambda: dist.all_gather_into_tensor(whole, torch.full((2,), float(rank)))],
    [lambda: dist.isend(y, 1 - rank), lambda: dist.irecv(z, 1 - rank)],
):
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for call in calls:
            call()
    manager.wait()
assert x.tolist() == [0, 2, 4, 6], x
assert y.tolist() == z.tolist() == [2, 2], (y, z)
assert part.tolist() == ([0, 2] if rank == 0 else [4, 6]), part
assert whole.tolist() == [0, 0, 1, 1], whole
"""


def test_coalesced_calls_write_their_tensors(launch_here: Launch, tmp_path: Path) -> None:
    """all_reduce left them as they were."""
    script = Path(failing(tmp_path, COALESCED))
    script.write_text(script.read_text().replace("netsim", "nccl"))
    code, _, err = launch_here("-n", "2", "--compute", "marks", str(script))
    assert code == 0, err
    script.write_text(script.read_text() + "dist.broadcast(x, 5)\n")
    assert (
        "invalid root rank: 5" in launch_here("-n", "2", "--compute", "marks", str(script))[2].splitlines()[0]
    )


BY_HAND = """
import datetime, os, torch, torch.distributed as dist
address, rank = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), int(os.environ["RANK"])
store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
for members in ([0, 1, 2], [2, 0]):
    if rank in members:
        own = dist.PrefixStore(str(members), store)
        group = dist.ProcessGroup(own, members.index(rank), len(members))
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        gloo = dist.ProcessGroupGloo(own, members.index(rank), len(members), datetime.timedelta(seconds=60))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        tensor = torch.tensor([float(rank)])
        group.broadcast([tensor], dist.BroadcastOptions()).wait()
        assert (tensor.item(), group.size()) == (members[0], len(members))
"""


def test_groups_made_by_hand_are_simulated_and_torchruns_store_is_there(
    launch_here: Launch, tmp_path: Path
) -> None:
    """torchft makes its groups so, at every change of its members, and finds torchrun's store for that."""
    script = tmp_path / "program.py"
    script.write_text(BY_HAND)
    code, out, err = launch_here("-n", "3", "--compute", "marks", "--json", str(script))
    assert code == 0, err
    report = json.loads(out)
    assert [group["group"] for group in report["groups"]] == ["made by hand"]
    assert report["virtual_seconds"] > 0.0


def test_programs_that_torchrun_restarts_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(InputError, match=r"run it without --max-restarts$"):
        connect(torch.distributed.HashStore(), 0, 2)


def test_a_program_that_survives_a_crash_goes_on_without_the_crashed_host(tmp_path: Path) -> None:
    """Host b is down from 2.5 s to 22.5 s: its peers' third step times out, as on gloo, and they form a new group."""
    topology = tmp_path / "three.yaml"
    links = "".join(
        f"  - {{between: [{name}, switch], bandwidth: 8 Mbit/s, latency: 10 ms}}\n" for name in "abc"
    )
    topology.write_text(
        f"hosts: [a, b, c]\nrouters: [switch]\nlinks:\n{links}"
        "events:\n  - {host: b, at: 2.5 s, crash: true, for: 20 s}\n"
    )
    options = ["-n", "3", "--topology", str(topology), "--compute", "marks", "--protocol", "ideal"]
    out = tmp_path / "run"
    code, output, err = launch(*options, "--out", str(out), "--chakra", str(PROGRAMS / "survivors.py"))
    assert code == 0, err
    steps = sorted(line for line in output.splitlines() if " step " in line)
    late = "Timed out waiting 3000ms"
    assert steps == [
        f"rank {rank} step {step}: {ending}"
        for rank, endings in enumerate(
            [("3", "3", late, "2"), ("3", "3", "Connection closed by peer"), ("3", "3", late, "2")]
        )
        for step, ending in enumerate(endings)
    ]
    assert sorted(file.name for file in out.glob("*.et")) == [f"chakra.{rank}.et" for rank in range(3)]
    _, nodes = chakra_schema.read((out / "chakra.0.et").read_bytes())
    micros = [node.duration_micros for node in nodes if node.name == "all_reduce"]
    assert [number > 0 for number in micros] == [True, True, False, True], "the third was never over"


def failing(tmp_path: Path, text: str) -> str:
    script = tmp_path / "program.py"
    script.write_text(f"import torch, torch.distributed as dist\ndist.init_process_group('netsim')\n{text}\n")
    return str(script)


ERRORS = {
    "mismatch": (
        "dist.all_reduce(torch.ones(2 + dist.get_rank()))",
        "ranks disagree: rank 0 called all_reduce(float32[2], op=sum) at program.py:3",
    ),
    "mismatch that is caught as gloo's": (
        "try: dist.all_reduce(torch.ones(2 + dist.get_rank()))\n"
        "except RuntimeError: raise KeyError('through') from None",
        "failed at program.py:4: KeyError: 'through'",
    ),
    "deadlock": (
        "dist.recv(torch.ones(1), 1 - dist.get_rank())",
        "deadlock: rank 0 waits for rank 1 in recv(float32[1]) at program.py:3",
    ),
    "exception": (
        "raise KeyError('oops') if dist.get_rank() else dist.barrier()",
        "rank 1 failed at program.py:3: KeyError",
    ),
    "swapped": (
        "x, rank = torch.ones(2), dist.get_rank()\n"
        "dist.broadcast(x, 0) if rank else dist.all_reduce(x)\n"
        "dist.all_reduce(x) if rank else dist.broadcast(x, 0)",
        "ranks disagree: rank 0 called all_reduce(float32[2], op=sum) at program.py:4; "
        "rank 1 called broadcast(float32[2], src=0) at program.py:4",
    ),
    "dead": (
        "import os, signal\nif dist.get_rank(): os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
        "the process of rank 1 ended: killed by signal 9 (SIGKILL)",
    ),
    "advance": (
        "import netgym\nnetgym.advance(1e300)",
        "netgym.advance(1e+300) at program.py:4: give seconds from 0 to 1e+09",
    ),
    "time-out of a group": (
        "import datetime\nseconds = datetime.timedelta(seconds=-1)\n"
        "dist.all_reduce(torch.ones(1), group=dist.new_group([0, 1], timeout=seconds))",
        "rank 0, all_reduce(float32[1], op=sum) at program.py:5: Timed out waiting 0ms",
    ),
}


@pytest.mark.parametrize("mistake", ERRORS)
def test_errors_are_reported_with_the_scripts_line(launch_here: Launch, mistake: str, tmp_path: Path) -> None:
    text, message = ERRORS[mistake]
    code, _, err = launch_here("-n", "2", "--compute", "marks", failing(tmp_path, text))
    assert code in (1, 2)
    assert message in err.splitlines()[0]


def test_a_script_that_is_no_python_is_refused_with_its_line(launch_here: Launch, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import torch\ndef f(:\n    pass\n")
    code, out, err = launch_here("-n", "2", str(script))
    assert (code, out, err) == (2, "", f"error: {script}:2: SyntaxError: invalid syntax\n")


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ("os._exit(0)", None),
        ("os._exit(3)", "the process of rank 1 ended: exit code 3"),
        ("dist.all_reduce(x, async_op=True), os._exit(0)", "exit code 0; in flight: rank 1's all_reduce"),
    ],
    ids=["success", "failure", "open call"],
)
def test_a_rank_that_leaves_at_once_has_succeeded_as_under_torchrun(
    launch_here: Launch, leaves: str, message: str | None, tmp_path: Path
) -> None:
    """With exit code 0 and no open call; it always was a failure."""
    text = f"import os\nx = torch.ones(2)\ndist.all_reduce(x)\nif dist.get_rank(): {leaves}"
    code, _, err = launch_here("-n", "2", "--compute", "marks", "--json", failing(tmp_path, text))
    assert code == (0 if message is None else 1), err
    assert message is None or message in err


# --- never a confident wrong answer -----------------------------------------------------------------------


@pytest.fixture
def line(tmp_path: Path) -> str:
    """Two hosts."""
    path = tmp_path / "line.yaml"
    path.write_text("hosts: [a, b]\nlinks:\n  - {between: [a, b], bandwidth: 80 Mbit/s, latency: 50 ms}\n")
    return str(path)


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


def test_ranks_that_a_script_starts_in_addition_to_the_launchers_are_refused(
    launch_here: Launch, line: str
) -> None:
    code, out, err = launch_here("-n", "2", "--topology", line, str(PROGRAMS / "forked.py"), free_port())
    assert (code, out) == (2, ""), "nothing was simulated, so nothing is told of time"
    last = err.splitlines()[-1]
    assert re.match(
        r"error: a process calls init_process_group as rank [01] of 2, and is not one of the 2 ", last
    )
    assert last.endswith("a script that starts its ranks itself (mp.spawn, multiprocessing) runs without -n")


def test_a_run_is_cut_at_a_virtual_time(launch_here: Launch, line: str) -> None:
    """Forked ranks that never end: the figures are those of the first second, and sum to it."""
    options = ["--topology", line, "--compute", "marks", "--until", "1 s", "--json"]
    code, out, err = launch_here(*options, str(PROGRAMS / "forked.py"), free_port())
    assert code == 0, err
    report = json.loads(out)
    assert (report["ending"], report["virtual_seconds"]) == ("until", 1.0)
    (call,) = report["calls"]
    assert call["place"] == "forked.py:15"
    assert call["waiting_seconds"] + call["network_seconds"] == pytest.approx(1.0)
    assert call["network_seconds"] > 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import torch", "no rank called init_process_group"),
        (
            "import os, torch.distributed as dist\n"
            "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
            "dist.init_process_group('fake', store=FakeStore(), rank=int(os.environ['RANK']), world_size=2)\n"
            "import torch; dist.all_reduce(torch.ones(2))",
            "the program used backend fake, which is not simulated",
        ),
        (
            "import torch.distributed.rpc as rpc\nrpc.init_rpc('worker')",
            "torch.distributed.rpc is not simulated, so its time would be missing",
        ),
        (
            "import os, torch, torch.distributed as dist\n"
            "dist.init_process_group('gloo')\n"
            "store = dist.distributed_c10d._get_default_store()\n"
            "group = dist.ProcessGroupGloo(store, dist.get_rank(), 2)\n"
            "group.allreduce([torch.ones(2)]).wait()",
            "the program used backend gloo, by ProcessGroupGloo, which is not simulated",
        ),
    ],
    ids=["no-call", "other-backend", "rpc", "own-group"],
)
def test_a_run_in_which_nothing_was_simulated_fails(
    launch_here: Launch, text: str, message: str, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(text + "\n")
    code, out, err = launch_here("-n", "2", str(script))
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


def test_ranks_draw_numbers_of_their_own_and_the_same_each_time(launch_here: Launch, tmp_path: Path) -> None:
    """As the separate processes of torchrun: forks of one process would all have the generators that it had."""
    script = tmp_path / "draws.py"
    script.write_text(
        "import pathlib, random, sys, numpy, torch, torch.distributed as dist\n"
        "dist.init_process_group('netsim')\n"
        "drawn = torch.tensor([torch.rand(()).item(), numpy.random.rand(), random.random()])\n"
        "every = [torch.empty(3) for _ in range(2)]\n"
        "dist.all_gather(every, drawn)\n"
        "if dist.get_rank() == 0:\n"
        "    pathlib.Path(sys.argv[1]).write_text(str(torch.stack(every).flatten().tolist()))\n"
    )
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        assert launch_here("-n", "2", "--compute", "marks", str(script), str(path))[0] == 0
    assert first.read_text() == second.read_text()
    assert len(set(json.loads(first.read_text()))) == 6


def test_two_threads_of_a_rank_that_call_at_once_are_refused(launch_here: Launch, tmp_path: Path) -> None:
    """A rank has one clock. They ended as deadlocks of calls that all ranks make, or in a failed assertion."""
    script = tmp_path / "threads.py"
    script.write_text(
        "import pathlib, threading, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "refused = pathlib.Path(__file__).with_name('refused')\n"
        "def call():\n"
        "    try:\n"
        "        dist.barrier()\n"
        "    except ValueError:\n"  # which nobody reports
        "        refused.touch()\n"
        "if dist.get_rank() == 0:\n"
        "    [threading.Thread(target=call, daemon=True).start() for _ in range(2)]\n"
        "while not refused.exists():\n"
        "    time.sleep(0.01)\n"
    )
    code, _, err = launch_here("-n", "2", "--compute", "marks", str(script))
    assert (code, err.splitlines()[-1].partition(":")[0]) == (2, "error")
    assert "rank 0: two of its threads call torch.distributed at once" in err


def test_the_first_cause_is_reported_once_and_the_answer_until_then_kept(
    launch_here: Launch, tmp_path: Path
) -> None:
    """Rank 2 is missing: rank 0 knows who, and rank 1 only that rank 0 has closed the connection."""
    script = tmp_path / "missing.py"
    script.write_text(
        "import datetime, netgym, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(3))\n"
        "if dist.get_rank() == 2: netgym.advance(60.0)\n"
        "dist.monitored_barrier(timeout=datetime.timedelta(seconds=5))\n"
    )
    out = tmp_path / "run"
    code, output, err = launch_here("-n", "3", "--compute", "marks", "--out", str(out), str(script))
    assert (code, output.splitlines()[-1]) == (1, str(out))
    first = "rank 0 failed at missing.py:5: RuntimeError: Rank 2 failed to pass monitoredBarrier in 5000 ms"
    assert err.splitlines()[0] == f"error: {first}"
    assert "check rank 0 logs" not in err
    report = json.loads((out / "launch.json").read_text())
    assert (report["ending"], report["error"]) == ("failed", first)
    assert 5.0 < report["virtual_seconds"] < 5.1
    places = [(call["place"], call["op"]) for call in report["calls"]]
    assert places == [("missing.py:5", "monitored_barrier"), ("missing.py:3", "all_reduce")]
    assert report["calls"][0]["waiting_seconds"] > 3.0, "for rank 2, and not for the network"


def test_results_are_printed_when_a_signal_ends_the_run(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "while True:\n"
        "    dist.all_reduce(torch.ones(3))\n"
        "    print('going')\n"
    )
    launched = Fork(main, ["launch", "-n", "2", "--out", "run", "--trace", str(script)], folder=tmp_path)
    launched.wait_for(lambda: launched.out.count("going") > 20)  # by then some calls are over
    launched.send_signal(signal.SIGTERM)
    done = launched.end()
    assert (done.returncode, done.stderr) == (143, "interrupted: the figures are those until then\n")
    assert "of virtual time (interrupted: the results so far): ranks compute" in done.stdout
    assert "endless.py:4  all_reduce" in done.stdout
    files = sorted(file.name for file in (tmp_path / "run").glob("[!.]*"))
    assert files == ["launch.json", "report.html", "requests.bin", "trace.json.gz"]


HANDLERS = """
import os, signal, sys, time
folder, number = sys.argv[1], int(sys.argv[2])

def save(received, frame):
    dist.barrier()
    time.sleep(1.5)
    open(f"{folder}/saved.{dist.get_rank()}.{received}", "w").close()
    sys.exit(0)

signal.signal(number, save)
x = torch.ones(1)
dist.all_reduce(x)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_scripts_own_handlers_run_when_a_signal_ends_the_run(
    number: signal.Signals, tmp_path: Path
) -> None:
    """Checkpoints on preemption: torchrun passes signals on, too."""
    script = failing(tmp_path, HANDLERS)
    launched = Fork(main, ["launch", "-n", "2", script, str(tmp_path), str(int(number))], folder=tmp_path)
    launched.wait_for(lambda: launched.out.count("ready") == 2)
    launched.send_signal(number)
    done = launched.end()
    assert (done.returncode, done.stderr) == (128 + number, "interrupted: the figures are those until then\n")
    assert {file.name for file in tmp_path.glob("saved.*")} == {
        f"saved.{rank}.{int(number)}" for rank in (0, 1)
    }


def test_what_a_program_leaves_behind_ends_with_it(launch_here: Launch, tmp_path: Path) -> None:
    """Children of ranks, also such as have left their session, and their children; nothing else of this process."""
    script = tmp_path / "parents.py"
    script.write_text(
        "import os, subprocess, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.barrier()\n"
        "for command in (['sleep', '600'], ['setsid', 'sleep', '600'], ['sh', '-c', 'sleep 600; true']):\n"
        "    print(subprocess.Popen(command, stdout=subprocess.DEVNULL).pid)\n"
    )
    with subprocess.Popen(["sleep", "600"]) as other:
        code, out, err = launch_here("-n", "2", "--compute", "marks", str(script))
        assert (code, err) == (0, "")
        left = [
            pid for pid in map(int, re.findall(r"^\d+$", out, re.MULTILINE)) if Path(f"/proc/{pid}").exists()
        ]
        assert (left, other.poll()) == ([], None)
        other.kill()


def test_a_script_for_gpus_runs_as_it_is(launch_here: Launch, line: str) -> None:
    """Autocast, a scaler, fused AdamW, pinned memory and device_ids; the clock is measured, start-up is not on it."""
    options = ["-n", "2", "--topology", line, "--cuda-as-cpu", "--json"]
    code, out, err = launch_here(*options, str(PROGRAMS / "gpt.py"))
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert (report["protocol"], report["protocol_from"]) == ("nccl-sockets", "default")
    assert report["steady_state"]["steps"] == 2
    assert all(rank["startup_seconds"] > 0 for rank in report["ranks"])
    assert all(rank["computing_seconds"] > 0 for rank in report["ranks"])


COMPILED = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()

@torch.compile(backend="eager")
def calls(x):
    y, z = x * 2, torch.zeros_like(x)
    dist.broadcast(y, 0)
    dist.all_reduce(y, async_op=True).wait()
    dist.send(y, 1) if rank == 0 else dist.recv(z, 0)
    dist.all_reduce(z)
    return y + z + 1

for _ in range(2):
    print("called", *calls(torch.ones(3) * (rank + 1)).tolist())
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
compiled = torch.compile(torch.nn.parallel.DistributedDataParallel(model), backend="eager")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    optimizer.zero_grad()
    loss = compiled(torch.ones(2, 4) * (rank + 1)).sum()
    loss.backward()
    optimizer.step()
    print("loss", step, f"{loss.item():.5f}")

from torch.distributed.fsdp import fully_shard
inside = torch.nn.parallel.DistributedDataParallel(torch.compile(torch.nn.Linear(4, 4), backend="eager"))
static = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), static_graph=True)
sharded = torch.compile(fully_shard(torch.nn.Linear(4, 4)), backend="eager")
for name, model in (("inside", inside), ("static", static), ("sharded", sharded)):
    for step in range(2):
        loss = model(torch.ones(2, 4) * (rank + 1)).square().sum()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        print("loss", name, step, f"{loss.item():.5f}")

inner = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(inner.parameters(), 0.01)

@torch.compile(backend="eager")
def whole_step(x):
    loss = inner(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for step in range(2):
    print("loss whole", step, f"{whole_step(torch.ones(2, 4) * (rank + 1)).item():.5f}")
"""


@pytest.mark.thorough
def test_compiled_code_breaks_its_graph_at_calls_as_on_gloo(tmp_path: Path) -> None:
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED)

    def printed(text: str) -> list[str]:
        return sorted(line for line in text.splitlines() if line.startswith(("called", "loss")))

    compiled = torch.compile(torch.neg, backend="eager")
    real, out = both(2, str(script), lambda: compiled(torch.ones(1)))
    expected = printed("".join(rank.stdout for rank in real))
    assert len(expected) == 26
    assert printed(out) == expected


GPU_ANSWERS = """
rank, cuda = dist.get_rank(), torch.cuda
assert cuda.nccl.version() >= (2, 0)
with cuda.nvtx.range("step"):
    cuda.nvtx.mark("here")
x = cuda.FloatTensor([1.0, 2.0])
x.record_stream(cuda.current_stream())
assert cuda.can_device_access_peer(0, 1)
assert len(cuda.default_generators) == cuda.device_count() == 2
assert cuda.memory_stats()["num_alloc_retries"] == 0
cuda.cudart().cudaProfilerStart()
for name in ("temperature", "initial_seed", "get_arch_list", "reset_peak_host_memory_stats"):
    getattr(cuda, name)()

torch.manual_seed(0)
whole, weights = torch.randn(6, 3, 4), torch.randn(6, 3, 4)
bounds = slice(0, 2) if rank == 0 else slice(2, 6)
alone = torch.nn.BatchNorm1d(3).cuda()
with torch.no_grad():
    alone.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    alone.bias.copy_(torch.tensor([1.0, 0.0, -1.0]))
from copy import deepcopy
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(torch.nn.Sequential(deepcopy(alone))).cuda()
together = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
given, own = whole.clone().requires_grad_(), whole[bounds].clone().requires_grad_()
(alone(given) * weights).sum().backward()
made = together(own.cuda())
(2 * made * weights[bounds]).sum().backward()  # DDP takes the mean of two
for got, expected in (
    (own.grad / 2, given.grad[bounds]),
    (model[0].weight.grad, alone.weight.grad),
    (model[0].bias.grad, alone.bias.grad),
    (model[0].running_mean, alone.running_mean),
    (model[0].running_var, alone.running_var),
):
    torch.testing.assert_close(got, expected)
try:
    dist.broadcast(x, 5)
except RuntimeError as error:  # not an AttributeError of torch's own logging
    assert "invalid root rank: 5" in str(error)
assert torch.device(0) == torch.device("cuda:0")
assert x.cuda().type() == "torch.cuda.FloatTensor" and x.double().type(x.type()).dtype == x.dtype
from torch.nn.attention import flex_attention
query = torch.ones(1, 1, 4, 8, requires_grad=True)
flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
flex_attention.flex_attention(query, query, query).sum().backward()
activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
with torch.profiler.profile(activities=activities) as profile:
    x + 1
assert profile.profiler.use_device is None and "aten::add" in [event.key for event in profile.key_averages()]
event = torch.Event()
event.record()
event.wait(torch.accelerator.current_stream())
rank, sizes = dist.get_rank(), [1, 2]
parts, own = [torch.zeros(size, device=rank) for size in sizes], torch.full((sizes[rank],), 1.0 + rank)
dist.all_gather(parts, own.cuda())
assert [part.tolist() for part in parts] == [[1.0], [2.0, 2.0]]
received = torch.zeros(3).cuda()
to_itself = [dist.P2POp(dist.isend, received + 5, rank), dist.P2POp(dist.irecv, received, rank)]
[work.wait() for work in dist.batch_isend_irecv(to_itself)]
assert received.tolist() == [5.0] * 3
"""


def test_cuda_answers_and_batch_norm_is_synchronized_on_the_cpu(launch_here: Launch, tmp_path: Path) -> None:
    script = Path(failing(tmp_path, GPU_ANSWERS))
    script.write_text(script.read_text().replace("'netsim'", "'nccl'"))
    code, out, err = launch_here("-n", "2", "--cuda-as-cpu", "--compute", "marks", str(script))
    assert code == 0, err
    chosen = r"^algorithms +all_gather: nccl-ring; .*all_reduce: nccl-ring.*\(auto: NCCL's choice\)$"
    assert re.search(chosen, out, re.MULTILINE), out
