"""Asynchronous algorithms once more: a plain queue of events in one process, parameter by parameter.

Workers compute for times that are drawn, messages take times that follow from latencies and bytes, and each algorithm
says what happens when something arrives. Nothing here comes from the package but the names of options.
"""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import strategy_reference as reference
import torch
from strategy_reference import Batches, MakeOptim
from torch import Tensor, nn

Tensors = list[Tensor]

BITS_PER_SECOND = 1e9


@dataclass(order=True)
class Event:
    """Something that happens at a time; equal times in the order in which they were planned."""

    seconds: float
    number: int
    do: Callable[[], None] = field(compare=False)


class World:
    """A clock, workers that take their own time for each step, and lines of given latencies into one hub.

    Args:
        latencies: of each rank's line, in seconds: workers, then servers.
        durations: of worker i's k-th step.
    """

    def __init__(self, latencies: Sequence[float], durations: Sequence[Sequence[float]]) -> None:
        self.latencies, self.durations = latencies, durations
        self.now = 0.0
        self._queue: list[Event] = []
        self._numbers = itertools.count()

    def plan(self, seconds: float, do: Callable[[], None]) -> None:
        """Have something done so many seconds from now."""
        heapq.heappush(self._queue, Event(self.now + seconds, next(self._numbers), do))

    def send(self, src: int, dst: int, num_values: int, do: Callable[[], None]) -> None:
        """Have something done when so many fp64 values have come from one rank to another."""
        bits = 64 * num_values
        self.plan(self.latencies[src] + self.latencies[dst] + bits / BITS_PER_SECOND, do)

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._queue:
            event = heapq.heappop(self._queue)
            self.now = event.seconds
            event.do()


def values(model: nn.Module) -> Tensors:
    """Copies of the parameters."""
    return [p.detach().clone() for p in model.parameters()]


def minus(left: Tensors, right: Tensors) -> Tensors:
    """Difference, tensor by tensor."""
    return [a - b for a, b in zip(left, right, strict=True)]


def write(into: nn.Module, tensors: Tensors) -> None:
    """Set the parameters."""
    with torch.no_grad():
        for p, value in zip(into.parameters(), tensors, strict=True):
            p.copy_(value)


class Worker:
    """A replica that trains step by step until its batches are used up, and says when a step is done."""

    def __init__(
        self, world: World, rank: int, model: nn.Module, batches: Batches, make_optim: MakeOptim
    ) -> None:
        self.world, self.rank, self.batches = world, rank, batches
        self.model = copy.deepcopy(model)
        self.optim = make_optim(list(self.model.parameters()))
        self.num_steps = 0

    def begin_step(self, then: Callable[[], None]) -> None:
        """Compute; when that is done and applied, `then`."""
        if self.num_steps == len(self.batches):
            return

        def done() -> None:
            grads = reference.gradients(self.model, self.batches[self.num_steps][self.rank])
            reference.apply(self.optim, self.model, grads)
            self.num_steps += 1
            then()

        self.world.plan(self.world.durations[self.rank][self.num_steps], done)


def delayed_nesterov(
    phi: Tensors, lr: float, beta: float, buffer: int, share: float
) -> Callable[[Tensors], None]:
    """Algorithm 3 of arXiv 2401.09135: returns what takes in a displacement, changing `phi`."""
    momentum, total = [torch.zeros_like(p) for p in phi], [torch.zeros_like(p) for p in phi]
    count = [0]

    def take(displacement: Tensors) -> None:
        is_last = (count[0] + 1) % buffer == 0
        for k, d in enumerate(displacement):
            total[k] = total[k] + d
            if is_last:
                momentum[k] = beta * momentum[k] + total[k] / buffer
                phi[k] = phi[k] - lr * ((1 - share * buffer + share) * beta * momentum[k] + d / buffer)
                total[k] = torch.zeros_like(d)
            else:
                phi[k] = phi[k] - lr * (share * beta * momentum[k] + d / buffer)
        count[0] += 1

    return take


def heloco(phi: Tensors, lr: float, mu: float, k: float) -> Callable[[Tensors], None]:
    """The rule of HeLoCo from second-hand summaries; angles by their definition."""
    momentum = [torch.zeros_like(p) for p in phi]

    def corrected(d: Tensor, m: Tensor) -> Tensor:
        nd, nm = math.sqrt(float((d * d).sum())), math.sqrt(float((m * m).sum()))
        if nd == 0 or nm == 0:
            return d
        c = float((d * m).sum()) / nd / nm
        conf = nd / (nd + k * nm)
        if c >= 0.2:
            return d
        if c < 0:
            return d - min(-0.5 * c * conf, 0.5) * c * nd * (m / nm)
        share = min((1 - c) * conf, 1.0)
        mixed = (1 - share) * (d / nd) + share * (m / nm)
        return nd * mixed / math.sqrt(float((mixed * mixed).sum()))

    def take(displacement: Tensors) -> None:
        for index, d in enumerate(displacement):
            fixed = corrected(d, momentum[index])
            momentum[index] = mu * momentum[index] + (1 - mu) * fixed
            phi[index] = phi[index] - lr * (fixed + mu * momentum[index])

    return take


def served(
    world: World,
    model: nn.Module,
    batches: Batches,
    make_optim: MakeOptim,
    H: int,  # noqa: N803
    rule: Callable[[Tensors], Callable[[Tensors], None]],
    at: int,
) -> tuple[list[nn.Module], Tensors]:
    """Workers do H steps, send their displacement to the server `at` and go on from its answer.

    Returns the replicas and the server's parameters.
    """
    num_workers, size = len(batches[0]), sum(p.numel() for p in model.parameters())
    phi = values(model)
    take = rule(phi)
    workers = [Worker(world, rank, model, batches, make_optim) for rank in range(num_workers)]

    def begin(worker: Worker, start: Tensors) -> None:
        left = [H]

        def stepped() -> None:
            left[0] -= 1
            if left[0]:
                worker.begin_step(stepped)
                return
            displacement = minus(start, values(worker.model))
            world.send(worker.rank, at, size + 2, lambda: arrived(worker, displacement))

        worker.begin_step(stepped)

    def arrived(worker: Worker, displacement: Tensors) -> None:
        take(displacement)
        answer = [p.clone() for p in phi]
        world.send(at, worker.rank, size + 1, lambda: answered(worker, answer))

    def answered(worker: Worker, answer: Tensors) -> None:
        write(worker.model, answer)
        begin(worker, answer)

    for worker in workers:
        begin(worker, values(model))
    world.run()
    return [worker.model for worker in workers], phi


def decoupled(
    world: World,
    model: nn.Module,
    batches: Batches,
    make_optim: MakeOptim,
    *,
    H: int,  # noqa: N803
    cut: list[list[int]],
    quorum: int,
    grace: float,
    lr: float,
    beta: float,
    mix: float,
    samples: int,
) -> tuple[list[nn.Module], Tensors]:
    """Learners send fragments and go on; the syncer merges a round of one when it has a quorum and grace is over."""
    num_workers = len(batches[0])
    phi, velocity = values(model), [torch.zeros_like(p) for p in model.parameters()]
    due = [(p + 1) * H // len(cut) for p in range(len(cut))]
    sizes = [sum(phi[index].numel() for index in members) for members in cut]
    next_round = [0] * len(cut)
    received: dict[tuple[int, int], dict[int, tuple[Tensors, float]]] = {}
    workers = [Worker(world, rank, model, batches, make_optim) for rank in range(num_workers)]
    known = [values(model) for _ in workers]  # each learner's phi
    inboxes: list[list[tuple[int, Tensors]]] = [[] for _ in workers]
    since = [[0] * len(cut) for _ in workers]  # steps since a fragment last left

    def stepped(worker: Worker) -> None:
        rank = worker.rank
        since[rank] = [steps + 1 for steps in since[rank]]
        theta = values(worker.model)
        for p, fragment in inboxes[rank]:
            for index, value in zip(cut[p], fragment, strict=True):
                known[rank][index] = value
                theta[index] = (1 - mix) * theta[index] + mix * value
        inboxes[rank] = []
        write(worker.model, theta)
        for p, members in enumerate(cut):
            if (worker.num_steps - 1) % H + 1 == due[p]:
                moved = [known[rank][index] - theta[index] for index in members]
                round_number, steps = (worker.num_steps - 1) // H, since[rank][p]
                weight = (samples * steps) ** 2 / steps
                since[rank][p] = 0
                send(rank, p, round_number, moved, weight)
        worker.begin_step(lambda: stepped(worker))

    def send(rank: int, p: int, round_number: int, moved: Tensors, weight: float) -> None:
        arrive = lambda: arrived(rank, p, round_number, moved, weight)  # noqa: E731
        world.send(rank, num_workers, sizes[p] + 4, arrive)

    def arrived(rank: int, p: int, round_number: int, moved: Tensors, weight: float) -> None:
        if round_number < next_round[p]:
            return
        letters = received.setdefault((p, round_number), {})
        letters[rank] = (moved, weight)
        if len(letters) == num_workers:
            merge(p, round_number)
        elif len(letters) == quorum:
            world.plan(grace, lambda: merge(p, round_number))

    def merge(p: int, round_number: int) -> None:
        letters = received.pop((p, round_number), None)
        if letters is None:
            return
        total = sum(weight for _, weight in letters.values())
        for place, index in enumerate(cut[p]):
            parts = [(moved[place], weight) for _, (moved, weight) in sorted(letters.items())]
            norms = [math.sqrt(float((d * d).sum())) for d, _ in parts]
            along = sum((w * (d / norm) for (d, w), norm in zip(parts, norms, strict=True)), torch.zeros(()))
            length = sum(w * norm for (_, w), norm in zip(parts, norms, strict=True)) / total
            norm = float(along.pow(2).sum().sqrt())  # 0 where directions cancel: numbers of either sign
            d = length * along / norm if norm else along
            velocity[index] = beta * velocity[index] + d
            phi[index] = phi[index] - lr * (d + beta * velocity[index])
        next_round[p] = round_number + 1
        for key in [key for key in received if key[0] == p and key[1] <= round_number]:
            del received[key]
        fragment = [phi[index].clone() for index in cut[p]]
        for rank in range(num_workers):
            world.send(num_workers, rank, sizes[p] + 1, lambda rank=rank: inboxes[rank].append((p, fragment)))

    for worker in workers:
        worker.begin_step(lambda worker=worker: stepped(worker))
    world.run()
    for key in sorted(received):
        merge(*key)
    return [worker.model for worker in workers], phi


def ad_psgd(
    world: World,
    model: nn.Module,
    batches: Batches,
    make_optim: MakeOptim,
    interval: int,
    partner: Callable[[int], int],
) -> list[nn.Module]:
    """After a step a worker answers what others have sent, takes in what answers it, and sends its own to a partner.

    `partner(rank)` draws whom a worker asks next. Who is asked moves half-way to what has come and answers with where
    it was; who asked moves by half of what the answer differs by from what it had sent.
    """
    num_workers, size = len(batches[0]), sum(p.numel() for p in model.parameters())
    workers = [Worker(world, rank, model, batches, make_optim) for rank in range(num_workers)]
    offers: list[list[tuple[int, Tensors]]] = [[] for _ in workers]
    answers: list[list[Tensors]] = [[] for _ in workers]
    asked: list[Tensors | None] = [None] * num_workers

    def post(src: int, dst: int, into: list[list[Any]], letter: Any) -> None:
        world.send(src, dst, size, lambda: into[dst].append(letter))

    def stepped(worker: Worker) -> None:
        rank, theta = worker.rank, values(worker.model)
        for source, theirs in offers[rank]:
            post(rank, source, answers, theta)
            theta = [(own + other) / 2 for own, other in zip(theta, theirs, strict=True)]
        for answer in answers[rank]:
            sent = asked[rank]
            assert sent is not None
            theta = [own + (a - b) / 2 for own, a, b in zip(theta, answer, sent, strict=True)]
            asked[rank] = None
        offers[rank], answers[rank] = [], []
        write(worker.model, theta)
        if asked[rank] is None and worker.num_steps % interval == 0 and num_workers > 1:
            asked[rank] = theta
            post(rank, partner(rank), offers, (rank, theta))
        worker.begin_step(lambda: stepped(worker))

    for worker in workers:
        worker.begin_step(lambda worker=worker: stepped(worker))
    world.run()
    return [worker.model for worker in workers]
