"""Cells of published measurements of NCCL over sockets, split before any of them was read.

    python tests/golden/nccl/split.py [Simulate_DP.md [held]]

Source: results/Simulate_DP.md of BinhangYuan/tc_cluster_setting at 75581a5 (2022): PyTorch 1.9 on AWS (p3.2xlarge),
`tc netem` with a delay and a rate on each host's egress, sums of 256 MB and 1 GB in as many tensors as hosts, by
NCCL's all_reduce, or by its reduce and broadcast. The third table of that page (all_to_all and all_gather by single
sends) is split likewise (`SHARDED`), later; four cells of its half `held`, unshaped or of 1 ms, were seen before they
were used for anything, and transport.tsv has seconds of NCCL's transport for four others, from before. A cell belongs
to the half that a hash of its name gives: `build` may be read while the model is built, `held` is read once, later.

Read before this split, so `build` whatever their hash: all figures of results/allreduce.md, broadcast.md and
reduce.md of the same repository (a filter that should have hidden them let whole milliseconds through), and the nine
medians of Adnan082/diloco-measured at 07b7885 (five step times of DDP, four synchronisations).

With the page as argument it prints the figures of `build`, in seconds as the page has them; with `held` behind it,
those of `held`.
"""

from __future__ import annotations

import hashlib
import re
import sys
from itertools import product
from pathlib import Path

METHODS = ("all_reduce", "reduce and broadcast")
NETWORKS = ("AWS default", "1 ms, 5 Gbit/s", "5 ms, 2 Gbit/s", "10 ms, 1 Gbit/s", "50 ms, 1 Gbit/s")
MEGABYTES = (256, 1024)
HOSTS = (4, 8, 16)


def half_of(cell: tuple[str, str, int, int]) -> str:
    """`build` or `held` of a cell (method, network, MB, hosts)."""
    digest = hashlib.sha256(" / ".join(map(str, cell)).encode()).digest()
    return "held" if digest[0] % 2 else "build"


CELLS = {cell: half_of(cell) for cell in product(METHODS, NETWORKS, MEGABYTES, HOSTS)}
SHARDED = {
    cell: half_of(cell) for cell in product(("all_to_all and all_gather",), NETWORKS, MEGABYTES, HOSTS)
}


def figures(page: str) -> dict[tuple[str, str, int, int], float]:
    """Figures of the page's first two tables by cell."""
    rows = [line for line in page.splitlines() if re.match(r"\| (AWS|delay)", line)]
    found = [[float(number) for number in re.findall(r"\|\s*([0-9.]+)", line)] for line in rows]
    numbers = [number for row in found[: len(METHODS) * len(NETWORKS)] for number in row]
    return dict(zip(CELLS, numbers, strict=True))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        for cell, half in CELLS.items():
            print(half, *cell, sep="\t")
    else:
        measured = figures(Path(sys.argv[1]).read_text())
        shown = "held" if sys.argv[2:] == ["held"] else "build"
        for cell, half in CELLS.items():
            if half == shown:
                print(*cell, measured[cell], sep="\t")
