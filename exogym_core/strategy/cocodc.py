"""CoCoDC: the fragment that changed most is sent, and corrected for its delay when its mean has arrived."""

from __future__ import annotations

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import name_in, number, option, options_of, positive_int, whole_number
from exogym_core.strategy.parts.flat import flatten, unflatten, write_back
from exogym_core.strategy.parts.outer import OuterAveraging
from exogym_core.strategy.parts.rounds import FragmentOptimizer, FragmentOptions, Fragments, second_order
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError

__all__ = ["CoCoDCCommunicator", "CoCoDCStrategy"]


class CoCoDCStrategy(Strategy, name="CoCoDC", experimental=True):
    """Streaming DiLoCo with delays compensated, and fragments chosen by how fast they change.

    A fragment p sent as theta_s after step s receives the mean of `phi - theta_s` tau steps later; that makes
    an outer step, and the worker's own steps since then are taken again from there, by a first-order expansion:

        g = (theta_s - theta) / tau,  D = (phi - theta_s) / I_p
        theta <- phi - tau (g + lambda g * g * D)

    with I_p the steps between its last two departures. `scale="relative"` has `lambda |g| / |g * g * D|` for lambda
    and no I_p, tensor by tensor. Every H / N steps the fragment leaves that has not done so for H steps, or else the
    one of the largest `R_p = |mean of phi - theta_s| / (I_p size)`, which all ranks know. One that is away stays away.

    Second-hand: the paper's equations could not be read. The rule is that of code whose paths and options are those of
    its first author (there "dc", fragments choosing as in its earlier form: the later one asks everyone at each
    choice). Its relative scale is the default, and lambda 0.5 as in its run of 150M parameters with H = 100.

    Bytes: `2 (n - 1) / n` times a fragment's encoded bytes per worker, N times every H steps.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        outer_optim_spec: the outer one (SGD, 0.4, Nesterov momentum 0.9 by default).
        H: steps in which each fragment leaves at least once (100).
        tau: steps between a fragment's departure and its application; also `fragment_sync_delay`.
        transmissions: N, fragments sent in H steps; at least the number of fragments, one a step at
            most.
        compensation: lambda, strength of the correction; 0: a worker's steps since departure are kept unchanged.
        scale: "relative" (lambda is the correction's norm over the norm of the corrected steps, tensor by tensor) or
            "fixed" (lambda multiplies the second-order term).
        num_fragments, fragments, pattern: see `FragmentOptions`.
        codec, error_feedback, aggregate, buckets, exchange: of the mean, see `OuterAveraging`.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Zhu et al., Cross-region Model Training with Communication-Computation Overlapping and Delay Compensation,
        arXiv 2504.17672.
    """

    H: int = option(100, positive_int)
    tau: int = option(5, whole_number)
    transmissions: int = option(8, positive_int)
    compensation: float = option(0.5, number)
    scale: str = option("relative", name_in("relative", "fixed"))
    outer_optimizer: FragmentOptimizer = options_of(FragmentOptimizer)
    cut: FragmentOptions = options_of(FragmentOptions)
    averaging: OuterAveraging = options_of(OuterAveraging)
    positional = ("optim_spec", "outer_optim_spec", "H")

    judged = "outer"
    sends_by_value = True
    state = State("outer", "num_rounds", "intervals", "rates")

    def prepare(self) -> None:
        """Cut the parameters into fragments; reset intervals and rates."""
        self.outer = self.fragments = Fragments(
            self, self.cut, self.H, self.outer_optimizer.outer_optim(), self.averaging
        )
        if any(whole.shape != piece.shape for whole, piece in zip(self.trainable, self.held, strict=True)):
            raise InputError(f"{self.where}: corrects whole tensors; leave sharding out")
        self.every = max(1, self.H // max(self.transmissions, len(self.fragments)))
        self.num_rounds = 0  # of all fragments
        self.intervals = [0] * len(self.fragments)  # steps between a fragment's last two departures
        self.rates = [0.0] * len(self.fragments)  # R_p, as it was when p was last merged

    def communicate(self, step: int) -> None:
        """Merge fragments whose means have arrived, then choose and send one."""
        fragments = self.fragments
        fragments.go_on()
        for p in fragments.away:
            if step == fragments.sent_at[p] + self.tau:
                self.merge(p)
        if step % self.every == 0 and (chosen := self.choose(step)) is not None:
            self.intervals[chosen] = step - fragments.sent_at[chosen]
            fragments.send(chosen, step)
            if not self.tau:
                self.merge(chosen)

    @property
    def round_steps(self) -> int | None:  # type: ignore[override]
        """Steps in which each fragment is sent once, in order, as in plans; known after `setup`."""
        if self.outer is None:
            return None
        return self.every * max(len(self.fragments), -(-self.tau // self.every))

    def choose(self, step: int) -> int | None:
        """Fragment that has waited for H steps, else that never left, else of the largest rate; None: all are away."""
        here = [p for p in range(len(self.fragments)) if p not in self.fragments.away]
        late = [p for p in here if step - self.fragments.sent_at[p] >= self.H]
        new = [p for p in here if self.fragments.sent_at[p] == 0]
        by_rate = sorted(here, key=lambda p: (-self.rates[p], self.fragments.sent_at[p]))
        return next(iter(late or new or by_rate), None)

    @torch.no_grad()
    def merge(self, p: int) -> None:
        """An outer step on phi_p; then phi_p, and this worker's steps since, corrected for where they began."""
        outer, outer_round = self.fragments.outers[p], self.fragments.take(p)
        means = outer_round.wait()
        self.num_rounds += 1
        change = torch.cat([mean.reshape(-1) for mean in means])
        # A plan has no values: then the one that has waited longest leaves.
        if len(change) and not change.is_meta:
            self.rates[p] = float(change.double().norm()) / (self.intervals[p] * len(change))
        sent = [phi - moved for phi, moved in zip(outer.flats, outer_round.sent, strict=True)]
        outer.apply(means)
        if not self.tau:
            outer.reset_parameters()  # no steps since, though `sent`, which is rounded, may differ from it
            return
        steps = None if self.scale == "relative" else self.tau * self.intervals[p]
        for phi, then, bucket in zip(outer.flats, sent, outer.buckets, strict=True):
            trained = unflatten(then - flatten(bucket), bucket)
            apart = unflatten(phi - then, bucket)
            parts = zip(trained, apart, strict=True)
            since = [second_order(t, d, self.compensation, steps) for t, d in parts]
            write_back(phi - flatten(since), bucket)

    def finish(self) -> None:
        """Merge fragments in flight."""
        for p in self.fragments.away:
            self.merge(p)


class CoCoDCCommunicator(CoCoDCStrategy, part="CoCoDC", positional=("H",)):
    """CoCoDC as a member of a `Chain`."""
