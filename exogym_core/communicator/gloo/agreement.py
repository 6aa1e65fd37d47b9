"""Before real transports move anything, members tell each other what they call.

gloo given different calls returns wrong values, waits for ever or aborts the process. So every call is
preceded by a record of fixed size: a digest to compare, and a line to show where digests differ.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from exogym_core.communicator.exchange import mismatch_error
from netsim.files.errors import DeadlockError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.communicator.exchange import Signature
    from exogym_core.communicator.gloo.wire import Wire

__all__ = ["ENDED", "RECORD_BYTES", "call_record", "disagreement", "exchange_shapes"]

RECORD_BYTES = 512
_DIGEST_BYTES = 16
_MOST_DIMENSIONS = 64  # torch's own limit
ENDED = "has ended"


def call_record(signature: Signature | str) -> Tensor:
    """What a member is about to do, as RECORD_BYTES bytes; `ENDED` for nothing any more."""
    if isinstance(signature, str):
        agreed, text = signature, signature
    else:
        agreed, text = f"{signature.agreed()} {signature.on_clock}", str(signature)
        if not signature.on_clock:
            text += " off the clock"
    digest = hashlib.blake2b(agreed.encode(), digest_size=_DIGEST_BYTES).digest()
    line = text.encode()
    room = RECORD_BYTES - _DIGEST_BYTES
    if len(line) > room:  # long lists of shapes: the end tells the place in the user's code
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
        f"rank {rank} waits for rank{'s' if len(ended) > 1 else ''} {names} (ended: {names}) in {call}"
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
