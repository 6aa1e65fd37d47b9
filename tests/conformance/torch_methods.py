"""Runs methods of PyTorch's own DistributedTest: on gloo as they are, or with `netsim` where they ask for gloo.

    python tests/conformance/torch_methods.py [--ranks N] [--part K/N] [--verbose] {gloo,netsim,cuda} [METHOD ...]

Prints a line a method, `METHOD: passed | skipped | failed | timeout`, with what a failure said, or torch's reason for
skipping it. With `cuda` they ask for nccl, and CUDA devices are the CPU, as under `netgym launch --cuda-as-cpu`. The
methods are those of the installed torch, unchanged; ranks are forked from this process, so that torch is imported once.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

SECONDS = 60.0  # of host time, for one method
_SKIPS = range(70, 100)  # exit codes of torch's TEST_SKIPS


def load(backend: str, num_ranks: int) -> Any:
    """torch's test case over DistributedTest's methods, for a backend and a number of ranks."""
    os.environ |= {
        "BACKEND": "nccl" if backend == "cuda" else "gloo",
        "WORLD_SIZE": str(num_ranks),
        "TEMP_DIR": tempfile.mkdtemp(prefix="torch-methods-"),
        "INIT_METHOD": "env://",
        "MASTER_ADDR": "127.0.0.1",
        "NETGYM_COMPUTE": "marks",
    }
    import torch

    torch.set_num_threads(1)
    if backend != "gloo":
        from netgym.launch.registration import replace_backends

        replace_backends(cuda_as_cpu=backend == "cuda")
    if backend == "cuda":
        from netgym.launch.cuda_on_cpu import stand_in_for_cuda

        stand_in_for_cuda(num_ranks)
    from torch.testing._internal.distributed import distributed_test

    class Methods(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        """All of DistributedTest's methods, on processes."""

    return Methods


def method_names(case: Any) -> list[str]:
    """Every test method."""
    return sorted(name for name in dir(case) if name.startswith("test_"))


def run(case: Any, name: str, num_ranks: int) -> tuple[str, str]:
    """One method on forked ranks; how it ended, and what it said."""
    from torch.testing._internal.distributed import distributed_test

    distributed_test.initialize_temp_directories()
    distributed_test.Barrier.init()
    # Ranks wait for each other in host time there, 10 s at most: too little on a busy machine.
    distributed_test.Barrier.sync.__func__.__defaults__ = (None, 100)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe() for _ in range(num_ranks)]
        ranks = [
            context.Process(target=_rank, args=(case, rank, name, folder, child))
            for rank, (_, child) in enumerate(pairs)
        ]
        for rank in ranks:
            rank.start()
        for _, child in pairs:
            child.close()
        end = time.monotonic() + SECONDS
        output = _wait(ranks, end)
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            if rank.exitcode is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.join()
        texts = [_text(parent) for parent, _ in pairs]
        with contextlib.suppress(OSError):
            output += "".join(Path(folder, f"out{rank}").read_text()[-1500:] for rank in range(num_ranks))
    if any(code is None for code in codes):
        return "timeout", "\n".join(texts) + output
    if all(code == 0 for code in codes):
        return "passed", ""
    if all(code in _SKIPS for code in codes):
        reasons = {skip.exit_code: skip.message for skip in distributed_test.TEST_SKIPS.values()}
        said = re.search(r"skipping test \S+ for following reason: (.*)", output)
        return "skipped", said[1] if said else reasons.get(codes[0], f"exit code {codes[0]}")
    return "failed", f"exit codes {codes}\n" + "\n".join(texts) + output


def _text(pipe: Any) -> str:
    try:
        return str(pipe.recv()) if pipe.poll(0) else ""
    except (EOFError, OSError):
        return ""


def _wait(ranks: list[Any], end: float) -> str:
    while time.monotonic() < end and any(rank.is_alive() for rank in ranks):
        if any(rank.exitcode not in (None, 0, *_SKIPS) for rank in ranks):
            end = min(end, time.monotonic() + 5)  # the others wait for it
        for rank in ranks:
            rank.join(0.02)
    return ""


def _rank(case: Any, rank: int, name: str, folder: str, pipe: Any) -> None:
    os.setpgid(0, 0)
    out = os.open(os.path.join(folder, f"out{rank}"), os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(out, 2)
    case._run(rank, name, os.path.join(folder, "store"), pipe)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=["gloo", "netsim", "cuda"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--part", default="0/1", help="every n-th method from k on: k/n")
    parser.add_argument("methods", nargs="*")
    options = parser.parse_args()
    case = load(options.backend, options.ranks)
    first, step = map(int, options.part.split("/"))
    for name in (options.methods or method_names(case))[first::step]:
        began = time.monotonic()
        how, output = run(case, name, options.ranks)
        lines = [
            line
            for line in output.splitlines()
            if re.match(r"^\w*(Error|Exception)\b|^\w+(\.\w+)*Error", line)
        ]
        short = output if how == "skipped" else lines[-1][:200] if lines else ""
        print(f"{name}: {how} ({time.monotonic() - began:.1f} s) {short}", flush=True)
        if options.verbose and how not in ("passed",):
            print(output, flush=True)


if __name__ == "__main__":
    main()
