"""Random runs on random networks whose links fail, whose hosts crash and whose rates change: every run ends, rightly.

    python tests/soak/fault_scenarios.py --scenarios 2000 --first 0 --out build/soak

A scenario is drawn from its number. What must hold: the run ends; finished, with the values that its calls have by
definition, at a time no earlier than light and the widest links allow; or with a DeadlockError that names a rank. Every
fourth is run again, in processes, to the same bits. The last line of output is a JSON object, appended to OUT too.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from exogym_core.communicator import run_ranks
from netsim.errors import DeadlockError

SECONDS_FOR_ONE = 120
_TIMES = (0.0, 0.003, 0.01, 0.0301, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0)
_RATES = ("64 kbit/s", "1 Mbit/s", "20 Mbit/s", "1 Gbit/s")


def drawn(number: int) -> tuple[dict[str, Any], int, list[tuple[Any, ...]]]:
    """The topology, the number of ranks and the program of a scenario."""
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
    topology["protocol"] = draw.choice(["ideal", "linux-tcp", "gloo"])
    topology["events"] = [_event(draw, hosts, pairs) for _ in range(draw.randint(0, 6))]
    _add_changes(draw, topology, hosts, pairs)
    num_ranks = draw.randint(2, num_hosts + 2)
    return topology, num_ranks, [_step(draw, num_ranks) for _ in range(draw.randint(1, 8))]


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


def _step(draw: random.Random, num_ranks: int) -> tuple[Any, ...]:
    what = draw.choice(["all_reduce", "async", "all_gather", "broadcast", "all_to_all", "ring", "compute"])
    members = tuple(sorted(draw.sample(range(num_ranks), draw.randint(2, num_ranks))))
    return what, members, draw.choice((1, 300, 20_000)), draw.choice((0.0, 0.01, 0.2))


def body_of(program: list[tuple[Any, ...]]) -> Any:
    """What every rank does; it checks what it gets."""

    def body(comm: Any) -> Any:
        seen = []
        for what, members, size, seconds in program:
            comm.advance(seconds * (1 + comm.rank % 2))
            if comm.rank in members:
                _perform(comm.group(members), what, size)
            seen.append(comm.now())
        return seen

    return body


def _perform(group: Any, what: str, size: int) -> None:
    me, everybody = group.rank, group.world_size
    mine = torch.full((size,), float(me + 1))
    if what in ("all_reduce", "async"):
        handle = group.all_reduce(mine, async_op=True)
        group.advance(0.01 if what == "async" else 0.0)
        assert handle.wait()[0] == everybody * (everybody + 1) / 2
    elif what == "all_gather":
        assert [float(part[0]) for part in group.all_gather(mine)] == [
            rank + 1.0 for rank in range(everybody)
        ]
    elif what == "broadcast":
        assert group.broadcast(mine, src=everybody - 1)[0] == everybody
    elif what == "all_to_all":
        got = group.all_to_all([torch.full((size,), me * 100.0 + rank) for rank in range(everybody)])
        assert [float(part[0]) for part in got] == [rank * 100.0 + me for rank in range(everybody)]
    elif what == "ring":
        sent = group.isend(mine, (me + 1) % everybody)
        assert group.recv(torch.empty(size), (me - 1) % everybody)[0] == (me - 1) % everybody + 1
        sent.wait()


def simulate(number: int) -> str:
    """Run a scenario; `finished` or `deadlock`. Raises whatever is wrong."""
    topology, num_ranks, program = drawn(number)
    first = _outcome(topology, num_ranks, program, "threads")
    if number % 4 == 0:
        again = _outcome(topology, num_ranks, program, {"kind": "processes", "processes": 2})
        assert again == first, f"processes: {again}; threads: {first}"
    return "deadlock" if isinstance(first, str) else "finished"


def _outcome(topology: dict[str, Any], num_ranks: int, program: list[tuple[Any, ...]], workers: Any) -> Any:
    try:
        run = run_ranks(body_of(program), num_ranks, topology, workers=workers, seed=1)
    except DeadlockError as error:
        line = str(error).splitlines()[0]
        assert line.isprintable(), line
        assert "rank" in line, line
        return line
    seconds = [sum(step[3] for step in program) * (1 + rank % 2) for rank in range(num_ranks)]
    for rank, ends in enumerate(run.results):
        assert ends == sorted(ends)
        assert ends[-1] >= seconds[rank] * (1 - 1e-9)
    return (
        run.results,
        run.rank_virtual_seconds,
        [vars(each) if hasattr(each, "__dict__") else str(each) for each in run.traffic],
    )


def main() -> None:
    """Read the command line, and simulate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenarios", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no more after so long")
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_long)
    ends, found = {"finished": 0, "deadlock": 0}, {}
    deadline, num_run = time.monotonic() + options.seconds, 0
    for number in range(options.first, options.first + options.scenarios):
        if time.monotonic() > deadline:
            break
        num_run += 1
        signal.alarm(SECONDS_FOR_ONE)
        try:
            ends[simulate(number)] += 1
        except Exception as error:
            found[number] = "".join(traceback.format_exception(error))[-1500:]
        finally:
            signal.alarm(0)
    spent = {
        "first": options.first,
        "scenarios": num_run,
        **ends,
        "cpu_seconds": round(time.process_time(), 1),
    }
    text = json.dumps({**spent, "found": found})
    with (options.out / "faults.jsonl").open("a") as file:
        file.write(text + "\n")
    print(text)
    sys.exit(1 if found else 0)


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"more than {SECONDS_FOR_ONE} s")


if __name__ == "__main__":
    main()
