"""Settings shared by all tests."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

# Results are those of every x86-64 processor with AVX2 under these, but for last digits where MKL rounds otherwise on
# processors of another maker; before torch loads.
os.environ |= {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

import torch
from hypothesis import HealthCheck, settings

import exogym_core  # noqa: F401  # before MKL's first call: sets what makes it reproducible
from exogym_core.results.report import page, study
from exogym_core.results.report.figures import draw_pictures

if TYPE_CHECKING:
    import pytest

# The machine decides how long an example takes, never whether the test passes.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=30, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=30, derandomize=True, **_COMMON)
settings.register_profile("thorough", max_examples=500, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

# Signals that a background job ignores are ignored by all that it starts; a handler ends with an exec.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, lambda *_: None),
    (signal.SIGQUIT, lambda *_: None),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Programs that tests start find the modules compiled by the first of them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# What tests write need not outlive a failure of power: waiting for the disk takes longer than most of them.
os.fsync = lambda _: None

# The files of the longest tests, up to half a minute each, come first: started last, one would keep the others waiting.
LONGEST = [
    "test_memory",
    "test_annexes",
    "test_soaks_briefly",
    "test_docs",
    "test_packaging",
    "test_real_ranks",
    "test_fit_apart",
]

# Two cores at most are assumed; one intra-op thread keeps small tests quick and their bits equal everywhere.
torch.set_num_threads(1)


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: many tests wait for sockets, links and other processes."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave pictures out of pages: drawing takes longer than all the rest. The mark `pictures` draws them."""
    drawn = draw_pictures if item.get_closest_marker("pictures") else lambda *_: {}
    page.draw_pictures = study.draw_pictures = drawn
