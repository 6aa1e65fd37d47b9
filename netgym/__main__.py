"""Entry point of `netgym` and of `python -m netgym`: handles Ctrl-C during imports and unwritable stderr."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys

from exogym_core.results.disk import Forgiving, cache_folder
from netsim.cli.signals import interrupt

__all__ = ["main"]


def _keep_compiled() -> None:
    """Keep torch's compiled code in the user's cache; by default, and on a read-only disk, it is a temporary file."""
    cache = cache_folder() / "torchinductor"
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def main() -> int:
    """Run the command line; returns the exit code: 130 after Ctrl-C, at whatever instant."""
    if sys.stderr is not None:
        sys.stderr = Forgiving(sys.stderr)
    _keep_compiled()
    signal.signal(signal.SIGINT, interrupt)
    try:
        from netgym.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130
    finally:
        gc.freeze()  # the interpreter's last collection would search a million objects of torch: half a second


if __name__ == "__main__":
    sys.exit(main())
