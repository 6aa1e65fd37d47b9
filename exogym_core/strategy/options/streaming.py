"""What users say of strategies that cut the model into fragments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exogym_core.strategy.options.arguments import number, option, positive_int, whole_number
from exogym_core.strategy.options.fragments import PATTERNS
from exogym_core.strategy.parts.outer import OuterOptions
from netsim.files.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FragmentOptions", "StreamingOptions"]


@dataclass(frozen=True)
class FragmentOptions(OuterOptions):
    """Fragments with rounds of their own, besides an outer step's options; `outer_lr` is 0.4.

    Args:
        num_fragments: P; a third of the model's layers if it is not given, one at least.
        fragments: instead, which modules make up each: a list of names, or of lists of names; what none names is a
            fragment of its own.
        pattern: "strided" (fragment p has layers p, p + P, ...) or "sequential" (neighbouring layers).
        tau: steps between a fragment's departure and its application; also `fragment_sync_delay`.
    """

    outer_lr: float | None = option(0.4, number)
    num_fragments: int | None = option(None, positive_int)
    fragments: Sequence[str | Sequence[str]] | None = option(None)
    pattern: str = option("strided")
    tau: int = option(1, whole_number)

    def check(self, where: str) -> None:
        """Refuse a fragment that would leave before it is back."""
        super().check(where)
        if self.pattern not in PATTERNS:
            raise unknown_name(f"pattern of {where}", str(self.pattern), PATTERNS)
        if self.tau >= self.H and self.tau > 0:
            raise InputError(
                f"{where}: tau={self.tau} must be below H={self.H}: a fragment must be back to leave"
            )
        if self.num_fragments is not None and self.num_fragments > self.H:
            raise InputError(f"{where}: num_fragments={self.num_fragments} must be at most H={self.H}")
        if self.num_fragments is not None and self.fragments is not None:
            raise InputError(f"{where}: num_fragments and fragments say the same; give one of them")

    def outer_optim(self) -> Any:
        """The outer optimizer; the rate of 0.4 is of the default one alone."""
        if self.outer_optim_spec is not None and self.outer_lr == type(self).defaults()["outer_lr"]:
            return self.outer_optim_spec
        return super().outer_optim()


@dataclass(frozen=True)
class StreamingOptions(FragmentOptions):
    """What Streaming DiLoCo takes besides.

    Args:
        alpha: weight of what a worker has trained meanwhile; also `fragment_update_alpha`.
    """

    alpha: float = option(0.5, number)

    def check(self, where: str) -> None:
        """Refuse what is no share."""
        super().check(where)
        if self.alpha > 1:
            raise InputError(f"{where}: alpha={self.alpha!r} must be a share, 0 to 1")
