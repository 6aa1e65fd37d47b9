"""Async SPARTA: the sparse share is averaged while training continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import fraction, option, options_of, positive_int, share
from exogym_core.strategy.parts.flat import flatten, write_back
from exogym_core.strategy.parts.rounds import UnderWay
from exogym_core.strategy.parts.selectors import SelectionOptions
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from exogym_core.strategy.parts.rounds import Round

__all__ = ["AsyncSPARTAStrategy", "AsyncSparseCommunicator"]


class _Selection(SelectionOptions):
    """Values to average; `p_sparta` is 0.05."""

    p_sparta: float = option(0.05, fraction)


class AsyncSPARTAStrategy(Strategy, name="AsyncSPARTA", experimental=True):
    """SPARTA whose averages overlap with computing.

    An all-reduce of chosen values begins every `interval` steps; its result is applied `delay` steps later. What local
    steps have changed meanwhile stays: `theta += mean - sent` on the chosen values. With `ema` (AsyncMesh) a moving
    average, by value, of these changes stays: with `moved = theta - sent`, `kept = ema kept + (1 - ema) moved` (at the
    first average `kept = moved`), and `theta = mean + kept`.

    Bytes: `2 (n - 1) / n p P` a worker every `interval` steps, as SPARTA with that interval. Second-hand: the delay and
    the interval are as EXO's users report them, not read in code.

    Args:
        optim_spec: the optimizer of local steps (AdamW by default).
        p_sparta: the share averaged each time, above 0 and at most 1.
        index_selector: of these values, see `SelectionOptions`.
        interval: steps between the starts of averages.
        delay: local steps after which it is applied, fewer than `interval`.
        ema: weight of earlier changes in what stays of local steps, 0 to 1; 0: the latest stay whole. AsyncMesh's
            code begins at 0.5 and raises it towards 0.99, and has several averages in flight.
        options: of every Strategy.

    References:
        Beton et al., SPARTA: Improving Distributed Training Using Sparse Parameter Averaging, openreview stFPf3gzq1.
        Ajanthan et al., AsyncMesh, arXiv 2601.22442; the moving average is as in the authors' code.
    """

    selection: _Selection = options_of(_Selection)
    interval: int = option(20, positive_int)
    delay: int = option(10, positive_int)
    ema: float = option(0.0, share)
    positional = ("optim_spec",)

    judged = "own"
    round_steps = property(lambda self: self.interval)
    state = State("iteration", "kept", "under_way")
    plain_steps = True

    def __init__(self, *positional: Any, **given: Any) -> None:
        super().__init__(*positional, **given)
        if self.delay >= self.interval:
            raise InputError(
                f"{self.where}: delay is {self.delay} steps and interval {self.interval}; apply an average before "
                "the next"
            )

    def prepare(self) -> None:
        """Choose as all ranks do."""
        self.index_selector = self.selection.selector()
        self.index_selector.seed = self.seed
        self.iteration = 0  # averages that have begun
        self.under_way = UnderWay(self.site)
        self.kept: list[Tensor] = []  # with `ema`, by bucket

    def communicate(self, step: int) -> None:
        """Begin or apply the average that is due."""
        if self.num_nodes == 1:
            return
        if step % self.interval == self.delay and (arrived := self.under_way.take()) is not None:
            self.apply(arrived, self.ema)
        if step % self.interval == 0:
            self.iteration += 1
            self.under_way.send([flat[chosen] for flat, chosen in self.flats_and_places()])

    def apply(self, sent: Round, ema: float = 0.0) -> None:
        """`theta += mean - sent` on the chosen values; with `ema`, the mean and what is kept of local steps."""
        if ema and not self.kept:
            self.kept = [torch.zeros_like(flatten(bucket)) for bucket in self.buckets]
        changes = [mean - own for mean, own in zip(sent.wait(), sent.sent, strict=True)]
        for place, (flat, chosen) in enumerate(self.flats_and_places()):
            flat[chosen] += changes[place]
            if ema:
                kept = self.kept[place]
                mean = sent.sent[place] + changes[place]
                moved = flat[chosen] - mean
                kept[chosen] = moved if self.iteration == 1 else ema * kept[chosen] + (1 - ema) * moved
                flat[chosen] = mean + kept[chosen]
            write_back(flat, self.buckets[place])

    @property
    def steps_to_exchange(self) -> int:
        """One at most while an average is in flight."""
        steps = super().steps_to_exchange
        return steps if self.under_way.round is None else min(steps, 1)

    def finish(self) -> None:
        """Apply averages in flight."""
        if (last := self.under_way.take()) is not None:
            self.apply(last)

    def flats_and_places(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters, flat, and their places in the last average begun."""
        flats = map(flatten, self.buckets)
        return [(flat, self.index_selector.places(flat, self.iteration - 1)) for flat in flats]


class AsyncSparseCommunicator(AsyncSPARTAStrategy, part="AsyncSPARTA"):
    """Async SPARTA as a member of a `Chain`."""
