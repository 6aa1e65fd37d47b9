"""Async SPARTA: the sparse share is averaged while training continues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.options import fraction, option, positive_int
from exogym_core.strategy.parts.average import Averaging
from exogym_core.strategy.parts.flat import write_back
from exogym_core.strategy.parts.flight import Flight
from exogym_core.strategy.parts.outer import Round
from exogym_core.strategy.parts.rounds import RoundUnderWay
from exogym_core.strategy.parts.selectors import SelectionOptions
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn


__all__ = ["AsyncSPARTAOptions", "AsyncSPARTAStrategy", "AsyncSparseCommunicator"]


class AsyncSPARTAOptions(SelectionOptions):
    """Options of async SPARTA.

    Args:
        p_sparta: the share averaged each time, above 0 and at most 1.
        interval: an average begins every so many steps.
        delay: local steps after which it is applied, fewer than `interval`.
    """

    p_sparta: float = option(0.05, fraction)
    interval: int = option(20, positive_int)
    delay: int = option(10, positive_int)

    def check(self, where: str) -> None:
        """Refuse averages that would overtake each other."""
        if self.delay >= self.interval:
            raise InputError(
                f"{where}: delay is {self.delay} steps and interval {self.interval}; apply an average before the next"
            )
        super().check(where)


class AsyncSparseCommunicator(RoundUnderWay, name="AsyncSPARTA"):
    """All-reduce of chosen values that begins every `interval` steps; its result is applied `delay` steps later.

    What local steps have changed meanwhile stays: `theta += mean - sent` on the chosen values.
    """

    Options = AsyncSPARTAOptions
    judged = "own"
    state = State("iteration")
    round_steps = property(lambda self: self.options.interval)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.index_selector = self.options.selector()
        self.iteration = 0  # averages that have begun

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Choose as all ranks do."""
        self.index_selector.seed = self.strategy.seed

    def after_update(self) -> None:
        """Begin or apply the average that is due."""
        if self.strategy.num_nodes == 1:
            return
        place = (self.strategy.local_step + 1) % self.options.interval
        if self._under_way is not None and place == self.options.delay:
            self.apply(self._under_way)
        if place == 0:
            self._under_way = self.begin()

    def begin(self) -> Round:
        """Send the chosen values on their way to their mean."""
        self.iteration += 1
        sent = [flat[chosen] for flat, chosen in self._flats_and_places()]
        return self._round(sent, [()] * len(sent))

    def apply(self, sent: Round) -> None:
        """Add the difference of the mean to what was sent."""
        changes = [mean - own for mean, own in zip(sent.wait(), sent.sent, strict=True)]
        for bucket, (flat, chosen), change in zip(
            self.buckets, self._flats_and_places(), changes, strict=True
        ):
            flat[chosen] += change
            write_back(flat, bucket)
        self._under_way = None

    def _flats_and_places(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters, flat, and their places in the last average begun."""
        return [(flat, self.index_selector.places(flat, self.iteration - 1)) for flat in self.flats()]

    def _round(self, sent: list[Tensor], calls: Sequence[Any]) -> Round:
        site = self.scope.site
        flights = [
            Flight(site.steps(Averaging(), flat.clone()), site.between, numbers)
            for flat, numbers in zip(sent, calls, strict=True)
        ]
        return Round(sent, flights)

    def resumed(self, saved: Mapping[str, Any]) -> Round:
        """Send the chosen values again."""
        return self._round(saved["sent"], saved["calls"])


class AsyncSPARTAStrategy(Composition, name="AsyncSPARTA"):
    """SPARTA whose averages overlap with computing.

    Bytes: `2 (n - 1) / n p P` a worker every `interval` steps, as SPARTA with that interval. Second-hand: the delay and
    the interval are as EXO's users report them, not read in code.

    Args:
        optim_spec: the optimizer of local steps (AdamW by default).
        options: of `AsyncSPARTAOptions`, and of every Strategy.

    References:
        Beton et al., SPARTA: Improving Distributed Training Using Sparse Parameter Averaging, openreview stFPf3gzq1.
    """

    module = AsyncSparseCommunicator
