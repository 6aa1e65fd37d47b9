"""Means over sites of other values than pseudo-gradients: parameters, moments of optimizers, encoded errors."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import nn

from exogym_core.strategy.optimizers import ensure_optim_spec
from exogym_core.strategy.parts.average import Buckets, Flight, RoundAveraging, decoded, gathering
from exogym_core.strategy.parts.flat import flatten, write_back
from exogym_core.strategy.parts.outer import SharedModel
from exogym_core.strategy.parts.state import State, Stateful

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.parts.average import Steps
    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["MOMENTS", "CodedMean", "MomentMean", "ParameterMean"]


class ParameterMean(SharedModel):
    """Mean of parameters over sites, in their place."""

    state = State("residuals", result="theta")

    def __init__(self, parameters: Sequence[Tensor], averaging: RoundAveraging) -> None:
        super().__init__(parameters, averaging)
        self._parameters, self._theta = parameters, [parameter.detach().clone() for parameter in parameters]

    @property
    def theta(self) -> list[Tensor]:
        """Parameters after the last mean; before it the initial ones."""
        return self._theta

    @torch.no_grad()
    def values(self, comm: Communicator | None = None) -> list[Tensor]:
        """Parameters of this rank, a flat tensor for each bucket."""
        return list(map(flatten, self.buckets))

    def packed(self) -> list[Tensor]:
        """The last mean, which another rank takes over."""
        return [flatten([self.theta[index] for index in bucket]) for bucket in self.plan]

    @torch.no_grad()
    def adopt(self, packed: Sequence[Tensor]) -> None:
        """Set the parameters to flat means."""
        for flat, bucket in zip(packed, self.buckets, strict=True):
            write_back(flat, bucket)
        for value, parameter in zip(self.theta, self._parameters, strict=True):
            value.copy_(parameter.detach())

    unpack = adopt


#: Names of moments in torch's optimizers.
MOMENTS = {
    "first": ("exp_avg", "momentum_buffer"),
    "second": ("exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg"),
}


class MomentMean:
    """Mean of a strategy's local optimizer's first or second moments over sites, as they are.

    What the optimizer does not keep is not sent: SGD without momentum has no moments. Of a parameter that a rank has
    never updated its moment counts as zero there.

    Args:
        strategy: whose optimizer is built.
        moment: "first" or "second".
        buckets: how they travel.
    """

    def __init__(self, strategy: Strategy, moment: str, buckets: Buckets) -> None:
        self.averaging = RoundAveraging(buckets=buckets.buckets, exchange=buckets.exchange)
        self.strategy, self.names = strategy, MOMENTS[moment]
        spec = ensure_optim_spec(strategy.optim_spec)
        kept: dict[Tensor, list[str]] = {}
        for group in strategy.optim.param_groups:
            tried = nn.Parameter(torch.zeros([1] * group["params"][0].dim()))
            tried.grad = torch.zeros_like(tried)
            optim = spec.build([{**group, "params": [tried]}])
            optim.step()
            kept |= {
                key: [name for name in self.names if name in optim.state[tried]] for key in group["params"]
            }
        self._kept = [kept.get(parameter, []) for parameter in strategy.held]

    @torch.no_grad()
    def take(self) -> None:
        """Average the moments over sites."""
        site = self.strategy.site
        if site.between.world_size == 1:
            return
        for name in self.names:
            has_it = [name in names for names in self._kept]
            held = list(compress(self.strategy.held, has_it))
            kept = [self.strategy.optim.state.get(each, {}).get(name) for each in held]
            moments = [torch.zeros_like(p) if m is None else m for p, m in zip(held, kept, strict=True)]
            buckets = [[moments[index] for index in bucket] for bucket in self.averaging.plan(moments)]
            means = self.averaging.means(site, list(map(flatten, buckets)), [None] * len(buckets))
            for mean, bucket in zip(means, buckets, strict=True):
                write_back(mean, bucket)


class CodedMean(Stateful):
    """Mean over ranks of their encoded errors, each sent to all others.

    With d the values of this rank::

        e = beta e + gain d;  s = decoded(encoded(e));  e = e - s
        mean over ranks of s

    Args:
        flats: tensors like the values.
        beta: share of an error kept for the next round.
        gain: of the values.
        among_senders: of each value the mean is over the ranks that have sent one other than zero.
        encoded_mean: the mean is encoded and decoded once more.
    """

    state = State("errors")

    def __init__(
        self,
        flats: Sequence[Tensor],
        *,
        beta: float = 1.0,
        gain: float = 1.0,
        among_senders: bool = False,
        encoded_mean: bool = False,
    ) -> None:
        self.errors = [torch.zeros_like(flat) for flat in flats]
        self.beta, self.gain = beta, gain
        self.among_senders, self.encoded_mean = among_senders, encoded_mean

    @torch.no_grad()
    def of(self, values: Sequence[Tensor], codecs: Sequence[Codec], comm: Communicator) -> list[Tensor]:
        """Means of flat `values`, each by its codec, the same on all ranks of `comm`; waits for them."""
        work = zip(values, self.errors, codecs, strict=True)
        flights = [Flight(self._steps(each, error, codec, comm)) for each, error, codec in work]
        return [flight.wait() for flight in flights]

    def _steps(self, values: Tensor, error: Tensor, codec: Codec, comm: Communicator) -> Steps[Tensor]:
        codec = codec.on(error.device)
        error.mul_(self.beta).add_(values, alpha=self.gain)
        messages = yield from gathering(comm, codec.encode(error))
        total, count = torch.zeros_like(error), torch.zeros_like(error)
        for rank, sent in enumerate(decoded(codec, messages, error)):
            total += sent
            count += sent != 0
            if rank == comm.rank:
                error.sub_(sent)
        mean = total / (count.clamp(min=1) if self.among_senders else len(messages))
        return codec.decode(codec.encode(mean), len(mean)).to(mean.dtype) if self.encoded_mean else mean
