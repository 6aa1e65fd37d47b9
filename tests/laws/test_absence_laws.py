"""Rounds that go on without a rank: the same bits in threads and processes, and through a stop at any step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from result_bits import fit_until, outcome
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from worlds import star_form

from exogym_core import Trainer
from exogym_core.checkpoints.checkpoint import StoredCheckpoint, find_checkpoint
from exogym_core.results.fit_result import FitResult
from exogym_core.strategy import DiLoCoStrategy
from netsim.errors import DeadlockError

STEPS, H = 20, 2
PROCESSES = {"kind": "processes", "processes": 2}


class Model(nn.Module):
    """Draws random numbers, so that a step too many or too few is seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.2), nn.Linear(40, 1))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return ((self.layers(batch[0]) - batch[1]) ** 2).mean()


def event(host: str, at: float, lasts: float | None, crash: bool) -> dict[str, Any]:
    what: dict[str, Any] = (
        {"host": host, "crash": True} if crash else {"link": [host, "switch"], "down": True}
    )
    return {**what, "at": f"{at} s", **({} if lasts is None else {"for": f"{lasts} s"})}


def topology(events: Sequence[Mapping[str, Any]], protocol: str) -> dict[str, Any]:
    rates = {"a": "100 kbit/s", "b": "100 kbit/s", "home": "20 kbit/s"}
    return star_form(rates, rates, protocol=protocol, events=list(events))


def fit(
    events: Sequence[Mapping[str, Any]],
    protocol: str = "linux-tcp",
    stop_at: int | None = None,
    **arguments: Any,
) -> FitResult:
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = Trainer(Model(), data, data)
    strategy = DiLoCoStrategy(
        "adamw",
        H=H,
        join_at=None if events else {2: "7 s"},
        averaging_timeout=4,
        timeout_waiting_for_peers=2,
        codec="int8",
        error_feedback=True,
        lr_scheduler="lambda_cosine",
        lr_scheduler_kwargs={"warmup_steps": 3, "cosine_anneal": True},
    )
    return fit_until(
        trainer,
        stop_at,
        strategy=strategy,
        num_nodes=3,
        max_steps=STEPS,
        batch_size=2,
        val_interval=3,
        correlation_interval=4,
        topology=topology(events, protocol),
        compute={"fixed": "1 s", "jitter": 0.1},
        device="cpu",
        **{"workers": "threads", **arguments},
    )


def end_of(events: Sequence[Mapping[str, Any]], protocol: str) -> FitResult | DeadlockError:
    try:
        return fit(events, protocol)
    except DeadlockError as error:
        return error


OUTAGES: dict[str, list[dict[str, Any]]] = {
    "joins late": [],
    "link": [event("home", 5.0, 9.0, crash=False)],
    "crash": [event("home", 5.0, 9.0, crash=True)],
    "the first rank": [event("a", 5.0, 9.0, crash=False)],
    "for ever": [event("home", 5.0, None, crash=True)],
}


@cache
def undisturbed(name: str) -> Any:
    result = fit(OUTAGES[name])
    assert result.dropped_peers
    return outcome(result)


@pytest.mark.parametrize("name", OUTAGES)
def test_processes_give_what_threads_give(name: str) -> None:
    assert outcome(fit(OUTAGES[name], workers=PROCESSES)) == undisturbed(name)


@pytest.mark.parametrize("name", OUTAGES)
def test_stopped_and_resumed_is_never_stopped(name: str, tmp_path: Path) -> None:
    """Several times, as the run goes on."""
    kept, where = 0, {"save_dir": tmp_path}
    for stop_at in (3, 6, 8, 11, 16, None):
        result = fit(OUTAGES[name], stop_at=stop_at, checkpoint_interval=3, **where)
        assert result.resumed_step == kept
        assert result.complete == (stop_at is None)
        assert result.checkpoint_folder is not None
        found = find_checkpoint(result.checkpoint_folder)
        if found is not None:  # before the first there is nothing to go on from
            where = {"resume_from": result.checkpoint_folder}
        kept = found.step if isinstance(found, StoredCheckpoint) else 0
    assert outcome(result) == undisturbed(name)


def test_if_all_are_gone_the_run_ends_with_the_cause() -> None:
    for crash in (True, False):
        hosts = [event(host, 5.0, None, crash=crash) for host in ("a", "b", "home")]
        if crash:
            with pytest.raises(DeadlockError, match=r"hosts? a, .*crashed at 5 s and never comes? back"):
                fit(hosts)
        else:  # each is alone: the first goes on
            result = fit(hosts)
            assert result.averaged_ranks[STEPS] == [0]


def test_if_all_are_away_they_continue_when_the_first_is_back() -> None:
    lasts = {"a": 20.0, "b": 10.0, "home": 30.0}
    result = fit([event(host, 4.0, seconds, crash=True) for host, seconds in lasts.items()])
    rounds = list(result.averaged_ranks.values())
    assert [1] in rounds
    assert rounds[-1] == [0, 1]  # home comes back when they have ended


@given(
    st.lists(
        st.builds(
            event,
            st.sampled_from(["a", "b", "home"]),
            st.sampled_from([0.5, 1.0, 2.0, 3.7, 6.0, 9.5]),
            st.sampled_from([None, 0.5, 3.0, 8.0, 20.0]),
            st.booleans(),
        ),
        max_size=4,
    ),
    st.sampled_from(["ideal", "linux-tcp", "gloo"]),
)
@settings(max_examples=12)
def test_every_run_ends_and_reports_the_sites_present(events: list[dict[str, Any]], protocol: str) -> None:
    result = end_of(events, protocol)
    if isinstance(result, DeadlockError):
        # Only a host that was alone, since others were cut off too, takes the newest state with it for good.
        hit = {entry.get("host") or entry["link"][0] for entry in events}
        assert len(hit) > 1
        assert any("for" not in entry for entry in events)
        assert re.search("never comes? back", str(result))
        return
    assert result.complete
    assert [row["step"] for row in result.history] == list(range(1, STEPS + 1))
    seconds = [row["virtual_seconds"] for row in result.history]
    assert seconds == sorted(seconds)
    rounds = result.averaged_ranks
    assert list(rounds) == list(range(H, STEPS + 1, H))
    assert result.dropped_peers is not None
    for step, ranks in rounds.items():
        away = {
            row["rank"]
            for row in result.dropped_peers
            if row["step"] <= step and (row["back_step"] is None or step <= row["back_step"])
        }
        assert ranks == [rank for rank in range(3) if rank not in away]
