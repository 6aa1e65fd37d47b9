"""The frozen corpus: what the network answered on the day it was frozen, and whether it still does.

    python tests/frozen/make.py compare [part ...]    compare everything; exit status 1 where something differs
    python tests/frozen/make.py [part ...]            write the data anew, from what the code does now

`test_frozen.py` compares a fixed subset of it. Data are rewritten only on purpose: a change of what the simulator
answers belongs in the change log. Collectives, traces and programs were frozen message by message, without what the
network then remembered and foresaw of collectives, which rounded some times to nanoseconds.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

# As in tests/conftest.py.
os.environ |= {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

sys.path.append(str(Path(__file__).parents[1]))

import frozen_collectives
import frozen_commands
import frozen_programs
import frozen_runs
import frozen_traces
import frozen_transfers
import frozen_verdicts
import torch

import netsim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    _Tolerance = tuple[float, float]

__all__ = ["PARTS", "Difference", "Part", "compare", "frozen", "main"]

_FOLDER = Path(__file__).parent
_WORTH_LISTING = 1e-12


def _some(num: int, of: int) -> Callable[[Sequence[str]], Sequence[str]]:
    return lambda names: [name for index, name in enumerate(names) if index % of < num]


@dataclass(frozen=True)
class Part:
    """Cases of one kind.

    Attributes:
        names: of all cases.
        answer: what the code says to one of them; plain JSON.
        allowed: relative and absolute tolerance of floats by field of the answer, of which either is enough; floats
            of fields that are not named must be equal by repr.
        tested: of all names, those that the test takes.
    """

    names: Callable[[], Sequence[str]]
    answer: Callable[[str], dict[str, Any]]
    allowed: Mapping[str, _Tolerance] = field(default_factory=dict)
    tested: Callable[[Sequence[str]], Sequence[str]] = list


_TRAINING = ("runs", "commands")
_READ_BY_PEOPLE = ("commands",)  # kept as text, so that a change of words shows as a difference of lines
_BYTES = 1e-9, 0.002  # kept to a thousandth of a byte
_TIMES = 1e-12, 0.0
_GRID_TIMES = 1e-8, 2e-8  # of ranks, which go on at instants of a grid
_FILE_TIMES = 1e-8, 0.02  # microseconds of a trace file, to a nanosecond and on that grid
_ELSEWHERE = 1e-4, 0.02  # on a machine with another arithmetic

PARTS = {
    "transfers": Part(
        frozen_transfers.names, frozen_transfers.answer, {"looks": _BYTES, "aborted": _BYTES}, _some(1, 14)
    ),
    "collectives": Part(
        frozen_collectives.names,
        frozen_collectives.answer,
        {"ends": _TIMES, "times": _TIMES, "looks": _BYTES},
        _some(1, 24),
    ),
    "traces": Part(
        frozen_traces.names,
        frozen_traces.answer,
        {
            **{"times": _TIMES, "use": _TIMES, "capacity": _TIMES, "transfers": _BYTES},
            **{"microseconds": _FILE_TIMES, "events": _BYTES},
        },
        _some(1, 4),
    ),
    "programs": Part(
        frozen_programs.names,
        frozen_programs.answer,
        {"times": _GRID_TIMES, "looks": _BYTES},
        _some(1, 10),
    ),
    "runs": Part(frozen_runs.names, frozen_runs.answer, {"times": _GRID_TIMES}, frozen_runs.tested),
    "verdicts": Part(frozen_verdicts.names, frozen_verdicts.answer, {"ends": _GRID_TIMES}),
    "commands": Part(
        frozen_commands.names,
        frozen_commands.answer,
        {"json": _TIMES},
        _some(1, 10),
    ),
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


@cache
def frozen(part: str) -> dict[str, Any]:
    """The data of a part: answers by case, and under "" the arithmetic of the machine that they were made on."""
    if part in _READ_BY_PEOPLE:
        return dict(json.loads((_FOLDER / f"{part}.json").read_text(encoding="utf-8")))
    with gzip.open(_FOLDER / f"{part}.json.gz", "rt", encoding="utf-8") as file:
        return dict(json.loads(line) for line in file)


@cache
def _arithmetic(part: str) -> str:
    """Fingerprint of the last bits of this machine's mathematical functions, and of its tensors where models train."""
    draw = Random("arithmetic")
    numbers = [draw.randrange(1, 10**9) / 10**7 for _ in range(300)]
    values: list[Any] = [(math.exp(-x), math.log(x), math.cbrt(x), x**0.75) for x in numbers]
    if part in _TRAINING:
        inputs = torch.tensor(numbers[:24], dtype=torch.float32).reshape(4, 6) / 100
        weight = (torch.tensor(numbers[24:216]).reshape(32, 6) / 100).requires_grad_()
        loss = torch.nn.functional.linear(inputs, weight).tanh().softmax(dim=1).square().mean()
        loss.backward()
        assert weight.grad is not None
        values += [loss.item(), weight.grad.tolist(), torch.linalg.qr(weight.detach())[0].tolist()]
        # Vectorised functions round a few values in a hundred thousand otherwise on processors of another maker.
        line = torch.linspace(-8, 8, 200_001)
        for function in (torch.tanh, torch.exp, torch.sigmoid, torch.erf):
            values.append(function(line).numpy().tobytes())
        values += [
            function(line[100_001:]).numpy().tobytes() for function in (torch.log, torch.sqrt, torch.rsqrt)
        ]
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def freeze(part: str) -> None:
    """Write the data of a part."""
    if part in _READ_BY_PEOPLE:
        answers = {"": _arithmetic(part), **{name: PARTS[part].answer(name) for name in PARTS[part].names()}}
        text = json.dumps(answers, indent=1, ensure_ascii=False) + "\n"
        (_FOLDER / f"{part}.json").write_text(text, encoding="utf-8")
        print(f"{part}: {len(answers) - 1} cases, {len(text):,} characters")
        return
    lines = [json.dumps([name, PARTS[part].answer(name)]) + "\n" for name in PARTS[part].names()]
    lines.insert(0, json.dumps(["", _arithmetic(part)]) + "\n")
    packed = gzip.compress("".join(lines).encode(), mtime=0)
    (_FOLDER / f"{part}.json.gz").write_bytes(packed)
    print(f"{part}: {len(lines) - 1} cases, {len(packed):,} bytes")


def compare(part: str, name: str) -> list[Difference]:
    """All that is not equal to what was kept of a case, to the last bit; what is allowed says so.

    On machines whose arithmetic has other last bits than the one that the data were made on, those are allowed
    everywhere, and things that happened at one instant may happen at two.
    """
    kept, now = frozen(part)[name], json.loads(json.dumps(PARTS[part].answer(name)))
    if now.get("given") != kept.get("given"):
        raise ValueError(f"{part}: {name}: the case itself has changed, not the answer to it")
    allowed = defaultdict(lambda: (0.0, 0.0), PARTS[part].allowed)
    if frozen(part)[""] != _arithmetic(part):
        allowed = defaultdict(lambda: _ELSEWHERE)
        kept, now = ({**each, "ties": None} for each in (kept, now))
    return list(_differences(kept, now, name, allowed, ""))


def _differences(
    kept: Any, now: Any, where: str, allowed: Mapping[str, _Tolerance], topic: str
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
        most_relative, most = allowed[topic]
        fits = relative <= most_relative or size <= most
        yield Difference(where, kept, now, relative, fits)
    elif kept != now:
        yield Difference(where, kept, now, math.inf, False)


def check(part: str) -> bool:
    """Compare a part, print the differences, and return whether there are none."""
    begun, kept = time.perf_counter(), frozen(part)
    missing = set(kept) ^ {"", *PARTS[part].names()}
    worst, num_wrong = 0.0, len(missing)
    if missing:
        print(f"{part}: cases without data, or data without cases: {', '.join(sorted(missing)[:9])}")
    for name in PARTS[part].names():
        found = compare(part, name) if name in kept else []
        wrong = [each for each in found if not each.is_allowed]
        num_wrong += bool(wrong)
        of_case = max((each.relative for each in found if each.relative < math.inf), default=0.0)
        worst = max(worst, of_case)
        if wrong:
            print(f"DIFFERS  {name}: {len(wrong)} values, the first: {wrong[0]}")
        elif of_case > _WORTH_LISTING:
            print(f"close    {name}: {of_case:.1e} at most")
    seconds = time.perf_counter() - begun
    print(f"{part}: {len(kept) - 1} cases, {num_wrong} differ, worst relative {worst:.1e}, {seconds:.0f} s")
    return not num_wrong


def main(arguments: Sequence[str]) -> int:
    """Compare, or write, the parts that are named; all where none is."""
    used, wanted = Path(netsim.__file__).parents[1], _FOLDER.parents[1]
    if used != wanted:
        print(f"netsim comes from {used}: set PYTHONPATH={wanted}")
        return 2
    torch.set_num_threads(1)  # as in tests: the number changes bits
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
