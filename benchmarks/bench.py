"""This checkout against another commit, row by row: processor seconds, wall seconds and memory, in turns.

    make bench                    against the last release; AGAINST=COMMIT names another, ROWS=list some rows
    make bench-gate               the same with nine rounds: fails, and names rows and held figures 5 % worse
    python benchmarks/bench.py [ROW]... [--against CHECKOUT] [--rounds 3] [--limit 1.05]

Each row runs in a process of its own, first by one checkout's code and then by the other's, and the best of some
rounds counts. Wall time depends on what else the machine does, processor time less so: its ratio is printed, in bold
above 1.1. Figures that releases hold, most of them a row's over another's, follow with their goals, of the rows that
were measured: ROW may be a part of such a figure's name. With `--limit`, a row fails whose processor time or peak
memory exceeds the other checkout's by more than that factor both in the best rounds and in the medians, so that a
busy moment of the machine fails no row; so does a held figure.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import harness

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Figures: TypeAlias = dict[str, float] | None  # of a row; None where it cannot run
MARKED = 1.1
HERE = Path(__file__).parent


def command(*arguments: str) -> float:
    """Processor seconds of a command line from its first instant: `netgym` or `netsim` and its arguments."""
    program = {"netgym": harness.NETGYM, "netsim": harness.NETSIM}[arguments[0]]
    before = harness.cpu_seconds(resource.RUSAGE_CHILDREN)
    subprocess.run([*program, *arguments[1:]], check=True, stdout=subprocess.DEVNULL)
    return harness.cpu_seconds(resource.RUSAGE_CHILDREN) - before


def large_collective() -> float:
    """`netsim collective` on 1,024 hosts in four regions."""
    regions = {name: {"hosts": 256, "nic": "10 Gbit/s", "latency": "50 us"} for name in "abcd"}
    wan = [
        {"between": list(pair), "bandwidth": "1 Gbit/s", "latency": "40 ms"}
        for pair in ("ab", "bc", "cd", "da")
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump({"regions": regions, "wan": wan}, file)
        file.flush()
        return command("netsim", "collective", file.name, "all_reduce", "--bytes", "25 MB")


def trained(preset: str, workers: str, nodes: int, steps: int) -> None:
    """`fit` of a GPT with DiLoCo, or a plain loop, imports included; `byte` has a million parameters, `wide` ten."""
    import torch

    from exogym_core import LocalTrainer, OptimSpec
    from exogym_core.strategy import DiLoCoStrategy
    from netgym.tasks import build_model, build_task

    task = build_task("text", num_bytes=200_000)
    sizes: dict[str, dict[str, Any]] = {
        "byte": {"preset": "byte"},
        "wide": {"preset": "byte", "num_layers": 6, "width": 384, "num_heads": 6},
    }
    model = build_model("gpt", task=task, seed=0, **sizes[preset])
    if workers == "loop":
        import training

        torch.set_num_threads(1)
        loop = training.Loop(training.Case(preset, task, model, 2, steps), nodes, diloco=True)
        for _ in range(steps):
            loop.step()
        return
    strategy = DiLoCoStrategy(OptimSpec(torch.optim.AdamW, lr=1e-3), H=10)
    options: dict[str, Any] = {"strategy": strategy, "num_nodes": nodes, "batch_size": 2, "val_size": 0}
    LocalTrainer(model, task.train, None).fit(**options, max_steps=steps, device="cpu", workers=workers)


def worker_steps(name: str, kind: str) -> float:
    """Processor seconds of 60 steps of eight workers with the digits MLP; see benchmarks/training.py."""
    import training

    importlib.import_module("torch._dynamo")  # as the first optimizer would
    case = next(iter(training.cases(quick=True)))
    strategy = training.STRATEGIES[name]()
    began = time.process_time()
    if kind == "loop":
        training.Loop(case, 8, name == "DiLoCo").seconds(case.steps)
    else:
        training.carried_seconds(case, 8, strategy, kind, None)
    return time.process_time() - began


def replica_steps(kind: str) -> float:
    """Processor seconds of a step of one of 64 replicas of an MLP of 676 parameters with DiLoCo, H = 10."""
    import torch
    from torch import nn

    from exogym_core import OptimSpec, Trainer
    from exogym_core.strategy import DiLoCoStrategy

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

        def forward(self, batch: Any) -> Any:
            return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    torch.manual_seed(0)
    torch.set_num_threads(1)
    features = torch.randn(4_000, 16)
    data = torch.utils.data.TensorDataset(features, features[:, :4].argmax(1))
    strategy = partial(DiLoCoStrategy, OptimSpec(torch.optim.AdamW, lr=1e-3), H=10)
    options: dict[str, Any] = {"num_nodes": 64, "batch_size": 8, "val_size": 0, "device": "cpu"}
    options |= {"topology": "wan-4-regions", "compute": {"fixed": "50 ms", "jitter": 0.3}}

    def seconds(steps: int) -> float:
        began = time.process_time()
        fit = Trainer(Small(), data, None).fit
        fit(strategy=strategy(), workers=kind, max_steps=steps, progress=False, **options)
        return time.process_time() - began

    seconds(20)
    short, long = (min(seconds(steps) for _ in range(3)) for steps in (20, 120))
    return (long - short) / 100 / 64


def collective(*row: Any) -> float:
    """Processor seconds of one ring all-reduce; see benchmarks/collectives.py."""
    import collectives

    return float(collectives.seconds_a_collective(*row))


def schedule_cases(op: str, num_cases: int = 500) -> float:
    """Processor seconds of a case of `check_schedule`, by the operation's first algorithm."""
    from netsim.collectives.schedules.algorithms import ALGORITHMS
    from netsim.testing import check_schedule

    row = next(iter(ALGORITHMS[op].values()))
    check_schedule(row, op, cases=20, seed=1)
    began = time.process_time()
    check_schedule(row, op, cases=num_cases, seed=0)
    return (time.process_time() - began) / num_cases


def rank_cases(num_cases: int = 200) -> float:
    """Processor seconds of a program of `check_collective` in threads: a ring all-gather made of messages."""
    import torch

    from exogym_core.testing import check_collective

    torch.set_num_threads(1)

    def ring(comm: Any, tensor: Any) -> Any:
        parts = [torch.empty_like(tensor) for _ in range(comm.world_size)]
        parts[comm.rank] = tensor.clone()
        for step in range(comm.world_size - 1):
            sent = comm.isend(parts[comm.rank - step], (comm.rank + 1) % comm.world_size)
            comm.recv(parts[comm.rank - step - 1], (comm.rank - 1) % comm.world_size)
            sent.wait()
        return parts

    began = time.process_time()
    check_collective(ring, "all_gather", cases=num_cases, seed=0, places=[], layouts=["plain"])
    return (time.process_time() - began) / num_cases


def equal_steps(num_steps: int = 2_000) -> float:
    """Processor seconds of a rank's step: `advance` and `all_reduce` of 4 kB, 8 ranks in threads."""
    import torch

    from exogym_core.workers.run import run_ranks

    torch.set_num_threads(1)

    def body(comm: Any) -> None:
        tensor = torch.ones(1_000)
        for _ in range(num_steps):
            comm.advance(0.05)
            comm.all_reduce(tensor, "avg")

    spent = []
    for _ in range(2):  # the first finds routes and schedules
        began = time.process_time()
        run_ranks(body, 8, topology="wan-4-regions", protocol="ideal")
        spent.append((time.process_time() - began) / num_steps / 8)
    return min(spent)


def demo(jobs: int) -> float:
    """`netgym compare` of the demo: twelve runs, `jobs` at a time."""
    with tempfile.TemporaryDirectory() as folder:
        return command("netgym", "compare", "examples/digits_wan.yaml", "--jobs", str(jobs), "--out", folder)


def launched_all_reduces(num_ranks: int, num_bytes: int, times: int) -> float:
    """Processor seconds of `netgym launch` of a script that all-reduces fp32, start and end included."""
    script = f"""
import torch, torch.distributed as dist
dist.init_process_group("gloo")
values = torch.ones({num_bytes // 4})
for _ in range({times}):
    dist.all_reduce(values)
dist.destroy_process_group()
"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(script)
        file.flush()
        words = ["-n", str(num_ranks), "--topology", "wan-4-regions", "--compute", "marks", file.name]
        return command("netgym", "launch", *words)


def planned(strategy: str) -> float:
    """Processor seconds of `netgym plan` of 70B parameters on 64 workers; see benchmarks/plans.py."""
    import plans

    return command("netgym", *plans.words(strategy, Path()), "--json")


def rank_steps(steps: int) -> float:
    """Processor seconds of a million rank-steps; see benchmarks/endurance.py."""
    import endurance

    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        endurance.run(steps)
    return (time.process_time() - began) / steps / endurance.RANKS * 1e6


ROWS: dict[str, Callable[[], float | None]] = {
    **{f"a case of check_schedule, {op}": partial(schedule_cases, op) for op in ("all_reduce", "broadcast")},
    "a program of check_collective, all_gather": rank_cases,
    "netgym --help": partial(command, "netgym", "--help"),
    "netgym list": partial(command, "netgym", "list"),
    "netsim show lan": partial(command, "netsim", "show", "lan"),
    "netsim collective, 1,024 hosts": large_collective,
    **{
        f"netgym plan, 70 B, 64 workers, {strategy}": partial(planned, strategy)
        for strategy in ("AllReduce", "DiLoCo")
    },
    "demo, one job": partial(demo, 1),
    "demo, two jobs": partial(demo, 2),
    "first fit, GPT 1 M, 2 workers, 1 step": partial(trained, "byte", "threads", 2, 1),
    **{
        f"GPT 10 M, 4 workers, {kind}, {steps} step{'s' if steps > 1 else ''}": partial(
            trained, "wide", kind, 4, steps
        )
        for kind in ("loop", "processes")
        for steps in (1, 12)
    },
    **{
        f"digits MLP, 8 workers, {strategy}, {kind}": partial(worker_steps, strategy, kind)
        for strategy in ("AllReduce", "DiLoCo")
        for kind in ("loop", "threads", "stacked")
    },
    **{
        f"a replica's step, 64 replicas, {kind}": partial(replica_steps, kind)
        for kind in ("threads", "stacked")
    },
    **{
        f"all-reduce, {kind}, {ranks} ranks, {size:,} B, {protocol}": partial(
            collective, kind, ranks, protocol, size, 0.0
        )
        for kind, ranks, size, protocol in (
            ("network", 8, 4_000, "ideal"),
            ("network", 64, 4_000_000, "ideal"),
            ("network", 64, 4_000_000, "linux-tcp"),
            ("network", 256, 4_000, "gloo"),
            ("run_ranks", 8, 4_000, "ideal"),
            ("run_ranks", 64, 4_000, "linux-tcp"),
        )
    },
    "a rank's step, 8 ranks": equal_steps,
    "launch, 4 ranks, 57 all-reduces of 123 MB": partial(launched_all_reduces, 4, 123_000_000, 57),
    "long run, 64 ranks, 1e6 rank-steps": partial(rank_steps, 200),
}


@dataclass(frozen=True)
class Held:
    """A figure that releases hold: `key` of a row, divided by that of another row unless it is None."""

    key: str
    row: str
    over: str | None
    goal: float

    def of(self, figure: Callable[[list[float]], float], found: dict[str, list[Figures]]) -> float | None:
        """The figure of the rounds of each row, such as the least; None where a row could not run."""
        rows = [[each[self.key] for each in found[name] if each] for name in (self.row, self.over) if name]
        return figure(rows[0]) / (figure(rows[1]) if self.over else 1.0) if all(rows) else None


_LOOP, _PROCESSES = (f"GPT 10 M, 4 workers, {kind}, 12 steps" for kind in ("loop", "processes"))
_STACKED, _LOOP_TINY = (f"digits MLP, 8 workers, AllReduce, {kind}" for kind in ("stacked", "loop"))
HELD = {
    "GPT 10 M in processes, of the loop, wall": Held("wall", _PROCESSES, _LOOP, 0.56),
    "GPT 10 M in processes, of the loop, memory": Held("all_mb", _PROCESSES, _LOOP, 1.2),
    "tiny AllReduce stacked, of the loop, cpu": Held("cpu", _STACKED, _LOOP_TINY, 0.65),
    "demo with two jobs, of one, wall": Held("wall", "demo, two jobs", "demo, one job", 0.55),
    "plan of 70 B, cpu s": Held("cpu", "netgym plan, 70 B, 64 workers, AllReduce", None, 4.0),
    "start-up, cpu s": Held("cpu", "netgym --help", None, 0.12),
}


def measured(name: str) -> dict[str, float]:
    """Processor and wall seconds of a row in this process and its children, and their peak memory in MB."""
    began = time.perf_counter()
    seconds = ROWS[name]()
    wall = time.perf_counter() - began
    both = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    spent = sum(map(harness.cpu_seconds, both))
    return {
        "cpu": spent if seconds is None else seconds,
        "wall": wall,
        "peak_mb": max(map(harness.peak_mb, both)),
    }


def descendants_mb() -> float:
    """Memory of all processes that descend from this one, pages that several share counted once; 0 without /proc."""
    total, found = 0, [os.getpid()]
    for pid in found:
        folder = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError):  # it has ended
            found += [
                int(child) for file in folder.glob("task/*/children") for child in file.read_text().split()
            ]
            size = re.search(r"Pss:\s+(\d+)", (folder / "smaps_rollup").read_text())
            total += int(size[1]) if size and pid != os.getpid() else 0
    return total * 1024 / 1e6


@contextlib.contextmanager
def sampled_memory() -> Iterator[list[float]]:
    """`descendants_mb`, ten times a second within the block."""
    ended, samples = threading.Event(), [0.0]

    def sample() -> None:
        while not ended.wait(0.1):
            samples.append(descendants_mb())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def in_process(checkout: Path, name: str) -> Figures:
    """A row by a checkout's code; None where that cannot run it."""
    try:
        with sampled_memory() as samples:
            found: dict[str, float] = harness.in_process(__file__, "--measure", name, checkout=checkout)
    except subprocess.CalledProcessError:
        return None
    return {**found, "all_mb": max(samples)}


def best(found: list[Figures]) -> Figures:
    """The least of each figure."""
    some = [each for each in found if each is not None]
    return {key: min(each[key] for each in some) for key in some[0]} if some else None


def is_worse(rounds: list[list[Figures]], key: str, limit: float) -> bool:
    """True if a figure exceeds the other checkout's by more than `limit`, both the best rounds' and the medians."""
    now, before = ([each[key] for each in found if each is not None] for found in zip(*rounds, strict=True))
    if not before:  # a row that the other checkout cannot run
        return False
    return not now or all(of(now) > limit * of(before) for of in (min, statistics.median))


def show_held(found: list[dict[str, list[Figures]]], limit: float | None) -> list[str]:
    """Print held figures of the rows that each checkout has run, with their goals; returns those beyond `limit`."""
    worse: list[str] = []
    chosen = {name: held for name, held in HELD.items() if {held.row, held.over} - {None} <= found[0].keys()}
    if chosen:
        print()
        harness.heading("held", "now", "before", "goal")
    for name, held in chosen.items():
        now, before = [*(held.of(min, each) for each in found), None][:2]
        cells = ["" if each is None else f"{each:.3g}" for each in (now, before, held.goal)]
        harness.row(name, *cells)
        medians = [held.of(statistics.median, each) for each in found]
        if limit is not None and before is not None and medians[1] is not None:
            pairs = ((now, before), medians)
            if all(this is None or (other is not None and this > limit * other) for this, other in pairs):
                worse.append(name)
    return worse


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("rows", nargs="*", metavar="ROW", help="parts of names of rows [all]")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit", type=float, help="exit with 1 where a row is worse by more than this factor"
    )
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.limit is not None and given.against is None:
        parser.error("--limit compares with another checkout: pass --against CHECKOUT")
    if given.measure:
        print(json.dumps(measured(given.measure)))
        return
    checkouts = [HERE.parent] + ([given.against] if given.against else [])
    worse: list[str] = []
    found: list[dict[str, list[Figures]]] = [{} for _ in checkouts]
    harness.heading("", "processor s", "before", "ratio", "wall s", "before", "MB", "before")
    for name in ROWS:
        names = [name, *(held for held, each in HELD.items() if name in (each.row, each.over))]
        if given.rows and not any(part in each for part in given.rows for each in names):
            continue
        rounds = [[in_process(checkout, name) for checkout in checkouts] for _ in range(given.rounds)]
        for each, own in zip(found, zip(*rounds, strict=True), strict=True):
            each[name] = list(own)
        now, before = [*(best(each[name]) for each in found), None][:2]
        cells = [
            "" if each is None else f"{each[key]:.4g}"
            for key in ("cpu", "wall", "peak_mb")
            for each in (now, before)
        ]
        ratio = now["cpu"] / before["cpu"] if now and before else None
        cells.insert(2, "" if ratio is None else f"**{ratio:.2f}**" if ratio > MARKED else f"{ratio:.2f}")
        harness.row(name, *cells)
        if given.limit is not None:
            worse += [f"{name} ({key})" for key in ("cpu", "peak_mb") if is_worse(rounds, key, given.limit)]
    worse += show_held(found, given.limit)
    if worse:
        sys.exit(f"worse by more than {given.limit - 1:.0%}: {'; '.join(worse)}")


if __name__ == "__main__":
    main()
