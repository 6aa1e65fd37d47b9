"""Settings shared by all tests."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

import exogym_core  # noqa: F401  # before MKL's first call: sets what makes it reproducible

# The machine decides how long an example takes, never whether the test passes.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=30, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=30, derandomize=True, **_COMMON)
settings.register_profile("thorough", max_examples=500, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# Two cores at most are assumed; one intra-op thread keeps small tests quick and their bits equal everywhere.
torch.set_num_threads(1)
