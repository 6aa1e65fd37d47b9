"""What is said of programs that cannot end, of calls that disagree, and of deadlocks under weather: word by word.

Line numbers of this file are left out: they are no part of an answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from types import FunctionType
from typing import Any

import confused
from frozen_networks import digest

import netsim
from exogym_core.communicator import Communicator, run_ranks
from netsim import Faults

__all__ = ["answer", "names"]

_DOWN = [{"at": "0.5 s", "link": ["b", "switch"], "down": True}]
_DOWN_LONG = [{"at": "0.5 s", "link": ["b", "switch"], "down": True, "for": "5000 s"}]
_CRASH = [{"at": "0.1 s", "host": "b", "crash": True}]
_ENDLESS = {
    "drift": [{"link": ["c", "switch"], "kind": "lognormal", "every": "10 s", "sigma": 0.3}],
    "background": [
        {"from": "d", "to": "c", "rate": "1 Mbit/s"},
        {"from": "d", "to": "c", "bytes": 10_000, "every": "3 s"},
    ],
}
_WEATHERS: dict[str, dict[str, Any]] = {
    "calm": {},
    "endless": _ENDLESS,
    "down": {"events": _DOWN},
    "down-endless": {"events": _DOWN, **_ENDLESS},
    "down-long": {"events": _DOWN_LONG},
    "crash": {"events": _CRASH},
    "crash-down": {"events": [*_CRASH, *_DOWN]},
    "no-rate": {"events": [{"at": "0.2 s", "link": ["a", "switch"], "bandwidth": "0 bit/s"}]},
    "trace-to-nothing": {
        "traces": [{"link": ["a", "switch"], "bandwidth": [["0 s", "1 Mbit/s"], ["1 s", "0 bit/s"]]}]
    },
}
_PRESETS = ("ideal", "linux-tcp", "gloo")


def _star(weather: str) -> dict[str, Any]:
    """a, b, c, d behind a switch, 8 Mbit/s and 10 ms each."""
    links = [{"between": [name, "switch"], "bandwidth": "8 Mbit/s", "latency": "10 ms"} for name in "abcd"]
    return {"name": "star", "hosts": [*"abcd"], "routers": ["switch"], "links": links, **_WEATHERS[weather]}


# -- programs of three ranks ----------------------------------------------------------------------------------------


def _late_all_reduce(comm: Communicator) -> None:
    comm.advance(1.0)
    comm.all_reduce(confused.ones(250_000))


def _long_all_reduce(comm: Communicator) -> None:
    comm.all_reduce(confused.ones(500_000))
    comm.barrier()


def _a_message_to_the_lost(comm: Communicator) -> None:
    comm.advance(0.7)
    if comm.rank == 0:
        comm.send(confused.ones(1000), 1)
    elif comm.rank == 1:
        comm.recv(confused.ones(1000), 0)


def _letters_to_a_server(comm: Communicator) -> None:
    if comm.rank == 0:
        while comm.take(wait=math.inf):
            pass
        return
    comm.advance(0.7 * comm.rank)
    comm.put(confused.ones(1000), 0)


_CONFUSED = tuple(
    body for name, body in vars(confused).items() if isinstance(body, FunctionType) and name != "ones"
)
_WEATHERED = (_late_all_reduce, _long_all_reduce, _a_message_to_the_lost, _letters_to_a_server)
_PROGRAMS: dict[str, Callable[[Communicator], Any]] = {
    body.__name__.strip("_"): body for body in (*_CONFUSED, *_WEATHERED)
}


def names() -> list[str]:
    """Kind, program or operation, weather, protocol."""
    cases = [
        f"ranks {body.__name__.strip('_')} {weather} {protocol}"
        for body in _CONFUSED
        for weather, protocol in (("calm", "ideal"), ("endless", "linux-tcp"), ("calm", "gloo"))
    ]
    fateful = [weather for weather in _WEATHERS if weather not in ("calm", "endless")]
    cases += [
        f"ranks {body.__name__.strip('_')} {weather} {protocol}"
        for body in _WEATHERED
        for weather in fateful
        for protocol in _PRESETS
    ]
    cases += [
        f"{kind} {what} {weather} {protocol}"
        for kind, what in (
            ("flows", "-"),
            ("faults", "-"),
            ("collective", "all_reduce"),
            ("collective", "gather"),
        )
        for weather in fateful
        for protocol in _PRESETS
    ]
    return [*cases, "network - calm linux-tcp", "network - calm gloo"]


def answer(name: str) -> dict[str, Any]:
    """What is said, or how it ended."""
    kind, what, weather, protocol = name.split()
    run = {
        "ranks": _ranks,
        "flows": _flows,
        "faults": _faults,
        "collective": _collective,
        "network": _network,
    }
    result = {"given": digest([kind, what, _star(weather), protocol])}
    try:
        ended = run[kind](what, _star(weather), protocol)
    except (ValueError, RuntimeError, ZeroDivisionError) as error:
        line = re.sub(r"(frozen_verdicts|confused)\.py:\d+", "frozen_verdicts.py:LINE", str(error))
        frame = r'".*/(frozen_verdicts|confused)\.py", line \d+, in _?'
        line = re.sub(frame, '"frozen_verdicts.py", line LINE, in _', line)
        return {**result, "error": type(error).__name__, "text": line.splitlines()}
    return {**result, "ends": ended}


def _ranks(what: str, mapping: dict[str, Any], protocol: str) -> list[float] | None:
    run = run_ranks(
        _PROGRAMS[what], 3, mapping, protocol=protocol, placement=["a", "b", "c"], collectives="ring"
    )
    return run.rank_virtual_seconds


def _flows(what: str, mapping: dict[str, Any], protocol: str) -> list[float]:
    rows = [(0.0, "a", "c", 0), (0.0, "a", "b", 1_000_000), (0.3, "c", "a", 500_000), (2.0, "b", "d", 1)]
    return netsim.flows(mapping, rows, protocol).finish_seconds


def _faults(what: str, mapping: dict[str, Any], protocol: str) -> list[float]:
    clock = netsim.Clock()
    network = netsim.Network(clock, netsim.Topology.from_mapping(mapping), protocol)
    faults = Faults(network)
    ends: list[float] = []
    network.send(0, 2, 10_000, lambda: ends.append(clock.now))
    network.send(0, 1, 1_000_000, lambda: ends.append(clock.now))
    faults.run_until(lambda: len(ends) == 2)
    return ends


def _collective(what: str, mapping: dict[str, Any], protocol: str) -> list[float]:
    result = netsim.collective(mapping, what, num_bytes=2_000_000, algorithm="gloo", protocol=protocol)
    return result.rank_seconds


def _network(what: str, mapping: dict[str, Any], protocol: str) -> list[float]:
    """A link that is taken down by hand, and never comes back."""
    clock = netsim.Clock()
    network = netsim.Network(clock, netsim.Topology.from_mapping(mapping), protocol)
    network.send(0, 1, 1_000_000, lambda: None)
    network.set_link_up(network.topology.route(0, 1)[0], False)
    clock.run()
    return [clock.now]
