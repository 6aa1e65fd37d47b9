"""Random runs on random networks whose links fail, whose hosts crash and whose rates change: every run ends, rightly.

    python tests/soak/fault_scenarios.py --scenarios 2000 --first 0 --out build/soak

A scenario is drawn from its number. What must hold: the run ends; finished, with the values that its calls have where
nothing fails, at a time no earlier than its computing takes; or with a DeadlockError that names a rank. Every fourth is
run again, in processes, to the same bits. The last line of output is a JSON object, appended to OUT too.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
from numbered import soak

from exogym_core.testing import RankProgram
from exogym_core.testing.drawing import EVENT_BYTES, picked_ranks

_TIMES = (0.0, 0.003, 0.01, 0.0301, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
_RATES = ("64 kbit/s", "1 Mbit/s", "20 Mbit/s", "1 Gbit/s")


def drawn(number: int) -> RankProgram:
    """The scenario of a number."""
    draw = random.Random(number)
    num_hosts = draw.randint(2, 5)
    hosts = [f"h{index}" for index in range(num_hosts)]
    if draw.random() < 0.5:
        pairs, routers = [(host, "hub") for host in hosts], ["hub"]
    else:
        pairs, routers = [(hosts[index], hosts[index + 1]) for index in range(num_hosts - 1)], []
    links = [
        {
            "between": list(pair),
            "up": draw.choice(_RATES),
            "down": draw.choice(_RATES),
            "latency": f"{draw.choice((0, 1, 20, 80))} ms",
        }
        | ({"loss": f"{draw.choice((0.1, 1, 5))} %"} if draw.random() < 0.2 else {})
        for pair in pairs
    ]
    topology: dict[str, Any] = {"hosts": {host: {} for host in hosts}, "routers": routers, "links": links}
    topology["events"] = [_event(draw, hosts, pairs) for _ in range(draw.randint(0, 6))]
    _add_changes(draw, topology, hosts, pairs)
    num_ranks, num_events = draw.randint(2, num_hosts + 2), draw.randint(1, 12)
    ranks = picked_ranks(draw.randbytes(num_events * EVENT_BYTES), num_ranks, two_way=False)
    return RankProgram(ranks, topology, draw.choice(["ideal", "linux-tcp", "gloo"]))


def _event(draw: random.Random, hosts: list[str], pairs: list[tuple[str, str]]) -> dict[str, Any]:
    at = {"at": f"{draw.choice(_TIMES)} s"}
    if draw.random() < 0.25:
        return (
            at
            | {"host": draw.choice(hosts)}
            | draw.choice([{"crash": True, "for": "0.5 s"}, {"crash": True}, {"up": True}])
        )
    pair: dict[str, Any] = at | {
        "link": list(draw.choice(pairs)),
        "direction": draw.choice(["both", "up", "down"]),
    }
    what: list[dict[str, Any]] = [
        {"down": True},
        {"down": True, "for": "0.2 s"},
        {"down": True, "for": "3 s"},
        {"up": True},
    ]
    what += [{"bandwidth": rate} for rate in ("0 bit/s", *_RATES)]
    what += [{"latency": "0.3 s"}, {"latency": "0 s", "for": "1 s"}, {"loss": "2 %"}, {"loss": "0 %"}]
    return pair | draw.choice(what)


def _add_changes(
    draw: random.Random, topology: dict[str, Any], hosts: list[str], pairs: list[tuple[str, str]]
) -> None:
    if draw.random() < 0.3:
        rows = [[f"{at} s", draw.choice(_RATES)] for at in sorted(draw.sample(_TIMES, 4))]
        topology["traces"] = [{"link": list(draw.choice(pairs)), "bandwidth": rows}]
    if draw.random() < 0.3:
        traffic = draw.choice(
            [
                {"rate": "500 kbit/s"},
                {"bytes": "20 kB", "every": "0.3 s"},
                {"rate": "10 Mbit/s", "stop": "1 s"},
            ]
        )
        topology["background"] = [{"from": hosts[0], "to": hosts[-1], **traffic}]
    if draw.random() < 0.3:
        kind = draw.choice(
            [{"kind": "lognormal", "sigma": 0.3}, {"kind": "regime", "levels": ["100 %", "10 %"]}]
        )
        topology["drift"] = [
            {"link": list(draw.choice(pairs)), "every": "0.5 s", "seed": draw.randint(0, 99), **kind}
        ]


def simulate(number: int) -> str:
    """Run a scenario; `finished` or `deadlock`. Raises whatever is wrong."""
    scenario = drawn(number)
    first = scenario.check([2] if number % 4 == 0 else [])
    if "error" in first:
        line = first["error"]
        assert line.startswith("DeadlockError: "), line
        assert line.isprintable(), line
        assert "rank" in line, line
        return "deadlock"
    calm = {key: scenario.topology[key] for key in ("hosts", "routers", "links")}
    assert first["results"] == replace(scenario, topology=calm).outcome()["results"]
    for rows, end, computed in zip(first["rows"], first["ends"], first["compute"], strict=True):
        assert rows == sorted(rows, key=lambda row: row[0])
        assert end >= computed * (1 - 1e-9)
    return "finished"


if __name__ == "__main__":
    torch.set_num_threads(1)
    soak(__doc__, "scenarios", 2000, simulate)
