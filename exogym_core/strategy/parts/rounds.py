"""Members of strategies with rounds: means of encoded errors, rounds under way while training continues, fragments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from exogym_core.strategy.options import Options, name_in, option, positive_int
from exogym_core.strategy.parts.average import Flight, decoded, gathering
from exogym_core.strategy.parts.fragments import fragments_of
from exogym_core.strategy.parts.outer import GlobalModel, OuterAveraging, OuterOptimizer, OuterStep, Round
from exogym_core.strategy.parts.state import State, Stateful
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.optimizers import OptimSpec
    from exogym_core.strategy.participation.site import Site
    from exogym_core.strategy.parts.average import Steps
    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["CodedMean", "FragmentOptimizer", "FragmentOptions", "Fragments", "UnderWay"]


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


class UnderWay(Stateful):
    """Outer rounds that may be under way between two steps; a checkpoint keeps them, and they are sent again.

    Each outer step has a group of its own, so that the collectives of several are on their way at once.

    Args:
        outers: the outer steps.
        site: this rank's.
    """

    state = State("outers")

    def __init__(self, outers: Sequence[OuterStep], site: Site) -> None:
        self.outers, self._sites = list(outers), [site.apart() for _ in outers]
        self._is_staged = site.inside is not None or any(each.averaging.codec is not None for each in outers)
        self.rounds: dict[int, Round] = {}

    def go_on(self) -> None:
        """Post the next calls of rounds of several calls, where their inputs have arrived; never waits."""
        if self._is_staged:
            for each in self.rounds.values():
                each.go_on()

    def send(self, p: int = 0) -> None:
        """Send the pseudo-gradients of an outer step on their way to their mean."""
        self.rounds[p] = self.outers[p].begin(self._sites[p])

    def state_dict(self) -> dict[str, Any]:
        """Outer steps, and the rounds under way."""
        return {
            **super().state_dict(),
            "rounds": {str(p): each.state_dict() for p, each in self.rounds.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore outer steps; rounds that were under way are sent again."""
        super().load_state_dict(state)
        saved = {int(p): each for p, each in state["rounds"].items()}
        self.rounds = {p: self.outers[p].resumed(self._sites[p], each) for p, each in saved.items()}


class FragmentOptimizer(OuterOptimizer):
    """Outer optimizer of fragments; the default's learning rate is 0.4."""

    default_lr: ClassVar[float] = 0.4


class FragmentOptions(Options):
    """Fragments of a model.

    Args:
        num_fragments: P; a third of the model's layers if it is not given, one at least.
        fragments: instead, which modules make up each: a list of names, or of lists of names; what none names is a
            fragment of its own.
        pattern: "strided" (fragment p has layers p, p + P, ...) or "sequential" (neighbouring layers).
    """

    num_fragments: int | None = option(None, positive_int)
    fragments: Sequence[str | Sequence[str]] | None = option(None)
    pattern: str = option("strided", name_in("strided", "sequential"))

    def check_rounds(self, where: str, H: int, tau: int) -> None:  # noqa: N803
        """Refuse options under which a fragment would be sent again before its mean arrives."""
        if tau >= H and tau > 0:
            raise InputError(
                f"{where}: tau={tau} must be below H={H}: a fragment must arrive before it is sent again"
            )
        if self.num_fragments is not None and self.num_fragments > H:
            raise InputError(f"{where}: num_fragments={self.num_fragments} must be at most H={H}")
        if self.num_fragments is not None and self.fragments is not None:
            raise InputError(f"{where}: num_fragments and fragments say the same; give one of them")


class Fragments(UnderWay, GlobalModel):
    """Global parameters and outer optimizers of a model's fragments, which leave one by one.

    Args:
        strategy: whose parameters are cut.
        options: how.
        num_steps: H, in which each leaves once.
        optimizer, averaging: of the outer steps.

    Attributes:
        members: indices of parameters, by fragment.
        outers: outer steps, by fragment.
        sent_at: the step after which each last left; 0 before it has.
    """

    state = State("sent_at")

    def __init__(
        self,
        strategy: Strategy,
        options: FragmentOptions,
        num_steps: int,
        optimizer: OptimSpec,
        averaging: OuterAveraging,
    ) -> None:
        names = [name for name, _ in strategy.named_trainable()]
        self.members = fragments_of(names, options, num_steps, strategy.where)
        averaging = averaging.charged(strategy)
        parts = [[strategy.held[index] for index in members] for members in self.members]
        super().__init__([OuterStep(part, optimizer, averaging) for part in parts], strategy.site)
        self.sent_at = [0] * len(parts)

    def back(self, step: int) -> list[int]:
        """Fragments under way that have left after this step."""
        return [p for p in sorted(self.rounds) if self.sent_at[p] == step]

    def __len__(self) -> int:
        return len(self.members)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The outer optimizers of all fragments."""
        return [outer.optim for outer in self.outers]

    @property
    def theta(self) -> list[Tensor]:
        """Global parameters, each fragment as last applied, in the model's order."""
        values: dict[int, Tensor] = {}
        for members, outer in zip(self.members, self.outers, strict=True):
            values |= zip(members, outer.theta, strict=True)
        return [values[index] for index in range(len(values))]
