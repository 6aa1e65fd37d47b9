"""The study of examples/study.yaml, once on one core and once over a local Ray cluster of which a node is killed.

    python benchmarks/study.py --out runs/study --docs docs

Both sweeps must come to the same digest. Writes docs/shown-study.md with its picture and the sweep's own page.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import harness
from ray.cluster_utils import Cluster

from exogym_core import load_runs
from exogym_core.cli.main import main as netgym
from exogym_core.studies.study import Study

FILE = Path(__file__).parents[1] / "examples" / "study.yaml"
NODES = 3  # of one core each
KILLED_AFTER = 12  # points


def one_core(folder: Path) -> float:
    """Seconds of the sweep in one process on one core; of what is left of it, where the folder is there."""
    begun = time.perf_counter()
    what = ["--resume", str(folder)] if folder.is_dir() else [str(FILE), "--out", str(folder)]
    subprocess.run(
        [*harness.NETGYM, "sweep", *what], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - begun


def over_a_cluster(folder: Path) -> dict[str, Any]:
    """Seconds of the sweep over a cluster, and what became of the points under way on the node that was killed."""
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
    return {**values, "seconds": time.perf_counter() - begun}


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


def page(times: dict[str, Any], digest: str, rows: list[str]) -> str:
    """The page."""
    spread, goes = times["spread"], times["goes"]
    stopped = "" if goes == 1 else f" (stopped and resumed: in {goes} parts)"
    text = f"""
# A study of 48 points

Made by `python benchmarks/study.py` on {datetime.now(UTC):%Y-%m-%d}: {platform.machine()}, {os.cpu_count()} cores,
Python {platform.python_version()}, load of the machine {times["load"]:.1f}.

`examples/study.yaml` has three networks, four learning rates and four lengths of a round: 48 points of two strategies
and two seeds, 192 trainings. It ran twice: in one process on one core, and over a Ray cluster of {NODES} nodes of one
core each on the same machine (`ray.cluster_utils.Cluster`), of which one was killed, without notice,
{spread["killed_at"]:.0f} s after the start, when {spread["done_before"]} points had finished.

| | seconds of the machine |
|---|---|
| one core: `netgym sweep examples/study.yaml`{stopped} | {times["alone"]:.0f} |
| {NODES} nodes, {NODES - 1} after the kill: the same with `--on ADDRESS` | {spread["seconds"]:.0f} |

Both folders have the digest `{digest}`: points that were under way on
the node that was lost ran again on another one. A cluster's seconds include the start of its workers, each of which
imports torch.

The best of the 16 points on each network, by the mean time to the target over both seeds:

{{rows}}

![Loss against virtual time](shown-study.png)

Lines are means over both seeds, at a learning rate of 16e-3 and rounds of ten steps; bands go from the lowest to the
highest run. The picture is that of `netgym report FOLDER --group-by topology --group-by strategy --where
'strategies.*.lr=0.016' --where 'strategies.*.H=10' --format png`; <a href="shown-study-page.html">the page</a> that the
same command writes has every curve.
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
    known = given.out / "times.json"
    times: dict[str, Any] = json.loads(known.read_text()) if known.is_file() else {}
    if "one" in parts:
        times["alone"] = times.get("alone", 0.0) + one_core(given.out / "one")
        times["goes"] = times.get("goes", 0) + 1
    if "cluster" in parts:
        times["spread"] = over_a_cluster(given.out / "cluster")
        times["load"] = os.getloadavg()[1]
    known.write_text(json.dumps(times))
    if "page" not in parts:
        return
    digests = {Study.open(given.out / name).digest() for name in ("one", "cluster")}
    if len(digests) != 1:
        raise SystemExit(f"the digests differ: {digests}")
    text = page(times, digests.pop(), table(given.out / "cluster"))
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
