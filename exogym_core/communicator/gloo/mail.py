"""Mailboxes over real sockets: the store tells what has been put, gloo carries it when it is taken."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from exogym_core.communicator.gloo.messages import message_slot

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor
    from torch.distributed import Store  # type: ignore[attr-defined]

    from exogym_core.communicator.gloo.rendezvous import Rendezvous
    from exogym_core.communicator.gloo.wire import Wire

__all__ = ["Letters"]

_SECONDS_BETWEEN_LOOKS = 0.001


class _Note(NamedTuple):
    """What the store says of a letter: who sends it, its number among that member's, and what it is."""

    source: int
    number: int
    dtype: str
    shape: list[int]


class Letters:
    """One member's mailboxes in one group.

    A letter is announced in the group's store, so that nobody has to listen to everybody, and moves by gloo when
    its receiver asks for it; until then its sender keeps it.

    Args:
        wire: the group's gloo wire.
        store: the group's own part of the run's store; None where the member is alone.
        rendezvous: translates errors.
    """

    def __init__(self, wire: Wire, store: Store | None, rendezvous: Rendezvous) -> None:
        self._wire, self._store, self._rendezvous = wire, store, rendezvous
        self._own: dict[str, list[tuple[int, Tensor]]] = {}  # letters to oneself
        self._num_sent: Counter[tuple[int, str]] = Counter()
        self._num_taken: Counter[str] = Counter()
        self._outbox: dict[tuple[int, str], deque[tuple[int, Tensor, dist.Work]]] = {}
        self._told = -1  # how many letters had been put when this member last waited in vain
        self.is_used = False

    def put(self, tensor: Tensor, dst: int, box: str) -> None:
        """Announce `tensor`, which belongs to the letter from now on, and start to send it."""
        self.is_used = True
        if dst == self._wire.member:
            self._own.setdefault(box, []).append((dst, tensor))
            return
        number = self._num_sent[dst, box]
        self._num_sent[dst, box] += 1
        flat = tensor.reshape(-1)
        if flat.numel():
            work = self._wire.send(flat, dst, message_slot("letter", box, number))
            self._keep((dst, box), number, flat, work)
        note = _Note(self._wire.member, number, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        store = self._shared_store()
        store.add("put", 1)
        place = store.add(f"letters {dst} {box}", 1)
        store.set(f"letter {dst} {box} {place}", json.dumps(note))

    def _keep(self, lane: tuple[int, str], number: int, flat: Tensor, work: dist.Work) -> None:
        """Keep what has not been taken, and let go of what has."""
        kept = self._outbox.setdefault(lane, deque())
        kept.append((number, flat, work))
        taken = self._shared_store().add(f"taken {lane[0]} {lane[1]} {self._wire.member}", 0)
        while kept and kept[0][0] < taken:
            kept.popleft()

    def take(self, box: str, wait: float) -> list[tuple[int, Tensor]]:
        """What has come, after waiting up to `wait` seconds for something where nothing is there."""
        self.is_used = True
        deadline = time.monotonic() + wait
        got = self._collect(box)
        if got or wait == 0 or self._store is None:
            return got
        self._say("waits" if math.isinf(wait) else "busy", box)
        try:
            while not (got := self._collect(box)) and time.monotonic() < deadline:
                if math.isinf(wait) and self._is_hopeless():
                    break
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        finally:
            self._say("busy")
        return got

    def end(self) -> None:
        """This member puts nothing any more."""
        if self._store is not None:
            self._say("ended")

    # --- what the store says -------------------------------------------------------------------------------

    def _collect(self, box: str) -> list[tuple[int, Tensor]]:
        got = self._own.pop(box, [])
        if self._store is None:
            return got
        me = self._wire.member
        num_there = self._store.add(f"letters {me} {box}", 0)
        while self._num_taken[box] < num_there:
            self._num_taken[box] += 1
            note = _Note(*json.loads(self._store.get(f"letter {me} {box} {self._num_taken[box]}")))
            got.append((note.source, self._receive(note, box)))
        return got

    def _receive(self, note: _Note, box: str) -> Tensor:
        store = self._shared_store()
        flat = torch.empty(math.prod(note.shape), dtype=getattr(torch, note.dtype))
        if flat.numel():
            work = self._wire.receive(flat, note.source, message_slot("letter", box, note.number))
            waiting = f"rank {self._rendezvous.rank} takes a letter of member {note.source} from box {box!r}"
            self._rendezvous.tell(waiting, work.wait)
        store.add(f"taken {self._wire.member} {box} {note.source}", 1)
        return flat.reshape(note.shape)

    def _is_hopeless(self) -> bool:
        """Whether everyone else has ended or waits likewise, in vain so far; told to one at a time."""
        store = self._shared_store()
        num_put = store.add("put", 0)
        first = self._wire.size  # of those who have not been told since the last letter
        for member in range(self._wire.size):
            word, told, box, num_taken = self._said(member)
            if word == "busy" or (word == "waits" and store.add(f"letters {member} {box}", 0) != num_taken):
                return False
            if word == "waits" and told != num_put:
                first = min(first, member)
        if first != self._wire.member or store.add("put", 0) != num_put:
            return False
        self._told = num_put
        return True

    def _say(self, word: str, box: str = "") -> None:
        """Tell what this member does: `busy`, `waits` for a letter to `box`, of which it has taken so many, `ended`."""
        state = [word, self._told, box, self._num_taken[box]]
        self._shared_store().set(f"member {self._wire.member}", json.dumps(state))

    def _said(self, member: int) -> tuple[str, int, str, int]:
        store = self._shared_store()
        if not store.check([f"member {member}"]):
            return "busy", -1, "", 0
        word, told, box, num_taken = json.loads(store.get(f"member {member}"))
        return word, told, box, num_taken

    def _shared_store(self) -> Store:
        assert self._store is not None
        return self._store
