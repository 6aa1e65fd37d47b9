"""The arguments of CoCoDC."""

from __future__ import annotations

from dataclasses import dataclass

from exogym_core.strategy.options.arguments import number, option, positive_int, whole_number
from exogym_core.strategy.options.streaming import FragmentOptions
from netsim.files.errors import unknown_name

__all__ = ["CoCoDCOptions"]

_SCALES = ("relative", "fixed")


@dataclass(frozen=True)
class CoCoDCOptions(FragmentOptions):
    """What CoCoDC takes besides fragments and an outer step.

    Args:
        tau: steps between a fragment's departure and its application; also `fragment_sync_delay`.
        transmissions: N, fragments that leave in H steps; as many as there are fragments at least, one a step at
            most.
        compensation: lambda, how strong the correction is; 0 keeps what a worker has trained meanwhile as it is.
        scale: "relative" (lambda is the correction's norm over that of what it corrects, tensor by tensor) or "fixed"
            (lambda multiplies the second-order term).
    """

    tau: int = option(5, whole_number)
    transmissions: int = option(8, positive_int)
    compensation: float = option(0.5, number)
    scale: str = option("relative")

    def check(self, where: str) -> None:
        """Refuse a scale that there is not."""
        super().check(where)
        if self.scale not in _SCALES:
            raise unknown_name(f"scale of {where}", str(self.scale), _SCALES)
