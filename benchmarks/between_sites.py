"""Record real gloo between sites of hosts joined by slow links, as a case of tests/golden/sites.

    sudo python benchmarks/between_sites.py SHAPE ... [--out DIR]

A shape names the hosts of each site (200 Mbit/s), the rate of the links between neighbouring sites in Mbit/s (`30up15`:
15 back), the delay one way in ms and the queue in kB of each direction: `2+2_30_45ms_300kB`. Each case is all_reduce,
all_gather, reduce and all_to_all of 256 KiB to 4 MiB, three calls of each after one, and how many segments were sent
again; `python benchmarks/gloo.py CASE.json` compares it with the model.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shaped_links import SETTINGS, ShapedLinks, sh, why_not
from small_frames import common_start

from netsim import Topology

ACCESS_MBIT = 200
OPERATIONS = [
    (op, size)
    for op in ("all_reduce", "all_gather", "reduce", "all_to_all")
    for size in (2**18, 2**20, 2**22)
]
WARMUP, REPEATS = 1, 3
SHAPE = re.compile(r"([\d+]+)_(\d+)(?:up(\d+))?_(\d+)ms_(\d+)kB")


def links_of(shape: str) -> tuple[list[str], list[str], list[dict[str, Any]]]:
    """Ranks, routers and directed links of a shape, as a case has them."""
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
    return hosts, routers, links


def _direction(source: str, target: str, mbit: float, delay_ms: float, queue_bytes: float) -> dict[str, Any]:
    return {"from": source, "to": target, "mbit": mbit, "delay_ms": delay_ms, "queue_bytes": queue_bytes}


def topology_of(hosts: list[str], routers: list[str], links: list[dict[str, Any]]) -> Topology:
    """The network to be shaped. Queues are set by `set_queues`."""
    pairs = [
        {
            "between": [there["from"], there["to"]],
            "up": f"{there['mbit']} Mbit/s",
            "down": f"{back['mbit']} Mbit/s",
            "latency": f"{(there['delay_ms'] + back['delay_ms']) / 2} ms",
        }
        for there, back in zip(links[::2], links[1::2], strict=True)
    ]
    return Topology.from_mapping(
        {"name": "shape", "hosts": {host: {} for host in hosts}, "routers": routers, "links": pairs}
    )


def set_queues(net: ShapedLinks, links: list[dict[str, Any]]) -> None:
    for link in links:
        rate = link["mbit"] * 1e6
        shaper = ["rate", f"{rate:.0f}bit", "burst", f"{max(3080, rate * 0.0005 / 8):.0f}"]
        shaper += ["limit", f"{link['queue_bytes']:.0f}"]
        device = net._out(link["from"], link["to"])
        sh("tc", "-n", net.namespace(link["from"]), "qdisc", "change", "dev", device, "root", "tbf", *shaper)


def record(shape: str) -> dict[str, Any]:
    """The case of a shape, measured now."""
    hosts, routers, links = links_of(shape)
    with ShapedLinks(topology_of(hosts, routers, links)) as net, tempfile.TemporaryDirectory() as folder:
        set_queues(net, links)
        started = []
        for rank, host in enumerate(hosts):
            command = [*net.inside(host), "chrt", "-r", "10", sys.executable, __file__]
            command += ["--rank", f"{rank},{len(hosts)},{folder}"]
            own = {**os.environ, "GLOO_SOCKET_IFNAME": net.interface(host), "OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own))
        ends = [json.loads(process.communicate(timeout=600)[0]) for process in started]
    results = []
    for number, (op, size) in enumerate(OPERATIONS):
        each = [max(rank["seconds"][number][call] for rank in ends) for call in range(WARMUP + REPEATS)]
        last = each[WARMUP:]
        results.append(
            {
                "op": op,
                "bytes": size,
                "n": REPEATS,
                "median": round(statistics.median(last), 6),
                "min": round(min(last), 6),
                "max": round(max(last), 6),
                "warmup": [round(seconds, 6) for seconds in each[:WARMUP]],
                "retransmits": sum(rank["retransmits"][number] for rank in ends),
            }
        )
    tcp = {key: value for key, value in SETTINGS.items() if "tcp" in key}
    return {
        "case": shape,
        "ranks": hosts,
        "routers": routers,
        "links": links,
        "tcp": tcp,
        "results": results,
    }


def be_rank(rank: int, num_ranks: int, folder: Path) -> None:
    """Print, per operation, seconds from each common start until this rank was through, and what it sent again."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    seconds, retransmits = [], []
    for op, num_bytes in OPERATIONS:
        count = num_bytes // 4 // num_ranks * num_ranks
        whole, part = torch.ones(count), torch.ones(count // num_ranks)
        calls: dict[str, Any] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "reduce": lambda whole=whole: dist.reduce(whole, 0),
            "all_gather": lambda whole=whole, part=part: dist.all_gather_single(whole, part),
            "all_to_all": lambda whole=whole: dist.all_to_all_single(torch.empty_like(whole), whole),
        }
        taken, before = [], 0
        for call in range(WARMUP + REPEATS):
            start = common_start(folder, rank, num_ranks)
            before = segments_sent_again() if call == WARMUP else before
            time.sleep(max(start - time.monotonic(), 0.0))
            calls[op]()
            taken.append(time.monotonic() - start)
        seconds.append(taken)
        retransmits.append(segments_sent_again() - before)
    print(json.dumps({"seconds": seconds, "retransmits": retransmits}))


def segments_sent_again() -> int:
    """Of all connections of this network namespace, so far."""
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", metavar="SHAPE")
    parser.add_argument("--out", type=Path, default=Path(), help="write SHAPE.json into this folder")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank, num_ranks, folder = args.rank.split(",")
        be_rank(int(rank), int(num_ranks), Path(folder))
        return
    if reason := why_not():
        sys.exit(f"between_sites: {reason}")
    args.out.mkdir(exist_ok=True, parents=True)
    for shape in args.shapes:
        (args.out / f"{shape}.json").write_text(json.dumps(record(shape), indent=1) + "\n")
        print(args.out / f"{shape}.json")


if __name__ == "__main__":
    main()
