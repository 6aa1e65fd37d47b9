"""Record real gloo on long links, for `benchmarks/gloo.py` to compare with.

    sudo python benchmarks/long_links.py [SHAPE ...] [--draw COUNT --seed SEED] [--out DIR] [--again JSON ...]

A shape says ranks, Mbit/s of each host's link, the round trip in ms between any two hosts, and the shaped hops of a
path: `4_100_40ms_2hops`, and `_mtu3000` where packets are not 1,500 bytes. With one hop the link is shaped from the
host to a switch and has the whole latency in that direction; with two it is shaped both ways. Queues hold 100 ms.

Each operation is called once on connections that earlier operations have left (the first: on new ones), which is a
result of its own, and then twice more. --draw draws shapes and operations: 2 to 8 ranks, 20 to 500 Mbit/s, 5 to 100 ms,
1 MB to so many that a call takes some seconds. Where frames of 1,514 bytes are too many for two cores, they are longer.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gloo_ranks
import harness
from gloo import topology_of
from shaped_links import ETHERNET_MTU_BYTES, SETTINGS, ShapedLinks, why_not

if TYPE_CHECKING:
    from collections.abc import Sequence

SHAPE = re.compile(r"(\d+)_(\d+)_(\d+)ms_([12])hops?(?:_mtu(\d+))?")
UNSHAPED_MBIT = 10_000
FRAMES = ((300, 1500), (800, 3000), (10_000, 9000))
"""Most Mbit/s of all ranks together that two cores forward on time, and the frames that this takes."""
LARGEST_FIRST_MTU = 4000
"""With larger packets a new connection's receive window (64 kB) is less than the first ten, which is not modelled."""
REPEATS = 2
SECONDS = 6.0  # longest call that is drawn, by its bytes alone
OPERATIONS = ("all_gather", "all_to_all", "broadcast", "reduce", "reduce_scatter", "sendrecv")


def case_of(shape: str) -> dict[str, Any]:
    """Name, ranks, routers and directed links of a shape."""
    match = SHAPE.fullmatch(shape)
    if match is None:
        sys.exit(f"{shape}: not a shape such as 4_100_40ms_2hops")
    num_ranks, mbit, round_trip, hops = map(int, match.groups()[:4])
    mtu = match[5]
    hosts = [f"n{rank}" for rank in range(num_ranks)]
    links = []
    for host in hosts:
        up = {"from": host, "to": "sw", "mbit": mbit, "delay_ms": round_trip / 2}
        down = {"from": "sw", "to": host, "mbit": mbit if hops == 2 else UNSHAPED_MBIT, "delay_ms": 0}
        links += [{**link, "mtu": int(mtu)} if mtu else link for link in (up, down)]
    return {"case": shape, "ranks": hosts, "routers": ["sw"], "links": links}


def record(shape: str, operations: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """The case of a shape, measured now."""
    case = case_of(shape)
    directed = {(link["from"], link["to"]): link["delay_ms"] / 1e3 for link in case["links"]}
    made = topology_of(case)  # with the mean delay of a link's directions in each
    links = [replace(link, latency_seconds=directed[link.source, link.target]) for link in made.links]
    with ShapedLinks(replace(made, links=tuple(links))) as net:
        ends = gloo_ranks.on_hosts(net, operations, 1 + REPEATS)
    print(shape, net.late.replace("\n", "; "), file=sys.stderr)
    is_jumbo = any(link.get("mtu", 0) > LARGEST_FIRST_MTU for link in case["links"])
    results = []
    for (op, size), end in zip(operations, ends, strict=True):
        first, *last = (round(each, 6) for each in end["seconds"])
        same: dict[str, Any] = {"op": op, "bytes": size}
        if op == "sendrecv":
            same["pairs"] = [[0, 1]]
        if is_jumbo:
            same["warmup"] = [first]
        else:
            results.append({**same, "n": 1, "median": first, "min": first, "max": first})
        median, least, most = statistics.median(last), min(last), max(last)
        repeated = {"n": REPEATS, "median": median, "min": least, "max": most}
        results.append({**same, **repeated, "retransmits": end["retransmits"]})
    return {
        **case,
        "tcp": {key: value for key, value in SETTINGS.items() if "tcp" in key},
        "results": results,
    }


def draw(draws: random.Random) -> tuple[str, list[tuple[str, int]]]:
    """A shape, and operations of which none takes much longer than SECONDS."""
    num_ranks = draws.choice((2, 2, 3, 4, 5, 6, 8))
    mbit = round(20 * 25 ** draws.random())
    shape = f"{num_ranks}_{mbit}_{round(5 * 20 ** draws.random())}ms_{draws.choice(('1hop', '2hops'))}"
    mtu = next(mtu for most, mtu in FRAMES if num_ranks * mbit <= most)
    if mtu != ETHERNET_MTU_BYTES:
        shape += f"_mtu{mtu}"
    drawn = []
    for op in ("all_reduce", "all_reduce", draws.choice(OPERATIONS)):
        most = min(SECONDS / 2 * mbit * 1e6 / 8 / (num_ranks if op == "broadcast" else 1), 400e6)
        drawn.append((op, round(1e6 * (most / 1e6) ** draws.random()) // 4 * 4))
    return shape, drawn


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE")
    parser.add_argument("--draw", type=int, default=0, metavar="COUNT", help="so many drawn shapes")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument(
        "--bytes", type=int, nargs="+", default=[2**20, 2**24], help="of all-reduces on SHAPEs"
    )
    parser.add_argument("--out", type=Path, default=Path(), help="write SHAPE.json into this folder")
    parser.add_argument(
        "--again",
        nargs="+",
        type=Path,
        default=[],
        metavar="JSON",
        help="record the calls of these files again",
    )
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"long_links: {reason}")
    args.out.mkdir(exist_ok=True, parents=True)
    draws = random.Random(args.seed)
    cases = [(shape, [("all_reduce", size) for size in args.bytes]) for shape in args.shapes]
    for shape, operations in [*cases, *(draw(draws) for _ in range(args.draw))]:
        path = args.out / f"{shape}.json"
        path.write_text(json.dumps(record(shape, operations), indent=1) + "\n")
        print(path, flush=True)
    for path in args.again:
        case = json.loads(path.read_text())
        repeated = [(each["op"], each["bytes"]) for each in case["results"] if each["n"] == REPEATS]
        for result, again in zip(case["results"], record(case["case"], repeated)["results"], strict=True):
            kept = [again["median"], again["min"], again["max"], again.get("retransmits", 0)]
            result.setdefault("again", []).append(kept)
        path.write_text(json.dumps(case, indent=1) + "\n")
        print(path, flush=True)


if __name__ == "__main__":
    main()
