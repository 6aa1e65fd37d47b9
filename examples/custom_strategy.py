"""A new strategy is a page: gradients that travel as one signed byte a value, written from scratch.

Averaging in bytes needs two exchanges, because bytes cannot be added up on the way without overflowing. Each
worker is in charge of one slice of the gradient. First everybody sends it that slice, as bytes; it adds up what
the bytes stand for, divides, and sends the mean, as bytes again, to everybody. What rounding took away from a
gradient is kept and added to the next one, so nothing is lost for good.

Eight workers in four regions then train on handwritten digits with it, and with AllReduce to compare. It sends a
quarter of the bytes; with a model this small both wait for the distance, twice a step, and take the same time.
"""

import torch
from torch import Tensor, nn

from netgym import Communicator, Strategy, Trainer
from netgym.strategy import AllReduceStrategy
from netgym.tasks import build_model, build_task


class Int8Gradients(Strategy):
    """Average gradients in 8 bits. `Strategy` brings the optimizer and its arguments: optim_spec, lr, ..."""

    def setup(self, model: nn.Module, comm: Communicator, max_steps: int, seed: int, coding=None) -> None:
        super().setup(model, comm, max_steps, seed, coding)
        num_values = sum(p.numel() for p in self.trainable)
        slice_size = -(-num_values // comm.world_size)  # rounded up, so that all slices are equal
        self.residual = torch.zeros(comm.world_size, slice_size)

    def step(self) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.trainable]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        wanted = self.residual.clone()
        wanted.view(-1)[: len(flat)] += flat  # [slices, slice_size]
        self.charge("int8", "encode", wanted.numel())  # takes virtual time where `compute.coding` has a speed
        sent = encode(wanted)
        self.residual = wanted - decode(sent)
        received = self.comm.all_to_all(sent)  # row r came from rank r: its version of our slice
        mean = encode(decode(received).mean(0, keepdim=True))
        means = torch.cat(self.comm.all_gather(mean))
        pieces = decode(means).view(-1)[: len(flat)].split([p.numel() for p in self.trainable])
        for parameter, piece in zip(self.trainable, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        self.clip_gradients()
        self.optimizer_step()
        super().step()

    def state_dict(self) -> dict:
        return {**super().state_dict(), "residual": self.residual}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.residual = state["residual"]


def encode(rows: Tensor) -> Tensor:
    """Each row as bytes: its scale as an fp32 number, then `round(x / scale)`."""
    scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return torch.cat(
        [scale.view(torch.uint8), (rows / scale).round().to(torch.int8).view(torch.uint8)], dim=1
    )


def decode(message: Tensor) -> Tensor:
    """The numbers that rows of bytes stand for."""
    scale = message[:, :4].contiguous().view(torch.float32)
    return message[:, 4:].contiguous().view(torch.int8) * scale


if __name__ == "__main__":
    digits = build_task("digits")
    torch.manual_seed(0)
    model = build_model("mlp", inputs=64, classes=10)
    for strategy in (AllReduceStrategy("adamw", lr=4e-3), Int8Gradients(optim_spec="adamw", lr=4e-3)):
        trained = Trainer(model, digits.train, digits.validation).fit(
            strategy=strategy,
            num_nodes=8,
            max_steps=40,
            val_size=256,
            topology="wan-4-regions",
            compute="50 ms",
            workers="threads",
        )
        result = trained.fit_result
        print(
            f"{result.strategy:20}  loss {result.final_loss:.2f}  "
            f"{result.virtual_seconds:6.2f} virtual seconds  {result.bytes_sent / 8e6:6.2f} MB a worker"
        )
