"""Overlapped outer rounds in one process, parameter by parameter, to test strategies against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import strategy_reference as reference
import torch
from torch import Tensor, nn

from exogym_core.strategy import IndexSelector


class Nesterov:
    """torch's SGD with Nesterov momentum, on one tensor."""

    def __init__(self, phi: Tensor, lr: float, momentum: float) -> None:
        self.phi, self.lr, self.momentum = phi, lr, momentum
        self.velocity = torch.zeros_like(phi)

    def step(self, gradient: Tensor) -> Tensor:
        """Phi after a step, changed in place."""
        self.velocity.mul_(self.momentum).add_(gradient)
        return self.phi.sub_(self.lr * (gradient + self.momentum * self.velocity))


def streaming(
    model: nn.Module,
    fragments: list[list[int]],
    H: int,  # noqa: N803
    tau: int,
    alpha: float,
    last: int,
    lr: float = 0.4,
    momentum: float = 0.9,
) -> Callable[[int, list[nn.Module]], None]:
    """Streaming DiLoCo; `fragments` are indices of parameters, `last` the number of the last step."""
    outers = [Nesterov(p.detach().clone(), lr, momentum) for p in model.parameters()]
    under_way: dict[int, tuple[int, list[Tensor]]] = {}

    def apply(p: int, replicas: list[nn.Module]) -> None:
        for index, mean in zip(fragments[p], under_way.pop(p)[1], strict=True):
            phi = outers[index].step(mean)
            for replica in replicas:
                theta = list(replica.parameters())[index]
                theta.copy_(alpha * theta + (1 - alpha) * phi)

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        for p, members in enumerate(fragments):
            if p in under_way and under_way[p][0] == number:
                apply(p, replicas)
            if number % H == (p + 1) * H // len(fragments) % H:
                parameters = [list(replica.parameters()) for replica in replicas]
                means = [reference.mean([outers[i].phi - own[i] for own in parameters]) for i in members]
                under_way[p] = (number + tau, means)
                if tau == 0:
                    apply(p, replicas)
        if number == last:
            for p in sorted(under_way):
                apply(p, replicas)

    return after_step


@dataclass
class Away:
    """A fragment under way: when it left, what each replica's parameters were, and the mean displacement."""

    left: int
    then: list[list[Tensor]]
    means: list[Tensor]


def cocodc(
    model: nn.Module,
    fragments: list[list[int]],
    H: int,  # noqa: N803
    tau: int,
    last: int,
    *,
    transmissions: int,
    lam: float = 0.5,
    relative: bool = True,
    sent: list[int] | None = None,
) -> Callable[[int, list[nn.Module]], None]:
    """CoCoDC as its docstring has it; the fragments that leave are noted in `sent`."""
    outers = [Nesterov(p.detach().clone(), 0.4, 0.9) for p in model.parameters()]
    under_way: dict[int, Away] = {}
    departures: list[list[int]] = [[0] for _ in fragments]
    rates = [0.0] * len(fragments)
    period = max(1, H // max(transmissions, len(fragments)))

    def corrected(p: int, theta: Tensor, then: Tensor, phi: Tensor) -> Tensor:
        if tau == 0:
            return phi
        g, apart = (then - theta) / tau, phi - then
        if relative:
            size = float((g * g * apart).norm())
            return phi - tau * (g + (lam * float(g.norm()) / size if size else 0.0) * g * g * apart)
        return phi - tau * (g + lam * g * g * apart / (departures[p][-1] - departures[p][-2]))

    def apply(p: int, replicas: list[nn.Module]) -> None:
        away = under_way.pop(p)
        squares = sum(float((mean**2).sum()) for mean in away.means)
        size = sum(mean.numel() for mean in away.means)
        rates[p] = squares**0.5 / size / (departures[p][-1] - departures[p][-2])
        for place, index in enumerate(fragments[p]):
            phi = outers[index].step(away.means[place])
            for replica, then in zip(replicas, away.then, strict=True):
                theta = list(replica.parameters())[index]
                theta.copy_(corrected(p, theta, then[place], phi))

    def choose(number: int) -> int | None:
        best = None
        for p in range(len(fragments)):
            if p in under_way:
                continue
            waited = number - departures[p][-1]
            key = (waited >= H, len(departures[p]) == 1, rates[p] if waited < H else 0.0)
            key = (True, False, 0.0) if waited >= H else key
            if best is None or key > best[0]:
                best = (key, p)
        return None if best is None else best[1]

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        for p in sorted(under_way):
            if under_way[p].left + tau == number:
                apply(p, replicas)
        if number % period == 0 and (p := choose(number)) is not None:
            parameters = [list(replica.parameters()) for replica in replicas]
            then = [[own[index].clone() for index in fragments[p]] for own in parameters]
            means = [
                reference.mean([outers[i].phi - own[k] for own in then]) for k, i in enumerate(fragments[p])
            ]
            departures[p].append(number)
            under_way[p] = Away(number, then, means)
            if sent is not None:
                sent.append(p)
            if tau == 0:
                apply(p, replicas)
        if number == last:
            for p in sorted(under_way):
                apply(p, replicas)

    return after_step


def delayed(
    model: nn.Module,
    H: int,  # noqa: N803
    last: int,
    *,
    eager: bool = False,
    lr: float = 0.7,
    momentum: float = 0.9,
) -> Callable[[int, list[nn.Module]], None]:
    """The outer gradient of a round, or with `eager` the others' part of it, is applied a round late."""
    start, n = reference.vector(model), None
    outers: list[Nesterov] = []
    late: list[Tensor] = []  # the displacements of the round before, by rank

    def gradient(rank: int, fresh: list[Tensor]) -> Tensor:
        if not eager:
            return reference.mean(late)
        total = torch.zeros_like(start)
        if fresh:
            total += fresh[rank]
        for other, displacement in enumerate(late):
            if other != rank:
                total += displacement
        return total / n

    def end_round(fresh: list[Tensor], replicas: list[nn.Module]) -> None:
        for rank, (outer, replica) in enumerate(zip(outers, replicas, strict=True)):
            if late or eager:
                outer.step(gradient(rank, fresh))
            torch.nn.utils.vector_to_parameters(outer.phi.clone(), replica.parameters())

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        nonlocal n
        if not outers:
            n = len(replicas)
            outers.extend(Nesterov(start.clone(), lr, momentum) for _ in replicas)
        if number % H == 0:
            fresh = [outer.phi - reference.vector(r) for outer, r in zip(outers, replicas, strict=True)]
            end_round(fresh, replicas)
            late[:] = fresh
        if number == last and late and (n > 1 or not eager):  # alone, a rank has nothing of others to apply
            end_round([], replicas)

    return after_step


def sparse_late(
    selector: IndexSelector, interval: int, delay: int, seed: int, last: int, ema: float
) -> Callable[[int, list[nn.Module]], None]:
    """Async SPARTA: the mean of chosen values is applied `delay` steps late, to a moving average of their changes.

    What is applied at the end before it is due keeps all changes.
    """
    kept: dict[tuple[int, int], float] = {}  # by replica and value
    selector.seed = seed
    # Due, which values, as sent, their mean.
    under_way: list[tuple[int, list[int], list[Tensor], Tensor]] = []

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        if len(replicas) == 1:
            return
        for due, places, sent, mean in list(under_way):
            if number in (due, last):
                for r, (replica, own) in enumerate(zip(replicas, sent, strict=True)):
                    flat = reference.vector(replica)
                    for k, place in enumerate(places):
                        moved = float(flat[place] - own[k])
                        if number == due:
                            first = due == interval + delay
                            moved = moved if first else ema * kept.get((r, place), 0.0) + (1 - ema) * moved
                            kept[r, place] = moved
                        flat[place] = mean[k] + moved
                    torch.nn.utils.vector_to_parameters(flat, replica.parameters())
                under_way.clear()
        if number % interval == 0:
            vectors = [reference.vector(replica) for replica in replicas]
            places = selector.get_indices(vectors[0], number // interval - 1).tolist()
            sent = [torch.stack([flat[place] for place in places]) for flat in vectors]
            if number != last:  # what would leave after the last step comes back at once, to the same end
                under_way.append((number + delay, places, sent, reference.mean(sent)))
            else:
                for replica, flat in zip(replicas, vectors, strict=True):
                    flat[places] = reference.mean(sent)
                    torch.nn.utils.vector_to_parameters(flat, replica.parameters())

    return after_step
