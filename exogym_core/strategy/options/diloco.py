"""The arguments of DiLoCo."""

from __future__ import annotations

from dataclasses import dataclass

from exogym_core.strategy.absence.patience import PatienceOptions
from exogym_core.strategy.parts.outer import OuterOptions
from exogym_core.strategy.sites.sites import SiteOptions

__all__ = ["DiLoCoOptions"]


@dataclass(frozen=True)
class DiLoCoOptions(OuterOptions, SiteOptions, PatienceOptions):
    """What DiLoCo takes as strategy, as module and as optimizer: rounds, sites, and who may be absent."""
