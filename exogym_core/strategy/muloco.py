"""MuLoCo: DiLoCo with Muon inside, whose outer gradients travel in a few bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.strategy.chain import Composition, Module
from exogym_core.strategy.diloco import DiLoCoCommunicator
from exogym_core.strategy.optimizers import OptimSpec
from exogym_core.strategy.options import (
    Options,
    number,
    one_of,
    option,
    positive_int,
    share,
)
from exogym_core.strategy.parts.few_bits import LinearCodec, StatisticalCodec
from exogym_core.strategy.parts.muon import MuLoCoMuon, TorchMuon, split_by_shape
from exogym_core.strategy.parts.outer import nesterov
from exogym_core.strategy.parts.rounds import CodedRounds
from exogym_core.strategy.parts.tensor_codecs import EachTensorCodec
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["MuLoCoCommunicator", "MuLoCoOptions", "MuLoCoStrategy"]

_QUANTIZERS = {"statistical": StatisticalCodec, "linear": LinearCodec}
_MUONS = {"paper": MuLoCoMuon, "torch": TorchMuon}


class MuLoCoOptions(Options):
    """Options of MuLoCo: local steps a round, the outer step, and how its gradient is quantized.

    Args:
        H: local steps a round.
        outer_lr: eta of the outer Nesterov step.
        outer_momentum: its momentum.
        bits: of a value of the outer gradient: 2, 4 or 8; 0 averages values as they are.
        quantizer: of each tensor: "statistical" (6 standard deviations), or "linear" (smallest to largest).
        error_decay: gamma, what is left of an error a round later.
    """

    H: int = option(30, positive_int)
    outer_lr: float = option(0.7, number)
    outer_momentum: float = option(0.6, share)
    bits: int = option(0, one_of(0, 2, 4, 8))
    quantizer: str = option("statistical", one_of(*_QUANTIZERS))
    error_decay: float = option(0.9, share)

    def outer_optim(self) -> OptimSpec:
        """The outer optimizer yet to be built."""
        return nesterov(self.outer_lr, self.outer_momentum)


class MuLoCoCommunicator(CodedRounds, name="MuLoCo"):
    """Rounds whose errors go quantised, tensor by tensor, and whose mean is quantised again.

    Args:
        options: of `MuLoCoOptions`.
    """

    Options = MuLoCoOptions

    encoded_mean = True

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"bits": 2, **given})
        if not self.options.bits:
            where, H = type(self).__name__, self.H  # noqa: N806
            raise InputError(f"{where}: bits=0 quantises nothing; write DiLoCoCommunicator(H={H}) instead")
        self.beta, self.gain = self.options.error_decay, self.options.outer_lr

    def codec(self, tensors: Sequence[Tensor]) -> Codec:
        """Quantise every tensor by itself."""
        quantizer = _QUANTIZERS[self.options.quantizer](self.options.bits)
        return EachTensorCodec([tensor.numel() for tensor in tensors], quantizer)


class _StrategyOptions(MuLoCoOptions):
    """`muon` besides: "paper" or "torch"."""

    muon: str = option("paper", one_of(*_MUONS))


class MuLoCoStrategy(Composition, name="MuLoCo"):
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
        muon: "paper", with the authors' five triples of Newton-Schulz coefficients, or "torch", torch.optim.Muon.
        options: of `MuLoCoOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Therien et al., MuLoCo, arXiv 2505.23725; rules as in the authors' code (facebookresearch/MuLoCo).
    """

    Options = _StrategyOptions
    positional = ("optim_spec", "H", "muon")

    def compose(self, options: _StrategyOptions) -> list[Module]:
        """Rounds, quantised if asked."""
        self.optim_spec = OptimSpec(_MUONS[options.muon], params=split_by_shape)  # unless another is given
        if not options.bits:
            return [DiLoCoCommunicator(H=options.H, outer_optim_spec=options.outer_optim())]
        return [MuLoCoCommunicator(**{name: vars(options)[name] for name in MuLoCoOptions.names()})]
