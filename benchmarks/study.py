"""The study of examples/study.yaml, once on one core and once over a local Ray cluster of which a node is killed.

    python benchmarks/study.py --out runs/study --docs docs

Both sweeps must come to the same digest. Writes docs/shown-study.md with its picture and the sweep's own page.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import harness
from ray.cluster_utils import Cluster

from exogym_core import load_runs
from netgym.cli.main import main as netgym
from netgym.studies.study import Study

FILE = Path(__file__).parents[1] / "examples" / "study.yaml"
NODES = 3  # of one core each
KILLED_AFTER = 12  # points


def one_core(folder: Path) -> None:
    """Run the sweep in one process on one core; resume it if the folder exists."""
    what = ["--resume", str(folder)] if folder.is_dir() else [str(FILE), "--out", str(folder)]
    subprocess.run(
        [*harness.NETGYM, "sweep", *what], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def over_a_cluster(folder: Path) -> dict[str, Any]:
    """Seconds and finished points of the sweep over a cluster when a node was killed."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=1)
    values: dict[str, Any] = {}

    def kill() -> None:
        while _done(folder) < KILLED_AFTER:
            time.sleep(0.2)
        values["done_before"] = _done(folder)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        values["killed_at"] = time.perf_counter() - begun

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    begun = time.perf_counter()
    try:
        code = netgym(["sweep", str(FILE), "--out", str(folder), "--on", str(cluster.address)])
    finally:
        cluster.shutdown()
    if code:
        raise SystemExit(code)
    return values


def _done(folder: Path) -> int:
    try:
        entries = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0
    return sum("strategies" in entry and not entry.get("incomplete") for entry in entries)


def table(folder: Path) -> list[str]:
    """Best rate and length of each strategy on each network, by the mean time to the target over seeds."""
    frame = load_runs(folder)
    ends = frame[frame.step == frame.groupby(["point", "strategy", "seed"]).step.transform("max")]
    keys = ["topology", "strategy", "strategies.*.lr", "strategies.*.H"]
    held = ends[ends.target == "held"]
    groups = held.groupby(keys).agg(
        seconds=("virtual_seconds_to_target", "mean"),
        least=("virtual_seconds_to_target", "min"),
        most=("virtual_seconds_to_target", "max"),
        seeds=("seed", "nunique"),
        loss=("final_loss", "mean"),
    )
    best = groups[groups.seeds == groups.seeds.max()].reset_index().sort_values("seconds")
    rows = [
        "| network | strategy | lr | H | to loss 0.5 | by seed | final loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for network in held.topology.unique():
        for strategy in sorted(held.strategy.unique()):
            found = best[(best.topology == network) & (best.strategy == strategy)].head(1)
            for row in found.itertuples(index=False):
                rate, length = row[2], row[3]
                rows.append(
                    f"| {network} | {strategy} | {float(rate):g} | {length} | {row.seconds:.3f} s "
                    f"| {row.least:.3f} to {row.most:.3f} s | {row.loss:.3f} |"
                )
    return rows


def page(killed: dict[str, Any], rows: list[str]) -> str:
    """The page."""
    text = f"""
# A study of 48 points

`examples/study.yaml` has three networks, four learning rates and four lengths of a round: 48 points of two strategies
and two seeds, 192 runs, of which 64 are trainings and the others these trainings timed on the other two networks.
It ran in one process on one core, and over a Ray cluster of {NODES} nodes of one core, one of which was killed
without notice {killed["killed_at"]:.0f} s after the start, when {killed["done_before"]} points had finished:

    netgym sweep examples/study.yaml
    netgym sweep examples/study.yaml --on 10.0.0.1:6379

Both folders have the same digest: points under way on the lost node ran again on another one.
`python benchmarks/study.py` repeats both, with a cluster of processes on one machine.

The best of the 16 points on each network, by the mean time to the target over both seeds:

{{rows}}

![Loss against virtual time](shown-study.png)

Lines are means over both seeds, at a learning rate of 0.016 and rounds of ten steps; bands go from the lowest to the
highest run. <a href="shown-study-page.html">The page</a> has every curve. Page and picture are made by

    netgym report FOLDER --group-by topology --group-by strategy --format png \\
        --where 'strategies.*.lr=0.016' --where 'strategies.*.H=10'
"""
    return text.lstrip().replace("{rows}", "\n".join(rows))


def main() -> None:
    """Run both, compare, write."""
    parser = harness.parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for both sweeps")
    parser.add_argument("--docs", type=Path, help="where the page goes")
    parser.add_argument("--part", choices=["one", "cluster", "page"], action="append", help="[all]")
    given = parser.parse_args()
    parts = given.part or ["one", "cluster", "page"]
    given.out.mkdir(parents=True, exist_ok=True)
    known = given.out / "killed.json"
    if "one" in parts:
        one_core(given.out / "one")
    if "cluster" in parts:
        known.write_text(json.dumps(over_a_cluster(given.out / "cluster")))
    if "page" not in parts:
        return
    digests = {Study.open(given.out / name).digest() for name in ("one", "cluster")}
    if len(digests) != 1:
        raise SystemExit(f"the digests differ: {digests}")
    text = page(json.loads(known.read_text()), table(given.out / "cluster"))
    print(text)
    if given.docs is None:
        return
    (given.docs / "pages").mkdir(exist_ok=True)
    (given.docs / "shown-study.md").write_text(text, encoding="utf-8")
    wanted = "--group-by topology --group-by strategy --where strategies.*.lr=0.016 --where strategies.*.H=10"
    if code := netgym(
        f"report {given.out}/cluster {wanted} --format png --out {given.out}/page.html".split()
    ):
        raise SystemExit(code)
    shutil.copy(given.out / "plots" / "loss_against_time.png", given.docs / "shown-study.png")
    shutil.copy(given.out / "page.html", given.docs / "pages" / "shown-study-page.html")


if __name__ == "__main__":
    main()
