"""Published compressing strategies once more, in one process, and the rows they add to the table of strategies.

Nothing here uses the parts that strategies are made of, but for random numbers that all ranks draw alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import strategy_reference as reference
import torch
from strategy_reference import DTYPE_BYTES, SEED, adamw, every, gradients, local, mean, sgd
from torch import Tensor, nn

from exogym_core.strategy import (
    DGCStrategy,
    DionStrategy,
    MuLoCoStrategy,
    OneBitAdamStrategy,
    PowerSGDStrategy,
    QSGDStrategy,
    QsparseLocalSGDStrategy,
    SignSGDStrategy,
    SparseLoCoStrategy,
)
from exogym_core.strategy.parts.generators import shared_generator

# --- PowerSGD ----------------------------------------------------------------------------------------------


def low_rank_payload(rank: int) -> Callable[[nn.Module, int, int], int]:
    """`r (rows + columns)` values a matrix, vectors whole."""

    def payload(model: nn.Module, step: int, num_ranks: int) -> int:
        values = 0
        for p in model.parameters():
            rows, columns = (p.shape[0], p[0].numel()) if p.dim() > 1 else (0, 0)
            values += min(rank, rows, columns) * (rows + columns) if p.dim() > 1 else p.numel()
        return DTYPE_BYTES * values

    return payload


# --- rounds that send errors encoded -----------------------------------------------------------------------


def coded_rounds(
    model: nn.Module,
    compress: Callable[[list[Tensor], int, int], list[Tensor]],
    H: int,  # noqa: N803
    beta: float,
    lr: float,
    momentum: float = 0.0,
    gain: float = 1.0,
    *,
    among_senders: bool = False,
    again: bool = False,
) -> Callable[[int, list[nn.Module]], None]:
    """Outer steps along the mean of `compress(errors, rank, step)`, one tensor a parameter."""
    theta = [p.detach().clone() for p in model.parameters()]
    velocity = [torch.zeros_like(p) for p in theta]
    errors: list[list[Tensor]] = []

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        if number % H:
            return
        if not errors:
            errors.extend([torch.zeros_like(p) for p in theta] for _ in replicas)
        sent = []
        for rank, replica in enumerate(replicas):
            parameters = list(replica.parameters())
            errors[rank] = [
                beta * e + gain * (t - p) for e, t, p in zip(errors[rank], theta, parameters, strict=True)
            ]
            sent.append(compress(errors[rank], rank, number - 1))
            errors[rank] = [e - s for e, s in zip(errors[rank], sent[-1], strict=True)]
        means = []
        for parts in zip(*sent, strict=True):
            counts = sum((part != 0).double() for part in parts)
            means.append(sum(parts) / counts.clamp(min=1) if among_senders else mean(list(parts)))
        if again:
            means = compress(means, 0, number - 1)
        for t, v, m in zip(theta, velocity, means, strict=True):
            v.mul_(momentum).add_(m)
            t.sub_(lr * (m + momentum * v))
        for replica in replicas:
            for p, t in zip(replica.parameters(), theta, strict=True):
                p.copy_(t)

    return after_step


def statistical(values: Tensor, bits: int) -> Tensor:
    """Each value as the mean of its bin of 6 deviations over 2**bits around the mean."""
    values = values.float().double()
    centered = values - values.mean()
    sigma = float(centered.std()) if len(values) > 1 else 0.0
    scale = 6 * sigma / 2**bits or 1.0
    codes = [min(max(round(float(c) / scale + 2**bits // 2), 0), 2**bits - 1) for c in centered]
    bins = {
        code: torch.stack([c for c, k in zip(centered, codes, strict=True) if k == code]).mean()
        for code in codes
    }
    return torch.stack([bins[code] for code in codes]) + values.mean()


def largest(tensor: Tensor, count: int, chunk: int, coded: Callable[[Tensor], Tensor]) -> Tensor:
    """The `count` largest of each block, as `coded` leaves all of a tensor's; the rest zero."""
    result = torch.zeros_like(tensor)
    places = []
    for block, target in zip(
        reference.matrix_blocks(tensor, chunk), reference.matrix_blocks(result, chunk), strict=True
    ):
        magnitudes = block.reshape(-1).abs()  # of equals, those that topk takes
        order = magnitudes.topk(min(count, len(magnitudes))).indices.tolist()
        places += [(block, target, divmod(i, block.shape[1])) for i in order]
    values = coded(torch.stack([block[at] for block, _, at in places]))
    for (_, target, at), value in zip(places, values, strict=True):
        target[at] = value
    return result


def scaled_signs(values: Tensor) -> Tensor:
    """Signs times the mean magnitude; zero counts as plus."""
    return torch.where(values >= 0, 1.0, -1.0).double() * values.float().double().abs().mean()


def kept(model: nn.Module, count: int, chunk: int) -> list[int]:
    """Values that each parameter sends."""
    return [
        sum(min(count, block.numel()) for block in reference.matrix_blocks(p.detach(), chunk))
        for p in model.parameters()
    ]


def in_bytes(bits: int) -> int:
    return -(-bits // 8)


# --- exchanges of gradients --------------------------------------------------------------------------------


def exchanged(
    model: nn.Module,
    batches: reference.Batches,
    make_optim: Any,
    exchange: Callable[[int, list[list[Tensor]]], list[Tensor]],
) -> list[nn.Module]:
    """One model, whose optimizer gets what `exchange(step, gradients of all ranks)` returns."""
    optim = make_optim(list(model.parameters()))
    for number, step in enumerate(batches):
        grads = [gradients(model, batch) for batch in step]
        reference.apply(optim, model, exchange(number, grads))
    return [model] * len(batches[0])


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def shaped(values: Tensor, like: list[Tensor]) -> list[Tensor]:
    pieces = values.split([t.numel() for t in like])
    return [piece.view(t.shape) for piece, t in zip(pieces, like, strict=True)]


def reference_signsgd(
    model: nn.Module, batches: reference.Batches, lr: float, beta: float
) -> list[nn.Module]:
    momenta = [torch.zeros_like(reference.vector(model)) for _ in batches[0]]

    def vote(_: int, grads: list[list[Tensor]]) -> list[Tensor]:
        ballots = []
        for rank, own in enumerate(grads):
            momenta[rank] = beta * momenta[rank] + (1 - beta) * flat(own)
            ballots.append(torch.where(momenta[rank] >= 0, 1.0, -1.0))
        return shaped(torch.where(sum(ballots) >= 0, 1.0, -1.0).double(), grads[0])

    return exchanged(model, batches, partial(torch.optim.SGD, lr=lr), vote)


def reference_qsgd(
    model: nn.Module, batches: reference.Batches, make_optim: Any, bits: int, bucket: int
) -> Any:
    s = 2 ** (bits - 1) - 1

    def quantized(values: Tensor, drawn: Tensor) -> Tensor:
        norm = values.float().norm()
        places = values.float().abs() / (norm if norm > 0 else 1) * s
        levels = torch.where(drawn < places - places.floor(), places.floor() + 1, places.floor())
        return (norm * values.float().sign() * levels / s).double()

    def exchange(number: int, grads: list[list[Tensor]]) -> list[Tensor]:
        sent = []
        for rank, own in enumerate(grads):
            values = flat(own)
            drawn = torch.rand(len(values), generator=shared_generator(SEED, "qsgd", number, rank))
            pairs = zip(values.split(bucket), drawn.split(bucket), strict=True)
            sent.append(torch.cat([quantized(part, draws) for part, draws in pairs]))
        return shaped(mean(sent), grads[0])

    return exchanged(model, batches, make_optim, exchange)


def dgc_counts(model: nn.Module, density: float) -> list[int]:
    return [math.ceil(density * p.numel()) if p.dim() > 1 else 0 for p in model.parameters()]


def dgc_bytes(model: nn.Module, step: int) -> tuple[int, int]:
    """Of a 1-based step of the row: 8 bytes a value sent of matrices; vectors whole."""
    counts = dgc_counts(model, 0.1 ** (step / 6) if step <= 5 else 0.1)
    return 8 * sum(counts), DTYPE_BYTES * sum(p.numel() for p in model.parameters() if p.dim() < 2)


def reference_dgc(
    model: nn.Module, batches: reference.Batches, lr: float, momentum: float, densities: list[float]
) -> list[nn.Module]:
    """`densities` are of the first steps; the last one is of all later ones."""
    n = len(batches[0])
    u = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(n)]
    v = [[torch.zeros_like(p) for p in model.parameters()] for _ in range(n)]

    def exchange(number: int, grads: list[list[Tensor]]) -> list[Tensor]:
        counts = dgc_counts(model, densities[min(number, len(densities) - 1)])
        result = []
        for index, count in enumerate(counts):
            own = [g[index] for g in grads]
            if not count:
                u[0][index] = momentum * u[0][index] + mean(own)
                result.append(u[0][index].clone())
                continue
            sent = []
            for rank, g in enumerate(own):
                u[rank][index] = momentum * u[rank][index] + g
                v[rank][index] = v[rank][index] + u[rank][index]
                values = v[rank][index].reshape(-1)
                chosen = values.abs().topk(count).indices  # of equals, those that topk takes
                part = torch.zeros_like(values)
                part[chosen] = values[chosen].float().double()
                sent.append(part.view(g.shape))
                u[rank][index].view(-1)[chosen] = 0
                v[rank][index].view(-1)[chosen] = 0
            result.append(mean(sent))
        return result

    return exchanged(model, batches, partial(torch.optim.SGD, lr=lr), exchange)


def reference_onebit_adam(
    model: nn.Module, batches: reference.Batches, lr: float, freeze_step: int
) -> list[nn.Module]:
    n, size = len(batches[0]), len(reference.vector(model))
    parts = [part.tolist() for part in torch.arange(size).tensor_split(n)]
    m, v, served = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
    errors = [torch.zeros(size, dtype=torch.float64) for _ in range(n)]

    def coded(values: Tensor) -> Tensor:
        result = torch.zeros_like(values)
        for part in parts:
            if part:
                scale = values[part].float().double().square().mean().sqrt()
                result[part] = torch.where(values[part] >= 0, scale, -scale)
        return result

    def exchange(number: int, grads: list[list[Tensor]]) -> list[Tensor]:
        nonlocal m, v, served
        if number < freeze_step:
            g = mean([flat(own) for own in grads])
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        else:
            sent = []
            for rank, own in enumerate(grads):
                compensated = 0.9 * m + 0.1 * flat(own) + errors[rank]
                sent.append(coded(compensated))
                errors[rank] = compensated - sent[-1]
            total = mean(sent) + served
            m = coded(total)
            served = total - m
        return shaped(m / (v.sqrt() + 1e-8), grads[0])

    return exchanged(model, batches, partial(torch.optim.SGD, lr=lr), exchange)


def onebit_payload(freeze_step: int) -> Callable[[nn.Module, int, int], int]:
    def payload(model: nn.Module, step: int, num_ranks: int) -> int:
        size = sum(p.numel() for p in model.parameters())
        if step <= freeze_step:
            return DTYPE_BYTES * size
        return sum(in_bytes(len(part)) + 4 for part in torch.zeros(size).tensor_split(num_ranks))

    return payload


# --- Dion and MuLoCo: hidden matrices by one rule, the rest by AdamW -----------------------------------------


class MatrixRule(torch.optim.Optimizer):
    """`p -= lr wd p + lr sqrt(rows / columns) direction(p)` for matrices, AdamW for the rest."""

    def __init__(
        self, params: list[Tensor], direction: Callable[[Tensor], Tensor], lr: float, wd: float
    ) -> None:
        super().__init__(params, {})
        self.direction, self.lr, self.wd = direction, lr, wd
        self.others = torch.optim.AdamW([p for p in params if p.dim() != 2], lr, (0.9, 0.95), weight_decay=wd)

    def step(self, closure: Any = None) -> None:
        self.others.step()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.dim() == 2:
                    size = math.sqrt(p.shape[0] / p.shape[1])
                    p.copy_(p - self.lr * self.wd * p - self.lr * size * self.direction(p))


def papers_muon(params: list[Tensor]) -> MatrixRule:
    """Momentum, then five Newton-Schulz steps, written on the singular values that they move."""
    momenta: dict[int, Tensor] = {}
    triples = [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ]

    def direction(p: Tensor) -> Tensor:
        momenta[id(p)] = 0.95 * momenta.get(id(p), torch.zeros_like(p)) + p.grad
        left, sizes, right = torch.linalg.svd(momenta[id(p)], full_matrices=False)
        sizes = sizes / sizes.norm().clamp(min=1e-7)
        for a, b, c in triples:
            sizes = a * sizes + b * sizes**3 + c * sizes**5
        return left @ torch.diag(sizes) @ right

    return MatrixRule(params, direction, 0.02, 0.01)


def reference_dion(model: nn.Module, batches: reference.Batches, fraction: float) -> list[nn.Module]:
    """One rank with the mean gradient: its momentum is the mean of all ranks'."""
    generator = shared_generator(SEED, "dion")
    state: dict[int, tuple[Tensor, Tensor]] = {}
    for p in model.parameters():
        if p.dim() == 2:
            drawn = torch.randn(
                min(p.shape), math.ceil(fraction * min(p.shape)), generator=generator, dtype=torch.float64
            )
            state[id(p)] = (torch.zeros(max(p.shape), min(p.shape)).to(p), torch.linalg.qr(drawn)[0])

    def direction(p: Tensor) -> Tensor:
        (momentum, right), is_wide = state[id(p)], p.shape[0] < p.shape[1]
        assert p.grad is not None
        momentum = momentum + (p.grad.T if is_wide else p.grad)
        left = torch.linalg.qr(momentum @ right)[0]
        back = momentum.T @ left
        right = back / (back.norm(dim=0) + 1e-8)
        state[id(p)] = (momentum - 0.05 * left @ back.T, right)
        return right @ left.T if is_wide else left @ right.T

    return exchanged(
        model,
        batches,
        lambda params: MatrixRule(params, direction, 0.01, 0.01),
        lambda _, grads: [mean(list(parts)) for parts in zip(*grads, strict=True)],
    )


def dion_payload(fraction: float) -> Callable[[nn.Module, int, int], int]:
    def payload(model: nn.Module, step: int, num_ranks: int) -> int:
        values = 0
        for p in model.parameters():
            values += math.ceil(fraction * min(p.shape)) * sum(p.shape) if p.dim() == 2 else p.numel()
        return DTYPE_BYTES * values

    return payload


def gathered(n: int) -> int:
    return n * (n - 1)


#: Keyword arguments of `Row`, one a strategy.
ROWS: list[dict[str, Any]] = [
    {
        "name": "PowerSGD",
        "make": lambda: PowerSGDStrategy(sgd, approximation_rank=2),
        "algorithm": None,  # torch's own hook is in end_to_end/test_ddp.py
        "payload": low_rank_payload(2),
    },
    {
        "name": "SparseLoCo",
        "make": lambda: SparseLoCoStrategy(adamw, H=2, k=3, chunk=4, error_decay=0.9, outer_lr=0.8),
        "algorithm": local(
            lambda model: coded_rounds(
                model,
                lambda errors, _, __: [largest(e, 3, 4, partial(statistical, bits=2)) for e in errors],
                H=2,
                beta=0.9,
                lr=0.8,
                among_senders=True,
            )
        ),
        "payload": every(
            2, lambda model: sum(in_bytes(12 * k) + in_bytes(2 * k) + 20 for k in kept(model, 3, 4))
        ),
        "sent_factor": gathered,
        "tolerance": 1e-5,  # values travel in fp32
    },
    {
        "name": "QsparseLocalSGD",
        "make": lambda: QsparseLocalSGDStrategy(adamw, H=2, density=0.3),
        "algorithm": local(
            lambda model: coded_rounds(
                model,
                lambda errors, _, __: [
                    largest(e, max(1, round(0.3 * e.numel())), 99, scaled_signs) for e in errors
                ],
                H=2,
                beta=1.0,
                lr=1.0,
            )
        ),
        "payload": every(
            2,
            lambda model: sum(
                4 * k + in_bytes(k) + 4 for k in (max(1, round(0.3 * p.numel())) for p in model.parameters())
            ),
        ),
        "sent_factor": gathered,
        "tolerance": 1e-5,
    },
    {
        "name": "MuLoCo",
        "make": lambda: MuLoCoStrategy(H=2, bits=4),
        "algorithm": local(
            lambda model: coded_rounds(
                model,
                lambda errors, _, __: [statistical(e.reshape(-1), 4).view(e.shape) for e in errors],
                H=2,
                beta=0.9,
                lr=0.7,
                momentum=0.6,
                gain=0.7,
                again=True,
            ),
            papers_muon,
        ),
        "payload": every(2, lambda model: sum(in_bytes(4 * p.numel()) + 4 * 17 for p in model.parameters())),
        "sent_factor": gathered,
        "tolerance": 1e-5,
    },
    {
        "name": "SignSGD",
        "make": lambda: SignSGDStrategy(lr=0.01),
        "algorithm": lambda model, batches: reference_signsgd(model, batches, 0.01, 0.9),
        "payload": lambda model, _, n: sum(
            in_bytes(len(part)) for part in torch.zeros(len(reference.vector(model))).tensor_split(n)
        ),
    },
    {
        "name": "QSGD",
        "make": lambda: QSGDStrategy(sgd, bits=3, bucket=16),
        "algorithm": lambda model, batches: reference_qsgd(model, batches, sgd, 3, 16),
        "payload": lambda model, _, __: (
            in_bytes(3 * len(reference.vector(model))) + 4 * math.ceil(len(reference.vector(model)) / 16)
        ),
        "sent_factor": gathered,
        "tolerance": 1e-5,
    },
    {
        "name": "DGC",
        "make": lambda: DGCStrategy(lr=0.05, density=0.1, density_warmup_steps=5),
        "algorithm": lambda model, batches: reference_dgc(
            model, batches, 0.05, 0.9, [*(0.1 ** (i / 6) for i in range(1, 6)), 0.1]
        ),
        "payload": lambda model, step, _: dgc_bytes(model, step)[0] + dgc_bytes(model, step)[1],
        "sent": lambda model, step, n: (
            gathered(n) * dgc_bytes(model, step)[0] + 2 * (n - 1) * dgc_bytes(model, step)[1]
        ),
        "tolerance": 1e-5,
    },
    {
        "name": "OneBitAdam",
        "make": lambda: OneBitAdamStrategy(lr=0.01, freeze_step=3),
        "algorithm": lambda model, batches: reference_onebit_adam(model, batches, 0.01, 3),
        "payload": onebit_payload(3),
        "tolerance": 1e-4,  # scales travel in fp32, and what is small divides by a small variance
    },
    {
        "name": "Dion",
        "make": lambda: DionStrategy(rank_fraction=0.5),
        "algorithm": lambda model, batches: reference_dion(model, batches, 0.5),
        "payload": dion_payload(0.5),
        "tolerance": 1e-6,
    },
]
