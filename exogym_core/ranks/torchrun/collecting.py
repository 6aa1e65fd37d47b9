"""Deposits under torchrun, where ranks have no parent: rank 0 looks on, and gets them in a thread of its own."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.plain import packed, unpacked
from exogym_core.ranks.shelf import Shelf

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from exogym_core.communicator.gloo.communicator import GlooCommunicator
    from exogym_core.ranks.carrier import OnDeposit

__all__ = ["Collecting"]


class Collecting:
    """One rank's side. Every rank deposits as often as the others, at its own time; no rank waits in doing so.

    Args:
        comm: of all ranks; a group of the same ranks is made for this.
        on_deposit: takes what comes; on rank 0.

    Attributes:
        num_put: how much this rank has deposited.
    """

    def __init__(self, comm: GlooCommunicator, on_deposit: OnDeposit) -> None:
        self._comm, self._on_deposit = comm, on_deposit
        self._wire = comm.group(range(comm.world_size)).control
        self._shelf = Shelf()
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self.num_put = 0
        self._thread = threading.Thread(target=self._run, name="deposits", daemon=True)
        self._thread.start()

    def put(self, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Send a deposit on its way."""
        self._raise_if_failed()
        self.num_put += 1
        payload = torch.frombuffer(bytearray(packed((dict(note), list(tensors)))), dtype=torch.uint8)
        self._queue.put(self._shelf.put([payload]))

    def finish(self) -> None:
        """Wait until rank 0 has all that this rank has deposited."""
        self._queue.put(None)
        self._thread.join()
        self._shelf.close()
        self._raise_if_failed()

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while (ticket := self._queue.get()) is not None:
                (payload,) = self._shelf.pop(ticket)
                self._send(payload)
        except BaseException as failure:
            self._failure = failure

    def _send(self, payload: Tensor) -> None:
        """One deposit of each rank, one after the other: rank 0 holds no more than one of them besides its own."""
        wire, me = self._wire, self._comm.rank
        if wire.group is None:
            self._taken(0, payload)
            return
        told = wire.tell(torch.tensor([payload.numel()]).view(torch.uint8))
        if me == 0:
            self._taken(0, payload)
            for rank, size in enumerate(told[1:], start=1):
                got = torch.empty(int(size.view(torch.int64)), dtype=torch.uint8)
                wire.receive(got, rank, 0).wait()
                self._taken(rank, got)
        else:
            wire.send(payload, 0, 0).wait()

    def _taken(self, rank: int, payload: Tensor) -> None:
        note, tensors = unpacked(payload.numpy().tobytes())
        self._on_deposit(rank, note, tensors)
