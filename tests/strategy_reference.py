"""The published algorithms once more, in one process and parameter by parameter, to test strategies against.

Nothing here uses the parts that strategies are made of; only who takes part in a random exchange is asked
from them. Replicas are a list of models, batches a list over steps of a list over ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from exogym_core.communicator import Communicator, RunResult, run_ranks
from exogym_core.cost.compute import Coding
from exogym_core.strategy import AveragingCommunicator, Strategy
from exogym_core.strategy.parts.codecs import Codec, codec_named
from exogym_core.strategy.parts.selectors import IndexSelector

Batch = tuple[Tensor, Tensor]
Batches = list[list[Batch]]
MakeOptim = Callable[[list[Tensor]], torch.optim.Optimizer]


class Net(nn.Module):
    """A small regression network with a matrix of each kind: weights, biases, a scalar, three dimensions.

    Its activations have no flat parts, so no gradient is exactly zero and no sign is a matter of rounding.
    """

    def __init__(self, inputs: int, hidden: int, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()

        def weights(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype) * 0.5)

        self.first, self.first_bias = weights(hidden, inputs), weights(hidden)
        self.mixed = weights(hidden, 2, 3)
        self.scale = weights()

    def forward(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        hidden = torch.tanh(inputs @ self.first.T + self.first_bias)
        outputs = torch.einsum("bh,hij->bij", hidden, self.mixed).sum(2) * (1 + self.scale)
        return ((outputs - targets) ** 2).mean()


def make_problem(
    num_ranks: int, steps: int, inputs: int, hidden: int, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Net, Batches]:
    """A model and a batch of four samples per step and rank."""
    generator = torch.Generator().manual_seed(seed)

    def batch() -> Batch:
        return (
            torch.randn(4, inputs, generator=generator, dtype=dtype),
            torch.randn(4, 2, generator=generator, dtype=dtype),
        )

    model = Net(inputs, hidden, generator, dtype)
    return model, [[batch() for _ in range(num_ranks)] for _ in range(steps)]


def problems(ranks: int, steps: int, inputs: int, hidden: int) -> st.SearchStrategy[dict[str, int]]:
    """Drawn arguments of `make_problem`, each from 1 up to what is given."""
    most = {"num_ranks": ranks, "steps": steps, "inputs": inputs, "hidden": hidden}
    drawn = {name: st.integers(1, number) for name, number in most.items()}
    return st.fixed_dictionaries({**drawn, "seed": st.integers(0, 1000)})


def vector(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(strategy: Strategy, model: nn.Module, comm: Communicator, batches: Batches, start: int = 0) -> None:
    """The plain loop, from step `start` on, on a strategy that is set up."""
    for step in batches[start:]:
        strategy.zero_grad()
        strategy.before_backward(last_micro_batch=True)
        model(step[comm.rank]).backward()
        strategy.step()


def run_strategy(
    strategy: Strategy,
    model: nn.Module,
    batches: Batches,
    seed: int = 0,
    coding: Coding | None = None,
    *,
    finish: bool = True,
    **options: Any,
) -> RunResult[Tensor]:
    """Train copies of both on as many ranks as `batches` has; `options` are `run_ranks`'s."""

    def body(comm: Communicator) -> Tensor:
        own, replica = copy.deepcopy(strategy), copy.deepcopy(model)
        own.setup(replica, comm, len(batches), seed, coding)
        train(own, replica, comm, batches)
        if finish:
            own.finish()
        own.close()
        return vector(replica)

    return run_ranks(body, len(batches[0]), **options)


# --- the algorithms ----------------------------------------------------------------------------------------


def mean(tensors: list[Tensor]) -> Tensor:
    """The mean in the order given."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total / len(tensors)


SEED = 11
DTYPE_BYTES = 8  # tests train in fp64, so that rounding hides nothing
adam = partial(torch.optim.Adam, lr=0.01)
adamw = partial(torch.optim.AdamW, lr=0.01)
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def num_values(model: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in model.parameters())


def whole(model: nn.Module) -> int:
    """Bytes of a model."""
    return DTYPE_BYTES * num_values(model)


def every(period: int, num_bytes: Callable[[nn.Module], int]) -> Callable[[nn.Module, int, int], int]:
    """The bytes at each period's end."""
    return lambda model, step, _: num_bytes(model) if step % period == 0 else 0


def local(after: Callable[[nn.Module], Any], make_optim: Any = adamw, max_norm: float | None = None) -> Any:
    """Replicas that train apart between exchanges."""
    return lambda model, batches: reference_local(model, batches, make_optim, after(model), max_norm)


def named_codec(name: str) -> Codec:
    """A codec that there is."""
    codec = codec_named(name)
    assert codec is not None
    return codec


def gradients(model: nn.Module, batch: Batch) -> list[Tensor]:
    """The gradient of one batch, per parameter."""
    return list(torch.autograd.grad(model(batch), list(model.parameters())))


def clipped(grads: list[Tensor], max_norm: float | None) -> list[Tensor]:
    """Scaled down to `max_norm` if longer (torch adds 1e-6 to the norm)."""
    if max_norm is None:
        return grads
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads))
    return [g * min(1.0, max_norm / (norm + 1e-6)) for g in grads]


def apply(optim: torch.optim.Optimizer, model: nn.Module, grads: list[Tensor]) -> None:
    """One optimizer step with these gradients."""
    for parameter, gradient in zip(model.parameters(), grads, strict=True):
        parameter.grad = gradient
    optim.step()


def reference_all_reduce(
    model: nn.Module, batches: Batches, make_optim: MakeOptim, max_norm: float | None = None
) -> list[nn.Module]:
    """One model trained on the mean of all ranks' gradients."""
    optim = make_optim(list(model.parameters()))
    for step in batches:
        per_rank = [gradients(model, batch) for batch in step]
        average = [mean(list(parts)) for parts in zip(*per_rank, strict=True)]
        apply(optim, model, clipped(average, max_norm))
    return [model] * len(batches[0])


def reference_local(
    model: nn.Module,
    batches: Batches,
    make_optim: MakeOptim,
    after_step: Callable[[int, list[nn.Module]], None],
    max_norm: float | None = None,
) -> list[nn.Module]:
    """Replicas trained apart; `after_step(step, replicas)` brings them together, step counting from 1."""
    replicas = [copy.deepcopy(model) for _ in batches[0]]
    optims = [make_optim(list(replica.parameters())) for replica in replicas]
    for number, step in enumerate(batches, start=1):
        for replica, optim, batch in zip(replicas, optims, step, strict=True):
            apply(optim, replica, clipped(gradients(replica, batch), max_norm))
        with torch.no_grad():
            after_step(number, replicas)
    return replicas


def averaging(H: int, island_size: int | None, seed: int) -> Callable[[int, list[nn.Module]], None]:  # noqa: N803
    """FedAvg's exchange."""
    membership = AveragingCommunicator(island_size, H=H)
    membership.seed = seed

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        if number % H:
            return
        before = [[p.clone() for p in replica.parameters()] for replica in replicas]
        for rank, replica in enumerate(replicas):
            island = membership.island(rank, len(replicas), number // H - 1)
            for index, parameter in enumerate(replica.parameters()):
                parameter.copy_(mean([before[member][index] for member in island]))

    return after_step


def sparse(selector: IndexSelector, interval: int, seed: int) -> Callable[[int, list[nn.Module]], None]:
    """SPARTA's exchange."""
    selector.seed = seed

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        if number % interval or len(replicas) == 1:
            return
        vectors = [vector(replica) for replica in replicas]
        for index in selector.get_indices(vectors[0], number // interval - 1).tolist():
            value = mean([v[index] for v in vectors])
            for v in vectors:
                v[index] = value
        for replica, v in zip(replicas, vectors, strict=True):
            nn.utils.vector_to_parameters(v, replica.parameters())

    return after_step


def outer(
    model: nn.Module,
    H: int,  # noqa: N803
    lr: float = 0.7,
    momentum: float = 0.9,
    encode: Callable[[Tensor], Tensor] = lambda values: values,
) -> Callable[[int, list[nn.Module]], None]:
    """DiLoCo's outer step: Nesterov momentum as Sutskever et al. write it, as torch computes it."""
    theta = vector(model)
    velocity = torch.zeros_like(theta)

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        if number % H:
            return
        delta = encode(mean([encode(theta - vector(replica)) for replica in replicas]))
        velocity.mul_(momentum).add_(delta)
        theta.sub_(lr * (delta + momentum * velocity))
        for replica in replicas:
            nn.utils.vector_to_parameters(theta.clone(), replica.parameters())

    return after_step


def both(*exchanges: Callable[[int, list[nn.Module]], None]) -> Callable[[int, list[nn.Module]], None]:
    """One exchange after the other."""

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        for exchange in exchanges:
            exchange(number, replicas)

    return after_step


# --- blocks of matrices ---------------------------------------------------------------------------------------


def divisor(size: int, limit: int) -> int:
    """The largest divisor of `size` up to `limit`."""
    return max(d for d in range(1, min(size, limit) + 1) if size % d == 0)


def matrix_blocks(tensor: Tensor, chunk: int) -> list[Tensor]:
    """Views of `tensor`'s blocks as matrices; vectors are one row."""
    matrix = tensor.view(tensor.shape[0], -1) if tensor.dim() > 1 else tensor.view(1, -1)
    height, width = (divisor(size, chunk) for size in matrix.shape)
    return [block for row in matrix.split(height, 0) for block in row.split(width, 1)]
