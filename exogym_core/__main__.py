"""`python -m exogym_core`, as EXO Gym's users type it: the command `netgym`."""

from __future__ import annotations

import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module("netgym.__main__").main())
