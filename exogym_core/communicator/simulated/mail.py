"""Messages that nobody waits for: mailboxes, receiving from anyone, and receives that are taken back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from exogym_core.communicator.exchange import Signature
from exogym_core.communicator.simulated.posting import PostingRank
from netsim.files.errors import InputError
from netsim.ranks.requests import Call, FirstSent, Key, Put, Take

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from netsim.ranks.requests import Lane, Letter

__all__ = ["MailRanks"]


class MailRanks(PostingRank):
    """The part of a simulated communicator whose messages come when they come."""

    def put(self, tensor: Tensor, dst: int, box: str = "") -> None:
        self._check_rank("put", "dst", dst)
        self._check_tensors("put", [tensor])
        self._check_mail("put")
        ranks = (self._ranks[self.rank], self._ranks[dst])
        name = self._box(dst, box)
        number = self._next_number(name, "put")
        signature = Signature.of("put", [tensor])
        given = [tensor.detach()]
        self._port.post(Key(("put", name, ranks[0]), number), ranks[:1], 0, signature, given)
        call = Call("sendrecv", ranks, tensor.nbytes, element_bytes=tensor.element_size())
        self._count(call, 0, given)
        self._request(Put(name, number, call))

    def take(self, box: str = "", wait: float = 0.0) -> list[tuple[int, Tensor]]:
        self._check_mail("take")
        if not wait >= 0:
            raise InputError(f"rank {self.rank}, take: wait={wait!r}; give seconds from 0 up, or math.inf")
        name = self._box(self.rank, box)
        letters = cast("tuple[Letter, ...]", self._ask(Take(name, float(wait))))
        of_run = self._ranks[self.rank]
        taken = []
        for source, number in letters:
            signature = Signature.of("taken", [])
            key = Key(("taken", name, source), number)
            ticket = self._port.post(key, (of_run,), 0, signature, [])
            (tensor,) = self._port.take(ticket, 0)
            taken.append((self._ranks.index(source), tensor.clone()))
            self._port.taken(ticket)
        return taken

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Any:
        if src is not None:
            return self.irecv(tensor, src, tag).wait()
        self._check_tensors("recv", [tensor])
        self._check_mail("recv")
        first = cast("Key", self._ask(FirstSent((self._group_id, self.rank, tag))))
        source = cast("Lane", first.group).source
        self.irecv(tensor, source, tag).wait()
        return source

    def _box(self, dst: int, box: str) -> Hashable:
        return (self._group_id, dst, box)

    def _check_mail(self, call: str) -> None:
        if self._state.off_clock or self._state.repeating:
            raise InputError(f"rank {self.rank}, {call}: it needs the clock; call it on the clock")
