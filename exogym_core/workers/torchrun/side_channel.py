"""Rows and heartbeats of ranks that torchrun has started, through the store at which they met.

A thread of its own sends and receives, signed: no rank waits for it, no port is opened, and it works while the main
thread is inside of gloo. Rank 0 receives all rows. When a rank is lost, the others find out which. `group_status` reads
the last reports from outside.
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from exogym_core.communicator.gloo.rendezvous import ConnectionLostError, NoAnswerError, SignedStore
from exogym_core.events import StepDone, from_record, step_of, to_record
from exogym_core.names import visible
from exogym_core.workers.failures import place_of_rank
from netsim.errors import InputError, NetsimError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.distributed import Store  # type: ignore[attr-defined]

    from exogym_core.communicator.gloo.rendezvous import Rendezvous
    from exogym_core.events import Marked

__all__ = ["RUN_TEXT", "Pulse", "SideChannel", "group_status"]

RUN_TEXT = "posted run"
"""The key of what rank 0 posts of the run as a whole."""

_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_BETWEEN_PULSES = 0.25
# A live rank sends a heartbeat within this time, on a busy machine too.
_SILENT_SECONDS = 2.0


class Pulse(NamedTuple):
    """Last report of a rank.

    Attributes:
        beat: counts up while its process runs.
        host: the name of its machine.
        step: the last step that it has marked.
        round: the round of that step, where rows have it.
        words: why it failed; empty while it has not.
        place: where in its code the rank is.
        loss: of the last step.
        first: the first step that this process has marked.
        seconds: since the first step.
        is_consequence: it failed since another rank had ended.
    """

    beat: int = 0
    host: str = ""
    step: int = 0
    round: int = 0
    words: str = ""
    place: str = ""
    loss: float | None = None
    first: int = 0
    seconds: float = 0.0
    is_consequence: bool = False


class SideChannel:
    """Context manager: this rank's end.

    Args:
        rendezvous: that the ranks have joined.
        on_row: on rank 0, called in the channel's thread with (rank, row), each rank's rows in their order.

    Raises:
        Exception: (`mark`, `finish`) what `on_row` has raised.
    """

    def __init__(self, rendezvous: Rendezvous, on_row: Callable[[int, Any], None]) -> None:
        self.rank, self._num_ranks, self._on_row = rendezvous.rank, rendezvous.num_ranks, on_row
        self._store: Store = rendezvous.another_store() if self._num_ranks > 1 else HashStore()
        self._rows: list[Any] = []
        self._pulse = Pulse(host=socket.gethostname())
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._begun = 0.0  # when this rank's first step came
        self._num_sent = 0
        self._num_taken = [0] * self._num_ranks
        # Step and round of the last rows, which arrive more often than pulses.
        self._seen: dict[int, Pulse] = {}
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="side channel", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def mark(self, row: Marked | Mapping[str, Any]) -> None:
        """Send a row to rank 0; returns at once."""
        if self._error is not None:
            raise self._error
        with self._lock:
            self._rows.append(row)
            self._pulse = _at_row(self._pulse, row)
            if isinstance(row, StepDone):
                self._begun = self._begun or time.monotonic()
                first = self._pulse.first or row.step
                seconds = round(time.monotonic() - self._begun, 1)
                self._pulse = self._pulse._replace(loss=row.loss, first=first, seconds=seconds)

    def post(self, name: str, text: str) -> None:
        """Publish a text to all ranks by name, in place of an earlier one; returns at once."""
        with contextlib.suppress(RuntimeError, OSError):  # its host may have gone
            self._store.set(f"posted {name}", text)

    def posted(self, name: str) -> str | None:
        """Text last posted under that name, or None."""
        found = self._store.check([f"posted {name}"])
        return self._store.get(f"posted {name}").decode() if found else None

    def send_now(self) -> None:
        """Send queued rows before returning."""
        if self._error is None:
            self._send_rows()

    def take_now(self) -> None:
        """On rank 0: receive the rows sent by others."""
        if self._error is None:
            self._take_rows()

    def send_rest(self) -> int:
        """Send queued rows; returns the number of parts sent since the start."""
        self._ended.set()
        self._thread.join()
        self._send_rows()
        return self._num_sent

    def take_rest(self, num_parts: Sequence[int]) -> None:
        """On rank 0, after `send_rest`: take the rows of all ranks, by the number of their parts."""
        if self._error is None:
            for rank in range(self._num_ranks):
                while self._num_taken[rank] < num_parts[rank]:
                    self._take_part(rank)
        if self._error is not None:
            raise self._error

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = 0.0
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            try:
                if time.monotonic() - last >= _SECONDS_BETWEEN_PULSES:
                    last = time.monotonic()
                    self._beat()
                self._send_rows()
                if self.rank == 0:
                    self._take_rows()
            except BaseException as error:
                self._error = error
                return

    def _beat(self) -> None:
        with self._lock:
            self._pulse = self._pulse._replace(beat=self._pulse.beat + 1, place=place_of_rank())
            text = json.dumps(self._pulse)
        self._store.set(f"pulse {self.rank}", text)

    def _send_rows(self) -> None:
        with self._sending:  # two threads do this, and rows stay in order
            with self._lock:
                rows, self._rows = self._rows, []
            if not rows:
                return
            if self.rank == 0:
                for row in rows:
                    self._on_row(0, row)
            else:
                self._store.set(f"rows {self.rank} {self._num_sent}", json.dumps([*map(to_record, rows)]))
                self._num_sent += 1

    def _take_rows(self) -> None:
        with self._sending:
            for rank in range(1, self._num_ranks):
                while self._store.check([f"rows {rank} {self._num_taken[rank]}"]):
                    self._take_part(rank)

    def _take_part(self, rank: int) -> None:
        key = f"rows {rank} {self._num_taken[rank]}"
        self._num_taken[rank] += 1
        rows = json.loads(self._store.get(key))
        self._store.delete_key(key)
        for row in map(from_record, rows):
            self._seen[rank] = _at_row(self._seen.get(rank, Pulse()), row)
            self._on_row(rank, row)

    # --- liveness ----------------------------------------------------------------------------------------

    def say_failed(self, error: Exception) -> None:
        """Report to the others why this rank ends."""
        with contextlib.suppress(Exception):
            words = visible(f"{type(error).__name__}: {error}".partition("\n")[0], 500)
            is_consequence = isinstance(error, NetsimError) and error.is_consequence
            self._pulse = self._pulse._replace(words=words, is_consequence=is_consequence)
            self._beat()

    def missing(self) -> tuple[dict[int, Pulse], dict[int, Pulse]]:
        """The ranks that send no heartbeat within some seconds, and those that have reported why they ended."""
        before = self._pulses()
        lost, ended = set(before), dict[int, Pulse]()
        deadline = time.monotonic() + _SILENT_SECONDS
        now = before
        while lost and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            now = self._pulses()
            ended |= {rank: pulse for rank, pulse in now.items() if pulse.words}
            lost -= {rank for rank, pulse in now.items() if pulse.beat != before[rank].beat or pulse.words}
        return {rank: now[rank] for rank in sorted(lost)}, dict(sorted(ended.items()))

    def _pulses(self) -> dict[int, Pulse]:
        found = {rank: Pulse() for rank in range(self._num_ranks) if rank != self.rank}
        for rank in found:
            with contextlib.suppress(RuntimeError, RankError):  # rank 0 may have had the store
                found[rank] = _pulse(self._store, rank)
        for rank, seen in self._seen.items():
            if seen.step > found[rank].step:
                found[rank] = found[rank]._replace(step=seen.step, round=seen.round)
        return found

    def explained(self, error: Exception, last_checkpoint: str) -> Exception:
        """`error`, or its cause: the rank that was lost, its place, and the last checkpoint."""
        if not isinstance(error, ConnectionLostError | NoAnswerError):
            return error
        lost, ended = self.missing()
        causes = {rank: pulse for rank, pulse in ended.items() if not pulse.is_consequence}
        lines = [self.described(rank, pulse) for rank, pulse in [*lost.items(), *causes.items()]]
        if not lines and isinstance(error, NoAnswerError):
            # The places of all ranks show which one hangs.
            error.args = ("\n".join([str(error), *self._places()]),)
        if not lines:
            return error
        first = str(error).partition("\n")[0]
        text = "\n".join([f"{lines[0]}; {last_checkpoint}", *lines[1:], f"rank {self.rank}: {first}"])
        return RankError(text, next(iter([*lost, *causes])))

    def _places(self) -> list[str]:
        return [
            f"  rank {rank} on host {pulse.host}: is in {pulse.place} after step {pulse.step}"
            for rank, pulse in self._pulses().items()
        ]

    @staticmethod
    def described(rank: int, pulse: Pulse) -> str:
        """Rank that was lost or failed, and its place."""
        where = f"round {pulse.round}, step {pulse.step}" if pulse.round else f"step {pulse.step}"
        what = f"failed after {where} ({pulse.words})" if pulse.words else f"was lost after {where}"
        return f"rank {rank} on host {pulse.host or 'unknown'} {what}"


def _at_row(pulse: Pulse, row: Marked | Mapping[str, Any]) -> Pulse:
    if (step := step_of(row)) is not None:
        pulse = pulse._replace(step=step)
    if isinstance(row, StepDone) and row.place is not None:
        pulse = pulse._replace(round=row.place.round)
    return pulse


_SECONDS = 5.0
_MOST_RESTARTS = 1000


def group_status(address: tuple[str, int], secret: bytes) -> dict[str, Any]:
    """Last reports of the ranks at a torchrun address (MASTER_ADDR:MASTER_PORT).

    Raises:
        InputError: nothing listens there, no such run is there, or it has another secret.
    """
    where = f"{visible(address[0])}:{address[1]}"
    try:
        store = TCPStore(*address, None, False, datetime.timedelta(seconds=_SECONDS), wait_for_workers=False)
        found = _newest_run(store)
    except (RuntimeError, ValueError, OSError) as error:  # torch's errors have many names
        raise InputError(
            f"{where}: neither a rendezvous nor torchrun answers ({_first_line(error)})"
        ) from None
    if found is None:
        raise InputError(f"{where}: torchrun listens there, and no run of netgym has begun")
    num_ranks, run = _num_ranks(found), found
    try:
        sealed = SignedStore(run, secret, -1)
        numbers = [sealed.get(f"number {rank}") for rank in range(num_ranks)]
        own = hmac.digest(secret, b"".join(numbers), "sha256")
        side = SignedStore(PrefixStore("beside", run), own, -1)
        pulses = [_pulse(side, rank) for rank in range(num_ranks)]
        about = json.loads(side.get(RUN_TEXT)) if side.check([RUN_TEXT]) else {}
    except RankError:
        raise InputError(
            f"{where}: the run there has another secret (NETGYM_SECRET, NETGYM_SECRET_FILE)"
        ) from None
    ranks = [{"rank": rank, **pulse._asdict()} for rank, pulse in enumerate(pulses)]
    return {"kind": "group", "address": where, "num_ranks": num_ranks, **about, "ranks": ranks}


def _newest_run(store: Store) -> Store | None:
    """Store of the last run after the last restart of a group."""
    last = None
    for restart in range(_MOST_RESTARTS):
        prefix = f"netgym {restart}"
        counted = PrefixStore(prefix, store)
        if not counted.check(["runs of rank 0"]):
            break
        last = PrefixStore(f"{prefix} {int(counted.get('runs of rank 0'))}", store)
    return last


def _num_ranks(run: Store) -> int:
    number = 0
    while run.check([f"number {number}"]):
        number += 1
    return number


def _pulse(side: Store, rank: int) -> Pulse:
    with contextlib.suppress(ValueError, TypeError):
        if side.check([f"pulse {rank}"]):
            return Pulse(*json.loads(side.get(f"pulse {rank}")))
    return Pulse()


def _first_line(error: Exception) -> str:
    return visible(str(error).partition("\n")[0], 200)
