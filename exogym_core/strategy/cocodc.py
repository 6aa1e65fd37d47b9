"""CoCoDC: fragments that leave when they have changed most, and are corrected for their delay when they are back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.options import name_in, number, option, positive_int, whole_number
from exogym_core.strategy.parts.flat import flatten, unflatten, write_back
from exogym_core.strategy.parts.rounds import FragmentOptions, Fragments
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from exogym_core.strategy.parts.outer import Round

__all__ = ["CoCoDCCommunicator", "CoCoDCOptions", "CoCoDCStrategy"]


class CoCoDCOptions(FragmentOptions):
    """Options of CoCoDC besides fragments and an outer step.

    Args:
        tau: steps between a fragment's departure and its application; also `fragment_sync_delay`.
        transmissions: N, fragments that leave in H steps; as many as there are fragments at least, one a step at
            most.
        compensation: lambda, how strong the correction is; 0 keeps what a worker has trained meanwhile as it is.
        scale: "relative" (lambda is the correction's norm over that of what it corrects, tensor by tensor) or "fixed"
            (lambda multiplies the second-order term).
    """

    tau: int = option(5, whole_number)
    transmissions: int = option(8, positive_int)
    compensation: float = option(0.5, number)
    scale: str = option("relative", name_in("relative", "fixed"))


class CoCoDCCommunicator(Fragments, name="CoCoDC"):
    """Departure of the fastest changing fragment every `H / transmissions` steps; none waits longer than H.

    Args:
        H: steps in which each fragment leaves at least once.
        options: of `CoCoDCOptions`.
    """

    Options = CoCoDCOptions
    state = State("intervals", "rates")
    sends_by_value = True
    options: CoCoDCOptions

    positional = ("H",)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Reset intervals and rates."""
        super()._init_node(model, rank, num_nodes)
        whole = zip(self.strategy.trainable, self.scope.parameters, strict=True)
        if any(parameter.shape != piece.shape for parameter, piece in whole):
            raise InputError(f"{type(self.strategy).__name__}: corrects whole tensors; leave sharding out")
        self.intervals = [0] * len(self.members)  # steps between a fragment's last two departures
        self.rates = [0.0] * len(self.members)  # R_p, as it was when p was last merged

    def after_update(self) -> None:
        """Take in what has come, then choose what leaves."""
        super().after_update()
        step = self.strategy.local_step + 1
        most = max(self.options.transmissions, len(self.members))
        if step % max(1, self.options.H // most) == 0 and (chosen := self.choose(step)) is not None:
            self.intervals[chosen] = step - self.sent_at[chosen]
            self.send(chosen, step)

    @property
    def round_steps(self) -> int | None:
        """Steps in which all fragments leave in turn, as they do without values; known after `setup`."""
        if not hasattr(self, "members"):
            return None
        every = max(1, self.options.H // max(self.options.transmissions, len(self.members)))
        return every * max(len(self.members), -(-self.options.tau // every))

    def choose(self, step: int) -> int | None:
        """Fragment that has waited for H steps, else that never left, else of the largest rate; None: all are away."""
        here = [p for p in range(len(self.members)) if p not in self._under_way]
        late = [p for p in here if step - self.sent_at[p] >= self.options.H]
        new = [p for p in here if self.sent_at[p] == 0]
        by_rate = sorted(here, key=lambda p: (-self.rates[p], self.sent_at[p]))
        return next(iter(late or new or by_rate), None)

    @torch.no_grad()
    def merge(self, p: int, outer_round: Round) -> None:
        """An outer step on phi_p; then phi_p, and this worker's steps since, corrected for where they began."""
        outer, means = self.outers[p], outer_round.wait()
        num_values = sum(mean.numel() for mean in means)
        length = torch.cat([mean.reshape(-1) for mean in means]).double().norm()
        if not length.is_meta:  # a plan has no values: the fragment that has waited longest leaves
            self.rates[p] = float(length) / (self.intervals[p] * num_values)
        sent = [phi - moved for phi, moved in zip(outer.flats, outer_round.sent, strict=True)]
        outer.apply(means)
        if not self.options.tau:
            # No steps since, though `sent`, which is rounded, may differ from the parameters.
            outer.reset_parameters()
            return
        for phi, then, bucket in zip(outer.flats, sent, outer.buckets, strict=True):
            trained = unflatten(then - flatten(bucket), bucket)
            apart = unflatten(phi - then, bucket)
            since = [t + self._correction(p, t, d) for t, d in zip(trained, apart, strict=True)]
            write_back(phi - flatten(since), bucket)

    def _correction(self, p: int, trained: Tensor, apart: Tensor) -> Tensor:
        """`tau lambda g * g * D`; `trained` is `tau g`."""
        options, wide = self.options, torch.promote_types(trained.dtype, torch.float32)
        moved, away = trained.to(wide), apart.to(wide)
        term = moved * moved * away
        if options.scale == "relative":
            term = (
                term / term.norm().clamp(min=torch.finfo(wide).tiny) * (options.compensation * moved.norm())
            )
        else:
            term = term * (options.compensation / (max(options.tau, 1) * self.intervals[p]))
        return term.to(trained.dtype)


class CoCoDCStrategy(Composition, name="CoCoDC"):
    """Streaming DiLoCo with delays compensated, and fragments chosen by how fast they change (second-hand).

    A fragment p that left as theta_s after step s is back tau steps later with the mean of `phi - theta_s`; that makes
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
        options: of `CoCoDCOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Zhu et al., Cross-region Model Training with Communication-Computation Overlapping and Delay Compensation,
        arXiv 2504.17672.
    """

    module = CoCoDCCommunicator
    positional = ("optim_spec", "outer_optim_spec", "H")
