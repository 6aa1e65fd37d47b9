"""Gradients of a rank that holds stages: passes over micro-batches, activations and their gradients as messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from exogym_core.data.batches import loss_and_count
from exogym_core.learner import TorchLearner
from exogym_core.stages.boundaries import boundary_codec
from exogym_core.stages.options import actions
from exogym_core.stages.split import tensors_of
from exogym_core.strategy.participation.site import Site
from exogym_core.strategy.parts.gradients import clip_norm_across
from exogym_core.workers.streams import FORWARD_SHARE
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.communicator.base import Communicator, Handle
    from exogym_core.cost.compute import Coding, StepDurations
    from exogym_core.data.samples import StepSamples
    from exogym_core.stages.boundaries import BoundaryCodec
    from exogym_core.stages.options import StagePass
    from exogym_core.stages.split import Boundary, Cut, HeldPart
    from exogym_core.strategy.base import StepContext, Strategy

__all__ = ["StageLearner", "StageRank"]


class StageRank:
    """A rank of a run with stages: its worker, its place in the worker's chain, and its part of the model.

    Ranks of a worker are consecutive: rank `worker * count + position`.

    Args:
        cut: of the model.
        comm: connects all ranks of the run.
        held: its part of the model.

    Attributes:
        worker, position: of the rank.
        chain: connects the ranks of its worker.
        peers: connects the ranks at its position, which are workers for its strategy.
        shared: its parameters that other ranks of the chain hold, too, and the connection to these.
    """

    def __init__(self, cut: Cut, comm: Communicator, held: HeldPart) -> None:
        self.cut, self.held = cut, held
        count = cut.stages.count
        self.worker, self.position = divmod(comm.rank, count)
        first = self.worker * count
        self.chain = comm.group(range(first, first + count))
        self.peers = comm.group(range(self.position, comm.world_size, count))
        named = dict(held.model.named_parameters())
        self.shared: list[tuple[Tensor, Communicator]] = []
        groups: dict[tuple[int, ...], Communicator] = {}
        for name, parameter in named.items():
            ranks = cut.ranks_of(name)
            if len(ranks) > 1 and parameter.requires_grad:
                group = groups.setdefault(ranks, self.chain.group(ranks, reuse=True))
                self.shared.append((parameter, group))

    @property
    def has_loss(self) -> bool:
        """True on the rank of the last stage."""
        return self.position == self.cut.stages.count - 1

    def sum_shared(self) -> None:
        """Sum the gradients of parameters that several stages hold."""
        for parameter, group in self.shared:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            group.all_reduce(parameter.grad)

    def clip_together(self, strategy: Strategy) -> None:
        """Have a strategy that is set up clip gradients by the norm over all stages."""
        site = strategy.site
        counted = [
            each
            for each in site.held
            if all(each is not other or group.rank == 0 for other, group in self.shared)
        ]
        strategy.site = _ChainSite(**{**vars(site), "chain": self.chain, "counted": counted})


@dataclass(frozen=True)
class _ChainSite(Site):
    """Site whose norm of gradients is the whole model's.

    Attributes:
        chain: the ranks of the worker.
        counted: parameters whose gradients this rank counts.
    """

    chain: Communicator | None = None
    counted: Sequence[Tensor] = ()

    def clip(self, max_norm: float) -> Tensor:
        """Clip the norm of all stages' gradients together; returns the norm before."""
        assert self.chain is not None
        return clip_norm_across(self.counted, self.held, self.chain, max_norm)


class StageLearner(TorchLearner):
    """Takes a step's passes in the order of the schedule; what crosses stages is sent as soon as it is computed.

    Receives are posted one pass ahead, so that messages move while the rank computes. Under `pipedream` a micro-batch's
    backward pass may come in a later step: its forward pass is of a copy of the weights then, and its gradient goes to
    the update of that later step. The first such steps have gradients of fewer micro-batches, or of 0.

    Args:
        rank: its stages.
        comm: the rank's.
        strategy: its own, not set up.
        cost: virtual seconds of a worker's whole step on this rank's host; None: computing is free.
        autocast: as for `TorchLearner`.
        coding: virtual time of codecs; None where it is free.
    """

    def __init__(
        self,
        rank: StageRank,
        comm: Communicator,
        strategy: Strategy,
        cost: StepDurations | None,
        autocast: str | None,
        coding: Coding | None = None,
    ) -> None:
        stages = rank.cut.stages
        self._codec, self._coding = boundary_codec(stages.codec), coding
        if self._codec is not None and coding is not None:
            coding.seconds(self._codec.name, "encode", 0)  # raises now, not in the first step
        overlaps = strategy.overlaps_backward and stages.num_stages == stages.count and not rank.shared
        super().__init__(rank.held.model, comm, strategy.before_backward, cost, autocast, overlaps)
        self._rank, self._overlaps = rank, overlaps
        self.has_loss = rank.has_loss
        self._sends: list[tuple[int, Handle[None]]] = []  # with the latest micro-batch when it was sent
        self._num_taken, self._a_step = 0, 0  # micro-batches of all steps so far, and of this one
        self._sizes: dict[int, tuple[int, float]] = {}  # by micro-batch: samples, and share of its step's
        self._copies: dict[int, Tensor] = {}  # of this step's parameters, by their id
        self._copies_of: dict[int, dict[int, Tensor]] = {}  # by micro-batch in flight
        self._posted: dict[StagePass, list[Handle[Tensor]]] = {}
        self._entered: dict[tuple[int, int], tuple[Tensor, ...]] = {}  # by stage and micro-batch
        self._left: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def gradients(self, step: StepSamples, context: StepContext) -> float:
        """Leave the gradients of all micro-batches in `.grad`; return their mean loss, 0 where it is not known."""
        seconds = 0.0 if self._cost is None else self._cost.seconds(context.number, step.samples)
        stages, position = self._rank.cut.stages, self._rank.position
        first = self._num_taken if stages.is_asynchronous else 0
        for number, (_, samples) in enumerate(step.micro_batches, first):
            self._sizes[number] = samples, samples / step.samples
        self._a_step = len(step.micro_batches)
        self._num_taken = first + self._a_step
        passes = actions(stages, position, len(step.micro_batches))
        order = [each._replace(micro=first + each.micro) for each in passes if first + each.micro >= 0]
        if stages.lag(position):
            self._copies = {
                id(each): each.detach().clone().requires_grad_(each.requires_grad)
                for each in self._rank.held.model.parameters()
            }
        loss = 0.0
        for index, action in enumerate(order):
            for coming in order[index : index + 2]:
                self._post_receives(coming)
            samples, weight = self._sizes[action.micro]
            share = self._rank.cut.shares[action.stage] * weight
            if action.is_forward:
                behind = action.micro - stages.lag(min(position + 1, stages.count - 1))
                if stages.is_asynchronous and behind >= 0:  # the next rank's backward pass of now
                    self._post_receives(action._replace(is_forward=False, micro=behind))
                batch = step.micro_batches[action.micro - first][0]
                loss += self._forward_pass(action, batch, samples, context) * weight
                self._charge(seconds, step.samples, share * FORWARD_SHARE)
                self._send(action, samples)
                continue
            is_last = index == len(order) - 1
            context.last_micro_batch = is_last
            self._before_backward(is_last and self._overlaps)
            clock = self._clock if is_last else None
            share *= 1 - FORWARD_SHARE
            if clock is not None:
                clock.begin_backward(seconds, step.samples, share)
            self._backward_pass(action, samples, weight)
            if clock is not None:
                clock.end()
            else:
                self._charge(seconds, step.samples, share)
            self._send(action, samples)
        # What the next rank has answered by now is delivered; to wait for more would be to wait for that rank.
        until = self._num_taken - stages.delay if stages.is_asynchronous else self._num_taken
        while self._sends and self._sends[0][0] < until:
            self._sends.pop(0)[1].wait()
        for parameter in self._rank.held.model.parameters() if stages.is_asynchronous else ():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._rank.sum_shared()
        return loss

    def _charge(self, seconds: float, samples: int, share: float) -> None:
        if self._cost is not None:
            self._comm.advance(seconds * share, ("step", samples, share))

    # --- passes --------------------------------------------------------------------------------------------

    def _forward_pass(self, action: StagePass, batch: Any, samples: int, context: StepContext) -> float:
        """Pass of a micro-batch through a stage; returns its loss, 0 where it is not the last."""
        cut, key = self._rank.cut, (action.stage, action.micro)
        if self._copies:
            self._copies_of[action.micro] = self._copies
        modules = self._rank.held.modules[action.stage]
        value: Any = batch
        if action.stage:
            received = self._receive(action, samples)
            for tensor, boundary in zip(received, cut.boundaries[action.stage], strict=True):
                tensor.requires_grad_(boundary.has_gradient)
            self._entered[key] = received
            # Parts may change what they get in place, which leaves of a graph do not allow.
            entering = tuple(each.clone() if each.requires_grad else each for each in received)
            value = entering if len(entering) > 1 else entering[0]
        is_last = action.stage == cut.stages.num_stages - 1
        with self._autocast:
            for module in modules[: len(modules) - is_last]:
                value = self._called(module, value)
            if not is_last:
                left = self._left[key] = tensors_of(value)
                found = [(each.dtype, tuple(each.shape)) for each in left]
                expected = [(each.dtype, each.sizes(samples)) for each in cut.boundaries[action.stage + 1]]
                if found != expected:
                    texts = [
                        ", ".join(f"{dtype} {list(sizes)}" for dtype, sizes in each)
                        for each in (found, expected)
                    ]
                    raise InputError(
                        f"fit: stages: stage {action.stage} returns {texts[0]} for {samples} samples, where "
                        f"{texts[1]} follows from the first batch: pad samples to one length"
                    )
                return 0.0
            value = self._called(modules[-1], value, batch)
        loss, count = loss_and_count(
            value, f"rank {self._comm.rank}, step {context.number + 1}", with_gradient=True
        )
        if count is not None:
            raise InputError(
                "fit: stages: the model returns a count with its loss: return the mean over samples"
            )
        self._left[key] = (loss,)
        return loss.item()

    def _called(self, module: nn.Module, *values: Any) -> Any:
        """Value of a part, by the copies of its parameters where there are any."""
        if not self._copies:
            return module(*values)
        own = {name: self._copies[id(each)] for name, each in module.named_parameters(remove_duplicate=False)}
        return functional_call(module, own, values)

    def _backward_pass(self, action: StagePass, samples: int, weight: float) -> None:
        """Backward pass of a micro-batch through a stage."""
        left = self._left.pop((action.stage, action.micro))
        copies = self._copies_of.pop(action.micro, {})
        if action.stage == self._rank.cut.stages.num_stages - 1:
            (left[0] * weight).backward()  # type: ignore[no-untyped-call]
            return
        roots = [each for each in left if each.requires_grad]
        if roots:
            torch.autograd.backward(roots, self._receive(action, samples))
        for parameter in self._rank.held.model.parameters() if copies else ():
            copy = copies[id(parameter)]
            if copy.grad is not None:
                parameter.grad = copy.grad if parameter.grad is None else parameter.grad.add_(copy.grad)
                copy.grad = None

    # --- messages ------------------------------------------------------------------------------------------

    def _post_receives(self, action: StagePass) -> None:
        """Post the receives of what a pass needs from another rank."""
        cut, chain = self._rank.cut, self._rank.chain
        last = cut.stages.num_stages - 1
        if action in self._posted or action.stage == (0 if action.is_forward else last):
            return
        peer = (self._rank.position + (-1 if action.is_forward else 1)) % chain.world_size
        samples, tag = self._sizes[action.micro][0], _tag(action)
        likes = [each.empty(samples, self._device) for each in self._received_by(action)]
        messages = [
            like if (codec := self._codec_of(like.dtype)) is None else codec.message_like(like)
            for like in likes
        ]
        self._posted[action] = [chain.irecv(message, peer, tag) for message in messages]

    def _received_by(self, action: StagePass) -> list[Boundary]:
        """Tensors that a pass gets from another rank."""
        return self._crossing(action.stage + (not action.is_forward), action)

    def _sent_by(self, action: StagePass) -> list[Boundary]:
        """Tensors that a pass sends to another rank."""
        return self._crossing(action.stage + action.is_forward, action)

    def _crossing(self, stage: int, action: StagePass) -> list[Boundary]:
        """Tensors that enter a stage, or those of them that gradients come back for."""
        return [each for each in self._rank.cut.boundaries[stage] if action.is_forward or each.has_gradient]

    def _codec_of(self, dtype: torch.dtype) -> BoundaryCodec | None:
        return self._codec if dtype.is_floating_point else None

    def _receive(self, action: StagePass, samples: int) -> tuple[Tensor, ...]:
        """Wait for what a pass needs from another rank, and decode it."""
        received = []
        for handle, boundary in zip(self._posted.pop(action), self._received_by(action), strict=True):
            message = handle.wait()
            if (codec := self._codec_of(boundary.dtype)) is not None:
                like = boundary.empty(samples, self._device)
                message = codec.decode(message, like)
                self._charge_coding(codec, "decode", like)
            received.append(message)
        return tuple(received)

    def _charge_coding(self, codec: BoundaryCodec, way: str, values: Tensor) -> None:
        if self._coding is not None:
            self._comm.advance(self._coding.seconds(codec.name, way, values.numel()))
            self._comm.state.traffic.charged_values += values.numel()

    def _send(self, action: StagePass, samples: int) -> None:
        """Send the result of a pass to the rank that goes on with it."""
        cut, chain = self._rank.cut, self._rank.chain
        key = (action.stage, action.micro)
        if action.is_forward:
            if action.stage == cut.stages.num_stages - 1:
                return
            tensors: Sequence[Tensor | None] = self._left[key]
            step = 1
        else:
            entered = self._entered.pop(key, ())
            tensors = [each.grad for each in entered if each.requires_grad]
            step = -1
        towards = action._replace(stage=action.stage + step)
        peer = (self._rank.position + step) % chain.world_size
        for number, (tensor, boundary) in enumerate(zip(tensors, self._sent_by(action), strict=True)):
            value = (
                boundary.empty(samples, self._device).zero_()
                if tensor is None
                else tensor.detach().contiguous()
            )
            if (codec := self._codec_of(value.dtype)) is not None:
                place = towards._replace(micro=towards.micro % self._a_step)
                value, like = codec.encode(value, (*place, number)), value
                self._charge_coding(codec, "encode", like)
            now = action.micro + (0 if action.is_forward else cut.stages.lag(self._rank.position))
            self._sends.append((now, chain.isend(value, peer, _tag(towards))))

    def state_dict(self) -> dict[str, Any]:
        """Values that codecs still owe."""
        owed = {} if self._codec is None else self._codec.residuals
        return {**super().state_dict(), "residuals": owed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        if self._codec is not None:
            self._codec.residuals = dict(state["residuals"])


def _tag(action: StagePass) -> int:
    """Tag of what enters a stage: activations and gradients are told apart."""
    return 2 * action.stage + (not action.is_forward)
