"""What small frames wait for between two sites: real gloo with queues of several kinds, beside the model.

    sudo python benchmarks/small_frames.py [KIND ...]

Two sites of two hosts (200 Mbit/s) are joined by 20 Mbit/s and 40 ms, as in the recorded case `sites2x2`. Data stand in
that link's queue, since hosts send faster; and so may acknowledgements and gloo's notes that a receiver is ready. The
kinds of queue are

    as-it-is      250 kB, drop-tail
    deep          25 MB: nothing is dropped
    acks-first    deep, and TCP's bare acknowledgements pass all others
    small-first   deep, and gloo's notes (48 bytes) do too

Printed are medians of real gloo's seconds with each, and the model's, in which small frames wait for nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import gloo
from shaped_links import ShapedLinks, sh, why_not

from netsim import Topology

KINDS = ("as-it-is", "deep", "acks-first", "small-first")
OPERATIONS = [(op, 2**20) for op in ("all_reduce", "all_gather", "reduce", "all_to_all")]
OPERATIONS += [("all_gather", 4 * 2**20)]
WARMUP, REPEATS = 1, 4
TOPOLOGY = {
    "name": "two-sites",
    "hosts": {name: {} for name in ("a0", "a1", "b0", "b1")},
    "routers": ["swa", "swb"],
    "links": [
        *(
            {"between": [host, f"sw{host[0]}"], "bandwidth": "200 Mbit/s", "latency": "50 us", "queue": 1650}
            for host in ("a0", "a1", "b0", "b1")
        ),
        {"between": ["swa", "swb"], "bandwidth": "20 Mbit/s", "latency": "40 ms"},
    ],
}
# Of the IP header's total length: a bare acknowledgement has 52 to 80 bytes, one of gloo's notes 100.
ACKS = [("0x0020", "0xffe0"), ("0x0040", "0xffe0")]
SMALL = [("0x0000", "0xff80")]


def set_queue(net: ShapedLinks, kind: str) -> None:
    """Have the link between the sites queue so, both ways."""
    for here, there in (("swa", "swb"), ("swb", "swa")):
        device = ["dev", net._out(here, there)]
        tc = ["tc", "-n", net.namespace(here)]
        if kind == "deep":
            sh(
                *tc,
                "qdisc",
                "change",
                *device,
                "root",
                "tbf",
                "rate",
                "20mbit",
                "burst",
                "3080",
                "limit",
                "25000000",
            )
        if kind in ("as-it-is", "deep"):
            continue
        shape = ["ceil", "20mbit", "burst", "3080", "cburst", "3080", "quantum", "1600"]
        sh(*tc, "qdisc", "replace", *device, "root", "handle", "1:", "htb", "default", "20")
        sh(*tc, "class", "add", *device, "parent", "1:", "classid", "1:1", "htb", "rate", "20mbit", *shape)
        for number, priority in (("10", "0"), ("20", "1")):
            kept = ["htb", "rate", "1mbit", *shape, "prio", priority]
            sh(*tc, "class", "add", *device, "parent", "1:1", "classid", f"1:{number}", *kept)
            sh(*tc, "qdisc", "add", *device, "parent", f"1:{number}", "bfifo", "limit", "25000000")
        for value, mask in ACKS if kind == "acks-first" else SMALL:
            match = ["u32", "match", "u16", value, mask, "at", "2", "flowid", "1:10"]
            sh(*tc, "filter", "add", *device, "parent", "1:", "protocol", "ip", *match)


def measured(kind: str) -> list[float]:
    """Median seconds of each operation over real gloo."""
    with ShapedLinks(Topology.from_mapping(TOPOLOGY)) as net, tempfile.TemporaryDirectory() as folder:
        set_queue(net, kind)
        started = []
        for rank, host in enumerate(net.topology.hosts):
            command = [
                *net.inside(host.name),
                "chrt",
                "-r",
                "10",
                sys.executable,
                __file__,
                "--rank",
                str(rank),
                folder,
            ]
            own = {**os.environ, "GLOO_SOCKET_IFNAME": net.interface(host.name), "OMP_NUM_THREADS": "1"}
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=own))
        ends = [json.loads(process.communicate(timeout=300)[0]) for process in started]
    last = [[max(rank[op][one] for rank in ends) for one in range(REPEATS)] for op in range(len(OPERATIONS))]
    return [statistics.median(each) for each in last]


def common_start(folder: Path, rank: int, num_ranks: int) -> float:
    """An instant of the machine's clock, agreed on by files: the links stay idle for as short as they can."""
    number = len(list(folder.glob(f"here-*-{rank}")))
    (folder / f"here-{number}-{rank}").touch()
    text = folder / f"start-{number}"
    while rank == 0 and len(list(folder.glob(f"here-{number}-*"))) < num_ranks:
        time.sleep(0.001)
    if rank == 0:
        written = folder / "written"
        written.write_text(repr(time.monotonic() + 0.03))
        written.rename(text)
    while not text.exists():
        time.sleep(0.001)
    return float(text.read_text())


def be_rank(rank: int, folder: str) -> None:
    """Print, per operation and repetition, seconds from the common start until this rank was through."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    found = []
    for op, num_bytes in OPERATIONS:
        whole, part = torch.ones(num_bytes // 4), torch.ones(num_bytes // 16)
        calls: dict[str, Any] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "reduce": lambda whole=whole: dist.reduce(whole, 0),
            "all_gather": lambda whole=whole, part=part: dist.all_gather_single(whole, part),
            "all_to_all": lambda whole=whole: dist.all_to_all_single(torch.empty_like(whole), whole),
        }
        seconds = []
        for _ in range(WARMUP + REPEATS):
            start = common_start(Path(folder), rank, 4)
            time.sleep(max(start - time.monotonic(), 0.0))
            calls[op]()
            seconds.append(time.monotonic() - start)
        found.append(seconds[WARMUP:])
    print(json.dumps(found))


def simulated() -> list[float]:
    """The model's seconds, from its recorded case."""
    compared = {
        each.label: each.simulated
        for each in gloo.compare(json.loads((gloo.CASES / "sites2x2.json").read_text()))
    }
    return [compared[f"{op} {num_bytes}"] for op, num_bytes in OPERATIONS]


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        be_rank(int(sys.argv[2]), sys.argv[3])
        return
    if reason := why_not():
        sys.exit(f"small_frames: {reason}")
    rows = [(kind, measured(kind)) for kind in sys.argv[1:] or KINDS] + [("model", simulated())]
    print("| queue | " + " | ".join(f"{op}, {size // 2**20} MiB" for op, size in OPERATIONS) + " |")
    print("|---" * (len(OPERATIONS) + 1) + "|")
    for name, seconds in rows:
        print(f"| {name} | " + " | ".join(f"{each:.3f}" for each in seconds) + " |")


if __name__ == "__main__":
    main()
