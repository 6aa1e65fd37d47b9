"""Collectives of every transport: arguments checked, one call described, its values delivered."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from exogym_core.communicator.arguments import gathered_tensor, parts_of, scatter_parts
from exogym_core.communicator.base import Communicator, Traffic
from exogym_core.communicator.exchange import caller, signature_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from exogym_core.communicator.base import Handle
    from exogym_core.communicator.exchange import Signature

__all__ = ["CallState", "CollectiveCall", "Collectives", "Delivery", "nothing", "write_first"]

T = TypeVar("T")

Delivery = Callable[[Sequence[Tensor]], T]
"""From the values that a member gets to the result of its call."""


class CollectiveCall(NamedTuple):
    """A member's part of a collective.

    Attributes:
        name: of the collective.
        tensors: that this member gives.
        reduce_op: of a reduction.
        root: source or destination, where there is one.
        like: tensors of the signature, where they are not those given.
        shapes: of what an all_to_all will bring, where they are known.
    """

    name: str
    tensors: Sequence[Tensor]
    reduce_op: str = ""
    root: int = 0
    like: Sequence[Tensor] | None = None
    shapes: Sequence[Sequence[int]] | None = None

    @property
    def signed(self) -> Sequence[Tensor]:
        """Tensors of the signature."""
        return self.tensors if self.like is None else self.like


@dataclass
class CallState:
    """State shared by all communicators of one rank, on every transport."""

    _: KW_ONLY
    traffic: Traffic = field(default_factory=Traffic)
    off_clock: bool = False
    compares_places: bool = True

    def load_traffic(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved traffic in place: others refer to the object."""
        for name, value in saved.items():
            setattr(self.traffic, name, value)


class Collectives(Communicator):
    """The collectives of the contract by one method of the transport, `_collective`."""

    _state: CallState

    @property
    def traffic(self) -> Traffic:  # type: ignore[override]
        """Traffic of this rank so far, in all its groups."""
        return self._state.traffic

    def compare_places(self, compare: bool) -> None:
        self._state.compares_places = compare

    @contextmanager
    def off_clock(self) -> Iterator[None]:
        before, self._state.off_clock = self._state.off_clock, True
        try:
            yield
        finally:
            self._state.off_clock = before

    def _signature(
        self, name: str, like: Sequence[Tensor], reduce_op: str = "", root: int = 0, side: str = ""
    ) -> Signature:
        """Signature of a call of this rank, with tensors such as these."""
        # The shapes of an all_to_all may differ; that there is one part a rank is checked before.
        shapes = () if name == "all_to_all" else tuple([tuple(tensor.shape) for tensor in like])
        dtype, state = like[0].dtype if like else None, self._state
        on_clock, compares = not state.off_clock, state.compares_places
        return signature_of(name, dtype, shapes, reduce_op, root, caller(), side, on_clock, compares)

    @abstractmethod
    def _collective(self, call: CollectiveCall, deliver: Delivery[T], async_op: bool) -> T | Handle[T]:
        """Make a call of all members.

        Args:
            call: this member's part.
            deliver: called once with the values that it gets.
            async_op: return a handle.
        """

    @abstractmethod
    def _own_tensors(self, got: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Tensors on `device` that belong to the caller, of values that this member got."""

    def all_reduce(self, tensor: Tensor, op: object = "sum", async_op: bool = False) -> Any:
        reduce_op = self._check_op("all_reduce", op, tensor)
        call = CollectiveCall("all_reduce", [tensor], reduce_op)
        return self._collective(call, write_first(tensor), async_op)

    def broadcast(self, tensor: Tensor, src: int = 0, async_op: bool = False) -> Any:
        self._check_peer("broadcast", "src", src, tensor)
        call = CollectiveCall("broadcast", [tensor], root=src)
        return self._collective(call, write_first(tensor), async_op)

    def reduce(self, tensor: Tensor, dst: int = 0, op: object = "sum", async_op: bool = False) -> Any:
        self._check_rank("reduce", "dst", dst)
        reduce_op = self._check_op("reduce", op, tensor)
        call = CollectiveCall("reduce", [tensor], reduce_op, dst)
        return self._collective(call, write_first(tensor), async_op)

    def all_gather(self, tensor: Tensor, async_op: bool = False) -> Any:
        tensor = gathered_tensor(self, tensor)
        return self._collective(CollectiveCall("all_gather", [tensor]), self._owned_on(tensor), async_op)

    def gather(self, tensor: Tensor, dst: int = 0, async_op: bool = False) -> Any:
        self._check_peer("gather", "dst", dst, tensor)
        deliver: Delivery[Any] = self._owned_on(tensor) if self.rank == dst else nothing
        return self._collective(CollectiveCall("gather", [tensor], root=dst), deliver, async_op)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Sequence[Tensor] | None = None,
        src: int = 0,
        async_op: bool = False,
    ) -> Any:
        self._check_peer("scatter", "src", src, tensor)
        parts = scatter_parts(self, tensor, scatter_list) if self.rank == src else []
        call = CollectiveCall("scatter", parts, root=src, like=[tensor])
        return self._collective(call, write_first(tensor), async_op)

    def reduce_scatter(
        self, tensor: Tensor | Sequence[Tensor], op: object = "sum", async_op: bool = False
    ) -> Any:
        parts = parts_of(self, "reduce_scatter", tensor)
        reduce_op = self._check_op("reduce_scatter", op, parts[0])
        owned = self._owned_on(parts[0])
        call = CollectiveCall("reduce_scatter", parts, reduce_op)
        return self._collective(call, lambda got: owned(got)[0], async_op)

    def all_to_all(
        self,
        tensors: Tensor | Sequence[Tensor],
        async_op: bool = False,
        shapes: Sequence[Sequence[int]] | None = None,
    ) -> Any:
        parts = parts_of(self, "all_to_all", tensors)
        owned, whole = self._owned_on(parts[0]), isinstance(tensors, Tensor)
        call = CollectiveCall("all_to_all", parts, shapes=shapes)
        return self._collective(call, lambda got: torch.cat(owned(got)) if whole else owned(got), async_op)

    def barrier(self, async_op: bool = False) -> Any:
        return self._collective(CollectiveCall("barrier", []), nothing, async_op)

    def _owned_on(self, tensor: Tensor) -> Delivery[list[Tensor]]:
        device = tensor.device
        return lambda got: self._own_tensors(got, device)

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> Any:
        if src is not None:
            return self.irecv(tensor, src, tag).wait()
        self._check_tensors("recv", [tensor])
        return self._receive_any(tensor, tag)

    @abstractmethod
    def _receive_any(self, tensor: Tensor, tag: int) -> int:
        """Receive the first message with `tag` into `tensor`; returns its sender."""


def nothing(got: Sequence[Tensor]) -> None:
    """`Delivery` of a call that returns nothing."""


def write_first(tensor: Tensor) -> Delivery[Tensor]:
    """`Delivery` that writes the first value into `tensor`, unless it is there; without values it stays as it is."""

    def write(got: Sequence[Tensor]) -> Tensor:
        if got and (got[0].device != tensor.device or got[0].data_ptr() != tensor.data_ptr()):
            tensor.detach().copy_(got[0])
        return tensor

    return write
