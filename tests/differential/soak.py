"""Many random rank programs and experiments: `python tests/differential/soak.py --programs 5000 --experiments 500`.

Prints those that do not give the same everywhere, programs made smaller and as scripts, and the number of these.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # helpers of all tests

import random_experiments
from hypothesis import given, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st

from exogym_core.testing import RankProgram, programs
from netsim.testing import LawError


def failed_programs(first: int, count: int, num_processes: list[int]) -> int:
    """1 if a program depends on where its ranks run; the smallest found is printed."""

    @with_seed(first)
    @settings(max_examples=count, deadline=None, database=None, derandomize=False)
    @given(programs(), st.sampled_from(num_processes))
    def check(program: RankProgram, num: int) -> None:
        program.check([num])

    try:
        check()
    except LawError as error:
        print(error, flush=True)
        return 1
    print(f"none of {count} programs depends on where its ranks run")
    return 0


def failed_experiments(first: int, count: int) -> int:
    """Number of experiments whose runs differ, or leave out what was asked for."""
    failed = 0
    for seed in range(first, first + count):
        case = random_experiments.drawn(seed)
        if problem := random_experiments.differences(case):
            failed += 1
            print(f"experiment {seed}:\n{case.text()}{problem}", flush=True)
    print(f"{failed} of {count} experiments have runs that differ")
    return failed


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=0)
    parser.add_argument("--experiments", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", default=[0, 1, 2, 3, 4], type=int, nargs="+", help="0: threads")
    options = parser.parse_args()
    failed = 0
    if options.programs:
        failed += failed_programs(options.first, options.programs, options.processes)
    if options.experiments:
        failed += failed_experiments(options.first, options.experiments)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
