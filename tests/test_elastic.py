"""Steps and rounds that go on with the ranks that are there; learned deadlines and quorums; by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
import torch
from experiments import fit_until
from hypothesis import given, settings
from hypothesis import strategies as st
from test_absent_ranks import MEETING, finished, samples
from torch import nn
from worlds import star_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.deadlines import ArrivalDelays, Deadline
from exogym_core.communicator.simulated.meeting_requests import Join
from exogym_core.results.fit_result import FitResult
from exogym_core.run.loop import take_step
from exogym_core.run.trainer import Trainer
from exogym_core.strategy import (
    AllReduceStrategy,
    Chain,
    DeMoStrategy,
    DGCStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    GPAStrategy,
    LowRankGradients,
    OneBitAdamStrategy,
    PowerSGDStrategy,
    SignSGDStrategy,
    SNOOStrategy,
    Strategy,
)
from exogym_core.strategy.base import StepContext
from netsim.ranks import Advance, Request

HOSTS = ("a", "b", "c")
WAITS: dict[str, Any] = {"averaging_timeout": 9, "timeout_waiting_for_peers": 3}
#: A ring's step on this network: 10 MB/s and two links of 10 ms.
VALUES = 3000
WIRE = 4 * VALUES / 10e6


def star(*events: Mapping[str, Any]) -> dict[str, Any]:
    rates = dict.fromkeys(HOSTS, "80 Mbit/s")
    return star_form(rates, rates, events=list(events), protocol="ideal")


def away(kind: str, at: float, seconds: float, host: str = "b") -> dict[str, Any]:
    return {"host": host, "at": f"{at} s", kind: True, "for": f"{seconds} s"}


def ring(num_ranks: int) -> float:
    """Seconds of a ring all-reduce of `VALUES`."""
    return 2 * (num_ranks - 1) * (WIRE / num_ranks + 0.02)


class Seen(NamedTuple):
    """A step as a rank did it: number, first value of the parameters then, time, bytes sent."""

    step: int
    value: float
    seconds: float
    bytes_sent: int


def train(
    comm: Communicator,
    strategy: Strategy,
    steps: int = 24,
    counts: Sequence[int] = (),
    width: int = VALUES,
    sizes: Sequence[int] = (),
) -> list[Seen]:
    """A second a step; every rank goes towards values of its own."""
    model = nn.Linear(width, 1, bias=False)
    nn.init.zeros_(model.weight)
    strategy.setup(model, comm, steps, 0)
    seen = []

    def gradients(step: None, context: StepContext) -> float:
        comm.advance(1.0)
        model.weight.grad = model.weight.detach() - (1.0 + comm.rank) * torch.linspace(1.0, 2.0, width)
        return 0.0

    while strategy.local_step < steps:
        number = strategy.local_step
        if not strategy.workers.take_place(number):
            strategy.skip_step()
            continue
        own = counts[comm.rank] if counts else 1
        take_step(strategy, gradients, None, StepContext(number, own, counts, data_sizes=sizes))
        value = float(model.weight[0, 0].detach())
        seen.append(Seen(number + 1, value, comm.now(), comm.traffic.bytes_sent))
    return seen


def trained(make: Callable[[], Strategy], *events: Mapping[str, Any], **options: Any) -> list[list[Seen]]:
    run = run_ranks(lambda comm: train(comm, make(), **options), 3, star(*events), collectives="ring")
    return run.results


# --- values and times by hand ---------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(), (1, 2, 5)])
def test_a_lost_ranks_gradient_is_not_in_the_mean_and_the_rest_is_weighed_by_samples(
    counts: tuple[int, ...],
) -> None:
    """Rank 1 is away from the sixth step on; it is healed in front of the 17th, which is its own again."""
    steps = trained(lambda: AllReduceStrategy("sgd", lr=0.1, **WAITS), away("crash", 5.5, 10), counts=counts)
    weights, value = counts or (1, 1, 1), 0.0
    mine = [each.step for each in steps[1]]
    for each in steps[0]:
        ranks = [0, 1, 2] if each.step in mine and each.step != 6 else [0, 2]
        total = sum(weights[rank] for rank in ranks)
        value -= 0.1 * sum(weights[rank] / total * (value - (1 + rank)) for rank in ranks)
        assert each.value == pytest.approx(value, rel=1e-5)
    assert steps[0][-1].value == steps[1][-1].value == steps[2][-1].value


def test_one_crash_and_heal_take_the_time_that_they_take_by_hand() -> None:
    steps = trained(
        lambda: AllReduceStrategy({"name": "sgd", "lr": 0.1, "momentum": 0.9}, **WAITS),
        away("crash", 5.5, 10),
    )
    whole, two = 1 + ring(3), 1 + ring(2)
    ends = {each.step: each.seconds for each in steps[0]}
    assert ends[5] == pytest.approx(5 * whole, abs=1e-6)
    # The others come to the sixth exchange 1 s later, and wait 3 s for rank 1.
    alone = 5 * whole + 1 + 3 + ring(2)
    assert ends[6] == pytest.approx(alone, abs=1e-6)
    # Rank 1's host is back at 15.5 s, and its step computed again at 16.5 s: too late. The others compute the 13th,
    # whose state they have had since 15.7 s: rank 1 takes that.
    assert alone + 6 * two < 16.5 < alone + 6 * two + 1
    assert [each.step for each in steps[1]] == [1, 2, 3, 4, 5, 6, *range(13, 25)]
    # Parameters and momentum in 24 kB, and the state's form.
    state = steps[1][5].bytes_sent - steps[1][4].bytes_sent
    assert 2 * 4 * VALUES < state < 2 * 4 * VALUES + 1000
    healed = 16.5 + state / 10e6 + 0.02
    assert steps[1][5].seconds == pytest.approx(healed, abs=1e-6)
    # All wait for its step, and go on together.
    assert ends[13] == pytest.approx(healed + 1 + ring(3), abs=1e-6)
    assert ends[24] == pytest.approx(ends[13] + 11 * whole, abs=1e-6)


LOSSY: dict[str, Callable[..., Strategy]] = {
    "DGC": lambda **options: DGCStrategy(lr=0.1, momentum=0.0, density=0.5, **options),
    "SignSGD": lambda **options: SignSGDStrategy(lr=0.1, **options),
    "int8": lambda **options: AllReduceStrategy("sgd", lr=0.1, codec="int8", error_feedback=True, **options),
    "int8 in rounds": lambda **options: DiLoCoStrategy(
        "sgd", lr=0.1, H=1, codec="int8", error_feedback=True, **options
    ),
    "int8 at once": lambda **options: DiLoCoStrategy(
        "sgd", lr=0.1, H=1, codec="int8", error_feedback=True, rejoin="at_once", **options
    ),
    "DeMo": lambda **options: DeMoStrategy(weight_decay=0.5, compression_topk=2, **options),
    "OneBitAdam": lambda **options: OneBitAdamStrategy(lr=0.1, freeze_step=2, **options),
    "SNOO": lambda **options: SNOOStrategy("sgd", lr=0.1, H=2, **options),
    "Chain": lambda **options: Chain([LowRankGradients(**options)], "sgd", lr=0.1),
}


@pytest.mark.parametrize("name", LOSSY)
def test_an_exchange_that_was_cut_off_leaves_no_trace(name: str) -> None:
    """Rank 1's link breaks while gradients travel: after the time-out all are as if it had been late, it too."""
    calm = trained(LOSSY[name], steps=4)[0]
    instant = calm[2].seconds + 1.01
    cut = {"link": ["b", "switch"], "at": f"{instant} s", "down": True, "for": "60 s"}
    pause = away("pause", calm[2].seconds + 0.5, 60)

    def train_with(event: Mapping[str, Any]) -> tuple[list[Seen], list[dict[str, Any]]]:
        made: list[Strategy] = []

        def make() -> Strategy:
            made.append(LOSSY[name](**WAITS))
            return made[-1]

        seen = trained(make, event, steps=6)[0]
        lost = next(each for each in made if each.comm.rank == 1)
        return seen, [lost.site.state_dict(), *(each.state_of(each.own_state) for each in lost.acting)]

    (broken, kept), (late, expected) = train_with(cut), train_with(pause)
    torch.testing.assert_close(kept, expected, rtol=0, atol=0, equal_nan=True)
    assert broken[3].seconds == pytest.approx(
        calm[2].seconds + 1 + 9 + calm[3].seconds - calm[2].seconds - 1, abs=0.1
    )
    assert [each.value for each in broken] == [each.value for each in late]


# --- without losses -------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Several buckets of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.Linear(8, 1))

    def forward(self, batch: Any) -> torch.Tensor:
        return ((self.layers(batch[0]) - batch[1]) ** 2).mean()


ELASTIC: dict[str, Callable[..., Strategy]] = {
    "AllReduce in buckets": lambda **options: AllReduceStrategy(bucket_bytes=300, **options),
    "AllReduce int8": lambda **options: AllReduceStrategy(codec="int8", error_feedback=True, **options),
    "PowerSGD": PowerSGDStrategy,
    "DGC": lambda **options: DGCStrategy(lr=1e-3, **options),
    "FedAvg": lambda **options: FedAvgStrategy(H=2, **options),
    "DiLoCo": lambda **options: DiLoCoStrategy(H=2, **options),
    "DeMo": lambda **options: DeMoStrategy(weight_decay=0.1, compression_topk=4, **options),
    "OneBitAdam": lambda **options: OneBitAdamStrategy(freeze_step=4, **options),
    "SNOO": lambda **options: SNOOStrategy(H=3, **options),
    "GPA": GPAStrategy,
    "Chain": lambda **options: Chain([LowRankGradients(**options)], max_norm=1.0),
}


def fit(
    strategy: Strategy,
    *events: Mapping[str, Any],
    steps: int = 6,
    stop_at: int | None = None,
    **arguments: Any,
) -> FitResult:
    torch.manual_seed(0)
    given_: dict[str, Any] = {
        "num_nodes": 3,
        "max_steps": steps,
        "val_interval": 3,
        "topology": star(*events),
    }
    given_ |= {"compute": 1.0, "strategy": strategy}
    given_ |= {"batch_size": 2, "device": "cpu", "workers": "threads"}
    return fit_until(Trainer(Deep(), samples(), samples()), stop_at, **{**given_, **arguments})


@pytest.mark.parametrize("name", ELASTIC)
def test_without_losses_elastic_is_plain_to_the_bit_and_heals_to_equal_replicas(name: str) -> None:
    make = ELASTIC[name]
    plain, elastic = fit(make()), fit(make(**WAITS))
    assert elastic.virtual_seconds == pytest.approx(plain.virtual_seconds, abs=1e-6)
    assert (elastic.bytes_sent, elastic.final_loss) == (plain.bytes_sent, plain.final_loss)
    for one, other in zip(plain.rank_states, elastic.rank_states, strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert (elastic.alive_ranks, elastic.averaging_ranks) == (3, 3)
    stormy = fit(make(**WAITS), away("crash", 2.5, 3), steps=10)
    assert stormy.dropped_peers
    assert stormy.dropped_peers[-1]["back_step"] is not None
    for state in stormy.rank_states:
        assert all(torch.equal(state[key], stormy.rank_states[0][key]) for key in state)


def outcome(result: FitResult) -> Any:
    tensors = [value for state in result.rank_states for value in state.values()]
    return result.history, result.validation, result.dropped_peers, [value.tolist() for value in tensors]


def test_processes_and_resumed_runs_give_what_threads_give(tmp_path: Path) -> None:
    def run(**arguments: Any) -> FitResult:
        strategy = AllReduceStrategy(
            bucket_bytes=300,
            **WAITS,
            deadline={"median": 1, "mad": 3},
            lr_scheduler="lambda_cosine",
            lr_scheduler_kwargs={"warmup_steps": 2},
        )
        storm = [away("crash", 2.5, 3), away("pause", 9.0, 4, "c")]
        return fit(strategy, *storm, steps=12, checkpoint_interval=2, **arguments)

    threads = run(save_dir=tmp_path / "one")
    assert len(threads.dropped_peers or ()) >= 2
    assert outcome(run(save_dir=tmp_path / "two", workers={"kind": "processes", "processes": 2})) == outcome(
        threads
    )
    kept = {"save_dir": tmp_path / "stopped"}
    stopped = run(**kept, stop_at=7)
    assert not stopped.complete
    resumed = run(**kept, resume_from=stopped.checkpoint_folder)
    assert resumed.resumed_step
    assert outcome(resumed) == outcome(threads)


# --- deadlines ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=5), min_size=1, max_size=20), st.floats(0, 200)
)
@settings(max_examples=25)
def test_a_learned_deadline_follows_the_last_arrivals_and_never_passes_the_fixed_one(
    meetings: list[list[float]], limit: float
) -> None:
    delays = ArrivalDelays()
    for number, own in enumerate(meetings):
        for delay in own:
            delays.add(number, delay, 0.0)
    known = sorted(delay for own in meetings[-16:] for delay in own)
    middle = median(known)
    spread = median(abs(each - middle) for each in known)
    assert delays.seconds(Deadline(1, 3), limit) == pytest.approx(min(limit, middle + 3 * spread))
    assert delays.seconds(Deadline(quantile=1), limit) == min(limit, known[-1])
    assert delays.seconds(Deadline(), limit) == limit
    tenth = delays.seconds(Deadline(quantile=0.1), math.inf)
    assert sum(each <= tenth for each in known) >= 0.1 * len(known)


def rounds(
    delays: Sequence[Sequence[float]], deadline: Deadline, seconds: float
) -> list[list[tuple[int, ...]]]:
    """Members of each meeting, as each rank hears: `delays[rank][number]` s after the meeting before."""
    ranks = tuple(range(len(delays)))
    streams: list[list[Request]] = []
    for rank, own in enumerate(delays):
        stream: list[Request] = []
        for number, delay in enumerate(own):
            key = MEETING._replace(number=number)
            stream += [Advance(delay), Join(key, rank, ranks, seconds, deadline=deadline)]
        streams.append(stream)
    heard: list[list[tuple[int, ...]]] = [[] for _ in ranks]
    for rank, met in finished(streams)[1].answers:
        heard[rank].append(tuple(each.member for each in met.present))
    return heard


def test_a_straggler_is_waited_for_once_and_then_left_out_unless_a_quorum_needs_it() -> None:
    """Arrivals 0, 0.1, 0.2 and 5 s after the first: the median and three deviations are 0.45 s."""
    delays = [[1.0] * 3, [1.1] * 3, [1.2] * 3, [6.0] * 3]
    learned = rounds(delays, Deadline(1, 3), 60.0)[0]
    assert learned == [(0, 1, 2, 3), (0, 1, 2), (0, 1, 2)]
    assert rounds(delays, Deadline(1, 3, grace_seconds=5.0), 60.0)[0] == [(0, 1, 2, 3)] * 3
    assert rounds(delays, Deadline(1, 3, quorum=4), 60.0)[0] == [(0, 1, 2, 3)] * 3
    assert rounds(delays, Deadline(), 60.0)[0] == [(0, 1, 2, 3)] * 3


def test_rounds_of_every_family_learn_their_deadline() -> None:
    """Rank 2 is paused for 5 s again and again: when arrivals are known no round waits for it."""
    pauses = [away("pause", at, 5, "c") for at in (4.5, 14.5)]
    options: dict[str, Any] = {"averaging_timeout": 30}
    learned: dict[str, Any] = {"deadline": {"median": 1, "mad": 3}, "grace": "100 ms"}
    for make in (AllReduceStrategy, lambda **more: DiLoCoStrategy(H=2, **more)):
        result, fixed = (fit(make(**options, **more), *pauses, steps=12) for more in (learned, {}))
        assert result.virtual_seconds < fixed.virtual_seconds - 5
        assert result.averaging_ranks < fixed.averaging_ranks == 3
        assert {(row["num_peers"], row["num_alive"]) for row in result.history} >= {(3, 3), (2, 2)}


# --- what does not go together --------------------------------------------------------------------------------


def test_a_time_out_shorter_than_a_round_is_warned_of_with_both_numbers() -> None:
    strategy = DiLoCoStrategy(H=5, rejoin="at_once", averaging_timeout=9, timeout_waiting_for_peers=2)
    with pytest.warns(UserWarning, match=r"time-out of 2 s, shorter than a round of 5 s"):
        fit(strategy, steps=10, compute=1.0)
