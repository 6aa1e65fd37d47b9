"""DeMo: each rank keeps its momentum and sends only its few largest frequencies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import name_in, number, option, options_of, positive_int
from exogym_core.strategy.participation.options import StepPatienceOptions
from exogym_core.strategy.parts.codecs import read_as
from exogym_core.strategy.parts.gradients import dense_gradient
from exogym_core.strategy.parts.state import State
from exogym_core.strategy.parts.tensor_codecs import block_shape, cut, joined
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["WIRE", "DeMoStrategy", "FrequencyBlocks", "transform_of"]


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
            raise InputError(f"{self.where}: compression_decay={self.compression_decay!r} must be below 1")
        if self.compression_chunk**2 - 1 > torch.iinfo(WIRE[self.codec][0]).max:
            raise InputError(
                f"{self.where}: compression_chunk={self.compression_chunk} needs codec='released'"
            )
        if isinstance(self.optim_spec.cls, type) and not issubclass(self.optim_spec.cls, torch.optim.SGD):
            name, lr = self.optim_spec.cls.__name__, self.optim_spec.kwargs.get("lr", 1e-3)
            raise InputError(
                f"{self.where}: optim_spec={name} would take DeMo's signs for gradients, which is another "
                f"algorithm; DeMo steps along the sign: write lr={lr!r} (and weight_decay=) instead of optim_spec"
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


# --- the discrete cosine transform of blocks, and their largest frequencies --------------------------------

Wire = tuple[torch.dtype, torch.dtype]
"""Dtypes of an index within its block, and of a value, as they travel."""


def _dct_matrix(size: int) -> Tensor:
    """The orthonormal DCT-II as a matrix: `matrix @ x` are x's frequencies, `matrix.T` goes back."""
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    position = torch.arange(size, dtype=torch.float64)[None, :]
    matrix = torch.cos(math.pi / size * (position + 0.5) * frequency) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


class FrequencyBlocks:
    """Parameters of one block shape, cut into blocks: momentum in the frequency domain, top-k, and back.

    The transform is orthonormal and linear, so momentum kept as frequencies equals DeMo's, and removing what
    was sent is a subtraction of single entries.
    """

    def __init__(self, parameters: Sequence[Tensor], shape: tuple[int, int], topk: int, wire: Wire) -> None:
        self.parameters, self.wire = list(parameters), wire
        self.shape = height, width = shape
        self.k = min(topk, height * width)
        first = parameters[0]
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        self.rows, self.columns = (_dct_matrix(size).to(first.device, self.dtype) for size in shape)
        self.num_blocks = sum(p.numel() for p in parameters) // (height * width)
        self.momentum = torch.zeros(self.num_blocks, height * width, dtype=self.dtype, device=first.device)

    @classmethod
    def of(cls, parameters: Sequence[Tensor], chunk: int, topk: int, wire: Wire) -> list[Self]:
        """Blocks of the parameters with values, grouped by shape; their sides are at most `chunk`."""
        groups: dict[tuple[Any, ...], list[Tensor]] = {}
        for parameter in (p for p in parameters if p.numel()):
            shape = block_shape(parameter.shape, chunk)
            groups.setdefault((shape, parameter.dtype, parameter.device), []).append(parameter)
        return [cls(members, shape, topk, wire) for (shape, *_), members in groups.items()]

    @property
    def num_bytes(self) -> int:
        """Size of what travels: `min(k, block)` entries a block."""
        return self.num_blocks * self.k * sum(dtype.itemsize for dtype in self.wire)

    def accumulate(self, decay: float, updates: Iterable[Tensor]) -> None:
        """`momentum = decay momentum + DCT(updates)`."""
        if (
            self.momentum.is_meta
        ):  # of plans, in which only sizes count: torch takes long to find those of each operation
            return
        height, width = self.shape
        blocks = torch.cat([cut(update, self.shape).to(self.dtype) for update in updates]).view(
            -1, height, width
        )
        frequencies = self.rows @ blocks @ self.columns.T
        self.momentum.mul_(decay).add_(frequencies.view(self.num_blocks, -1))

    def taken(self) -> Tensor:
        """The `k` largest entries of each block as bytes, indices before values; as encoded they leave the momentum."""
        if self.momentum.is_meta:
            return self.momentum.new_empty(self.num_bytes, dtype=torch.uint8)
        index_dtype, value_dtype = self.wire
        indices = self.momentum.abs().topk(self.k, dim=1, sorted=False).indices
        values = self.momentum.gather(1, indices)
        sent = values.to(value_dtype)
        self.momentum.scatter_add_(1, indices, -sent.to(self.dtype))
        return torch.cat([part.view(-1).view(torch.uint8) for part in (indices.to(index_dtype), sent)])

    def mean(self, messages: Tensor) -> list[Tensor]:
        """Each entry's mean over the ranks that sent it, transformed back, in the parameters' shapes.

        `messages` are what ranks have `taken`, one a row.
        """
        if messages.is_meta:
            return [torch.empty_like(parameter, dtype=self.dtype) for parameter in self.parameters]
        halves = messages.tensor_split([self.num_blocks * self.k * self.wire[0].itemsize], dim=1)
        shape = (len(messages), self.num_blocks, self.k)  # rank, block, entry
        indices, values = (
            read_as(part.reshape(-1), dtype).view(shape)
            for part, dtype in zip(halves, self.wire, strict=True)
        )
        indices, values = indices.long(), values.to(self.dtype)
        total, count = torch.zeros_like(self.momentum), torch.zeros_like(self.momentum)
        num_ranks = len(indices)
        # A CPU adds up along a row in order. A GPU does not, and ranks must agree in every bit: rank by rank.
        num_turns = 1 if indices.device.type == "cpu" else num_ranks
        in_rows = (part.transpose(0, 1).reshape(self.num_blocks, -1) for part in (indices, values))
        for places, parts in zip(*(part.chunk(num_turns, dim=1) for part in in_rows), strict=True):
            total.scatter_add_(1, places, parts)
            count.scatter_add_(1, places, torch.ones_like(parts))
        blocks = (total / count.clamp(min=1)).view(-1, *self.shape)
        height, width = self.shape
        sizes = [p.numel() // (height * width) for p in self.parameters]
        pieces = torch.split(self.rows.T @ blocks @ self.columns, sizes)
        return [joined(piece, p.shape, self.shape) for piece, p in zip(pieces, self.parameters, strict=True)]


def transform_of(values: Tensor, num_ranks: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Encoding and decoding of a default step for flat `values`, n x 4096 of them, to be timed."""
    blocks = FrequencyBlocks([values.view(-1, 64)], (64, 64), topk=32, wire=(torch.int64, torch.float32))

    def there() -> Tensor:
        blocks.accumulate(0.999, [values.view(-1, 64)])
        return blocks.taken()

    message = there()
    return there, lambda: blocks.mean(torch.stack([message] * num_ranks))
