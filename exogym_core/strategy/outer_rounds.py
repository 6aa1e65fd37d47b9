"""What strategies with an outer optimizer share: a round's step, what of it is judged and kept, and its options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from exogym_core.strategy.chain import Chain, Module
from exogym_core.strategy.options.arguments import checked_options

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from exogym_core.strategy.options.optim import OptimizerLike
    from exogym_core.strategy.parts.outer import OuterOptions, OuterStep, Round

__all__ = ["OuterRounds", "OuterStrategy"]


class OuterRounds(Module):
    """Rounds of local steps that end in an outer step: `begin` sends what it needs, `apply` takes that round.

    Attributes:
        outer: the global parameters theta and their optimizer; set when it enters a chain.
        num_rounds: that have ended.
    """

    judged: str | None = "outer"
    outer: OuterStep
    num_rounds: int = 0

    def apply(self, outer_round: Round) -> None:
        """The outer optimizer steps along the mean, and every worker goes on from the new theta."""
        self.outer.apply(outer_round.wait())
        self.outer.reset_parameters()
        self.num_rounds += 1

    @property
    def optimizers(self) -> list[Optimizer]:
        """The outer one."""
        return [self.outer.optim]

    def judged_state(self) -> dict[str, Tensor] | None:
        """Theta; of a shard the parts that this rank holds."""
        return self.named(self.outer.theta)

    @property
    def judged_version(self) -> int:
        """Rounds that have ended."""
        return self.num_rounds

    def state_dict(self) -> dict[str, Any]:
        """Theta, the outer optimizer's state, and which round it is."""
        return {**self.outer.state_dict(), "num_rounds": self.num_rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.outer.load_state_dict(state)
        self.num_rounds = state["num_rounds"]


class OuterStrategy(Chain):
    """A chain of the one module that a subclass names, with the module's options and every Strategy's."""

    Options: ClassVar[type[OuterOptions]]
    module: ClassVar[type[Module]]

    def __init__(
        self,
        optim_spec: OptimizerLike | None = None,
        outer_optim_spec: OptimizerLike | None = None,
        H: int | None = None,  # noqa: N803
        **options: Any,
    ) -> None:
        given = {"outer_optim_spec": outer_optim_spec, "H": H, **options}
        outer, others = checked_options(type(self), self.Options, given)
        self.H = outer.H
        super().__init__([self.module(**vars(outer))], optim_spec, **others)
