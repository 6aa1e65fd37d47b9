"""The example of a strategy of one's own runs as it stands and prints what lies beside it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_strategy.py"


def test_output_is_the_recorded_one() -> None:
    pytest.importorskip("sklearn")
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=True)
    recorded = EXAMPLE.with_suffix(".out").read_text()
    loss = re.compile(r"loss (\d+\.\d+)")
    # Losses differ between processors in their last digits; times and bytes do not.
    assert loss.sub("", done.stdout) == loss.sub("", recorded)
    for got, expected in zip(loss.findall(done.stdout), loss.findall(recorded), strict=True):
        assert abs(float(got) - float(expected)) < 0.1
