"""NCCL's socket transport between shaped namespaces, without a GPU, and the model of nccl-sockets.

    sudo python benchmarks/nccl_transport.py [NUMBER OF SHAPES [SEED]]
    sudo python benchmarks/nccl_transport.py netem MILLISECONDS GBIT/S MIB [LOSS]
    sudo python benchmarks/nccl_transport.py tbf MBIT/S
    sudo python benchmarks/nccl_transport.py queues [NUMBER [SEED]]
    sudo python benchmarks/nccl_transport.py losses [NUMBER [SEED]]

`nccl_transport.c` does to Linux's sockets what NCCL 2.8.4 does, so steps, slices, credits, sockets and TCP are
measured, without kernels and copies. Shapes are drawn; their rates are low, since one machine carries all hosts. A line
is two calls back to back on new connections, and the same again.

`netem` repeats cells of aws-shaped-* with four hosts at their own rates and times: a warm-up and five rounds of the
three calls, as the source's script has them, behind `netem.c`; LOSS is the share of packets dropped at random. It needs
/dev/net/tun and half a core a Gbit/s. `tbf` repeats a synchronisation and a step of DDP of diloco-measured behind the
kernel's own tbf, three times. `queues` draws such hosts with other rates and queues, those of the second half too short
for two packets of each socket. `losses` draws hosts whose lines lose 0.01, 0.1 or 1 % of the packets, and prints six
calls without and with losses. Without root these two print the model's times alone.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness import REALTIME
from shaped_links import SETTINGS, ShapedLinks, allow_congestion_control, sh, why_not

import netsim
from netsim import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
        with ShapedLinks(self.topology()) as net:
            return seconds_of(net, program, self.sockets, [f"{op}:{self.mebibytes << 20}:{CALLS}"] * 2)


def seconds_of(net: ShapedLinks, program: Path, sockets: int, work: Sequence[str]) -> list[float]:
    """Seconds of each piece of work among the hosts of shaped links."""
    names = [host.name for host in net.topology.hosts]
    with commands(program, [net.address(name) for name in names], sockets, work) as lines:
        return [float(line) for line in net.run(dict(zip(names, lines, strict=True)), SECONDS)[0].split()]


@contextmanager
def commands(
    program: Path, addresses: Sequence[str], sockets: int, work: Sequence[str]
) -> Iterator[list[list[str]]]:
    """Command of each rank."""
    with tempfile.NamedTemporaryFile() as barrier:
        barrier.write(bytes(4096))
        barrier.flush()
        rest = [",".join(addresses), str(sockets), barrier.name, *work]
        yield [[str(program), str(rank), str(len(addresses)), *rest] for rank in range(len(addresses))]


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


def compile_c(name: str, folder: str) -> Path:
    """Compile a program beside this file."""
    program = Path(folder) / name
    source = Path(__file__).with_name(f"{name}.c")
    subprocess.run(["gcc", "-O2", "-o", str(program), str(source)], check=True)
    return program


def behind_netem(milliseconds: float, gigabits: float, mebibytes: int, loss: float) -> None:
    """Print seconds of rounds of the source's three calls among four hosts, and their means after the first."""
    num, part, names = 4, (mebibytes << 20) // 4, (f"netem{os.getpid()}-", "all_reduce", "central", "sharded")
    calls = (f"all_reduce:{part}:{num}", f"reduce+broadcast:{part}:{num}", f"exchange:{part}:2")
    limit = int(gigabits * 1500 * milliseconds * 1.5)  # tc_netem_delay_bandwdith.sh
    spaces = [f"{names[0]}{index}" for index in range(num)]
    rounds: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        program, netem = compile_c("nccl_transport", folder), compile_c("netem", folder)
        words = [names[0], num, milliseconds * 1e3, gigabits * 1e9, 9001, limit, loss]
        line = None
        try:
            with allow_congestion_control("cubic"):
                for space in spaces:
                    sh(f"ip netns add {space}")
                    sh(
                        f"ip netns exec {space} sysctl -q",
                        *(f"{key}={value}" for key, value in SETTINGS.items()),
                    )
            line = subprocess.Popen([str(netem), *map(str, words)], stdout=subprocess.PIPE, text=True)
            assert line.stdout is not None
            line.stdout.readline()
            addresses = [f"10.9.0.{index + 1}" for index in range(num)]
            with commands(program, addresses, 16, [*calls] * 6) as lines:
                started = [
                    subprocess.Popen(
                        ["ip", "netns", "exec", space, *REALTIME, *each], stdout=subprocess.PIPE, text=True
                    )
                    for space, each in zip(spaces, lines, strict=True)
                ]
                seconds = list(map(float, started[0].communicate(timeout=SECONDS)[0].split()))
            rounds = [seconds[at : at + 3] for at in range(0, len(seconds), 3)]
        finally:
            if line is not None:
                line.terminate()
                line.wait()
            for space in spaces:
                subprocess.run(["ip", "netns", "del", space], check=False)
    for name, each in zip(names[1:], zip(*rounds, strict=True), strict=True):
        print(name, f"mean {statistics.mean(each[1:]):.3f} s of", *(f"{one:.2f}" for one in each))


def behind_tbf(megabits: int) -> None:
    """Print seconds of 57 blocking all_reduces of DiLoCo, and of a broadcast and three all_reduces of DDP."""
    names = [f"h{index}" for index in range(4)]
    link = {"up": f"{megabits} Mbit/s", "down": "10 Gbit/s", "latency": "50 us", "mtu": 9001}
    star = {
        "hosts": names,
        "routers": ["switch"],
        "links": [{"between": [each, "switch"], **link} for each in names],
    }
    shaper = f"tbf rate {megabits}mbit burst 32768 latency 50ms"
    tensors = [50257 * 256] * 2 + [256 * 256] * 24 + [256 * 768] * 18 + [256] * 13
    work = {
        "DiLoCo": [f"all_reduce:{4 * size}:1" for size in tensors],
        "DDP": ["broadcast:50331648:1", *(f"all_reduce:{size}:1" for size in (51463168, 20447232, 51463168))],
    }
    with tempfile.TemporaryDirectory() as folder:
        program = compile_c("nccl_transport", folder)
        for name, calls in work.items():
            with ShapedLinks(Topology.from_mapping(star), shaper=shaper) as net:
                seconds = seconds_of(net, program, 16, calls * 3)
            num = len(calls)
            print(name, *(f"{sum(seconds[at : at + num]):.2f} s" for at in range(0, len(seconds), num)))


class Queued(NamedTuple):
    """Hosts whose own lines are shaped by tbf with a short queue."""

    op: str
    hosts: int
    megabits: int
    milliseconds: int
    sockets: int
    mtu: int

    @property
    def queue(self) -> int:
        """Packets that tbf's queue holds: its latency and burst."""
        return int((self.megabits * 125 * self.milliseconds + 32768) / (self.mtu + 14))

    @property
    def is_short(self) -> bool:
        return self.queue < 2 * 2 * self.sockets

    @property
    def num_bytes(self) -> int:
        """Bytes that take the line three seconds."""
        share = 2 * (self.hosts - 1) / self.hosts if self.op == "all_reduce" else 1.0
        return int(self.megabits * 125_000 * 3 / share)

    def topology(self, *, is_declared: bool = True) -> Topology:
        names = [f"h{index}" for index in range(self.hosts)]
        link: dict[str, Any] = {
            "up": f"{self.megabits} Mbit/s",
            "down": "10 Gbit/s",
            "latency": "50 us",
            "mtu": self.mtu,
        }
        if is_declared:
            link["queue"] = self.queue
        links = [{"between": [name, "switch"], **link} for name in names]
        return Topology.from_mapping({"hosts": names, "routers": ["switch"], "links": links})

    def model(self, *, is_declared: bool = True) -> float:
        """Seconds of two calls by the model, the second time."""
        streams = {"preset": "nccl-sockets", "socket_threads": 1, "sockets_per_thread": self.sockets}
        return netsim.collective(
            self.topology(is_declared=is_declared),
            self.op,
            num_bytes=self.num_bytes,
            algorithm="nccl-ring",
            protocol=streams,
            calls=CALLS,
            repeat=2,
        ).seconds

    def cells(self) -> list[Any]:
        """The hosts, their queue, and the model's seconds without and with it."""
        return [*self, self.queue, f"{self.model(is_declared=False):.3f}", f"{self.model():.3f}"]

    def measured(self, program: Path) -> list[float]:
        """Seconds of two calls, three times on the same connections."""
        shaper = f"tbf rate {self.megabits}mbit burst 32768 latency {self.milliseconds}ms"
        with ShapedLinks(self.topology(), shaper=shaper) as net:
            return seconds_of(net, program, self.sockets, [f"{self.op}:{self.num_bytes}:{CALLS}"] * 3)


def draw_queued(number: int, seed: int) -> list[Queued]:
    """As many hosts of any kind, and as many whose queues are short."""
    chance = random.Random(seed)
    found: dict[bool, list[Queued]] = {False: [], True: []}
    while len(found[True]) < number:
        shape = Queued(
            chance.choice(("all_reduce", "all_reduce", "reduce", "broadcast")),
            chance.randint(2, 5),
            round(20 * 25 ** chance.random()),
            round(10 * 20 ** chance.random()),
            chance.choice((1, 2, 4, 8, 16)),
            chance.choice((1500, 9001)),
        )
        only_short = len(found[False]) == number
        if not only_short or shape.is_short:
            found[only_short].append(shape)
    return found[False] + found[True]


class Lossy(NamedTuple):
    """Hosts around one switch, on whose paths packets are lost at random."""

    op: str
    hosts: int
    megabits: int
    milliseconds: int
    sockets: int
    mtu: int
    percent: float

    @property
    def num_bytes(self) -> int:
        """Bytes that take the line two seconds."""
        share = 2 * (self.hosts - 1) / self.hosts if self.op == "all_reduce" else 1.0
        return int(self.megabits * 125_000 * 2 / share)

    def topology(self, *, is_lossy: bool) -> Topology:
        names = [f"h{index}" for index in range(self.hosts)]
        link: dict[str, Any] = {
            "up": f"{self.megabits} Mbit/s",
            "down": "2 Gbit/s",
            "latency": f"{self.milliseconds / 4} ms",
            "mtu": self.mtu,
            "loss": f"{self.percent / 2 if is_lossy else 0} %",
        }
        links = [{"between": [name, "switch"], **link} for name in names]
        return Topology.from_mapping({"hosts": names, "routers": ["switch"], "links": links})

    def model(self, *, is_lossy: bool) -> float:
        """Mean seconds of a call after the first by the model."""
        streams = {"preset": "nccl-sockets", "socket_threads": 1, "sockets_per_thread": self.sockets}
        return statistics.mean(
            netsim.collective(
                self.topology(is_lossy=is_lossy),
                self.op,
                num_bytes=self.num_bytes,
                algorithm="nccl-ring",
                protocol=streams,
                repeat=repeat,
            ).seconds
            for repeat in range(2, 7)
        )

    def cells(self) -> list[Any]:
        """The hosts, and the model's seconds without and with losses."""
        return [*self, *(f"{self.model(is_lossy=is_lossy):.3f}" for is_lossy in (False, True))]

    def measured(self, program: Path) -> list[float]:
        """Seconds of six calls on the same connections without losses, then of six with them."""
        found: list[float] = []
        for is_lossy in (False, True):
            with ShapedLinks(self.topology(is_lossy=is_lossy)) as net:
                found += seconds_of(net, program, self.sockets, [f"{self.op}:{self.num_bytes}:1"] * 6)
        return found


def draw_lossy(number: int, seed: int) -> list[Lossy]:
    """Hosts whose lines this machine carries together."""
    chance = random.Random(seed)
    found: list[Lossy] = []
    while len(found) < number:
        shape = Lossy(
            chance.choice(("all_reduce", "all_reduce", "reduce", "broadcast")),
            chance.randint(2, 4),
            round(40 * 10 ** chance.random()),
            round(10 * 15 ** chance.random()),
            chance.choice((1, 2, 4, 8, 16)),
            chance.choice((1500, 9001)),
            chance.choice((0.01, 0.1, 1.0)),
        )
        if shape.hosts * shape.megabits <= (500 if shape.mtu == 1500 else 1200):
            found.append(shape)
    return found


DRAWN: dict[str, Callable[[int, int], Sequence[Queued | Lossy]]] = {
    "queues": draw_queued,
    "losses": draw_lossy,
}


def compare_drawn(kind: str, number: int = 8, seed: int = 1) -> None:
    """Print drawn hosts, the model's seconds, and the transport's: behind tbf, or without and with losses."""
    reason = why_not()
    with tempfile.TemporaryDirectory() as folder:
        program = compile_c("nccl_transport", folder)
        for shape in DRAWN[kind](number, seed):
            cells = shape.cells()
            if not reason:
                cells += [f"{seconds:.2f}" for seconds in shape.measured(program)]
            print(*cells, sep="\t", flush=True)


def main(arguments: list[str]) -> None:
    if arguments and arguments[0] in DRAWN:
        compare_drawn(arguments[0], *map(int, arguments[1:]))
        return
    if reason := why_not():
        sys.exit(f"nccl_transport: {reason}")
    if arguments[:1] == ["netem"]:
        milliseconds, gigabits, mebibytes, loss = map(float, [*arguments[1:], "0"][:4])
        behind_netem(milliseconds, gigabits, int(mebibytes), loss)
        return
    if arguments[:1] == ["tbf"]:
        behind_tbf(int(arguments[1]))
        return
    number, seed = (*map(int, arguments), *(6, 1)[len(arguments) :])
    errors: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = compile_c("nccl_transport", folder)
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
