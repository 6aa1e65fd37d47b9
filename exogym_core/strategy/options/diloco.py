"""The arguments of DiLoCo."""

from __future__ import annotations

from dataclasses import dataclass

from exogym_core.strategy.absence.patience import PatienceOptions
from exogym_core.strategy.parts.outer import OuterOptions
from exogym_core.strategy.sites.sites import SiteOptions
from netsim.files.errors import InputError

__all__ = ["DiLoCoOptions"]


@dataclass(frozen=True)
class DiLoCoOptions(OuterOptions, SiteOptions, PatienceOptions):
    """What DiLoCo takes as strategy, as module and as optimizer: rounds, sites, and who may be absent."""

    def check(self, where: str) -> None:
        """Refuse shards of a single rank."""
        super().check(where)
        if self.ranks_per_worker == 1 and self.sharding != "NO_SHARD":
            raise InputError(
                f"{where}: sharding={self.sharding!r} divides a worker of several ranks: say ranks_per_worker"
            )
