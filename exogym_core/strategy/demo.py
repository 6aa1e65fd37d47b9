"""DeMo: each rank keeps its momentum and sends only its few largest frequencies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options.arguments import number, positive_int
from exogym_core.strategy.options.optim import OptimSpec
from exogym_core.strategy.parts.blocks import block_shape, cut, joined
from exogym_core.strategy.parts.codecs import read_as
from exogym_core.strategy.parts.gradients import dense_gradient
from netsim.files.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.cost.coding import Coding

__all__ = ["DeMoStrategy", "transform_of"]

#: Wire codec -> (dtype of an index within its block, dtype of a value).
_WIRE = {"compact": (torch.int16, torch.bfloat16), "released": (torch.int64, torch.float32)}


def _dct_matrix(size: int) -> Tensor:
    """The orthonormal DCT-II as a matrix: `matrix @ x` are x's frequencies, `matrix.T` goes back."""
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    position = torch.arange(size, dtype=torch.float64)[None, :]
    matrix = torch.cos(math.pi / size * (position + 0.5) * frequency) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix


class _Blocks:
    """Parameters of one block shape, cut into blocks: momentum in the frequency domain, top-k, and back.

    The transform is orthonormal and linear, so momentum kept as frequencies equals DeMo's, and removing what
    was sent is a subtraction of single entries.
    """

    def __init__(self, parameters: Sequence[Tensor], shape: tuple[int, int], topk: int) -> None:
        self.parameters = list(parameters)
        self.shape = height, width = shape
        self.k = min(topk, height * width)
        first = parameters[0]
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        self.rows, self.columns = (_dct_matrix(size).to(first.device, self.dtype) for size in shape)
        self.num_blocks = sum(p.numel() for p in parameters) // (height * width)
        self.momentum = torch.zeros(self.num_blocks, height * width, dtype=self.dtype, device=first.device)

    @property
    def num_entries(self) -> int:
        """Entries that travel: `min(k, block)` a block."""
        return self.num_blocks * self.k

    def accumulate(self, decay: float, updates: Sequence[Tensor]) -> None:
        """`momentum = decay momentum + DCT(updates)`."""
        height, width = self.shape
        blocks = torch.cat([cut(update, self.shape).to(self.dtype) for update in updates]).view(
            -1, height, width
        )
        frequencies = self.rows @ blocks @ self.columns.T
        self.momentum.mul_(decay).add_(frequencies.view(self.num_blocks, -1))

    def largest(self) -> tuple[Tensor, Tensor]:
        """Indices within blocks and values of the `k` largest entries of each block."""
        indices = self.momentum.abs().topk(self.k, dim=1, sorted=False).indices
        return indices, self.momentum.gather(1, indices)

    def mean(self, indices: Tensor, values: Tensor) -> list[Tensor]:
        """Each entry's mean over the ranks that sent it, transformed back, in the parameters' shapes.

        `indices` and `values` are what all ranks sent: [rank, block, entry].
        """
        total, count = torch.zeros_like(self.momentum), torch.zeros_like(self.momentum)
        num_ranks = len(indices)
        # A CPU adds up along a row in order. A GPU does not, and ranks must agree in every bit: rank by rank.
        num_turns = 1 if indices.device.type == "cpu" else num_ranks
        in_rows = (part.transpose(0, 1).reshape(self.num_blocks, -1) for part in (indices, values))
        for places, parts in zip(*(part.chunk(num_turns, dim=1) for part in in_rows), strict=True):
            total.scatter_add_(1, places, parts)
            count.scatter_add_(1, places, torch.ones_like(parts))
        blocks = (total / count.clamp(min=1)).view(-1, *self.shape)
        return self._join(self.rows.T @ blocks @ self.columns)

    def _join(self, blocks: Tensor) -> list[Tensor]:
        height, width = self.shape
        pieces = torch.split(blocks, [p.numel() // (height * width) for p in self.parameters])
        return [joined(piece, p.shape, self.shape) for piece, p in zip(pieces, self.parameters, strict=True)]


def transform_of(values: Tensor) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What a step of default options does with flat `values`, n x 4096 of them: there, and back for one rank."""
    blocks = _Blocks([values.view(-1, 64)], (64, 64), topk=32)

    def there() -> tuple[Tensor, Tensor]:
        blocks.accumulate(0.999, [values.view(-1, 64)])
        return blocks.largest()

    indices, amplitudes = there()
    return there, lambda: blocks.mean(indices[None], amplitudes[None])


class DeMoStrategy(Strategy):
    """Momentum decoupled over ranks; the few frequencies sent are removed from it; updates are signs.

    At each step every rank adds `lr` times its gradient to its momentum (decayed before), takes the DCT of
    blocks of at most `chunk x chunk`, sends the `topk` largest entries of each block and subtracts from its
    momentum what it sent: the rest, and what the codec rounded off, waits there (error feedback). All ranks
    average what each entry's senders sent, transform back, and step along the sign.

    Matrices are cut along both dimensions by their largest divisors up to `chunk`; tensors of more dimensions
    are matrices of their first against the rest.

    Bytes: the payload is the sum over blocks of `min(topk, block)` entries of 12 bytes ("released": 64-bit
    index, fp32 value) or 4 bytes ("compact": 16-bit index, bf16 value), all-gathered at each step.

    Args:
        optim_spec: the optimizer that applies the signs: SGD (with learning rate 0.001 by default), or a factory
            of one's own. Others of torch's are refused: they would make another algorithm of it.
        compression_decay: of the momentum, from 0 up to below 1.
        compression_topk: entries sent per block.
        compression_chunk: longest side of a block.
        weight_decay: multiplies parameters by `1 - lr weight_decay` before the update.
        codec: "released" or "compact".
        options: of every Strategy: `lr`, `max_norm` (of the local gradient), `lr_scheduler`, ...

    References:
        Peng et al., DeMo: Decoupled Momentum Optimization, arXiv 2411.19870, algorithm 1.
    """

    default_optim = OptimSpec(torch.optim.SGD, lr=1e-3)

    def __init__(
        self,
        optim_spec: Any = None,
        compression_decay: float = 0.999,
        compression_topk: int = 32,
        compression_chunk: int = 64,
        weight_decay: float = 0.0,
        *,
        codec: str = "released",
        **options: Any,
    ) -> None:
        super().__init__(optim_spec=optim_spec, **options)
        where = type(self).__name__
        if isinstance(self.optim_spec.cls, type) and not issubclass(self.optim_spec.cls, torch.optim.SGD):
            name = self.optim_spec.cls.__name__
            lr = self.optim_spec.kwargs.get("lr", 1e-3)
            raise InputError(
                f"{where}: optim_spec={name} would take DeMo's signs for gradients, which is another algorithm; DeMo "
                f"steps along the sign itself: write lr={lr!r} (and weight_decay=) instead of optim_spec"
            )
        self.compression_decay = number(where, "compression_decay", compression_decay)
        if self.compression_decay >= 1:
            raise InputError(f"{where}: compression_decay={compression_decay!r} must be below 1")
        self.compression_topk = positive_int(where, "compression_topk", compression_topk)
        self.compression_chunk = positive_int(where, "compression_chunk", compression_chunk)
        self.weight_decay = number(where, "weight_decay", weight_decay)
        if codec not in _WIRE:
            raise unknown_name(f"codec of {where}", str(codec), _WIRE)
        self.index_dtype, self.value_dtype = _WIRE[codec]
        if compression_chunk**2 - 1 > torch.iinfo(self.index_dtype).max:
            raise InputError(f"{where}: compression_chunk={compression_chunk} needs codec='released'")

    def setup(
        self, model: nn.Module, comm: Communicator, max_steps: int, seed: int, coding: Coding | None = None
    ) -> None:
        """Cut the parameters into blocks."""
        super().setup(model, comm, max_steps, seed, coding)
        self._num_values = sum(parameter.numel() for parameter in self.trainable)
        groups: dict[tuple[Any, ...], list[Tensor]] = {}
        for parameter in (p for p in self.trainable if p.numel()):
            height, width = block_shape(parameter.shape, self.compression_chunk)
            groups.setdefault((height, width, parameter.dtype, parameter.device), []).append(parameter)
        self._blocks = [
            _Blocks(parameters, (height, width), self.compression_topk)
            for (height, width, *_), parameters in groups.items()
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Accumulate, exchange, step along the sign."""
        self.clip_gradients()
        rates = {p: group["lr"] for group in self.optim.param_groups for p in group["params"]}
        self._spend("encode")
        for blocks in self._blocks:
            blocks.accumulate(self.compression_decay, [self._update(p, rates) for p in blocks.parameters])
        messages = self._exchange()
        self._spend("decode")
        for blocks, received in zip(self._blocks, self._decode(messages), strict=True):
            for parameter, mean in zip(blocks.parameters, blocks.mean(*received), strict=True):
                parameter.mul_(1 - rates.get(parameter, 0.0) * self.weight_decay)
                parameter.grad = mean.sign_().to(parameter.dtype)
        self.optim.step()
        if self.scaler is not None:
            self.scaler.update()
        super().step()

    @property
    def message_bytes(self) -> int:
        """Bytes of one rank's message at each step."""
        entry_bytes = self.index_dtype.itemsize + self.value_dtype.itemsize
        return sum(blocks.num_entries for blocks in self._blocks) * entry_bytes

    def _spend(self, way: str) -> None:
        """The virtual time of the transform and the choice of entries, or of the way back."""
        if self.coding is not None:
            self.comm.advance(self.coding.seconds("demo", way, self._num_values))

    def _update(self, parameter: Tensor, rates: Mapping[Tensor, float]) -> Tensor:
        gradient = dense_gradient(parameter)
        if self.scaler is not None:
            # A rank whose scaled gradients overflowed must not drop out: the others wait for its message.
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
        return gradient * (rates.get(parameter, 0.0) * self.sample_weight)

    def _exchange(self) -> Tensor:
        """Every rank's message, one a row; what this rank sent is taken from its momentum."""
        parts = []
        for blocks in self._blocks:
            indices, values = blocks.largest()
            sent = values.to(self.value_dtype)
            blocks.momentum.scatter_add_(1, indices, -sent.to(blocks.dtype))
            parts += [indices.to(self.index_dtype).view(-1), sent.view(-1)]
        message = torch.cat([part.view(torch.uint8) for part in parts])
        return torch.stack(self.comm.all_gather(message)) if self.num_nodes > 1 else message[None]

    def _decode(self, messages: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Indices and values per group of blocks, each [rank, block, entry]."""
        decoded = []
        for blocks in self._blocks:
            sizes = [blocks.num_entries * d.itemsize for d in (self.index_dtype, self.value_dtype)]
            index_bytes, value_bytes, messages = messages.tensor_split([sizes[0], sum(sizes)], dim=1)
            shape = (len(messages), blocks.num_blocks, blocks.k)
            indices = read_as(index_bytes.reshape(-1), self.index_dtype).long().view(shape)
            values = read_as(value_bytes.reshape(-1), self.value_dtype).to(blocks.dtype).view(shape)
            decoded.append((indices, values))
        return decoded

    def state_dict(self) -> dict[str, Any]:
        """The strategy's state and the momentum."""
        return {**super().state_dict(), "momentum": [blocks.momentum.clone() for blocks in self._blocks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both."""
        super().load_state_dict(state)
        for blocks, momentum in zip(self._blocks, state["momentum"], strict=True):
            blocks.momentum.copy_(momentum)
