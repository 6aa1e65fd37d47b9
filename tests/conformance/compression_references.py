"""Published compressing strategies once more, in one process, and the rows they add to the table of strategies.

Nothing here uses the parts that strategies are made of, but for random numbers that all ranks draw alike.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import strategy_reference as reference
import torch
from strategy_reference import gradients, mean

from exogym_core.strategy import PowerSGDStrategy
from exogym_core.strategy.parts.generators import shared_generator

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

SEED = 11
DTYPE_BYTES = 8

sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def flat_matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(tensor.shape[0], -1)


# --- PowerSGD ----------------------------------------------------------------------------------------------


def reference_powersgd(
    model: nn.Module, batches: reference.Batches, make_optim: Any, rank: int, start: int = 0
) -> list[nn.Module]:
    """The mean of all gradients plus errors, projected on what a power step finds of its columns."""
    parameters, optim, n = list(model.parameters()), make_optim(list(model.parameters())), len(batches[0])
    generator = shared_generator(SEED, "powersgd")
    matrices = [p.dim() > 1 for p in parameters]
    right = [
        torch.randn(
            p.numel() // len(p),
            min(rank, len(p), p.numel() // len(p)),
            generator=generator,
            dtype=torch.float64,
        )
        if is_matrix
        else torch.empty(0)
        for p, is_matrix in zip(parameters, matrices, strict=True)
    ]
    errors = [[torch.zeros_like(p) for p in parameters] for _ in range(n)]
    for number, step in enumerate(batches):
        grads = [gradients(model, batch) for batch in step]
        result = []
        for index, is_matrix in enumerate(matrices):
            own = [g[index] for g in grads]
            if not is_matrix or number < start:
                result.append(mean(own))
                continue
            own = [g + errors[r][index] for r, g in enumerate(own)]
            whole = flat_matrix(mean(own))
            basis = torch.linalg.qr(whole @ torch.linalg.qr(right[index])[0])[0]
            approximation = basis @ (basis.T @ whole)
            right[index] = whole.T @ basis
            result.append(approximation.view_as(parameters[index]))
            for r, g in enumerate(own):
                errors[r][index] = g - result[-1]
        reference.apply(optim, model, result)
    return [model] * n


def low_rank_payload(rank: int) -> Callable[[nn.Module, int, int], int]:
    """`r (rows + columns)` values a matrix, vectors whole."""

    def payload(model: nn.Module, step: int, num_ranks: int) -> int:
        values = 0
        for p in model.parameters():
            rows, columns = (p.shape[0], p[0].numel()) if p.dim() > 1 else (0, 0)
            values += min(rank, rows, columns) * (rows + columns) if p.dim() > 1 else p.numel()
        return DTYPE_BYTES * values

    return payload


#: Keyword arguments of `Row`, one a strategy.
ROWS: list[dict[str, Any]] = [
    {
        "name": "PowerSGD",
        "make": lambda: PowerSGDStrategy(sgd, rank=2),
        "algorithm": lambda model, batches: reference_powersgd(model, batches, sgd, 2),
        "payload": low_rank_payload(2),
        "tolerance": 1e-7,  # a power step amplifies rounding where singular values are close
    },
]
