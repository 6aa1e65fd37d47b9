"""Finds the learning rate of each strategy of an experiment: a grid, on seeds that no verdict uses.

    python benchmarks/learning_rates.py examples/digits_wan.yaml --write

A rate is best that holds the target with every seed of the search, soonest in the mean; of equals the one
with the lower mean final loss. Where no rate holds it, the lowest mean final loss decides. Prints every
figure; with --write the choice is put into the file.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import harness
import yaml

from netgym.experiment.experiment import Experiment

RATES = (2e-3, 4e-3, 8e-3, 16e-3)
SEEDS = (1000, 1001)


def search(
    experiment: Experiment, position: int, rates: list[float], seeds: list[int]
) -> list[dict[str, Any]]:
    """The summary's objects of one strategy, one a rate; `label` is the rate."""
    plain = experiment.to_mapping()
    strategy = plain["strategies"][position]
    plain["strategies"] = [{**strategy, "lr": rate, "label": f"{rate:g}"} for rate in rates]
    plain |= {"seed": seeds[0], "seeds": seeds if len(seeds) > 1 else None}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "search.yaml")
        path.write_text(yaml.safe_dump(plain), encoding="utf-8")
        command = [*harness.NETGYM, "compare", str(path), "--json", "--out", f"{folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    summary: list[dict[str, Any]] = json.loads(done.stdout)["summary"]
    return summary


def rank(entry: dict[str, Any]) -> tuple[float, float, float]:
    """Sorts the best first."""
    seconds, loss = entry["virtual_seconds_to_target"], entry["final_loss"]
    held = entry["target"] == "held" and seconds is not None
    rate = float(entry["name"])
    return (seconds, loss, rate) if held else (math.inf, math.inf if loss is None else loss, rate)


def described(entry: dict[str, Any]) -> str:
    """One rate's figures."""
    seconds, loss = rank(entry)[0], entry["final_loss"]
    reached = f"{seconds:8.3f} s" if seconds < math.inf else f"{entry['target']!s:>10}"
    return (
        f"  lr {entry['name']:>6}: to target {reached}, final loss {'-' if loss is None else f'{loss:.4f}'}"
    )


def with_rates(text: str, rates: dict[str, float], where: str) -> str:
    """An experiment's text with the rates in the lines of the strategies, the rest left as it is."""
    for name, rate in rates.items():
        pattern = rf"(- \{{name: {re.escape(name)},[^}}\n]*\blr: )[^,}}]+"
        text, count = re.subn(pattern, lambda found, rate=rate: f"{found[1]}{rate * 1e3:g}e-3", text)
        if count != 1:
            raise SystemExit(f"{where}: no one line of {name} with an lr")
    return text


def main() -> None:
    """Search, print, and write where asked to."""
    parser = harness.parser(__doc__)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(SEEDS), help="that the experiment does not use"
    )
    parser.add_argument("--only", nargs="+", help="names of the strategies to search; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="strategies searched at a time")
    parser.add_argument("--write", action="store_true", help="put the choice into the experiment")
    given = parser.parse_args()
    experiment = Experiment.load(given.experiment)
    used = sorted(set(given.seeds) & set(experiment.seeds))
    if used:
        raise SystemExit(f"--seeds: {used[0]} is one of the experiment's: choose others")
    wanted = [
        (position, entry)
        for position, entry in enumerate(experiment.strategies)
        if given.only is None or entry.name in given.only
    ]
    chosen: dict[str, float] = {}
    with ThreadPoolExecutor(given.jobs) as pool:
        searches = [
            pool.submit(search, experiment, position, given.rates, given.seeds) for position, _ in wanted
        ]
        for (_, entry), found in zip(wanted, searches, strict=True):
            best = min(found.result(), key=rank)
            print(f"{entry.label}, {len(given.seeds)} seeds:", flush=True)
            for each in found.result():
                print(described(each) + ("  <- chosen" if each is best else ""), flush=True)
            chosen[entry.name] = float(best["name"])
    if given.write:
        text = given.experiment.read_text(encoding="utf-8")
        given.experiment.write_text(with_rates(text, chosen, given.experiment), encoding="utf-8")


if __name__ == "__main__":
    main()
