"""Record real gloo between sites of hosts joined by slow links, as a case of tests/golden/sites.

    sudo python benchmarks/between_sites.py SHAPE ... [--out DIR]

A shape names the hosts of each site (200 Mbit/s), the rate of the links between neighbouring sites in Mbit/s (`30up15`:
15 back), the delay one way in ms and the queue in kB of each direction: `2+2_30_45ms_300kB`. Each case is all_reduce,
all_gather, reduce and all_to_all of 256 KiB to 4 MiB, three calls of each after one, and how many segments were sent
again; `python benchmarks/gloo.py CASE.json` compares it with the model.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import gloo_ranks
import harness
from gloo import topology_of
from shaped_links import SETTINGS, ShapedLinks, sh, why_not

ACCESS_MBIT = 200
OPERATIONS = [
    (op, size)
    for op in ("all_reduce", "all_gather", "reduce", "all_to_all")
    for size in (2**18, 2**20, 2**22)
]
WARMUP, REPEATS = 1, 3
SHAPE = re.compile(r"([\d+]+)_(\d+)(?:up(\d+))?_(\d+)ms_(\d+)kB")


def case_of(shape: str) -> dict[str, Any]:
    """Name, ranks, routers and directed links of a shape."""
    match = SHAPE.fullmatch(shape)
    if match is None:
        sys.exit(f"{shape}: not a shape such as 2+2_30_45ms_300kB or 2+1+1_40up20_15ms_150kB")
    forth, back = float(match[2]), float(match[3] or match[2])
    hosts, routers, links = [], [], []
    for site, count in enumerate(map(int, match[1].split("+"))):
        name = "abcdefgh"[site]
        routers.append(f"sw{name}")
        hosts += [f"{name}{number}" for number in range(count)]
        if site:
            before = routers[-2]
            for source, target, mbit in ((before, f"sw{name}", forth), (f"sw{name}", before, back)):
                links.append(_direction(source, target, mbit, float(match[4]), 1e3 * int(match[5])))
    for host in hosts:
        links.append(_direction(host, f"sw{host[0]}", ACCESS_MBIT, 0.1, 2_500_000))
        links.append(_direction(f"sw{host[0]}", host, ACCESS_MBIT, 0.0, 2_500_000))
    return {"case": shape, "ranks": hosts, "routers": routers, "links": links}


def _direction(source: str, target: str, mbit: float, delay_ms: float, queue_bytes: float) -> dict[str, Any]:
    return {"from": source, "to": target, "mbit": mbit, "delay_ms": delay_ms, "queue_bytes": queue_bytes}


def set_queues(net: ShapedLinks, links: list[dict[str, Any]]) -> None:
    for link in links:
        rate = link["mbit"] * 1e6
        shaper = (
            f"tbf rate {rate:.0f}bit burst {max(3080, rate * 0.0005 / 8):.0f} limit {link['queue_bytes']:.0f}"
        )
        device = net.out(link["from"], link["to"])
        sh(f"tc -n {net.namespace(link['from'])} qdisc change dev {device} root {shaper}")


def record(shape: str) -> dict[str, Any]:
    """The case of a shape, measured now."""
    case = case_of(shape)
    with ShapedLinks(topology_of(case)) as net:
        set_queues(net, case["links"])
        ends = gloo_ranks.on_hosts(net, OPERATIONS, WARMUP + REPEATS)
    results = []
    for (op, size), end in zip(OPERATIONS, ends, strict=True):
        seconds = [round(each, 6) for each in end["seconds"]]
        last = seconds[WARMUP:]
        results.append(
            {
                "op": op,
                "bytes": size,
                "n": REPEATS,
                "median": statistics.median(last),
                "min": min(last),
                "max": max(last),
                "warmup": seconds[:WARMUP],
                "retransmits": end["retransmits"],
            }
        )
    return {
        **case,
        "tcp": {key: value for key, value in SETTINGS.items() if "tcp" in key},
        "results": results,
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE")
    parser.add_argument("--out", type=Path, default=Path(), help="write SHAPE.json into this folder")
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"between_sites: {reason}")
    args.out.mkdir(exist_ok=True, parents=True)
    for shape in args.shapes:
        (args.out / f"{shape}.json").write_text(json.dumps(record(shape), indent=1) + "\n")
        print(args.out / f"{shape}.json")


if __name__ == "__main__":
    main()
