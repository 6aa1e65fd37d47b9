"""Programs of ranks as data, and what they do when they run."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from exogym_core.workers.run import run_ranks
from netsim.errors import BrokenCallError, InputError, NetsimError
from netsim.testing import LawError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator

__all__ = ["Action", "RankProgram"]


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

    def __repr__(self) -> str:
        return f"Action({', '.join(map(repr, self if self.arguments else self[:2]))})"


@dataclass(frozen=True)
class RankProgram:
    """Actions of each rank, and the network.

    Attributes:
        ranks: the actions of each.
        topology: the network and its weather, as `Topology.from_mapping` takes them.
        protocol: use of links by transfers.
        collectives: the algorithm of each operation.
    """

    ranks: tuple[tuple[Action, ...], ...]
    topology: Mapping[str, Any]
    protocol: str = "ideal"
    collectives: str = "auto"

    def body(self, comm: Communicator, sleeps: int | None = None) -> list[Any]:
        """Carry out the actions of a rank, and return what each returned.

        Args:
            comm: its communicator.
            sleeps: seed of sleeps below a millisecond (host time) before every action; None: no sleeps.
        """
        comm.compare_places(False)
        draw = random.Random(f"{sleeps} {comm.rank}")

        def sleep() -> None:
            if sleeps is not None and draw.random() < 0.5:
                time.sleep(draw.random() * 1e-3)

        return Actor(comm, sleep).run(self.ranks[comm.rank])

    def outcome(self, workers: Any = "threads", sleeps: int | None = None) -> dict[str, Any]:
        """Results and times of a run, by name; or its error.

        Args:
            workers: where ranks run, as for `run_ranks`.
            sleeps: as for `body`.
        """
        num_ranks = len(self.ranks)
        try:
            run = run_ranks(
                lambda comm: self.body(comm, sleeps),
                num_ranks,
                self.topology,
                workers=workers,
                protocol=self.protocol,
                collectives=self.collectives,
            )
        except NetsimError as error:
            return {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
        rows = [
            [(row.virtual_seconds, row.row) for row in run.rows if row.rank == rank]
            for rank in range(num_ranks)
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

    def check(self, num_processes: Sequence[int] = (0, 1, 2, 3, 4)) -> dict[str, Any]:
        """Compare the run in threads with runs of sleeping ranks elsewhere; returns its outcome.

        Args:
            num_processes: of each other run; 0: threads.

        Raises:
            LawError: results, times, bytes or errors differ.
        """
        expected = self.outcome()
        for num in num_processes:
            processes = {"kind": "processes", "processes": min(num, len(self.ranks))}
            found = self.outcome(processes if num else "threads", sleeps=1)
            for part in {**expected, **found}:
                if (one := expected.get(part)) != (other := found.get(part)):
                    where = f"{num} processes" if num else "threads that sleep"
                    raise LawError(f"{part}: {one} in threads, {other} in {where}", partial(self.code, num))
        return expected

    def code(self, num_processes: int = 0) -> str:
        """A program that checks it, with runs in threads and in so many processes."""
        lines = [
            f"    ({', '.join(map(repr, actions))}{',' * (len(actions) == 1)})," for actions in self.ranks
        ]
        options = "".join(
            f", {name}={value!r}"
            for name, value, default in (
                ("protocol", self.protocol, "ideal"),
                ("collectives", self.collectives, "auto"),
            )
            if value != default
        )
        return "\n".join(
            [
                "from netgym.testing import Action, RankProgram",
                "ranks = (",
                *lines,
                ")",
                f"topology = {dict(self.topology)!r}",
                f"RankProgram(ranks, topology{options}).check([{num_processes}])\n",
            ]
        )


class Actor:
    """Carries out one rank's actions, and keeps what each returned."""

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

    def call(self, name: str, ranks: tuple[int, ...], size: int, root: int, *, is_async: bool = False) -> Any:
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
    """Outcome of a call, in plain numbers."""
    if isinstance(result, torch.Tensor):
        return (result.numel(), float(result.sum()))
    if isinstance(result, list):
        return [seen(each) for each in result]
    return "nothing" if result is None else result
