"""Ranks as threads of one process, and groups that are split."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_torchs_own_multi_threaded_test_case_runs_on_netsim() -> None:
    script = str(Path(__file__).with_name("threaded_program.py"))
    environment = os.environ | {"NETGYM_COMPUTE": "marks", "NETGYM_TOPOLOGY": "two-datacenters"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Ran 2 tests" in done.stderr
