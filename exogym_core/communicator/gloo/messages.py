"""Point-to-point messages of one group over gloo, and those that a rank sends to itself."""

from __future__ import annotations

import datetime
import zlib
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from exogym_core.communicator.gloo.agreement import RECORD_BYTES, call_record, disagreement
from exogym_core.communicator.gloo.vigil import in_thread
from exogym_core.communicator.gloo.waits import Want
from exogym_core.communicator.handle import Handle
from netsim.files.errors import DeadlockError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import torch.distributed as dist
    from torch import Tensor

    from exogym_core.communicator.exchange import Signature
    from exogym_core.communicator.gloo.rendezvous import Rendezvous
    from exogym_core.communicator.gloo.vigil import Vigil
    from exogym_core.communicator.gloo.wire import Wire

    _Finish = Callable[[float | None], None]  # waits, for ever or at most so many seconds

__all__ = ["Mailbox", "message_slot"]

T = TypeVar("T")

# When every rank has ended, what is not here after this time will not come.
_LATE_SECONDS = 1.0


class _MessageHandle(Handle[T]):
    """A message on its way: `finish` waits for it, `deliver` hands over what came."""

    def __init__(
        self,
        finish: _Finish,
        deliver: Callable[[], T],
        cancel: Callable[[_MessageHandle[T]], bool] = lambda handle: False,
        vigil: tuple[Vigil, Want] | None = None,
    ) -> None:
        self._finish, self._deliver = finish, deliver
        self._watcher: Future[None] | None = None
        self._error: BaseException | None = None
        self._result: list[T] = []
        self._cancel, self.vigil = cancel, vigil
        self.done = False

    def wait(self) -> T:
        self.settle()
        if not self._result:
            self._result.append(self._deliver())
        return self._result[0]

    def is_completed(self) -> bool:
        # gloo cannot be asked without waiting, and a wait that times out breaks the connection.
        if not self.done and self._watcher is None:
            self._watcher = in_thread(self._watch)
        return self.done

    def cancel(self) -> bool:
        return not self.is_completed() and self._cancel(self)

    def settle(self, limit_seconds: float | None = None) -> None:
        """Wait for the message, without handing over what came; with a limit, only so long."""
        vigil = self.vigil if limit_seconds is None else None
        if self.done:
            pass
        elif self._watcher is not None:
            self._watcher.result() if vigil is None else vigil[0].until(vigil[1], self._watcher)
        elif vigil is not None:
            vigil[0].wait(vigil[1], self._watch)
        else:
            self._watch(limit_seconds)
        if self._error is not None:
            raise self._error

    def _watch(self, limit_seconds: float | None = None) -> None:
        try:
            self._finish(limit_seconds)
        except BaseException as error:
            self._error = error
        self.done = True


class Mailbox:
    """One member's messages in one group.

    With checks, each message is preceded by a record of what the sender sends. gloo ends the process when a
    message is larger than what is received into, so sizes are part of the slots in which gloo matches
    messages: other sizes never meet, and the record tells them apart.

    Args:
        wire: the group's gloo wire.
        ranks: the members' ranks in the run.
        rendezvous: says whether to check, and translates errors.
        vigil: tells of messages that can never come; None where nothing is checked.
        name: of the group, for it.
    """

    def __init__(
        self, wire: Wire, ranks: Sequence[int], rendezvous: Rendezvous, vigil: Vigil | None, name: str
    ) -> None:
        self._wire, self._ranks, self._rendezvous = wire, ranks, rendezvous
        self._lookout, self._name = vigil, name
        self._to_self: defaultdict[int, _Loop] = defaultdict(_Loop)
        self._posted: list[_MessageHandle[Any]] = []
        # gloo cannot take a receive back: the next one like it gets what it brings.
        self._left: defaultdict[tuple[int, int, int], list[tuple[_MessageHandle[Any], Tensor]]] = defaultdict(
            list
        )

    def send(self, flat: Tensor, dst: int, tag: int, signature: Signature) -> Handle[None]:
        """Start to send `flat`, which belongs to the message from now on, to member `dst`."""
        if dst == self._wire.member:
            finish = self._to_self[tag].send(flat, signature)
        else:
            works = []
            if self._rendezvous.check:
                works.append(self._wire.send(call_record(signature), dst, message_slot("record", tag)))
            works.append(self._wire.send(flat, dst, message_slot(tag, flat.nbytes)))
            finish = partial(self._finish, signature, dst, works, None)
        return self._post(finish, lambda: None, vigil=self._counted(signature, dst, tag))

    def receive(
        self, flat: Tensor, src: int, tag: int, signature: Signature, deliver: Callable[[Tensor], T]
    ) -> Handle[T]:
        """Start to receive from member `src` into `flat`, to be handed to `deliver` by the handle's `wait`."""
        lane = (src, tag, flat.nbytes)
        if self._left[lane]:
            earlier, into = self._left[lane].pop(0)
            return self._post(earlier.settle, lambda: deliver(into), self._leave(lane, into), earlier.vigil)
        if src == self._wire.member:
            finish = self._to_self[tag].receive(flat, signature)
        else:
            works, record = [], None
            if self._rendezvous.check:
                record = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
                works.append(self._wire.receive(record, src, message_slot("record", tag)))
            works.append(self._wire.receive(flat, src, message_slot(tag, flat.nbytes)))
            finish = partial(self._finish, signature, src, works, record)
        vigil = self._counted(signature, src, tag)
        return self._post(finish, lambda: deliver(flat), self._leave(lane, flat), vigil)

    def receive_any(self, flat: Tensor, tag: int, signature: Signature) -> int:
        """Receive from whoever is first into `flat`; returns the member."""
        if self._lookout is None:
            return self._receive_any(flat, tag, signature)
        want = self._want_of_anyone(signature, tag)
        src = self._lookout.wait(want, partial(self._receive_any, flat, tag, signature))
        self._counted(signature, src, tag)
        return src

    def _receive_any(self, flat: Tensor, tag: int, signature: Signature) -> int:
        me = self._ranks[self._wire.member]
        waiting = f"rank {me} waits for anyone in {signature}"
        if not self._rendezvous.check:
            return self._rendezvous.tell(
                waiting, lambda: self._wire.receive_any(flat, message_slot(tag, flat.nbytes))
            )
        record = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
        src = self._rendezvous.tell(
            waiting, lambda: self._wire.receive_any(record, message_slot("record", tag))
        )
        _judge((self._ranks[src], me), record, signature)
        self._rendezvous.tell(waiting, self._wire.receive(flat, src, message_slot(tag, flat.nbytes)).wait)
        return src

    def _counted(self, signature: Signature, other: int, tag: int) -> tuple[Vigil, Want] | None:
        """Count a message; what tells whether the other side can still come. None for one to oneself."""
        if self._lookout is None or other == self._wire.member:
            return None
        me, peer = self._ranks[self._wire.member], self._ranks[other]
        source, target = (me, peer) if signature.side == "send" else (peer, me)
        way = f"{self._name} {source}>{target} {tag}"
        number = self._lookout.posted.add(f"{way} {signature.side}")
        theirs = f"{way} {'recv' if signature.side == 'send' else 'send'}"
        return self._lookout, Want(str(signature), ((peer, theirs, number),))

    def _want_of_anyone(self, signature: Signature, tag: int) -> Want:
        assert self._lookout is not None
        me, needs = self._ranks[self._wire.member], []
        for peer in self._ranks:
            if peer != me:
                way = f"{self._name} {peer}>{me} {tag}"
                needs.append((peer, f"{way} send", self._lookout.posted.count(f"{way} recv") + 1))
        return Want(f"{signature}, from anyone", tuple(needs), any_one=True)

    def _leave(self, lane: tuple[int, int, int], flat: Tensor) -> Callable[[_MessageHandle[Any]], bool]:
        """What cancels a receive: its own work goes on, for the next one like it."""

        def cancel(handle: _MessageHandle[Any]) -> bool:
            self._left[lane].append((handle, flat))
            self._posted.remove(handle)
            return True

        return cancel

    @property
    def is_empty(self) -> bool:
        """Whether every message has been waited for."""
        return all(handle.done for handle in self._posted)

    def settle(self) -> None:
        """Wait for what is still on its way at the end of the run, when nobody will post any more.

        Raises:
            DeadlockError: a message was never matched.
        """
        for handle in self._posted:
            handle.settle(_LATE_SECONDS if self._rendezvous.check else None)

    def _post(
        self,
        finish: _Finish,
        deliver: Callable[[], T],
        cancel: Callable[[_MessageHandle[Any]], bool] = lambda handle: False,
        vigil: tuple[Vigil, Want] | None = None,
    ) -> Handle[T]:
        handle = _MessageHandle(finish, deliver, cancel, vigil)
        self._posted = [posted for posted in self._posted if not posted.done] + [handle]
        return handle

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
                patience = self._rendezvous.message_timeout
                work.wait(patience if limit_seconds is None else datetime.timedelta(seconds=limit_seconds))
                if record is not None and number == 0:
                    _judge((peer, me), record, signature)

        try:
            self._rendezvous.tell(f"rank {me} waits for rank {peer} in {signature}", wait)
            return
        except DeadlockError:
            if limit_seconds is None:
                raise
        raise DeadlockError(
            f"every rank has ended, but rank {me} {signature} was never matched by rank {peer} (ended: {peer})"
        )


class _Loop:
    """Messages of one tag from a rank to itself: the n-th sent is the n-th received."""

    def __init__(self) -> None:
        self._sent: list[tuple[Tensor, Signature]] = []
        self._num_received = 0

    def send(self, flat: Tensor, signature: Signature) -> _Finish:
        """What the sender's wait does."""
        number = len(self._sent)
        self._sent.append((flat, signature))

        def finish(_: float | None) -> None:
            if number >= self._num_received:
                raise DeadlockError(f"deadlock: this rank waits for itself to receive in {signature}")

        return finish

    def receive(self, flat: Tensor, signature: Signature) -> _Finish:
        """What the receiver's wait does."""
        number = self._num_received
        self._num_received += 1

        def finish(_: float | None) -> None:
            if number >= len(self._sent):
                raise DeadlockError(f"deadlock: this rank waits for itself to send in {signature}")
            sent, theirs = self._sent[number]
            _judge((0, 0), call_record(theirs), signature)
            flat.copy_(sent)

        return finish


def _judge(ranks: tuple[int, int], theirs: Tensor, mine: Signature) -> None:
    error = disagreement(ranks, [theirs, call_record(mine)])
    if error is not None:
        raise error


def message_slot(*key: object) -> int:
    """A number for gloo to match by; of keys that differ, two in 2^31 share one."""
    return zlib.crc32(repr(key).encode()) & 0x7FFFFFFF
