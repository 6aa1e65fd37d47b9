"""Methods of PyTorch's own DistributedTest, unchanged, with `netsim` where they ask for gloo.

These stand for all: `python tests/conformance/torch_methods.py netsim` runs every one (docs/launch.md has what came of
it, beside gloo).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import Fork, run_script

METHODS = [
    "test_all_reduce_complex_unsupported_ops",
    "test_all_to_all_single_unequal_split_complex",
    "test_batch_isend_irecv_gloo_tags",
    "test_monitored_barrier_gloo",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
]


@pytest.mark.thorough
def test_methods_of_pytorchs_own_pass() -> None:
    script = str(Path(__file__).with_name("torch_methods.py"))
    done = Fork(run_script, script, "netsim", *METHODS).end()
    lines = [line for line in done.stdout.splitlines() if line.startswith("test_")]
    assert [line.split(":")[0] for line in lines] == METHODS, done.stderr[-2000:]
    assert [line for line in lines if ": passed" not in line] == []


def test_torchs_own_multi_threaded_test_case_runs_on_netsim() -> None:
    script = str(Path(__file__).with_name("threaded_program.py"))
    environment = {"NETGYM_COMPUTE": "marks", "NETGYM_TOPOLOGY": "two-datacenters"}
    done = Fork(run_script, script, environment=environment).end()
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Ran 2 tests" in done.stderr
