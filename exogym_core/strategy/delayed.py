"""DiLoCo with a whole round's time for communication: delayed and eager outer steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.strategy.options.arguments import checked_options, refuse_unknown
from exogym_core.strategy.outer_rounds import OuterRounds, OuterStrategy
from exogym_core.strategy.parts.outer import OuterOptions, OuterStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from exogym_core.strategy.chain import Chain, Scope
    from exogym_core.strategy.parts.outer import Round

__all__ = [
    "DelayedDiLoCoCommunicator",
    "DelayedDiLoCoStrategy",
]


class DelayedDiLoCoCommunicator(OuterRounds):
    """The mean of round k's pseudo-gradients is applied at the end of round k + 1.

    Args:
        H: local steps a round.
        options: of `OuterOptions`.
    """

    Options = OuterOptions

    def __init__(self, H: int | None = None, **options: Any) -> None:  # noqa: N803
        self.options, unknown = checked_options(type(self), OuterOptions, {"H": H, **options})
        refuse_unknown(type(self), unknown)

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Every rank begins with the same phi."""
        super().enter(strategy, scope)
        averaging = self.options.averaging().charged(strategy.coding, strategy.comm)
        self.outer, self.num_rounds = OuterStep(scope.parameters, self.options.outer_optim(), averaging), 0
        self._site = scope.site.apart()
        self._is_staged = averaging.codec is not None or scope.site.inside is not None
        self._under_way: Round | None = None
        return scope

    def after_update(self) -> None:
        """Where a round ends, send its outer gradient, and apply the one of the round before."""
        if self._is_staged and self._under_way is not None:
            self._under_way.go_on()
        if (self.strategy.local_step + 1) % self.options.H == 0:
            before = self._under_way
            if before is not None:
                before.wait()  # all calls of one round come before all of the next, on all ranks
            self._under_way = self.begin()
            self.apply(before)

    def begin(self) -> Round:
        """`phi - theta_i` is on its way to its mean."""
        return self.outer.begin(self._site)

    def apply(self, before: Round | None) -> None:
        """An outer step along the mean of the round before, if there is one; every worker goes on from phi."""
        if before is not None:
            self.outer.apply(before.wait())
            self.num_rounds += 1
        self.outer.reset_parameters()

    def at_end(self) -> None:
        """Apply what is in flight."""
        if self._under_way is not None:
            before, self._under_way = self._under_way, None
            self.apply(before)

    def state_dict(self) -> dict[str, Any]:
        """Also the round under way."""
        under_way = None if self._under_way is None else self._under_way.state_dict()
        return {**super().state_dict(), "under_way": under_way}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it; what was under way is sent again."""
        super().load_state_dict(state)
        saved = state["under_way"]
        self._under_way = None if saved is None else self.outer.resumed(self._site, saved)


class DelayedDiLoCoStrategy(OuterStrategy):
    """DiLoCo whose outer gradients may take a round to arrive, and are applied when the next one ends.

    A worker begins every round at phi: what it did in a round is in phi one round later.

    Bytes: as DiLoCo's.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        outer_optim_spec: the outer one (SGD, 0.7, Nesterov momentum 0.9 by default).
        H: local steps a round.
        options: of `OuterOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Kale et al., Eager Updates For Overlapped Communication and Computation in DiLoCo, arXiv 2502.12996.
    """

    Options = OuterOptions
    module = DelayedDiLoCoCommunicator
