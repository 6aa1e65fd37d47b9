"""Whole training runs over real gloo between shaped links, and the same experiment simulated: side by side.

    sudo python benchmarks/real_runs.py [--out DIR] [--repeat 3] [--set KEY=VALUE ...]
    python benchmarks/real_runs.py --table REAL_DIR SIMULATED_DIR       of runs made elsewhere

Each rank is started by torchrun in a network namespace of its own (benchmarks/shaped_links.py), and runs `exogym_core
compare` on the experiment below. Then the same file is run on the simulated network, with the compute time that was
measured on this machine. Compared are the wall-clock of each round and of each run, bytes, and losses. Strategies with
servers do not run under torchrun: their ranks are forked by one `netgym compare` with transport `gloo`, and each enters
its namespace, the server that of the host where the simulation places it.

**On machines of your own** the network is what you have. Measure it (`netsim probe`, docs/probing.md), write the
experiment with `--write FILE`, name your topology in it, and run on every machine

    torchrun --nnodes 4 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m exogym_core compare FILE \\
        --out real

and anywhere `netgym compare FILE --out simulated`; then `--table real simulated`.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness
import yaml
from harness import REALTIME
from shaped_links import NAMESPACES, ShapedLinks, enter_namespace, why_not

from exogym_core.communicator.gloo.rendezvous import Rendezvous
from exogym_core.run.request import with_servers
from exogym_core.workers import gloo
from exogym_core.workers.spec import num_cores
from netsim import Topology

if TYPE_CHECKING:
    from collections.abc import Callable

# Rates and a model with which the network decides and two cores are not the limit. A queue holds 0.1 s of the rate.
TOPOLOGY = {
    "name": "four-shaped-sites",
    "source": "set for benchmarks/real_runs.py, made real by benchmarks/shaped_links.py",
    "regions": {name: {"hosts": 1, "nic": "10 Gbit/s"} for name in ("asia", "east", "eu", "west")},
    "wan": [
        {"between": ["east", "eu"], "bandwidth": "30 Mbit/s", "rtt": "16 ms", "queue": 247},
        {"between": ["east", "west"], "up": "20 Mbit/s", "down": "25 Mbit/s", "rtt": "12 ms", "queue": 165},
        {"between": ["asia", "west"], "bandwidth": "20 Mbit/s", "rtt": "20 ms", "queue": 165},
        {"between": ["asia", "eu"], "bandwidth": "15 Mbit/s", "rtt": "30 ms", "queue": 123},
        {"between": ["asia", "east"], "bandwidth": "15 Mbit/s", "rtt": "28 ms", "queue": 123},
        {"between": ["eu", "west"], "bandwidth": "20 Mbit/s", "rtt": "24 ms", "queue": 165},
    ],
}
LOCAL = {"H": 5, "optim_spec": "adamw", "lr": 4e-3}
EXPERIMENT = {
    "name": "real-runs",
    "task": "digits",
    "model": {"name": "mlp", "hidden": [1024, 1024]},
    "workers": {"count": 4},
    "device": "cpu",
    "protocol": "gloo",
    "collectives": "gloo",
    "compute": {"measured": {}, "coding": "measured", "updates": "measured", "shared_cores": num_cores()},
    "steps": 30,
    "batch_size": 16,
    "evaluate": {"samples": 0},  # looking takes whole models to rank 0, over the same links
    "compare_calls": False,
    "strategies": [
        {**LOCAL, "name": "DiLoCo"},
        {**LOCAL, "name": "DiLoCo", "label": "DiLoCo int8", "codec": "int8"},
        {**LOCAL, "name": "StreamingDiLoCo", "label": "Streaming DiLoCo", "num_fragments": 3, "tau": 1},
        {**LOCAL, "name": "FedAvg"},
        {"name": "DeMo", "lr": 4e-3},
        {"name": "AllReduce", "optim_spec": "adamw", "lr": 4e-3},
    ],
}
SERVED = [{**LOCAL, "name": "AsyncDiLoCo"}]
NOT_REAL = ("topology", "protocol", "compute")  # of an experiment, without torchrun
PORT = 29517


def run_real(experiment: Path, net: ShapedLinks, out: Path, options: list[str], seconds: float) -> None:
    """Every rank in its host's namespace; rank 0 writes the folder."""
    hosts = [host.name for host in net.topology.hosts]
    torchrun = [sys.executable, *f"-m torch.distributed.run --nproc-per-node 1 --nnodes {len(hosts)}".split()]
    torchrun += f"--master-addr {net.address(hosts[0])} --master-port {PORT}".split()
    program = ["-m", "exogym_core", "compare", str(experiment), "--out", str(out), *options]
    commands = {host: [*torchrun, "--node-rank", str(rank), *program] for rank, host in enumerate(hosts)}
    net.run(commands, seconds, NETGYM_SECRET="of these namespaces and no others")


def run_real_with_servers(
    experiment: Path, net: ShapedLinks, out: Path, options: list[str], seconds: float
) -> None:
    """Every rank in its host's namespace, forked by one process; a server comes after the workers."""
    hosts = with_servers(net.topology, EXPERIMENT["workers"]["count"], None, [1])
    places = [(str(NAMESPACES / net.namespace(host)), net.address(host)) for host in hosts or ()]
    options = [*options, *(word for name in NOT_REAL for word in ("--set", f"{name}=null"))]
    words = ["compare", str(experiment), "--out", str(out), "--set", "transport=gloo", *options]
    command = [*REALTIME, sys.executable, __file__, "--places", json.dumps(places), *words]
    subprocess.run(command, check=True, timeout=seconds, stdout=subprocess.DEVNULL)


def run_placed(places: list[tuple[str, str]], words: list[str]) -> None:
    """Run `netgym`, whose forked ranks enter their namespaces before they meet.

    Args:
        places: namespace and address of each rank.
        words: of the command.
    """

    class PlacedRendezvous(Rendezvous):
        def _open_store(self, again: bool = False, of_restart: bool = True) -> Any:
            namespace, address = places[self.rank]
            enter_namespace(Path(namespace))
            store = super()._open_store(again, of_restart)
            self.address = address
            return store

    vars(gloo)["Rendezvous"] = PlacedRendezvous
    sys.argv = ["netgym", *words]
    runpy.run_module("exogym_core", run_name="__main__")


def run_simulated(experiment: Path, out: Path, options: list[str]) -> None:
    command = [*REALTIME, *harness.NETGYM, "compare", str(experiment), "--out", str(out), *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def steps_of(folder: Path, name: str) -> list[dict[str, float]]:
    """Rows of one strategy's metrics: seconds at the end of each step, bytes sent so far, loss."""
    (path,) = [
        path
        for path in (folder / "metrics").glob("*.csv")
        if path.stem.replace("-", " ") == name.replace("-", " ")
    ]
    with open(path) as file:
        rows = list(csv.DictReader(file))
    clock = "wall_seconds" if "wall_seconds" in rows[0] else "virtual_seconds"
    return [
        {"seconds": float(row[clock]), "bytes": float(row["bytes_sent"]), "loss": float(row["train_loss"])}
        for row in rows
    ]


def compared(real: list[Path], simulated: Path) -> list[dict[str, Any]]:
    """One entry a strategy: medians over the real runs; the run is counted from the end of the first round.

    The first round, counted from the end of the first step, stands apart: in it real ranks begin some 10 ms after each
    other, connections start slowly, and tensors are touched for the first time.
    """
    experiment = yaml.safe_load((simulated / "experiment.yaml").read_text())
    entries = []
    for strategy in experiment["strategies"]:
        name = strategy.get("label", strategy["name"])
        length = strategy.get("H", 5)
        runs, model = [steps_of(folder, name) for folder in real], steps_of(simulated, name)
        marks = [0, *range(length - 1, len(model), length)]
        rounds = [_differences(run, marks) for run in runs]
        first = marks[1]
        entries.append(
            {
                "name": name,
                "round_steps": length,
                "real_rounds": [statistics.median(each) for each in zip(*rounds, strict=True)],
                "simulated_rounds": _differences(model, marks),
                "real_seconds": [run[-1]["seconds"] - run[first]["seconds"] for run in runs],
                "simulated_seconds": model[-1]["seconds"] - model[first]["seconds"],
                "real_bytes": runs[0][-1]["bytes"],
                "simulated_bytes": model[-1]["bytes"],
                "loss": max(
                    abs(one["loss"] / other["loss"] - 1)
                    for run in runs
                    for one, other in zip(run, model, strict=True)
                ),
            }
        )
    return entries


def _differences(steps: list[dict[str, float]], marks: list[int]) -> list[float]:
    ends = [steps[mark]["seconds"] for mark in marks]
    return [after - before for before, after in itertools.pairwise(ends)]


def print_table(entries: list[dict[str, Any]]) -> None:
    titles = (
        "strategy",
        "run after its first round, real s (each repetition)",
        "simulated s",
        "off",
        "rounds off (least, median, largest)",
        "first round off",
        "bytes off",
        "losses off",
    )
    harness.heading(*titles)
    for entry in entries:
        real, simulated = statistics.median(entry["real_seconds"]), entry["simulated_seconds"]
        pairs = zip(entry["real_rounds"], entry["simulated_rounds"], strict=True)
        first, *others = [model / measured - 1 for measured, model in pairs]
        off = sorted(others)
        times = ", ".join(f"{each:.2f}" for each in sorted(entry["real_seconds"]))
        harness.row(
            entry["name"],
            f"{real:.2f} ({times})",
            f"{simulated:.2f}",
            f"{simulated / real - 1:+.1%}",
            f"{off[0]:+.1%}, {statistics.median(off):+.1%}, {off[-1]:+.1%}",
            f"{first:+.1%}",
            f"{entry['simulated_bytes'] / entry['real_bytes'] - 1:+.2%}",
            f"{entry['loss']:.1e}",
        )


def write_experiments(folder: Path) -> tuple[Path, Path]:
    """Files of the strategies that torchrun runs, and of those with servers."""
    (folder / "four-shaped-sites.yaml").write_text(yaml.safe_dump(TOPOLOGY, sort_keys=False))
    paths = folder / "real-runs.yaml", folder / "real-runs-with-servers.yaml"
    for path, strategies in zip(paths, (EXPERIMENT["strategies"], SERVED), strict=True):
        experiment = {**EXPERIMENT, "strategies": strategies, "topology": "four-shaped-sites.yaml"}
        path.write_text(yaml.safe_dump(experiment, sort_keys=False))
    return paths


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--out", type=Path, help="keep the runs' folders here")
    parser.add_argument("--repeat", type=int, default=3, help="real runs, whose median counts (default 3)")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument(
        "--write", type=Path, metavar="DIR", help="write the experiment and its topology, and end"
    )
    parser.add_argument(
        "--table", type=Path, nargs=2, metavar=("REAL", "SIMULATED"), help="compare two folders, and end"
    )
    parser.add_argument(
        "--only", choices=("torchrun", "servers"), help="strategies without servers, or those with them"
    )
    args = parser.parse_args()
    if args.table:
        print_table(compared([args.table[0]], args.table[1]))
        return
    if args.write:
        print(*write_experiments(args.write), sep="\n")
        return
    if reason := why_not():
        sys.exit(f"real_runs: {reason}; to run it elsewhere: --help")
    out = args.out or Path(tempfile.mkdtemp(prefix="real-runs-"))
    out.mkdir(exist_ok=True, parents=True)
    options = [word for each in args.sets for word in ("--set", each)]
    entries = []
    for kind, experiment, run in zip(
        ("torchrun", "servers"), write_experiments(out), (run_real, run_real_with_servers), strict=True
    ):
        if args.only in (None, kind):
            entries += run_both(experiment, run, out / kind, options, args.repeat)
    (out / "compared.json").write_text(json.dumps(entries, indent=1))
    print_table(entries)
    for entry in entries:
        print(entry["name"])
        for kind in ("real", "simulated"):
            print(f"    {kind:9} rounds: " + " ".join(f"{each:.3f}" for each in entry[f"{kind}_rounds"]))
    if args.out is None:
        shutil.rmtree(out)


def run_both(
    experiment: Path, run: Callable[..., None], out: Path, options: list[str], repeat: int
) -> list[dict[str, Any]]:
    """Compare real runs with a simulated one; an entry a strategy."""
    out.mkdir(exist_ok=True)
    real = []
    for repetition in range(repeat):
        with ShapedLinks(Topology.load(experiment.parent / "four-shaped-sites.yaml")) as net:
            real.append(out / f"real-{repetition}")
            began, load = time.monotonic(), os.getloadavg()[0]
            run(experiment, net, real[-1], options, 1800.0)
            seconds = time.monotonic() - began
            print(
                f"real run {repetition}: {seconds:.0f} s, load {load:.1f}, dropped {net.drops()}", flush=True
            )
    run_simulated(experiment, out / "simulated", options)
    return compared(real, out / "simulated")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--places"]:
        run_placed(json.loads(sys.argv[2]), sys.argv[3:])
    else:
        main()
