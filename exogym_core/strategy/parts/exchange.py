"""Gradients exchanged by ranks in other forms than their plain mean."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.chain import Module
from exogym_core.strategy.parts.average import Averaging, decoded, gathering
from exogym_core.strategy.parts.flat import in_buckets, widened
from exogym_core.strategy.parts.flight import run
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.gradients import dense_gradient
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from exogym_core.strategy.parts.codecs import Codec

__all__ = [
    "GradientExchange",
    "PowerIteration",
    "as_matrix",
    "interleaved",
    "low_rank_of",
    "orthonormal",
    "split",
]


def as_matrix(tensor: Tensor) -> Tensor:
    """`tensor` as a matrix of its first dimension against the rest; a view."""
    return tensor.reshape(tensor.shape[0], -1)


def orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns that span those of `columns` [n, r], r at most n (Householder; never fewer than r)."""
    spanning: Tensor = torch.linalg.qr(columns)[0]
    return spanning


def low_rank_of(values: Tensor, rank: int = 4) -> tuple[Tensor, Tensor]:
    """Compute both factors of flat `values` (a square of them) on one rank: the work of a step, to be timed."""
    matrix = values.view(int(len(values) ** 0.5), -1)
    left = orthonormal(matrix @ matrix[:rank].T)
    return left, matrix.T @ left


def split(tensors: Sequence[Tensor], mask: Sequence[bool]) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors where `mask` holds, and the others."""
    return list(compress(tensors, mask)), list(compress(tensors, (not each for each in mask)))


def interleaved(chosen: Sequence[Tensor], others: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor]:
    """Tensors that `split` has separated, in their order."""
    ones, rest = iter(chosen), iter(others)
    return [next(ones) if each else next(rest) for each in mask]


class GradientExchange(Module):
    """Once a step, after the backward pass: every gradient becomes what all ranks have made of theirs together.

    Gradients are weighed by samples; a parameter without one counts as zero. Under a GradScaler they are unscaled
    first, and what has overflowed on this rank counts as zero, so that no rank drops out.

    Attributes:
        work: the name of its coding in `compute.coding`.
    """

    work = ""
    takes_sites = False
    round_steps = 1

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        """Join a chain of single ranks.

        Raises:
            InputError: the chain has sites, or `compute.coding` has no speed for `work`.
        """
        self.spend("encode", 0)

    @torch.no_grad()
    def before_update(self) -> None:
        """Unscale the gradients, exchange them, and store the means as gradients."""
        strategy, parameters = self.strategy, self.scope.parameters
        strategy.unscale_gradients()
        weight = strategy.context.weight
        gradients = [weight * widened(dense_gradient(parameter)) for parameter in parameters]
        for parameter, gradient in zip(parameters, self.exchange(gradients), strict=True):
            parameter.grad = gradient.to(parameter.dtype)

    @abstractmethod
    def exchange(self, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Exchange this rank's `gradients`, one a parameter, in fp32 at least; returns those for the optimizer."""

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace `tensors` by their means over ranks, as they are."""
        in_buckets(tensors, partial(Averaging().flat, self.comm))

    def gathered(self, codec: Codec, flat: Tensor) -> Iterator[Tensor]:
        """Gather all ranks' `flat` in rank order, each encoded once and sent to all."""
        codec = codec.on(flat.device)
        return decoded(codec, run(gathering(self.comm, codec.encode(flat))), flat)

    def zeros_like_gradients(self) -> list[Tensor]:
        """Tensors of zeros, one per parameter, in the dtype in which gradients are exchanged."""
        return [torch.zeros_like(widened(parameter.detach())) for parameter in self.scope.parameters]

    def spend(self, way: str, num_values: int) -> None:
        """The virtual time that coding so many values takes, `way` being "encode" or "decode"."""
        self.strategy.charge(self.work, way, num_values)


class PowerIteration(GradientExchange):
    """Exchange of matrices as two thin factors each.

    Attributes:
        right: Q of every matrix, [columns, r], equal on all ranks.
    """

    work = "low-rank"
    state = State("right")
    right: list[Tensor]

    def draw(self, matrices: Sequence[Tensor], ranks: Sequence[int], name: str) -> None:
        """Draw the first Q of every matrix, of so many columns."""
        generator = shared_generator(self.seed, name)
        sizes = [(matrix.shape[1], r) for matrix, r in zip(matrices, ranks, strict=True)]
        drawn = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
        self.right = [orthonormal(q).to(matrix) for q, matrix in zip(drawn, matrices, strict=True)]

    def iterate(
        self, matrices: Sequence[Tensor], dense: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """P and R of every matrix, such that `P R^T` is the mean over ranks, projected on the columns of `P`.

        `P = orthonormal(mean(M Q))`, then `R = mean(M^T P)`; all ranks end with the same bits. What is `dense` travels
        with the first of the two all-reduces, and is averaged in place.

        Args:
            matrices: this rank's M, [rows, columns] each.
            dense: tensors that are averaged as they are.

        References:
            Vogels et al., PowerSGD, arXiv 1905.13727, algorithm 1, lines 3 to 7.
        """
        num_values = sum(matrix.numel() for matrix in matrices)
        self.spend("encode", num_values)
        left = [matrix @ columns for matrix, columns in zip(matrices, self.right, strict=True)]
        self.average([*dense, *left])
        left = [orthonormal(columns) for columns in left]
        back = [matrix.T @ columns for matrix, columns in zip(matrices, left, strict=True)]
        self.average(back)
        self.spend("decode", num_values)
        return left, back
