"""Streaming DiLoCo: the model in fragments, each with rounds of its own that overlap training."""

from __future__ import annotations

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import option, options_of, positive_int, share, whole_number
from exogym_core.strategy.parts.outer import OuterAveraging
from exogym_core.strategy.parts.rounds import FragmentOptimizer, FragmentOptions, Fragments
from exogym_core.strategy.parts.state import State

__all__ = ["StreamingDiLoCoCommunicator", "StreamingDiLoCoStrategy"]


class StreamingDiLoCoStrategy(Strategy, name="StreamingDiLoCo"):
    """DiLoCo fragment by fragment, overlapped: phi_p and its momentum are equal on all ranks.

    Bytes: each of P fragments sends `2 (n - 1) / n` times its encoded bytes per worker every `H` steps: in all as
    much as DiLoCo, at most a P-th of it at a time. The paper's wire format is `codec="e3m0"`.

    With P = 1, tau = 0, alpha = 0 and `outer_lr=0.7` it is DiLoCo. torchft's `sync_every`, `fragment_sync_delay` and
    `fragment_update_alpha` are `H`, `tau` and `alpha`; its rounds begin tau steps earlier, and end where these begin.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        outer_optim_spec: the outer one (SGD, 0.4, Nesterov momentum 0.9 by default).
        H: steps between two rounds of a fragment (100); also `sync_every`.
        tau: steps between a fragment's departure and its application; also `fragment_sync_delay`.
        alpha: weight of the worker's own parameters in the mix; also `fragment_update_alpha`.
        num_fragments, fragments, pattern: see `FragmentOptions`.
        codec, error_feedback, aggregate, buckets, exchange: of the mean, see `OuterAveraging`.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512.
        Departures follow torchft's local_sgd.py.
    """

    H: int = option(100, positive_int)
    tau: int = option(1, whole_number)
    alpha: float = option(0.5, share)
    outer_optimizer: FragmentOptimizer = options_of(FragmentOptimizer)
    cut: FragmentOptions = options_of(FragmentOptions)
    averaging: OuterAveraging = options_of(OuterAveraging)
    positional = ("optim_spec", "outer_optim_spec", "H")

    judged = "outer"
    round_steps = property(lambda self: self.H)
    state = State("outer", "num_rounds")
    plain_steps = True

    def prepare(self) -> None:
        """Cut the parameters into fragments, with the same phi on every rank."""
        self.outer = self.fragments = Fragments(
            self, self.cut, self.H, self.outer_optimizer.outer_optim(), self.averaging
        )
        self.num_rounds = 0  # of all fragments

    def communicate(self, step: int) -> None:
        """Fragment p of P leaves after step `floor((p + 1) H / P)` of every H, and is merged tau steps later."""
        fragments = self.fragments
        fragments.go_on()
        for p in range(len(fragments)):
            if p in fragments.away and step == fragments.sent_at[p] + self.tau:
                self.merge(p)
            # As torchft: the first round is shorter.
            if (step - (p + 1) * self.H // len(fragments)) % self.H == 0:
                fragments.send(p, step)
                if not self.tau:
                    self.merge(p)

    def merge(self, p: int) -> None:
        """An outer step on phi_p; `theta_p = alpha theta_p + (1 - alpha) phi_p`."""
        outer, arrived = self.fragments.outers[p], self.fragments.take(p)
        outer.apply(arrived.wait())
        outer.mix(self.alpha)
        self.num_rounds += 1

    def finish(self) -> None:
        """Merge fragments in flight."""
        for p in self.fragments.away:
            self.merge(p)

    @property
    def steps_to_exchange(self) -> int:
        """Up to the step after which the next fragment leaves; those in flight may go on after any step."""
        fragments = self.fragments
        of_round = super().steps_to_exchange
        if fragments.away or of_round < 1:
            return min(of_round, 1)
        ends = ((p + 1) * self.H // len(fragments) for p in range(len(fragments)))
        return min(of_round, *((end - self.local_step - 1) % self.H + 1 for end in ends))


class StreamingDiLoCoCommunicator(StreamingDiLoCoStrategy, part="StreamingDiLoCo", positional=("H",)):
    """Streaming DiLoCo as a member of a `Chain`."""
