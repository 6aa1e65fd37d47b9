"""Ranks as actors on the nodes of a Ray cluster: blocks of ranks by turns in each, the simulation in this process.

Records travel as arguments and results of Ray's calls, tensors through its object store; see `values`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import cloudpickle

from exogym_core.ranks.failures import told
from exogym_core.ranks.processes.carrying import ProcessRun, blocks_of
from exogym_core.ranks.processes.channel import ChannelClosed
from exogym_core.ranks.processes.pickling import dumps_for_child
from exogym_core.ranks.processes.rank_block import RankBlock
from exogym_core.ranks.processes.records import Failed
from exogym_core.ranks.ray.cluster import RayCluster
from exogym_core.ranks.ray.values import ObjectStore, combined_far, fetched, reduced_piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    import torch

    from exogym_core.communicator.simulated.simulation import World
    from exogym_core.ranks.carrier import Carrier, OnDeposit, Sinks
    from exogym_core.ranks.processes.rank_block import Body
    from exogym_core.ranks.spec import WorkerSpec

__all__ = ["run_on_ray"]

_SECONDS_UNTIL_TOLD = 5.0  # that the cluster has no room for all actors yet (host time)


def run_on_ray(
    world: World,
    body: Body,
    seed: int,
    spec: WorkerSpec,
    sinks: Sinks,
) -> Carrier:
    """Run `body(comm)` on every rank of `world`, ranks in contiguous blocks over actors of a cluster.

    Args:
        world: where the run takes place.
        body: as `run_ranks` has it.
        seed: random streams are made from (seed, rank).
        spec: which cluster; how many actors (None: as many as it has room for, and no more than ranks); GPUs of each,
            and cores: its `intra_op_threads`.
        sinks: who is told of it; what ranks deposit is fetched here.

    Returns:
        The run, at its end.

    Raises:
        NetsimError: what ended the run: a mismatch, a deadlock, a rank's own failure or its node's loss.
        InputError: there is no cluster, it is too small, or `body` cannot be sent.
    """
    with RayCluster(spec.address) as cluster:
        needs = {"num_cpus": float(spec.intra_op_threads)}
        if spec.num_gpus:
            needs["num_gpus"] = float(spec.num_gpus)
        num = spec.processes or max(1, min(world.num_ranks, cluster.room_for(needs)))
        cluster.require(needs, "an actor of ranks")
        cluster.require_all(needs, num, f"workers on ray in {num} processes")
        blocks = blocks_of(world.num_ranks, num)
        start = partial(_Home, world, seed=seed, intra_op_threads=spec.intra_op_threads, num_homes=num)
        store = _Referring(ObjectStore(cluster.ray, num))
        on_deposit = sinks.on_deposit and partial(_deposited, cluster, sinks.on_deposit)
        with _Homes(cluster, blocks, start, needs, dumps_for_child(body)) as homes:
            combined = combined_far(homes.reduce_at)
            run = ProcessRun(world, blocks, store, replace(sinks, on_deposit=on_deposit), combined)
            run.run(homes)
            run.failure.raise_if_any()
    return run


def _deposited(
    cluster: RayCluster, on_deposit: OnDeposit, rank: int, note: Mapping[str, Any], tensors: Sequence[Any]
) -> None:
    on_deposit(rank, note, [fetched(cluster.ray, tensor) for tensor in tensors])


class _Referring:
    """The simulation's side of an `ObjectStore`: large tensors stay where they are."""

    def __init__(self, store: ObjectStore) -> None:
        self.put, self.get = store.put, store.reference
        self.free, self.owner = store.free, store.owner


# --- here --------------------------------------------------------------------------------------------------


class _Homes:
    """Context manager: the actors, seen as `Children` of this process are.

    Args:
        cluster: where they live.
        blocks: the ranks of each.
        start: (ranks, index) -> what an actor is.
        needs: of each, in Ray's words.
        body: what ranks run, pickled.
    """

    def __init__(
        self,
        cluster: RayCluster,
        blocks: Sequence[range],
        start: Callable[..., _Home],
        needs: Mapping[str, float],
        body: bytes,
    ) -> None:
        self._cluster, self._ray = cluster, cluster.ray
        groups = {"run": 1, "listen": 1, "deliver": 1, "reduce": 1}
        remote = self._ray.remote(
            **needs, max_restarts=0, concurrency_groups=groups, scheduling_strategy="SPREAD"
        )(_Actor)
        self._actors = [
            remote.remote(cloudpickle.dumps(partial(start, block, index)), sys.path, os.getcwd())
            for index, block in enumerate(blocks)
        ]
        self._body = body
        self.channels = [_Wire(self._ray, actor) for actor in self._actors]
        self.pids = [f"on Ray, actor {index}" for index in range(len(blocks))]

    def __enter__(self) -> Self:
        begun, told = time.monotonic(), False
        waiting = [actor.hello.remote() for actor in self._actors]
        while waiting:
            there = self._cluster.ready(waiting, timeout_seconds=1.0)
            waiting = [each for each in waiting if each not in there]
            if waiting and not told and time.monotonic() - begun > _SECONDS_UNTIL_TOLD:
                told = True
                warnings.warn(
                    f"{len(waiting)} of {len(self._actors)} actors wait for room on the cluster",
                    UserWarning,
                    stacklevel=2,
                )
        for actor, line in zip(self._actors, self.channels, strict=True):
            actor.run.options(concurrency_group="run").remote(self._body)
            line.listen()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def ready(self, indices: Iterable[int], timeout_seconds: float | None = None) -> list[int]:
        """Those of the actors that have sent something or ended, waiting for the first."""
        owner = {self.channels[index].coming: index for index in indices}
        found = self._cluster.ready(list(owner), timeout_seconds)
        return sorted(owner[reference] for reference in found)

    def describe_exit(self, index: int, timeout_seconds: float = 0.0) -> str:
        """How an actor ended."""
        return self.channels[index].ended

    def is_stopped(self, index: int) -> bool:
        """Cannot be seen from here."""
        return False

    def reduce_at(self, number: int, pieces: Sequence[Any], dtype: torch.dtype, op: str) -> Any:
        """Have one of the actors reduce a piece; a reference to what comes of it."""
        actor = self._actors[number % len(self._actors)]
        return actor.reduce.options(concurrency_group="reduce").remote(list(pieces), dtype, op)


class _Wire:
    """What goes to one actor and comes from it."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self.coming: Any = None
        self.ended = "has come to its end"

    def listen(self) -> None:
        """Ask for what comes next."""
        self.coming = self._actor.listen.options(concurrency_group="listen").remote()

    def recv_all(self) -> list[Any]:
        """What has come; raises `ChannelClosed` when the actor is through or lost."""
        try:
            batch = self._ray.get(self.coming)
        except self._ray.exceptions.RayError as error:
            self.ended = f"lost with its node or killed ({type(error).__name__})"
            raise ChannelClosed(self.ended) from None
        if batch is None:
            raise ChannelClosed(self.ended)
        self.listen()
        return [batch]

    def send_receiving(self, message: Any) -> list[Any]:
        """Send one record, waiting for nothing."""
        self._actor.deliver.options(concurrency_group="deliver").remote(message)
        return []


# --- on a node ---------------------------------------------------------------------------------------------


class _Actor:
    """What Ray makes on a node; groups of its methods have a thread each, in which calls keep their order."""

    def __init__(self, start: bytes, path: list[str], folder: str) -> None:
        with contextlib.suppress(
            OSError
        ):  # relative paths mean the same on nodes that share the driver's disk
            os.chdir(folder)
        sys.path += [entry for entry in path if entry not in sys.path]  # where the driver finds its modules
        # From the process that runs the simulation, by way of Ray, which runs what its driver sends anyway.
        self._home: _Home = cloudpickle.loads(start)()  # nosec B301

    def hello(self) -> None:
        """It is there."""

    def run(self, body: bytes) -> None:
        """Run the ranks to their end."""
        home = self._home
        try:
            home.run(cloudpickle.loads(body))  # nosec B301
        except Exception as error:
            home.channel.send([Failed(home.ranks[0], told(home.ranks[0], error))])
        finally:
            home.channel.finish()

    def listen(self) -> Any:
        """The next batch of records, when there is one; None after the last."""
        return self._home.channel.sent()

    def deliver(self, message: Any) -> None:
        """Take a record in."""
        self._home.channel.deliver(message)

    def reduce(self, pieces: list[Any], dtype: torch.dtype, op: str) -> Any:
        """Reduce one piece of every member."""
        return reduced_piece(self._home.ray, pieces, dtype, op)


class _Home:
    """Some ranks, and their end of the line."""

    def __init__(
        self,
        world: World,
        ranks: range,
        index: int,
        *,
        seed: int,
        intra_op_threads: int,
        num_homes: int,
    ) -> None:
        import ray

        self.ray: Any = ray
        self.ranks = ranks
        self.channel = _Queues()
        store = ObjectStore(ray, num_homes)
        self._block = RankBlock.by_turns(
            world, ranks, self.channel, store, seed, intra_op_threads, nth_core=index
        )

    def run(self, body: Body) -> None:
        """Run the ranks to their end."""
        self._block.run(body)


class _Queues:
    """A `Pipe` between threads of one actor: the ranks' on one side, Ray's calls on the other."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def send(self, batch: Any) -> None:
        """A batch of records for the simulation."""
        self._outbox.put(batch)

    def recv(self) -> Any:
        """The next record for the ranks."""
        return self._inbox.get()

    def waiting(self) -> bool:
        """Whether there is one already."""
        return not self._inbox.empty()

    def sent(self) -> Any:
        """The next batch that the ranks have sent; None after the last."""
        return self._outbox.get()

    def deliver(self, message: Any) -> None:
        """A record from the simulation."""
        self._inbox.put(message)

    def finish(self) -> None:
        """Nothing comes any more."""
        self._outbox.put(None)
