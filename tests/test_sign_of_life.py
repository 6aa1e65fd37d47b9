"""What takes long says so on a terminal, and leaves nothing behind."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from netsim.tools.sign_of_life import SignOfLife


@pytest.mark.parametrize(("total", "told"), [(None, "timing all_reduce"), (3, "2/3")])
def test_a_terminal_is_told_when_it_takes_long(total: int | None, told: str) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    with SignOfLife("timing all_reduce", total, seconds=0.0, console=console) as sign:
        sign._timer.join()
        sign.advance()
        sign.advance()
        sign._progress.refresh()
    assert told in screen.getvalue()


@pytest.mark.parametrize(("is_terminal", "seconds"), [(True, 1e3), (False, 0.0)])
def test_nobody_is_told_of_what_is_quick_or_where_nobody_looks(is_terminal: bool, seconds: float) -> None:
    screen = io.StringIO()
    with SignOfLife("transfers", 3, seconds, Console(file=screen, force_terminal=is_terminal)) as sign:
        sign.advance()
    assert "transfers" not in screen.getvalue()


def test_where_there_is_no_terminal_a_line_tells_how_far_it_is() -> None:
    """Which of how many, in plain text, for those who ask for it."""
    screen = io.StringIO()
    with SignOfLife("planning", 3, 1e-3, Console(file=screen), every_seconds=1e3) as sign:
        sign.now("planning DiLoCo [H=5]")
        sign.advance()
        while not screen.getvalue().endswith("\n"):
            pass
    assert screen.getvalue().startswith("planning")
    assert " of 3 done" in screen.getvalue()
