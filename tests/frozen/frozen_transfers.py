"""Random transfers on random networks in all weathers: when each is sent, delivered, dropped or refused.

A case's answer: `times` of what happened to each transfer (`d` delivered, `s` sent, `x` dropped, `a` aborted, and its
number), `ties`, the call order of what happened at one instant, `aborted` bytes, `looks` at link bytes, and `error`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from random import Random
from typing import Any

from frozen_networks import PROTOCOLS, WEATHERS, digest, mapping_of, with_weather

import netsim
from netsim import Faults

__all__ = ["Drive", "actions_of", "answer", "names"]

_SPAN_MS = 3000
_TOPOLOGIES = (
    "tree",
    "star",
    "wan-4-regions",
    "tree",
    "home-broadband",
    "tree",
    "opendiloco-4-sites",
    "star",
    "two-datacenters",
    "tree",
    "lan",
    "intellect-1-usa-eu",
    "tree",
    "home-tiers",
)
_FOLLOWING = ("follow", "chase")  # once the one before is delivered, or has left its sender
_PRESETS = ("ideal", "linux-tcp", "gloo")


def names() -> list[str]:
    """Every protocol in every weather, presets more often, each time on another network."""
    rounds = {name: 8 if name in _PRESETS[:2] else 5 if name == "gloo" else 3 for name in PROTOCOLS}
    chosen = [
        (protocol, weather, count)
        for protocol, most in rounds.items()
        for weather in (*WEATHERS, "give-up", "given-up")
        for count in range(2 if weather.startswith("give") else most)
    ]
    chosen += [(protocol, f"flows-{weather}", 0) for protocol in _PRESETS for weather in WEATHERS]
    return [
        f"{protocol} {weather} {_TOPOLOGIES[(number * 5 + number // 14) % len(_TOPOLOGIES)]} {count}"
        for number, (protocol, weather, count) in enumerate(chosen)
    ]


def answer(name: str) -> dict[str, Any]:
    """What today's engine makes of a case."""
    protocol, weather, where, _ = name.split()
    draw = Random(f"transfers {name}")
    mapping = mapping_of(where, draw)
    topology = netsim.Topology.from_mapping(mapping)
    actions = actions_of(topology, weather, draw, draw.choice([20, 25, 30, 30, 40, 60]))
    if weather.startswith("give"):
        mapping = {**mapping, "events": _cuts(topology)}
    else:
        mapping = with_weather(mapping, weather.removeprefix("flows-"), draw, _SPAN_MS)
    given = [where if where in ("tree", "star") else "", mapping, PROTOCOLS[protocol], actions]
    if where not in ("tree", "star"):
        given[1] = [where, *(mapping.get(key) for key in ("events", "traces", "drift", "background"))]
    if weather.startswith("flows-"):
        result = _flows(mapping, PROTOCOLS[protocol], actions)
    else:
        result = Drive(mapping, PROTOCOLS[protocol], actions, weather).run()
    return {"given": digest(given), **result}


def _cuts(topology: netsim.Topology) -> list[dict[str, Any]]:
    """Two links go down for longer than any protocol waits, one of them comes back in time."""
    ends = [[link.source, link.target] for link in topology.links]
    return [
        {"at": "700 ms", "link": ends[0], "down": True, "for": "3000 s"},
        {"at": "300 ms", "link": ends[-1], "down": True, "for": "800 s"},
    ]


# -- what is done ---------------------------------------------------------------------------------------------------


def actions_of(topology: netsim.Topology, weather: str, draw: Random, num: int) -> list[list[Any]]:
    """What is done with `num` transfers and when, in order: [millisecond, verb, ...]."""
    mean = draw.choice([20_000, 100_000, 400_000, 400_000, 4_000_000])
    instants = [0, 0, 1000, *(draw.randrange(_SPAN_MS) for _ in range(num // 2))]
    actions: list[list[Any]] = []
    follows: list[int] = []
    for number in range(num):
        row = _row(topology, draw, mean)
        if number and number - 1 not in follows and draw.randrange(10) == 0:
            follows.append(number)
            actions.append([-1, draw.choice(_FOLLOWING), number, *row])
            continue
        at = draw.choice(instants)
        actions.append([at, "send", number, *row])
        if draw.randrange(12) == 0:
            actions.append([at + draw.randrange(1500), "abort", number])
    if weather == "direct":
        actions += _changes(topology, draw)
    for _ in range(draw.randrange(3)):
        actions.append([draw.randrange(1, 2 * _SPAN_MS), "look"])
    return sorted(actions, key=itemgetter(0))


def _row(topology: netsim.Topology, draw: Random, mean: int) -> list[Any]:
    """Source, target, bytes, connection, whether its sender hears of what is sent, most bytes per second."""
    hosts = len(topology.hosts)
    source, target = draw.randrange(hosts), draw.randrange(hosts)
    if draw.randrange(5):  # mostly between few pairs, so that they meet
        source, target = draw.randrange(min(hosts, 3)), hosts - 1 - draw.randrange(min(hosts, 2))
    num_bytes = draw.choice(
        [0, 1, 1448, mean, draw.randrange(4 * mean), draw.randrange(2 * mean), draw.randrange(mean)]
    )
    cap = draw.choice([5_000, 40_000, 1_000_000]) if draw.randrange(10) == 0 else None
    connection = f"cap {cap}" if cap else draw.choice([None, None, "a", "b", 7])
    return [source, target, num_bytes, connection, bool(draw.randrange(3)), cap]


def _changes(topology: netsim.Topology, draw: Random) -> list[list[Any]]:
    """Links changed by hand, all up again in the end."""
    actions: list[list[Any]] = []
    for _ in range(8):
        link, at = draw.randrange(len(topology.links)), draw.randrange(_SPAN_MS)
        rate = topology.links[link].bits_per_second
        verb, *values = draw.choice(
            [
                ["set_capacity", 0.0, rate / 2],
                ["set_capacity", rate / 4, rate * 2],
                ["set_latency", draw.randrange(100) / 1000, draw.randrange(100) / 1000],
                ["set_loss", draw.randrange(20) / 10_000, 0.0],
                ["set_link_up", False, True],
            ]
        )
        actions.append([at, verb, link, values[0]])
        actions.append([at + draw.randrange(1, 2000), verb, link, values[1]])
    last = {(link, verb): value for _, verb, link, value in sorted(actions, key=itemgetter(0))}
    for (link, verb), value in last.items():
        if not value and verb in ("set_capacity", "set_link_up"):
            actions.append(
                [
                    2 * _SPAN_MS,
                    verb,
                    link,
                    topology.links[link].bits_per_second if verb == "set_capacity" else True,
                ]
            )
    return actions


def _flows(mapping: dict[str, Any], protocol: Any, actions: list[list[Any]]) -> dict[str, Any]:
    """The transfers that are sent outright, as `netsim.flows` times them."""
    rows = [[at / 1000, *row[1:4]] for at, verb, *row in actions if verb == "send"]
    return {"times": netsim.flows(mapping, rows, protocol).finish_seconds}


# -- doing it -------------------------------------------------------------------------------------------------------


class Drive:
    """One case on a network of its own."""

    def __init__(
        self, mapping: dict[str, Any], protocol: Any, actions: list[list[Any]], weather: str
    ) -> None:
        self._clock = netsim.Clock()
        self.network = netsim.Network(self._clock, netsim.Topology.from_mapping(mapping), protocol)
        self._actions, self._weather = actions, weather
        self._followers = {action[2] - 1: action for action in actions if action[1] in _FOLLOWING}
        self._left = {action[2] for action in actions if action[1] in ("send", *_FOLLOWING)}
        self._ids: dict[int, int] = {}
        self._log: list[tuple[float, str]] = []
        self._aborted: dict[str, float | str] = {}
        self._looks: list[dict[str, float]] = []

    def run(self) -> dict[str, Any]:
        self._clock.process(self._act())
        result: dict[str, Any] = {}
        try:
            if self._weather in ("none", "direct"):
                self._clock.run()
            else:
                faults = Faults(self.network)
                if self._weather == "given-up":
                    faults.on_stuck = self._stuck
                faults.run_until(lambda: not self._left)
        except netsim.DeadlockError as error:
            result["error"] = [self._clock.now, str(error)]
        self._look()
        return {
            "times": self._times(),
            "ties": self._ties(),
            "aborted": self._aborted,
            "looks": self._looks,
            **result,
        }

    def _times(self) -> dict[str, float]:
        seen: Counter[str] = Counter()
        times = {}
        for instant, what in self._log:
            seen[what] += 1
            times[what if seen[what] == 1 else f"{what}#{seen[what]}"] = instant
        return times

    def _ties(self) -> list[str]:
        groups = [[what for _, what in group] for _, group in groupby(self._log, key=itemgetter(0))]
        return [" ".join(group) for group in groups if len(group) > 1]

    def _act(self) -> Iterator[Any]:
        for at, verb, *rest in self._actions:
            if verb in _FOLLOWING:
                continue
            if at / 1000 > self._clock.now:
                yield self._clock.at(at / 1000)
            if verb == "send":
                self._send(*rest)
            elif verb == "abort":
                self._abort(*rest)
            elif verb == "look":
                self._look()
            else:
                getattr(self.network, verb)(*rest)

    def _send(
        self,
        number: int,
        source: int,
        target: int,
        num_bytes: int,
        connection: Any,
        hears: bool,
        cap: int | None,
    ) -> None:
        options: dict[str, Any] = {} if cap is None else {"most_bytes_per_second": cap}
        if hears:
            options["on_sent"] = partial(self._leave, number)
        if self._weather == "crash-told":
            options["on_dropped"] = partial(self._end, "x", number)
        delivered = partial(self._end, "d", number)
        self._ids[number] = self.network.send(
            source, target, num_bytes, delivered, connection=connection, **options
        )

    def _abort(self, number: int) -> None:
        if number not in self._left:
            return
        try:
            self._aborted[str(number)] = round(self.network.abort(self._ids[number]), 3)
        except netsim.InputError:  # a crash has had it sent again, as another transfer
            self._aborted[str(number)] = "refused"
            return
        self._end("a", number)

    def _note(self, what: str, number: int) -> None:
        self._log.append((self._clock.now, f"{what}{number}"))

    def _leave(self, number: int) -> None:
        self._note("s", number)
        if number in self._followers and self._followers[number][1] == "chase":
            self._send(*self._followers.pop(number)[2:])

    def _end(self, what: str, number: int) -> None:
        self._note(what, number)
        self._left.discard(number)
        follower = self._followers.pop(number, None)
        if follower is not None:
            if what == "d":  # in the instant of the delivery
                self._send(*follower[2:])
            else:
                self._left.discard(number + 1)

    def _stuck(self, reason: str) -> None:
        self._log.append((self._clock.now, f"stuck: {reason}"))
        if len([what for _, what in self._log if what.startswith("stuck")]) > 40:
            raise netsim.DeadlockError("stuck often enough")

    def _look(self) -> None:
        crossed = [round(float(num_bytes), 3) for num_bytes in self.network.link_bytes]
        self._looks.append({str(link): num_bytes for link, num_bytes in enumerate(crossed) if num_bytes})
