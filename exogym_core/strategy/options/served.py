"""What users say of strategies with a server."""

from __future__ import annotations

from dataclasses import dataclass

from exogym_core.strategy.options.arguments import Options, flag, option, positive_int

__all__ = ["ServedOptions"]


@dataclass(frozen=True)
class ServedOptions(Options):
    """What all of them take.

    Args:
        H: local steps a round (of the fastest worker, with `dylu`).
        dylu: workers do `floor(H v / max v)` local steps, v their steps a second (dynamic local updates).
    """

    H: int = option(50, positive_int)
    dylu: bool = option(False, flag)
