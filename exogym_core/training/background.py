"""An observer in the turn of ranks, or beside those that live in other processes: in a thread of its own."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from exogym_core.training.observer import FinalModels, Observer

__all__ = ["BackgroundObserver", "InlineObserver"]


@dataclass
class InlineObserver:
    """An observer that works in the turn of the rank that deposits.

    Attributes:
        num_given: deposits that have come, all of which have been looked at.
    """

    observer: Observer
    num_given: int = 0

    def take(self, rank: int, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Look at a deposit."""
        self.num_given += 1
        self.observer.take(rank, note, tensors)

    @property
    def num_taken(self) -> int:
        """The same."""
        return self.num_given

    def finish(self) -> FinalModels:
        """No more deposits will come."""
        return self.observer.finish()

    def abandon(self) -> None:
        """There is nothing to end."""


class BackgroundObserver:
    """An observer in a thread of its own, so that nobody in this process waits for it.

    The thread starts with the first deposit: processes that are forked before have no part of it.

    Args:
        observer: works in that thread alone, until `finish`.
        intra_op_threads: torch's threads for one operator there; they change last bits.

    Attributes:
        num_given, num_taken: deposits that have come, and those of them that have been looked at.
    """

    def __init__(self, observer: Observer, intra_op_threads: int) -> None:
        self._observer, self._intra_op_threads = observer, intra_op_threads
        self._queue: queue.SimpleQueue[tuple[int, Mapping[str, Any], int] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.num_given = self.num_taken = 0

    def take(self, rank: int, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Take a deposit, whose tensors may be used for something else afterwards.

        Raises whatever the observer has raised since.
        """
        self.raise_if_failed()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
            self._thread.start()
        self.num_given += 1
        self._queue.put((rank, note, self._observer.shelf.put([tensor.clone() for tensor in tensors])))

    def raise_if_failed(self) -> None:
        """Raise what went wrong in the thread."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> FinalModels:
        """Wait for it; no more deposits will come."""
        self.stop()
        self.raise_if_failed()
        return self._observer.finish()

    def stop(self) -> None:
        """End the thread when it has looked at everything."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def abandon(self) -> None:
        """Forget what has not been looked at, and end the thread."""
        self._failure = self._failure or RuntimeError("the run is over")
        self.stop()

    def _run(self) -> None:
        torch.set_num_threads(self._intra_op_threads)
        while (item := self._queue.get()) is not None:
            rank, note, ticket = item
            tensors = self._observer.shelf.pop(ticket)
            if self._failure is None:
                try:
                    self._observer.take(rank, note, tensors)
                except BaseException as failure:
                    self._failure = failure
            self.num_taken += 1
