"""Finds the learning rates of examples/strategies.yaml: three or four each are tried, on a seed that no verdict uses.

    python benchmarks/bench_rates.py digits runs/rates-digits           # again with the same folder: goes on
    python benchmarks/bench_rates.py digits runs/rates-digits --write   # and puts the choice into the file

All rates of all strategies are one experiment of a task over wide-area links. Which rate is best is ranked as
benchmarks/learning_rates.py does.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import harness
import yaml
from learning_rates import described, rank, with_rates

from netgym.cli.main import main as netgym

TIER = Path(__file__).parents[1] / "examples" / "strategies.yaml"
SEED = 1000
NETWORK = "wan-4-regions"
RATES = {"digits": (1e-3, 2e-3, 4e-3, 8e-3), "text": (5e-4, 1e-3, 2e-3)}
FINE = (2.5e-4, 5e-4, 1e-3, 2e-3)  # where four or three of the above were all too high
OF: dict[str, dict[str, tuple[float, ...]]] = {
    "digits": {
        "MuLoCo": (2.5e-3, 5e-3, 1e-2, 2e-2),
        "DelayedDiLoCo": FINE,
        "EagerDiLoCo": FINE,
        "DESLOC": FINE,
        "DeMo": (4e-3, 8e-3, 16e-3),
        "DGC": (3e-2, 1e-1, 3e-1),
        "Dion": (5e-3, 1e-2, 2e-2),
        "SignSGD": (1e-3, 2e-3, 4e-3),
        "OneBitAdam": FINE,
        "QsparseLocalSGD": (8e-3, 16e-3, 32e-3),
    },
    "text": {
        "MuLoCo": (5e-3, 1e-2, 2e-2),
        "DelayedDiLoCo": FINE[:3],
        "EagerDiLoCo": FINE[:3],
        "DGC": (3e-2, 1e-1, 3e-1),
        "Dion": (5e-3, 1e-2, 2e-2),
        "OneBitAdam": FINE[:3],
        "QsparseLocalSGD": (4e-3, 8e-3, 16e-3),
        "DeMo": (1e-3, 2e-3, 4e-3),
        "SparseLoCo": (1e-3, 2e-3, 4e-3),
    },
}


def experiment(task: str) -> dict[str, Any]:
    """Every rate of every entry of that task's list."""
    tier = yaml.safe_load(TIER.read_text(encoding="utf-8"))
    point = next(point for point in tier["sweep"]["points"] if point["task"]["name"] == task)
    plain = {key: value for key, value in (tier | point).items() if key != "sweep"}
    strategies = [
        {**entry, "lr": rate, "label": f"{entry['name']} {rate:g}"}
        for entry in point["strategies"]
        for rate in OF[task].get(entry["name"], RATES[task])
    ]
    return plain | {"topology": NETWORK, "seeds": [SEED], "strategies": strategies, "name": f"rates-{task}"}


def chosen(summary: list[dict[str, Any]]) -> dict[str, float]:
    """The best rate of each strategy; prints all."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in summary:
        name, _, rate = entry["name"].rpartition(" ")
        if not entry.get("failed"):
            found.setdefault(name, []).append({**entry, "name": rate})
    best = {name: min(entries, key=rank) for name, entries in found.items()}
    for name, entries in found.items():
        print(name)
        for entry in entries:
            print(described(entry) + ("  <- chosen" if entry is best[name] else ""))
    return {name: float(entry["name"]) for name, entry in best.items()}


def write(task: str, rates: dict[str, float]) -> None:
    """Put the rates into that task's list, the rest left as it is."""
    start = f"    - task: {{name: {task},"
    head, _, rest = TIER.read_text(encoding="utf-8").partition(start)
    body, end, tail = rest.partition("\n    - task:")
    body = with_rates(body, rates, f"{TIER}: {task}")
    TIER.write_text(head + start + body + end + tail, encoding="utf-8")


def main() -> None:
    """Search, or go on with it; print, and write where asked to."""
    parser = harness.parser(__doc__)
    parser.add_argument("task", choices=sorted(RATES))
    parser.add_argument("folder", type=Path, help="of the run; goes on with it where it is there")
    parser.add_argument("--write", action="store_true", help="put the choice into the tier")
    given = parser.parse_args()
    if (given.folder / "experiment.yaml").is_file():
        code = netgym(["compare", "--resume", str(given.folder)])
    else:
        file = given.folder.with_suffix(".yaml")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(experiment(given.task), sort_keys=False), encoding="utf-8")
        code = netgym(["compare", str(file), "--out", str(given.folder)])
    if code not in (0, 1):
        raise SystemExit(code)
    rates = chosen(json.loads((given.folder / "summary.json").read_text(encoding="utf-8")))
    if given.write:
        write(given.task, rates)


if __name__ == "__main__":
    main()
