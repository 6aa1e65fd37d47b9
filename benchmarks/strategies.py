"""Length of each strategy's file, and its distance from its algorithm: a table of docs/strategies.md.

    python benchmarks/strategies.py
    python benchmarks/strategies.py --only CoCoDC ADPSGD

A line of code is one that is neither empty nor a comment nor of a docstring. The difference is the largest, over so
many random problems and all ranks, between a parameter and that of the independent computation in tests/conformance,
over the largest parameter, in fp64 unless the strategy's wire format rounds.
"""

from __future__ import annotations

import ast
import copy
import inspect
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness

from exogym_core.strategy import STRATEGIES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]


def lines(name: str) -> tuple[int, int]:
    """Lines of the file of a strategy, and those of code."""
    text = Path(inspect.getfile(STRATEGIES[name])).read_text(encoding="utf-8")
    found = text.splitlines()
    code = {
        number for number, line in enumerate(found, 1) if line.strip() and not line.lstrip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            first = node.body[0]
            code -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(found), len(code)


def differences(name: str, problems: int) -> Iterator[float]:
    """Largest relative difference of each random problem."""
    import strategy_reference as reference
    import test_strategy_table as queues
    from strategy_table import TABLE

    if name in queues.CASES:
        for seed in range(problems):
            n, (strategy, algorithm) = _drawn(queues, name, random.Random(seed))
            got, want = queues.both_ways(n, strategy, algorithm, seed, 1 + seed % 14)
            yield max(_distance(one, other) for one, other in zip(got, want, strict=True))
    for row in (row for row in TABLE if row.name.split()[0] == name):
        for seed in range(problems):
            draw = random.Random(seed)
            sizes = draw.randint(1, 5), draw.randint(1, 7), draw.randint(1, 5), draw.randint(1, 8)
            model, batches = reference.make_problem(*sizes, seed=seed)
            got = reference.run_strategy(row.make(), model, batches, 11).results
            want = [reference.vector(each) for each in row.algorithm(copy.deepcopy(model), batches)]
            yield max(_distance(one, other) for one, other in zip(got, want, strict=True))


def _drawn(queues: Any, name: str, draw: random.Random) -> Any:
    n = draw.randint(1, 4)
    if name == "ADPSGD":
        return n, queues.of_ad_psgd(n, draw.randint(1, 3))
    if name == "AsyncDiLoCo":
        return n, queues.of_async(n, draw.choice([None, 1, 3]), draw.choice([0.0, 0.2]), draw.randint(1, 4))
    if name == "HeLoCo":
        return n, queues.of_heloco(n, draw.choice([0.5, 3.0]), draw.randint(1, 4))
    if name == "HALoS":
        regions = min(n, draw.randint(1, 3))
        return n, queues.of_halos(n, regions, draw.randint(1, 4), draw.randint(1, 3), draw.randint(1, 3))
    grace = draw.choice([0.0, 0.3, 2.0])
    return n, queues.of_decoupled(n, draw.randint(1, 5), draw.randint(1, 4), grace, draw.randint(1, 6))


def _distance(got: Any, want: Any) -> float:
    return float((got - want).abs().max() / want.abs().max())


def main() -> None:
    """Print the table."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--problems", type=int, default=12)
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests" / "conformance"), str(ROOT / "tests")]
    harness.heading("strategy", "lines", "of code", "largest difference")
    for name in given.only:
        all_lines, code = lines(name)
        largest = max(differences(name, given.problems), default=None)
        text = "" if largest is None else f"{largest:.0e}" if largest else "0"
        harness.row(name, all_lines, code, text)


if __name__ == "__main__":
    main()
