"""Host time of a worker's step against a plain PyTorch loop that does the same steps in one process.

    python benchmarks/training.py [--quick] [--topology NAME] [--workers 8]

Eight workers train the digits MLP (64-128-64-10, batch 16) and a byte-level GPT of a million parameters
(batch 8 x 128) with AllReduce and DiLoCo, in threads, in processes and stacked, one intra-op thread everywhere. The
plain loop and the carriers run in turn, so that what else the machine does hits all alike; start-up is
apart. Printed are the best of some rounds in milliseconds a worker step, and the ratios to the loop.
"""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import harness
import torch
from torch import Tensor, nn

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.config import checked_config
from exogym_core.data.batches import autocast_to, move_batch
from exogym_core.run.loop import Server
from exogym_core.run.program import Program
from exogym_core.run.request import FitRequest
from exogym_core.strategy import AllReduceStrategy, DiLoCoStrategy, OptimSpec, Strategy
from netgym.tasks import Task, build_model, build_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from exogym_core.data.samples import Source

KINDS = ("threads", "processes", "stacked")
ROUND = 10  # H of DiLoCo
OPTIM = OptimSpec(torch.optim.AdamW, lr=1e-3)
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "AllReduce": lambda: AllReduceStrategy(OPTIM),
    "DiLoCo": lambda: DiLoCoStrategy(OPTIM, H=ROUND),
}


@dataclass(frozen=True)
class Case:
    name: str
    task: Task
    model: nn.Module
    batch_size: int
    steps: int  # timed; a multiple of ROUND
    device: str = "cpu"
    autocast: str | bool = False


def cases(quick: bool) -> Iterator[Case]:
    task = build_task("digits")
    yield Case("digits MLP", task, build_model(task=task, seed=0), 16, 50 if quick else 400)
    task = build_task("text", num_bytes=2_000_000)
    yield Case("GPT 1M", task, build_model("gpt", task=task, preset="byte", seed=0), 8, 10)


def settle(case: Case) -> None:
    """Wait for the device."""
    if case.device == "cuda":
        torch.cuda.synchronize()


def average(tensors: list[list[Tensor]]) -> Tensor:
    """The mean of all workers' tensors, flat."""
    total = torch.cat([tensor.reshape(-1) for tensor in tensors[0]])
    for own in tensors[1:]:
        total += torch.cat([tensor.reshape(-1) for tensor in own])
    return total.div_(len(tensors))


def spread(flat: Tensor, tensors: list[list[Tensor]]) -> None:
    for own in tensors:
        for tensor, part in zip(own, flat.split([each.numel() for each in own]), strict=True):
            tensor.copy_(part.view_as(tensor))


class Loop:
    """Plain PyTorch loop of all workers' replicas in one process, one after the other, or each in a CUDA stream."""

    def __init__(self, case: Case, num_workers: int, diloco: bool, streams: bool = False) -> None:
        self.diloco = diloco
        self.streams = [torch.cuda.Stream() for _ in range(num_workers if streams else 0)]
        asked = request(case, num_workers, AllReduceStrategy(OPTIM))
        program = Program(asked, case.model, case.task.train, None)
        self.sources = [program.data.shared_source(rank) for rank in range(num_workers)]
        self.case = case
        self.models = [copy.deepcopy(case.model).to(case.device) for _ in range(num_workers)]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in self.models]
        self.parameters = [list(model.parameters()) for model in self.models]
        with torch.no_grad():
            self.outer = average(self.parameters)
        self.outer_optimizer = torch.optim.SGD([self.outer], lr=0.7, momentum=0.9, nesterov=True)
        self.num_steps = 0

    def step(self) -> None:
        losses = []
        for index, source in enumerate(self.sources):
            with torch.cuda.stream(self.streams[index]) if self.streams else nullcontext():
                losses.append(self._local_step(index, source))
            if not self.streams:
                losses[-1].item()
        if self.streams:
            for stream in self.streams:
                torch.cuda.current_stream().wait_stream(stream)
            torch.stack(losses).tolist()
        self.num_steps += 1
        with torch.no_grad():
            if not self.diloco:
                gradients = [[parameter.grad for parameter in own] for own in self.parameters]
                spread(average(gradients), gradients)
            elif self.num_steps % ROUND == 0:
                self.outer.grad = self.outer - average(self.parameters)
                self.outer_optimizer.step()
                spread(self.outer, self.parameters)
        if not self.diloco:
            for optimizer in self.optimizers:
                optimizer.step()

    def _local_step(self, index: int, source: Source) -> Tensor:
        device, optimizer = torch.device(self.case.device), self.optimizers[index]
        batch = move_batch(source.next_step().micro_batches[0][0], device)
        optimizer.zero_grad()
        with autocast_to("bf16" if self.case.autocast else None, device):
            loss: Tensor = self.models[index](batch)
        loss.backward()
        if self.diloco:
            optimizer.step()
        return loss.detach()

    def seconds(self, steps: int) -> float:
        torch.set_num_threads(1)
        for _ in range(ROUND):
            self.step()
        settle(self.case)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        settle(self.case)
        return time.perf_counter() - start


def request(
    case: Case,
    num_workers: int,
    strategy: Strategy,
    topology: str | None = None,
    kind: str | dict[str, Any] = "threads",
) -> FitRequest:
    given = {
        "strategy": strategy,
        "num_nodes": num_workers,
        "device": case.device,
        "batch_size": case.batch_size,
    }
    given |= {
        "max_steps": case.steps + ROUND,
        "topology": topology,
        "workers": kind,
        "autocast": case.autocast,
    }
    given |= {"compute": "50 ms"} if topology is not None else {}
    return FitRequest.check(checked_config(**given))


def carried_seconds(
    case: Case, num_workers: int, strategy: Strategy, kind: str | dict[str, Any], topology: str | None
) -> float:
    asked = request(case, num_workers, strategy, topology, kind)
    program = Program(asked, case.model, case.task.train, None)
    program.prepare()

    def body(comm: Communicator) -> float:
        loop = program.role(comm, [])
        assert not isinstance(loop, Server)
        loop.start()
        loop.max_steps = ROUND
        while loop.go_on():
            pass
        comm.barrier()
        settle(case)
        start = time.perf_counter()
        loop.max_steps += case.steps
        while loop.go_on():
            pass
        comm.barrier()
        settle(case)
        return time.perf_counter() - start

    return max(run_ranks(body, num_workers, topology, workers=program.workers(), seed=1).results)


def compare(
    case: Case, num_workers: int, name: str, make: Callable[[], Strategy], rounds: int, topology: str | None
) -> None:
    best: dict[str, float] = {}
    for _ in range(rounds):
        taken = {"loop": Loop(case, num_workers, diloco=name == "DiLoCo").seconds(case.steps)}
        for kind in KINDS:
            taken[kind] = carried_seconds(case, num_workers, make(), kind, topology)
        for kind, seconds in taken.items():
            best[kind] = min(best.get(kind, seconds), seconds)
    per_step = {kind: seconds / case.steps / num_workers * 1e3 for kind, seconds in best.items()}
    carried = "".join(f"{per_step[kind]:>11.3f}" for kind in KINDS)
    ratios = "".join(f"{best[kind] / best['loop']:>11.2f}" for kind in KINDS)
    print(f"{case.name:<12}{name:<11}{per_step['loop']:>9.3f}{carried}{ratios}", flush=True)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--topology", help="simulate this network too; without one, communication is free")
    parser.add_argument("--workers", type=int, default=8)
    arguments = parser.parse_args()
    print(harness.machine())
    print(
        f"{arguments.workers} workers, one intra-op thread, topology {arguments.topology or 'none'}; ms a worker step"
    )
    titles = "".join(f"{title:>11}" for title in (*KINDS, *(f"{kind}/" for kind in KINDS)))
    print(f"{'':<23}{'loop':>9}{titles}")
    for case in cases(arguments.quick):
        for name, make in STRATEGIES.items():
            compare(case, arguments.workers, name, make, 1 if arguments.quick else 3, arguments.topology)


if __name__ == "__main__":
    main()
