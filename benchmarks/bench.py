"""This checkout against another commit, row by row: processor seconds, wall seconds and memory, in turns.

    make bench                    against the last release; AGAINST=COMMIT names another, ROWS=list some rows
    python benchmarks/bench.py [ROW]... [--against CHECKOUT] [--rounds 3]

Each row runs in a process of its own, first by one checkout's code and then by the other's, and the best of some
rounds counts. Wall time depends on what else the machine does, processor time less so: its ratio is printed, in bold
above 1.1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

MARKED = 1.1
HERE = Path(__file__).parent


def command(*arguments: str) -> None:
    """A command line from its first instant: `netgym` or `netsim` and its arguments."""
    module = {"netgym": "exogym_core.__main__", "netsim": "netsim.cli.main"}[arguments[0]]
    code = f"import sys; from {module} import main; sys.exit(main())"
    subprocess.run([sys.executable, "-c", code, *arguments[1:]], check=True, stdout=subprocess.DEVNULL)


def large_collective() -> None:
    """`netsim collective` on 1,024 hosts in four regions."""
    regions = {name: {"hosts": 256, "nic": "10 Gbit/s", "latency": "50 us"} for name in "abcd"}
    wan = [
        {"between": list(pair), "bandwidth": "1 Gbit/s", "latency": "40 ms"}
        for pair in ("ab", "bc", "cd", "da")
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump({"regions": regions, "wan": wan}, file)
        file.flush()
        command("netsim", "collective", file.name, "all_reduce", "--bytes", "25 MB")


def trained(preset: str, workers: str, nodes: int, steps: int) -> None:
    """`fit` of a GPT with DiLoCo, or a plain loop, imports included; `byte` has a million parameters, `wide` ten."""
    import torch

    from exogym_core import LocalTrainer, OptimSpec
    from exogym_core.strategy import DiLoCoStrategy
    from exogym_core.tasks import build_model, build_task

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


def collective(*row: Any) -> float:
    """Processor seconds of one ring all-reduce; see benchmarks/collectives.py."""
    import collectives

    return float(collectives.seconds_a_collective(*row))


def rank_steps(steps: int) -> float:
    """Processor seconds of a million rank-steps; see benchmarks/endurance.py."""
    import endurance

    began = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        endurance.run(steps)
    return (time.process_time() - began) / steps / endurance.RANKS * 1e6


ROWS: dict[str, Callable[[], float | None]] = {
    "netgym --help": partial(command, "netgym", "--help"),
    "netgym list": partial(command, "netgym", "list"),
    "netsim show lan": partial(command, "netsim", "show", "lan"),
    "netsim collective, 1,024 hosts": large_collective,
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
        for kind in ("loop", "threads")
    },
    **{
        f"all-reduce, {kind}, {ranks} ranks, {size:,} B, {protocol}": partial(
            collective, kind, ranks, protocol, size, 0.0
        )
        for kind, ranks, size, protocol in (
            ("network", 8, 4_000, "ideal"),
            ("network", 64, 4_000_000, "ideal"),
            ("network", 64, 4_000_000, "linux-tcp"),
            ("run_ranks", 8, 4_000, "ideal"),
            ("run_ranks", 64, 4_000, "linux-tcp"),
        )
    },
    "long run, 64 ranks, 1e6 rank-steps": partial(rank_steps, 200),
}


def measured(name: str) -> dict[str, float]:
    """Processor and wall seconds of a row in this process and its children, and their peak memory in MB."""
    began = time.perf_counter()
    seconds = ROWS[name]()
    wall = time.perf_counter() - began
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    spent = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return {
        "cpu": spent if seconds is None else seconds,
        "wall": wall,
        "peak_mb": max(usage.ru_maxrss for usage in usages) / 1e3,
    }


def in_process(checkout: Path, name: str) -> dict[str, float] | None:
    """A row by a checkout's code; None where that cannot run it."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment = {**kept, "PYTHONPATH": str(checkout)}
    line = [sys.executable, str(Path(__file__).resolve()), "--measure", name]
    finished = subprocess.run(
        line, env=environment, cwd=checkout, capture_output=True, text=True, check=False
    )
    if finished.returncode:
        print(finished.stderr.strip().rpartition("\n")[2], file=sys.stderr)
        return None
    found: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return found


def best(found: list[dict[str, float] | None]) -> dict[str, float] | None:
    """The least of each figure."""
    some = [each for each in found if each is not None]
    return {key: min(each[key] for each in some) for key in some[0]} if some else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="parts of names of rows [all]")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measured(given.measure)))
        return
    checkouts = [HERE.parent] + ([given.against] if given.against else [])
    print(
        "| | processor s | before | ratio | wall s | before | MB | before |\n|---|---|---|---|---|---|---|---|"
    )
    for name in ROWS:
        if given.rows and not any(part in name for part in given.rows):
            continue
        rounds = [[in_process(checkout, name) for checkout in checkouts] for _ in range(given.rounds)]
        now, before = [*(best(list(each)) for each in zip(*rounds, strict=True)), None][:2]
        cells = [
            "" if each is None else f"{each[key]:.4g}"
            for key in ("cpu", "wall", "peak_mb")
            for each in (now, before)
        ]
        ratio = now["cpu"] / before["cpu"] if now and before else None
        cells.insert(2, "" if ratio is None else f"**{ratio:.2f}**" if ratio > MARKED else f"{ratio:.2f}")
        print(f"| {' | '.join([name, *cells])} |", flush=True)


if __name__ == "__main__":
    main()
