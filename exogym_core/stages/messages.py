"""Messages between the ranks of a chain: activations forwards, their gradients backwards, encoded where asked for."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.stages.boundaries import boundary_codec
from exogym_core.stages.options import StagePass

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    import torch
    from torch import Tensor

    from exogym_core.communicator.base import Communicator, Handle
    from exogym_core.cost.compute import Coding
    from exogym_core.stages.boundaries import BoundaryCodec
    from exogym_core.stages.split import Boundary, Cut

__all__ = ["ChainMessages"]


class _Crossing(NamedTuple):
    """Receives of a pass, or sends to one.

    Attributes:
        handles: one a tensor.
        calls: their numbers, by which a restart repeats them.
        values: those sent, where a checkpoint may find them in flight.
        since: latest micro-batch when they were sent.
    """

    handles: list[Handle[Any]]
    calls: list[int]
    values: Sequence[Tensor] = ()
    since: int = 0


class ChainMessages:
    """Messages of a rank with its neighbours in a chain.

    Args:
        cut: of the model.
        chain: connects the ranks of the worker.
        device: of the values.
        coding: virtual time of codecs; None where it is free.
    """

    def __init__(self, cut: Cut, chain: Communicator, device: torch.device, coding: Coding | None) -> None:
        self._cut, self._chain, self._device = cut, chain, device
        self._codec, self._coding = boundary_codec(cut.stages.codec), coding
        if self._codec is not None and coding is not None:
            coding.seconds(self._codec.name, "encode", 0)  # raises now, not in the first step
        self._rank_at: Callable[[int, int], int] = lambda _, position: position
        self._received: dict[StagePass, _Crossing] = {}
        self._sent: list[tuple[StagePass, _Crossing]] = []

    def join(self, comm: Communicator, rank_at: Callable[[int, int], int]) -> None:
        """Exchange with the ranks of `comm` from now on; `rank_at(worker, position)` is the one with such a stage."""
        self._chain, self._rank_at = comm, rank_at

    def _peer(self, action: StagePass, stage: int) -> int:
        return self._rank_at(action.worker, stage % self._cut.stages.count)

    def expect(self, action: StagePass, samples: int, calls: Sequence[int] | None = None) -> None:
        """Post the receives of what a pass needs from another rank, unless they are posted.

        Args:
            action: the pass.
            samples: of its micro-batch.
            calls: of receives before a restart, which are repeated.
        """
        ends = 0 if action.is_forward else self._cut.stages.num_stages - 1
        if action in self._received or action.stage == ends:
            return
        peer = self._peer(action, action.stage + (-1 if action.is_forward else 1))
        messages: list[Tensor] = []
        for boundary in self._needed_by(action):
            like, codec = boundary.empty(samples, self._device), self._codec_of(boundary.dtype)
            messages.append(like if codec is None else codec.message_like(like))
        again = self._chain.noting_calls() if calls is None else self._chain.calls_again(calls)
        with again as noted:
            handles = [self._chain.irecv(message, peer, self._tag(action)) for message in messages]
        self._received[action] = _Crossing(handles, noted)

    def receive(self, action: StagePass, samples: int) -> tuple[Tensor, ...]:
        """Wait for what a pass needs from another rank, and decode it."""
        received = []
        for handle, boundary in zip(self._received.pop(action).handles, self._needed_by(action), strict=True):
            message = handle.wait()
            if (codec := self._codec_of(boundary.dtype)) is not None:
                like = boundary.empty(samples, self._device)
                message = codec.decode(message, like)
                self._charge_coding(codec, "decode", like)
            received.append(message)
        return tuple(received)

    def send(
        self, towards: StagePass, tensors: Sequence[Tensor | None], samples: int, place: int, since: int
    ) -> None:
        """Send the result of a pass.

        Args:
            towards: the pass that goes on with it.
            tensors: one for each that crosses there; None: zeros.
            samples: of the micro-batch.
            place: of the micro-batch in a step, for what codecs owe.
            since: latest micro-batch of this rank.
        """
        values: list[Tensor] = []
        handles: list[Handle[None]] = []
        with self._chain.noting_calls() as calls:
            for number, (tensor, boundary) in enumerate(zip(tensors, self._needed_by(towards), strict=True)):
                if tensor is None:
                    tensor = boundary.empty(samples, self._device).zero_()
                value = tensor.detach().contiguous()
                if (codec := self._codec_of(value.dtype)) is not None:
                    at = (*towards._replace(micro=place), number)
                    value, like = codec.encode(value, at), value
                    self._charge_coding(codec, "encode", like)
                if self._cut.stages.is_asynchronous:
                    values.append(value)
                handles.append(self._isend(value, towards))
        self._sent.append((towards, _Crossing(handles, calls, values, since)))

    def _isend(self, value: Tensor, towards: StagePass) -> Handle[None]:
        is_plain = value.dtype.is_floating_point  # of autocast, perhaps
        with self._chain.state.traffic.of_plain_values() if is_plain else nullcontext():
            return self._chain.isend(value, self._peer(towards, towards.stage), self._tag(towards))

    def deliver(self, before: int) -> None:
        """Wait until what was sent before the pass of a micro-batch has been delivered."""
        while self._sent and self._sent[0][1].since < before:
            for handle in self._sent.pop(0)[1].handles:
                handle.wait()

    def _needed_by(self, action: StagePass) -> list[Boundary]:
        """Tensors that a pass needs from another rank."""
        entering = self._cut.boundaries[action.stage + (not action.is_forward)]
        return [each for each in entering if action.is_forward or each.has_gradient]

    def _codec_of(self, dtype: torch.dtype) -> BoundaryCodec | None:
        return self._codec if dtype.is_floating_point else None

    def _charge_coding(self, codec: BoundaryCodec, way: str, values: Tensor) -> None:
        if self._coding is not None:
            self._chain.advance(self._coding.seconds(codec.name, way, values.numel()))
            self._chain.state.traffic.charged_values += values.numel()

    def _tag(self, action: StagePass) -> int:
        """Tag of what enters a stage: activations and gradients of each worker are told apart."""
        return 2 * (action.worker * self._cut.stages.num_stages + action.stage) + (not action.is_forward)

    @property
    def residuals(self) -> dict[Hashable, Tensor]:
        """Values that codecs still owe."""
        return {} if self._codec is None else self._codec.residuals

    @residuals.setter
    def residuals(self, owed: Mapping[Hashable, Tensor]) -> None:
        if self._codec is not None:
            self._codec.residuals = dict(owed)

    def state_dict(self) -> dict[str, Any]:
        """Values that codecs still owe, and messages in flight."""
        return {
            "residuals": self.residuals,
            "received": [(tuple(action), posted.calls) for action, posted in self._received.items()],
            "sent": [(tuple(to), each.since, each.calls, list(each.values)) for to, each in self._sent],
        }

    def load_state_dict(self, state: Mapping[str, Any], sizes: Mapping[tuple[int, ...], int]) -> None:
        """Restore what `state_dict` returned.

        Args:
            state: the saved.
            sizes: samples of micro-batches in flight.
        """
        self.residuals = state["residuals"]
        for action, calls in state["received"]:
            self.expect(StagePass(*action), sizes[action[2:]], calls)
        for action, since, calls, values in state["sent"]:
            towards = StagePass(*action)
            # The next rank has taken all activations of a step by its end; gradients are ahead of their receiver.
            with self._chain.calls_again(calls, are_taken=towards.is_forward):
                handles = [self._isend(value, towards) for value in values]
            self._sent.append((towards, _Crossing(handles, calls, values, since)))
