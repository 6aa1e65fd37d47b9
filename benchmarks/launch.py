"""What the torch.distributed backend costs in host time, beside gloo: ranks forked from one warm process.

    python benchmarks/launch.py [RANKS] [BACKEND ...]

Prints, for each backend, start-up, an all-reduce of 4 bytes and one of 25 MB: seconds of the clock, and seconds of
the processor, of all processes together. Times are of an idle machine or they are nothing; the processor's are less
easily disturbed.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
import time

import torch
import torch.distributed as dist

import exogym_core.torch_backend  # noqa: F401 (registers netsim)

CASES = {"4 bytes": (1, 200), "25 MB": (25_000_000 // 4, 5)}


def cpu_seconds() -> float:
    """Of this process."""
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


def rank(
    index: int, size: int, backend: str, path: str, told: multiprocessing.Queue[tuple[str, float, float]]
) -> None:
    begin, spent = time.perf_counter(), cpu_seconds()
    dist.init_process_group(backend, init_method=f"file://{path}", rank=index, world_size=size)
    dist.barrier()
    told.put(("start", time.perf_counter() - begin, cpu_seconds() - spent))
    for name, (count, times) in CASES.items():
        tensor = torch.ones(count)
        dist.all_reduce(tensor)
        dist.barrier()
        begin, spent = time.perf_counter(), cpu_seconds()
        for _ in range(times):
            dist.all_reduce(tensor)
        dist.barrier()
        told.put((name, (time.perf_counter() - begin) / times, (cpu_seconds() - spent) / times))
    dist.destroy_process_group()


def measure(backend: str, size: int) -> None:
    """Print what one backend takes."""
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        ranks = [context.Process(target=rank, args=(i, size, backend, path, told)) for i in range(size)]
        for each in ranks:
            each.start()
        rows = [told.get() for _ in range(size * (1 + len(CASES)))]
        for each in ranks:
            each.join()
    for name in ("start", *CASES):
        wall = max(seconds for row, seconds, _ in rows if row == name)
        cpu = sum(seconds for row, _, seconds in rows if row == name)
        print(
            f"{backend:8} {name:8} {wall * 1e3:10.2f} ms   ranks' processors {cpu * 1e3:10.2f} ms", flush=True
        )


if __name__ == "__main__":
    os.environ["NETGYM_COMPUTE"] = "marks"
    torch.set_num_threads(1)
    num_ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    for name in sys.argv[2:] or ["gloo", "netsim"]:
        measure(name, num_ranks)
