"""What a person sees of a run started from Python: while it goes on, how it ended, and the result itself."""

from __future__ import annotations

import io
import time
from typing import Any
from unittest.mock import patch

import pytest
from experiments import fitted, samples
from rich.console import Console

from exogym_core import FitResult
from exogym_core.results.progress import (
    AnyProgress,
    LiveProgress,
    PlainProgress,
    RunProgress,
    ending,
    progress_for,
)
from exogym_core.strategy import DiLoCoStrategy
from netgym.studies.sweep import SweepProgress


def fit(**options):
    given = {"max_steps": 4, "topology": "lan", "strategy": DiLoCoStrategy(H=2)}
    return fitted(validation=samples(32), data=samples(32), **(given | options))


def test_a_run_says_that_it_begins_and_how_it_ended(capsys):
    """`fit` was mute from beginning to end."""
    result = fit(compute=0.1)
    out, err = capsys.readouterr()
    assert out == ""
    begun, *_, ended = err.splitlines()
    assert begun == "DiLoCoStrategy: 4 steps"
    assert ended.startswith(
        f"DiLoCoStrategy done: step 4 of 4, final loss {result.final_loss:.4f}, virtual time"
    )


def test_a_run_that_was_stopped_tells_where_it_was_last_evaluated():
    """Its line called the evaluation before the first step its final loss."""
    lines = []
    progress = PlainProgress(lines.append, lines.append)
    rows = [{"step": step} for step in range(1, 200)]
    result = FitResult(max_steps=3000, history=rows, final_loss=2.34541, validation=[{"step": 0}])
    run = progress.begin("DiLoCo", 1, 1, 3000)
    run.end(ending(result))
    assert lines[-1] == "DiLoCo stopped: step 199 of 3000, last evaluated: loss 2.3454 at step 0"
    assert "last evaluated loss 2.345 at step 0 (replica)" in repr(result)
    result.complete = True
    progress.begin("DiLoCo", 1, 1, 3000).end(ending(result))
    assert "final loss 2.3454" in lines[-1]


def test_runs_side_by_side_have_a_timer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line of one put off the others': the slower of two was silent for most of its time."""
    lines: list[str] = []
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with PlainProgress(lines.append, lambda line: None) as progress:
        runs = [progress.begin(label, number, 2, 90) for number, label in enumerate(["slow", "fast"], 1)]
        for step in range(90):
            now = 1.0 * step
            for run in reversed(runs):
                run.event({"kind": "step", "step": step, "train_loss": 1.0})
    assert [sum(line.startswith(f"{run.label}: step") for line in lines) for run in runs] == [18, 18]


def test_names_that_begin_alike_stay_apart_however_long() -> None:
    """Labels were cut at 40, 60 and 80 characters."""
    names = [f"Streaming DiLoCo {'with an overlap of two steps ' * 4}and H={number}" for number in (10, 20)]
    lines: list[str] = []
    with PlainProgress(lines.append, lines.append) as progress:
        assert len({progress.begin(name, 1, 1, 9).label for name in names}) == 2
    lines.clear()
    for name in names:
        point = SweepProgress(lambda line, *_: lines.append(line), 2).point(0, {})
        with patch("time.monotonic", return_value=time.monotonic() + 60):
            point.begin(name, 1, 1, 9).event({"kind": "step", "step": 1, "train_loss": 1.0})
    assert len(set(lines)) == 1 + 2  # the point's begin, and a step of each name


def test_silence_can_be_had(capsys):
    fit(progress=False, compute=0.1)
    assert capsys.readouterr().err == ""


def test_a_result_is_reported_in_a_line_however_long_the_run():
    """500 steps were 125,208 characters."""
    result = fit(compute=0.1, target_loss=2.0, progress=False)
    text = repr(result)
    assert text.startswith("FitResult(strategy DiLoCoStrategy, ranks 2, steps 4 of 4, final loss ")
    assert "(outer), virtual time " in text
    assert "target 2 touched" in text
    result.history.extend(result.history[:] * 999)
    assert len(repr(result)) < 250
    html = result._repr_html_()
    assert html.startswith("<table><tr><th>strategy</th><td>DiLoCoStrategy</td>")
    assert "&lt;" in FitResult(strategy="<b>")._repr_html_()


def test_a_notebook_gets_one_bar_that_is_updated(monkeypatch):
    """Each line of progress was an output of its own."""
    from IPython import display

    shown, handle = [], display.DisplayHandle()
    monkeypatch.setattr(display, "display", lambda html, display_id: shown.append(html.data) or handle)
    monkeypatch.setattr(handle, "update", lambda html: shown.append(html.data))
    console, log = Console(force_jupyter=True), []
    with progress_for(console, log.append) as progress:
        run = progress.begin("<b>", 1, 2, 3)
        for step in (1, 2, 3):
            run.event({"kind": "step", "step": step, "train_loss": 0.5})
        run.end("done: step 3 of 3")
    assert shown[0] == '<progress value="0" max="3"></progress> &lt;b&gt; (1 of 2): 3 steps'
    assert shown[1] == '<progress value="1" max="3"></progress> &lt;b&gt;: step 1 of 3, loss 0.5000'
    assert shown[-1] == '<progress value="3" max="3"></progress> &lt;b&gt; done: step 3 of 3'
    assert log == ["<b> (1 of 2): 3 steps", "<b> done: step 3 of 3"]


def test_the_time_left_follows_the_pace_after_a_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    """A site that has joined late skips the steps that others have done."""
    left: list[float | None] = []

    class Seen(AnyProgress):
        def _show(self, run: RunProgress, line: str) -> None: ...

        def _step(self, run: RunProgress, row: Any, seconds_left: float | None) -> None:
            left.append(seconds_left)

        def _finish(self, run: RunProgress, words: str) -> None: ...

    run = Seen(lambda line: None).begin("DiLoCo", 1, 1, 3000)
    for seconds, step in [(0, 1), *((1 + after, 2000 + 10 * after) for after in range(61))]:
        monkeypatch.setattr(
            "exogym_core.results.progress.time.monotonic", lambda seconds=seconds: float(seconds)
        )
        run.event({"kind": "step", "step": step})
    assert left[:2] == [None, pytest.approx(1000 / 1999)]
    assert left[-1] == pytest.approx(40.0)


def test_bars_of_names_that_differ_in_their_middle_differ():
    """Names were shortened to 24 characters, by their middle."""
    console = Console(record=True, force_terminal=True, width=120, file=io.StringIO())
    with LiveProgress(console, lambda line: None) as bars:
        for rounds in (10, 20):
            bars.begin(f"SparseLoCo in rounds of {rounds} steps, pairs", rounds, 2, 5)
    shown = " ".join(console.export_text().split())
    assert all(f"{rounds} steps, pairs" in shown for rounds in (10, 20)), shown
