"""A rank of a run whose processes torchrun has started, on one machine or several."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.communicator.gloo.rendezvous import TIMEOUT_SECONDS, Rendezvous
from exogym_core.events import from_record, to_record
from exogym_core.plain import packed, unpacked
from exogym_core.workers.host import RunResult
from exogym_core.workers.journal import SnapshotThread, SpillBuffer
from exogym_core.workers.processes.children import end_process
from exogym_core.workers.rng import RandomStates, seed_process
from exogym_core.workers.torchrun.side_channel import SideChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from exogym_core.events import Marked
    from exogym_core.workers.host import OnDeposit, Sinks

__all__ = ["Ending", "SnapshotCollector", "TorchrunHost", "agreed", "recalled", "remember"]

T = TypeVar("T")

# --- termination by torchrun ---------------------------------------------------------------------------------


class Ending:
    """Context manager: handles SIGTERM and SIGINT.

    Python runs a signal's handler when the main thread returns from its call, which in gloo may be never. So a
    thread receives the signal at once: it reports, and ends the process if the main thread has not
    left this context some seconds later. Outside of the main thread it does nothing.

    Args:
        report: called in that thread, with the signal's number.
        grace_seconds: for the main thread to save its state.
    """

    def __init__(self, report: Callable[[int], None], grace_seconds: float) -> None:
        self._report, self._grace_seconds = report, grace_seconds
        self._is_main = threading.current_thread() is threading.main_thread()
        self._left, self._heard, self._reported = threading.Event(), threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        if self._is_main:
            self._mine, self._theirs = socket.socketpair()
            self._theirs.setblocking(False)
            self._before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
            self._restores = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            if self._restores:
                signal.signal(signal.SIGTERM, signal.default_int_handler)
            threading.Thread(target=self._listen, name="ending", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        # The main thread may have been interrupted before the other one has heard of it.
        interrupted = isinstance(sys.exception(), KeyboardInterrupt)
        if self._is_main and (interrupted or self._heard.is_set()):
            self._reported.wait(self._grace_seconds)
        if self._is_main:
            signal.set_wakeup_fd(self._before)
            if self._restores:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._theirs.close()

    def _listen(self) -> None:
        with self._mine:
            while select.select([self._mine], [], []) and (received := self._mine.recv(1)):
                number = received[0]
                if number in (signal.SIGTERM, signal.SIGINT):
                    self._heard.set()
                    with contextlib.suppress(Exception):
                        self._report(number)
                    self._reported.set()
                    if not self._left.wait(self._grace_seconds):
                        end_process(128 + number)
                    return


# --- snapshots -----------------------------------------------------------------------------------------------


class SnapshotCollector(SnapshotThread):
    """Snapshots of a rank. Every rank sends the same number, at its own time, without waiting.

    Args:
        comm: of all ranks; a group of the same ranks is made for this.
        on_deposit: receives snapshots; on rank 0.
    """

    def __init__(self, comm: GlooCommunicator, on_deposit: OnDeposit | None) -> None:
        self._comm, self._on_deposit = comm, on_deposit
        self._wire = comm.group(range(comm.world_size)).control
        super().__init__(self._send, SpillBuffer(), "deposits")

    def deposit(self, note: Any, tensors: Sequence[Tensor]) -> None:
        """Send a snapshot, without waiting."""
        payload = torch.frombuffer(bytearray(packed((to_record(note), list(tensors)))), dtype=torch.uint8)
        self.put(self._comm.rank, None, [payload])

    def finish(self) -> None:
        """Wait until rank 0 has all that this rank has deposited."""
        self.stop()
        self.raise_if_failed()

    def _send(self, me: int, _: None, payloads: Sequence[Tensor]) -> None:
        """Send a snapshot of each rank in turn: rank 0 holds at most one in addition to its own."""
        wire, (payload,) = self._wire, payloads
        if wire.size == 1:
            self._taken(0, payload)
            return
        sizes = wire.gather_records(torch.tensor([payload.numel()]).view(torch.uint8))
        if me == 0:
            self._taken(0, payload)
            for rank, size in enumerate(sizes[1:], start=1):
                got = torch.empty(int(size.view(torch.int64)), dtype=torch.uint8)
                wire.receive(got, rank, 0).wait()
                self._taken(rank, got)
        else:
            wire.send(payload, 0, 0).wait()

    def _taken(self, rank: int, payload: Tensor) -> None:
        if self._on_deposit is not None:
            record, tensors = unpacked(payload.numpy().tobytes())
            self._on_deposit(rank, from_record(record), tensors)


# --- the rank ------------------------------------------------------------------------------------------------


# For rank 0, which saves its state, and for the others, which do not.
_GRACE_SECONDS, _SHORT_GRACE_SECONDS = 10.0, 1.0


def recalled(name: str) -> str | None:
    """Text that `remember` kept under that name before torchrun restarted the ranks, or None."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return None
    store = Rendezvous.from_environment(True, TIMEOUT_SECONDS, "gloo").kept_store()
    return None if store is None or not store.check([name]) else store.get(name).decode()


def remember(name: str, text: str) -> None:
    """Keep a text for when torchrun restarts the ranks (`--max-restarts`)."""
    store = Rendezvous.from_environment(True, TIMEOUT_SECONDS, "gloo").kept_store()
    if store is not None:
        store.set(name, text)


def agreed(value: Any) -> Any:
    """Rank 0's `value`, a plain one, on every rank."""
    with GlooCommunicator.from_environment(backend="gloo") as comm:
        return comm.broadcast_object(value)


class TorchrunHost:
    """Host of one rank in this process; torchrun has started the others.

    Its random generators are made from (seed, rank), and are as before afterwards. If it is lost, or another is, the
    error says which, and where it was; under torchrun, which ends all ranks then, rank 0 prints it before it ends.

    Args:
        describe_last_checkpoint: describes the last checkpoint, for errors.
        seed: of the run.
        timeout_seconds: limit of waits for other ranks; None: as `GlooCommunicator.from_environment` has it.
        compare_calls: whether calls are compared before they run.

    Attributes:
        comm, side: the communicator and the side channel, during `run`.
    """

    comm: GlooCommunicator
    side: SideChannel

    _is_gathered = False

    def __init__(
        self,
        describe_last_checkpoint: Callable[[], str],
        seed: int = 0,
        timeout_seconds: float | None = None,
        compare_calls: bool = True,
    ) -> None:
        self._describe_last_checkpoint, self._seed = describe_last_checkpoint, seed
        self._timeout_seconds, self._compare_calls = timeout_seconds, compare_calls

    def run(self, body: Callable[[GlooCommunicator], T], sinks: Sinks) -> RunResult[T]:
        """Run `body(comm)` as this rank; on rank 0 `sinks` receives the rows and snapshots of all ranks.

        Rows arrive in another thread.

        Raises:
            RankError: another rank was lost or has failed.
            Exception: of `body`, or of `sinks`.
        """
        rendezvous = Rendezvous.from_environment(self._compare_calls, self._timeout_seconds, "auto")
        sinks.replay_untimed(rendezvous.num_ranks)
        before = RandomStates.of_process()
        with contextlib.ExitStack() as opened:
            self.comm = GlooCommunicator.connect(rendezvous, self.mark)
            opened.callback(before.load)
            opened.callback(self.comm.close)
            self.side = opened.enter_context(SideChannel(rendezvous, sinks.take_untimed))
            grace = _GRACE_SECONDS if rendezvous.rank == 0 else _SHORT_GRACE_SECONDS
            opened.enter_context(Ending(self._report_lost, grace))
            seed_process(self._seed, rendezvous.rank)
            try:
                self._snapshots = SnapshotCollector(self.comm, sinks.on_deposit)
                self.comm.observed_by(self._snapshots.deposit)
                result = body(self.comm)
                if not self._is_gathered:
                    self.gather()
            except Exception as error:
                self.side.say_failed(error)
                explained = self.side.explained(error, self._describe_last_checkpoint())
                if explained is error:
                    raise
                raise explained from None
            self.comm.finish()
            return RunResult.untimed([result], [self.comm.traffic])

    def mark(self, row: Marked | Mapping[str, Any]) -> None:
        """Queue a row for rank 0."""
        self.side.mark(row)

    def gather(self, value: Any = None) -> list[Any]:
        """Bring the remaining rows and snapshots of all ranks to rank 0; returns the `value` of every rank.

        Called by every rank, by `body` after its last row, or else when it returns.
        """
        self._is_gathered = True
        self._snapshots.finish()
        parts = self.side.send_rest()
        with self.comm.off_clock():
            ends = self.comm.all_gather_object((parts, value))
        if self.comm.rank == 0:
            self.side.take_rest([number for number, _ in ends])
        return [each for _, each in ends]

    def _report_lost(self, number: int) -> None:
        """Print the lost ranks, a line each, once among the ranks that are ended."""
        lost, ended = self.side.missing()
        survivors = [rank for rank in range(self.comm.world_size) if rank not in lost]
        if survivors[:1] != [self.comm.rank]:
            return
        for rank, pulse in [*lost.items(), *ended.items()]:
            print(
                f"error: {self.side.described(rank, pulse)}; {self._describe_last_checkpoint()}",
                file=sys.stderr,
                flush=True,
            )
