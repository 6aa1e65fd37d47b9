"""Ranks as actors on the nodes of a Ray cluster, and the connection to it.

A rank group lives in each actor, the simulation in this process. Messages travel as arguments and results of Ray's
calls, tensors through its object store: put by their owner, reduced piece by piece, fetched by their reader. This
process handles references; only small tensors pass through it. Reductions go in rank order within each piece, so the
bits are those of a reduction of whole tensors.

Nothing here opens a socket. Ray itself lets every process that reaches its ports run code: keep a cluster on a network
of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import cloudpickle
import numpy as np
import torch

from exogym_core.communicator.exchange import reduce_tensors
from exogym_core.names import visible
from exogym_core.workers.failures import reported_error
from exogym_core.workers.host import SimulatedHost
from exogym_core.workers.processes.children import ChannelClosed
from exogym_core.workers.processes.process_runner import ProcessRunner, blocks_of
from exogym_core.workers.processes.protocol import Failed, dumps_for_child
from exogym_core.workers.processes.rank_group import RankGroup
from exogym_core.workers.processes.shared_memory import TensorRef
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from exogym_core.workers.host import Runner, Sinks
    from exogym_core.workers.processes.rank_group import Body
    from exogym_core.workers.processes.shared_memory import Block

__all__ = ["FarTensor", "ObjectStore", "RayCluster", "RayHost", "fetched"]

# --- the cluster -----------------------------------------------------------------------------------------------

_NAMES = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}


class RayCluster:
    """Context manager: connected while entered. Where this process is connected already, that connection is used.

    Args:
        address: as `ray.init` takes it (`10.0.0.1:6379`, `auto`); None: that of RAY_ADDRESS, else a cluster of this
            machine alone, which ends on leaving.

    Attributes:
        num_cpus: of all nodes together.
        ray: the module, once entered.

    Raises:
        InputError: (on entering) Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS") or None
        self._is_ours = False
        self.num_cpus = 1
        self.ray: Any = None

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Else it warns on machines without a GPU.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError:
            raise InputError("ray: Ray is not installed: pip install 'netgym[ray]'") from None
        self.ray = ray
        if not self.ray.is_initialized():
            self._connect()
        self.num_cpus = max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        return self

    def _connect(self) -> None:
        options: dict[str, Any] = {"address": self._address}
        if self._address is None:
            options = {"address": "local", "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        main = threading.current_thread() is threading.main_thread()
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.ray.init(logging_level="ERROR", log_to_driver=False, **options)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            where = visible(self._address or "on this machine", 100)
            reason = visible(str(error).partition("\n")[0], 300)
            raise InputError(
                f"ray: no cluster at {where} ({reason}): start one with 'ray start --head', or give its address"
            ) from error
        finally:
            for number, handler in handlers.items():  # Ray takes SIGTERM for itself
                if main and handler is not None:
                    signal.signal(number, handler)
        self._is_ours = True

    def __exit__(self, *_: object) -> None:
        if self._is_ours:
            self.ray.shutdown()
            self._is_ours = False

    def require(self, needs: Mapping[str, float], who: str) -> None:
        """Refuse needs that no node can hold, for which Ray would wait without end.

        Args:
            needs: `num_cpus`, `num_gpus`, `memory` (bytes).
            who: the part of the run that needs it.

        Raises:
            InputError: no node has enough.
        """
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if any(all(node.get(_NAMES[key], 0) >= amount for key, amount in needs.items()) for node in nodes):
            return
        wanted = ", ".join(f"{amount:g} {_NAMES[key]}" for key, amount in needs.items())
        most = ", ".join(
            f"{max((node.get(_NAMES[key], 0) for node in nodes), default=0):g} {_NAMES[key]}" for key in needs
        )
        raise InputError(f"ray: {who} needs {wanted}, and no node has more than {most}: add a node that has")

    def room(self, num_under_way: int) -> int:
        """Number of calls to submit now: twice as many as cores, so that a node that gets free has one to run."""
        return max(0, 2 * self.num_cpus - num_under_way)

    def batch(self, folder: Path) -> contextlib.AbstractContextManager[None]:
        """Block of calls, each of which is submitted at once; nothing is written to `folder`."""
        return contextlib.nullcontext()

    def room_for(self, needs: Mapping[str, float]) -> int:
        """Number of calls with these needs that the empty cluster can hold."""
        has = self.ray.cluster_resources()
        return int(min(has.get(_NAMES[key], 0) // amount for key, amount in needs.items()))

    def require_all(self, needs: Mapping[str, float], num: int, who: str) -> None:
        """Refuse `num` times these needs if all nodes together cannot hold them.

        Raises:
            InputError: they have less.
        """
        has = self.ray.cluster_resources()
        for key, amount in needs.items():
            there = has.get(_NAMES[key], 0)
            if num * amount > there:
                raise InputError(
                    f"ray: {who} need {num * amount:g} {_NAMES[key]}, and the cluster has {there:g}: use fewer"
                )

    def submit(
        self, call: Callable[..., Any], *arguments: Any, needs: Mapping[str, float], tries: int
    ) -> Any:
        """Run `call(*arguments)` on a node, again on another one if that is lost; returns a reference."""
        remote = self.ray.remote(**needs, max_retries=tries - 1, scheduling_strategy="SPREAD")(call)
        return remote.remote(*arguments)

    def ready(self, references: Sequence[Any], timeout_seconds: float | None) -> list[Any]:
        """Finished references, waiting up to `timeout_seconds` for the first."""
        if not references:
            return []
        found, _ = self.ray.wait(list(references), num_returns=1, timeout=timeout_seconds)
        if found:
            found, _ = self.ray.wait(list(references), num_returns=len(references), timeout=0)
        return list(found)

    def result(self, reference: Any) -> Any:
        """Result of a call; a text with the cause where it was lost for good or raised."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            cause = error.cause
            return f"{type(cause).__name__}: {cause}" if cause is not None else str(error).splitlines()[-1]
        except self.ray.exceptions.RayError as error:
            return f"lost with its node ({type(error).__name__})"

    def cancel(self, reference: Any) -> None:
        """Cancel a call of an actor."""
        with contextlib.suppress(self.ray.exceptions.RayError, TypeError, ValueError):
            self.ray.cancel(reference, force=True)


# --- tensors ---------------------------------------------------------------------------------------------------

_INLINE_BYTES = 1 << 16  # below this a copy by way of the simulation is cheaper than the store
_PIECE_BYTES = 1 << 18  # at least, where a tensor is cut for several owners


@dataclass(frozen=True)
class FarTensor:
    """A tensor whose values are elsewhere: in pieces of its flattened elements, each an object of the store.

    It stands where the exchange of values has tensors, and is never changed.
    """

    pieces: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def clone(self) -> FarTensor:
        """Return self: far tensors are immutable."""
        return self


class ObjectStore:
    """Tensors sent between machines, as by `Arena` within one; nothing needs to be freed.

    Args:
        ray: the module.
        num_owners: largest number of pieces of a tensor.
    """

    def __init__(self, ray: Any, num_owners: int, *, passes_on: bool = False) -> None:
        self._ray, self._num_owners, self._passes_on = ray, num_owners, passes_on

    def put(self, tensor: Tensor | FarTensor, *, copies: bool = False) -> TensorRef:
        """Reference by which the other side reads the tensor; always a copy."""
        if isinstance(tensor, FarTensor):
            return TensorRef(tensor, tensor.nbytes, tensor.shape, tensor.dtype)  # type: ignore[arg-type]
        shape, num_bytes = tuple(tensor.shape), tensor.nbytes
        flat = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1)
        if num_bytes <= _INLINE_BYTES:
            content: Any = flat.view(torch.uint8).numpy().tobytes()
        else:
            num_pieces = min(self._num_owners, -(-num_bytes // _PIECE_BYTES))
            pieces = [self._ray.put(piece.view(torch.uint8).numpy()) for piece in flat.chunk(num_pieces)]
            content = FarTensor(tuple(pieces), shape, tensor.dtype)
        return TensorRef(content, num_bytes, shape, tensor.dtype)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, *, once: bool = False) -> Tensor:
        """Tensor in memory of this process."""
        return torch.empty(tuple(shape), dtype=dtype)

    def get(self, ref: TensorRef) -> Any:
        """The tensor behind `ref`; a far one as it is where this side only passes it on."""
        content: Any = ref.content
        if isinstance(content, FarTensor):
            return content if self._passes_on else fetched(self._ray, content)
        return _tensor(np.frombuffer(bytearray(content), dtype=np.uint8), ref.dtype, ref.shape)

    def free(self, blocks: Sequence[Block]) -> None:
        """No action: Ray drops objects without references."""

    def owner(self, block: Block) -> int:
        """None: an object store has no blocks."""
        raise AssertionError(block)


def fetched(ray: Any, tensor: Any) -> Tensor:
    """The values of a far tensor; any other as it is."""
    if not isinstance(tensor, FarTensor):
        return tensor  # type: ignore[no-any-return]
    return _tensor(np.concatenate(ray.get(list(tensor.pieces))), tensor.dtype, tensor.shape)


def _tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not raw.size:
        return torch.empty([max(size, 0) for size in shape], dtype=dtype)
    return torch.from_numpy(raw).view(dtype).view(shape)


_SECONDS_UNTIL_REPORT = 5.0  # that the cluster has no room for all actors yet (host time)


class RayHost(SimulatedHost):
    """Ranks in contiguous blocks over actors of a Ray cluster.

    `spec` says which cluster; how many actors (None: as many as it has room for, and no more than ranks); GPUs of
    each, and cores: its `intra_op_threads`.
    """

    def simulate(self, body: Body, sinks: Sinks) -> Runner:
        """Run the simulation here, fed by the actors; snapshots are fetched here."""
        world, spec = self.world.settled(), self.spec
        with RayCluster(spec.address) as cluster:
            needs = {"num_cpus": float(spec.intra_op_threads)}
            if spec.num_gpus:
                needs["num_gpus"] = float(spec.num_gpus)
            num = spec.processes or max(1, min(world.num_ranks, cluster.room_for(needs)))
            cluster.require(needs, "an actor of ranks")
            cluster.require_all(needs, num, f"workers on ray in {num} processes")
            blocks = blocks_of(world.num_ranks, num)
            start = partial(RankGroup.by_turns, world, seed=self.seed, threads=spec.intra_op_threads)
            store = ObjectStore(cluster.ray, num, passes_on=True)

            def fetch(rank: int, note: Any, tensors: Sequence[Any]) -> None:
                if sinks.on_deposit is not None:
                    sinks.on_deposit(rank, note, [fetched(cluster.ray, tensor) for tensor in tensors])

            with _Actors(cluster, blocks, start, needs, dumps_for_child(body)) as actors:
                run = ProcessRunner(world, blocks, store, replace(sinks, on_deposit=fetch), actors.reduce)
                run.run(actors)
                run.failure.raise_if_any()
        return run


# --- here --------------------------------------------------------------------------------------------------


class _Actors:
    """Context manager: the actors, seen as `Children` of this process are.

    Args:
        cluster: where they live.
        blocks: the ranks of each.
        start: makes a rank group of `ranks` and `nth_core`, a channel and a store.
        needs: of each, in Ray's words.
        body: program of the ranks, pickled.
    """

    def __init__(
        self,
        cluster: RayCluster,
        blocks: Sequence[range],
        start: Callable[..., RankGroup],
        needs: Mapping[str, float],
        body: bytes,
    ) -> None:
        self._cluster, self._ray = cluster, cluster.ray
        groups = {"run": 1, "listen": 1, "deliver": 1, "reduce": 1}
        remote = self._ray.remote(
            **needs, max_restarts=0, concurrency_groups=groups, scheduling_strategy="SPREAD"
        )(_Actor)
        self._actors = [
            remote.remote(
                cloudpickle.dumps(partial(start, ranks=block, nth_core=index)),
                len(blocks),
                sys.path,
                os.getcwd(),
            )
            for index, block in enumerate(blocks)
        ]
        self._body, self._owners = body, itertools.cycle(self._actors)
        self.channels = [_Wire(self._ray, actor) for actor in self._actors]
        self.pids = [f"on Ray, actor {index}" for index in range(len(blocks))]

    def __enter__(self) -> Self:
        begun, is_reported = time.monotonic(), False
        waiting = [actor.hello.remote() for actor in self._actors]
        while waiting:
            there = self._cluster.ready(waiting, timeout_seconds=1.0)
            waiting = [each for each in waiting if each not in there]
            if waiting and not is_reported and time.monotonic() - begun > _SECONDS_UNTIL_REPORT:
                is_reported = True
                warnings.warn(
                    f"{len(waiting)} of {len(self._actors)} actors wait for room on the cluster",
                    UserWarning,
                    stacklevel=2,
                )
        for actor, line in zip(self._actors, self.channels, strict=True):
            actor.run.options(concurrency_group="run").remote(self._body)
            line.listen()
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            self._ray.kill(actor)

    def ready(self, indices: Iterable[int], timeout_seconds: float | None = None) -> list[int]:
        """Actors that have sent a message or ended; blocks for the first."""
        owner = {self.channels[index].coming: index for index in indices}
        found = self._cluster.ready(list(owner), timeout_seconds)
        return sorted(owner[reference] for reference in found)

    def describe_exit(self, index: int, timeout_seconds: float = 0.0) -> str:
        """Exit of an actor in words."""
        return self.channels[index].ended

    def is_stopped(self, index: int) -> bool:
        """False: an actor's state cannot be read."""
        return False

    def reduce(self, tensors: Sequence[Any], op: str) -> Any:
        """Reduce tensors; far ones piece by piece, each at the next of the actors."""
        if not isinstance(tensors[0], FarTensor):
            return reduce_tensors(tensors, op)
        shape, dtype = tensors[0].shape, tensors[0].dtype
        pieces = [
            next(self._owners).reduce.options(concurrency_group="reduce").remote(list(each), dtype, op)
            for each in zip(*(tensor.pieces for tensor in tensors), strict=True)
        ]
        return FarTensor(tuple(pieces), shape, dtype)


class _Wire:
    """Channel to one actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor
        self.coming: Any = None
        self.ended = "has ended"

    def listen(self) -> None:
        """Request the next batch."""
        self.coming = self._actor.listen.options(concurrency_group="listen").remote()

    def recv_all(self) -> list[Any]:
        """Messages received; raises `ChannelClosed` when the actor has finished or is lost."""
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
    """Actor on a node; groups of its methods have a thread each, in which calls keep their order."""

    def __init__(self, start: bytes, num_actors: int, path: list[str], folder: str) -> None:
        import ray

        self._ray: Any = ray
        self._channel = _Queues()
        # Relative paths mean the same on nodes that share the driver's disk.
        with contextlib.suppress(OSError):
            os.chdir(folder)
        sys.path += [entry for entry in path if entry not in sys.path]  # where the driver finds its modules
        # From the process that runs the simulation, through Ray, which runs its driver's code anyway.
        make: Callable[..., RankGroup] = cloudpickle.loads(start)  # nosec B301
        self._block = make(channel=self._channel, arena=ObjectStore(ray, num_actors))

    def hello(self) -> None:
        """Return when the actor has started."""

    def run(self, body: bytes) -> None:
        """Run the ranks to their end."""
        first = self._block.ranks[0]
        try:
            self._block.run(cloudpickle.loads(body))  # nosec B301
        except Exception as error:
            self._channel.send([Failed(first, reported_error(first, error))])
        finally:
            self._channel.outbox.put(None)

    def listen(self) -> Any:
        """The next batch of records, when there is one; None after the last."""
        return self._channel.outbox.get()

    def deliver(self, message: Any) -> None:
        """Take a record in."""
        self._channel.inbox.put(message)

    def reduce(self, pieces: list[Any], dtype: torch.dtype, op: str) -> Any:
        """Reduce one piece of every member."""
        parts = [_tensor(np.array(raw), dtype, (-1,)) for raw in self._ray.get(pieces)]
        return reduce_tensors(parts, op).view(torch.uint8).numpy()


class _Queues:
    """A `Pipe` between threads of one actor: the ranks' on one side, Ray's calls on the other."""

    def __init__(self) -> None:
        # Records for the ranks; batches for the simulation, and None after the last.
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.send, self.recv = self.outbox.put, self.inbox.get

    def waiting(self) -> bool:
        """True if there is one already."""
        return not self.inbox.empty()
