"""What c10d calls return: work in flight, whose values and whose time come apart."""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from exogym_core.communicator.simulated.posting import SimulatedHandle
    from exogym_core.torch_backend.session import RankSession

__all__ = ["NetsimWork", "WorkHandle"]


_SHOWN = {"_all_gather_base": "all_gather"}  # c10d's names of calls that it has two of


class NetsimWork(dist.Work):
    """Calls of one rank in flight.

    `wait` waits for values in host time and for the calls' end on the clock. A future has the values at once, for
    those who wait for it in C++ or chain callbacks to it, and its time is charged when the backward pass ends that
    is under way, at its own `wait`, or before the program's next wait for anything.

    Args:
        session: the rank's.
        op: c10d's name of the call.
        handles: of the calls.
        finish: called when all values are where c10d wants them.
        outputs: what `result` and futures give.
        source: who has sent what has been received.
    """

    def __init__(
        self,
        session: RankSession,
        op: str,
        handles: Sequence[SimulatedHandle[Any]],
        finish: Callable[[], None] = lambda: None,
        outputs: Sequence[Tensor] = (),
        source: int = -1,
    ) -> None:
        super().__init__()
        self._session, self._op, self._handles = session, op, list(handles)
        self._finish, self._outputs, self._source = finish, list(outputs), source
        self._is_delivered = self._is_charged = False
        self._seconds = math.inf

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Until it is done.

        Raises:
            RuntimeError: it is not, after the group's time-out or this one, or the group was broken before.
        """
        seconds = timeout.total_seconds() if timeout else self._seconds
        with self._session.call():
            self._session.settle_others(self)
            if not self._is_charged:
                self._is_charged = True
                if self._handles and not isinstance(
                    self._handles[0], WorkHandle
                ):  # which says itself what it is
                    self._session.at(_SHOWN.get(self._op, self._op))
                for handle in self._handles:
                    handle.wait(seconds)
            self.deliver()
        return True

    def give(self, timeout: datetime.timedelta | None) -> None:
        """Have its waits take no longer than this; c10d means nothing by a time that is not positive."""
        if timeout is not None and timeout.total_seconds() > 0:
            self._seconds = timeout.total_seconds()

    def deliver(self) -> None:
        """Put values where they belong, as soon as they are there."""
        if not self._is_delivered:
            self._is_delivered = True
            for handle in self._handles:
                handle.deliver()
            self._finish()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once, at the rank's virtual time."""
        with self._session.call():
            return self._is_charged or all(handle.is_completed() for handle in self._handles)

    def is_success(self) -> bool:
        """Failures are raised where they are met."""
        return self.is_completed()

    def exception(self) -> None:
        """Failures are raised where they are met."""

    def synchronize(self) -> None:
        """`wait`."""
        self.wait()

    def source_rank(self) -> int:
        """Who sent what has been received."""
        return self._source

    _source_rank = source_rank

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors that it writes."""
        return self._outputs

    def result(self) -> list[Tensor]:
        """The tensors that it has written."""
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """The tensors as a future, which has its values already."""
        with self._session.call():
            self.deliver()
            if not self._is_charged:
                self._session.charge_later(self)
        future = _ChargedFuture(self)
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


class WorkHandle:
    """A work as a handle of another one."""

    def __init__(self, work: NetsimWork) -> None:
        self._work = work

    def wait(self, seconds: float = math.inf) -> None:
        """Until it is done, or its time is up."""
        self._work.wait(datetime.timedelta(seconds=seconds) if seconds < math.inf else None)

    def deliver(self) -> None:
        """Its values are where they belong."""
        self._work.deliver()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work.is_completed()
