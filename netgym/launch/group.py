"""A c10d process group on a simulated network: c10d's calls on our communicator's collectives.

The values are those of `exogym_core.communicator`, combined once in rank order; the times are those of its kernel.
This file adds c10d's conventions: outputs given as tensors and lists of tensors, coalesced calls, complex and boolean
dtypes, bitwise and pre-multiplied sums, gloo's monitored barrier.
"""

from __future__ import annotations

import contextlib
import datetime
import math
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from exogym_core.communicator.base import CollectiveCall, nothing
from netgym.launch.private import DEFAULT_SECONDS, Profile
from netgym.launch.tensors import (
    add_up_sparse,
    fill,
    op_of,
    plain_form,
    reducible,
    refusal_of_gloo,
    split_rows,
    write,
    write_all,
)
from netsim.errors import BrokenCallError
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from exogym_core.communicator.base import Delivery
    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator, SimulatedHandle
    from netgym.launch.session import RankSession

__all__ = ["NetsimGroup", "NetsimWork", "monitored_barrier"]


_ARRIVAL, _RELEASE = 1 << 30, (1 << 30) + 1  # tags; a program's own are small


def monitored_barrier(comm: SimulatedCommunicator, seconds: float, wait_all_ranks: bool) -> None:
    """Barrier that rank 0 releases once all others have reported to it.

    Args:
        comm: of the group.
        seconds: of virtual time that rank 0 gives the others; the group is broken after them.
        wait_all_ranks: name all missing ranks, not only the first.

    Raises:
        RuntimeError: on rank 0 with the missing ranks; on the others, that ranks are missing.
    """
    empty, others = torch.zeros(8, dtype=torch.uint8), range(1, comm.world_size)
    if comm.rank:
        try:
            comm.isend(empty, 0, _ARRIVAL).wait(seconds)
            comm.irecv(empty, 0, _RELEASE).wait(seconds)
            return
        except BrokenCallError as error:
            raise RuntimeError(
                f"Rank {comm.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0. Please check rank 0 logs for faulty rank.\n{error}"
            ) from None
    if seconds <= 0:
        raise RuntimeError(f"Rank 0 timed out in monitoredBarrier after {seconds * 1e3:.10g} ms.")
    arrivals: list[Any] = [comm.irecv(empty.clone(), rank, _ARRIVAL) for rank in others]
    end, missing = comm.now() + seconds, list[int]()
    for rank, handle in zip(others, arrivals, strict=True):
        try:
            handle.wait(max(end - comm.now(), 0.0))
        except BrokenCallError:
            missing.append(rank)
    if missing:
        shown = missing if wait_all_ranks else missing[:1]
        names = f"Rank{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown))}"
        raise RuntimeError(f"{names} failed to pass monitoredBarrier in {seconds * 1e3:.10g} ms")
    for handle in [comm.isend(empty, rank, _RELEASE) for rank in others]:
        handle.wait()


class NetsimGroup(dist.ProcessGroup):
    """A process group, at one rank.

    Args:
        session: the rank's.
        comm: the group's communicator.
        store: the group's part of c10d's store.
        name: c10d's name of the group.

    Raises (calls that wait):
        MismatchError: members disagree about a call.
        DeadlockError: a rank waits for a call that can never complete.
    """

    def __init__(
        self, session: RankSession, comm: SimulatedCommunicator, store: dist.Store, name: str = ""
    ) -> None:
        super().__init__(comm.rank, comm.world_size)
        self._session, self._comm, self._store, self._given_name = session, comm, store, name
        self.shown_name = "netsim"  # in profiles
        self.is_gloos = False  # refuses what gloo refuses
        self._coalesced: list[NetsimWork] | None = None
        self._profile = Profile()

    # --- the group itself ----------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 (c10d's, whose C++ looks for gloo itself under gloo's name)
        return "netsim"

    @property
    def group_name(self) -> str:
        return self._given_name

    def _set_group_name(self, name: str) -> None:
        self._given_name = name

    def _set_group_desc(self, desc: str) -> None:
        """Name the group in reports: as the program describes it, else by c10d's number."""
        name = f"group {self._given_name}" if desc in ("", "undefined") else desc
        self._session.comm.mark({"group": self._comm.group_id, "name": name})
        super()._set_group_desc(desc)

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> NetsimGroup:
        return self

    def get_group_store(self) -> dist.Store:
        return self._store

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self._session.settle()

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._comm.call_seconds = max(timeout.total_seconds(), 0.0)

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0

    # --- several calls as one ------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        if self.is_gloos:
            raise RuntimeError("Backend gloo does not support startCoalescing")
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> NetsimWork:
        works, self._coalesced = self._coalesced or [], None
        self._comm.flush()  # calls posted as if waited for at once
        return self._together(works)

    # --- collectives ---------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> NetsimWork:
        tensor = tensors[0]
        if not tensor.is_sparse:
            return self._reduced("all_reduce", tensors, opts)
        if op_of(opts) != dist.ReduceOp.SUM:
            raise RuntimeError(f"all_reduce of a sparse tensor: {op_of(opts)} has no meaning; use SUM")
        with self._session, torch.no_grad():
            self._session.at("sparse_all_reduce")
            tensor.copy_(add_up_sparse(self._comm, tensor))
        return self._work("sparse_all_reduce", [], [tensor], shown=[])

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> NetsimWork:
        if not tensors or any(tensor.is_meta for tensor in tensors):
            raise NotImplementedError("all_reduce_coalesced: There were no tensor arguments of the CPU")
        self._require_strided("all_reduce_coalesced", tensors)
        flat = {  # of each dtype
            dtype: torch.cat([tensor.detach().reshape(-1) for tensor in tensors if tensor.dtype == dtype])
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors)
        }

        def finish() -> None:
            for dtype, line in flat.items():
                alike = [tensor for tensor in tensors if tensor.dtype == dtype]
                for tensor, part in zip(alike, line.split([each.numel() for each in alike]), strict=True):
                    tensor.copy_(part.view_as(tensor))  # a parameter is refused, as by gloo

        inner = self._reduced("all_reduce", list(flat.values()), opts, shown=tensors)
        work = NetsimWork(self._session, "allreduce_coalesced", [inner], finish, tensors)
        if self._coalesced:
            self._coalesced[-1] = work  # which waits for the inner one
        return work

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> NetsimWork:
        return self._reduced("reduce", tensors, opts, root=self._root("reduce", opts))

    def _reduced(
        self,
        name: str,
        tensors: Sequence[Tensor],
        opts: Any,
        root: int = 0,
        shown: Sequence[Tensor] | None = None,
    ) -> NetsimWork:
        made = ((tensor, *reducible(tensor, op_of(opts))) for tensor in tensors)
        calls = (
            (CollectiveCall(name, [plain], op, root), write(tensor, back)) for tensor, plain, op, back in made
        )
        return self._posted(name, calls, opts, tensors, tensors, op_of(opts), shown=shown)

    def _root(self, name: str, opts: Any) -> int:
        root = int(opts.rootRank)
        if not 0 <= root < self.size():
            raise RuntimeError(f"{name}: invalid root rank: {root}; use 0 to {self.size() - 1}")
        return root

    def _of_all(self, name: str, tensors: Sequence[Tensor], like: Tensor | None = None) -> Sequence[Tensor]:
        """`tensors`, of which there is one for each rank; gloo wants all of the dtype and shape of `like`."""
        if len(tensors) != self.size():
            raise RuntimeError(
                f"{name}: a list of {format_count(len(tensors), 'tensor')}; give one for each of "
                f"{format_count(self.size(), 'rank')}"
            )
        for index, tensor in enumerate(tensors):
            if (
                self.is_gloos
                and like is not None
                and (tensor.dtype, tensor.shape) != (like.dtype, like.shape)
            ):
                given, wanted = (f"{each.dtype} {list(each.shape)}" for each in (tensor, like))
                raise RuntimeError(
                    f"{name}: invalid tensor at index {index} (expected {wanted}, got {given})"
                )
        return tensors

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> NetsimWork:
        root = self._root("broadcast", opts)
        calls = (
            (
                CollectiveCall("broadcast", [plain_form(tensor)], root=root),
                nothing if self._comm.rank == root else write(tensor),
            )
            for tensor in tensors
        )
        return self._posted("broadcast", calls, opts, tensors, tensors)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> NetsimWork:
        self._require_strided("all_gather", inputs)
        if not self.is_gloos and any(len({part.shape for part in into}) > 1 for into in outputs):
            return self._gathered_unevenly(outputs, inputs)
        calls = [
            (
                CollectiveCall("all_gather", [plain_form(tensor)]),
                write_all(self._of_all("all_gather", into, tensor)),
            )
            for tensor, into in zip(inputs, outputs, strict=True)
        ]
        return self._posted("all_gather", calls, opts, [*chain(*outputs)], inputs, shown=inputs)

    def _gathered_unevenly(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> NetsimWork:
        """Gather tensors of several shapes by a broadcast from each member, as NCCL does."""
        works = []
        for tensor, into in zip(inputs, outputs, strict=True):
            self._of_all("all_gather", into)[self.rank()].detach().copy_(tensor)
            for root, part in enumerate(into):
                opts = dist.BroadcastOptions()
                opts.rootRank = root
                works.append(self.broadcast([part], opts))
        return self._together(works)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> NetsimWork:
        return self.allgather(list(zip(*outputs, strict=True)), inputs, opts)  # a row of outputs is a rank's

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> NetsimWork:
        self._require_multiple("all_gather_into_tensor", output, tensor)
        if self.is_gloos:
            self._of_all("all_gather_into_tensor", output.chunk(self.size()), tensor)
        call = CollectiveCall("all_gather", [plain_form(tensor)])
        return self._posted("_all_gather_base", [(call, fill(output))], opts, [output], [tensor])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> NetsimWork:
        return self._together(map(self.all_gather_single, outputs, inputs))

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> NetsimWork:
        root = self._root("gather", opts)
        self._require_strided("gather", inputs)
        into = (
            write_all(self._of_all("gather", outputs[0], inputs[0])) if self._comm.rank == root else nothing
        )
        call = CollectiveCall("gather", [plain_form(inputs[0])], root=root)
        return self._posted("gather", [(call, into)], opts, [*chain(*outputs)], inputs, shown=inputs)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> NetsimWork:
        root = self._root("scatter", opts)
        given = self._of_all("scatter", inputs[0], outputs[0]) if self._comm.rank == root else []
        parts = [plain_form(part) for part in given]
        call = CollectiveCall("scatter", parts, root=root, like=[plain_form(outputs[0])])
        return self._posted("scatter", [(call, write(outputs[0]))], opts, outputs, outputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> NetsimWork:
        return self._together(map(self._reduce_scattered, outputs, inputs, repeat(opts)))

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> NetsimWork:
        self._require_multiple("reduce_scatter_tensor", tensor, output)
        if self.is_gloos:
            return self._reduce_scattered(output, tensor.detach().chunk(self.size()), opts)
        return self._reduce_scattered(output, list(tensor.detach().reshape(self.size(), -1)), opts)

    def _require_multiple(self, name: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self.size() or not whole.dim():
            raise RuntimeError(
                f"{name}: {whole.numel()} elements; give world size {self.size()} times {part.numel()}"
            )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> NetsimWork:
        return self._together(map(self.reduce_scatter_single, outputs, inputs, repeat(opts)))

    def _reduce_scattered(self, output: Tensor, parts: Sequence[Tensor], opts: Any) -> NetsimWork:
        given = self._of_all("reduce_scatter", parts, output)

        def calls() -> Iterator[tuple[CollectiveCall, Delivery[None]]]:
            plain, ops, backs = zip(*(reducible(part, op_of(opts)) for part in given), strict=True)
            yield CollectiveCall("reduce_scatter", plain, ops[0]), write(output, backs[0])

        return self._posted("reduce_scatter", calls(), opts, [output], given, op_of(opts))

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> NetsimWork:
        return self._exchanged(outputs, inputs, opts, outputs, like=next(iter(outputs), None))

    def _exchanged(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any,
        written: Sequence[Tensor],
        shown: Sequence[Tensor] | None = None,
        like: Tensor | None = None,
    ) -> NetsimWork:
        self._require_strided("all_to_all", inputs)
        parts = [plain_form(part) for part in self._of_all("all_to_all", inputs, like)]
        call = CollectiveCall("all_to_all", parts)
        into = write_all(self._of_all("all_to_all", outputs, like))
        return self._posted("all_to_all", [(call, into)], opts, written, inputs, shown=shown)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> NetsimWork:
        if not tensor.is_contiguous():
            raise ValueError("all_to_all_single: Tensors must be contiguous")
        given = split_rows(tensor, input_split_sizes, self.size(), "input")
        into = split_rows(output, output_split_sizes, self.size(), "output")
        if not (input_split_sizes or output_split_sizes) and tensor.numel() != output.numel():
            raise RuntimeError(
                f"all_to_all_single: {tensor.numel()} elements of input and {output.numel()} of output: give as many"
            )
        return self._exchanged(into, given, opts, [output], [tensor])

    def barrier(self, opts: Any = None) -> NetsimWork:
        return self._posted("barrier", [(CollectiveCall("barrier", []), nothing)], opts, [], [])

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """gloo's barrier that names missing ranks: rank 0 receives from each of the others, then releases them."""
        with self._session:
            self._session.at("monitored_barrier")
            monitored_barrier(
                self._comm, DEFAULT_SECONDS if timeout is None else timeout.total_seconds(), wait_all_ranks
            )

    # c10d's names of the same calls until torch 2.12
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- messages ------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> NetsimWork:
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> NetsimWork:
        return self._message("recv", tensors, src, tag)

    def _message(self, side: str, tensors: Sequence[Tensor], peer: int, tag: int) -> NetsimWork:
        self._require_strided(side, tensors)
        tensor = tensors[0].detach()
        if tensor.is_meta:
            return NetsimWork(self._session, side, [])
        if not tensor.is_contiguous():
            raise RuntimeError(f"{side}: input tensor has to be contiguous")
        if tag < 0:
            raise RuntimeError(f"{side}: Tag must be nonnegative, and is {tag}")
        if self.is_gloos and peer == self.rank():
            raise RuntimeError(f"{side}: rank {peer} is not connected to itself")
        line = tensor.view(-1)  # as on gloo, the ends need not agree on more of the shape than its elements
        with self._session:
            self._session.at(side)
            call = self._comm.isend if side == "send" else self._comm.irecv
            handle: Any = call(line, peer, tag)
            if side == "recv":
                handle._deliver = self._session.delivery(handle._deliver, tensors, tensors)
        return self._work(side, [handle], tensors, source=peer if side == "recv" else -1)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> NetsimWork:
        with self._session:
            self._session.at("recv")
            source = self._comm.recv(tensors[0].detach().view(-1), None, tag)
        return self._work("recvAnySource", [], tensors, source=source)

    # --- how every call goes -------------------------------------------------------------------------------

    def _posted(
        self,
        name: str,
        calls: Iterable[tuple[CollectiveCall, Delivery[None]]],
        opts: Any,
        outputs: Sequence[Tensor],
        given: Sequence[Tensor],
        op: Any = None,
        shown: Sequence[Tensor] | None = None,
    ) -> NetsimWork:
        """Post calls, each with the delivery of its values, as the one call `name` of c10d.

        What gloo refuses in the `given` tensors and reduction, it raises in the wait.
        """
        self._require_strided(name, given)
        if any(tensor.is_meta for tensor in given):  # no backend gets to see them
            return NetsimWork(self._session, name, [], outputs=outputs)
        if self.is_gloos:
            refusals = (refusal_of_gloo(name, tensor, op) for tensor in given)
            if (error := next(filter(None, refusals), None)) is not None:
                return NetsimWork(self._session, name, [], outputs=outputs, error=error)
        # Without async_op c10d waits for the returned work at once.
        waits, handles = self._coalesced is not None or not getattr(opts, "asyncOp", True), []
        with self._session:
            for call, deliver in calls:
                self._session.at(call.name)
                into = self._session.delivery(deliver, given, outputs)
                handles.append(self._comm._collective(call, into, True, waits=waits))
        work = self._work(name, handles, outputs, shown=shown)
        work.give(getattr(opts, "timeout", None))
        return work

    def _require_strided(self, name: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout != torch.strided or tensor.is_quantized:
                kind = "quantized" if tensor.is_quantized else str(tensor.layout)
                raise NotImplementedError(f"Could not run 'c10d::{name}' with arguments of layout {kind}")

    def _work(
        self,
        op: str,
        handles: Sequence[Any],
        outputs: Sequence[Tensor],
        *,
        source: int = -1,
        shown: Sequence[Tensor] | None = None,
    ) -> NetsimWork:
        self._profile.show(self.shown_name, op, outputs if shown is None else shown)
        work = NetsimWork(self._session, op, handles, outputs=outputs, source=source)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _together(self, works: Iterable[NetsimWork]) -> NetsimWork:
        made = list(works)
        if len(made) == 1:
            return made[0]
        outputs = [tensor for work in made for tensor in work.outputs]
        return NetsimWork(self._session, "coalesced", made, outputs=outputs)


_SHOWN = {"_all_gather_base": "all_gather"}  # c10d's names of calls that it has two of


class NetsimWork(dist.Work):
    """Calls of one rank in flight.

    `wait` waits for values in host time and for the calls' end on the clock. A future has the values at once, for
    code that waits for it in C++ or chains callbacks to it, and its time is charged when the backward pass ends that
    is under way, at its own `wait`, or before the program's next wait for anything.

    Args:
        session: the rank's.
        op: c10d's name of the call.
        handles: of the calls, or works that this one waits for.
        finish: called when all values are delivered.
        outputs: of `result` and futures.
        source: the sender of a received message.
        error: that its wait raises.
    """

    def __init__(
        self,
        session: RankSession,
        op: str,
        handles: Sequence[SimulatedHandle[Any] | NetsimWork],
        finish: Callable[[], None] = lambda: None,
        outputs: Sequence[Tensor] = (),
        source: int = -1,
        error: BaseException | None = None,
    ) -> None:
        super().__init__()
        self._session, self._op, self._handles = session, op, list(handles)
        self._finish, self._outputs, self._source = finish, list(outputs), source
        self._is_delivered = self._is_charged = self._is_over = False
        self._seconds, self._error = math.inf, error

    def wait(self, timeout: datetime.timedelta | float | None = None) -> bool:
        """Wait until it is done, or for `timeout`, which may be in seconds.

        Raises:
            RuntimeError: it is not, after the group's time-out or this one, or the group was broken before.
        """
        if self._error is not None:
            raise self._error
        limit = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        seconds = limit if limit and 0 < limit < math.inf else self._seconds
        with self._session:
            self._session.clock.end_polls()
            self._session.settle_others(self)
            self._end(seconds)
        return True

    def _end(self, seconds: float) -> None:
        try:
            if not self._is_charged:
                self._is_charged = True
                if self._handles and not isinstance(self._handles[0], NetsimWork):  # which marks its own call
                    self._session.at(_SHOWN.get(self._op, self._op))
                for handle in self._handles:
                    handle.wait(seconds)
            self.deliver()
            self._is_over = True
        except RuntimeError as error:
            self._error = error
            raise

    def give(self, timeout: datetime.timedelta | None) -> None:
        """Limit its waits to `timeout`; c10d ignores times that are not positive."""
        if timeout is not None and timeout.total_seconds() > 0:
            self._seconds = timeout.total_seconds()

    def deliver(self) -> None:
        """Deliver values, as soon as they are available."""
        if not self._is_delivered:
            self._is_delivered = True
            for handle in self._handles:
                handle.deliver()
            self._finish()

    def is_completed(self) -> bool:
        """True if it is over at the rank's virtual time: its values are written, or its wait raises.

        Two answers of False are `POLL_SECONDS` of virtual time apart at least.
        """
        if not self._is_over and self._error is None:
            with self._session:
                self._session.clock.begin_poll()
                if self._is_charged or all(handle.is_completed() for handle in self._handles):
                    with contextlib.suppress(RuntimeError):
                        self._end(math.inf)
                else:
                    self._session.clock.poll_again()
        return self._is_over or self._error is not None

    def is_success(self) -> bool:
        """True if it is over and its wait raises nothing."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Error that its wait raises."""
        return self._error

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def source_rank(self) -> int:
        """The sender of a received message."""
        if self._source < 0:
            raise RuntimeError(f"sourceRank() of {self._op}, which is no receive")
        return self._source

    _source_rank = source_rank

    @property
    def outputs(self) -> list[Tensor]:
        """Tensors that it writes."""
        return self._outputs

    def result(self) -> list[Tensor]:
        """The tensors that it has written."""
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """The tensors as a future, which has its values already."""
        future = _ChargedFuture(self)
        if self._error is not None:
            future.set_exception(self._error)
            return future
        with self._session:
            self.deliver()
            if not self._is_charged:
                self._session.charge_later(self)
        future.set_result(self._outputs)
        return future


class _ChargedFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A future whose wait, from Python, takes its work's time."""

    def __init__(self, work: NetsimWork) -> None:
        super().__init__()
        self._work = work

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()
