"""What optimizers' steps cost in virtual time, and what a machine that ranks share does to measured times."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from test_coding import fit

from exogym_core.cost.compute import Compute, Updates
from exogym_core.cost.speeds import charge_updates, seconds_of
from exogym_core.strategy import AllReduceStrategy, DiLoCoStrategy
from exogym_core.strategy.trials import coding_trials
from netsim.errors import InputError

NUM_BYTES = 4 * (6 * 6 + 6)  # of the model that `fit` trains


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, Updates({})),
        ("free", Updates({})),
        ("measured", Updates.model_construct(None)),
        ("2 GB/s", Updates.model_validate({"other": "2 GB/s"})),
        (
            {"SGD with momentum": "1 kB/s", "AdamW": "3 B/s"},
            Updates.model_validate({"AdamW": "3 B/s", "SGD with momentum": "1000 B/s"}),
        ),
    ],
)
def test_specs_parse_and_come_back(spec: Any, expected: Updates) -> None:
    parsed = Updates.model_validate(spec)
    assert parsed == expected
    assert Updates.model_validate(parsed.model_dump()) == parsed
    compute = Compute.parse({"fixed": "1 s", "updates": spec})
    assert compute.updates == parsed
    assert Compute.parse(compute.to_mapping()) == compute


def test_every_step_of_an_optimizer_is_charged_by_its_kind() -> None:
    """Local and outer ones; those that are not named take the speed of `other`."""

    def seconds(speeds: dict[str, str], strategy: Any) -> float:
        compute = {"fixed": "10 ms", "updates": speeds}
        return float(fit(strategy, compute=compute).virtual_seconds)

    nothing = "1e18 B/s"
    free = seconds({"other": nothing}, DiLoCoStrategy(H=3, optim_spec="adamw"))
    local = seconds({"AdamW": "1 kB/s", "other": nothing}, DiLoCoStrategy(H=3, optim_spec="adamw"))
    assert local - free == pytest.approx(3 * NUM_BYTES / 1000)
    outer = seconds(
        {"SGD with momentum": "1 kB/s", "other": nothing}, DiLoCoStrategy(H=3, optim_spec="adamw")
    )
    assert outer - free == pytest.approx(NUM_BYTES / 1000)
    both = seconds({"other": "1 kB/s"}, DiLoCoStrategy(H=3, optim_spec="adamw"))
    assert both - free == pytest.approx(4 * NUM_BYTES / 1000)
    plain = seconds({"SGD": "1 kB/s", "other": "1 B/s"}, AllReduceStrategy(optim_spec="sgd", lr=0.1))
    assert plain < free + 3 * NUM_BYTES / 1000 + 1


def test_an_optimizer_without_a_speed_is_not_free() -> None:
    compute = {"fixed": "10 ms", "updates": {"AdamW": "1 kB/s"}}
    line = r"compute\.updates: has no speed for SGD with momentum, only for AdamW; add one, or one for other"
    with pytest.raises(InputError, match=line):
        fit(DiLoCoStrategy(H=3, optim_spec="adamw"), compute=compute)


def test_updates_change_no_value_and_resume(tmp_path: Any) -> None:
    compute = {"fixed": "10 ms", "updates": "1 kB/s"}
    strategy = DiLoCoStrategy(H=2, optim_spec="adamw")
    whole = fit(strategy, compute=compute, checkpoint_interval=2, save_dir=tmp_path)
    free = fit(strategy, compute="10 ms")
    assert [row["train_loss"] for row in whole.history] == [row["train_loss"] for row in free.history]
    resumed = fit(strategy, compute=compute, checkpoint_interval=2, resume_from=whole.checkpoint_folder)
    assert resumed.virtual_seconds == whole.virtual_seconds


def test_measured_updates_are_stored_and_run_again_as_they_are() -> None:
    compute = {"measured": {}, "updates": "measured", "shared_cores": 2}
    measured = fit(DiLoCoStrategy(H=1, optim_spec="adamw"), compute=compute)
    found = Compute.parse(measured.compute)
    assert found.fixed is not None
    assert found.shared_cores == 2
    assert {"AdamW", "SGD", "SGD with momentum", "other"} <= set(found.updates.speeds)
    again = fit(DiLoCoStrategy(H=1, optim_spec="adamw"), compute=measured.compute)
    assert again.virtual_seconds == measured.virtual_seconds


def test_others_work_while_it_is_measured(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are cores; they are gone afterwards."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)

    def work() -> None:
        (tmp_path / str(os.getpid())).touch()

    assert seconds_of(work, shared_cores=3) > 0
    pids = {int(path.name) for path in tmp_path.iterdir()}
    assert len(pids) == 3
    assert os.getpid() in pids
    for pid in pids - {os.getpid()}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_codecs_are_tried_on_as_many_values_as_a_run_has() -> None:
    """One part a rank for averages, all of them for the others, within bounds."""
    tried = {name: number for name, number, _ in coding_trials(1_100_000, 4)}
    assert tried["int8"] == 512**2
    assert tried["demo"] == tried["sign"] == 1024**2 or tried["demo"] == 1088**2 == tried["sign"]
    assert {number for _, number, _ in coding_trials(10, 4)} == {4096}


def test_charges_hang_on_the_optimizer_alone() -> None:
    """Whoever calls its step: the charge passes once for each, for all its parameters."""
    spent: list[float] = []
    parameters = [torch.nn.Parameter(torch.ones(10)), torch.nn.Parameter(torch.ones(5))]
    parameters[0].grad = torch.ones(10)
    optimizer = torch.optim.Adam(parameters)
    charge_updates([optimizer], Updates.model_validate({"Adam": "30 B/s"}), spent.append)
    optimizer.step()
    optimizer.step()
    assert spent == [2.0, 2.0]
