"""Algorithms of 2024 to 2026 in one process and parameter by parameter, to test strategies against, with their rows."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import strategy_reference as reference
import torch
from outer_references import Nesterov
from strategy_reference import adamw, every, local, sgd, whole
from torch import Tensor, nn

from exogym_core.strategy import ACCOStrategy, DiLoCoStrategy, EDiTStrategy, GPAStrategy, SNOOStrategy

After = Callable[[int, list[nn.Module]], None]


def isotropic(matrix: Tensor) -> Tensor:
    """The polar decomposition's orthogonal factor times the mean singular value, by the Gram matrix's eigenvalues."""
    values = matrix.numpy()
    gram = values @ values.T if len(values) < values.shape[1] else values.T @ values
    squares, vectors = np.linalg.eigh(gram)
    roots = np.sqrt(squares)
    inverse = vectors @ np.diag(1 / roots) @ vectors.T
    polar = inverse @ values if len(values) < values.shape[1] else values @ inverse
    return torch.from_numpy(roots.mean() * polar)


def isoloco(model: nn.Module, H: int, lr: float, momentum: float) -> After:  # noqa: N803
    """DiLoCo along mean pseudo-gradients whose matrices have equal singular values."""
    outers = [Nesterov(p.detach().clone(), lr, momentum) for p in model.parameters()]

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        if number % H:
            return
        for index, outer in enumerate(outers):
            own = [list(replica.parameters())[index] for replica in replicas]
            mean = reference.mean([outer.phi - theta for theta in own])
            phi = outer.step(isotropic(mean) if mean.dim() == 2 else mean)
            for theta in own:
                theta.copy_(phi)

    return after_step


def data_parallel(model: nn.Module, step: list[Any]) -> list[Tensor]:
    """The mean of all ranks' gradients."""
    per_rank = [reference.gradients(model, batch) for batch in step]
    return [reference.mean(list(parts)) for parts in zip(*per_rank, strict=True)]


def snoo(
    model: nn.Module,
    batches: reference.Batches,
    make_optim: Any,
    H: int,  # noqa: N803
    lr: float,
    momentum: float,
) -> list[nn.Module]:
    """Data-parallel training whose model takes an outer step every H steps."""
    optim = make_optim(list(model.parameters()))
    outers = [Nesterov(p.detach().clone(), lr, momentum) for p in model.parameters()]
    for number, step in enumerate(batches, start=1):
        reference.apply(optim, model, data_parallel(model, step))
        if number % H == 0:
            with torch.no_grad():
                for outer, parameter in zip(outers, model.parameters(), strict=True):
                    parameter.copy_(outer.step(outer.phi - parameter))
    return [model] * len(batches[0])


def gpa(
    model: nn.Module, batches: reference.Batches, make_optim: Any, mu_x: float, mu_y: float
) -> list[nn.Module]:
    """Three models: y has the gradients, z the optimizer, x is their average; y is left."""
    z, x = copy.deepcopy(model), copy.deepcopy(model)
    optim = make_optim(list(z.parameters()))
    for step in batches:
        reference.apply(optim, z, data_parallel(model, step))
        with torch.no_grad():
            for average, moved, between in zip(
                x.parameters(), z.parameters(), model.parameters(), strict=True
            ):
                average.copy_(mu_x * average + (1 - mu_x) * moved)
                between.copy_(mu_y * average + (1 - mu_y) * moved)
    return [model] * len(batches[0])


def acco(model: nn.Module, batches: reference.Batches, make_optim: Any) -> list[nn.Module]:
    """Pairs of steps: the first half of an update's gradients is computed at an estimate of the model."""
    estimate, optim = copy.deepcopy(model), make_optim(list(model.parameters()))
    for first, second in zip(batches[::2], batches[1::2], strict=False):
        early = data_parallel(estimate, first)
        late = data_parallel(model, second)
        # The next update's first half is at what this one's first half leads to.
        estimate, trial = copy.deepcopy(model), copy.deepcopy(optim.state_dict())
        guess = make_optim(list(estimate.parameters()))
        guess.load_state_dict(trial)
        both = [(a + b) / 2 for a, b in zip(early, late, strict=True)]
        reference.apply(optim, model, both)
        reference.apply(guess, estimate, early)
    return [model] * len(batches[0])


class Watch:
    """One tensor's norms on one worker: which are outliers, in plain numbers."""

    def __init__(self, limit: float, warmup: int, rate: float) -> None:
        self.limit, self.warmup, self.rate = limit, warmup, rate
        self.mean = self.variance = 0.0
        self.scores: list[float] = []

    def score(self, norm: float) -> float:
        ready = len(self.scores) >= self.warmup and self.variance > 0
        return (norm - self.mean) / math.sqrt(self.variance) if ready else 0.0

    def is_outlier(self, norm: float) -> bool:
        if len(self.scores) < self.warmup:
            return False
        return self.score(norm) > self.limit * max(1.0, statistics.stdev(self.scores[-self.warmup :]))

    def learn(self, norm: float) -> None:
        before = norm - self.mean
        self.mean += self.rate * before
        self.variance = (1 - self.rate) * (self.variance + self.rate * before * (norm - self.mean))
        self.scores.append(0.0)  # counted before it is scored
        self.scores[-1] = self.score(norm)


def edit(
    model: nn.Module,
    H: int,  # noqa: N803
    *,
    limit: float = 3.0,
    warmup: int = 120,
    rate: float = 0.02,
    clip: float = 10.0,
    seen: list[bool] | None = None,
) -> After:
    """DiLoCo with EDiT's penalty; `seen` collects whether each norm was an outlier."""
    outers = [Nesterov(p.detach().clone(), 0.7, 0.9) for p in model.parameters()]
    watches: list[list[Watch]] = []

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        if number % H:
            return
        if not watches:
            watches.extend([Watch(limit, warmup, rate) for _ in outers] for _ in replicas)
        merged: list[Tensor | None] = []
        for index, outer in enumerate(outers):
            own = [outer.phi - list(replica.parameters())[index] for replica in replicas]
            weights = []
            for rank, displacement in enumerate(own):
                norm, watch = float(displacement.norm()), watches[rank][index]
                is_outlier = watch.is_outlier(norm)
                weights.append(0.0 if is_outlier else math.exp(-norm))
                if not is_outlier:
                    watch.learn(norm)
                if seen is not None:
                    seen.append(is_outlier)
            total = sum(weights)
            merged.append(
                sum((w / total * d for w, d in zip(weights, own, strict=True)), torch.zeros_like(own[0]))
                if total
                else None
            )
        norm = math.sqrt(sum(float((d**2).sum()) for d in merged if d is not None))
        factor = min(1.0, clip / (norm + 1e-6))
        for index, (outer, displacement) in enumerate(zip(outers, merged, strict=True)):
            phi = outer.phi if displacement is None else outer.step(factor * displacement)
            for replica in replicas:
                list(replica.parameters())[index].copy_(phi)

    return after_step


def with_norms(model: nn.Module, step: int, n: int) -> int:
    """A model's bytes and 4 a tensor at the end of each round of 2 steps."""
    return (whole(model) + 4 * len(list(model.parameters()))) * (step % 2 == 0)


ROWS: list[dict[str, Any]] = [
    {
        "name": "IsoLoCo",
        "make": lambda: DiLoCoStrategy(adamw, H=2, outer_lr=0.8, outer_momentum=0.7, aggregate="isotropic"),
        "algorithm": local(lambda model: isoloco(model, 2, 0.8, 0.7)),
        "payload": every(2, whole),
        "tolerance": 1e-7,  # the reference takes roots of eigenvalues
    },
    {
        "name": "SNOO",
        "make": lambda: SNOOStrategy(sgd, H=3, outer_lr=0.8, outer_momentum=0.5),
        "algorithm": lambda model, batches: snoo(model, batches, sgd, 3, 0.8, 0.5),
        "payload": every(1, whole),
    },
    {
        "name": "GPA",
        "make": lambda: GPAStrategy(adamw, eval_interp_coeff=0.9, train_interp_coeff=0.6),
        "algorithm": lambda model, batches: gpa(model, batches, adamw, 0.9, 0.6),
        "payload": every(1, whole),
    },
    {
        "name": "ACCO",
        "make": lambda: ACCOStrategy(adamw),
        "algorithm": lambda model, batches: acco(model, batches, adamw),
        "payload": every(1, whole),
    },
    {
        "name": "EDiT",
        "make": lambda: EDiTStrategy(adamw, H=2, clip_outer=0.02),
        "algorithm": local(lambda model: edit(model, 2, clip=0.02)),
        "payload": with_norms,
        "sent": lambda model, step, n: (
            2 * (n - 1) * every(2, whole)(model, step, n)
            + n * (n - 1) * 4 * len(list(model.parameters())) * (step % 2 == 0)
        ),
        "tolerance": 1e-6,  # weights are in fp32
    },
]
