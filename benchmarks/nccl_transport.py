"""NCCL's socket transport between shaped namespaces, without a GPU, and the model of nccl-sockets.

    sudo python benchmarks/nccl_transport.py [NUMBER OF SHAPES [SEED]]

`nccl_transport.c` does to Linux's sockets what NCCL 2.8.4 does, so steps, slices, credits, sockets and TCP are
measured, without kernels and copies. Shapes are drawn; their rates are low, since one machine carries all hosts. A line
is two calls back to back on new connections, and the same again.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from shaped_links import ShapedLinks, why_not

import netsim
from netsim import Topology

OPERATIONS = ("all_reduce", "reduce", "broadcast")
CALLS = 2
SECONDS = 600.0


class Shape(NamedTuple):
    """Hosts around one switch, each with its own line out, and the sockets of a connection."""

    hosts: int
    megabits: int
    milliseconds: int
    sockets: int
    mebibytes: int

    def topology(self) -> Topology:
        names = [f"h{index}" for index in range(self.hosts)]
        link: dict[str, Any] = {
            "up": f"{self.megabits} Mbit/s",
            "down": "2 Gbit/s",
            "latency": f"{self.milliseconds / 4} ms",
            "queue": 20_000,
            "mtu": 9001,
        }
        links = [{"between": [name, "switch"], **link} for name in names]
        return Topology.from_mapping({"hosts": names, "routers": ["switch"], "links": links})

    def model(self, op: str, repeat: int) -> float:
        """Seconds of the calls by the model, the last time of `repeat`."""
        streams = {"preset": "nccl-sockets", "socket_threads": 1, "sockets_per_thread": self.sockets}
        result = netsim.collective(
            self.topology(),
            op,
            num_bytes=self.mebibytes << 20,
            algorithm="nccl-ring",
            protocol=streams,
            calls=CALLS,
            repeat=repeat,
        )
        return result.seconds

    def measured(self, op: str, program: Path) -> list[float]:
        """Seconds of the calls on new connections, and again."""
        with ShapedLinks(self.topology()) as net, tempfile.NamedTemporaryFile() as barrier:
            barrier.write(bytes(4096))
            barrier.flush()
            names = [host.name for host in net.topology.hosts]
            work = [f"{op}:{self.mebibytes << 20}:{CALLS}"] * 2
            commands = {
                name: [
                    str(program),
                    str(index),
                    str(len(names)),
                    net.address(names[(index + 1) % len(names)]),
                    str(self.sockets),
                    barrier.name,
                    *work,
                ]
                for index, name in enumerate(names)
            }
            return [float(line) for line in net.run(commands, SECONDS)[0].split()]


def draw(number: int, seed: int) -> list[Shape]:
    """Shapes whose lines take about ten seconds for the calls."""
    chance = random.Random(seed)
    shapes = []
    for _ in range(number):
        hosts, megabits = chance.choice((2, 4, 6)), chance.choice((50, 100, 150))
        mebibytes = megabits * 10 // 16
        shapes.append(
            Shape(hosts, megabits, chance.randint(10, 250), chance.choice((1, 4, 16)), mebibytes // 2)
        )
    return shapes


def main(arguments: list[str]) -> None:
    if reason := why_not():
        sys.exit(f"nccl_transport: {reason}")
    number, seed = (*map(int, arguments), *(6, 1)[len(arguments) :])
    errors: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "nccl_transport"
        source = Path(__file__).with_suffix(".c")
        subprocess.run(["gcc", "-O2", "-o", str(program), str(source)], check=True)
        print(
            "| hosts | Mbit/s | round trip | sockets | MiB | operation | new: real | model | again: real | model |"
        )
        print("|---|---|---|---|---|---|---|---|---|---|")
        for shape in draw(number, seed):
            for op in OPERATIONS:
                cells = []
                for repeat, real in enumerate(shape.measured(op, program), 1):
                    error = shape.model(op, repeat) / real - 1
                    errors.setdefault(op, []).append(error)
                    cells += [f"{real:.2f} s", f"{error:+.1%}"]
                words = (
                    shape.hosts,
                    shape.megabits,
                    f"{shape.milliseconds} ms",
                    shape.sockets,
                    shape.mebibytes,
                    op,
                )
                print("|", " | ".join(map(str, (*words, *cells))), "|", flush=True)
    for op, some in (*errors.items(), ("all", [error for each in errors.values() for error in each])):
        sizes = sorted(map(abs, some))
        print(f"{op}: {len(some)} figures, median {statistics.median(sizes):.1%}, largest {sizes[-1]:.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
