"""The frozen corpus: what the network answered on the day it was frozen, and whether it still does.

    python tests/frozen/make.py compare [part ...]    compare everything; exit status 1 where something differs
    python tests/frozen/make.py [part ...]            write the data anew, from what the code does now

`test_frozen.py` compares a fixed subset of it. Data are rewritten only on purpose: a change of what the simulator
answers belongs in the change log.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import frozen_collectives
import frozen_traces
import frozen_transfers
import frozen_verdicts

import netsim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = ["PARTS", "Difference", "Part", "compare", "frozen", "main"]

_FOLDER = Path(__file__).parent
_WORTH_LISTING = 1e-12


@dataclass(frozen=True)
class Part:
    """Cases of one kind.

    Attributes:
        names: of all cases.
        answer: what the code says to one of them; plain JSON.
        allowed: relative tolerance of floats by field of the answer; those not named must be equal by repr.
        stride: the test takes every so manieth case.
    """

    names: Callable[[], Sequence[str]]
    answer: Callable[[str], dict[str, Any]]
    allowed: Mapping[str, float] = field(default_factory=dict)
    stride: int = 1


PARTS = {
    "transfers": Part(
        frozen_transfers.names, frozen_transfers.answer, {"looks": 1e-9, "aborted": 1e-9}, stride=6
    ),
    "collectives": Part(
        frozen_collectives.names, frozen_collectives.answer, {"ends": 1e-8, "times": 1e-8}, stride=12
    ),
    "traces": Part(
        frozen_traces.names,
        frozen_traces.answer,
        {
            "times": 1e-8,
            "use": 1e-8,
            "capacity": 1e-8,
            "microseconds": 1e-8,
            "events": 1e-9,
            "transfers": 1e-9,
        },
        stride=2,
    ),
    "verdicts": Part(frozen_verdicts.names, frozen_verdicts.answer, {"ends": 1e-8}, stride=3),
}

# Link bytes are kept to a thousandth; trace files to a nanosecond, and ranks go on at instants of a grid.
_SLACK = {
    "looks": 0.002,
    "aborted": 0.002,
    "transfers": 0.002,
    "events": 0.002,
    "microseconds": 0.02,
    "ends": 2e-8,
}


@dataclass(frozen=True)
class Difference:
    """One value of one case; `relative` is infinite where it is no float."""

    where: str
    frozen: Any
    now: Any
    relative: float
    is_allowed: bool

    def __str__(self) -> str:
        return f"{self.where}: was {self.frozen!r}, is {self.now!r} ({self.relative:.1e})"


def frozen(part: str) -> dict[str, Any]:
    """The data of a part: answers by case."""
    with gzip.open(_FOLDER / f"{part}.json.gz", "rt", encoding="utf-8") as file:
        return dict(json.loads(line) for line in file)


def freeze(part: str) -> None:
    """Write the data of a part."""
    lines = [json.dumps([name, PARTS[part].answer(name)]) + "\n" for name in PARTS[part].names()]
    packed = gzip.compress("".join(lines).encode(), mtime=0)
    (_FOLDER / f"{part}.json.gz").write_bytes(packed)
    print(f"{part}: {len(lines)} cases, {len(packed):,} bytes")


def compare(part: str, name: str, kept: dict[str, Any]) -> list[Difference]:
    """All that is not equal to what was kept of a case, to the last bit; what is allowed says so."""
    now = json.loads(json.dumps(PARTS[part].answer(name)))
    if now.get("given") != kept.get("given"):
        raise ValueError(f"{part}: {name}: the case itself has changed, not the answer to it")
    return list(_differences(kept, now, name, PARTS[part].allowed, ""))


def _differences(
    kept: Any, now: Any, where: str, allowed: Mapping[str, float], topic: str
) -> Iterator[Difference]:
    if isinstance(kept, dict) and isinstance(now, dict):
        for key in sorted({*kept, *now}):
            here = topic or key
            yield from _differences(kept.get(key), now.get(key), f"{where} / {key}", allowed, here)
    elif isinstance(kept, list) and isinstance(now, list) and len(kept) == len(now):
        for index, pair in enumerate(zip(kept, now, strict=True)):
            yield from _differences(*pair, f"{where} / {index}", allowed, topic)
    elif isinstance(kept, float) and isinstance(now, float | int) and repr(kept) != repr(now):
        size = abs(kept - now)
        relative = size / max(abs(kept), abs(now)) if size else 0.0
        slack = _SLACK.get(topic, 0.0)
        fits = topic in allowed and (relative <= allowed[topic] or size <= slack)
        yield Difference(where, kept, now, relative, fits)
    elif kept != now:
        yield Difference(where, kept, now, math.inf, False)


def check(part: str) -> bool:
    """Compare all of a part, and tell of it. Returns whether it is as it was."""
    begun, kept = time.perf_counter(), frozen(part)
    missing = set(kept) ^ set(PARTS[part].names())
    worst, num_wrong = 0.0, len(missing)
    if missing:
        print(f"{part}: cases without data, or data without cases: {', '.join(sorted(missing)[:9])}")
    for name, answer in kept.items():
        found = compare(part, name, answer)
        wrong = [each for each in found if not each.is_allowed]
        num_wrong += bool(wrong)
        of_case = max((each.relative for each in found if each.relative < math.inf), default=0.0)
        worst = max(worst, of_case)
        if wrong:
            print(f"DIFFERS  {name}: {len(wrong)} values, the first: {wrong[0]}")
        elif of_case > _WORTH_LISTING:
            print(f"close    {name}: {of_case:.1e} at most")
    seconds = time.perf_counter() - begun
    print(f"{part}: {len(kept)} cases, {num_wrong} differ, worst relative {worst:.1e}, {seconds:.0f} s")
    return not num_wrong


def main(arguments: Sequence[str]) -> int:
    """Compare, or write, the parts that are named; all where none is."""
    used, wanted = Path(netsim.__file__).parents[1], _FOLDER.parents[1]
    if used != wanted:
        print(f"netsim comes from {used}: set PYTHONPATH={wanted}")
        return 2
    is_compared = arguments[:1] == ["compare"]
    chosen = list(arguments[is_compared:]) or list(PARTS)
    if unknown := [name for name in chosen if name not in PARTS]:
        print(f"no part {', '.join(unknown)}: there are {', '.join(PARTS)}")
        return 2
    if is_compared:
        are_alike = [check(part) for part in chosen]  # all of them, whatever the first says
        return int(not all(are_alike))
    for part in chosen:
        freeze(part)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
