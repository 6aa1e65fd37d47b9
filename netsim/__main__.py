"""Entry point of `netsim` and of `python -m netsim`: collects garbage rarely, and not while Python shuts down."""

from __future__ import annotations

import gc
import sys

__all__ = ["main"]

# Between two collections: commands leave little garbage, and hold much that is searched.
_NEW_OBJECTS = 700_000


def main() -> int:
    """Run the command line; returns the exit code."""
    gc.set_threshold(_NEW_OBJECTS)
    from netsim.cli.main import main as run

    try:
        return run()
    finally:
        gc.freeze()  # the last collection would search all that is imported, a tenth of a short command's time


if __name__ == "__main__":
    sys.exit(main())
