"""A state on its way from one site to another."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import torch

from exogym_core.communicator.gloo.rendezvous import ConnectionLostError

if TYPE_CHECKING:
    from exogym_core.communicator.gloo.rendezvous import ProcessGroups

__all__ = ["moved"]

_PART_BYTES = 8 << 20  # of a state, at once: each part has its own time-out
_PART_SECONDS = 30.0


def moved(groups: ProcessGroups, sender: int, receiver: int, payload: bytes | None) -> bytes:
    """Bytes from one of two sites to the other; `payload` is the sender's.

    Raises:
        ConnectionLostError: a part took longer, or the connection broke.
    """
    control, place = groups.control, int(sender > receiver)
    options = torch.distributed.BroadcastOptions()
    options.rootRank = place
    try:
        control._set_default_timeout(datetime.timedelta(seconds=_PART_SECONDS))
        size = torch.tensor([0 if payload is None else len(payload)])
        control.broadcast([size], options).wait()
        whole = (
            torch.empty(int(size), dtype=torch.uint8)
            if payload is None
            else torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        )
        for part in torch.split(whole, _PART_BYTES):
            control.broadcast([part], options).wait()
    except RuntimeError as error:
        raise ConnectionLostError(
            f"what site {sender} sent was cut off: {str(error).partition(chr(10))[0]}", receiver
        ) from None
    return whole.numpy().tobytes() if payload is None else payload
