"""Streaming DiLoCo: the model in fragments, each with rounds of its own that overlap training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.chain import Composition
from exogym_core.strategy.options import option, share
from exogym_core.strategy.parts.rounds import FragmentOptions, Fragments

if TYPE_CHECKING:
    from exogym_core.strategy.parts.outer import Round

__all__ = ["StreamingDiLoCoCommunicator", "StreamingDiLoCoStrategy", "StreamingOptions"]


class StreamingOptions(FragmentOptions):
    """Options of Streaming DiLoCo besides.

    Args:
        alpha: weight of what a worker has trained meanwhile; also `fragment_update_alpha`.
    """

    alpha: float = option(0.5, share)


class StreamingDiLoCoCommunicator(Fragments, name="StreamingDiLoCo"):
    """A round of fragment p of P begins after step `floor((p + 1) H / P)` of every H, and ends tau steps later.

    Args:
        H: steps between two rounds of a fragment.
        options: of `StreamingOptions`.
    """

    Options = StreamingOptions
    options: StreamingOptions
    round_steps = property(lambda self: self.options.H)

    positional = ("H",)

    def leaves(self, p: int, step: int) -> bool:
        """True if a fragment leaves, at torchft's steps: the first round is shorter."""
        H = self.options.H  # noqa: N806
        return (step - (p + 1) * H // len(self.outers)) % H == 0

    @torch.no_grad()
    def merge(self, p: int, outer_round: Round) -> None:
        """An outer step on phi_p; `theta_p = alpha theta_p + (1 - alpha) phi_p`."""
        self.outers[p].apply(outer_round.wait())
        self.outers[p].mix(self.options.alpha)


class StreamingDiLoCoStrategy(Composition, name="StreamingDiLoCo"):
    """DiLoCo fragment by fragment, overlapped: phi_p and its momentum are equal on all ranks.

    Bytes: each of P fragments sends `2 (n - 1) / n` times its encoded bytes per worker every `H` steps: in all as
    much as DiLoCo, at most a P-th of it at a time. The paper's wire format is `codec="e3m0"`.

    With P = 1, tau = 0, alpha = 0 and `outer_lr=0.7` it is DiLoCo. torchft's `sync_every`, `fragment_sync_delay` and
    `fragment_update_alpha` are `H`, `tau` and `alpha`; its rounds begin tau steps earlier, and end where these begin.

    Args:
        optim_spec: the inner optimizer (AdamW by default).
        outer_optim_spec: the outer one (SGD, 0.4, Nesterov momentum 0.9 by default).
        H: steps between two rounds of a fragment (100).
        options: of `StreamingOptions`, and of every Strategy: `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Douillard et al., Streaming DiLoCo with overlapping communication, arXiv 2501.18512.
        Departures follow torchft's local_sgd.py.
    """

    module = StreamingDiLoCoCommunicator
    positional = ("optim_spec", "outer_optim_spec", "H")
