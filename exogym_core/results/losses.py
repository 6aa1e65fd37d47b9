"""How a loss is written for people."""

from __future__ import annotations

__all__ = ["format_loss"]

_MOST_PLAIN = 1000.0  # what is larger has diverged: its size says it all


def format_loss(loss: float) -> str:
    """A loss with four decimals, or, where it has grown beyond all measure, its size.

    >>> format_loss(0.19634), format_loss(-2.5), format_loss(313_488.2741), format_loss(float("inf"))
    ('0.1963', '-2.5000', '3.1e+05', 'inf')
    """
    return f"{loss:.4f}" if abs(loss) < _MOST_PLAIN else f"{loss:.2g}"
