"""Stages: a worker is a chain of ranks, each of which holds a part of the model; activations and gradients cross the network.

A strategy sees the ranks of its own stage as its workers and knows nothing of the others.
"""

from __future__ import annotations

from exogym_core.stages.options import Stages
from exogym_core.stages.split import Part

__all__ = ["Part", "Stages"]
