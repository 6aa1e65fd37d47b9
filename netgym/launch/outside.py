"""Ranks that may wait for each other outside of our calls, as users' programs do: by files, stores, or sleeping.

The clock may need a rank that waits outside for one which waits for the clock. So calls whose values are there are
answered early, and the clock passes ranks that stand idle while others' calls have time-outs.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.communicator.exchange import rank_names
from exogym_core.workers.processes.process_runner import ProcessRunner
from exogym_core.workers.processes.protocol import Answered, Requests
from exogym_core.workers.threads import spent_seconds
from netgym.launch.report import HostDecision
from netsim.errors import BrokenCallError
from netsim.ranks import Ask, Await, CallEnding, gives_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from exogym_core.communicator.exchange import Slot
    from netsim.ranks import Answer, Key

__all__ = ["OutsideMeetings"]

# A rank is idle if its process sleeps, or uses less than this share of a processor, in most samples.
_SECONDS_A_SAMPLE, _BUSY_SHARE = 0.1, 0.3
# Seconds of host time without a message before calls are answered early; of idle ranks before the clock advances
# without them; and of idle ranks before others' time-outs expire.
_SECONDS_TO_EARLY, _SECONDS_IDLE, _MOST_SECONDS_IDLE = 0.1, 1.0, 30.0


class OutsideMeetings(ProcessRunner):
    """A run whose ranks may wait for each other outside of our calls.

    Attributes:
        decisions: where host time decided, by all but the instant, as text.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._gives_times = False  # a rank has given a call a time
        self._awaited: dict[int, Key] = {}  # by rank, the call whose end it asks for
        self._reading: set[int] = set()  # ranks that ask for the time
        self._num_early: Counter[int] = Counter()  # by rank, questions answered before the clock had
        self._undone: set[Key] = set()  # calls of broken groups, whose members hear of it at its virtual time
        self.decisions: dict[str, HostDecision] = {}

    def recall(self) -> bool:
        """Wait for a call of a rank that is away; False where none is."""
        return bool(self.away) and self._let_run(min(self.away))

    def _ready(self, rank: int | None) -> list[int]:
        """The processes that have sent something, waiting for one; none where the clock advances without ranks."""
        away, running = self.away, self.exchange.running
        if rank is None and running <= away:
            return self.children.ready(self._live, self._seconds_before_alarm())
        while rank not in away:
            early = [each for each, key in self._awaited.items() if self._is_there(each, key)]
            # Seconds that ranks may stand idle before the clock advances: as long as it takes, unless ranks wait for
            # the clock that give calls a time; up to that time where its end would be next.
            is_timed = self._gives_times and self.exchange.is_clock_awaited
            patience = (self._seconds_before_alarm() or _SECONDS_IDLE) if is_timed else math.inf
            if early:
                ready = self.children.ready(self._live, _SECONDS_TO_EARLY)
            elif self._reading:
                ready = self.children.ready(self._live, _SECONDS_TO_EARLY) or self._ready_or_idle(
                    _SECONDS_IDLE
                )
                if not ready:
                    self._read_early(running - away - self._reading)
                    continue
            elif patience < math.inf:
                ready = self._ready_or_idle(patience)
            else:
                break
            if ready or not early:
                if not ready:
                    self._goes_on_without(running - away)
                return ready
            # The values of their calls are there: they need not wait until the clock, too, has reached their end, and
            # the clock may need one that waits for them outside of our calls. Times do not change; should a call turn
            # out to have ended undone, the run ends.
            for each in early:
                del self._awaited[each]
                self._answer_early(each, CallEnding.DONE)
        return super()._ready(rank)

    def _answer_early(self, rank: int, value: Answer) -> None:
        self._num_early[rank] += 1
        self.exchange.unblock(rank)
        self._send(self._process_of[rank], Answered(rank, value))

    def _read_early(self, without: AbstractSet[int]) -> None:
        """Answer ranks that ask for the time with the clock's, which has not come to theirs.

        It needs ranks that sleep, and may wait outside of our calls for what those that ask do next.
        """
        self._decide(without, self._reading)
        warnings.warn(
            f"rank {min(self._reading)} reads the clock, which needs {rank_names(sorted(without))}, asleep outside of "
            "calls: it reads an earlier time; --clock host leaves the script the machine's clock",
            UserWarning,
            stacklevel=2,
        )
        while self._reading:
            self._answer_early(self._reading.pop(), float(self.kernel.clock.now))

    def _ready_or_idle(self, seconds: float) -> list[int]:
        """Processes that have sent a message; none when the others have been idle for `seconds`.

        Where a rank has given a call a time, others may wait outside of our calls for what it does when that is up.
        """

        def sample() -> tuple[float, bool]:
            """Processor seconds of the processes whose ranks can go on; and whether all of them sleep."""
            seen = [spent_seconds(self.children.pids[each]) for each in filter(self._can_go_on, self._live)]
            return sum(spent for spent, _ in seen), all(is_asleep for _, is_asleep in seen)

        num_samples = math.ceil(seconds / _SECONDS_A_SAMPLE)
        while True:
            num_busy, spent = 0, sample()[0]
            for _ in range(num_samples):
                if ready := self.children.ready(self._live, seconds / num_samples):
                    return list(ready)
                now, is_asleep = sample()
                num_busy += not is_asleep or now - spent > _BUSY_SHARE * seconds / num_samples
                spent = now
            if num_busy < num_samples / 2:
                return []

    def _goes_on_without(self, ranks: AbstractSet[int]) -> None:
        self._decide(ranks, ())
        if not self.away:
            warnings.warn(
                f"rank {min(ranks)} makes no call and sleeps, while others whose calls have time-outs wait for the "
                "clock: it advances without that rank, so times of this run may depend on the machine",
                UserWarning,
                stacklevel=2,
            )
        self.away |= ranks

    def _decide(self, without: Iterable[int], read_by: Iterable[int]) -> None:
        """Note a decision by host time."""
        ranks, readers, calls = sorted(without), sorted(read_by), sorted(self.exchange.calls_in_flight())
        decision = HostDecision(
            virtual_seconds=float(self.kernel.clock.now),
            times=0,
            read_by=readers,
            without_ranks=ranks,
            calls=calls,
        )
        self.decisions.setdefault(f"{ranks} {readers} {calls}", decision).times += 1

    def _is_there(self, rank: int, key: Key) -> bool:
        """True if the values of a call that the rank has posted are known."""
        slot = self.exchange.open_call(key)
        if slot is None:
            return key not in self._undone
        member = slot.ranks.index(rank)
        signature = slot.signatures[member]
        return member in slot.served or (signature is not None and signature.needs_nobody(member))

    def _seconds_before_alarm(self) -> float:
        """Host seconds to wait for ranks that are away, where the next event is a time-out of others; else 0."""
        kernel = self.kernel
        alarm = kernel.calls.seconds_to_alarm
        is_next = alarm < math.inf and kernel.clock.peek() >= kernel.clock.now + alarm
        return min(alarm, _MOST_SECONDS_IDLE) if is_next else 0.0

    def _take_in(self, index: int, record: NamedTuple) -> None:
        if isinstance(record, Requests):
            self._gives_times = self._gives_times or any(map(gives_time, record.requests))
            last = record.requests[-1]
            if isinstance(last, Await):
                self._awaited[record.rank] = last.key
            elif isinstance(last, Ask) and last.key is None:
                self._reading.add(record.rank)
        super()._take_in(index, record)

    def _serve(self, slot: Slot, members: Sequence[int]) -> None:
        if slot.is_over and slot.error is not None:
            self._undone.add(slot.key)
        super()._serve(slot, members)

    def answer(self, rank: int, value: Answer) -> None:
        """Resume `rank` with the kernel's answer, unless it was resumed early."""
        if not self._num_early[rank]:
            self._awaited.pop(rank, None)
            self._reading.discard(rank)
            super().answer(rank, value)
            return
        self._num_early[rank] -= 1
        if isinstance(value, CallEnding) and value != CallEnding.DONE:
            at = f"{self.kernel.clock.now:.10g} s"
            self.failure.add(
                BrokenCallError(
                    f"rank {rank}: a call has ended undone at {at}, and the rank had continued with its values, "
                    "since others met outside of torch.distributed: give the call a longer time-out",
                    rank,
                )
            )
