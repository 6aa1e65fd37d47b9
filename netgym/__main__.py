"""Entry point of `netgym` and of `python -m netgym`: handles Ctrl-C during imports and unwritable stderr."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

from netsim import interrupt

__all__ = ["main"]


class _Forgiving:
    """A text stream whose failed writes (a full disk, a closed terminal) are ignored."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write as far as the stream takes it: a closed terminal ends no command."""
        try:
            return int(self._stream.write(text))
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Flush as far as the stream takes it: a closed terminal ends no command."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _keep_compiled() -> None:
    """Have torch keep what it compiles; it does so among temporary files by default, and on a read-only disk."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "netgym" / "torchinductor"
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))


def main() -> int:
    """Run the command line; returns the exit code: 130 after Ctrl-C, at whatever instant."""
    if sys.stderr is not None:
        sys.stderr = _Forgiving(sys.stderr)
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
