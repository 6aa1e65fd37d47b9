"""DeMo: each rank keeps its momentum and sends only its few largest frequencies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import name_in, number, option, options_of, positive_int
from exogym_core.strategy.participation.options import StepPatienceOptions
from exogym_core.strategy.parts.frequencies import FrequencyBlocks
from exogym_core.strategy.parts.gradients import dense_gradient
from exogym_core.strategy.parts.state import State
from netsim.errors import InputError

__all__ = ["WIRE", "DeMoStrategy"]


#: Wire codec -> (dtype of an index within its block, dtype of a value).
WIRE = {"compact": (torch.int16, torch.bfloat16), "released": (torch.int64, torch.float32)}


class DeMoStrategy(Strategy, name="DeMo"):
    """Momentum decoupled over ranks; the few frequencies sent are removed from it; updates are signs.

    At each step every rank adds `lr` times its gradient to its momentum (decayed before), takes the DCT of
    blocks of at most `chunk x chunk`, sends the `topk` largest entries of each block and subtracts from its
    momentum what it sent: the rest, and what the codec rounded off, waits there (error feedback). All ranks
    average what each entry's senders sent, transform back, and step along the sign.

    Matrices are cut along both dimensions by their largest divisors up to `chunk`; tensors of more dimensions
    are matrices of their first against the rest.

    Bytes: the payload is the sum over blocks of `min(topk, block)` entries of 12 bytes ("released": 64-bit
    index, fp32 value) or 4 bytes ("compact": 16-bit index, bf16 value), all-gathered at each step.

    A rank that returns keeps its own momentum: it holds what this rank has not sent yet. A peer's would be sent twice,
    and zeros would lose it.

    Args:
        optim_spec: the optimizer that applies the signs: SGD (with learning rate 0.001 by default), or a factory
            of your own. Others of torch's are refused: they would change the algorithm.
        compression_decay: of the momentum, from 0 up to below 1.
        compression_topk: entries sent per block.
        compression_chunk: longest side of a block.
        weight_decay: multiplies parameters by `1 - lr weight_decay` before the update.
        codec: "released" (64-bit index and fp32 value an entry) or "compact" (16-bit index, bf16).
        averaging_timeout, deadline, min_ranks, ...: steps that go on without absent ranks, see `StepPatienceOptions`.
        options: of every Strategy: `lr`, `max_norm` (of the local gradient), `lr_scheduler`, ...

    References:
        Peng et al., DeMo: Decoupled Momentum Optimization, arXiv 2411.19870, algorithm 1.
    """

    compression_decay: float = option(0.999, number)
    compression_topk: int = option(32, positive_int)
    compression_chunk: int = option(64, positive_int)
    weight_decay: float = option(0.0, number)
    codec: str = option("released", name_in(*WIRE))
    patience: StepPatienceOptions = options_of(StepPatienceOptions)
    positional = ("optim_spec", "compression_decay", "compression_topk", "compression_chunk", "weight_decay")
    default_optim = OptimSpec(torch.optim.SGD, lr=1e-3)

    round_steps = 1
    state = State("momentum")

    def __init__(self, *positional: Any, **given: Any) -> None:
        super().__init__(*positional, **given)
        if self.compression_decay >= 1:
            raise InputError(
                f"{self.where}: compression_decay={self.compression_decay!r} must be below 1",
                about=("compression_decay",),
            )
        if self.compression_chunk**2 - 1 > torch.iinfo(WIRE[self.codec][0]).max:
            raise InputError(
                f"{self.where}: compression_chunk={self.compression_chunk} needs codec='released'",
                about=("compression_chunk", "codec"),
            )
        if isinstance(self.optim_spec.cls, type) and not issubclass(self.optim_spec.cls, torch.optim.SGD):
            name, lr = self.optim_spec.cls.__name__, self.optim_spec.kwargs.get("lr", 1e-3)
            raise InputError(
                f"{self.where}: optim_spec={name} would take DeMo's signs for gradients, which is another "
                f"algorithm; DeMo steps along the sign: write lr={lr!r} (and weight_decay=) instead of optim_spec",
                about=("optim_spec", "lr", "weight_decay"),
            )

    def prepare(self) -> None:
        """Cut the parameters into blocks."""
        self.num_values = sum(parameter.numel() for parameter in self.trainable)
        cut = self.compression_chunk, self.compression_topk
        self.blocks = FrequencyBlocks.of(self.trainable, *cut, WIRE[self.codec])

    @torch.no_grad()
    def before_update(self) -> None:
        """Algorithm 1: clipped gradients into the momentum, whose largest frequencies leave it for all ranks."""
        self.unscale_gradients()
        super().clip_gradients()
        rates = {p: group["lr"] for group in self.optim.param_groups for p in group["params"]}
        self.charge("demo", "encode", self.num_values)
        for blocks in self.blocks:
            weights = [rates.get(parameter, 0.0) * self.sample_weight for parameter in blocks.parameters]
            updates = map(torch.mul, map(dense_gradient, blocks.parameters), weights)
            blocks.accumulate(self.compression_decay, updates)
        message = torch.cat([blocks.taken() for blocks in self.blocks])
        messages = torch.stack(self.peers.all_gather(message)) if self.peers.world_size > 1 else message[None]
        self.charge("demo", "decode", self.num_values)
        parts = torch.split(messages, [blocks.num_bytes for blocks in self.blocks], dim=1)
        for blocks, part in zip(self.blocks, parts, strict=True):
            for parameter, mean in zip(blocks.parameters, blocks.mean(part), strict=True):
                parameter.grad = mean.sign_().to(parameter.dtype)

    def clip_gradients(self) -> None:
        """Leave the signs as they are: gradients are clipped before they are sent."""

    @torch.no_grad()
    def optimizer_step(self) -> None:
        """Decay the weights, and step along the signs."""
        for group in self.optim.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * self.weight_decay)
        super().optimizer_step()

    @property
    def momentum(self) -> list[Tensor]:
        """Momentum of each group of blocks, in the frequency domain."""
        return [blocks.momentum for blocks in self.blocks]
