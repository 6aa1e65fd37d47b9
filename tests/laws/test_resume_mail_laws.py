"""Law 7 for asynchronous ranks: messages in mailboxes, and each rank's progress, are part of a checkpoint."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from experiments import outcome
from test_resume_laws import PROCESSES, fit

from exogym_core.checkpoints.checkpoint import find_checkpoint
from exogym_core.strategy import Strategy, build_strategy
from netsim.errors import InputError

# Steps of very unequal length, so that ranks are many rounds apart.
UNEQUAL: dict[str, Any] = {
    "max_steps": 12,
    "num_epochs": 99,
    "compute": {"fixed": "3 ms", "jitter": 0.8, "stragglers": {"fraction": "10 %", "slowdown": 5}},
}
WAN = {"topology": "wan-4-regions"}
TIMED = {"val_seconds": 0.04, "until": "0.4 s", "correlation_interval": None, **WAN}
FAILING = {"until": "0.3 s", "failures": {"mtbf": "0.1 s", "repair": "0.02 s"}}
OPTIONS: dict[str, dict[str, Any]] = {
    "ADPSGD": {"interval": 2},
    "AsyncDiLoCo": {"H": 3, "dylu": True},
    "DecoupledDiLoCo": {"H": 6, "num_fragments": 3, "quorum": 2, "grace": 0.004},
    "HALoS": {"H": 2, "K": 2, "local_buffer": 2},
    "HeLoCo": {"H": 4},
}


def make(name: str) -> Strategy:
    return build_strategy(name, **OPTIONS[name])


@cache
def whole(name: str, options: str) -> Any:
    return outcome(fit(make(name), **UNEQUAL, **_CASES[options]))


_CASES: dict[str, dict[str, Any]] = {"far": WAN, "by the clock": TIMED, "failing": FAILING}
_RUNS = [
    ("ADPSGD", "far"),
    ("HALoS", "failing"),
    pytest.param("AsyncDiLoCo", "far", marks=pytest.mark.thorough),
    pytest.param("DecoupledDiLoCo", "far", marks=pytest.mark.thorough),
    pytest.param("HeLoCo", "by the clock", marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("name", "options"), _RUNS)
def test_a_stop_changes_no_bit_however_far_apart_ranks_are(name: str, options: str, tmp_path: Path) -> None:
    """Also where evaluations go by the clock, and where hosts fail; stopped in processes, resumed in threads."""
    options_given = {**UNEQUAL, **_CASES[options]}
    stopped = fit(
        make(name),
        4 if options == "by the clock" else 8,
        checkpoint_interval=2,
        save_dir=tmp_path,
        workers=PROCESSES,
        **options_given,
    )
    assert stopped.checkpoint_folder is not None
    checkpoint = find_checkpoint(stopped.checkpoint_folder)
    if options == "far":  # messages cross the cut: without them the run is another, or stands still
        assert checkpoint.messages()
        assert (checkpoint.path / "letters.safetensors").is_file()
    resumed = fit(make(name), resume_from=stopped.checkpoint_folder, checkpoint_interval=3, **options_given)
    assert outcome(resumed) == whole(name, options)
    assert resumed.resumed_step == (checkpoint.step if checkpoint is not None else 0)
    assert options != "far" or resumed.resumed_step > 0


def test_a_run_at_ranks_own_pace_cannot_become_longer(tmp_path: Path) -> None:
    """The fast have ended when the slow come to the checkpoint: a longer run would have gone otherwise."""
    result = fit(make("AsyncDiLoCo"), checkpoint_interval=3, save_dir=tmp_path)
    with pytest.raises(InputError, match="settings: max_steps is 7, this run's is 9"):
        fit(make("AsyncDiLoCo"), resume_from=result.checkpoint_folder, max_steps=9)
