"""Many random rank programs in threads and processes: `python tests/differential/soak.py --programs 5000`.

Prints a script for each that does not give the same everywhere, and says how many there were.
"""

from __future__ import annotations

import argparse
import sys

from rank_programs import CARRIERS, disagreement, drawn, reduced


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--carriers", default=",".join(list(CARRIERS)[:5]), help=f"of {', '.join(CARRIERS)}")
    options = parser.parse_args()
    carriers, failed = tuple(options.carriers.split(",")), 0
    for seed in range(options.first, options.first + options.programs):
        one = (carriers[seed % len(carriers)],)
        if disagreement(drawn(seed), one):
            failed += 1
            smaller = reduced(drawn(seed), lambda program, one=one: bool(disagreement(program, one)))
            print(f"program {seed}:\n{smaller.code()}\n{disagreement(smaller, one)}", flush=True)
    print(f"{failed} of {options.programs} programs depend on where their ranks run")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
