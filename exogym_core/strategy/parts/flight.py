"""Exchanges written as steps, to be awaited at once or while training continues."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from exogym_core.communicator.base import Communicator, Handle

__all__ = ["Flight", "Steps", "counted", "run"]

T = TypeVar("T")

Steps = Generator["Handle[Any]", Any, T]
"""An exchange as a generator: it yields each posted call, receives that call's value, and returns the result."""


class Flight(Generic[T]):
    """An exchange under way: its first call is posted at once, each later one when its inputs have arrived.

    Args:
        steps: the exchange.
        comm: a communicator of this rank, if the flight may be in a checkpoint; the owner of the values sent begins it
            again.
        calls: of a flight before a restart: they are repeated.

    Attributes:
        calls: numbers of the calls posted, step by step: what a checkpoint keeps besides the values sent.
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
        """Wait for posted calls, post the remaining ones, and return the result."""
        while self._waits_for is not None:
            self._go_on(self._waits_for.wait())
        return self._results[0]

    def go_on(self) -> None:
        """Post the next call if its inputs have arrived; never waits."""
        while self._waits_for is not None and self._waits_for.is_completed():
            self._go_on(self._waits_for.wait())


def run(steps: Steps[T]) -> T:
    """Run an exchange to its end."""
    return Flight(steps).wait()


def counted(comm: Communicator, steps: Steps[T], payload_bytes: int) -> Steps[T]:
    """`steps`, whose calls count together as `payload_bytes` in `traffic.payload_bytes`."""
    value = None
    while True:
        with comm.counted_as(payload_bytes):
            try:
                posted = steps.send(value)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
        payload_bytes = 0
        value = yield posted
