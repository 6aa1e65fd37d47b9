"""Fixtures of programs run as their users run them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from netgym.cli.main import main

Launch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def launch_here(capfd: pytest.CaptureFixture[str]) -> Launch:
    """`netgym launch` from this process, which has imported torch already: exit code, stdout and stderr."""

    def launch(*arguments: str) -> tuple[int, str, str]:
        code = main(["launch", *arguments])
        return code, *capfd.readouterr()

    return launch
