"""Random rank programs, what they do when they run, and smaller ones that still fail.

A program is data: a topology, and for each rank a list of actions. It is drawn as one sequence of events, each of which
gives actions to some of the ranks, so nobody waits for ever. `repr(program)` builds it again.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from exogym_core.communicator import Communicator, run_ranks
from netsim.errors import BrokenCallError, InputError, NetsimError

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)


class Action(NamedTuple):
    """Action of a rank; `event` links actions of several ranks that belong together.

    Attributes:
        event: its number in the sequence of events.
        kind: a method of `Actor`.
        arguments: of that method.
    """

    event: int
    kind: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Program:
    """What each rank does, on which network.

    Attributes:
        ranks: the actions of each.
        network: bandwidth in Mbit/s and latency in ms of each host's link to one switch.
        events: weather entries of the topology.
        protocol: how transfers use links.
        collectives: the algorithm of each operation.
    """

    ranks: tuple[tuple[Action, ...], ...]
    network: tuple[tuple[float, float], ...]
    events: tuple[dict[str, Any], ...] = ()
    protocol: str = "ideal"
    collectives: str = "auto"

    def topology(self) -> dict[str, Any]:
        """The network as a topology file has it."""
        names = [f"h{number}" for number in range(len(self.network))]
        links = [
            {"between": [name, "switch"], "bandwidth": f"{rate} Mbit/s", "latency": f"{delay} ms"}
            for name, (rate, delay) in zip(names, self.network, strict=True)
        ]
        return {
            "name": "star",
            "hosts": {name: {} for name in names},
            "routers": ["switch"],
            "links": links,
            "events": [dict(event) for event in self.events],
            "protocol": "ideal",
        }

    def code(self) -> str:
        """A script that runs it everywhere."""
        lines = [
            f"    ({', '.join(map(repr, actions))}{',' if len(actions) == 1 else ''}),"
            for actions in self.ranks
        ]
        rest = f"{self.network!r}, {self.events!r}, {self.protocol!r}, {self.collectives!r}"
        return "\n".join(
            [
                "from rank_programs import Action, Program, disagreement",
                "ranks = (",
                *(line.replace("Action(", "\n        Action(") for line in lines),
                ")",
                f"print(disagreement(Program(ranks, {rest})))",
            ]
        )


# --- what ranks do -------------------------------------------------------------------------------------------


class Actor:
    """Carries out one rank's actions; `told` is what it has seen."""

    def __init__(self, comm: Communicator, sleep: Callable[[], None]) -> None:
        self.comm, self.sleep = comm, sleep
        self.results: list[Any] = []
        self.handles: dict[int, Any] = {}
        self.event = 0

    def run(self, actions: tuple[Action, ...]) -> list[Any]:
        for action in actions:
            self.sleep()
            self.event = action.event
            seen = getattr(self, action.kind)(*action.arguments)
            if seen is not None:
                self.results.append((action.event, action.kind, seen))
            self.comm.mark({"event": action.event})
        return self.results

    def tensor(self, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float64) + 1000.0 * self.comm.rank + self.event

    def group(self, ranks: tuple[int, ...]) -> Communicator:
        if ranks == tuple(range(self.comm.world_size)):
            return self.comm
        return self.comm.group(ranks, reuse=True)

    def call(self, name: str, ranks: tuple[int, ...], size: int, root: int, is_async: bool = False) -> Any:
        """A collective; what it gives, or its handle."""
        group = self.group(ranks)
        rows = [self.tensor(size) for _ in ranks]
        match name:
            case "all_reduce" | "all_gather":
                return getattr(group, name)(self.tensor(size), async_op=is_async)
            case "reduce_scatter" | "all_to_all":
                return getattr(group, name)(rows, async_op=is_async)
            case "broadcast":
                return group.broadcast(self.tensor(size), src=root, async_op=is_async)
            case "reduce" | "gather":
                return getattr(group, name)(self.tensor(size), dst=root, async_op=is_async)
            case "scatter":
                parts = rows if group.rank == root else None
                return group.scatter(self.tensor(size), parts, src=root, async_op=is_async)
        return group.barrier(async_op=is_async)

    def advance(self, seconds: float) -> None:
        self.comm.advance(seconds)

    def now(self) -> float:
        return self.comm.now()

    def collective(self, *call: Any) -> Any:
        return seen(self.call(*call))

    def off(self, *call: Any) -> Any:
        with self.comm.off_clock():
            return seen(self.call(*call))

    def post(self, *call: Any) -> None:
        self.handles[self.event] = self.call(*call, is_async=True)

    def wait(self, event: int) -> Any:
        handle = self.handles.pop(event, None)
        return None if handle is None else seen(handle.wait())

    def is_completed(self, event: int) -> Any:
        return self.handles[event].is_completed() if event in self.handles else None

    def isend(self, dst: int, size: int, tag: int) -> None:
        self.handles[self.event] = self.comm.isend(self.tensor(size), dst, tag)

    def irecv(self, src: int, size: int, tag: int) -> None:
        self.handles[self.event] = self.comm.irecv(self.tensor(size), src, tag)

    def send(self, dst: int, size: int, tag: int) -> None:
        self.comm.send(self.tensor(size), dst, tag)

    def recv(self, src: int | None, size: int, tag: int) -> Any:
        tensor = self.tensor(size)
        source = self.comm.recv(tensor, src, tag)
        return (source if src is None else src, seen(tensor))

    def cancelled(self, src: int, size: int, tag: int, seconds: float) -> Any:
        """A receive that is taken back after some time, and begun again."""
        handle = self.comm.irecv(self.tensor(size), src, tag)
        self.comm.advance(seconds)
        is_off = handle.cancel()
        if is_off:
            handle = self.comm.irecv(self.tensor(size), src, tag)
        return is_off, seen(handle.wait())

    def put(self, dst: int, size: int, box: str) -> None:
        self.comm.put(self.tensor(size), dst, box)

    def take(self, box: str, seconds: float) -> Any:
        return [(rank, seen(tensor)) for rank, tensor in self.comm.take(box, seconds)]

    def average_present(self, ranks: tuple[int, ...], seconds: float, size: int) -> Any:
        tensor = self.tensor(size)
        return self.group(ranks).average_present(tensor, seconds), seen(tensor)

    def timed(self, name: str, ranks: tuple[int, ...], size: int, root: int, seconds: float) -> Any:
        """A collective of a group of its own that may take so long; where it takes longer, the rank goes on."""
        group: Any = self.comm.group(ranks)
        group.call_seconds = seconds
        tensor = self.tensor(size)
        call = getattr(group, name)
        try:
            result = call(tensor, root) if name in ("broadcast", "reduce", "gather") else call(tensor)
        except BrokenCallError as error:
            return str(error).rpartition(": ")[2]
        return seen(result)

    def mistaken(self) -> str:
        """A call with a wrong argument, from which the rank goes on."""
        try:
            self.comm.broadcast(torch.ones(1), src=self.comm.world_size)
        except InputError as error:
            return str(error)
        raise AssertionError

    def fail(self) -> None:
        raise ValueError(f"event {self.event}")


def seen(result: Any) -> Any:
    """What came of a call, in plain numbers."""
    if isinstance(result, torch.Tensor):
        return (result.numel(), float(result.sum()))
    if isinstance(result, list):
        return [seen(each) for each in result]
    return "nothing" if result is None else result


# --- running them --------------------------------------------------------------------------------------------

CARRIERS: dict[str, Any] = {
    "threads": "threads",
    "1 process": {"kind": "processes", "processes": 1},
    "2 processes": {"kind": "processes", "processes": 2},
    "3 processes": {"kind": "processes", "processes": 3},
    "4 processes": {"kind": "processes", "processes": 4},
    "ray": {"kind": "ray", "processes": 2},
}


def outcome(program: Program, workers: Any = "threads", sleeps: int | None = None) -> dict[str, Any]:
    """What a run gives: results, and times of all kinds; or its error.

    Args:
        program: what runs.
        workers: where.
        sleeps: seed of sleeps below a millisecond (host time) before every action; None: no sleeps.
    """

    def body(comm: Communicator) -> list[Any]:
        comm.compare_places(False)
        draw = random.Random(f"{sleeps} {comm.rank}")

        def sleep() -> None:
            if sleeps is not None and draw.random() < 0.5:
                time.sleep(draw.random() * 1e-3)

        return Actor(comm, sleep).run(program.ranks[comm.rank])

    num_ranks = len(program.ranks)
    if isinstance(workers, dict):
        workers = {**workers, "processes": min(workers["processes"], num_ranks)}
    try:
        run = run_ranks(
            body,
            num_ranks,
            program.topology(),
            workers=workers,
            protocol=program.protocol,
            collectives=program.collectives,
        )
    except NetsimError as error:
        return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    rows = [
        [(row.virtual_seconds, row.row) for row in run.rows if row.rank == rank] for rank in range(num_ranks)
    ]
    return {
        "results": run.results,
        "ends": run.rank_virtual_seconds,
        "rows": rows,
        "compute": run.compute_seconds,
        "exposed": run.exposed_seconds,
        "network": run.network_seconds,
        "traffic": [vars(traffic) for traffic in run.traffic],
        "link_bytes": run.link_bytes,
    }


def disagreement(program: Program, carriers: tuple[str, ...] = tuple(CARRIERS)[:5]) -> str:
    """In what the program's runs differ, in a line; "" where they do not."""
    expected = outcome(program)
    for name in carriers:
        found = outcome(program, CARRIERS[name], sleeps=1)
        for part in {**expected, **found}:
            if expected.get(part) != found.get(part):
                return f"{part}: {expected.get(part)} in threads, {found.get(part)} in {name}"
    return ""


# --- drawing them --------------------------------------------------------------------------------------------


@dataclass
class Drawing:
    """Draws events one after the other.

    Attributes:
        draw: where numbers come from.
        num_ranks: how many ranks there are.
        two_way: calls that are answered at virtual time are among them.
    """

    draw: random.Random
    num_ranks: int
    two_way: bool = True

    def __post_init__(self) -> None:
        self.ranks: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        self.open: list[set[int]] = [set() for _ in range(self.num_ranks)]
        self.event = 0

    def program(self, num_events: int) -> tuple[tuple[Action, ...], ...]:
        kinds: list[tuple[int, Callable[[], None]]] = [
            (6, self.compute),
            (8, self.collective),
            (4, self.post),
            (3, self.wait),
            (2, self.message),
        ]
        if self.two_way:
            kinds += [
                (3, self.look),
                (2, self.off),
                (1, self.anyone),
                (1, self.cancelled),
                (2, self.mail),
                (1, self.present),
                (1, self.timed),
                (1, self.mistaken),
            ]
        makers, weights = [make for _, make in kinds], [weight for weight, _ in kinds]
        for _ in range(num_events):
            self.event += 1
            self.draw.choices(makers, weights)[0]()
        if self.two_way and self.draw.random() < 0.03:
            self.event += 1
            self.give(self.someone(), "fail")
        for rank in range(self.num_ranks):
            for event in sorted(self.open[rank]):
                self.give(rank, "wait", event)
        return tuple(map(tuple, self.ranks))

    def give(self, rank: int, kind: str, *arguments: Any) -> None:
        self.ranks[rank].append(Action(self.event, kind, arguments))

    def someone(self) -> int:
        return self.draw.randrange(self.num_ranks)

    def members(self) -> tuple[int, ...]:
        size = self.draw.choice([2, 2, 3, self.num_ranks, self.num_ranks])
        if size >= self.num_ranks:
            return tuple(range(self.num_ranks))
        return tuple(self.draw.sample(range(self.num_ranks), size))

    def size(self) -> int:
        """Of tensors, in elements of 8 bytes."""
        return self.draw.choice([0, 1, 3, 100, 5_000, 40_000])

    def seconds(self) -> float:
        return self.draw.choice([0.001, 0.01, 0.02, 0.1, 0.5])

    def a_call(self) -> tuple[str, tuple[int, ...], int, int]:
        members = self.members()
        return self.draw.choice(COLLECTIVES), members, self.size(), self.draw.randrange(len(members))

    def compute(self) -> None:
        self.give(self.someone(), "advance", self.seconds())

    def collective(self) -> None:
        call = self.a_call()
        for rank in call[1]:
            self.give(rank, "collective", *call)

    def off(self) -> None:
        call = self.a_call()
        for rank in call[1]:
            self.give(rank, "off", *call)

    def post(self) -> None:
        call = self.a_call()
        for rank in call[1]:
            self.give(rank, "post", *call)
            self.open[rank].add(self.event)

    def wait(self) -> None:
        rank = self.someone()
        if self.open[rank]:
            event = self.draw.choice(sorted(self.open[rank]))
            self.open[rank].remove(event)
            self.give(rank, "wait", event)

    def message(self) -> None:
        src, dst = self.draw.sample(range(self.num_ranks), 2)
        size, tag = self.size(), self.draw.randrange(2)
        for rank, other, kinds in ((src, dst, ("send", "isend")), (dst, src, ("recv", "irecv"))):
            kind = self.draw.choice(kinds)
            self.give(rank, kind, other, size, tag)
            if kind.startswith("i"):
                self.open[rank].add(self.event)

    def look(self) -> None:
        rank = self.someone()
        if self.open[rank] and self.draw.random() < 0.5:
            self.give(rank, "is_completed", self.draw.choice(sorted(self.open[rank])))
        else:
            self.give(rank, "now")

    def anyone(self) -> None:
        """Several ranks send to one, which takes the first message."""
        members = self.draw.sample(range(self.num_ranks), self.draw.randint(2, self.num_ranks))
        dst, *sources = members
        size, tag = self.size(), 1000 + self.event
        for src in sources:
            self.give(src, "isend", dst, size, tag)
            self.open[src].add(self.event)
        for _ in sources:
            self.give(dst, "recv", None, size, tag)

    def cancelled(self) -> None:
        src, dst = self.draw.sample(range(self.num_ranks), 2)
        size, tag = self.size(), 1000 + self.event
        self.give(src, "isend", dst, size, tag)
        self.open[src].add(self.event)
        self.give(dst, "cancelled", src, size, tag, self.seconds())

    def mail(self) -> None:
        box = self.draw.choice(["", "b"])
        if self.draw.random() < 0.5:
            src, dst = self.someone(), self.someone()
            self.give(src, "put", dst, self.size(), box)
        else:
            self.give(self.someone(), "take", box, self.draw.choice([0.0, 0.0, 0.01, 0.2, math.inf]))

    def present(self) -> None:
        ranks, seconds, size = self.members(), self.seconds(), self.size()
        for rank in ranks:
            self.give(rank, "average_present", ranks, seconds, size)

    def timed(self) -> None:
        members = self.members()
        name = self.draw.choice(["all_reduce", "all_gather", "broadcast", "reduce", "gather"])
        size, root = self.size(), self.draw.randrange(len(members))
        seconds = self.draw.choice([0.005, 0.05, 0.5, 100.0])
        for rank in members:
            self.give(rank, "timed", name, members, size, root, seconds)

    def mistaken(self) -> None:
        self.give(self.someone(), "mistaken")


def drawn(seed: int, *, two_way: bool = True, num_ranks: int | None = None) -> Program:
    """The program of this number."""
    draw = random.Random(seed)
    num_ranks = num_ranks or draw.randint(2, 6)
    ranks = Drawing(draw, num_ranks, two_way).program(draw.randint(3, 16))
    network = tuple((draw.choice([5, 20, 100, 1000]), draw.choice([0, 1, 5, 35])) for _ in range(num_ranks))
    if not two_way:
        return Program(ranks, network, collectives=draw.choice(["auto", "direct", "ring", "tree"]))
    return Program(ranks, network, _weather(draw, num_ranks), draw.choice(["ideal", "linux-tcp", "gloo"]))


def _weather(draw: random.Random, num_hosts: int) -> tuple[dict[str, Any], ...]:
    if draw.random() < 0.6:
        return ()
    at, link = f"{draw.randrange(300)} ms", [f"h{draw.randrange(num_hosts)}", "switch"]
    what: dict[str, Any] = draw.choice([{"down": True}, {"bandwidth": "3 Mbit/s"}, {"latency": "50 ms"}])
    event = {"link": link, "at": at, **what, "for": f"{draw.randint(1, 400)} ms"}
    crash = {"host": link[0], "at": at, "crash": True, "for": "200 ms"}
    return (event,) if draw.random() < 0.7 else (crash,)


# --- making them smaller -------------------------------------------------------------------------------------


T = TypeVar("T")


def reduced(piece: T, fails: Callable[[T], bool], smaller_ones: Callable[[T], Iterator[T]]) -> T:
    """Smallest program or experiment found that still fails."""
    while True:
        for smaller in smaller_ones(piece):
            if fails(smaller):
                piece = smaller
                break
        else:
            return piece


def smaller_programs(program: Program) -> Iterator[Program]:
    """Without weather; without some events; without a rank; without a single action that stands alone."""
    if program.events:
        yield replace(program, events=())
    if program.protocol != "ideal":
        yield replace(program, protocol="ideal")
    events = sorted({action.event for actions in program.ranks for action in actions})
    width = max(len(events) // 2, 1)
    while True:
        for first in range(0, len(events), width):
            removed = set(events[first : first + width])
            yield replace(program, ranks=tuple(_without(actions, removed) for actions in program.ranks))
        if width == 1:
            break
        width //= 2
    yield from _without_a_rank(program)


def _without(actions: tuple[Action, ...], events: set[int]) -> tuple[Action, ...]:
    """Without the actions of these events, and without waits for what they posted."""
    return tuple(
        action
        for action in actions
        if (action.event not in events or (action.kind == "wait" and action.arguments[0] not in events))
        and not (action.kind in ("wait", "is_completed") and action.arguments[0] in events)
    )


def _without_a_rank(program: Program) -> Iterator[Program]:
    if len(program.ranks) > 2 and not program.ranks[-1]:
        world = tuple(range(len(program.ranks)))
        if all(world not in action.arguments for actions in program.ranks for action in actions):
            yield replace(program, ranks=program.ranks[:-1], network=program.network[:-1])
