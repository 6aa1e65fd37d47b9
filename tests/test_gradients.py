"""Averages of gradients: what is left alone, what is refused, what overflows, and whose samples weigh what."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.data.samples import EpochOrder, OwnData, Reading, SharedData
from exogym_core.strategy import (
    AllReduceStrategy,
    Chain,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    Sites,
    Strategy,
)
from exogym_core.strategy.base import StepContext
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


@pytest.mark.parametrize("counts", [[2, 1, 1, 1], [3, 1, 2, 2], [1, 2, 2, 1]])
def test_inside_a_site_samples_weigh_by_the_sites(counts: list[int]) -> None:
    """Equal samples everywhere: every site moves alike, however many its ranks have beside other sites'."""

    def body(comm: Communicator) -> float:
        own = counts[comm.rank]
        context = StepContext(weight=own * 4 / sum(counts), samples=own, samples_of=counts)
        strategy = DiLoCoStrategy("sgd", lr=0.1, H=100, ranks_per_worker=2)
        return one_step(strategy, Squares(), torch.ones(own), comm, context).weight.item()

    assert run_ranks(body, 4).results == [pytest.approx(0.8)] * 4


def test_inside_a_site_weights_need_the_others_samples() -> None:
    def body(comm: Communicator) -> nn.Module:
        context = StepContext(weight=1.2, samples=3)
        return one_step(Chain([Sites(2)]), Squares(), torch.ones(3), comm, context)

    with pytest.raises(InputError, match=r"weight=1\.2 is relative to all ranks; pass samples_of too"):
        run_ranks(body, 4)


def test_data_tells_how_many_samples_each_rank_has() -> None:
    shared = SharedData(range(13), EpochOrder(13, False), Reading(1, 4, 2, 2))  # type: ignore[arg-type]
    assert [list(shared.next_step().samples_of) for _ in range(2)] == [[], [2, 1, 1, 1]]
    own = OwnData(range(5), EpochOrder(5, False), [5, 3], Reading(0, 2, 2, 2))  # type: ignore[arg-type]
    assert [list(own.next_step().samples_of) for _ in range(2)] == [[], [2, 1]]
