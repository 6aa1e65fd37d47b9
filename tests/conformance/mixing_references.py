"""Strategies that mix with some others, or average each thing at its own time, once more in one process.

Mixing matrices are written down from the papers; replicas are rows of a matrix of parameters.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import strategy_reference as reference
import torch
from strategy_reference import SEED, adam, local, sgd, whole
from torch import Tensor, nn

from exogym_core.strategy import (
    DESLOCStrategy,
    DPSGDStrategy,
    GASLoCStrategy,
    NoLoCoCommunicator,
    NoLoCoStrategy,
    SGPStrategy,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from strategy_reference import Batches, MakeOptim

    Matrix = Callable[[int, int], Tensor]


def ring(number: int, n: int) -> Tensor:
    """1/3 for a rank and both neighbours; two ranks halve."""
    if n < 3:
        return torch.full((n, n), 1 / n, dtype=torch.float64)
    eye = torch.eye(n, dtype=torch.float64)
    return (eye + eye.roll(1, 0) + eye.roll(-1, 0)) / 3


def exponential(number: int, n: int) -> Tensor:
    """Half stays, half goes 2^k places on, k going round through the powers below n."""
    eye = torch.eye(n, dtype=torch.float64)
    if n == 1:
        return eye
    return (eye + eye.roll(2 ** (number % math.ceil(math.log2(n))), 0)) / 2


def complete(number: int, n: int) -> Tensor:
    """The mean."""
    return torch.full((n, n), 1 / n, dtype=torch.float64)


def along(lists: list[list[int]]) -> Matrix:
    """Every rank keeps and sends equal parts to those listed for it."""

    def matrix(number: int, n: int) -> Tensor:
        columns = torch.zeros(n, n, dtype=torch.float64)
        for rank, to in enumerate(lists):
            columns[[rank, *to], rank] = 1 / (1 + len(to))
        return columns

    return matrix


def rows(replicas: list[nn.Module]) -> Tensor:
    """All parameters, a row a replica."""
    return torch.stack([reference.vector(replica) for replica in replicas])


def write(values: Tensor, replicas: list[nn.Module]) -> None:
    """Set the replicas to the rows."""
    for row, replica in zip(values, replicas, strict=True):
        nn.utils.vector_to_parameters(row.clone(), replica.parameters())


def stepping(
    model: nn.Module,
    batches: Batches,
    make_optim: MakeOptim,
    before: Callable[[int, list[nn.Module]], None],
    after: Callable[[int, list[nn.Module], list[Any]], None],
) -> list[nn.Module]:
    """Replicas with hooks before the update, whose gradient is there already, and after it; steps from 0."""
    replicas: list[nn.Module] = [copy.deepcopy(model) for _ in batches[0]]
    optims = [make_optim(list(replica.parameters())) for replica in replicas]
    for number, step in enumerate(batches):
        grads = [reference.gradients(replica, batch) for replica, batch in zip(replicas, step, strict=True)]
        before(number, replicas)
        for replica, optim, gradient in zip(replicas, optims, grads, strict=True):
            reference.apply(optim, replica, gradient)
        after(number, replicas, optims)
    return replicas


def nothing(*_: Any) -> None:
    """No hook."""


def dpsgd(model: nn.Module, batches: Batches, make_optim: MakeOptim, matrix: Matrix) -> list[nn.Module]:
    """D-PSGD, mixing before the update."""

    def before(number: int, replicas: list[nn.Module]) -> None:
        write(matrix(number, len(replicas)) @ rows(replicas), replicas)

    return stepping(model, batches, make_optim, before, nothing)


def sgp(model: nn.Module, batches: Batches, make_optim: MakeOptim, matrix: Matrix) -> list[nn.Module]:
    """Stochastic gradient push; the replicas returned are de-biased."""
    weights = torch.ones(len(batches[0]), 1, dtype=torch.float64)

    def before(number: int, replicas: list[nn.Module]) -> None:
        write(rows(replicas) * weights, replicas)

    def after(number: int, replicas: list[nn.Module], optims: list[Any]) -> None:
        columns = matrix(number, len(replicas))
        numerators = columns @ rows(replicas)
        weights.copy_(columns @ weights)
        write(numerators / weights, replicas)

    return stepping(model, batches, make_optim, before, after)


def noloco(
    model: nn.Module,
    H: int,  # noqa: N803
    seed: int,
    group_size: int = 2,
    alpha: float = 0.5,
    beta: float = 0.7,
    gamma: float = 0.7,
) -> Callable[[int, list[nn.Module]], None]:
    """NoLoCo's outer step, group by group."""
    membership = NoLoCoCommunicator(group_size=group_size)
    membership.seed = seed
    state: dict[str, Tensor] = {}

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        n = len(replicas)
        phi = state.setdefault("phi", reference.vector(model).repeat(n, 1))
        m = state.setdefault("m", torch.zeros_like(phi))
        if number % H:
            return
        theta, old = rows(replicas), phi.clone()
        for rank in range(n):
            group = membership.group(rank, n, number // H - 1)
            moved, begun = (theta - old)[group].mean(0), old[group].mean(0)
            m[rank] = alpha * m[rank] + beta * moved + gamma * (begun - old[rank])
        phi += m
        write(phi, replicas)

    return after_step


def gasloc(
    model: nn.Module,
    H: int,  # noqa: N803
    matrix: Matrix,
    eta: float = 0.7,
    gamma: float = 0.9,
    alpha: float = 1.0,
) -> Callable[[int, list[nn.Module]], None]:
    """GASLoC's outer step, all replicas at once, with I - alpha Laplacian."""
    state: dict[str, Tensor] = {}

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        n = len(replicas)
        theta = state.setdefault("theta", reference.vector(model).repeat(n, 1))
        last = state.setdefault("last", theta)
        if number % H:
            return
        x = theta + eta * (rows(replicas) - theta)
        eye = torch.eye(n, dtype=torch.float64)
        laplacian = eye - matrix(number // H - 1, n)
        state["theta"] = x - alpha * laplacian @ x + gamma * (x - last)
        state["last"] = x
        write(state["theta"], replicas)

    return after_step


def desloc(
    model: nn.Module, batches: Batches, make_optim: MakeOptim, kx: int, ku: int, kv: int
) -> list[nn.Module]:
    """DES-LOC on Adam's moments."""

    def after(number: int, replicas: list[nn.Module], optims: list[Any]) -> None:
        t = number + 1
        if t % kx == 0:
            write(rows(replicas).mean(0).expand(len(replicas), -1), replicas)
        for period, name in ((ku, "exp_avg"), (kv, "exp_avg_sq")):
            if t % period:
                continue
            for of in zip(*(replica.parameters() for replica in replicas), strict=True):
                held = [optim.state[p][name] for optim, p in zip(optims, of, strict=True)]
                mean = reference.mean(held)
                for value in held:
                    value.copy_(mean)

    return stepping(model, batches, make_optim, nothing, after)


# --- rows of the table ---------------------------------------------------------------------------------------


def sum_of_periods(*periods: int, copies: int = 1) -> Callable[[nn.Module, int, int], int]:
    """A model's bytes (or so many times that) at each period's end."""
    return lambda model, step, _: copies * whole(model) * sum(step % period == 0 for period in periods)


def members_above_one(n: int) -> int:
    """Bytes sent a payload byte by all n in all-reduces of pairs, an odd one joining a pair."""
    return 2 * (n - max(1, n // 2))


ROWS: list[dict[str, Any]] = [
    {
        "name": "DESLOC",
        "make": lambda: DESLOCStrategy(adam, H=2, Ku=3, Kv=4),
        "algorithm": lambda model, batches: desloc(model, batches, adam, 2, 3, 4),
        "payload": sum_of_periods(2, 3, 4),
    },
    {
        "name": "NoLoCo",
        "make": lambda: NoLoCoStrategy(adam, H=2, gamma=0.6),
        "algorithm": local(lambda model: noloco(model, 2, SEED, gamma=0.6), adam),
        "payload": sum_of_periods(2, copies=2),
        "sent_factor": members_above_one,
        "apart": True,
    },
    {
        "name": "DPSGD",
        "make": lambda: DPSGDStrategy(sgd),
        "algorithm": lambda model, batches: dpsgd(model, batches, sgd, ring),
        "payload": sum_of_periods(1),
        "sent_factor": lambda n: n * min(2, n - 1),
        "apart": True,
    },
    {
        "name": "SGP",
        "make": lambda: SGPStrategy(sgd),
        "algorithm": lambda model, batches: sgp(model, batches, sgd, exponential),
        "payload": lambda model, step, n: whole(model) + 8,
        "sent_factor": lambda n: n if n > 1 else 0,
        "apart": True,
    },
    {
        "name": "GASLoC",
        "make": lambda: GASLoCStrategy(adam, H=2, graph="ring", gossip_lr=0.8, outer_momentum=0.5),
        "algorithm": local(lambda model: gasloc(model, 2, ring, gamma=0.5, alpha=0.8), adam),
        "payload": sum_of_periods(2),
        "sent_factor": lambda n: n * min(2, n - 1),
        "apart": True,
    },
]
