"""Contradictions between a strategy's declarations, its model and its ranks: refused before the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exogym_core.strategy.options import positive_int
from netsim.errors import InputError

if TYPE_CHECKING:
    from exogym_core.strategy.base import Strategy

__all__ = ["refuse_contradictions"]


def refuse_contradictions(strategy: Strategy) -> None:
    """Refuse a strategy, which has its model and its ranks, where these or its traits contradict each other.

    Raises:
        InputError: it has servers that are not judged, its rounds have no length, or a parameter is complex and it
            brings real ones together.
    """
    where = strategy.where
    if strategy.num_servers and strategy.judged != "server":
        raise InputError(
            f"{where}: num_servers={strategy.num_servers}, but judged={strategy.judged!r}; servers keep the model "
            "that could be shipped: write judged = 'server'"
        )
    if strategy.round_steps is not None:
        positive_int(where, "round_steps", strategy.round_steps)
    if strategy.takes_complex or strategy.comm.world_size == 1:
        return
    for name, parameter in strategy.named_trainable():
        if parameter.is_complex():
            raise InputError(
                f"{where}: parameter {name!r} is {parameter.dtype}, and ranks bring real ones together; hold its "
                "real and imaginary parts (torch.view_as_real), or write takes_complex = True in a strategy of your "
                "own that does more"
            )
