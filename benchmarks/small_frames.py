"""Waits of small frames between two sites: real gloo with queues of several kinds, alongside the model.

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
import statistics
import sys

import gloo
import gloo_ranks
import harness
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
        tc, device = f"tc -n {net.namespace(here)}", f"dev {net.out(here, there)}"
        if kind == "deep":
            sh(f"{tc} qdisc change {device} root tbf rate 20mbit burst 3080 limit 25000000")
        if kind in ("as-it-is", "deep"):
            continue
        shape = "ceil 20mbit burst 3080 cburst 3080 quantum 1600"
        sh(f"{tc} qdisc replace {device} root handle 1: htb default 20")
        sh(f"{tc} class add {device} parent 1: classid 1:1 htb rate 20mbit {shape}")
        for number, priority in ((10, 0), (20, 1)):
            kept = f"htb rate 1mbit {shape} prio {priority}"
            sh(f"{tc} class add {device} parent 1:1 classid 1:{number} {kept}")
            sh(f"{tc} qdisc add {device} parent 1:{number} bfifo limit 25000000")
        for value, mask in ACKS if kind == "acks-first" else SMALL:
            match = f"u32 match u16 {value} {mask} at 2 flowid 1:10"
            sh(f"{tc} filter add {device} parent 1: protocol ip {match}")


def measured(kind: str) -> list[float]:
    """Median seconds of each operation over real gloo."""
    with ShapedLinks(Topology.from_mapping(TOPOLOGY)) as net:
        set_queue(net, kind)
        ends = gloo_ranks.on_hosts(net, OPERATIONS, WARMUP + REPEATS)
    return [statistics.median(end["seconds"][WARMUP:]) for end in ends]


def simulated() -> list[float]:
    """The model's seconds, from its recorded case."""
    compared = {
        each.label: each.simulated
        for each in gloo.compare(json.loads((gloo.CASES / "sites2x2.json").read_text()))
    }
    return [compared[f"{op} {num_bytes}"] for op, num_bytes in OPERATIONS]


def main() -> None:
    if reason := why_not():
        sys.exit(f"small_frames: {reason}")
    rows = [(kind, measured(kind)) for kind in sys.argv[1:] or KINDS] + [("model", simulated())]
    harness.heading("queue", *(f"{op}, {size // 2**20} MiB" for op, size in OPERATIONS))
    for name, seconds in rows:
        harness.row(name, *(f"{each:.3f}" for each in seconds))


if __name__ == "__main__":
    main()
