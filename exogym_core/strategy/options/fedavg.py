"""What users say of FedAvg and LocalSGD."""

from __future__ import annotations

from dataclasses import dataclass

from exogym_core.strategy.options.arguments import option, positive_int
from exogym_core.strategy.parts.average import AveragingOptions
from netsim.files.errors import InputError

__all__ = ["FedAvgOptions", "LocalSGDOptions"]


@dataclass(frozen=True)
class FedAvgOptions(AveragingOptions):
    """What FedAvg takes.

    Args:
        H: local steps a round; also `local_steps`, `num_inner_steps` and `sync_every`.
        island_size: average within random groups of this many sites, drawn anew each round; all if None or
            above their number.
    """

    H: int = option(1, positive_int)
    island_size: int | None = option(None, positive_int)

    def check(self, where: str) -> None:
        """Refuse what is owed to an island that is gone."""
        super().check(where)
        if self.error_feedback and self.island_size is not None:
            raise InputError(
                f"{where}: error_feedback=True goes with one group that stays; leave out island_size="
            )


@dataclass(frozen=True)
class LocalSGDOptions(FedAvgOptions):
    """FedAvg's, with rounds of 8 steps."""

    H: int = option(8, positive_int)
