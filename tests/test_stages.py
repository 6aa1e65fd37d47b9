"""Stages: a worker as a chain of ranks trains as one rank with the whole model does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from worlds import star_form

import netgym
from exogym_core import FitResult, Trainer
from exogym_core.config import yaml_text
from exogym_core.stages.faults import StageRoute
from exogym_core.stages.options import Stages, actions
from exogym_core.stages.split import Cut, StagePart
from exogym_core.strategy import (
    AllReduceStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    NoLoCoStrategy,
    OptimSpec,
    SparseLoCoStrategy,
    Strategy,
)
from netgym.planning.stages import dtypes_in_half
from netgym.tasks import GPT, MLP, Llama
from netsim import Topology
from netsim.errors import InputError

SEED = torch.Generator().manual_seed(7)
TOKENS = torch.randint(0, 48, (96, 13), generator=SEED)
TEXT = TensorDataset(TOKENS[:, :-1].contiguous(), TOKENS[:, 1:].contiguous())
IMAGES = TensorDataset(torch.randn(96, 64, generator=SEED), torch.randint(0, 10, (96,), generator=SEED))


def deep_mlp() -> nn.Module:
    torch.manual_seed(3)
    return MLP(hidden=(24, 24, 24, 24, 24, 24, 24))


def tied_gpt() -> nn.Module:
    torch.manual_seed(3)
    return GPT("byte", vocab_size=48, block_size=12, num_layers=4, width=16)


def llama() -> nn.Module:
    torch.manual_seed(3)
    return Llama("2m", vocab_size=48, block_size=12, width=16, mlp_width=24, num_layers=4)


MODELS: dict[str, tuple[Callable[[], nn.Module], TensorDataset]] = {
    "MLP": (deep_mlp, IMAGES),
    "GPT": (tied_gpt, TEXT),
    "Llama": (llama, TEXT),
}
SGD = OptimSpec(torch.optim.SGD, lr=0.05, momentum=0.9)
SUBSPACE = {"name": "subspace", "width": 4}

# Strategies that neither draw nor choose values over a whole model.
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "AllReduce": lambda: AllReduceStrategy(optim_spec=SGD, max_norm=0.3),
    "DiLoCo": lambda: DiLoCoStrategy(H=2, optim_spec=SGD, max_norm=0.3),
    "FedAvg": lambda: FedAvgStrategy(H=3, optim_spec=SGD),
    "NoLoCo": lambda: NoLoCoStrategy(H=2, optim_spec=SGD),
    "SparseLoCo": lambda: SparseLoCoStrategy(H=2, optim_spec=SGD),
    "DeMo": lambda: DeMoStrategy(lr=1e-3),
}


def fit(
    model: nn.Module, data: TensorDataset, strategy: Strategy, stages: Any, **options: Any
) -> tuple[FitResult, dict[str, Tensor]]:
    about = {"topology": "lan", "protocol": "ideal", "compute": "64 ms", "workers": "threads", "max_steps": 4}
    about |= {"batch_size": 8, "val_interval": 2, "num_nodes": 2, "progress": False}
    fitted = Trainer(model, data, data).fit(strategy=strategy, stages=stages, **(about | options))
    return fitted.fit_result, fitted.state_dict()


@settings(max_examples=2)
@given(
    model=st.sampled_from(sorted(MODELS)),
    strategy=st.sampled_from(sorted(STRATEGIES)),
    count=st.integers(2, 4),
    micro=st.sampled_from([1, 2, 4, 8]),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    num_nodes=st.integers(1, 3),
)
def test_stages_train_as_one_rank_with_the_whole_model(
    model: str, strategy: str, count: int, micro: int, schedule: str, num_nodes: int
) -> None:
    if schedule == "interleaved":
        count, micro = 2, max(2, micro)  # two stages a rank
    make, data = MODELS[model]
    whole, weights = fit(make(), data, STRATEGIES[strategy](), None, num_nodes=num_nodes)
    stages = {"count": count, "microbatches": micro, "schedule": schedule}
    cut, others = fit(make(), data, STRATEGIES[strategy](), stages, num_nodes=num_nodes)
    for row, other in zip(whole.history, cut.history, strict=True):
        assert other["train_loss"] == pytest.approx(row["train_loss"], rel=1e-4)
        assert other["examples_trained"] == row["examples_trained"]
    assert cut.final_loss == pytest.approx(whole.final_loss, rel=1e-4)
    for name, value in weights.items():
        assert torch.allclose(others[name], value, atol=1e-3), name
    for state, other in zip(whole.rank_states, cut.rank_states, strict=True):
        assert list(state) == sorted(other, key=list(state).index)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("count", "micro"), [(2, 4), (4, 8)])
def test_a_step_takes_the_slots_of_the_schedule(schedule: str, count: int, micro: int) -> None:
    """m + p - 1 slots, each a forward and a backward pass of a stage, on a network that takes no time."""
    free = Topology.from_mapping(star_form(count, bandwidth="1e9 Gbit/s", latency="0 s"))
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(8)), Mean())
    stages = {"count": count, "microbatches": micro, "schedule": schedule}
    about = {"num_nodes": 1, "topology": free, "max_steps": 1, "val_size": 0, "compute": "768 ms"}
    data = TensorDataset(torch.randn(16, 16))
    result, _ = fit(Batches(model), data, AllReduceStrategy(optim_spec=SGD), stages, **about)
    slot = 0.768 / count / micro
    assert result.virtual_seconds == pytest.approx((micro + count - 1) * slot, abs=1e-7)
    assert result.compute_seconds == pytest.approx([0.768 / count] * count, abs=1e-7)


@settings(max_examples=2)
@given(
    count=st.integers(2, 4),
    micro=st.sampled_from([1, 2, 4]),
    delay=st.integers(1, 3),
)
def test_pipedream_applies_each_gradient_as_late_as_its_stage(count: int, micro: int, delay: int) -> None:
    """Values of one process that delays the gradients of each part, and times of the passes one by one."""
    free = Topology.from_mapping(star_form(count, bandwidth="1e9 Gbit/s", latency="0 s"))
    torch.manual_seed(5)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(count)]
    sample = torch.randn(1, 16)
    steps, rate = 6, 0.3
    stages = {"count": count, "microbatches": micro, "schedule": "pipedream", "delay": delay}
    about = {"num_nodes": 1, "topology": free, "max_steps": steps, "val_size": 0}
    sgd = OptimSpec(torch.optim.SGD, lr=rate)
    model = Batches(nn.Sequential(*layers, Mean()))
    data = TensorDataset(sample.expand(64, 16).contiguous())
    result, weights = fit(
        model,
        data,
        AllReduceStrategy(optim_spec=sgd),
        stages,
        **about,
        compute=f"{64 * count} ms",
        batch_size=4,
    )

    versions = [[layer.weight.detach().clone() for layer in layers]]
    gradients: list[list[Tensor]] = []  # of each step's weights, by stage
    losses = []
    for step in range(steps):
        own = [weight.clone().requires_grad_() for weight in versions[-1]]
        value = sample
        for weight in own:
            value = value @ weight.T
        loss = value.square().mean()
        losses.append(loss.item())
        gradients.append(list(torch.autograd.grad(loss, own)))
        after = []
        for position, weight in enumerate(versions[-1]):
            lag = delay * (count - 1 - position)
            due = [micro * step + index - lag for index in range(micro)]
            mean = sum(
                (gradients[at // micro][position] / micro for at in due if at >= 0), torch.zeros(16, 16)
            )
            after.append(weight - rate * mean)
        versions.append(after)
    assert [row["train_loss"] for row in result.history] == pytest.approx(losses, rel=1e-5)
    for position, weight in enumerate(versions[-1]):
        assert torch.allclose(weights[f"layers.{position}.weight"], weight, atol=1e-5)

    slot, done = 64e-3 / micro, dict[tuple[bool, int, int], float]()
    for now in range(steps * micro):  # forward passes take a third of a slot
        for position in range(count):
            before = done.get((True, position, now - 1), 0.0), done.get((True, position - 1, now), 0.0)
            behind = now - delay * (count - 1 - position)
            last = done.get((False, position, behind - 1), 0.0)
            done[True, position, now] = max(*before, last) + slot / 3
            if behind >= 0:
                came = done.get((False, position + 1, behind), 0.0)
                done[False, position, behind] = max(done[True, position, now], came) + slot * 2 / 3
    assert result.virtual_seconds == pytest.approx(max(done.values()), abs=1e-6)


class Mean(nn.Module):
    """A loss without parameters."""

    def forward(self, values: Tensor) -> Tensor:
        return values.square().mean()


class Batches(nn.Module):
    """Model of a sequence, whose batch is a tuple of one tensor."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, batch: tuple[Tensor]) -> Tensor:
        loss: Tensor = self.layers(batch[0])
        return loss

    def pipeline_parts(self) -> list[nn.Module]:
        first, *middle, last = self.layers
        ends = StagePart(lambda batch: first(batch[0]), first), StagePart(lambda value, _: last(value), last)
        return [ends[0], *middle, ends[1]]


@pytest.mark.parametrize(
    ("codec", "message", "is_exact"),
    [
        ("int8", 8 * 24 + 4, False),
        ({"name": "top-k", "share": "25 %"}, 8 * 6 * 8, False),  # a value and its place
        ({"name": "top-k", "share": 1}, 8 * 24 * 8, True),
        ({"name": "subspace", "width": 5}, 8 * 5 * 4, False),
        ({"name": "subspace", "width": 24}, 8 * 24 * 4, True),
    ],
)
def test_codecs_of_boundaries_by_hand(codec: Any, message: int, is_exact: bool) -> None:
    """One boundary, one micro-batch of 8 samples by 24 features: a message forwards and one backwards."""
    about = {"num_nodes": 1, "max_steps": 2}
    stages = {"count": 2, "microbatches": 1}
    plain, _ = fit(deep_mlp(), IMAGES, FedAvgStrategy(H=100, optim_spec=SGD), stages, **about)
    coded, _ = fit(
        deep_mlp(), IMAGES, FedAvgStrategy(H=100, optim_spec=SGD), stages | {"codec": codec}, **about
    )
    assert plain.bytes_sent == 2 * 2 * 8 * 24 * 4
    assert coded.bytes_sent == 2 * 2 * message
    losses = [[row["train_loss"] for row in each.history] for each in (plain, coded)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if is_exact else 0.05)
    assert is_exact or losses[1] != losses[0]


@pytest.mark.parametrize(
    ("make", "schedule", "keep"),
    [
        (tied_gpt, "1f1b", True),
        (llama, "pipedream", ["tokens.weight", "*.output.weight", "*.down.weight"]),
    ],
)
def test_weights_kept_in_the_subspace_lose_nothing_at_boundaries(
    make: Callable[[], nn.Module], schedule: str, keep: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run whose messages have all features has the same losses."""
    stages = {"count": 2, "microbatches": 1, "schedule": schedule}
    about = {"num_nodes": 1, "max_steps": 4, "val_size": 0}

    def losses_and_bytes(codec: Any) -> tuple[list[float], int]:
        strategy = FedAvgStrategy(H=100, optim_spec=OptimSpec(torch.optim.AdamW, lr=1e-2), max_norm=0.3)
        result, _ = fit(make().double(), TEXT, strategy, stages | {"codec": codec}, **about)
        return [row["train_loss"] for row in result.history], result.bytes_sent

    lossy, _ = losses_and_bytes(SUBSPACE)
    kept, kept_bytes = losses_and_bytes(SUBSPACE | {"keep": keep})
    with monkeypatch.context() as patch:
        patch.setattr("exogym_core.stages.messages.boundary_codec", lambda _: None)
        whole, whole_bytes = losses_and_bytes(SUBSPACE | {"keep": keep})
    assert kept == pytest.approx(whole, rel=1e-12)
    assert kept[-1] < kept[0]
    assert lossy != pytest.approx(whole, rel=1e-6)
    # Messages, samples, tokens, features, bytes; the rest are gradients of tied weights, and norms.
    assert whole_bytes - kept_bytes == 8 * 8 * 12 * (16 - 4) * 8


def test_a_retimed_run_is_the_run() -> None:
    stages = {"count": 2, "microbatches": 4}
    near, _ = fit(tied_gpt(), TEXT, STRATEGIES["AllReduce"](), stages)
    far, _ = fit(
        tied_gpt(), TEXT, STRATEGIES["AllReduce"](), stages, topology="wan-4-regions", compute="9 ms"
    )
    assert near.retime(topology="wan-4-regions", compute="9 ms").history == far.history


def test_gloo_trains_the_same() -> None:
    stages = {"count": 2, "microbatches": 2}
    simulated, _ = fit(llama(), TEXT, STRATEGIES["DiLoCo"](), stages)
    none = {"topology": None, "protocol": None, "compute": None, "workers": "auto"}
    real, _ = fit(llama(), TEXT, STRATEGIES["DiLoCo"](), stages, transport="gloo", **none)
    losses = [[row["train_loss"] for row in each.history] for each in (simulated, real)]
    assert losses[0] == losses[1]


@given(
    stages=st.builds(
        lambda count, schedule, chunks: Stages(
            count=count, schedule=schedule, chunks=chunks if schedule == "interleaved" else None
        ),
        st.integers(2, 5),
        st.sampled_from(["gpipe", "1f1b", "interleaved"]),
        st.integers(2, 3),
    ),
    num_micro=st.integers(1, 12),
    present=st.lists(st.lists(st.booleans(), min_size=3, max_size=3).filter(any), min_size=5, max_size=5),
)
def test_schedules_compute_everything_once_and_never_wait_in_a_circle(
    stages: Stages, num_micro: int, present: list[list[bool]]
) -> None:
    """Ranks take their next pass as soon as what it needs is there: all come to their ends; whoever is absent."""
    count = stages.count
    members = [
        worker * count + place for worker in range(3) for place in range(count) if present[place][worker]
    ]
    route = StageRoute(members, 3, count)
    orders = [
        [
            each._replace(worker=worker)
            for each in actions(stages, rank % count, num_micro)
            for worker in route.workers_of(rank)
        ]
        for rank in members
    ]
    every = {each for order in orders for each in order}
    assert len(every) == sum(map(len, orders)) == 3 * 2 * stages.num_stages * num_micro
    done: set[tuple[bool, int, int, int]] = set()
    last = stages.num_stages - 1

    def can_go(forward: bool, stage: int, micro: int, worker: int) -> bool:
        if forward:
            return stage == 0 or (True, stage - 1, micro, worker) in done
        is_back = stage == last or (False, stage + 1, micro, worker) in done
        return (True, stage, micro, worker) in done and is_back

    while any(orders):
        ready = [order for order in orders if order and can_go(*order[0])]
        assert ready, f"deadlock: {orders}"
        for order in ready:
            done.add(tuple(order.pop(0)))  # type: ignore[arg-type]


def test_at_most_as_many_micro_batches_are_alive_as_stages_follow() -> None:
    for position in range(4):
        alive = most = 0
        for each in actions(Stages(count=4), position, 16):
            alive += 1 if each.is_forward else -1
            most = max(most, alive)
        assert most == 4 - position


def test_chains_cross_the_longest_hop_least() -> None:
    """Four hosts of two regions as one worker: one hop between the regions."""
    result, _ = fit(
        tied_gpt(), TEXT, STRATEGIES["AllReduce"](), 4, num_nodes=1, topology="wan-4-regions", max_steps=1
    )
    assert len(set(result.hosts)) == 4
    between = sum(
        a.split(".")[0] != b.split(".")[0] for a, b in zip(result.hosts, result.hosts[1:], strict=False)
    )
    assert between == len({host.split(".")[0] for host in result.hosts}) - 1


@pytest.mark.parametrize(
    ("stages", "strategies"),
    [
        (
            {"count": 2, "microbatches": 4, "schedule": "1f1b"},
            [{"name": "DiLoCo", "H": 4}, {"name": "AllReduce", "max_norm": 1.0}],
        ),
        pytest.param(
            {"count": 3, "schedule": "gpipe", "microbatches": 8, "codec": "int8"},
            [{"name": "DiLoCo", "H": 8}],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"count": 2, "schedule": "interleaved", "microbatches": 2},
            [{"name": "NoLoCo", "H": 4}, "DeMo"],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            {"count": 3, "schedule": "pipedream", "microbatches": 1, "delay": 2},
            ["AllReduce"],
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_a_plan_is_the_run(tmp_path: Path, stages: Any, strategies: list[Any]) -> None:
    """Days to the end and bytes: seconds within what rounds on warming connections differ by."""
    experiment = {"task": {"name": "text", "num_bytes": 40_000, "block_size": 16}}
    experiment |= {"model": {"name": "gpt", "preset": "byte", "num_layers": 4, "width": 32}}
    experiment |= {"workers": {"count": 2}, "topology": "wan-4-regions", "steps": 8}
    experiment |= {"compute": {"fixed": "40 ms", "coding": "1 MB/s"}}
    experiment |= {"batch_size": 8, "stages": stages, "strategies": strategies}
    experiment |= {"evaluate": {"every": 8, "samples": 8}}
    (tmp_path / "staged.yaml").write_text(yaml_text(experiment))
    runs = {row["name"]: row for row in netgym.compare(experiment).summary}
    for plan in netgym.plan(tmp_path / "staged.yaml"):
        run = runs[plan["strategy"]]
        assert plan["days"] * 86_400 == pytest.approx(run["virtual_seconds"], rel=0.01)
        rounds = 8 / plan["steps_per_round"]
        if stages["schedule"] == "pipedream":  # until chains are full less comes back
            rounds = run["bytes_sent_per_worker"] / plan["bytes_per_worker"]
            assert 8 - 4 <= rounds < 8
            assert [each["staleness"] for each in plan["stages"]] == [4, 2, 0]
        assert plan["bytes_per_worker"] * rounds == pytest.approx(run["bytes_sent_per_worker"], rel=1e-6)
        assert plan["payload_bytes"] * rounds == pytest.approx(run["payload_bytes"], rel=1e-6)


def test_a_plan_lists_bytes_memory_and_dollars_of_each_stage(tmp_path: Path) -> None:
    """By hand: 8 sequences of 16 positions of 16 features cross in bf16 and come back; AdamW has two states a value."""
    link = {"between": ["a", "b"], "bandwidth": "1 Gbit/s", "egress": "1000 $/GB"}
    experiment = {"task": {"name": "text", "num_bytes": 40_000, "block_size": 16}, "workers": {"count": 1}}
    experiment |= {
        "model": {"name": "llama", "vocab_size": 256, "num_layers": 4, "width": 16, "num_heads": 2}
    }
    experiment |= {"topology": {"hosts": ["a", "b"], "links": [link]}, "compute": "40 ms", "steps": 4}
    experiment |= {"batch_size": 8, "stages": {"count": 2, "microbatches": 2, "codec": "bf16"}}
    (tmp_path / "staged.yaml").write_text(yaml_text(experiment | {"strategies": ["AllReduce"]}))
    (plan,) = netgym.plan(tmp_path / "staged.yaml", price={"a": 0.5, "b": 2.0})
    first, last = plan["stages"]
    crossing = 2 * 8 * 16 * 16 * 2
    assert [each["boundary_bytes"] for each in plan["stages"]] == [crossing, 0]
    assert first["boundary_dollars"] * 4 == pytest.approx(crossing * 4 * 1e-6) == plan["cost_by"]["egress"]
    assert [each["dollars_per_hour"] for each in plan["stages"]] == [0.5, 2.0]
    assert plan["cost_by"]["workers"] == pytest.approx(2.5 * plan["days"] * 24)
    block, ends = 4 * 16 * 16 + 3 * 16 * 256 + 2 * 16, 16 * 256
    # Of the first, whose activations are twice the last's.
    assert plan["memory"]["gradients"] == 4 * (2 * block + ends)
    assert plan["memory"]["optimizer"] == pytest.approx(2 * plan["memory"]["gradients"], rel=1e-3)
    assert first["memory"] == plan["memory_per_worker"] > last["memory"]
    assert last["idle"] < first["idle"]
    assert plan["bubble"] == 1 / 3 < (first["idle"] + last["idle"]) / 2


def test_boundaries_of_a_plan_have_the_dtypes_of_autocast() -> None:
    stages, model = Stages(count=3, microbatches=1), deep_mlp()
    batch = tuple(each[:4] for each in IMAGES.tensors)
    run = Cut.of(stages, model, batch, 4, "bf16")
    assert dtypes_in_half(stages, model, batch)[run.edges[1]] == [torch.bfloat16]
    entering = [dtypes_in_half(stages, model, batch)[edge] for edge in run.edges[:-1]]
    assert Cut.of(stages, model, batch, 4, None).with_dtypes(entering).boundaries == run.boundaries


def test_boundaries_under_autocast_are_no_codes() -> None:
    compute = {"fixed": "1 s", "coding": "10 GB/s"}
    for stages, coding in ((Stages(count=2), None), (Stages(count=2, codec="int8"), "charged")):
        run, _ = fit(
            deep_mlp(), IMAGES, AllReduceStrategy(optim_spec=SGD), stages, autocast="bf16", compute=compute
        )
        assert run.coding == coding


def test_a_model_that_does_not_say_how_it_is_cut_is_refused() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 10)

        def forward(self, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    with pytest.raises(InputError, match="does not say how it is cut"):
        fit(Own(), IMAGES, AllReduceStrategy(optim_spec=SGD), 2)


def test_parts_that_compute_something_else_are_refused() -> None:
    class Swapped(Batches):
        def pipeline_parts(self) -> list[nn.Module]:
            first, *middle, last = super().pipeline_parts()
            return [first, *reversed(middle), last]

    torch.manual_seed(3)
    model = Swapped(nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Mean()))
    with pytest.raises(
        InputError, match=r"the parts of Swapped have loss 0\.\d+ in a first batch, and the model 0"
    ):
        fit(model, IMAGES, AllReduceStrategy(optim_spec=SGD), 2)


class Awkward(nn.Module):
    """A model whose parts hand on what is hard to hand on.

    Args:
        first, second: what the first part does with its result, and the second with what it gets.
    """

    def __init__(self, first: Callable[[Tensor], Any], second: Callable[[Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two = nn.Linear(64, 16), nn.Linear(16, 10)
        self.first, self.second = first, second

    def pipeline_parts(self) -> list[nn.Module]:
        return [
            StagePart(lambda batch: self.first(self.one(batch[0])), self.one),
            StagePart(
                lambda got, batch: nn.functional.cross_entropy(self.two(self.second(got)), batch[1]), self.two
            ),
        ]

    def forward(self, batch: Any) -> Tensor:
        first, last = self.pipeline_parts()
        loss: Tensor = last(first(batch), batch)
        return loss


AWKWARD: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "in place": (lambda made: made, lambda got: got.relu_()),
    "flat": (lambda made: made.reshape(-1), lambda got: got.view(-1, 16)),
    "expanded": (lambda made: made[:, :1].expand(-1, 16), lambda got: got),
    "a mask of as many rows as samples": (
        lambda made: (made, torch.tril(torch.ones(4, 4))),
        lambda got: (got[0].view(-1, 4, 4) @ got[1]).reshape(-1, 16),
    ),
    "numbers": (lambda made: (made, made.detach().argmax(1)), lambda got: got[0] * got[1][:, None]),
    "complex": (lambda made: torch.complex(made, made), lambda got: got.real + got.imag),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_whatever_crosses_and_micro_batches_of_two_sizes(name: str) -> None:
    """45 samples a worker: the last step of an epoch has five, in micro-batches of four and one."""
    data = TensorDataset(*IMAGES[:90])
    about = {"max_steps": 8, "minibatch_size": 4}
    whole, weights = fit(Awkward(*AWKWARD[name]), data, STRATEGIES["DiLoCo"](), None, **about)
    cut, others = fit(Awkward(*AWKWARD[name]), data, STRATEGIES["DiLoCo"](), 2, **about)
    losses = [[row["train_loss"] for row in each.history] for each in (whole, cut)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    for key, value in weights.items():
        assert torch.allclose(others[key], value, atol=1e-5), key


@settings(max_examples=2)
@given(
    stages=st.sampled_from(
        [
            {"count": 2, "microbatches": 4, "codec": "top-k"},
            {"count": 3, "microbatches": 1, "schedule": "pipedream"},
            {"count": 2, "microbatches": 4, "schedule": "pipedream", "delay": 2, "codec": "top-k"},
            {"count": 3, "microbatches": 2, "schedule": "pipedream", "delay": 3},
        ]
    ),
    stop=st.integers(1, 4),
    carrier=st.sampled_from(["threads", {"kind": "processes", "processes": 2}]),
)
def test_a_resumed_run_is_the_run(tmp_path_factory: Any, stages: Any, stop: int, carrier: Any) -> None:
    """Bits, times and bytes, with draws and running means in the passes that are in flight at the stop."""

    def run(**options: Any) -> tuple[FitResult, dict[str, Tensor]]:
        torch.manual_seed(3)
        layers: list[nn.Module] = [nn.Linear(64, 8)]
        for _ in range(2):
            layers += [nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8)]
        model = Batches(nn.Sequential(*layers, Mean()))
        about = {"topology": "home-broadband", "protocol": None, "max_steps": 5} | options
        return fit(model, IMAGES, STRATEGIES["DiLoCo"](), stages, **about)

    once, weights = run()
    folder = tmp_path_factory.mktemp("stopped")
    stopped, _ = run(max_steps=stop, checkpoint_interval=stop, save_dir=folder)
    resumed, others = run(resume_from=stopped.checkpoint_folder, workers=carrier)
    assert (resumed.history, resumed.validation) == (once.history, once.validation)
    for name, value in weights.items():
        assert torch.equal(value, others[name]), name
    elsewhere = {"topology": "wan-4-regions", "compute": "9 ms"}
    assert resumed.retime(**elsewhere).history == once.retime(**elsewhere).history
