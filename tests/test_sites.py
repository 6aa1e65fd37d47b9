"""Sites of several ranks, whole and in shards: what they compute and hold, what is sent inside and between."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import strategy_reference as reference
import torch
from experiments import fit_until, outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from worlds import regions_form

from exogym_core import DiLoCoOptimizer, Trainer
from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import (
    AllReduceStrategy,
    DiLoCoStrategy,
    OptimSpec,
    Strategy,
)
from netsim import Topology
from netsim.errors import InputError

SEED = 5
VALUE = 8  # bytes: the reference trains in fp64
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
NAMES = ("SHARD_GRAD_OP", "FULL_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
WHOLE = "NO_SHARD"
TWO_SITES = Topology.from_mapping(regions_form({"east": 2, "west": 2}, "10 Gbit/s", protocol="ideal"))


def num_values(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def options_of(name: str, ranks_per_node: int) -> dict[str, Any]:
    """Sharding over a site; what is not hybrid knows of no machines."""
    return {"sharding": name, **({"ranks_per_node": ranks_per_node} if "HYBRID" in name else {})}


def layout(name: str, nodes: int, ranks_per_node: int) -> tuple[int, int]:
    """Copies of the model in a site of so many machines, and the shards of each copy."""
    if "HYBRID" in name:
        return nodes, ranks_per_node
    return (nodes * ranks_per_node, 1) if name == WHOLE else (1, nodes * ranks_per_node)


def inside_bytes(name: str, copies: int, shards: int, num_values: int, clips: bool) -> int:
    """What the ranks of a site send in a step, by hand: the one formula for all shardings."""
    if shards == 1:  # nothing to cut
        return 2 * (copies - 1) * num_values * VALUE
    padded = -(-num_values // shards) * shards * VALUE
    around = copies * (shards - 1) * padded  # a reduce-scatter or an all-gather, in each machine
    gathers = 2 if name in ("FULL_SHARD", "HYBRID_SHARD") else 1
    norm = copies * 2 * (shards - 1) * VALUE if clips else 0
    return (1 + gathers) * around + 2 * (copies - 1) * padded + norm


def joined(batches: reference.Batches, ranks_per_worker: int) -> reference.Batches:
    """The batches of a worker's ranks as one, the worker's."""
    return [
        [
            (torch.cat([part[0] for part in site]), torch.cat([part[1] for part in site]))
            for site in (
                step[first : first + ranks_per_worker] for first in range(0, len(step), ranks_per_worker)
            )
        ]
        for step in batches
    ]


def optimizer_of(replica: torch.nn.Module, comm: Communicator, **options: Any) -> DiLoCoOptimizer:
    given = {"batch_size": 4, "num_inner_steps": 100, "inner_optimizer": ADAMW, **options}
    return DiLoCoOptimizer(communicator=comm, params=replica.parameters(), **given)


sites = st.fixed_dictionaries(
    {"workers": st.integers(1, 3), "nodes": st.integers(1, 2), "ranks_per_node": st.integers(1, 3)}
)


@settings(max_examples=10)
@given(
    site=sites,
    name=st.sampled_from([WHOLE, *NAMES]),
    H=st.integers(1, 3),
    steps=st.integers(1, 4),
    hidden=st.integers(2, 6),
    make_optim=st.sampled_from([ADAMW, SGD]),
    max_norm=st.sampled_from([None, 0.3]),
)
def test_shards_compute_what_a_single_worker_with_the_whole_batch_would(
    site: dict[str, int],
    name: str,
    H: int,  # noqa: N803
    steps: int,
    hidden: int,
    make_optim: Any,
    max_norm: float | None,
) -> None:
    workers, nodes, ranks_per_node = site.values()
    size = nodes * ranks_per_node
    model, batches = reference.make_problem(workers * size, steps, 3, hidden, seed=H)
    expected = reference.reference_local(
        copy.deepcopy(model), joined(batches, size), make_optim, reference.outer(model, H), max_norm=max_norm
    )
    options = options_of(name, ranks_per_node)
    strategy = DiLoCoStrategy(make_optim, H=H, max_norm=max_norm, ranks_per_worker=size, **options)
    run = reference.run_strategy(strategy, model, batches, SEED)
    for rank, result in enumerate(run.results):
        want = reference.vector(expected[rank // size])
        torch.testing.assert_close(result, want, rtol=1e-9, atol=1e-9)
        assert torch.equal(result, run.results[rank // size * size]), (
            "the ranks of a site are equal to the bit"
        )

    whole, rounds = num_values(model) * VALUE, steps // H
    copies, shards = layout(name, nodes, ranks_per_node)
    handed_on = workers * (copies - 1) * whole if workers > 1 else 0
    between = 2 * (workers - 1) * whole
    inside = workers * inside_bytes(name, copies, shards, num_values(model), max_norm is not None)
    sent = sum(traffic.bytes_sent for traffic in run.traffic)
    assert sent == steps * inside + rounds * (between + handed_on)


@settings(max_examples=6)
@given(num_ranks=st.integers(1, 5), name=st.sampled_from(NAMES[:2]), hidden=st.integers(3, 7))
def test_all_reduce_in_shards_and_many_buckets(num_ranks: int, name: str, hidden: int) -> None:
    model, batches = reference.make_problem(num_ranks, 3, 4, hidden, seed=hidden)
    expected = reference.reference_all_reduce(copy.deepcopy(model), batches, ADAMW, max_norm=0.5)
    strategy = AllReduceStrategy(ADAMW, max_norm=0.5, bucket_bytes=1, sharding=name)  # a bucket a parameter
    run = reference.run_strategy(strategy, model, batches, SEED)
    for result in run.results:
        torch.testing.assert_close(result, reference.vector(expected[0]), rtol=1e-9, atol=1e-9)
    passes = 3 if name == "FULL_SHARD" else 2
    padded = sum(-(-p.numel() // num_ranks) * num_ranks for p in model.parameters()) * VALUE
    norms = 2 * (num_ranks - 1) * VALUE
    assert sum(t.bytes_sent for t in run.traffic) == 3 * (passes * (num_ranks - 1) * padded + norms)


def held_values(optimizer: torch.optim.Optimizer) -> int:
    """Numbers in the optimizer's states, steps aside."""
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    return sum(tensor.numel() for tensor in tensors if tensor.dim())


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_holds_the_states_of_its_shard_alone(name: str) -> None:
    model, batches = reference.make_problem(8, 2, 5, 7, seed=1)
    options = options_of(name, 2)
    strategy = DiLoCoStrategy(ADAMW, H=1, ranks_per_worker=4, **options)

    def body(comm: Communicator) -> tuple[int, int]:
        own, replica = copy.deepcopy(strategy), copy.deepcopy(model)
        own.setup(replica, comm, len(batches), SEED)
        reference.train(own, replica, comm, batches)
        inner, outer = own.optimizers
        return held_values(inner), held_values(outer)

    held = run_ranks(body, 8).results
    copies, shards = layout(name, 2, 2)
    total = num_values(model)
    share = -(-total // shards)
    assert all(inner <= 2 * share and outer <= share for inner, outer in held)
    assert sum(inner for inner, _ in held[:4]) == copies * 2 * total, "AdamW's two moments, once a machine"
    assert sum(outer for _, outer in held[:4]) == copies * total, "and the outer momentum"


class Odd(nn.Module):
    """Shared and frozen parameters, buffers, two dtypes, a layout that is not contiguous, one unused."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)

        def weights(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype) * 0.5)

        self.embed = weights(5, 4)
        self.out = self.embed
        self.frozen = nn.Parameter(torch.eye(4, dtype=torch.float64) * 1.5, requires_grad=False)
        self.turned = nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64).t())
        self.single = weights(7, dtype=torch.float32)
        self.unused = weights(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: reference.Batch) -> Tensor:
        self.calls += 1
        hidden = torch.tanh(batch[0] @ self.embed[:, :3].T @ self.embed @ self.frozen @ self.turned)
        logits = hidden @ self.out.T * self.single[:5].double()
        return (logits - batch[1].sum(1, keepdim=True)).square().mean()


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in trainable if p.dim() == 1], "lr": 0.05},
    ]


def test_odd_models_and_parameter_groups_train_as_they_do_whole() -> None:
    _, batches = reference.make_problem(8, 5, 3, 2, seed=2)
    spec = OptimSpec("adamw", params=in_groups, lr=0.01)

    def trained(**options: Any) -> list[Tensor]:
        strategy = DiLoCoStrategy(spec, H=2, max_norm=0.4, ranks_per_worker=4, **options)
        return reference.run_strategy(strategy, Odd(), batches, SEED).results

    for sharded, whole in zip(trained(**options_of("HYBRID_SHARD", 2)), trained(), strict=True):
        torch.testing.assert_close(sharded, whole, rtol=1e-6, atol=1e-7)


def own_loop(model: nn.Module, batches: reference.Batches, comm: Communicator, **options: Any) -> Tensor:
    """A training loop of one's own, clipping included: torch's own where replicas are whole."""
    replica = copy.deepcopy(model)
    optimizer = optimizer_of(replica, comm, num_inner_steps=2, **options)
    for step in batches:
        optimizer.zero_grad()
        replica(step[comm.rank]).backward()
        if options["sharding"] == WHOLE:
            optimizer.average_gradients()
            nn.utils.clip_grad_norm_(replica.parameters(), 0.3)
        else:
            optimizer.clip_grad_norm_(0.3)
        optimizer.step()
    return reference.vector(replica)


@pytest.mark.parametrize(("name", "codec"), [(WHOLE, None), ("FULL_SHARD", None), ("HYBRID_SHARD", "fp16")])
def test_a_loop_of_ones_own_trains_as_the_strategy_does(name: str, codec: str | None) -> None:
    model, batches = reference.make_problem(8, 5, 4, 6, seed=1)
    options = {**options_of(name, 2), "ranks_per_worker": 4}
    strategy = DiLoCoStrategy(ADAMW, H=2, max_norm=0.3, codec=codec, **options)
    expected = reference.run_strategy(strategy, model, batches, SEED)
    own = run_ranks(lambda comm: own_loop(model, batches, comm, grad_compression=codec, **options), 8)
    for got, want in zip(own.results, expected.results, strict=True):
        assert torch.equal(got, want)
    start = 7 * num_values(model) * VALUE  # everyone but the first is told the first one's parameters
    assert sum(t.bytes_sent for t in own.traffic) == start + sum(t.bytes_sent for t in expected.traffic)


@pytest.mark.parametrize(("name", "codec"), [(WHOLE, None), ("FULL_SHARD", None), ("HYBRID_SHARD", "int8")])
def test_the_wan_carries_a_round_once_per_site(name: str, codec: str | None) -> None:
    """Of two sites with two machines of two ranks each."""
    model, batches = reference.make_problem(8, 6, 4, 6, seed=1)
    options = {"codec": codec, "error_feedback": codec is not None, **options_of(name, 2)}
    strategy = DiLoCoStrategy(ADAMW, H=3, ranks_per_worker=4, **options)
    run = reference.run_strategy(strategy, model, batches, SEED, topology=TWO_SITES)
    copies, num_shards = layout(name, 2, 2)
    shards = torch.zeros(num_values(model)).split(-(-num_values(model) // num_shards))
    # A copy sends its part of a shard.
    turns = [turn for shard in shards for turn in shard.tensor_split(copies)]
    parts = [len(part) for turn in turns for part in turn.tensor_split(2)]
    of_codec = strategy.averaging.codec
    payload = VALUE * sum(parts) if of_codec is None else sum(of_codec.encoded_bytes(part) for part in parts)
    rounds, num_sites = 2, 2
    assert sum(t.wan_bytes for t in run.traffic) == rounds * 2 * (num_sites - 1) * payload
    assert all(torch.equal(run.results[0], result) for result in run.results)


def test_real_sockets_change_neither_result_nor_bytes() -> None:
    model, batches = reference.make_problem(4, 6, 4, 6, seed=1)
    strategy = DiLoCoStrategy(
        ADAMW,
        H=2,
        codec="int8",
        error_feedback=True,
        max_norm=0.5,
        ranks_per_worker=2,
        sharding="FULL_SHARD",
    )
    simulated = reference.run_strategy(strategy, model, batches, SEED)
    real = reference.run_strategy(strategy, model, batches, SEED, transport="gloo")
    for ours, theirs in zip(simulated.results, real.results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(simulated.traffic, real.traffic, strict=True):
        assert (ours.bytes_sent, ours.payload_bytes) == (theirs.bytes_sent, theirs.payload_bytes)


@pytest.mark.parametrize("name", ["NO_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_an_overflow_in_one_shard_skips_the_update_of_the_whole_site(name: str) -> None:
    model, batches = reference.make_problem(8, 2, 4, 6, seed=1)

    def body(comm: Communicator) -> tuple[float, Tensor]:
        replica = copy.deepcopy(model)
        optimizer = optimizer_of(replica, comm, ranks_per_worker=4, **options_of(name, 2))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for number, step in enumerate(batches):
            optimizer.zero_grad()
            scaler.scale(replica(step[comm.rank])).backward()
            if number == 0 and comm.rank == 1:
                replica.scale.grad.fill_(torch.inf)  # one value, which one rank of each machine holds
            if number == 1 and comm.rank == 3:
                with pytest.raises(
                    InputError,
                    match=r"call average_gradients\(.*\) after|with a scaler and several ranks per site call",
                ):
                    optimizer.step(scaler=scaler)
            optimizer.average_gradients(scaler)
            scaler.unscale_(optimizer.inner_optimizer)
            optimizer.step(scaler=scaler)
            scaler.update()
        return scaler.get_scale(), reference.vector(replica)

    results = run_ranks(body, 8).results
    assert [scale for scale, _ in results] == [4.0] * 4 + [8.0] * 4
    assert all(torch.equal(results[0][1], vector) for _, vector in results[:4])
    assert all(torch.equal(results[4][1], vector) for _, vector in results[4:])
    assert bool(results[0][1].isfinite().all())


class Task(nn.Module):
    """Draws random numbers and counts its calls; the loss of a batch is the mean over its samples."""

    def __init__(self, drops: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Dropout(drops), nn.Linear(7, 3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.training:
            self.calls += 1
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def fit(
    strategy: Strategy, model: nn.Module | None = None, stop_at: int | None = None, **options: Any
) -> Any:
    """Four ranks in two sites, seven steps; `stop_at` presses Ctrl-C."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 6, generator=generator), torch.arange(64) % 3)

    trainer = Trainer(model or Task(), data, data)
    given: dict[str, Any] = {
        "num_nodes": 4,
        "max_steps": 7,
        "batch_size": 4,
        "val_size": 8,
        "val_interval": 3,
    }
    given |= {
        "topology": TWO_SITES,
        "compute": {"fixed": "3 ms", "jitter": 0.2},
        "collectives": "ring",
        "device": "cpu",
        "workers": "threads",
    }
    return fit_until(trainer, stop_at, strategy=strategy, **{**given, **options})


def test_a_run_stopped_and_resumed_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Stopped in its second round, in threads, and resumed in processes."""

    def strategy() -> Strategy:
        sharded = {"ranks_per_worker": 2, "sharding": "FULL_SHARD"}
        return DiLoCoStrategy(ADAMW, H=3, max_norm=0.5, codec="int8", error_feedback=True, **sharded)

    stopped = fit(strategy(), stop_at=5, checkpoint_interval=1, save_dir=tmp_path)
    resumed = fit(
        strategy(),
        resume_from=stopped.checkpoint_folder,
        workers={"kind": "processes", "processes": 2},
    )
    assert resumed.resumed_step == 4
    assert outcome(resumed) == outcome(fit(strategy()))


def test_every_micro_batch_gathers_for_both_of_its_passes() -> None:
    """As FSDP does, which gives parameters up after each pass; losses do not depend on it."""
    model = Task(drops=0.0)

    def run(name: str, minibatch_size: int) -> tuple[list[float], int]:
        strategy = AllReduceStrategy(ADAMW, sharding=name)
        result = fit(strategy, copy.deepcopy(model), minibatch_size=minibatch_size)
        return [row["train_loss"] for row in result.history], result.bytes_sent

    num_steps, n, padded = 7, 4, -(-num_values(model) // 4) * 4 * 4
    for name, passes in (("SHARD_GRAD_OP", [2, 2]), ("FULL_SHARD", [3, 9])):
        losses = []
        for size, num_passes in zip((4, 1), passes, strict=True):
            loss, sent = run(name, size)
            # The gather after the last step is the next step's; that for the first was free.
            assert sent == num_steps * num_passes * (n - 1) * padded
            losses.append(loss)
        assert losses[1] == pytest.approx(losses[0], rel=1e-5)
