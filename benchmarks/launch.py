"""Host time of the torch.distributed backend, alongside gloo and a lower bound.

    python benchmarks/launch.py [RANKS] [calls] [starts] [large]

Prints all-reduces of 4 bytes and of 25 MB among forked processes: over gloo, over netsim, as bare as can be (messages
to one process and back; values copied to shared memory, added up there piece by piece, and copied back); then how
long programs take that start, meet once and end: under torchrun with gloo, under torchrun with netsim, under `netgym
launch`; then what each all-reduce of 123 MB takes of all processors, the simulating process's included, under torchrun
with gloo and under `netgym launch`. Seconds of the clock, and of the processor. Times are of an idle machine or they
are nothing; as root, `chrt -r 10 python benchmarks/launch.py` makes one of a busy machine.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import harness
import torch
import torch.distributed as dist

import netgym.launch  # noqa: F401 (registers netsim)

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = {"4 bytes": (1, 1000), "25 MB": (25_000_000 // 4, 20)}
LARGE_CALLS = 20
PROGRAM = """
import sys, torch, torch.distributed as dist
if sys.argv[1] == "netsim":
    import netgym.launch
dist.init_process_group(sys.argv[1])
values = torch.ones(int(sys.argv[2]))
for _ in range(int(sys.argv[3])):
    dist.all_reduce(values)
dist.barrier()
dist.destroy_process_group()
"""
Row = tuple[str, float, float]
Ends = list[tuple[socket.socket, socket.socket]]


def timed(name: str, times: int, call: Callable[[], object]) -> Row:
    """Seconds of the clock and of this process's processor that each of several calls takes."""
    begin, spent = time.perf_counter(), harness.cpu_seconds()
    for _ in range(times):
        call()
    return name, (time.perf_counter() - begin) / times, (harness.cpu_seconds() - spent) / times


def rank(index: int, size: int, backend: str, path: str, found: multiprocessing.Queue[Row]) -> None:
    dist.init_process_group(backend, init_method=f"file://{path}", rank=index, world_size=size)
    for name, (count, times) in CASES.items():
        tensor = torch.ones(count)
        for _ in range(3):
            dist.all_reduce(tensor)
        # The simulation finds the fastest algorithm while ranks go on: it is asked something, and has to come along.
        dist.all_reduce(tensor, async_op=True).is_completed()
        dist.barrier()
        found.put(timed(name, times, lambda tensor=tensor: dist.all_reduce(tensor)))
    dist.destroy_process_group()


def bare(index: int, size: int, fd: int, ends: Ends, found: multiprocessing.Queue[Row]) -> None:
    """A rank that sends to a hub and waits for it; its values lie in shared memory."""
    end, memory = ends[index][1], mmap.mmap(fd, 0)
    for name, (count, times) in CASES.items():
        tensor = torch.ones(count)
        mine, result = (
            torch.frombuffer(memory, dtype=torch.float32, count=count, offset=at << 25)
            for at in (index, size)
        )

        def call(
            tensor: torch.Tensor = tensor, mine: torch.Tensor = mine, result: torch.Tensor = result
        ) -> None:
            mine.copy_(tensor)
            end.send(b"x" * 100)
            end.recv(100)
            tensor.copy_(result)

        call()
        found.put(timed(name, times, call))


def hub(size: int, fd: int, ends: Ends) -> None:
    """Hears from all ranks, adds up, and answers."""
    memory = mmap.mmap(fd, 0)
    for count, times in CASES.values():
        parts = [
            torch.frombuffer(memory, dtype=torch.float32, count=count, offset=at << 25)
            for at in range(size + 1)
        ]
        pieces = list(zip(*(part.split(1 << 18) for part in parts), strict=True))
        for _ in range(times + 1):
            for end, _ in ends:
                end.recv(100)
            for *given, result in pieces:
                result.copy_(given[0])
                for other in given[1:]:
                    result.add_(other)
            for end, _ in ends:
                end.send(b"x" * 100)


def report(backend: str, rows: list[Row]) -> None:
    """Print the slowest clock, and all processors together."""
    for name in dict.fromkeys(row for row, _, _ in rows):
        wall = max(seconds for row, seconds, _ in rows if row == name)
        cpu = sum(seconds for row, _, seconds in rows if row == name)
        print(
            f"{backend:8} {name:8} {wall * 1e3:10.2f} ms   ranks' processors {cpu * 1e3:10.2f} ms", flush=True
        )


def calls(size: int) -> None:
    """Print what calls take."""
    context = multiprocessing.get_context("fork")
    for backend in ("gloo", "netsim", "bare"):
        found = context.Queue()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "store")
            if backend == "bare":
                fd, ends = os.memfd_create("bare"), [socket.socketpair() for _ in range(size)]
                os.ftruncate(fd, (size + 1) << 25)
                ranks = [context.Process(target=bare, args=(i, size, fd, ends, found)) for i in range(size)]
                ranks.append(context.Process(target=hub, args=(size, fd, ends)))
            else:
                ranks = [
                    context.Process(target=rank, args=(i, size, backend, path, found)) for i in range(size)
                ]
            for each in ranks:
                each.start()
            rows = [found.get() for _ in range(size * len(CASES))]
            for each in ranks:
                each.join()
        report(backend, rows)


def spent_on(command: list[str], script: Path, *arguments: object) -> tuple[float, float]:
    """Seconds of the clock, and of all processors, that a command takes with a script."""
    script.write_text(PROGRAM)
    before, begin = harness.cpu_seconds(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([*command, str(script), *map(str, arguments)], check=True, capture_output=True)
    return time.perf_counter() - begin, harness.cpu_seconds(resource.RUSAGE_CHILDREN) - before


def commands(size: int) -> tuple[list[str], list[str]]:
    """Commands that start ranks: torchrun, and `netgym launch`."""
    torchrun = [sys.executable, *f"-m torch.distributed.run --standalone --nproc-per-node={size}".split()]
    return torchrun, [*harness.NETGYM, "launch", f"-n{size}", "--compute=marks"]


def starts(size: int) -> None:
    """Print what starting takes."""
    torchrun, launch = commands(size)
    with tempfile.TemporaryDirectory() as folder:
        for name, command, backend in (
            ("torchrun, gloo", torchrun, "gloo"),
            ("torchrun, netsim", torchrun, "netsim"),
            ("netgym launch", launch, "netsim"),
        ):
            wall, cpu = spent_on(command, Path(folder, "program.py"), backend, 0, 0)
            print(f"{name:17} {wall:10.2f} s    processors {cpu:10.2f} s", flush=True)


def large(size: int) -> None:
    """Print what an all-reduce of 123 MB takes of all processors: a program with some less the same without."""
    with tempfile.TemporaryDirectory() as folder:
        for name, command in zip(("torchrun, gloo", "netgym launch"), commands(size), strict=True):
            without, whole = (
                spent_on(command, Path(folder, "program.py"), "gloo", 123_000_000 // 4, 2 + calls)[1]
                for calls in (0, LARGE_CALLS)
            )
            cpu = (whole - without) / LARGE_CALLS
            print(f"{name:17} 123 MB     all processors {cpu * 1e3:10.2f} ms", flush=True)


if __name__ == "__main__":
    os.environ["NETGYM_COMPUTE"] = "marks"
    torch.set_num_threads(1)
    given = sys.argv[1:]
    num_ranks = int(given.pop(0)) if given and given[0].isdigit() else 8
    for part in given or ["calls", "starts", "large"]:
        {"calls": calls, "starts": starts, "large": large}[part](num_ranks)
