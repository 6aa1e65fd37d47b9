"""Averages of gradients, half precision, micro-batches: what is refused, what overflows, what weighs what."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import fitted, samples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from exogym_core import Trainer
from exogym_core import learner as minibatch
from exogym_core.communicator import Communicator, run_ranks
from exogym_core.learner import fitting_size
from exogym_core.strategy import (
    STRATEGIES,
    AllReduceStrategy,
    Chain,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    Sites,
    Strategy,
    build_strategy,
)
from exogym_core.strategy.base import StepContext
from netgym.tasks import MLP
from netsim.errors import InputError


def one_step(
    strategy: Strategy, model: nn.Module, batch: Any, comm: Communicator, context: StepContext
) -> nn.Module:
    """A replica after one step on this rank."""
    strategy, replica = copy.deepcopy(strategy), copy.deepcopy(model)
    strategy.setup(replica, comm, 1, 0)
    strategy.begin_step(context)
    strategy.zero_grad()
    strategy.before_backward(last_micro_batch=True)
    loss = replica(batch)
    (loss if context.scaler is None else context.scaler.scale(loss)).backward()
    strategy.step()
    strategy.close()
    return replica


class TwoParts(nn.Module):
    """Uses the parts that a batch names."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (nn.Parameter(torch.ones(3)) for _ in range(2))

    def forward(self, names: str) -> Tensor:
        return torch.stack([getattr(self, name).sum() for name in names.split()]).sum()


SITE = Sites(2, sharding="SHARD_GRAD_OP")


@pytest.mark.parametrize("transport", ["netsim", "gloo"])
@pytest.mark.parametrize(
    "strategy",
    [
        AllReduceStrategy("adamw", lr=0.1),
        AllReduceStrategy("adamw", lr=0.1, bucket_bytes=1, codec="fp16"),
        Chain([SITE], "adamw", lr=0.1),
    ],
    ids=["whole", "fp16", "sharded"],
)
def test_what_no_rank_used_is_not_decayed_as_with_ddp(strategy: Strategy, transport: str) -> None:
    """DDP with find_unused_parameters leaves such a parameter without a gradient."""

    def body(comm: Communicator) -> list[float]:
        replica = one_step(strategy, TwoParts(), "used", comm, StepContext())
        return [replica.used[0].item(), replica.unused[0].item()]

    for used, unused in run_ranks(body, 2, transport=transport).results:
        assert used < 0.95
        assert unused == 1.0


def test_what_one_rank_used_is_decayed_on_all_alike() -> None:
    def body(comm: Communicator) -> Tensor:
        batch = "used unused" if comm.rank else "used"
        return one_step(
            AllReduceStrategy("adamw", lr=0.1), TwoParts(), batch, comm, StepContext()
        ).unused.detach()

    first, second = run_ranks(body, 2).results
    assert torch.equal(first, second)
    assert float(first[0]) < 0.95


def test_a_gradient_of_zeros_is_one() -> None:
    """Only negative zeros from all say that nobody had a gradient; one's own never are."""

    def body(comm: Communicator) -> float:
        strategy, replica = AllReduceStrategy("adamw", lr=0.1), TwoParts()
        strategy.setup(replica, comm, 1, 0)
        for parameter in replica.parameters():
            parameter.grad = torch.full((3,), -0.0)
        strategy.step()
        return replica.unused[0].item()

    assert run_ranks(body, 2).results == [pytest.approx(0.999)] * 2


class SharedBySegments(nn.Module):
    """A layer that two checkpointed segments share."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(2, 2), nn.Linear(2, 2)
        self.use_reentrant = use_reentrant

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch)
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=self.use_reentrant)
        return hidden.sum()


def test_a_gradient_that_comes_twice_is_refused_and_not_sent_by_half() -> None:
    """As DDP does: the bucket left after the first segment, without the second's part."""
    strategy = AllReduceStrategy("sgd", lr=0.1, bucket_bytes=1)

    def train(model: nn.Module) -> list[Tensor]:
        def body(comm: Communicator) -> Tensor:
            batch = torch.ones(1, 2) * (comm.rank + 1)
            replica = one_step(strategy, model, batch, comm, StepContext())
            return torch.cat([p.detach().reshape(-1) for p in replica.parameters()])

        return run_ranks(body, 2).results

    torch.manual_seed(0)
    model = SharedBySegments(use_reentrant=False)
    first, second = train(model)
    assert torch.equal(first, second)
    reentrant = SharedBySegments(use_reentrant=True)
    reentrant.load_state_dict(model.state_dict())
    with pytest.raises(
        InputError, match=r"was computed twice in one backward pass.* use use_reentrant=False"
    ):
        train(reentrant)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "scaled-fp16"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 20.0])
def test_an_overflow_is_seen_through_every_codec(codec: str, value: float) -> None:
    """Gradients of 0.5 to 20, scaled by 65,536, are beyond fp16: no step may be taken with what is left of them."""
    gradients = torch.tensor([0.5, 2.0, 5.0, value])

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4))

        def forward(self, gradients: Tensor) -> Tensor:
            return (self.weight * gradients).sum()

    def body(comm: Communicator) -> tuple[Tensor, float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
        batch = gradients if comm.rank else gradients.clamp(max=0.25).nan_to_num(0.25)
        context = StepContext(scaler=scaler)
        replica = one_step(AllReduceStrategy("sgd", lr=1.0, codec=codec), Given(), batch, comm, context)
        return replica.weight.detach(), scaler.get_scale()

    results = run_ranks(body, 2).results
    overflows = value != 20.0 or codec == "fp16"
    for weight, scale in results:
        assert scale == (32768.0 if overflows else 65536.0)
        if overflows:
            assert torch.equal(weight, torch.zeros(4))
        else:
            torch.testing.assert_close(
                weight, -(gradients + gradients.clamp(max=0.25)) / 2, rtol=0.02, atol=0.1
            )


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).sum()


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "what"),
    [
        (FedAvgStrategy("sgd", max_norm=1.0), 1, "clipped"),
        (DiLoCoStrategy("sgd", max_norm=1.0), 1, "clipped"),
        (AllReduceStrategy("sgd"), 2, "averaged"),
        (DeMoStrategy("sgd"), 2, "averaged"),
    ],
)
def test_sparse_gradients_are_refused_with_the_remedy(strategy: Strategy, num_ranks: int, what: str) -> None:
    line = rf"gradient of a parameter of shape \(5, 4\): is sparse and cannot be {what}; .* sparse=False"
    with pytest.raises(InputError, match=line):
        run_ranks(lambda comm: one_step(strategy, Sparse(), torch.arange(5), comm, StepContext()), num_ranks)


# --- uneven batches ----------------------------------------------------------------------------------------


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: Tensor) -> Tensor:
        return ((self.weight * batch) ** 2).mean()


@pytest.mark.parametrize("counts", [[2, 1, 1, 1], [3, 1, 2, 2]])
def test_inside_a_site_samples_weigh_by_the_sites(counts: list[int]) -> None:
    """Equal samples everywhere: every site moves alike, however many its ranks have beside other sites'."""

    def body(comm: Communicator) -> float:
        own = counts[comm.rank]
        context = StepContext(samples=own, samples_of=counts)
        strategy = DiLoCoStrategy("sgd", lr=0.1, H=100, ranks_per_worker=2)
        return one_step(strategy, Squares(), torch.ones(own), comm, context).weight.item()

    assert run_ranks(body, 4).results == [pytest.approx(0.8)] * 4


class Tokens(nn.Module):
    """Cross entropy of sequences whose targets may be -100, which do not count, with the number that do."""

    def __init__(self, form: str = "pair") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()

    def forward(self, batch: tuple[Tensor, Tensor]) -> Any:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.layers(inputs).flatten(0, 1), targets.flatten())
        count = (targets != -100).sum()
        return {
            "plain": loss,
            "pair": (loss, count),
            "mapping": {"loss": loss, "count": int(count), "logits": inputs},
        }[self.form]


def sequences(num: int, seed: int) -> TensorDataset:
    """Sequences of six tokens, of which none to all count."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num, 6, 3, generator=generator, dtype=torch.float64)
    targets = torch.randint(4, (num, 6), generator=generator)
    ignored = torch.randint(7, (num, 1), generator=generator) > torch.arange(6)
    ignored[0] = False  # something counts
    return TensorDataset(inputs, targets.masked_fill(ignored, -100))


AVERAGING: dict[str, Callable[[], Strategy]] = {
    "one bucket": lambda: AllReduceStrategy("sgd", lr=0.5),
    "buckets that leave in the backward pass": lambda: AllReduceStrategy("sgd", lr=0.5, bucket_bytes=64),
    "clipped": lambda: AllReduceStrategy("sgd", lr=0.5, max_norm=1e-3),
    "shards": lambda: AllReduceStrategy("sgd", lr=0.5, sharding="FULL_SHARD"),
    "sites of the whole run": lambda: build_strategy(
        "DiLoCo", optim_spec="sgd", lr=0.5, H=9, ranks_per_worker=4
    ),
    "an exchange of factors": lambda: build_strategy(
        "PowerSGD", optim_spec="sgd", lr=0.5, approximation_rank=8
    ),
}


@pytest.mark.parametrize("name", AVERAGING)
@given(
    split=st.sampled_from([(1, 16), (1, 4), (2, 8), (2, 2), (4, 4), (4, 1)]),
    seed=st.integers(0, 10**6),
    form=st.sampled_from(["pair", "mapping"]),
)
@settings(max_examples=6, deadline=None)
def test_any_split_gives_the_gradient_of_the_whole_batch(
    name: str, split: tuple[int, int], seed: int, form: str
) -> None:
    """Micro-batches and ranks counted as many tokens as they had samples."""
    data, (num_ranks, size) = sequences(16, seed), split
    if num_ranks < 4 and "sites" in name:
        num_ranks, size = 4, 2
    whole = Tokens("plain")
    loss = whole(data.tensors)
    loss.backward()
    if name == "clipped":
        nn.utils.clip_grad_norm_(whole.parameters(), 1e-3)
    options = {"num_nodes": num_ranks, "batch_size": 16 // num_ranks, "minibatch_size": size}
    result = fitted(
        Tokens(form),
        data,
        data,
        strategy=AVERAGING[name](),
        **options,
        max_steps=1,
        shuffle=False,
        val_size=16,
    )
    for parameter, trained in zip(whole.parameters(), result.rank_states[0].values(), strict=True):
        torch.testing.assert_close(trained, (parameter - 0.5 * parameter.grad).detach(), rtol=1e-6, atol=1e-9)
    assert result.history[0]["train_loss"] == pytest.approx(loss.item(), rel=1e-9)
    judged = Tokens("plain")
    judged.load_state_dict(result.judged_state)
    assert result.final_loss == pytest.approx(judged(data.tensors).item(), rel=1e-9)


class Looked(nn.Module):
    """A table with sparse gradients; one sample counts thrice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 1, sparse=True)
        nn.init.ones_(self.table.weight)

    def forward(self, batch: tuple[Tensor]) -> Any:
        counts = 1 + 2 * (batch[0] == 3)
        return (self.table(batch[0])[:, 0] * counts).sum() / counts.sum(), counts.sum()


def test_micro_batches_of_sparse_gradients_are_weighed() -> None:
    data = TensorDataset(torch.arange(4))
    strategy = build_strategy("DiLoCo", optim_spec="sgd", lr=0.6, H=9)
    options = {"num_nodes": 1, "batch_size": 4, "minibatch_size": 2, "max_steps": 1, "shuffle": False}
    result = fitted(Looked(), data, strategy=strategy, **options)
    table = result.rank_states[0]["table.weight"][:, 0]
    torch.testing.assert_close(table, torch.tensor([0.9, 0.9, 0.9, 0.7]))


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (
            lambda loss: (loss, torch.ones(2, dtype=torch.int)),
            r"with count a tensor of shape \[2\]; it must be the number",
        ),
        (
            lambda loss: (loss, torch.tensor(0.9)),
            r"the model returned \(Tensor, Tensor\); it must return the batch.s mean loss, .* with a whole number",
        ),
        (lambda loss: {"loss": loss, "count": float("nan")}, "with count nan"),
    ],
)
def test_counts_that_are_none_are_refused(output: Callable[[Tensor], Any], line: str) -> None:
    class Wrong(Tokens):
        def forward(self, batch: Any) -> Any:
            return output(super().forward(batch)[0])

    with pytest.raises(InputError, match=line):
        fitted(Wrong(), sequences(8, 0))


# --- half precision -----------------------------------------------------------------------------------------

DATA = samples(64)


class Watched(MLP):
    """Tells in which dtypes its last layer computed; its loss can be made to overflow."""

    factor = 1.0

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(6, [5], 3)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.long))

    def logits(self, inputs: torch.Tensor) -> torch.Tensor:
        output = super().logits(inputs)
        self.seen[[torch.float32, torch.bfloat16, torch.float16].index(output.dtype)] += 1
        return output

    def forward(self, batch: Any) -> torch.Tensor:
        return super().forward(batch) * self.factor


def fit_watched(strategy: Any, factor: float = 1.0, **options: Any) -> Any:
    model = Watched()
    model.factor = factor
    return fitted(model, DATA, DATA, **{"strategy": strategy, "max_steps": 6, "minibatch_size": 2, **options})


@pytest.mark.parametrize(("autocast", "place"), [(False, 0), (True, 1), ("bf16", 1), ("fp16", 2)])
def test_forward_passes_compute_in_what_was_asked_for(autocast: Any, place: int) -> None:
    seen = fit_watched(build_strategy("AllReduce"), autocast=autocast).rank_states[0]["seen"].tolist()
    assert seen[place] >= 12
    assert sum(seen) == seen[place]


# All of them by make test-all: what scales and skips is one place for all.
MOST = {*STRATEGIES} - {*[*STRATEGIES][::4]}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.thorough] * (each in MOST)) for each in STRATEGIES]
)
def test_fp16_trains_as_fp32_does_nearly_and_leaves_out_steps_that_overflow(name: str) -> None:
    half, full = (fit_watched(build_strategy(name), autocast=each, max_steps=3) for each in ("fp16", False))
    for one, other in zip(half.history, full.history, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=2e-2)
    assert half.final_loss == pytest.approx(full.final_loss, rel=2e-2)
    # 2**16, where the scale begins, times this is beyond fp16: the scale must be halved before a step counts.
    result = fit_watched(build_strategy(name), factor=64.0, autocast="fp16", max_steps=4)
    assert result.first_non_finite_step is None
    assert all(torch.isfinite(value).all() for state in result.rank_states for value in state.values())


def test_the_scale_is_part_of_a_checkpoint(tmp_path: Any) -> None:
    scales: list[float] = []

    class Seen(STRATEGIES["DiLoCo"]):  # type: ignore[misc]
        def step(self) -> None:
            scales.append(self.scaler.get_scale())
            super().step()

    options = {"factor": 4096.0, "autocast": "fp16"}
    stopped = fit_watched(Seen(H=2), **options, max_steps=4, checkpoint_interval=1, save_dir=tmp_path)
    del scales[:]
    resumed = fit_watched(Seen(H=2), **options, resume_from=stopped.checkpoint_folder)
    after = scales[:]
    assert resumed.resumed_step == 4
    assert resumed.history == fit_watched(Seen(H=2), **options).history
    assert after == scales[-4:] or sorted(after) == sorted(scales[-4:])
    assert max(after) < 2.0**16


def averaged(comm: Communicator) -> Tensor:
    part = torch.arange(4, dtype=torch.bfloat16) + torch.tensor(0.01 * comm.rank, dtype=torch.bfloat16)
    return comm.all_reduce(part, "avg")


def test_sockets_widen_too() -> None:
    """gloo itself adds halves up as halves."""
    simulated, real = run_ranks(averaged, 3).results, run_ranks(averaged, 3, transport="gloo").results
    assert all(map(torch.equal, simulated, real))


# --- the micro-batch that fits ------------------------------------------------------------------------------

INPUTS = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
WIDE_DATA = TensorDataset(INPUTS)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(10, 100), nn.Sigmoid(), nn.Linear(100, 1))

    def forward(self, batch: tuple[torch.Tensor]) -> torch.Tensor:
        return self.layers(batch[0]).mean()


def batch(size: int) -> tuple[torch.Tensor]:
    return (INPUTS[:size].clone(),)


@pytest.mark.parametrize(("room", "size"), [(1, 1), (3, 3), (5.5, 4), (11.9, 6), (12, 12), (100, 12)])
def test_the_largest_divisor_that_fits_is_chosen(room: float, size: int) -> None:
    model = Wide()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    limit = 3 * 1.3 * (5 * weights + room * 110 * 4) + 1e-6
    assert fitting_size(model, batch, 12, num_ranks=3, limit_bytes=limit) == size


def test_too_little_for_one_sample_is_reported() -> None:
    with pytest.warns(UserWarning, match="3 ranks need .* GB even with one sample at a time"):
        assert fitting_size(Wide(), batch, 12, num_ranks=3, limit_bytes=1.0) == 1


def fit_in_parts(size: Any, **options: Any) -> Any:
    return fitted(Wide(), WIDE_DATA, WIDE_DATA, batch_size=8, minibatch_size=size, **options)


def limited(monkeypatch: pytest.MonkeyPatch, room: float) -> None:
    weights = sum(parameter.nbytes for parameter in Wide().parameters())
    monkeypatch.setattr(minibatch, "memory_limit", lambda device: 2 * 1.3 * (5 * weights + room * 440) + 1e-6)


def test_auto_is_the_same_as_giving_the_size_that_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, room=4)
    found, given = fit_in_parts("auto"), fit_in_parts(4)
    assert found.minibatch_size == 4
    assert found.history == given.history


def test_a_resumed_run_takes_the_size_that_was_found_then(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limited(monkeypatch, room=4)
    stopped = fit_in_parts("auto", checkpoint_interval=1, save_dir=tmp_path)
    limited(monkeypatch, room=8)
    resumed = fit_in_parts("auto", resume_from=stopped.checkpoint_folder)
    assert resumed.minibatch_size == 4
    assert resumed.history == stopped.history


class Normed(nn.Module):
    """A layer behind a BatchNorm whose means have forgotten little."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.layer(self.norm(batch[0])), batch[1])


@pytest.mark.parametrize("broadcast_buffers", [False, True])
def test_buffers_are_rank_0s_before_each_forward_pass_as_in_ddp(broadcast_buffers: bool) -> None:
    """Two replicas in a loop, which take rank 0's buffers first; parameters are equal either way."""
    data, steps = samples(64), 5
    strategy = AllReduceStrategy(optim_spec="sgd", lr=0.1, broadcast_buffers=broadcast_buffers)
    options = {"num_nodes": 2, "batch_size": 4, "max_steps": steps, "sampler": "torch", "progress": False}
    result = Trainer(Normed(), data).fit(strategy=strategy, device="cpu", **options).fit_result
    replicas = [Normed(), Normed()]
    loaders = [iter(DataLoader(data, 4, sampler=DistributedSampler(data, 2, rank))) for rank in (0, 1)]
    for _ in range(steps):
        if broadcast_buffers:
            for own, first in zip(replicas[1].buffers(), replicas[0].buffers(), strict=True):
                own.copy_(first)
        for replica, loader in zip(replicas, loaders, strict=True):
            replica.zero_grad()
            replica(next(loader)).backward()
        with torch.no_grad():
            for pair in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = (pair[0].grad + pair[1].grad) / 2
                for parameter in pair:
                    parameter -= 0.1 * mean
    if broadcast_buffers:  # a last message makes them equal
        for own, first in zip(replicas[1].buffers(), replicas[0].buffers(), strict=True):
            own.copy_(first)
    for state, replica in zip(result.rank_states, replicas, strict=True):
        torch.testing.assert_close(dict(state), dict(replica.state_dict()))
