"""SparseLoCo: a few values of each block of the outer gradient, in two bits each, and no outer momentum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import number, one_of, option, options_of, positive_int, share
from exogym_core.strategy.parts.average import Buckets
from exogym_core.strategy.parts.means import CodedMean
from exogym_core.strategy.parts.outer import OuterAveraging, OuterStep
from exogym_core.strategy.parts.state import State
from exogym_core.strategy.parts.tensor_codecs import LargestCodec, StatisticalCodec, block_shape
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["SparseLoCoCommunicator", "SparseLoCoStrategy"]

_INDEX_BITS = 12


class SparseLoCoStrategy(Strategy, name="SparseLoCo"):
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
        k: values that a block sends.
        chunk: longest side of a block, at most 64: a place in it has 12 bits.
        bits: of a value, 1 to 8; 0 sends values as they are.
        error_decay: beta, the share of an error kept for the next round, 0 to 1.
        outer_lr: alpha, the outer learning rate.
        mean_over: "senders": of each value the mean over the ranks that sent it, as the authors' code has it; "all", as
            the paper.
        buckets, exchange: of the outer gradient, see `Buckets`.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, arXiv 2508.15706, algorithm 1; blocks,
        levels, wire format and the mean over senders from the authors' code (tplr-ai/templar, tplr-ai/CCLoco).
    """

    H: int = option(30, positive_int)
    k: int = option(64, positive_int)
    chunk: int = option(64, positive_int)
    bits: int = option(2)
    error_decay: float = option(0.95, share)
    outer_lr: float = option(1.0, number)
    mean_over: str = option("senders", one_of("senders", "all"))
    cut: Buckets = options_of(Buckets)
    positional = ("optim_spec", "H")

    judged = "outer"
    round_steps = property(lambda self: self.H)
    state = State("outer", "coded", "num_rounds")
    takes_sites = False
    plain_steps = True

    def __init__(self, *positional: Any, **given: Any) -> None:
        super().__init__(*positional, **given)
        if self.chunk > 64:
            raise InputError(
                f"{self.where}: chunk={self.chunk} must be at most 64: a place in a block has 12 bits",
                about=("chunk",),
            )
        if self.bits not in range(9) or isinstance(self.bits, bool):
            raise InputError(
                f"{self.where}: bits={self.bits!r} must be 0 (values as they are) to 8", about=("bits",)
            )

    def prepare(self) -> None:
        """Begin with the same phi on every rank, without errors."""
        outer_optim = OptimSpec(torch.optim.SGD, lr=self.outer_lr)
        self.outer = OuterStep(self.held, outer_optim, OuterAveraging(**vars(self.cut)).charged(self))
        self.codecs = [self.charged(self.codec(bucket)) for bucket in self.outer.buckets]
        self.coded = CodedMean(
            self.outer.flats, beta=self.error_decay, among_senders=self.mean_over == "senders"
        )
        self.num_rounds = 0

    def communicate(self, step: int) -> None:
        """At the end of a round: a plain step along the mean of the ranks' encoded errors."""
        if step % self.H:
            return
        self.outer.step(self.coded.of(self.outer.values(), self.codecs, self.cut.through(self.comm)))
        self.num_rounds += 1

    def codec(self, tensors: Sequence[Tensor]) -> Codec:
        """The `k` largest of each block; of each tensor its values in levels of their own."""
        shapes = [tensor.shape for tensor in tensors]
        blocks = [block_shape(shape, self.chunk) for shape in shapes]
        values = StatisticalCodec(self.bits) if self.bits else None
        return LargestCodec(shapes, blocks, [self.k] * len(shapes), _INDEX_BITS, values, tensors[0].dtype)


class SparseLoCoCommunicator(SparseLoCoStrategy, part="SparseLoCo"):
    """SparseLoCo as a member of a `Chain`."""
