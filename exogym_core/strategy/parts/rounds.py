"""Rounds of local steps that end in an outer step: whole, encoded to all ranks, or in fragments."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.chain import Module, RoundModule
from exogym_core.strategy.options import name_in, number, option, positive_int, whole_number
from exogym_core.strategy.parts.average import Averaging, decoded, gathering
from exogym_core.strategy.parts.flight import Flight
from exogym_core.strategy.parts.fragments import fragments_of
from exogym_core.strategy.parts.outer import OuterOptions, OuterStep, Round
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from exogym_core.strategy.optimizers import OptimSpec
    from exogym_core.strategy.parts.codecs import Codec
    from exogym_core.strategy.parts.flight import Steps

__all__ = ["CodedRounds", "FragmentOptions", "Fragments", "OuterRounds"]


class OuterRounds(RoundModule):
    """Rounds of local steps that end in an outer step: `begin` sends what it needs, `apply` takes that round.

    Attributes:
        outer: the global parameters theta and their optimizer; set when it enters a chain.
    """

    judged: str | None = "outer"
    state = State("num_rounds")
    outer: OuterStep

    @property
    def averaging(self) -> Averaging:
        """Average of the outer gradients."""
        averaging: Averaging = self.options.averaging()
        return averaging

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Begin with the same theta on every rank."""
        averaging = self.averaging.charged(self.strategy)
        self.outer, self.num_rounds = OuterStep(self.scope.parameters, self.outer_spec(), averaging), 0

    def outer_spec(self) -> OptimSpec:
        """The outer optimizer, yet to be built."""
        spec: OptimSpec = self.options.outer_optim()
        return spec

    def end_round(self, number: int) -> None:
        """Send the outer gradient, wait for its mean, and apply that."""
        self.apply(self.begin())

    def begin(self) -> Round:
        """Send the outer gradient, `theta - theta_i`, on its way to its mean over workers."""
        return self.outer.begin(self.scope.site, blocking=True)

    def apply(self, outer_round: Round) -> None:
        """Take an outer step along the mean."""
        self.advance(outer_round.wait())

    def advance(self, gradients: Sequence[Tensor]) -> None:
        """Take an outer step along flat `gradients`; every worker continues from the new theta."""
        self.outer.apply(gradients)
        self.outer.reset_parameters()
        self.num_rounds += 1

    @property
    def optimizers(self) -> list[Optimizer]:
        """List with the outer optimizer."""
        return [self.outer.optim]

    def judged_state(self) -> dict[str, Tensor] | None:
        """Theta; of a shard the parts that this rank holds."""
        return self.named(self.outer.theta)

    def state_dict(self) -> dict[str, Any]:
        """Theta, the outer optimizer's state, and the declared state."""
        return {**self.outer.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, that of the outer step included."""
        self.outer.load_state_dict(state)
        super().load_state_dict(state)


class RoundUnderWay(Module):
    """Module with a round that may be under way between two steps, which a checkpoint keeps and sends again."""

    _under_way: Round | None = None

    def apply(self, outer_round: Any) -> None:
        """Take in what a round has brought."""
        raise NotImplementedError

    def resumed(self, saved: Mapping[str, Any]) -> Round:
        """The round of a `Round.state_dict`, sent again."""
        raise NotImplementedError

    def at_end(self) -> None:
        """Apply what is in flight."""
        if self._under_way is not None:
            before, self._under_way = self._under_way, None
            self.apply(before)

    def state_dict(self) -> dict[str, Any]:
        """Declared state, and the round under way."""
        return {**super().state_dict(), "under_way": self._under_way and self._under_way.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the declared state, and send the round under way again."""
        super().load_state_dict(state)
        saved = state["under_way"]
        self._under_way = None if saved is None else self.resumed(saved)


class CodedRounds(OuterRounds):
    """An outer step every `H` steps along what all ranks have sent of their errors.

    With d = theta - theta_i, how far this rank has gone in the round, negated::

        e = beta e + gain d;  s = decoded(encoded(e));  e = e - s
        outer gradient = mean over ranks of s

    Attributes:
        beta: how much of an error is left a round later.
        gain: of the displacement.
        among_senders: of each value the mean is over the ranks that have sent one other than zero.
        encoded_mean: the mean is encoded and decoded once more.
    """

    takes_sites = False
    state = State("errors")
    averaging = Averaging()
    beta: float = 1.0
    gain: float = 1.0
    among_senders: bool = False
    encoded_mean: bool = False

    @abstractmethod
    def codec(self, tensors: Sequence[Tensor]) -> Codec:
        """Codec of the flat tensor made of `tensors`, the same on all ranks in a round."""

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Begin with zero errors, and charge the coding of each bucket.

        Raises:
            InputError: the chain has sites, or `compute.coding` has no speed for the codec.
        """
        super()._init_node(model, rank, num_nodes)
        self.errors = [torch.zeros_like(flat) for flat in self.outer.flats]
        for bucket in self.outer.buckets:
            self.strategy.charged(self.codec(bucket))

    @torch.no_grad()
    def begin(self) -> Round:
        """Send this rank's message on its way to all others."""
        sent = self.outer.pseudo_gradients()
        work = zip(sent, self.errors, self.outer.buckets, strict=True)
        return Round(sent, [Flight(self._mean(d, error, self.codec(bucket))) for d, error, bucket in work])

    def _mean(self, displacement: Tensor, error: Tensor, codec: Codec) -> Steps[Tensor]:
        codec = self.strategy.charged(codec).on(error.device)
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


class FragmentOptions(OuterOptions):
    """Fragments with rounds of their own, besides an outer step's options; `outer_lr` is 0.4.

    Args:
        num_fragments: P; a third of the model's layers if it is not given, one at least.
        fragments: instead, which modules make up each: a list of names, or of lists of names; what none names is a
            fragment of its own.
        pattern: "strided" (fragment p has layers p, p + P, ...) or "sequential" (neighbouring layers).
        tau: steps between a fragment's departure and its application; also `fragment_sync_delay`.
    """

    outer_lr: float | None = option(0.4, number)
    num_fragments: int | None = option(None, positive_int)
    fragments: Sequence[str | Sequence[str]] | None = option(None)
    pattern: str = option("strided", name_in("strided", "sequential"))
    tau: int = option(1, whole_number)

    def check(self, where: str) -> None:
        """Refuse a fragment that would leave before it is back."""
        super().check(where)
        if self.tau >= self.H and self.tau > 0:
            raise InputError(
                f"{where}: tau={self.tau} must be below H={self.H}: a fragment must arrive before it is sent again"
            )
        if self.num_fragments is not None and self.num_fragments > self.H:
            raise InputError(f"{where}: num_fragments={self.num_fragments} must be at most H={self.H}")
        if self.num_fragments is not None and self.fragments is not None:
            raise InputError(f"{where}: num_fragments and fragments say the same; give one of them")


class Fragments(Module):
    """Rounds of a model's fragments that overlap training. Subclasses say when they leave and how they are merged.

    Each fragment has a group of its own, so that the collectives of several are on their way at once.

    Attributes:
        members: indices of parameters, by fragment.
        outers: the fragments' global parameters and outer optimizers.
        sent_at: the step after which each last left; 0 before it has.
    """

    judged = "outer"
    state = State("outers", "sent_at", num_applied="num_rounds")
    options: FragmentOptions

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Cut the parameters into fragments."""
        where, names = type(self.strategy).__name__, [name for name, _ in self.strategy.named_trainable()]
        options = self.options
        self.members = fragments_of(names, options, where)
        averaging = options.averaging().charged(self.strategy)
        parts = [[self.scope.parameters[index] for index in members] for members in self.members]
        self.outers = [OuterStep(part, options.outer_optim(), averaging) for part in parts]
        self._sites = [self.scope.site.apart() for _ in self.members]
        self._is_staged = averaging.codec is not None or self.scope.site.inside is not None
        self._under_way: dict[int, Round] = {}
        self.sent_at = [0] * len(self.members)
        self.num_rounds = 0  # of all fragments

    def leaves(self, p: int, step: int) -> bool:
        """True if fragment p leaves after this step."""
        return False

    def merge(self, p: int, outer_round: Round) -> None:
        """Take an outer step on phi_p, and set this rank's parameters of the fragment."""
        raise NotImplementedError

    def after_update(self) -> None:
        """End the rounds that are due, begin those that are due."""
        step = self.strategy.local_step + 1
        if self._is_staged:
            for outer_round in self._under_way.values():
                outer_round.go_on()
        for p in range(len(self.outers)):
            if p in self._under_way and step == self.sent_at[p] + self.options.tau:
                self.apply(p, self._under_way.pop(p))
            if self.leaves(p, step):
                self.send(p, step)

    def send(self, p: int, step: int) -> None:
        """Send the fragment after this step; without a delay, wait for it."""
        self.sent_at[p] = step
        self._under_way[p] = self.begin(p)
        if not self.options.tau:
            self.apply(p, self._under_way.pop(p))

    def begin(self, p: int) -> Round:
        """Send the fragment's outer gradient, `phi_p - theta_p`, on its way to its mean."""
        return self.outers[p].begin(self._sites[p])

    def apply(self, p: int, outer_round: Round) -> None:
        """Wait for a round and merge it."""
        self.merge(p, outer_round)
        self.num_rounds += 1

    def at_end(self) -> None:
        """Apply what is in flight."""
        for p in sorted(self._under_way):
            self.apply(p, self._under_way.pop(p))

    @property
    def optimizers(self) -> list[Optimizer]:
        """Outer optimizers, one a fragment."""
        return [outer.optim for outer in self.outers]

    def judged_state(self) -> dict[str, Tensor]:
        """Phi, each fragment as last applied."""
        values: dict[int, Tensor] = {}
        for members, outer in zip(self.members, self.outers, strict=True):
            values |= zip(members, outer.theta, strict=True)
        return self.named([values[index] for index in range(len(values))])

    def state_dict(self) -> dict[str, Any]:
        """Declared state, and the rounds under way."""
        under_way = {str(p): outer_round.state_dict() for p, outer_round in self._under_way.items()}
        return {**super().state_dict(), "under_way": under_way}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it; what was under way is sent again."""
        super().load_state_dict(state)
        saved = {int(p): each for p, each in state["under_way"].items()}
        self._under_way = {p: self.outers[p].resumed(self._sites[p], each) for p, each in saved.items()}
