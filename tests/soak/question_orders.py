"""Questions to `auto`, `netsim.collective` and plans on random networks: no answer depends on what was asked before.

    python tests/soak/question_orders.py --networks 300 --first 0 --out build/soak

A network is drawn from its number, of links that are alike but for a field or two. The last line of output is a JSON
object, appended to OUT too, with the questions whose answer was another after others than asked first.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from numbered import soak

import netgym
from netsim import Protocol, Topology, collective
from netsim.collectives.choice import Choices

LINK = {"bandwidth": "10 Gbit/s", "latency": "20 ms"}
# Every field of a link, with values that choose other algorithms.
FIELDS: dict[str, tuple[Any, ...]] = {
    "bandwidth": ("2 Mbit/s", "1 Gbit/s"),
    "latency": ("100 us", "60 ms"),
    "loss": ("0.01 %", "1 %"),
    "queue": (100, 100_000),
    "egress": ("0.02 $/GB", "1 $/GB"),
    "measured": ({"streams": 1}, {"streams": 8}),
}
PROTOCOLS: tuple[Any, ...] = (
    "ideal",
    "linux-tcp",
    "nccl-sockets",
    {"preset": "linux-tcp", "streams": 8},
    {"preset": "linux-tcp", "connections": "per-transfer"},
)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
STRATEGIES = ("AllReduce", "DiLoCo", "FedAvg")


def network(draw: random.Random) -> dict[str, Any]:
    """Groups of hosts around a router, equal but for a field or two of their links."""
    size = draw.randrange(2, 5)
    kinds = [{**LINK}]
    for _ in range(draw.randrange(1, 4)):
        fields = draw.sample(sorted(FIELDS), draw.choice((1, 1, 2)))
        kinds.append({**draw.choice(kinds), **{name: draw.choice(FIELDS[name]) for name in fields}})
    hosts = [f"h{index}" for index in range(size * len(kinds))]
    in_regions = draw.random() < 0.3
    return {
        "hosts": {host: {"region": draw.choice("xy")} if in_regions else {} for host in hosts},
        "routers": ["hub"],
        "links": [{"between": [host, "hub"], **kinds[index // size]} for index, host in enumerate(hosts)],
        "protocol": draw.choice(PROTOCOLS),
    }


def questions(topology: Topology, draw: random.Random, number: int) -> list[Callable[[Choices], Any]]:
    """Questions about a network, to be asked of one `Choices` or of a fresh one each."""
    asked: list[Callable[[Choices], Any]] = []
    hosts = list(range(len(topology.hosts)))
    for _ in range(number):
        op, size = draw.choice(OPERATIONS), int(draw.choice((1e3, 13e3, 64e3, 1e6, 4 << 20, 16 << 20)))
        num = draw.choice((2, 3, 4))
        groups = [hosts[first : first + num] for first in range(0, len(hosts), num)] + [
            draw.sample(hosts, num)
        ]
        asked += [partial(_chosen, op, group, size) for group in groups]
        asked.append(partial(_timed, op, draw.choice(groups), size, topology))
    return asked


def _chosen(op: str, hosts: list[int], size: int, choices: Choices) -> Any:
    return op, hosts, size, choices.algorithm(op, hosts, size)


def _timed(op: str, hosts: list[int], size: int, topology: Topology, choices: Choices) -> Any:
    took = collective(topology, op, num_bytes=size, ranks=hosts)
    return op, hosts, size, took.algorithm, took.seconds, took.bound_seconds, took.link_bytes


def depends_on_order(mapping: dict[str, Any], draw: random.Random, number: int) -> list[str]:
    """Questions whose answers differ between a fresh `Choices` each, and one that is asked them in random order."""
    topology = Topology.from_mapping(mapping)
    asked = questions(topology, draw, number)
    protocol = Protocol.resolve(topology.protocol)
    fresh = [question(Choices(topology, protocol)) for question in asked]
    shared, order = Choices(topology, protocol), list(range(len(asked)))
    draw.shuffle(order)
    return [f"{fresh[at]} not {again}" for at in order if (again := asked[at](shared)) != fresh[at]]


def plans_depend_on_order(mapping: dict[str, Any], draw: random.Random) -> list[str]:
    """Strategies whose row of a plan differs between a plan of its own, and one among others in random order."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "drawn.yaml"
        path.write_text(json.dumps(mapping))

        def rows(names: list[str]) -> dict[str, Any]:
            planned = netgym.plan(
                model="llama-2m", strategies=names, topology=str(path), tokens="1e6", device="h100"
            )
            return {row["strategy"]: {**row, "place": None} for row in planned}

        alone = {name: rows([name])[name] for name in STRATEGIES}
        together = rows(draw.sample(STRATEGIES, len(STRATEGIES)))
        return [f"plan of {name}" for name in STRATEGIES if together[name] != alone[name]]


def different_answers(number: int) -> list[str]:
    """Questions about the network of a number whose answers depend on others; of every tenth, plans too."""
    draw = random.Random(number)
    mapping = network(draw)
    different = depends_on_order(mapping, draw, 4)
    return different + (plans_depend_on_order(mapping, draw) if number % 10 == 0 else [])


if __name__ == "__main__":
    soak(__doc__, "networks", 300, different_answers)
