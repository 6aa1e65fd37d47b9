"""DiLoCoOptimizer in loops as OpenDiLoCo's users write them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import strategy_reference as reference
import torch
from torch import Tensor

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.run.optimizer import DiLoCoOptimizer
from exogym_core.strategy import DiLoCoStrategy
from netsim.errors import InputError

ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
MODEL, BATCHES = reference.make_problem(3, 7, 4, 6, seed=4)


def make(params: Any, comm: Communicator | None = None, **options: Any) -> DiLoCoOptimizer:
    """As OpenDiLoCo's README makes it, with a communicator in the place of the DHT."""
    given = {
        "batch_size": 4,
        "num_inner_steps": 3,
        "inner_optimizer": ADAMW,
        "outer_optimizer": NESTEROV,
        "params": params,
        "communicator": comm,
    }
    return DiLoCoOptimizer(**{**given, **options})


def trained(comm: Communicator) -> Tensor:
    model = copy.deepcopy(MODEL)
    optimizer = make(model.parameters(), comm)
    for batch in BATCHES:
        optimizer.zero_grad()
        model(batch[comm.rank]).backward()
        optimizer.step()
    assert (optimizer.local_step, optimizer.local_epoch, optimizer.num_samples) == (7, 2, 28)
    return reference.vector(model)


def test_a_loop_of_ones_own_trains_as_the_strategy_does() -> None:
    strategy = DiLoCoStrategy(ADAMW, NESTEROV, H=3)
    expected = reference.run_strategy(strategy, MODEL, BATCHES).results
    for got, want in zip(run_ranks(trained, 3).results, expected, strict=True):
        assert torch.equal(got, want)


def test_a_grad_scaler_and_a_schedule_work_as_in_their_readme() -> None:
    model = copy.deepcopy(MODEL)
    schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    optimizer = make(model.parameters(), scheduler=schedule)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for number, batch in enumerate(BATCHES[:4]):
        scaler.scale(model(batch[0]) * (float("inf") if number == 1 else 1.0)).backward()
        scaler.unscale_(optimizer.inner_optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(scaler)  # type: ignore[arg-type]
        scaler.update()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == 0.01 / 2**4, "a step that overflowed on this rank alone counts"
    assert bool(reference.vector(model).isfinite().all())
    with pytest.raises(InputError, match="closure and scaler cannot be used together"):
        optimizer.step(lambda: torch.zeros(()), scaler=scaler)


@pytest.mark.parametrize("unscaled", ["none", "optimizer", "inner"])
@pytest.mark.parametrize("steps", ["scaler.step(optimizer)", "optimizer.step(scaler=scaler)"])
def test_gradients_are_unscaled_once(unscaled: str, steps: str) -> None:
    """Whichever optimizer the scaler unscales; `scaler.step(optimizer)` unscaled again what the inner one had."""

    def trained(is_ours: bool) -> tuple[Tensor, float]:
        model = copy.deepcopy(MODEL)
        inner = functools.partial(torch.optim.SGD, lr=0.1)
        optimizer: Any = inner(model.parameters())
        if is_ours:
            optimizer = DiLoCoOptimizer(
                batch_size=1, num_inner_steps=10, inner_optimizer=inner, params=model.parameters()
            )
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number, batch in enumerate(BATCHES[:4]):
            scaler.scale(model(batch[0]) * (float("inf") if number == 2 else 1.0)).backward()
            if unscaled != "none":
                scaler.unscale_(optimizer.inner_optimizer if is_ours and unscaled == "inner" else optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            eval(steps if is_ours else "scaler.step(optimizer)", {"scaler": scaler, "optimizer": optimizer})
            scaler.update()
            optimizer.zero_grad()
        return reference.vector(model), scaler.get_scale()

    (ours, our_scale), (plain, scale) = trained(True), trained(False)
    assert torch.equal(ours, plain)
    assert our_scale == scale


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("overflows", [(0, 3), (2, None)])
def test_torchs_idiom_of_a_scaler_counts_steps_that_overflow(
    unscales: bool, overflows: tuple[int | None, ...]
) -> None:
    """`scaler.step(optimizer)` skipped them, rounds and all: ranks met in different rounds, or not at all."""

    def body(comm: Communicator, idiom: bool) -> tuple[int, int, float, Tensor]:
        model = copy.deepcopy(MODEL)
        optimizer = make(model.parameters(), comm)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number, batch in enumerate(BATCHES):
            optimizer.zero_grad()
            scale = float("inf") if number == overflows[comm.rank] else 1.0
            scaler.scale(model(batch[comm.rank]) * scale).backward()
            if idiom:
                if unscales:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
            else:
                optimizer.step(scaler=scaler)
            scaler.update()
        return optimizer.local_step, optimizer.local_epoch, scaler.get_scale(), reference.vector(model)

    theirs, ours = (run_ranks(functools.partial(body, idiom=idiom), 2).results for idiom in (True, False))
    for got, want in zip(theirs, ours, strict=True):
        assert got[:3] == want[:3]
        assert torch.equal(got[3], want[3])
        assert got[0] == len(BATCHES)


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    model = copy.deepcopy(MODEL)
    optimizer = make([{"params": list(model.parameters()), "lr": 0.5}])
    calls = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(BATCHES[0][0])
        loss.backward()
        calls.append(loss.item())
        return loss

    loss = optimizer.step(closure, batch_size=2)
    assert calls == [loss.item()]
    assert (optimizer.num_samples, optimizer.param_groups[0]["lr"]) == (2, 0.5)


def test_a_loop_under_torchrun_needs_a_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="torchrun has started 4 processes, but communicator is missing"):
        make(MODEL.parameters())


@pytest.mark.parametrize("stop", [2, 3])
def test_resuming_in_torchs_usual_order_keeps_every_ranks_own_parameters(stop: int) -> None:
    """Load the model, build the optimizer, load its state: in the middle of a round replicas differ."""
    schedule = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)

    def steps(model: Any, optimizer: DiLoCoOptimizer, rank: int, batches: Any) -> Tensor:
        for batch in batches:
            optimizer.zero_grad()
            model(batch[rank]).backward()
            optimizer.step()
        return reference.vector(model)

    def body(comm: Communicator) -> tuple[Tensor, Tensor]:
        model = copy.deepcopy(MODEL)
        optimizer = make(model.parameters(), comm, scheduler=schedule)
        steps(model, optimizer, comm.rank, BATCHES[:stop])
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        whole = steps(model, optimizer, comm.rank, BATCHES[stop:])
        again = copy.deepcopy(MODEL)
        again.load_state_dict(saved[0])
        resumed = make(again.parameters(), comm, scheduler=schedule)
        resumed.load_state_dict(saved[1])
        return whole, steps(again, resumed, comm.rank, BATCHES[stop:])

    for whole, resumed in run_ranks(body, 3).results:
        assert torch.equal(whole, resumed)
