"""Rounds of local steps whose outer gradients go encoded to everybody, with what that loses sent later."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.communicate_optimize import CommunicationModule
from exogym_core.strategy.exchange import refuse_sites
from exogym_core.strategy.outer_rounds import OuterRounds
from exogym_core.strategy.parts.flight import Flight
from exogym_core.strategy.parts.gathered import decoded, gathering
from exogym_core.strategy.parts.outer import OuterStep, Round

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from exogym_core.strategy.chain import Chain, Scope
    from exogym_core.strategy.options.optim import OptimSpec
    from exogym_core.strategy.parts.codecs import Codec
    from exogym_core.strategy.parts.flight import Steps

__all__ = ["CodedRounds"]


class CodedRounds(OuterRounds, CommunicationModule):
    """An outer step every `H` steps along what all ranks have sent of their errors.

    With d = theta - theta_i, how far this rank has gone in the round, negated::

        e = beta e + gain d;  s = decoded(encoded(e));  e = e - s
        outer gradient = mean over ranks of s

    Args:
        H: local steps a round.
        outer_optim: steps along it.
        beta: how much of an error is left a round later.
        gain: of the displacement.
        among_senders: of each value the mean is over the ranks that have sent one other than zero.
        encoded_mean: the mean is encoded and decoded once more.
    """

    def __init__(
        self,
        H: int,  # noqa: N803
        outer_optim: OptimSpec,
        beta: float,
        gain: float = 1.0,
        *,
        among_senders: bool = False,
        encoded_mean: bool = False,
    ) -> None:
        self.H, self.outer_optim, self.beta, self.gain = H, outer_optim, beta, gain
        self.among_senders, self.encoded_mean = among_senders, encoded_mean

    @abstractmethod
    def codec(self, tensors: Sequence[Tensor]) -> Codec:
        """How the flat tensor made of `tensors` travels; for each of them in this round the same on all ranks."""

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Every rank begins with the same theta and without errors."""
        super().enter(strategy, scope)
        refuse_sites(self, scope)
        self.outer, self.num_rounds = OuterStep(scope.parameters, self.outer_optim), 0
        self.errors = [torch.zeros_like(flat) for flat in self.outer.flats]
        for bucket in self.outer.buckets:
            self.strategy.charged(self.codec(bucket))  # refuses a codec without a speed now
        return scope

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """A round has H local steps."""
        if (local_step + 1) % self.H == 0:
            self.apply(self.begin())

    @torch.no_grad()
    def begin(self) -> Round:
        """This rank's message is on its way to all others."""
        sent = self.outer.pseudo_gradients()
        work = zip(sent, self.errors, self.outer.buckets, strict=True)
        return Round(sent, [Flight(self._steps(d, error, self.codec(bucket))) for d, error, bucket in work])

    def _steps(self, displacement: Tensor, error: Tensor, codec: Codec) -> Steps[Tensor]:
        codec = self.strategy.charged(codec)
        error.mul_(self.beta).add_(displacement, alpha=self.gain)
        messages = yield from gathering(self.comm, codec.encode(error))
        total, count = torch.zeros_like(error), torch.zeros_like(error)
        for rank, values in enumerate(decoded(codec, messages, error)):
            total += values
            count += values != 0
            if rank == self.comm.rank:
                error.sub_(values)
        mean = total / (count.clamp(min=1) if self.among_senders else len(messages))
        return codec.decode(codec.encode(mean), len(mean)).to(mean.dtype) if self.encoded_mean else mean

    def state_dict(self) -> dict[str, Any]:
        """Also the errors."""
        return {**super().state_dict(), "errors": [error.clone() for error in self.errors]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        super().load_state_dict(state)
        for error, saved in zip(self.errors, state["errors"], strict=True):
            error.copy_(saved)
