"""Point-to-point messages and mailboxes of one group over gloo."""

from __future__ import annotations

import datetime
import json
import math
import time
import zlib
from collections import Counter, defaultdict, deque
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from exogym_core.communicator.base import Handle
from exogym_core.communicator.gloo.deadlock_detector import Want, fulfil, in_thread
from exogym_core.communicator.gloo.wire import RECORD_BYTES, call_record, disagreement
from netsim.errors import DeadlockError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist
    from torch import Tensor

    from exogym_core.communicator.exchange import Signature
    from exogym_core.communicator.gloo.deadlock_detector import Waits
    from exogym_core.communicator.gloo.rendezvous import Rendezvous
    from exogym_core.communicator.gloo.wire import Wire

    _Finish = Callable[[float | None], None]  # waits, at most for these seconds
    _Cancel = Callable[["GlooHandle[Any]"], bool]
    _Lane = tuple[int, int, int]  # source, tag, and number of bytes
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["GlooHandle", "GlooMailboxes", "PeerMessages", "message_slot"]

# --- point to point ------------------------------------------------------------------------------------------


T = TypeVar("T")

# When every rank has ended, a message that has not arrived after this time was never sent.
_LATE_SECONDS = 1.0


class GlooHandle(Handle[T]):
    """A call or message in flight.

    Args:
        waits: of this rank.
        want: posts that it waits for.
        deliver: hands over what `end` has.
        end: future of a call that is under way; None: a message, for which no one waits yet.
        finish: waits for the message.
        cancel: takes it back.
    """

    def __init__(
        self,
        waits: Waits,
        want: Want,
        deliver: Callable[[Any], T],
        end: Future[Any] | None = None,
        finish: _Finish = lambda limit_seconds: None,
        cancel: _Cancel | None = None,
    ) -> None:
        self._waits, self.want, self._deliver = waits, want, deliver
        self._end, self._finish, self._cancel = end, finish, cancel
        self._result: list[T] = []

    def wait(self) -> T:
        if not self._result:
            self._result.append(self._deliver(self.settle()))
        return self._result[0]

    def is_completed(self) -> bool:
        # gloo cannot be asked without waiting, and a wait that times out breaks the connection.
        if self._end is None:
            self._end = in_thread(partial(self._finish, None))
        return self.done

    def cancel(self) -> bool:
        if self._cancel is None:
            return super().cancel()
        return not self.is_completed() and self._cancel(self)

    def settle(self, limit_seconds: float | None = None) -> Any:
        """Wait for the message, at most for `limit_seconds`, without delivering it."""
        if self._end is None:
            self._end = Future()
            call = partial(fulfil, self._end, partial(self._finish, limit_seconds))
            self._waits.wait(self.want, call) if limit_seconds is None else call()
        return self._waits.until(self.want, self._end)

    @property
    def done(self) -> bool:
        """True if it has been waited for."""
        return self._end is not None and self._end.done()


class PeerMessages:
    """Messages of a member in a group.

    With checks, each message is preceded by a record of what the sender sends. gloo ends the process when a
    message is larger than what is received into, so sizes are part of the slots in which gloo matches
    messages: other sizes never meet, and the record distinguishes them.

    Args:
        wire: the group's gloo wire.
        ranks: the members' ranks in the run.
        rendezvous: says whether to check, and translates errors.
        detector: raises for messages that can never come; None where nothing is checked.
        name: of the group, for it.
    """

    def __init__(
        self,
        wire: Wire,
        ranks: Sequence[int],
        rendezvous: Rendezvous,
        detector: Waits,
        name: str,
    ) -> None:
        self._wire, self._ranks, self._rendezvous = wire, ranks, rendezvous
        self._detector, self._name = detector, name
        # Messages to itself, by tag and side: the n-th sent is the n-th received.
        self._own: defaultdict[tuple[int, str], list[tuple[Tensor, Signature]]] = defaultdict(list)
        self._posted: list[GlooHandle[Any]] = []
        # gloo cannot take a receive back: the next one like it gets what it brings.
        self._left: defaultdict[_Lane, list[tuple[Tensor, GlooHandle[Any]]]] = defaultdict(list)

    def send(self, flat: Tensor, dst: int, tag: int, signature: Signature) -> Handle[None]:
        """Start to send `flat`, which belongs to the message from now on, to member `dst`."""
        if dst == self._wire.member:
            finish = self._to_self(flat, tag, signature)
        else:
            works = []
            if self._rendezvous.check:
                works.append(self._wire.send(call_record(signature), dst, message_slot("record", tag)))
            works.append(self._wire.send(flat, dst, message_slot(tag, flat.nbytes)))
            finish = partial(self._finish, signature, dst, works, None)
        return self._post(self._counted(signature, dst, tag), finish, lambda _: None, lambda handle: False)

    def receive(
        self, flat: Tensor, src: int, tag: int, signature: Signature, deliver: Callable[[Tensor], T]
    ) -> Handle[T]:
        """Start to receive from member `src` into `flat`, to be handed to `deliver` by the handle's `wait`."""
        lane = (src, tag, flat.nbytes)
        if self._left[lane]:
            flat, earlier = self._left[lane].pop(0)
            finish: _Finish = earlier.settle
            want = earlier.want
        elif src == self._wire.member:
            finish, want = self._to_self(flat, tag, signature), self._counted(signature, src, tag)
        else:
            works, record = [], None
            if self._rendezvous.check:
                record = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
                works.append(self._wire.receive(record, src, message_slot("record", tag)))
            works.append(self._wire.receive(flat, src, message_slot(tag, flat.nbytes)))
            finish = partial(self._finish, signature, src, works, record)
            want = self._counted(signature, src, tag)
        return self._post(want, finish, lambda _: deliver(flat), partial(self._leave, lane, flat))

    def receive_any(self, flat: Tensor, tag: int, signature: Signature) -> int:
        """Receive the first message of any member into `flat`; returns the member."""
        want = self._want_of_anyone(signature, tag)
        src = self._detector.wait(want, partial(self._receive_any, flat, tag, signature))
        self._counted(signature, src, tag)
        return src

    def _receive_any(self, flat: Tensor, tag: int, signature: Signature) -> int:
        me = self._ranks[self._wire.member]
        waiting = f"rank {me} waits for anyone in {signature}"
        guarded, wire, slot = self._rendezvous.guarded, self._wire, message_slot(tag, flat.nbytes)
        if not self._rendezvous.check:
            return guarded(waiting, lambda: wire.receive_any(flat, slot))
        record = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
        src = guarded(waiting, lambda: wire.receive_any(record, message_slot("record", tag)))
        _judge((self._ranks[src], me), record, signature)
        guarded(waiting, wire.receive(flat, src, slot).wait)
        return src

    def _counted(self, signature: Signature, other: int, tag: int) -> Want:
        """Count a message; returns the posts that it waits for, none for one to oneself."""
        if other == self._wire.member:
            return Want(str(signature), ())
        me, peer = self._ranks[self._wire.member], self._ranks[other]
        source, target = (me, peer) if signature.side == "send" else (peer, me)
        way = f"{self._name} {source}>{target} {tag}"
        number = self._detector.posted.add(f"{way} {signature.side}")
        theirs = f"{way} {'recv' if signature.side == 'send' else 'send'}"
        return Want(str(signature), ((peer, theirs, number),))

    def _want_of_anyone(self, signature: Signature, tag: int) -> Want:
        me, needs = self._ranks[self._wire.member], []
        for peer in self._ranks:
            if peer != me:
                way = f"{self._name} {peer}>{me} {tag}"
                needs.append((peer, f"{way} send", self._detector.posted.count(f"{way} recv") + 1))
        return Want(f"{signature}, from anyone", tuple(needs), any_one=True)

    def _leave(self, lane: _Lane, flat: Tensor, handle: GlooHandle[Any]) -> bool:
        """Cancel a receive: its own work continues, for the next one like it."""
        self._left[lane].append((flat, handle))
        self._posted.remove(handle)
        return True

    @property
    def is_empty(self) -> bool:
        """True if every message has been waited for."""
        return all(handle.done for handle in self._posted)

    def settle(self) -> None:
        """Wait for messages in flight at the end of the run, after the last post.

        Raises:
            DeadlockError: a message was never matched.
        """
        for handle in self._posted:
            handle.settle(_LATE_SECONDS if self._rendezvous.check else None)

    def _post(self, want: Want, finish: _Finish, deliver: Callable[[Any], T], cancel: _Cancel) -> Handle[T]:
        handle = GlooHandle(self._detector, want, deliver, None, finish, cancel)
        self._posted = [posted for posted in self._posted if not posted.done] + [handle]
        return handle

    def _to_self(self, flat: Tensor, tag: int, signature: Signature) -> _Finish:
        """Function that waits for a message to this member: its other side must have been posted already."""
        sends = signature.side == "send"
        own, others = self._own[tag, signature.side], self._own[tag, "recv" if sends else "send"]
        number = len(own)
        own.append((flat, signature))

        def finish(_: float | None) -> None:
            if number >= len(others):
                what = "receive" if sends else "send"
                raise DeadlockError(f"deadlock: this rank waits for itself to {what} in {signature}")
            if not sends:
                sent, theirs = others[number]
                _judge((0, 0), call_record(theirs), signature)
                flat.copy_(sent)

        return finish

    def _finish(
        self,
        signature: Signature,
        other: int,
        works: list[dist.Work],
        record: Tensor | None,
        limit_seconds: float | None,
    ) -> None:
        me, peer = self._ranks[self._wire.member], self._ranks[other]

        def wait() -> None:
            for number, work in enumerate(works):
                patience = self._rendezvous.timeout
                work.wait(patience if limit_seconds is None else datetime.timedelta(seconds=limit_seconds))
                if record is not None and number == 0:
                    _judge((peer, me), record, signature)

        try:
            self._rendezvous.guarded(f"rank {me} waits for rank {peer} in {signature}", wait)
            return
        except DeadlockError:
            if limit_seconds is None:
                raise
        raise DeadlockError(
            f"every rank has ended, but rank {me} {signature} was never matched by rank {peer} (ended: {peer})"
        )


def _judge(ranks: tuple[int, int], theirs: Tensor, mine: Signature) -> None:
    error = disagreement(ranks, [theirs, call_record(mine)])
    if error is not None:
        raise error


def message_slot(*key: object) -> int:
    """A number for gloo to match by; of keys that differ, two in 2^31 share one."""
    return zlib.crc32(repr(key).encode()) & 0x7FFFFFFF


# --- mailboxes -----------------------------------------------------------------------------------------------


_SECONDS_BETWEEN_LOOKS = 0.001


class _Note(NamedTuple):
    """Announcement of a message in the store: its sender, its number among the sender's, its dtype and shape."""

    source: int
    number: int
    dtype: str
    shape: list[int]


class GlooMailboxes:
    """Mailboxes of a member in a group.

    A message is announced in the group's store, so that no rank has to listen to all, and moves by gloo when
    its receiver asks for it; until then its sender keeps it. Messages that are announced move side by side, so that a
    server's senders share its line as they would in a simulation.

    Args:
        wire: the group's gloo wire.
        store: the group's own part of the run's store.
        rendezvous: translates errors.
    """

    def __init__(self, wire: Wire, store: Store, rendezvous: Rendezvous) -> None:
        self._wire, self._store, self._rendezvous = wire, store, rendezvous
        self._own: dict[str, list[tuple[int, Tensor]]] = {}  # messages to oneself
        self._num_sent: Counter[tuple[int, str]] = Counter()
        self._num_begun: Counter[str] = Counter()  # of announced messages, those asked for
        self._num_taken: Counter[str] = Counter()
        self._coming: defaultdict[str, list[tuple[_Note, Tensor, Future[Any]]]] = defaultdict(list)
        self._outbox: dict[tuple[int, str], deque[tuple[int, Tensor, dist.Work]]] = {}
        self._num_seen = -1  # how many messages had been put when this member last waited in vain
        self.is_used = False

    def put(self, tensor: Tensor, dst: int, box: str) -> None:
        """Announce `tensor`, which belongs to the message from now on, and start to send it."""
        self.is_used = True
        if dst == self._wire.member:
            self._own.setdefault(box, []).append((dst, tensor))
            return
        number = self._num_sent[dst, box]
        self._num_sent[dst, box] += 1
        flat = tensor.reshape(-1)
        if flat.numel():
            work = self._wire.send(flat, dst, message_slot("mail", box, number))
            self._keep((dst, box), number, flat, work)
        note = _Note(self._wire.member, number, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        place = self._store.add(f"mails {dst} {box}", 1)
        self._store.set(f"mail {dst} {box} {place}", json.dumps(note))
        self._store.add("put", 1)  # last: a member that counts it before and after its look sees the message

    def _keep(self, lane: tuple[int, str], number: int, flat: Tensor, work: dist.Work) -> None:
        """Keep messages that have not been taken, and release the others."""
        kept = self._outbox.setdefault(lane, deque())
        kept.append((number, flat, work))
        taken = self._store.add(f"taken {lane[0]} {lane[1]} {self._wire.member}", 0)
        while kept and kept[0][0] < taken:
            kept.popleft()

    def take(self, box: str, wait: float) -> list[tuple[int, Tensor]]:
        """Messages that have arrived, after waiting up to `wait` seconds for the first.

        Without a wait, those that are announced have arrived.
        """
        self.is_used = True
        deadline = time.monotonic() + wait
        got = self._own.pop(box, [])
        self._begin(box)
        if wait == 0:
            wait_for([received for _, _, received in self._coming[box]])
        got += self._arrived(box)
        if got or wait == 0:
            return got
        self._publish("waits" if math.isinf(wait) else "busy", box)
        try:
            while not (got := self._arrived(box)) and time.monotonic() < deadline:
                if math.isinf(wait) and not self._coming[box] and self._cannot_progress():
                    break
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                self._begin(box)
        finally:
            self._publish("busy")
        return got

    def end(self) -> None:
        """Announce that this member puts no more messages."""
        self._publish("ended")

    # --- through the store ---------------------------------------------------------------------------------

    def _begin(self, box: str) -> None:
        """Ask for the messages that have been announced since the last call."""
        store, me = self._store, self._wire.member
        num_there = store.add(f"mails {me} {box}", 0)
        while self._num_begun[box] < num_there:
            self._num_begun[box] += 1
            note = _Note(*json.loads(store.get(f"mail {me} {box} {self._num_begun[box]}")))
            flat = torch.empty(math.prod(note.shape), dtype=getattr(torch, note.dtype))
            received: Future[Any] = Future()
            if flat.numel():
                work = self._wire.receive(flat, note.source, message_slot("mail", box, note.number))
                waiting = (
                    f"rank {self._rendezvous.rank} takes a message of member {note.source} from box {box!r}"
                )
                received = in_thread(partial(self._rendezvous.guarded, waiting, work.wait))
            else:
                received.set_result(None)
            self._coming[box].append((note, flat, received))

    def _arrived(self, box: str) -> list[tuple[int, Tensor]]:
        """Messages that are here, each sender's in order."""
        late: set[int] = set()
        got = []
        for note, flat, received in self._coming.pop(box, []):
            if note.source in late or not received.done():
                late.add(note.source)
                self._coming[box].append((note, flat, received))
                continue
            received.result()
            self._num_taken[box] += 1
            self._store.add(f"taken {self._wire.member} {box} {note.source}", 1)
            got.append((note.source, flat.reshape(note.shape)))
        return got

    def _cannot_progress(self) -> bool:
        """True if every other member has ended or waits for messages too; reported to one member at a time."""
        store = self._store
        num_put = store.add("put", 0)
        first = self._wire.size  # of the members that wait since before the last message
        for member in range(self._wire.size):
            word, num_seen, box, num_taken = self._state_of(member)
            if word == "busy" or (word == "waits" and store.add(f"mails {member} {box}", 0) != num_taken):
                return False
            if word == "waits" and num_seen != num_put:
                first = min(first, member)
        if first != self._wire.member or store.add("put", 0) != num_put:
            return False
        self._num_seen = num_put
        return True

    def _publish(self, word: str, box: str = "") -> None:
        """Publish this member's state: `busy`, `waits` (for a message to `box`) or `ended`."""
        state = [word, self._num_seen, box, self._num_taken[box]]
        self._store.set(f"member {self._wire.member}", json.dumps(state))

    def _state_of(self, member: int) -> tuple[str, int, str, int]:
        if not self._store.check([f"member {member}"]):
            return "busy", -1, "", 0
        word, num_seen, box, num_taken = json.loads(self._store.get(f"member {member}"))
        return word, num_seen, box, num_taken
