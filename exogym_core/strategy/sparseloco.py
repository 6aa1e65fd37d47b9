"""SparseLoCo: a few values of each block of the outer gradient, in two bits each, and no outer momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import (
    Options,
    number,
    one_of,
    option,
    positive_int,
    share,
)
from exogym_core.strategy.parts.few_bits import StatisticalCodec
from exogym_core.strategy.parts.rounds import CodedRounds
from exogym_core.strategy.parts.tensor_codecs import LargestCodec, block_shape
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["SparseLoCoCommunicator", "SparseLoCoOptions", "SparseLoCoStrategy"]

_INDEX_BITS = 12


class SparseLoCoOptions(Options):
    """Options of SparseLoCo: local steps a round, the values sent, their encoding, and the outer step.

    Args:
        H: local steps a round.
        k: values that a block sends.
        chunk: longest side of a block, at most 64: a place in it has 12 bits.
        bits: of a value, 1 to 8; 0 sends values as they are.
        error_decay: beta, what is left of an error a round later, 0 to 1.
        outer_lr: alpha, the outer learning rate.
        mean_over: "senders": of each value the mean over the ranks that sent it, as the authors' code has it; "all", as
            the paper.
    """

    H: int = option(30, positive_int)
    k: int = option(64, positive_int)
    chunk: int = option(64, positive_int)
    bits: int = option(2)
    error_decay: float = option(0.95, share)
    outer_lr: float = option(1.0, number)
    mean_over: str = option("senders", one_of("senders", "all"))

    def check(self, where: str) -> None:
        """Refuse blocks whose places do not fit, and other numbers of bits."""
        super().check(where)
        if self.chunk > 64:
            raise InputError(
                f"{where}: chunk={self.chunk} must be at most 64: a place in a block has 12 bits"
            )
        if self.bits not in range(9) or isinstance(self.bits, bool):
            raise InputError(f"{where}: bits={self.bits!r} must be 0 (values as they are) to 8")


class SparseLoCoCommunicator(CodedRounds, name="SparseLoCo"):
    """Rounds that send the largest values of each block of the error.

    Args:
        options: of `SparseLoCoOptions`.
    """

    Options = SparseLoCoOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.beta, self.among_senders = self.options.error_decay, self.options.mean_over == "senders"

    def outer_spec(self) -> OptimSpec:
        """Plain steps of a rate."""
        return OptimSpec(torch.optim.SGD, lr=self.options.outer_lr)

    def codec(self, tensors: Sequence[Tensor]) -> Codec:
        """The `k` of each block; of each tensor its values in levels of their own."""
        shapes = [tensor.shape for tensor in tensors]
        blocks = [block_shape(shape, self.options.chunk) for shape in shapes]
        values = StatisticalCodec(self.options.bits) if self.options.bits else None
        counts = [self.options.k] * len(shapes)
        return LargestCodec(shapes, blocks, counts, _INDEX_BITS, values, tensors[0].dtype)


class SparseLoCoStrategy(Composition, name="SparseLoCo"):
    """DiLoCo with sparse outer gradients of two bits and error feedback.

    With d = phi - theta_i after `H` local steps::

        e = beta e + d;  s = quantised(the k of largest magnitude of each block of e);  e = e - s
        phi = phi - alpha mean over ranks of s

    Matrices are cut into blocks whose sides are the largest divisors up to `chunk`, vectors likewise; tensors of more
    dimensions are matrices of their first against the rest. The values that a tensor sends are quantised together: 4
    levels (2 bits) of 6/4 standard deviations each around their mean, each decoded as the mean of its values.

    With a `k` of whole blocks, `bits=0`, `error_decay=0` and `mean_over="all"` it is DiLoCo without outer momentum.

    Bytes: the payload is 12 bits a place and `bits` a value, `k (12 + 2) / 4096` bits a parameter where both sides
    are multiples of 64, and 20 bytes a tensor (its mean and four levels); all-gathered: n - 1 times that leaves a rank
    every `H` steps.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        H: local steps a round.
        options: of `SparseLoCoOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, arXiv 2508.15706, algorithm 1; blocks,
        levels, wire format and the mean over senders from the authors' code (tplr-ai/templar, tplr-ai/CCLoco).
    """

    module = SparseLoCoCommunicator
    positional = ("optim_spec", "H")
