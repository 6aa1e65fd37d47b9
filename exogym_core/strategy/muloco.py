"""MuLoCo: DiLoCo with Muon inside, whose outer gradients travel in a few bits."""

from __future__ import annotations

from typing import Any

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import number, one_of, option, options_of, positive_int, share
from exogym_core.strategy.parts.average import Buckets
from exogym_core.strategy.parts.means import CodedMean
from exogym_core.strategy.parts.muon import MuLoCoMuon, TorchMuon, split_by_shape
from exogym_core.strategy.parts.outer import OuterAveraging, OuterStep, nesterov
from exogym_core.strategy.parts.state import State
from exogym_core.strategy.parts.tensor_codecs import EachTensorCodec, LinearCodec, StatisticalCodec
from netsim.errors import InputError

__all__ = ["MuLoCoCommunicator", "MuLoCoStrategy"]

_QUANTIZERS = {"statistical": StatisticalCodec, "linear": LinearCodec}
_MUONS = {"paper": MuLoCoMuon, "torch": TorchMuon}


class MuLoCoStrategy(Strategy, name="MuLoCo"):
    """DiLoCo with Muon as the inner optimizer of matrices, quantised if asked.

    Inside, of hidden matrices (embeddings, heads, vectors: AdamW)::

        m = mu m + g;  w = (1 - lr wd) w - lr sqrt(rows / columns) NewtonSchulz(m)

    Outside, with d = theta - theta_i after `H` steps, Q quantising each tensor by itself::

        e = gamma e + eta d;  s = Q(e);  e = e - s
        theta = an outer Nesterov step, of rate eta, along Q(mean over ranks of s)

    The rate counts twice there, as in the authors' code. With `bits=0` the outer gradient is the plain mean of d, and
    with `optim_spec="adamw"` it is DiLoCo.

    Bytes: the payload is the parameters' own (`bits=0`), and a rank sends `2 (n - 1) / n` times that every `H` steps;
    else `bits` a value and a tensor's head, 4 (1 + 2**bits) bytes "statistical", 8 "linear": n - 1 times that.

    Args:
        optim_spec: the inner optimizer; Muon with learning rate 0.02, momentum 0.95 if it is not given.
        H: local steps a round.
        outer_lr: eta of the outer Nesterov step.
        outer_momentum: its momentum.
        bits: of a value of the outer gradient: 2, 4 or 8; 0 averages values as they are.
        quantizer: of each tensor: "statistical" (6 standard deviations), or "linear" (smallest to largest).
        error_decay: gamma, the share of an error kept for the next round.
        muon: "paper", with the authors' five triples of Newton-Schulz coefficients, or "torch", torch.optim.Muon.
        buckets, exchange: of the outer gradient, see `Buckets`.
        options: of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Therien et al., MuLoCo, arXiv 2505.23725; rules as in the authors' code (facebookresearch/MuLoCo).
    """

    H: int = option(30, positive_int)
    outer_lr: float = option(0.7, number)
    outer_momentum: float = option(0.6, share)
    bits: int = option(0, one_of(0, 2, 4, 8))
    quantizer: str = option("statistical", one_of(*_QUANTIZERS))
    error_decay: float = option(0.9, share)
    muon: str = option("paper", one_of(*_MUONS))
    cut: Buckets = options_of(Buckets)
    positional = ("optim_spec", "H", "muon")

    judged = "outer"
    round_steps = property(lambda self: self.H)
    state = State("outer", "coded", "num_rounds")
    plain_steps = True
    takes_sites = property(lambda self: not self.bits)

    @property
    def default_optim(self) -> OptimSpec:  # type: ignore[override]
        """Muon, of hidden matrices."""
        return OptimSpec(_MUONS[self.muon], params=split_by_shape)

    def prepare(self) -> None:
        """Begin with the same theta on every rank, without errors."""
        outer_optim = nesterov(self.outer_lr, self.outer_momentum)
        self.outer = OuterStep(self.held, outer_optim, OuterAveraging(**vars(self.cut)).charged(self))
        self.num_rounds, self.coded = 0, None
        if self.bits:
            quantizer = _QUANTIZERS[self.quantizer](self.bits)
            sizes = [[tensor.numel() for tensor in bucket] for bucket in self.outer.buckets]
            self.codecs = [self.charged(EachTensorCodec(each, quantizer)) for each in sizes]
            self.coded = CodedMean(
                self.outer.flats, beta=self.error_decay, gain=self.outer_lr, encoded_mean=True
            )

    def communicate(self, step: int) -> None:
        """At the end of a round: an outer step along the mean displacement, quantised if asked."""
        if step % self.H:
            return
        if self.coded is None:
            delta = self.outer.mean_over(self.site)
        else:
            delta = self.coded.of(self.outer.values(), self.codecs, self.cut.through(self.comm))
        self.outer.step(delta)
        self.num_rounds += 1


class MuLoCoCommunicator(MuLoCoStrategy, part="MuLoCo"):
    """MuLoCo's quantised rounds as a member of a `Chain`; `bits` is 2 by default."""

    bits: int = option(2, one_of(0, 2, 4, 8))

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if not self.bits:
            raise InputError(
                f"{self.where}: bits=0 quantises nothing; write DiLoCoCommunicator(H={self.H}) instead",
                about=("bits",),
            )
