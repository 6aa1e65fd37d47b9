"""Steps whose gradients are exchanged among the ranks that are present, and the state that heals one that returns."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.plain import decode, encode
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from exogym_core.communicator.base import Communicator, JointWork
    from exogym_core.strategy.base import Strategy

__all__ = ["GradientSteps"]


class GradientSteps:
    """Exchange of a step's gradients among the ranks of a meeting, as in torchft's fault-tolerant data-parallel.

    Ranks meet when the step's first bucket of gradients is ready, else after the backward pass, and exchange theirs,
    weighed by the samples of those present. If a member is lost meanwhile the others exchange theirs once more: what
    the first attempt has changed is taken back, on the lost one too.

    A rank that returns takes over parameters, buffers, the optimizer's state and what its strategy declares to be equal
    on all ranks (`Strategy.healed`); errors that it keeps for itself stay its own. With a schedule of rates the
    optimizer's settings stay its own too, as it advances the schedule by the steps that it skips.

    Args:
        strategy: that exchanges gradients at each step.

    Attributes:
        peers: connects the ranks of the exchange under way; None: there is none.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.peers: Communicator | None = None
        self._early: JointWork | None = None  # of the step, since a bucket was ready in its backward pass

    def listen(self, last_micro_batch: bool, meet: Callable[[], JointWork]) -> None:
        """Prepare for a backward pass; during the last one of a step ranks meet when a bucket is ready."""
        strategy, gradients = self.strategy, self.strategy.site.gradients
        self._early = None
        if gradients is None or not last_micro_batch:
            return
        if strategy.comm.members_change or strategy.trainable[0].device.type not in ("cpu", "meta"):
            return  # a hook must not wait there: all buckets leave after the pass

        def meet_early() -> bool:
            gathering = self._early = meet()
            if gathering.peers is not None:
                self._join(gathering.peers, gathering.weights)
            return gathering.peers is not None

        gradients.listen(True, before_first=meet_early)

    def exchange(self, among: Callable[..., Any], work: Callable[[], None]) -> bool:
        """Run `work` among the ranks of this step; False: the others have gone on without this one.

        Args:
            among: runs an attempt among the ranks that arrive in time, or in a meeting given.
            work: exchanges gradients over `peers`; runs again without members that are lost meanwhile.
        """
        strategy, gradients, before = self.strategy, self.strategy.site.gradients, self.strategy.context
        if before.scaler is not None:
            raise InputError(
                f"{strategy.where}: time-outs for absent ranks do not go with autocast: fp16, whose scaler unscales "
                "gradients once; use bf16, or leave the time-outs out"
            )
        kept = [None if p.grad is None else p.grad.detach().clone() for p in strategy.trainable]
        state = [each.state_of(each.own_state) for each in strategy.acting]
        owed = strategy.site.state_dict()
        num_attempts = 0

        def restore() -> None:
            for each, saved in zip(strategy.acting, state, strict=True):
                each.load_state_of(saved)
            strategy.site.load_state_dict(owed)

        def attempt(peers: Communicator, weights: Sequence[float]) -> bool:
            nonlocal num_attempts
            if num_attempts:
                for parameter, gradient in zip(strategy.trainable, kept, strict=True):
                    parameter.grad = None if gradient is None else gradient.clone()
                restore()
                if gradients is not None:
                    gradients.forget()
            if num_attempts or self._early is None:
                strategy.shared_state.context = before
                self._join(peers, weights)
            num_attempts += 1
            work()
            return True

        is_in = among(attempt, self._early)
        if num_attempts and not is_in:
            restore()
        if gradients is not None:
            gradients.forget()
            gradients.join(strategy.comm)
        self.peers, self._early, strategy.shared_state.context = None, None, before
        return bool(is_in)

    def _join(self, peers: Communicator, weights: Sequence[float]) -> None:
        """Exchange with `peers`, weighed by their samples, from now on."""
        strategy = self.strategy
        context = strategy.context
        samples_of = [int(weight) for weight in weights] if context.samples else ()
        self.peers = peers
        strategy.shared_state.context = replace(context, samples_of=samples_of, comm=peers)
        if strategy.site.gradients is not None:
            strategy.site.gradients.join(peers, strategy.context.weight)

    # --- state that heals ---------------------------------------------------------------------------------

    def packed(self) -> list[Tensor]:
        """State that is equal on all ranks, flat for `unpack`."""
        strategy = self.strategy
        tensors: dict[str, Tensor] = {}
        state = {
            "model": {**dict(strategy.model.named_parameters()), **dict(strategy.model.named_buffers())},
            "optim": strategy.optim.state_dict(),
            "healed": [each.state_of(each.healed) for each in strategy.acting],
        }
        form = json.dumps(encode(state, tensors), separators=(",", ":")).encode()
        return [torch.frombuffer(bytearray(form), dtype=torch.uint8), *tensors.values()]

    @torch.no_grad()
    def unpack(self, packed: Sequence[Tensor]) -> None:
        """Take over another rank's `packed`."""
        strategy, (form, *tensors) = self.strategy, packed
        by_name = {str(number): tensor for number, tensor in enumerate(tensors)}
        state = decode(json.loads(bytes(form.tolist())), by_name)
        model = {**dict(strategy.model.named_parameters()), **dict(strategy.model.named_buffers())}
        for name, held in model.items():
            held.copy_(state["model"][name])
        optim = state["optim"]
        if strategy.scheduler is not None:
            optim = {**optim, "param_groups": strategy.optim.state_dict()["param_groups"]}
        strategy.optim.load_state_dict(optim)
        for each, healed in zip(strategy.acting, state["healed"], strict=True):
            each.load_state_of(healed)
