"""Qsparse-local-SGD: rounds that send the largest values alone, quantised, with error compensation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import fraction, one_of, option, options_of, positive_int
from exogym_core.strategy.parts.average import Buckets
from exogym_core.strategy.parts.generators import shared_generator
from exogym_core.strategy.parts.means import CodedMean
from exogym_core.strategy.parts.outer import OuterAveraging, OuterStep
from exogym_core.strategy.parts.state import State
from exogym_core.strategy.parts.tensor_codecs import LargestCodec, QSGDCodec, SignCodec, matrix_shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["QsparseCommunicator", "QsparseLocalSGDStrategy"]


class QsparseLocalSGDStrategy(Strategy, name="QsparseLocalSGD"):
    """Local steps, then the quantised largest values of their sum and former errors.

    With x the parameters after the last round and x_i this rank's after `H` local steps (algorithm 1)::

        m = m + x - x_i;  g = QTop_k(m);  m = m - g
        x = x - mean over ranks of g

    SignTop_k sends each tensor's k largest as signs times their mean magnitude (lemma 3 with the l1 norm), QTop_k as
    levels of stochastic quantisation by their l2 norm (lemma 1). With `density=1` and `values="exact"` it is LocalSGD.

    Bytes: the payload is, of each tensor, 32 bits a place and, a value, 1 bit ("sign"), `bits` ("qsgd") or 32
    ("exact"), with 4 bytes for the scale; all-gathered: n - 1 times that leaves a rank every `H` steps. The paper's
    master, which would send one mean, is every rank.

    Args:
        optim_spec: the local optimizer (AdamW by default; the paper's is SGD).
        H: local steps a round.
        density: share of each tensor's values that is sent, one at least; above 0 and at most 1.
        values: how they travel: "sign" (SignTop_k), "qsgd" (QTop_k) or "exact" (Top_k, in fp32).
        bits: of a value under "qsgd", 2 to 8.
        buckets, exchange: of the outer gradient, see `Buckets`.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Basu et al., Qsparse-local-SGD, arXiv 1906.02367, algorithm 1 (synchronous).
    """

    H: int = option(8, positive_int)
    density: float = option(0.01, fraction)
    values: str = option("sign", one_of("sign", "qsgd", "exact"))
    bits: int = option(4, one_of(*range(2, 9)))
    cut: Buckets = options_of(Buckets)
    positional = ("optim_spec", "H")

    judged = "outer"
    round_steps = property(lambda self: self.H)
    state = State("outer", "coded", "num_rounds")
    takes_sites = False
    plain_steps = True

    def prepare(self) -> None:
        """Begin with the same x on every rank, without errors."""
        outer_optim = OptimSpec(torch.optim.SGD, lr=1.0)
        self.outer = OuterStep(self.held, outer_optim, OuterAveraging(**vars(self.cut)).charged(self))
        self.coded, self.num_rounds = CodedMean(self.outer.flats), 0
        for bucket in self.outer.buckets:
            self.charged(self.codec(bucket, 0))

    def communicate(self, step: int) -> None:
        """At the end of a round: subtract the mean of the ranks' encoded errors from the parameters."""
        if step % self.H:
            return
        codecs = [self.charged(self.codec(bucket, step - 1)) for bucket in self.outer.buckets]
        self.outer.step(self.coded.of(self.outer.values(), codecs, self.cut.through(self.comm)))
        self.num_rounds += 1

    def codec(self, tensors: Sequence[Tensor], step: int) -> Codec:
        """The largest values of each tensor, their places in 32 bits."""
        shapes = [tensor.shape for tensor in tensors]
        blocks = [matrix_shape(shape) for shape in shapes]
        counts = [max(1, round(self.density * shape.numel())) for shape in shapes]
        generator = shared_generator(self.seed, "qsparse", step, self.comm.rank)
        values = {
            "sign": SignCodec("l1"),
            "exact": None,
            "qsgd": QSGDCodec(self.bits, bucket=max(counts), norm="l2", generator=generator),
        }
        return LargestCodec(shapes, blocks, counts, 32, values[self.values])


class QsparseCommunicator(QsparseLocalSGDStrategy, part="QsparseLocalSGD"):
    """Qsparse-local-SGD as a member of a `Chain`."""
