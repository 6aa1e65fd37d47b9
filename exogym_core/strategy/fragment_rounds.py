"""The model in fragments, each with rounds of its own that overlap training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.strategy.chain import Chain, Module
from exogym_core.strategy.options.fragments import fragments_of
from exogym_core.strategy.parts.outer import OuterStep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from exogym_core.strategy.chain import Scope
    from exogym_core.strategy.options.streaming import FragmentOptions
    from exogym_core.strategy.parts.outer import Round

__all__ = ["Fragments"]


class Fragments(Module):
    """Rounds of a model's fragments that overlap training. Subclasses say when they leave and how they are merged.

    Each fragment has a group of its own, so that the collectives of several are on their way at once.

    Attributes:
        members: indices of parameters, by fragment.
        outers: the fragments' global parameters and outer optimizers.
        sent_at: the step after which each last left; 0 before it has.
    """

    judged = "outer"
    options: FragmentOptions

    def enter(self, strategy: Chain, scope: Scope) -> Scope:
        """Cut the parameters into fragments."""
        super().enter(strategy, scope)
        where, names = type(strategy).__name__, [name for name, _ in strategy.named_trainable()]
        told = self.options
        self.members = fragments_of(names, told.num_fragments, told.fragments, told.pattern, where, told.H)
        averaging = told.averaging().charged(strategy.coding, strategy.comm)
        parts = [[scope.parameters[index] for index in members] for members in self.members]
        self.outers = [OuterStep(part, told.outer_optim(), averaging) for part in parts]
        self._sites = [scope.site.apart() for _ in self.members]
        self._is_staged = averaging.codec is not None or scope.site.inside is not None
        self._under_way: dict[int, Round] = {}
        self.sent_at = [0] * len(self.members)
        self.num_applied = 0
        return scope

    def leaves(self, p: int, step: int) -> bool:
        """Whether fragment p leaves after this step."""
        return False

    def merge(self, p: int, outer_round: Round) -> None:
        """An outer step on phi_p, and what this rank goes on from."""
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
        """The fragment leaves after this step; without a delay it is waited for."""
        self.sent_at[p] = step
        self._under_way[p] = self.begin(p)
        if not self.options.tau:
            self.apply(p, self._under_way.pop(p))

    def begin(self, p: int) -> Round:
        """The fragment's outer gradient, the mean of `phi_p - theta_p`, is on its way."""
        return self.outers[p].begin(self._sites[p])

    def apply(self, p: int, outer_round: Round) -> None:
        """Take it in when it has come."""
        self.merge(p, outer_round)
        self.num_applied += 1

    def at_end(self) -> None:
        """Apply what is in flight."""
        for p in sorted(self._under_way):
            self.apply(p, self._under_way.pop(p))

    @property
    def optimizers(self) -> list[Optimizer]:
        """One outer optimizer a fragment."""
        return [outer.optim for outer in self.outers]

    def judged_state(self) -> dict[str, Tensor]:
        """Phi, each fragment as last applied."""
        values: dict[int, Tensor] = {}
        for members, outer in zip(self.members, self.outers, strict=True):
            values |= zip(members, outer.theta, strict=True)
        return self.named([values[index] for index in range(len(values))])

    @property
    def judged_version(self) -> int:
        """Fragments that have been applied."""
        return self.num_applied

    def state_dict(self) -> dict[str, Any]:
        """The fragments' outer states, and the rounds under way."""
        return {
            "outers": [outer.state_dict() for outer in self.outers],
            "under_way": {str(p): outer_round.state_dict() for p, outer_round in self._under_way.items()},
            "sent_at": list(self.sent_at),
            "num_applied": self.num_applied,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them; what was under way is sent again."""
        for outer, saved in zip(self.outers, state["outers"], strict=True):
            outer.load_state_dict(saved)
        self._under_way = {
            int(p): self.outers[int(p)].resumed(self._sites[int(p)], saved)
            for p, saved in state["under_way"].items()
        }
        self.sent_at, self.num_applied = list(state["sent_at"]), state["num_applied"]
