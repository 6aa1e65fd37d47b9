"""`python -m exogym_core`, as EXO Gym's users type it: the command `netgym`."""

from __future__ import annotations

import importlib
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line; the `netgym` script of an installation before the three layers calls this."""
    code: int = importlib.import_module("netgym.__main__").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
