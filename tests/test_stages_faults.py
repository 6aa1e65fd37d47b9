"""Stages whose ranks are lost and return: values of an undisturbed run; times and bytes by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_stages import IMAGES, SGD, TEXT, Batches, Mean, deep_mlp, fit, llama, tied_gpt
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset
from worlds import star

from exogym_core import FitResult
from exogym_core.strategy import AllReduceStrategy, PowerSGDStrategy, Strategy
from netsim.errors import DeadlockError, InputError

WAITS: dict[str, Any] = {"averaging_timeout": "2 s", "timeout_waiting_for_peers": "2 s"}
SLOT = 0.768 / 2 / 4  # of a micro-batch in one of two stages, forwards and backwards
WHOLE = (4 + 2 - 1) * SLOT


def lost(rank: int, at: float, seconds: float | None = None) -> dict[str, Any]:
    """A crash of the host of a rank, with its return after `seconds`; None: never."""
    event: dict[str, Any] = {"host": f"h{rank}", "at": f"{at} s", "crash": True}
    return event if seconds is None else {**event, "for": f"{seconds} s"}


def train(
    model: nn.Module,
    data: TensorDataset,
    events: Sequence[dict[str, Any]],
    stages: dict[str, Any],
    strategy: Strategy,
    **options: Any,
) -> tuple[FitResult, dict[str, Tensor]]:
    """Ranks on a network that takes no time, rank r on host r; a worker's step computes 768 ms."""
    hosts = stages["count"] * options.get("num_nodes", 2)
    free = star(hosts, bandwidth="1e9 Gbit/s", latency="0 s", events=list(events))
    about = {"max_steps": 6, "val_interval": 3, "topology": free, "compute": "768 ms"}
    return fit(model, data, strategy, stages, **(about | options))


def eight_layers() -> nn.Module:
    torch.manual_seed(5)
    return Batches(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)), Mean()))


@pytest.mark.parametrize(
    ("make", "count", "schedule", "crashes"),
    [
        (tied_gpt, 2, "1f1b", [(3, 0.7, 2.9), (0, 4.5, 0.4)]),
        (llama, 3, "gpipe", [(1, 0.2, 3.0), (5, 0.3, 1.0)]),
    ],
)
def test_whoever_is_lost_values_are_those_of_an_undisturbed_run(
    make: Any, count: int, schedule: str, crashes: list[tuple[int, float, float]]
) -> None:
    """Every step is of all samples, its gradients clipped and those of tied weights summed over all stages."""
    stages = {"count": count, "microbatches": 4, "schedule": schedule}

    def run(events: Sequence[dict[str, Any]], **given: Any) -> tuple[FitResult, dict[str, Tensor]]:
        strategy = AllReduceStrategy(optim_spec=SGD, max_norm=0.3, **given)
        return train(make().double(), TEXT, events, stages, strategy)

    once, weights = run([])
    disturbed, others = run([lost(*each) for each in crashes], **WAITS)
    assert len(disturbed.dropped_peers or ()) >= 1
    for row, other in zip(once.history, disturbed.history, strict=True):
        assert other["train_loss"] == pytest.approx(row["train_loss"], rel=1e-12)
        assert other["examples_trained"] == row["examples_trained"]
    assert disturbed.final_loss == pytest.approx(once.final_loss, rel=1e-6)
    for name, value in weights.items():
        assert torch.allclose(others[name], value, rtol=0, atol=1e-12), name


@pytest.mark.parametrize(("rank", "slots"), [(2, 2 * 4), (3, 2 * 4 + 1)])
def test_a_loss_and_a_return_take_the_time_and_bytes_that_they_take_by_hand(rank: int, slots: int) -> None:
    """The third step is repeated after its time-out, the fourth without the rank, the fifth with it again."""
    model = eight_layers()
    result, _ = train(
        model,
        TensorDataset(torch.randn(96, 16)),
        [lost(rank, 1.0, 3.2)],
        {"count": 2, "microbatches": 4},
        AllReduceStrategy(optim_spec=SGD, **WAITS),
        val_size=0,
        collectives="ring",
    )
    ends = [WHOLE, 2 * WHOLE, 2 * WHOLE + 2 + slots * SLOT]
    ends += [ends[2] + slots * SLOT, ends[2] + slots * SLOT + WHOLE, ends[2] + slots * SLOT + 2 * WHOLE]
    assert [row["virtual_seconds"] for row in result.history] == pytest.approx(ends, abs=1e-5)
    members = [each for each in range(4) if each != rank]
    assert list(result.averaged_ranks.values()) == [[*range(4)]] * 2 + [members] * 2 + [[*range(4)]] * 2
    assert [(row["rank"], row["step"], row["back_step"]) for row in result.dropped_peers or ()] == [
        (rank, 3, 4)
    ]

    boundary = 2 * 8 * 16 * 4 * 2  # workers, samples, width, bytes, ways
    values = 4 * 16 * 16 * 4  # of a stage
    sent = [row["bytes_sent"] for row in result.history]
    steps = [after - before for before, after in zip([0, *sent], sent, strict=False)]
    whole, partly = boundary + 4 * values, boundary + 2 * values  # a ring of two sends the values once each
    assert steps[:2] == [whole] * 2
    assert steps[3] == partly
    assert steps[5] == whole
    # The lost rank's part of its undone step counts when it is back, as does the state: weights, momenta, and a form.
    form = sum(steps) - 4 * whole - 2 * partly - whole - 2 * values
    assert 0 < form < 1500


def test_a_rank_that_cannot_download_is_not_waited_for() -> None:
    """Its link is cut to the end: all steps from the third on are those of the others."""
    model = eight_layers()
    cut = {"at": "1 s", "link": ["h3", "switch"], "down": True, "for": "20 s"}
    strategy = AllReduceStrategy(optim_spec=SGD, **WAITS)
    data, stages = TensorDataset(torch.randn(96, 16)), {"count": 2, "microbatches": 4}
    result, _ = train(model, data, [cut], stages, strategy, val_size=0)
    ends = [WHOLE, 2 * WHOLE, *(2 * WHOLE + 2 + number * 9 * SLOT for number in range(1, 5))]
    assert [row["virtual_seconds"] for row in result.history] == pytest.approx(ends, abs=1e-5)


def test_a_repeated_step_changes_buffers_once() -> None:
    """Rank 3 is lost in the second step: rank 1 takes four micro-batches in the first, and eight from then on."""
    layers = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 16)]
    data, stages = TensorDataset(torch.randn(96, 16)), {"count": 2, "microbatches": 4}
    strategy = AllReduceStrategy(optim_spec=SGD, **WAITS)
    model = Batches(nn.Sequential(*layers, Mean()))
    result, _ = train(model, data, [lost(3, 1.0)], stages, strategy, val_size=0)
    assert result.rank_states[0]["layers.1.num_batches_tracked"] == 4 + 5 * 8


def test_the_same_bits_in_processes() -> None:
    def run(**options: Any) -> tuple[FitResult, dict[str, Tensor]]:
        strategy = PowerSGDStrategy(optim_spec=SGD, **WAITS)
        stages = {"count": 2, "microbatches": 4, "codec": "top-k"}
        return train(tied_gpt(), TEXT, [lost(3, 1.0, 3.2)], stages, strategy, **options)

    once, weights = run()
    apart, others = run(workers={"kind": "processes", "processes": 2})
    assert (apart.history, apart.validation) == (once.history, once.validation)
    for name, value in weights.items():
        assert torch.equal(value, others[name])


def test_a_position_without_ranks_is_waited_for() -> None:
    """Rank 1 is lost for ever; rank 3 then does its work alone, and the others wait while it is away."""
    stages, strategy = {"count": 2, "microbatches": 4}, AllReduceStrategy(optim_spec=SGD, **WAITS)
    events = [lost(1, 0.1), lost(3, 3.0, 5)]
    model = eight_layers()
    data = TensorDataset(torch.randn(96, 16))
    result, _ = train(model, data, events, stages, strategy, val_size=0, max_steps=2)
    # In the second step rank 3 has waited for a first forward pass and taken one; it begins again after its last call.
    called = 2 + 9 * SLOT + 2 * SLOT / 3
    expected = 2 + 2 * 9 * SLOT + 8.0 - called
    assert result.history[-1]["virtual_seconds"] == pytest.approx(expected, abs=1e-5)

    with pytest.raises(DeadlockError, match=r"host h1 crashed at 0.1 s and never comes back, host h3"):
        train(deep_mlp(), IMAGES, [lost(1, 0.1), lost(3, 3.0)], stages, strategy)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The images, one after the other."""

    def __iter__(self) -> Any:
        return iter(IMAGES)


def test_streams_do_not_go_with_lost_ranks() -> None:
    with pytest.raises(InputError, match="one training set with a length for all workers"):
        train(deep_mlp(), Stream(), [], {"count": 2}, AllReduceStrategy(**WAITS), num_epochs=None)
