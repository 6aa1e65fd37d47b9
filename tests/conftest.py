"""Settings shared by all tests."""

from __future__ import annotations

import gc
import itertools
import os
import signal
from collections.abc import Iterator

# Imports and collection leave hardly any garbage, and each search of torch's objects takes a third of a second.
gc.disable()

# Results are those of every x86-64 processor with AVX2 under these, but for last digits where MKL rounds otherwise on
# processors of another maker; before torch loads.
os.environ |= {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}

import pytest
import torch
from hypothesis import HealthCheck, settings

import exogym_core  # noqa: F401  # before MKL's first call: sets what makes it reproducible
from exogym_core.results.report import page
from exogym_core.results.report.figures import draw_pictures
from netgym.studies import report as study
from netgym.studies import sweep

# The machine decides how long an example takes, never whether the test passes.
_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("dev", max_examples=20, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=20, derandomize=True, **_COMMON)
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

# A fork takes the longer the more its process has in memory, which grows from test to test: files with many forks come
# first. So do those of the longest tests, up to half a minute each: started last, one would keep the others waiting.
FIRST = [
    *("test_resume_laws", "test_strategy_table", "test_check", "test_launch_programs"),
    *("test_children", "test_checkpoint_cli", "test_fit_apart", "test_real_ranks"),
    *("test_resume_mail_laws", "test_rank_programs", "test_soaks_briefly", "test_rank_testing"),
    *("test_workers", "test_packaging", "test_docs", "test_collectives", "test_endings"),
    *("test_sites", "test_side_by_side", "test_netgym", "test_real_runs"),
]

# Two cores at most are assumed; one intra-op thread keeps small tests quick and their bits equal everywhere.
torch.set_num_threads(1)


def pytest_xdist_auto_num_workers() -> int:
    """One process more than there are cores: many tests wait for sockets, links and other processes."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(trylast=True)  # what is left out has gone
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with such files in each of the equal parts that xdist's processes take."""
    num_parts = getattr(config, "workerinput", {}).get("workercount", 1)
    parts: list[list[pytest.Item]] = [[] for _ in range(num_parts)]
    of_file: dict[str, list[pytest.Item]] = {name: [] for name in FIRST}
    others: list[pytest.Item] = []
    for item in items:
        of_file.get(item.path.stem, others).append(item)
    for place, name in enumerate(FIRST):
        parts[place % num_parts] += of_file[name]
    for place, part in enumerate(parts):
        size = (len(items) * (place + 1)) // num_parts - (len(items) * place) // num_parts
        taken = max(0, size - len(part))
        part += others[:taken]
        del others[:taken]
    items[:] = itertools.chain(*parts, others)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep what is there by now out of garbage collections, which take long, and in forks copy what they look at."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _kept_out_of_collections() -> Iterator[None]:
    """Keep what a file's tests leave behind out of later collections, which took up to ten seconds in the last ones."""
    yield
    gc.collect()
    gc.freeze()


_PROBE, _PROBED = sweep.probe, sweep.Probe(0.1, 0.01, 0.01, 10**8, retimed_seconds=(0.01, 0.001))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave pictures out of pages, and trial runs out of sweeps' estimates: they take longer than all the rest.

    The mark `pictures` draws them, and `probes` makes trial runs.
    """
    drawn = draw_pictures if item.get_closest_marker("pictures") else lambda *_: {}
    page.draw_pictures = study.draw_pictures = drawn
    sweep.probe = _PROBE if item.get_closest_marker("probes") else lambda _: _PROBED
