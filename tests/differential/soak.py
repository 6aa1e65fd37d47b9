"""Many random rank programs and experiments: `python tests/differential/soak.py --programs 5000 --experiments 500`.

Prints a smaller one, as a script or YAML, for each that does not give the same everywhere, and the number of these.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # helpers of all tests

import random_experiments
from rank_programs import CARRIERS, disagreement, drawn, reduced, smaller_programs


def failed_programs(first: int, count: int, carriers: tuple[str, ...]) -> int:
    """Number of programs that depend on where their ranks run."""
    failed = 0
    for seed in range(first, first + count):
        one = (carriers[seed % len(carriers)],)
        if disagreement(drawn(seed), one):
            failed += 1
            smaller = reduced(
                drawn(seed), lambda program, one=one: bool(disagreement(program, one)), smaller_programs
            )
            print(f"program {seed}:\n{smaller.code()}\n{disagreement(smaller, one)}", flush=True)
    print(f"{failed} of {count} programs depend on where their ranks run")
    return failed


def failed_experiments(first: int, count: int) -> int:
    """Number of experiments whose runs differ, or leave out what was asked for."""
    failed = 0
    for seed in range(first, first + count):
        if problem := random_experiments.shown(random_experiments.drawn(seed)):
            failed += 1
            print(f"experiment {seed}:\n{problem}", flush=True)
    print(f"{failed} of {count} experiments have runs that differ")
    return failed


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=0)
    parser.add_argument("--experiments", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--carriers", default=",".join(list(CARRIERS)[:5]), help=f"of {', '.join(CARRIERS)}")
    options = parser.parse_args()
    failed = 0
    if options.programs:
        failed += failed_programs(options.first, options.programs, tuple(options.carriers.split(",")))
    if options.experiments:
        failed += failed_experiments(options.first, options.experiments)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
