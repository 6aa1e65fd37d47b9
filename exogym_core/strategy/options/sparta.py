"""What users say of SPARTA."""

from __future__ import annotations

from dataclasses import dataclass

from exogym_core.strategy.options.arguments import fraction, option, positive_int
from exogym_core.strategy.parts.average import AveragingOptions
from exogym_core.strategy.parts.selectors import IndexSelector, selector_named

__all__ = ["SpartaOptions"]


@dataclass(frozen=True)
class SpartaOptions(AveragingOptions):
    """What SPARTA takes.

    Args:
        p_sparta: the share averaged each time, above 0 and at most 1.
        index_selector: "random", "shuffled_sequential", "partitioned", or an IndexSelector or its class.
        interval: communicate every so many steps; also `sparta_interval`.
    """

    p_sparta: float = option(0.005, fraction)
    index_selector: str | type[IndexSelector] | IndexSelector = option("random")
    interval: int = option(1, positive_int)

    def check(self, where: str) -> None:
        """Refuse a selector that does not exist."""
        super().check(where)
        self.selector()

    def selector(self) -> IndexSelector:
        """Chooses what is averaged."""
        return selector_named(self.index_selector, self.p_sparta)
