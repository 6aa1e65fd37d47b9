"""Whether this process is one of those that torchrun has started; answered without importing torch."""

from __future__ import annotations

import os

__all__ = ["under_torchrun"]


def under_torchrun() -> bool:
    """Whether torchrun has started this process and others with it.

    A RANK alone does not tell: other launchers set it too.
    """
    return {"TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"} <= os.environ.keys()
