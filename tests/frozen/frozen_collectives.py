"""Every operation by every algorithm, alone and among others: when each member is through.

A case's answer: `ends`, by collective, repetition and member, and `looks`, the bytes that crossed each link in the end;
of `netsim.collective`, what it returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

from frozen_networks import PROTOCOLS, digest, mapping_of, star, with_weather

import netsim
from netsim import Faults, schedule, start_collective
from netsim.collectives.schedules.algorithms import ALGORITHMS
from netsim.collectives.start import start_all_to_all

__all__ = ["Drive", "answer", "names"]

_PRESETS = ("ideal", "linux-tcp", "gloo")
_SCENARIOS = (
    "alone",
    "thrice",
    "overlapped",
    "jittered",
    "shared",
    "row",
    "weather",
    "traffic",
    "cancelled",
)
_TOPOLOGIES = (
    "star",
    "wan-4-regions",
    "lan",
    "home-broadband",
    "tree",
    "two-datacenters",
    "opendiloco-4-sites",
)
_SIZES = (0, 1, 1003, 50_000, 1_000_000)
_WEATHERS = ("events", "traces", "drift", "steady", "periodic", "crash", "mixed")
_UNEVEN = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
_VARIANTS = 3
_VARIATIONS = ("per-transfer", "shallow-queue", "gloo-2-streams", "handshake")


def _offered(op: str) -> list[str]:
    """Algorithms that are played; NCCL's are frozen in calls over lines that lose packets."""
    return [name for name, row in ALGORITHMS[op].items() if row.is_offered]


def names() -> list[str]:
    """Operation, algorithm, protocol, scenario, number; then uneven ones; then those of `netsim.collective`."""
    table = [(op, algorithm) for op in ALGORITHMS for algorithm in _offered(op)]
    cases = [
        f"{op} {algorithm} {protocol} {scenario} {number}"
        for op, algorithm in table
        for protocol in _PRESETS
        for scenario in _SCENARIOS
        for number in range(_VARIANTS)
    ]
    cases += [
        f"{op} uneven {protocol} {scenario} {number}"
        for op in (*_UNEVEN, "told")
        for protocol in _PRESETS
        for scenario in _SCENARIOS
        for number in range(_VARIANTS)
    ]
    cases += [
        f"{op} {algorithm} {protocol} {scenario} 0"
        for op, algorithm in table
        for protocol in _VARIATIONS
        for scenario in ("overlapped", "row")
    ]
    cases += [
        f"call {op} {protocol} {number}" for op in ALGORITHMS for protocol in _PRESETS for number in range(4)
    ]
    return cases + [
        f"call {op} nccl-sockets {number}"
        for number in range(8)
        for op in ("all_reduce", "broadcast", "reduce")
    ]


def answer(name: str) -> dict[str, Any]:
    """What today's engine makes of a case."""
    if name.startswith("call "):
        return _call(*name.split()[1:])
    op, algorithm, protocol, scenario, _ = name.split()
    draw = Random(f"collectives {name}")
    where = draw.choice(_TOPOLOGIES)
    mapping = mapping_of(where, draw)
    if scenario == "weather":
        mapping = with_weather(mapping, draw.choice(_WEATHERS), draw, 400)
    drive = Drive(mapping, protocol, scenario, draw)
    plan = drive.plan(op, algorithm)
    result = drive.run(plan)
    weather = [mapping.get(key) for key in ("events", "traces", "drift", "background")]
    return {
        "given": digest([where, weather, plan.given, mapping if where in ("tree", "star") else 0]),
        **result,
    }


class _Plan:
    """One collective to come: what it is, and on which hosts."""

    def __init__(
        self, op: str, algorithm: str, hosts: list[int], draw: Random, topology: netsim.Topology
    ) -> None:
        self.op, self.hosts = op, hosts
        num = len(hosts)
        size, root = draw.choice(_SIZES), draw.randrange(num)
        self.rows = [[draw.choice([0, 1, 1003, draw.randrange(60_000)]) for _ in hosts] for _ in hosts]
        self.given = [op, algorithm, hosts, size, root, self.rows]
        if op == "told":
            return
        uneven = algorithm == "uneven"
        parts: Any = None
        if uneven:
            parts = self.rows if op == "all_to_all" else self.rows[0]
        self.schedule = schedule(
            op,
            num,
            num_bytes=0 if uneven else size,
            algorithm=None if uneven else algorithm,
            root=root,
            element_bytes=4 if size % 4 == 0 and not uneven else 1,
            hosts=hosts,
            topology=topology,
            parts=parts,
        )


class Drive:
    """One case on a network of its own."""

    def __init__(self, mapping: dict[str, Any], protocol: str, scenario: str, draw: Random) -> None:
        self._clock = netsim.Clock()
        self._topology = netsim.Topology.from_mapping(mapping)
        self.network = netsim.Network(self._clock, self._topology, PROTOCOLS[protocol])
        self._scenario, self._draw = scenario, draw
        self._ends: dict[str, float] = {}
        self._awaited: dict[str, Any] = {}
        self._num_left = 0

    def plan(self, op: str, algorithm: str) -> _Plan:
        """A collective on some of the hosts, or with several members on each."""
        draw, hosts = self._draw, len(self._topology.hosts)
        num = 2 if op == "sendrecv" else draw.choice([2, 3, 4, 5, 6, 8, 8, 8, 12])
        if self._scenario == "shared":
            few = draw.sample(range(hosts), min(max(num // 2, 1), hosts))
            chosen = sorted(few * 3)[:num] if draw.randrange(2) else (few * 3)[:num]
            num = len(chosen)
        else:
            chosen = draw.sample(range(hosts), min(num, hosts))
            chosen = sorted(chosen) if draw.randrange(3) else chosen
        return _Plan(op, algorithm, chosen, draw, self._topology)

    def run(self, plan: _Plan) -> dict[str, Any]:
        """Let the scenario take its course."""
        getattr(self, f"_{self._scenario}")(plan)
        result: dict[str, Any] = {}
        try:
            if self._topology.weather:
                Faults(self.network).run_until(lambda: not self._num_left)
            else:
                self._clock.run()
        except netsim.DeadlockError as error:
            result["error"] = str(error)
        crossed = [round(float(num_bytes), 3) for num_bytes in self.network.link_bytes]
        if not self._topology.weather:  # the traffic of others is somewhere on its way
            result["looks"] = {str(link): num_bytes for link, num_bytes in enumerate(crossed) if num_bytes}
        return {"ends": self._ends, **result}

    # -- scenarios -----------------------------------------------------------------------------------------------

    def _alone(self, plan: _Plan) -> None:
        self._together(plan, "a", self._draw.choice([0.0, 0.125]))

    def _together(self, plan: _Plan, tag: str, at: float) -> None:
        self._enter_at(self._begin(plan, tag, tag), [at] * len(plan.hosts))

    def _thrice(self, plan: _Plan) -> None:
        pause = self._draw.choice([0.0, 0.01, 0.7])

        def program() -> Iterator[Any]:
            for count in range(3):
                enter, _ = self._begin(plan, f"{count}", "a")
                for member in range(len(plan.hosts)):
                    enter(member)
                for member in range(len(plan.hosts)):
                    yield self._awaited[f"{count} {member}"]
                yield self._clock.timeout(pause)

        self._clock.process(program())

    def _overlapped(self, plan: _Plan) -> None:
        other = self._other(plan)
        self._together(plan, "a", 0.0)
        self._together(other, "b", self._draw.choice([0, 0, 1, 7, 40]) / 1000)

    def _other(self, plan: _Plan) -> _Plan:
        """Another collective, on the same hosts and others."""
        op = self._draw.choice(["all_reduce", "all_gather", "broadcast", "all_to_all"])
        rest = [host for host in range(len(self._topology.hosts)) if host not in plan.hosts]
        hosts = plan.hosts[: self._draw.randrange(1, len(plan.hosts) + 1)] + rest[:2]
        return _Plan(
            op,
            self._draw.choice(_offered(op)),
            hosts,
            self._draw,
            self._topology,
        )

    def _jittered(self, plan: _Plan) -> None:
        self._enter_at(self._begin(plan, "a", "a"), self._instants(plan, 60_000))

    def _shared(self, plan: _Plan) -> None:
        if self._draw.randrange(2):
            self._row(plan)
        else:
            self._together(plan, "a", 0.0)

    def _row(self, plan: _Plan) -> None:
        """Each member enters one after the other, as soon as it is through the one before and has done something."""
        begun: dict[int, Callable[[int], None]] = {}
        rounds = self._draw.choice([2, 2, 3])
        most = self._draw.choice([0, 1000, 30_000])
        pauses = [self._instants(plan, most) for _ in range(rounds)]
        for count in range(rounds):
            begun[count] = self._begin(plan, str(count), "a")[0]

        def program(member: int) -> Iterator[Any]:
            for count in range(rounds):
                if pauses[count][member]:
                    yield self._clock.at(self._clock.now + pauses[count][member])
                begun[count](member)
                yield self._awaited[f"{count} {member}"]

        for member in range(len(plan.hosts)):
            self._clock.process(program(member))

    def _weather(self, plan: _Plan) -> None:
        self._row(plan)

    def _traffic(self, plan: _Plan) -> None:
        """Transfers of others on the same hosts, meanwhile."""
        draw = self._draw
        self._row(plan)
        hosts = len(self._topology.hosts)
        rows = sorted(
            (
                draw.randrange(200) / 1000,
                draw.choice(plan.hosts),
                draw.randrange(hosts),
                draw.randrange(200_000),
            )
            for _ in range(6)
        )

        def program() -> Iterator[Any]:
            for number, (at, source, target, num_bytes) in enumerate(rows):
                if at > self._clock.now:
                    yield self._clock.at(at)
                self._num_left += 1
                done = partial(self._end, f"transfer {number}")
                self.network.send(source, target, num_bytes, done, connection=("others", number % 2))

        self._clock.process(program())

    def _cancelled(self, plan: _Plan) -> None:
        """One is cancelled on its way; another goes on, and a third follows on the same connections."""
        _, cancel = begun = self._begin(plan, "a", "a")
        instants = self._instants(plan, 10_000)
        self._together(self._other(plan), "b", 0.003)
        at = self._draw.choice([2, 8, 30, 100]) / 1000
        self._enter_at(begun, [instant if instant < at else math.inf for instant in instants])

        def program() -> Iterator[Any]:
            yield self._clock.at(at)
            cancel()
            yield self._clock.at(at + self._draw.choice([0.0, 0.002]))
            enter, _ = self._begin(plan, "c", "a")
            for member in range(len(plan.hosts)):
                enter(member)

        self._clock.process(program())

    # -- members -------------------------------------------------------------------------------------------------

    def _instants(self, plan: _Plan, most_us: int) -> list[float]:
        return [self._draw.randrange(most_us + 1) / 1e6 for _ in plan.hosts]

    def _begin(self, plan: _Plan, tag: str, group: str) -> tuple[Callable[[int], None], Callable[[], None]]:
        """Start one. Returns what lets a member enter, and what cancels it."""
        for member in range(len(plan.hosts)):
            self._awaited[f"{tag} {member}"] = self._clock.event()
        self._num_left += len(plan.hosts)

        def done(member: int) -> None:
            self._end(f"{tag} {member}")
            self._awaited[f"{tag} {member}"].succeed()

        if plan.op == "told":
            enter, cancel = start_all_to_all(self.network, plan.hosts, group=group, on_done=done)
            return lambda member: enter(member, plan.rows[member]), cancel
        started = start_collective(self.network, plan.schedule, plan.hosts, group=group, on_done=done)
        return started.arrive, started.cancel

    def _enter_at(
        self, begun: tuple[Callable[[int], None], Callable[[], None]], instants: list[float]
    ) -> None:
        def program() -> Iterator[Any]:
            for at, member in sorted((at, member) for member, at in enumerate(instants) if at < math.inf):
                if at > self._clock.now:
                    yield self._clock.at(at)
                begun[0](member)

        self._clock.process(program())

    def _end(self, what: str) -> None:
        assert what not in self._ends, what
        self._ends[what] = self._clock.now
        self._num_left -= 1


# -- netsim.collective ----------------------------------------------------------------------------------------------


def _call(op: str, protocol: str, number: str) -> dict[str, Any]:
    """What `netsim.collective` says, with the algorithm that it chooses."""
    draw = Random(f"call {op} {protocol} {number}")
    where: Any = draw.choice(["wan-4-regions", "home-broadband", "cluster", "intellect-1", "wide"])
    num_bytes, repeat = draw.choice([1003, 100_000, 25_000_000]), draw.choice([1, 2])
    if protocol == "nccl-sockets":
        where = star(draw.randrange(2, 5), "100 Mbit/s")
        for link in where["links"]:
            link["loss"] = draw.choice(["0.01 %", "0.1 %", "1 %"])
    result = netsim.collective(
        star(24) if where == "wide" else where,
        op,
        num_bytes=None if op == "barrier" else num_bytes,
        protocol=PROTOCOLS.get(protocol, protocol),
        repeat=repeat,
    )
    return {
        "given": digest([op, protocol, where, num_bytes, repeat]),
        "algorithm": result.algorithm,
        "times": [result.seconds, result.rank_seconds, result.bound_seconds, result.repeat_seconds],
        "looks": {link: float(crossed) for link, crossed in result.link_bytes.items()},
    }
