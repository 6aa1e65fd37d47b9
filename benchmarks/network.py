"""The network against SimGrid and ns-3: how fast; how right is shown by benchmarks/accuracy.py.

    python benchmarks/network.py     seconds against SimGrid's, side by side where it is installed

SimGrid is taken from the system (Debian: libsimgrid-dev and g++); otherwise its recorded seconds are used,
which stem from another machine. Start-up and set-up are left out on both sides.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "golden"))

import simgrid_cases  # noqa: E402

from netsim import Clock, Network, schedule, start_collective  # noqa: E402
from netsim.network.build import runs_compiled  # noqa: E402
from netsim.transfers import time_flows  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from netsim import Topology

# Seconds of whole processes, as recorded: 2 cores, quiet.
RECORDED = {
    "star64.a2a64": 0.05,
    "star256.a2a256": 1.0,
    "wan4_256.a2a256": 0.7,
    "random100.random_steady": 0.7,
    "random100.random_burst": 10.8,
}
RECORDED_RINGS = {("star", 256): 0.43, ("wan4", 256): 0.5, ("wan4 round robin", 256): 0.5, ("star", 64): 0.05}


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def build_simgrid(folder: Path) -> Path | None:
    """The SimGrid program, compiled; None where that is not possible."""
    if shutil.which("g++") is None:
        return None
    program = folder / "simgrid_flows"
    command = ["g++", "-O2", "-std=c++17", str(HERE / "simgrid_flows.cpp"), "-o", str(program), "-lsimgrid"]
    return program if subprocess.run(command, capture_output=True, check=False).returncode == 0 else None


def simgrid_seconds(
    program: Path, folder: Path, topology: Topology, rows: list[simgrid_cases.Row], finish: np.ndarray
) -> float:
    """Seconds SimGrid takes to simulate transfers: the faster of its two solvers, of those that agree with us."""
    hosts = [(topology.host_index(row[1]), topology.host_index(row[2])) for row in rows]
    # SimGrid weighs shares by latency, so latencies are waited for before the transfers start.
    ready = [row[0] + topology.route_latency_seconds(*pair) for row, pair in zip(rows, hosts, strict=True)]
    order = sorted(range(len(rows)), key=lambda number: ready[number])
    pairs = sorted(set(hosts))
    lines = [f"{len(topology.hosts)} {len(topology.links)} {len(pairs)} {len(rows)}"]
    lines += [f"{link.bits_per_second / 8} 0" for link in topology.links]
    for source, target in pairs:
        route = topology.route(source, target)
        lines.append(f"{source} {target} {len(route)} {' '.join(map(str, route))}")
    lines += [f"{ready[i]!r} {hosts[i][0]} {hosts[i][1]} {rows[i][3]}" for i in order]
    (folder / "case.txt").write_text("\n".join(lines) + "\n")
    taken = []
    for solver in ("Full", "Lazy"):
        command = [str(program), str(folder / "case.txt"), str(folder / "result.txt")]
        command += [f"--cfg=network/optim:{solver}", "--log=root.thresh:error"]
        finished = subprocess.run(command, capture_output=True, check=True, text=True)
        theirs = np.loadtxt(folder / "result.txt")
        if np.allclose(theirs, finish[order], rtol=1e-6, atol=1e-6):
            taken.append(float(finished.stdout.split()[-1]))
    return min(taken)


def show_flow_speed(program: Path | None, folder: Path) -> None:
    source = "beside" if program else "recorded"
    print(f"{'transfers':28}{'number':>8}{'netsim s':>10}{'SimGrid s':>11} ({source})   ratio")
    for name, recorded in RECORDED.items():
        topology, rows = simgrid_cases.case(name)
        time_rows = partial(time_flows, topology, rows, "ideal")
        finish = time_rows()  # finds the routes
        ours = seconds_of(time_rows)
        theirs = simgrid_seconds(program, folder, topology, rows, finish) if program else recorded
        print(f"{name:28}{len(rows):8}{ours:10.3f}{theirs:11.3f}{ours / theirs:19.2f}")


def ring_seconds(topology: Topology, hosts: list[int]) -> tuple[float, float]:
    """A ring all-reduce of 100 MB, message by message: host seconds, and virtual seconds until all are done."""
    clock = Clock()
    made = schedule("all_reduce", len(hosts), num_bytes=100_000_000, algorithm="ring")
    ring = start_collective(Network(clock, topology, "ideal"), made, hosts, on_done=lambda member: None)
    begin = time.perf_counter()
    for member in range(len(hosts)):
        ring.arrive(member)
    clock.run()
    return time.perf_counter() - begin, clock.now


def show_ring_speed() -> None:
    head = f"{'ring all-reduce, 100 MB':28}{'hosts':>8}{'virtual s':>12}{'netsim s':>10}"
    print(f"\n{head}{'SimGrid s':>11} (recorded)")
    for (name, num), recorded in RECORDED_RINGS.items():
        topology = simgrid_cases.star(num) if name == "star" else simgrid_cases.wan4(num)
        hosts = [i % 4 * (num // 4) + i // 4 for i in range(num)] if "robin" in name else list(range(num))
        taken, virtual = ring_seconds(topology, hosts)
        print(f"{name:28}{num:8}{virtual:12.5f}{taken:10.3f}{recorded:11.2f}   ratio {taken / recorded:.2f}")


def main() -> None:
    versions = f"Python {platform.python_version()}, numpy {np.__version__}"
    engine = "compiled" if runs_compiled() else "interpreted"
    print(f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {versions}, engine {engine}\n")
    with tempfile.TemporaryDirectory() as name:
        show_flow_speed(build_simgrid(Path(name)), Path(name))
    show_ring_speed()


if __name__ == "__main__":
    main()
