"""Real gloo on fast links between namespaces of this machine, alongside the model.

    sudo python benchmarks/gloo_cores.py [CELL ...]

Calls the cells of `netgym/planning/measured_runs/gloo-cores.yaml` whose names begin with a CELL (default: all) six
times each, and prints the median of the last five and the simulated time. `processor` is the time of gloo's threads in
a call (`gloo_tcp_loop`, which sends and receives, and `pt_gloo_runloop`, which posts and adds) on the rank that takes
most. Interfaces keep their offloads, as network cards have them; ranks have real-time priority.
"""

from __future__ import annotations

import re
import statistics
import sys
from itertools import groupby

import gloo_ranks
from harness import heading, machine, parser, row
from shaped_links import ShapedLinks, why_not

from netgym.planning.reproduce import reproduce
from netsim import Topology

CALLS = 6
CELL = re.compile(r"(\w+), (\d) hosts, (not shaped|[\d.]+ Gbit/s), (\d+) MB")


def topology_of(num_hosts: int, rate: str) -> Topology:
    """Two hosts in a line, or more behind a router; crossing a namespace is all the latency."""
    hosts = [f"h{number}" for number in range(num_hosts)]
    pairs = [hosts] if num_hosts == 2 else [[host, "router"] for host in hosts]
    bandwidth = "100 Gbit/s" if rate == "not shaped" else rate
    links = [{"between": pair, "bandwidth": bandwidth, "mtu": 9000} for pair in pairs]
    return Topology.from_mapping({"hosts": hosts, "routers": ["router"][: num_hosts - 2], "links": links})


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("cells", nargs="*", metavar="CELL", default=[""])
    wanted = tuple(arguments.parse_args().cells)
    if reason := why_not():
        sys.exit(f"gloo_cores: {reason}")
    cells = [
        (cell, match.groups())
        for cell in reproduce("gloo-cores")
        if cell["what"].startswith(wanted) and (match := CELL.fullmatch(cell["what"]))
    ]
    print(machine())
    heading("cell", "real", "simulated", "error", "processor")
    for (num_hosts, rate), group in groupby(cells, lambda each: each[1][1:3]):
        made = list(group)
        shaper = f"tbf rate {rate.replace(' Gbit/s', 'gbit')} burst 70kb limit 4mb"
        with ShapedLinks(topology_of(int(num_hosts), rate), shaper=shaper) as net:
            ends = gloo_ranks.on_hosts(net, [(op, int(mb) * 10**6) for _, (op, _, _, mb) in made], CALLS)
        for (cell, _), end in zip(made, ends, strict=True):
            real = statistics.median(end["seconds"][1:]) * 1e3
            row(
                cell["what"],
                f"{real:.4g} ms",
                f"{cell['predicted']:.4g} ms",
                f"{cell['predicted'] / real - 1:+.1%}",
                f"{end['thread_seconds'] * 1e3:.3g} ms",
            )


if __name__ == "__main__":
    main()
