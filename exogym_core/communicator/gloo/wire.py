"""Flat buffers over one of torch's process groups, and the comparison of calls that comes first.

Tensors are moved as bytes, so every dtype can be. Members of a process group are numbered by torch in the
order of their ranks in the run; here they are numbered as the user named them.

gloo given different calls returns wrong values, waits for ever or aborts the process. So every call is
preceded by a record of fixed size: a digest to compare, and a line to show where digests differ.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from exogym_core.communicator.exchange import mismatch_error, rank_names
from netsim.errors import DeadlockError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from exogym_core.communicator.exchange import Signature

__all__ = [
    "ENDED",
    "RECORD_BYTES",
    "Wire",
    "call_record",
    "disagreement",
    "exchange_shapes",
    "flattened",
]

# Wider dtypes for sums that gloo cannot compute, or not without loss.
_WIDER = {torch.int16: torch.int32, torch.float16: torch.float32, torch.bfloat16: torch.float32}


class Wire:
    """Collectives of a member on flat, contiguous tensors of `device`; all of them block.

    Args:
        group: torch's ProcessGroupGloo or its like (its type stubs leave its calls out); None: of a member alone, which
            makes no calls.
        ranks: the members' ranks in the run, in the user's order.
        member: this member's position among them.
        device: where the group's backend takes tensors.

    Attributes:
        issued: called when a collective has been handed to torch, before it is waited for.
    """

    def __init__(self, group: Any, ranks: Sequence[int], member: int, device: torch.device) -> None:
        self.group, self.size, self.member, self.device = group, len(ranks), member, device
        self.issued: Callable[[], None] = lambda: None
        torch_order = sorted(ranks)
        self._place = [torch_order.index(rank) for rank in ranks]  # of member i in the process group

    def all_reduce(self, flat: Tensor, op: str) -> Tensor:
        """Reduce `flat` in place on every member; `avg` divides the sum. Halves are added up in fp32."""
        return self._reduced("allreduce", flat, op)

    def reduce(self, flat: Tensor, dst: int, op: str) -> Tensor:
        """Reduce into `flat` of member `dst`; the others' are overwritten with something."""
        return self._reduced("reduce", flat, op, rootRank=self._place[dst])

    def _reduced(self, name: str, flat: Tensor, op: str, **options: Any) -> Tensor:
        wide = flat.to(_WIDER.get(flat.dtype, flat.dtype))
        if flat.numel():
            summed = "sum" if op == "avg" else op
            self._call(name, [wide], reduceOp=getattr(dist.ReduceOp, summed.upper()), **options)
        if op == "avg":
            wide.div_(self.size)
        return flat.copy_(wide)

    def broadcast(self, flat: Tensor, src: int) -> Tensor:
        """Overwrite `flat` with member `src`'s."""
        if flat.numel():
            self._call("broadcast", [_bytes(flat)], rootRank=self._place[src])
        return flat

    def all_gather(self, flat: Tensor) -> list[Tensor]:
        """Every member's `flat`, of equal sizes."""
        got = self._empty(flat)
        if flat.numel():
            self._finish(self.group.allgather([self._in_torch_order(got)], [_bytes(flat)]))
        return got

    def gather(self, flat: Tensor, dst: int) -> list[Tensor]:
        """Every member's `flat` on `dst`, nothing elsewhere."""
        got = self._empty(flat) if self.member == dst else []
        if flat.numel():
            into = [self._in_torch_order(got)] if got else []
            self._call("gather", into, [_bytes(flat)], rootRank=self._place[dst])
        return got

    def scatter(self, flat: Tensor, parts: Sequence[Tensor], src: int) -> Tensor:
        """Overwrite `flat` with this member's of member `src`'s parts."""
        if flat.numel():
            given = [self._in_torch_order(parts)] if parts else []
            self._call("scatter", [_bytes(flat)], given, rootRank=self._place[src])
        return flat

    def all_to_all(self, parts: Sequence[Tensor], num_bytes: Sequence[int]) -> list[Tensor]:
        """Parts that every member sent to this one, as bytes; member i sends `num_bytes[i]`."""
        order = sorted(range(self.size), key=self._place.__getitem__)  # member at each place
        given = torch.cat([_bytes(parts[member]) for member in order])
        sizes = [num_bytes[member] for member in order]
        got = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        sent = [parts[member].nbytes for member in order]
        self._finish(self.group.alltoall_base(got, given, sizes, sent))
        pieces = dict(zip(order, torch.split(got, sizes), strict=True))
        return [pieces[member] for member in range(self.size)]

    def gather_records(self, flat: Tensor) -> list[Tensor]:
        """`all_gather` in one round of direct messages: for small tensors faster than gloo's ring."""
        given = _bytes(flat).repeat(self.size)
        got = torch.empty_like(given)
        self._finish(self.group.alltoall_base(got, given, [], []))
        rows = got.view(self.size, -1)
        return [rows[place] for place in self._place]

    def send(self, flat: Tensor, dst: int, slot: int) -> dist.Work:
        """Start to send; done when the receiver has asked for it and it has left."""
        work: dist.Work = self.group.send([_bytes(flat)], self._place[dst], slot)
        return work

    def receive(self, flat: Tensor, src: int, slot: int) -> dist.Work:
        """Start to receive into `flat`, which must be as large as what is sent: gloo aborts otherwise."""
        work: dist.Work = self.group.recv([_bytes(flat)], self._place[src], slot)
        return work

    def receive_any(self, flat: Tensor, slot: int) -> int:
        """Receive from whichever member is first, and wait; returns the member."""
        work = self.group.recv_anysource([_bytes(flat)], slot)
        work.wait()
        return self._place.index(work._source_rank())

    def close(self) -> None:
        """Give the group's connections and threads back."""
        if self.group is not None:
            self.group.shutdown()
            self.group = None

    def _call(self, name: str, *tensors: Any, **given: Any) -> None:
        """Make a call of the process group with these options, and wait for its end."""
        options = getattr(dist, f"{name.capitalize()}Options")()
        for option, value in given.items():
            setattr(options, option, value)
        self._finish(getattr(self.group, name)(*tensors, options))

    def _finish(self, work: dist.Work) -> None:
        self.issued()
        work.wait()

    def _empty(self, flat: Tensor) -> list[Tensor]:
        return [torch.empty_like(flat) for _ in range(self.size)]

    def _in_torch_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        placed: list[Tensor] = list(tensors)
        for tensor, place in zip(tensors, self._place, strict=True):
            placed[place] = _bytes(tensor)
        return placed


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


def flattened(tensor: Tensor, device: torch.device, own: bool) -> Tensor:
    """Flat copy of a tensor on `device`, or a view where that will do; with `own`, never the tensor's own memory."""
    flat = tensor.detach().reshape(-1).to(device)
    shared = flat.numel() > 0 and flat.device == tensor.device and flat.data_ptr() == tensor.data_ptr()
    # One element with another stride counts as contiguous, and still cannot be viewed as bytes.
    if (own and shared) or flat.stride() != (1,):
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat


RECORD_BYTES = 512
_DIGEST_BYTES = 16
_MOST_DIMENSIONS = 64  # torch's own limit
ENDED = "has ended"


def call_record(signature: Signature | str) -> Tensor:
    """Record of a member's next call, RECORD_BYTES bytes; `ENDED` after its last."""
    if isinstance(signature, str):
        agreed, text = signature, signature
    else:
        agreed, text = f"{signature.agreed()} {signature.on_clock}", str(signature)
        if not signature.on_clock:
            text += " off the clock"
    digest = hashlib.blake2b(agreed.encode(), digest_size=_DIGEST_BYTES).digest()
    line = text.encode()
    room = RECORD_BYTES - _DIGEST_BYTES
    if len(line) > room:  # long lists of shapes: the end is the place in the user's code
        line = line[: room - 203] + b"..." + line[-200:]
    return torch.frombuffer(bytearray((digest + line).ljust(RECORD_BYTES, b"\0")), dtype=torch.uint8)


def disagreement(ranks: Sequence[int], records: Sequence[Tensor]) -> NetsimError | None:
    """The error if these members (ranks of the run) do not call the same, equal on all of them."""
    raw = [record.numpy().tobytes() for record in records]
    digests = [record[:_DIGEST_BYTES] for record in raw]
    if len(set(digests)) == 1:
        return None
    calls = [record[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace") for record in raw]
    ended = [rank for rank, call in zip(ranks, calls, strict=True) if call == ENDED]
    if not ended:
        return mismatch_error(ranks, digests, calls)
    names = ", ".join(map(str, ended))
    waiting = [
        f"rank {rank} waits for {rank_names(ended)} (ended: {names}) in {call}"
        for rank, call in zip(ranks, calls, strict=True)
        if rank not in ended
    ]
    table = [f"  rank {rank}: {call}" for rank, call in zip(ranks, calls, strict=True)]
    return DeadlockError("\n".join([f"deadlock: {'; '.join(waiting)}", *table]))


def exchange_shapes(wire: Wire, shapes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The shape of what each member will send to this one, where `shapes[j]` is that of its part for member j.

    By direct messages of one size, in one round trip.
    """
    rows = [torch.zeros(1 + _MOST_DIMENSIONS, dtype=torch.int64) for _ in shapes]
    for row, shape in zip(rows, shapes, strict=True):
        row[: len(shape) + 1] = torch.tensor([len(shape), *shape])
    got = wire.all_to_all(rows, [rows[0].nbytes] * len(rows))
    read = [part.view(torch.int64).tolist() for part in got]
    return [row[1 : 1 + row[0]] for row in read]
