"""A c10d process group on a simulated network: c10d's calls on our communicator's collectives.

The values are those of `exogym_core.communicator`, combined once in rank order; the times are those of its kernel.
What this file adds is c10d's way of asking: outputs given as tensors and lists of tensors, coalesced calls, complex
and boolean dtypes, bitwise and pre-multiplied sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from exogym_core.torch_backend.face import GroupFace
from exogym_core.torch_backend.monitored import monitored_barrier
from exogym_core.torch_backend.private import DEFAULT_SECONDS, Profile
from exogym_core.torch_backend.sparse import add_up_sparse
from exogym_core.torch_backend.tensors import (
    even_splits,
    fill,
    nothing,
    op_of,
    plain_form,
    reducible,
    write,
    write_all,
)
from exogym_core.torch_backend.work import NetsimWork, WorkHandle
from netsim.files.errors import InputError

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
    from exogym_core.torch_backend.session import RankSession
    from exogym_core.torch_backend.tensors import Deliver

__all__ = ["NetsimGroup"]


class NetsimGroup(GroupFace):
    """One rank's side of a process group; its arguments are those of `GroupFace`.

    Raises (calls that wait):
        MismatchError: members disagree about a call.
        DeadlockError: what a rank waits for can never come.
    """

    def __init__(
        self, session: RankSession, comm: SimulatedCommunicator, store: dist.Store, name: str = ""
    ) -> None:
        super().__init__(session, comm, store, name)
        self._coalesced: list[NetsimWork] | None = None
        self._profile = Profile()

    # --- several calls as one ------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> NetsimWork:
        works, self._coalesced = self._coalesced or [], None
        self._comm.flush()  # what was posted in the belief that it is waited for at once
        return _together(self._session, works)

    # --- collectives ---------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> NetsimWork:
        if tensors[0].is_sparse:
            return self._sparse_all_reduce(tensors[0], op_of(opts))
        return self._reduced("all_reduce", tensors, opts)

    def _sparse_all_reduce(self, tensor: Tensor, op: Any) -> NetsimWork:
        if op != dist.ReduceOp.SUM:
            raise InputError(f"all_reduce of a sparse tensor: {op} has no meaning; use SUM")
        with self._session.call(), torch.no_grad():
            self._session.at("sparse_all_reduce")
            tensor.copy_(add_up_sparse(self._comm, tensor))
        return self._work("sparse_all_reduce", [], [tensor], shown_tensors=[])

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> NetsimWork:
        flat = {  # of each dtype
            dtype: torch.cat([tensor.detach().reshape(-1) for tensor in tensors if tensor.dtype == dtype])
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors)
        }

        def finish() -> None:
            for dtype, line in flat.items():
                alike = [tensor for tensor in tensors if tensor.dtype == dtype]
                for tensor, part in zip(alike, line.split([each.numel() for each in alike]), strict=True):
                    tensor.detach().copy_(part.view_as(tensor))

        work = self._reduced("all_reduce", list(flat.values()), opts, shown_tensors=tensors)
        return self._then(work, "allreduce_coalesced", finish, tensors)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> NetsimWork:
        return self._reduced("reduce", tensors, opts, root=int(opts.rootRank))

    def _reduced(
        self,
        name: str,
        tensors: Sequence[Tensor],
        opts: Any,
        root: int = 0,
        shown_tensors: Sequence[Tensor] | None = None,
    ) -> NetsimWork:
        op, handles = op_of(opts), []
        with self._session.call():
            for tensor in tensors:
                plain, op_name, back = reducible(tensor, op)
                into = write(tensor, back)
                handles.append(self._post(name, [plain], into, opts, reduce_op=op_name, root=root))
        return self._work(name, handles, tensors, shown_tensors=shown_tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> NetsimWork:
        root = int(opts.rootRank)
        is_root = self._comm.rank == root
        with self._session.call():
            handles = [
                self._post("broadcast", [plain_form(t)], nothing if is_root else write(t), opts, root=root)
                for t in tensors
            ]
        return self._work("broadcast", handles, tensors)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> NetsimWork:
        with self._session.call():
            handles = [
                self._post("all_gather", [plain_form(t)], write_all(into), opts)
                for t, into in zip(inputs, outputs, strict=True)
            ]
        return self._work("all_gather", handles, [t for into in outputs for t in into], shown_tensors=inputs)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> NetsimWork:
        # outputs[rank][i] is rank's i-th tensor.
        return self.allgather(
            [[outputs[r][i] for r in range(len(outputs))] for i in range(len(inputs))], inputs, opts
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> NetsimWork:
        with self._session.call():
            handle = self._post("all_gather", [plain_form(tensor)], fill(output), opts)
        return self._work("_all_gather_base", [handle], [output])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> NetsimWork:
        works = [self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return _together(self._session, works)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> NetsimWork:
        root = int(opts.rootRank)
        into = write_all(outputs[0]) if self._comm.rank == root else nothing
        with self._session.call():
            handle = self._post("gather", [plain_form(inputs[0])], into, opts, root=root)
        return self._work("gather", [handle], [t for into in outputs for t in into], shown_tensors=inputs)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> NetsimWork:
        root, output = int(opts.rootRank), outputs[0]
        parts = [plain_form(part) for part in inputs[0]] if self._comm.rank == root else []
        like = [plain_form(output)]
        with self._session.call():
            handle = self._post("scatter", parts, write(output), opts, root=root, like=like)
        return self._work("scatter", [handle], outputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> NetsimWork:
        works = [
            self._reduce_scattered(output, list(parts), opts)
            for output, parts in zip(outputs, inputs, strict=True)
        ]
        return _together(self._session, works)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> NetsimWork:
        if tensor.numel() != output.numel() * self.size():
            raise ValueError(
                f"reduce_scatter: the input has {tensor.numel()} elements; give world size {self.size()} times "
                f"the output's {output.numel()}"
            )
        flat = tensor.detach().reshape(self.size(), -1)
        return self._reduce_scattered(output, list(flat), opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> NetsimWork:
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _together(self._session, works)

    def _reduce_scattered(self, output: Tensor, parts: list[Tensor], opts: Any) -> NetsimWork:
        made = [reducible(part, op_of(opts)) for part in parts]
        plain, op_name, back = [m[0] for m in made], made[0][1], made[0][2]
        with self._session.call():
            handle = self._post("reduce_scatter", plain, write(output, back), opts, reduce_op=op_name)
        return self._work("reduce_scatter", [handle], [output])

    def alltoall(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,
        shown_tensors: Sequence[Tensor] | None = None,
    ) -> NetsimWork:
        with self._session.call():
            handle = self._post("all_to_all", [plain_form(t) for t in inputs], write_all(outputs), opts)
        return self._work("all_to_all", [handle], outputs, shown_tensors=shown_tensors)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> NetsimWork:
        given = tensor.detach().split(list(input_split_sizes or even_splits(tensor, self.size(), "input")))
        into = output.detach().split(list(output_split_sizes or even_splits(output, self.size(), "output")))
        work = self.alltoall(into, given, opts, shown_tensors=[tensor])
        return self._then(work, "all_to_all", lambda: None, [output])

    def barrier(self, opts: Any = None) -> NetsimWork:
        with self._session.call():
            handle = self._post("barrier", [], nothing, opts)
        work = self._work("barrier", [handle], [])
        work.give(getattr(opts, "timeout", None))
        return work

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """As gloo's: rank 0 hears from each of the others in turn, then lets them go on; it names who has not come."""
        with self._session.call():
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
        with self._session.call():
            self._session.at("send")
            handle = self._comm.isend(plain_form(tensors[0]), dst, tag)
        return self._work("send", [handle], tensors)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> NetsimWork:
        with self._session.call():
            self._session.at("recv")
            handle = self._comm.irecv(tensors[0].detach(), src, tag)
        return self._work("recv", [handle], tensors, source=src)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> NetsimWork:
        with self._session.call():
            self._session.at("recv")
            source = self._comm.recv(tensors[0].detach(), None, tag)
        return self._work("recvAnySource", [], tensors, source=source)

    # --- groups --------------------------------------------------------------------------------------------

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: datetime.timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> NetsimGroup | None:
        if self.rank() not in new_ranks:
            return None
        comm = self._comm.group(list(new_ranks))
        comm.call_seconds = timeout.total_seconds() if timeout is not None else self._comm.call_seconds
        return NetsimGroup(self._session, comm, self._store, group_name or "")

    # --- how every call goes -------------------------------------------------------------------------------

    def _post(
        self,
        name: str,
        tensors: Sequence[Tensor],
        deliver: Deliver,
        opts: Any,
        *,
        reduce_op: str = "",
        root: int = 0,
        like: Sequence[Tensor] | None = None,
    ) -> Any:
        # Without async_op c10d waits for what it gets at once; torch before 2.9 does not say so.
        waits = self._coalesced is not None or not getattr(opts, "asyncOp", True)
        self._session.at(name)
        return self._comm._collective(
            name, tensors, deliver, True, reduce_op=reduce_op, root=root, like=like, waits=waits
        )

    def _work(
        self,
        op: str,
        handles: Sequence[Any],
        outputs: Sequence[Tensor],
        *,
        source: int = -1,
        shown_tensors: Sequence[Tensor] | None = None,
    ) -> NetsimWork:
        shown = outputs if shown_tensors is None else shown_tensors
        self._profile.show(self.shown_name, op, shown)
        work = NetsimWork(self._session, op, handles, outputs=outputs, source=source)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _then(
        self, work: NetsimWork, op: str, finish: Callable[[], None], outputs: Sequence[Tensor]
    ) -> NetsimWork:
        return NetsimWork(self._session, op, [WorkHandle(work)], finish, outputs)  # type: ignore[list-item]


def _together(session: RankSession, works: Sequence[NetsimWork]) -> NetsimWork:
    if len(works) == 1:
        return works[0]
    outputs = [tensor for work in works for tensor in work.outputs]
    return NetsimWork(session, "coalesced", [WorkHandle(work) for work in works], outputs=outputs)
