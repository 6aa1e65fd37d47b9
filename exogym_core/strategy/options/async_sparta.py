"""What users say of Async SPARTA."""

from __future__ import annotations

from dataclasses import dataclass

from exogym_core.strategy.options.arguments import Options, fraction, option, positive_int
from exogym_core.strategy.parts.selectors import IndexSelector, selector_named
from netsim.files.errors import InputError

__all__ = ["AsyncSPARTAOptions"]


@dataclass(frozen=True)
class AsyncSPARTAOptions(Options):
    """What async SPARTA takes.

    Args:
        p_sparta: the share averaged each time, above 0 and at most 1.
        interval: an average begins every so many steps.
        delay: local steps after which it is applied, fewer than `interval`.
        index_selector: as of SPARTA.
    """

    p_sparta: float = option(0.05, fraction)
    interval: int = option(20, positive_int)
    delay: int = option(10, positive_int)
    index_selector: str | type[IndexSelector] | IndexSelector = option("random")

    def check(self, where: str) -> None:
        """Refuse averages that would overtake each other."""
        if self.delay >= self.interval:
            raise InputError(
                f"{where}: delay is {self.delay} steps and interval {self.interval}; apply an average before the next"
            )
        selector_named(self.index_selector, self.p_sparta)
