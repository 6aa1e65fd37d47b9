"""The command line of soaks whose cases are drawn from numbers."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS_FOR_ONE = 120


def soak(about: str | None, cases: str, number: int, check: Callable[[int], list[str] | str]) -> None:
    """Check so many cases; a list from `check`, or what it raises, is found, and a word counts how cases end.

    The last line of output is a JSON object, appended to OUT/CASES.jsonl too. Exit status 1 if anything was found.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument(f"--{cases}", dest="number", type=int, default=number)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no more after so long")
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, _too_long)
    ends, found = Counter[str](), dict[int, Any]()
    deadline, num_run = time.monotonic() + options.seconds, 0
    for case in range(options.first, options.first + options.number):
        if time.monotonic() > deadline:
            break
        num_run += 1
        signal.alarm(SECONDS_FOR_ONE)
        try:
            end = check(case)
            if isinstance(end, str):
                ends[end] += 1
            elif end:
                found[case] = end
        except Exception as error:
            found[case] = "".join(traceback.format_exception(error))[-1500:]
        finally:
            signal.alarm(0)
    spent = {"first": options.first, cases: num_run, **ends, "cpu_seconds": round(time.process_time(), 1)}
    text = json.dumps({**spent, "found": found})
    with (options.out / f"{cases}.jsonl").open("a") as file:
        file.write(text + "\n")
    print(text)
    sys.exit(1 if found else 0)


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"more than {SECONDS_FOR_ONE} s")
