"""Pipeline stages by torch.distributed.pipelining: each rank prints its losses and weights, the last one has losses."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import netgym

WIDTH, SAMPLES, STEPS = 24, 8, 3
PASS_SECONDS = 0.012  # of all micro-batches through a stage, forwards


def parts(count: int) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return torch.randn(SAMPLES, WIDTH, generator=generator), torch.randn(SAMPLES, WIDTH, generator=generator)


class Pass(torch.autograd.Function):
    """Takes the virtual time of a pass over a micro-batch, forwards and backwards."""

    @staticmethod
    def forward(context, values, seconds):
        context.seconds = seconds
        netgym.advance(seconds)
        return values.clone()

    @staticmethod
    def backward(context, gradient):
        netgym.advance(2 * context.seconds)
        return gradient, None


class Stage(nn.Module):
    """A stage that takes virtual time."""

    def __init__(self, part: nn.Module, seconds: float) -> None:
        super().__init__()
        self.part, self.seconds = part, seconds

    def forward(self, values):
        if torch.is_inference_mode_enabled() or values.is_meta:
            return self.part(values)
        return Pass.apply(self.part(values), self.seconds)


def main(backend: str, schedule: str, num_micro: str) -> None:
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    own = parts(size)[rank]
    optimizer = torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)
    kind = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[schedule]
    stage = PipelineStage(Stage(own, PASS_SECONDS / int(num_micro)), rank, size, torch.device("cpu"))
    runs = kind(stage, int(num_micro), loss_fn=nn.functional.mse_loss)
    inputs, target = samples()
    losses: list[float] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        of_micro: list[torch.Tensor] = []
        runs.step(
            *([inputs] if rank == 0 else []),
            **({"target": target, "losses": of_micro} if rank == size - 1 else {}),
        )
        optimizer.step()
        losses += [float(torch.stack(of_micro).detach().mean())] if of_micro else []
    weights = [value.tolist() for value in own.state_dict().values()]
    # In one write: lines of ranks are not mixed.
    print(json.dumps({"rank": rank, "losses": losses, "weights": weights}) + "\n", end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
