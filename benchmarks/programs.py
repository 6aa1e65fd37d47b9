"""A program under torchrun with gloo and under `netgym launch`: a row of the table in docs/launch.md.

    python benchmarks/programs.py [-n RANKS] [--topology NAME] [--cuda-as-cpu] PATTERN [-m] PROGRAM ARGUMENT ...

PATTERN is a regular expression for the figures that the program prints, such as `lm loss: \\S+`. They must be equal in
every digit, whichever rank prints first. With `--cuda-as-cpu` ranks under torchrun have CUDA devices on the CPU, too,
and groups on gloo. Exits with 1 where a figure differs or a run fails, whose output's end is printed.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import runpy
import subprocess
import sys
from typing import Any

import harness

_RANK = "--as-rank"


def be_rank(arguments: list[str]) -> None:
    """Run a program as a rank of torchrun with CUDA devices on the CPU and groups on gloo."""
    from netgym.launch.cuda_on_cpu import stand_in_for_cuda
    from netgym.launch.private import answer_for_nccl, wrap_function

    def around(original: Any) -> Any:
        def made(size: int, rank: int, ranks: Any, _: Any, *rest: Any, **options: Any) -> Any:
            for name in ("backend_options", "device_id"):
                options.pop(name, None)
            return original(size, rank, ranks, "gloo", *rest[:2], **options)

        return made

    answer_for_nccl()
    wrap_function("_new_process_group_helper", around)
    stand_in_for_cuda(int(os.environ["WORLD_SIZE"]))
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def run(command: list[str]) -> tuple[str, float, bool]:
    """Output of a command, seconds of all processors, and whether it succeeded."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO,STRICT"}
    before = harness.cpu_seconds(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=-1, stderr=-2, text=True, errors="replace", env=environment)
    return done.stdout, harness.cpu_seconds(resource.RUSAGE_CHILDREN) - before, done.returncode == 0


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", type=int, default=2)
    parser.add_argument("--topology", default="two-datacenters")
    parser.add_argument("--cuda-as-cpu", action="store_true")
    parser.add_argument("pattern")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    torchrun = [
        sys.executable,
        *f"-m torch.distributed.run --standalone --nproc-per-node={options.n}".split(),
    ]
    mapped = [__file__, _RANK] if options.cuda_as_cpu else []
    launch = [*harness.NETGYM, "launch", f"-n{options.n}", "--topology", options.topology]
    launch += ["--cuda-as-cpu"] * options.cuda_as_cpu
    outputs, seconds = [], []
    for command in ([*torchrun, *mapped], launch):
        output, spent, has_succeeded = run([*command, *options.program])
        if not has_succeeded:
            print(output[-3000:], f"failed: {' '.join(command)}", sep="\n")
            return 1
        outputs.append(output)
        seconds.append(spent)
    real, here = (sorted(match[0] for match in re.finditer(options.pattern, text)) for text in outputs)
    for figure in sorted(set(real) ^ set(here)):
        print("gloo" if figure in real else "here", figure)
    virtual = re.search(r"^(\S+ \S+) of virtual time", outputs[1], re.MULTILINE)
    equal = "equal" if real == here and here else "NOT equal"
    times = f"{seconds[0]:.0f} s under torchrun, {seconds[1]:.0f} s here"
    print(f"{len(here)} figures {equal} | {virtual and virtual[1]} of virtual time | processors {times}")
    return int(real != here or not here)


if __name__ == "__main__":
    if sys.argv[1:2] == [_RANK]:
        be_rank(sys.argv[2:])
    else:
        sys.exit(main())
