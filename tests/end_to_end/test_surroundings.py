"""Commands in surroundings that lack something."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from experiments import experiment


@pytest.mark.parametrize(
    ("flags", "environment"),
    [(["-OO"], {}), ([], {"HOME": "/dev/null/home", "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": ""})],
    ids=["without docstrings", "without a home"],
)
def test_a_run_needs_neither_docstrings_nor_a_home(
    flags: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "small.yaml").write_text(experiment(strategies="[AllReduce]", steps=2))
    command = [sys.executable, *flags, "-m", "netgym", "compare", "small.yaml", "--out", "out"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "report.html").is_file()
