"""Exchanges under way: written once as steps, waited for at once or while training continues."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from exogym_core.communicator.base import Communicator, Handle

__all__ = ["Flight", "Steps", "counted", "run"]

T = TypeVar("T")

Steps = Generator["Handle[Any]", Any, T]
"""An exchange as a generator: it yields each call that it has posted, is sent what came of it, returns the result."""


class Flight(Generic[T]):
    """An exchange that has been begun: its first call is posted now, those after it when their turn comes.

    Args:
        steps: the exchange.
        comm: a communicator of this rank, where the flight may be in a checkpoint; the owner of what was
            sent begins it again.
        calls: of a flight before a restart, how far it had come: its calls are made again, to the same end.

    Attributes:
        calls: what a checkpoint keeps of it besides what was sent: the numbers of the calls posted, step by step.
    """

    def __init__(
        self, steps: Steps[T], comm: Communicator | None = None, calls: Sequence[Sequence[int]] = ()
    ) -> None:
        self._steps = steps
        self._results: list[T] = []
        self._waits_for: Handle[Any] | None = None
        self.calls: list[list[int]] = []
        self._comm, self._again = comm, list(calls)
        self._go_on(None)
        while self._again and self._waits_for is not None:
            self._go_on(self._waits_for.wait())

    def _go_on(self, value: Any) -> None:
        if self._comm is None:
            self._send(value)
            return
        again = self._again
        with self._comm.calls_again(again.pop(0)) if again else self._comm.noting_calls() as noted:
            self._send(value)
        self.calls.append(list(noted))

    def _send(self, value: Any) -> None:
        try:
            self._waits_for = self._steps.send(value)
        except StopIteration as end:
            self._waits_for = None
            self._results.append(end.value)

    def wait(self) -> T:
        """Wait for what is still to come, post what follows, and return the result."""
        while self._waits_for is not None:
            self._go_on(self._waits_for.wait())
        return self._results[0]

    def go_on(self) -> None:
        """Post the next call if its inputs are there at this instant; never waits."""
        while self._waits_for is not None and self._waits_for.is_completed():
            self._go_on(self._waits_for.wait())


def run(steps: Steps[T]) -> T:
    """Do an exchange to its end."""
    return Flight(steps).wait()


def counted(comm: Communicator, steps: Steps[T], payload_bytes: int) -> Steps[T]:
    """`steps`, all of whose calls count as one message of so many bytes in `traffic.payload_bytes`."""
    value = None
    while True:
        with comm.counted_as(payload_bytes):
            try:
                posted = steps.send(value)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
        payload_bytes = 0
        value = yield posted
