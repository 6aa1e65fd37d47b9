"""A c10d process group on a simulated network: c10d's calls on our communicator's collectives.

The values are those of `exogym_core.communicator`, combined once in rank order; the times are those of its kernel.
What this file adds is c10d's way of asking: outputs given as tensors and lists of tensors, coalesced calls, complex
and boolean dtypes, bitwise and pre-multiplied sums.
"""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from exogym_core.torch_backend.monitored import monitored_barrier
from exogym_core.torch_backend.private import DEFAULT_SECONDS, Profile
from exogym_core.torch_backend.sparse import add_up_sparse
from exogym_core.torch_backend.tensors import (
    copy_all,
    even_splits,
    fill,
    first_of,
    op_of,
    plain_form,
    reducible,
)
from exogym_core.torch_backend.work import NetsimWork
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
    from exogym_core.torch_backend.session import RankSession

__all__ = ["NetsimGroup"]


class NetsimGroup(dist.ProcessGroup):
    """One rank's side of a process group.

    Args:
        session: the rank's.
        comm: the group's communicator.
        store: the group's part of c10d's store.
        name: c10d's name of the group.

    Raises (calls that wait):
        MismatchError: members disagree about a call.
        DeadlockError: what a rank waits for can never come.
    """

    def __init__(
        self, session: RankSession, comm: SimulatedCommunicator, store: dist.Store, name: str = ""
    ) -> None:
        super().__init__(comm.rank, comm.world_size)
        self._session, self._comm, self._store, self._given_name = session, comm, store, name
        self._coalesced: list[NetsimWork] | None = None
        self.shown_name = "netsim"  # in profiles
        self._profile = Profile()

    # --- what it is ----------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802 (c10d's, whose C++ looks for gloo itself under gloo's name)
        return "netsim"

    def name(self) -> str:
        return "netsim"

    @property
    def group_name(self) -> str:
        return self._given_name

    def _set_group_name(self, name: str) -> None:
        self._given_name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_desc(self) -> str:
        return getattr(self, "_desc", "")

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def bound_device_id(self) -> torch.device | None:
        return None

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

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._comm.call_seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0

    # --- several calls as one ------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> NetsimWork:
        works, self._coalesced = self._coalesced or [], None
        return _together(self._session, works)

    # --- collectives ---------------------------------------------------------------------------------------

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> NetsimWork:
        if tensors[0].is_sparse:
            return self._sparse_all_reduce(tensors[0], op_of(opts))
        return self._reduced("all_reduce", tensors, op_of(opts))

    def _sparse_all_reduce(self, tensor: Tensor, op: Any) -> NetsimWork:
        if op != dist.ReduceOp.SUM:
            raise InputError(f"all_reduce of a sparse tensor: {op} has no meaning; use SUM")
        with self._session.call(), torch.no_grad():
            tensor.copy_(add_up_sparse(self._comm, tensor))
        return self._work("sparse_all_reduce", [], lambda got: None, [tensor], shown_tensors=[])

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> NetsimWork:
        flat = {  # of each dtype
            dtype: torch.cat([tensor.detach().reshape(-1) for tensor in tensors if tensor.dtype == dtype])
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors)
        }

        def finish(got: list[Any]) -> None:
            for dtype, line in flat.items():
                alike = [tensor for tensor in tensors if tensor.dtype == dtype]
                for tensor, part in zip(alike, line.split([each.numel() for each in alike]), strict=True):
                    tensor.detach().copy_(part.view_as(tensor))

        work = self._reduced("all_reduce", list(flat.values()), op_of(opts), shown_tensors=tensors)
        return self._then(work, "allreduce_coalesced", finish, tensors)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> NetsimWork:
        return self._reduced("reduce", tensors, op_of(opts), root=int(opts.rootRank))

    def _reduced(
        self,
        name: str,
        tensors: Sequence[Tensor],
        op: Any,
        root: int = 0,
        shown_tensors: Sequence[Tensor] | None = None,
    ) -> NetsimWork:
        works = []
        for tensor in tensors:
            plain, op_name, back = reducible(tensor, op)
            works.append((tensor, plain, back, op_name))
        writes = name == "all_reduce" or self._comm.rank == root

        def finish(got: list[Any]) -> None:
            for (tensor, _, back, _), value in zip(works, got, strict=True):
                if writes:
                    tensor.detach().copy_(back(value))

        with self._session.call() as _:
            handles = [
                self._post(name, [plain], first_of(plain), reduce_op=op_name, root=root)
                for _, plain, _, op_name in works
            ]
        return self._work(name, handles, finish, tensors, shown_tensors=shown_tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> NetsimWork:
        root = int(opts.rootRank)

        def finish(got: list[Any]) -> None:
            if self._comm.rank != root:
                for tensor, value in zip(tensors, got, strict=True):
                    tensor.detach().copy_(value)

        with self._session.call():
            handles = [self._post("broadcast", [plain_form(t)], first_of(t), root=root) for t in tensors]
        return self._work("broadcast", handles, finish, tensors)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> NetsimWork:
        def finish(got: list[Any]) -> None:
            for into, parts in zip(outputs, got, strict=True):
                copy_all(into, parts)

        with self._session.call():
            handles = [self._post("all_gather", [plain_form(t)], list) for t in inputs]
        return self._work(
            "all_gather", handles, finish, [t for into in outputs for t in into], shown_tensors=inputs
        )

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> NetsimWork:
        # outputs[rank][i] is rank's i-th tensor.
        return self.allgather(
            [[outputs[r][i] for r in range(len(outputs))] for i in range(len(inputs))], inputs
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> NetsimWork:
        def finish(got: list[Any]) -> None:
            fill(output, got[0])

        with self._session.call():
            handle = self._post("all_gather", [plain_form(tensor)], list)
        return self._work("_all_gather_base", [handle], finish, [output])

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> NetsimWork:
        works = [self.all_gather_single(o, i) for o, i in zip(outputs, inputs, strict=True)]
        return _together(self._session, works)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> NetsimWork:
        root = int(opts.rootRank)

        def finish(got: list[Any]) -> None:
            if self._comm.rank == root:
                copy_all(outputs[0], got[0])

        with self._session.call():
            handle = self._post("gather", [plain_form(inputs[0])], list, root=root)
        return self._work(
            "gather", [handle], finish, [t for into in outputs for t in into], shown_tensors=inputs
        )

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> NetsimWork:
        root, output = int(opts.rootRank), outputs[0]
        parts = [plain_form(part) for part in inputs[0]] if self._comm.rank == root else []

        def finish(got: list[Any]) -> None:
            output.detach().copy_(got[0])

        with self._session.call():
            handle = self._post("scatter", parts, first_of(output), root=root, like=[plain_form(output)])
        return self._work("scatter", [handle], finish, outputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> NetsimWork:
        works = [
            self._reduce_scattered(output, list(parts), op_of(opts))
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
        return self._reduce_scattered(output, list(flat), op_of(opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> NetsimWork:
        works = [self.reduce_scatter_single(o, i, opts) for o, i in zip(outputs, inputs, strict=True)]
        return _together(self._session, works)

    def _reduce_scattered(self, output: Tensor, parts: list[Tensor], op: Any) -> NetsimWork:
        made = [reducible(part, op) for part in parts]
        plain, op_name, back = [m[0] for m in made], made[0][1], made[0][2]

        def finish(got: list[Any]) -> None:
            output.detach().copy_(back(got[0]).view_as(output))

        with self._session.call():
            handle = self._post("reduce_scatter", plain, lambda got: got[0], reduce_op=op_name)
        return self._work("reduce_scatter", [handle], finish, [output])

    def alltoall(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,
        shown_tensors: Sequence[Tensor] | None = None,
    ) -> NetsimWork:
        def finish(got: list[Any]) -> None:
            copy_all(outputs, got[0])

        with self._session.call():
            handle = self._post("all_to_all", [plain_form(t) for t in inputs], list)
        return self._work("all_to_all", [handle], finish, outputs, shown_tensors=shown_tensors)

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
        return self._then(
            self.alltoall(into, given, shown_tensors=[tensor]), "all_to_all", lambda got: None, [output]
        )

    def barrier(self, opts: Any = None) -> NetsimWork:
        with self._session.call():
            handle = self._post("barrier", [], lambda got: None)
        work = self._work("barrier", [handle], lambda got: None, [])
        work.give(getattr(opts, "timeout", None))
        return work

    def monitored_barrier(
        self, timeout: datetime.timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """As gloo's: rank 0 hears from each of the others in turn, then lets them go on; it names who has not come."""
        with self._session.call():
            monitored_barrier(
                self._comm, DEFAULT_SECONDS if timeout is None else timeout.total_seconds(), wait_all_ranks
            )
            self._session.waited("monitored_barrier")

    # c10d's names of the same calls until torch 2.12
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- messages ------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> NetsimWork:
        with self._session.call() as comm:
            handle: Any = self._comm.isend(plain_form(tensors[0]), dst, tag)
        del comm
        return self._work("send", [handle], lambda got: None, tensors)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> NetsimWork:
        into = torch.empty_like(plain_form(tensors[0]))

        def finish(got: list[Any]) -> None:
            tensors[0].detach().copy_(got[0].view(tensors[0].dtype))

        with self._session.call():
            handle: Any = self._comm.irecv(into, src, tag)
        return self._work("recv", [handle], finish, tensors, source=src)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> NetsimWork:
        into = torch.empty_like(plain_form(tensors[0]))
        with self._session.call():
            source = self._comm.recv(into, None, tag)
            tensors[0].detach().copy_(into.view(tensors[0].dtype))
        return self._work("recvAnySource", [], lambda got: None, tensors, source=source)

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
        deliver: Callable[[tuple[Tensor, ...]], Any],
        *,
        reduce_op: str = "",
        root: int = 0,
        like: Sequence[Tensor] | None = None,
    ) -> Any:
        return self._comm._collective(name, tensors, deliver, True, reduce_op=reduce_op, root=root, like=like)

    def _work(
        self,
        op: str,
        handles: Sequence[Any],
        finish: Callable[[list[Any]], None],
        outputs: Sequence[Tensor],
        source: int = -1,
        shown_tensors: Sequence[Tensor] | None = None,
    ) -> NetsimWork:
        shown = outputs if shown_tensors is None else shown_tensors
        self._profile.show(f"{self.shown_name}:{op}", shown)
        work = NetsimWork(self._session, op, handles, finish, outputs, source)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _then(
        self, work: NetsimWork, op: str, finish: Callable[[list[Any]], None], outputs: Sequence[Tensor]
    ) -> NetsimWork:
        return NetsimWork(self._session, op, [_OfWork(work)], finish, outputs)  # type: ignore[list-item]


class _OfWork:
    """A work as a handle of another one."""

    def __init__(self, work: NetsimWork) -> None:
        self._work = work

    def wait(self, seconds: float = math.inf) -> None:
        self._work.wait(datetime.timedelta(seconds=seconds) if seconds < math.inf else None)

    def deliver(self) -> None:
        self._work.deliver()

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _together(session: RankSession, works: Sequence[NetsimWork]) -> NetsimWork:
    if len(works) == 1:
        return works[0]
    outputs = [tensor for work in works for tensor in work.outputs]
    return NetsimWork(session, "coalesced", [_OfWork(work) for work in works], lambda got: None, outputs)
