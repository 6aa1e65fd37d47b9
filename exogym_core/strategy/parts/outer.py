"""The outer step of local-update methods: the mean displacement as a gradient of a second optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym_core.strategy.parts.average import average_flat
from exogym_core.strategy.parts.flat import flatten, plan_buckets, unflatten, write_back

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.optim import OptimSpec
    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["OuterStep"]


class OuterStep:
    """The global parameters `theta` and the optimizer that moves them, kept alike by every rank.

    `round` averages the pseudo-gradients `theta - theta_i` over the ranks (DiLoCo, arXiv 2311.08105,
    algorithm 1, line 12), updates `theta` with them and sets every replica to it. No rank is special, and
    nothing but the pseudo-gradients travels. With one rank it is the same without a message.
    """

    def __init__(
        self, parameters: Sequence[Tensor], optim_spec: OptimSpec, codec: Codec | None = None
    ) -> None:
        self.codec = codec
        self.buckets = [[parameters[index] for index in bucket] for bucket in plan_buckets(parameters)]
        self.flats = [flatten(bucket) for bucket in self.buckets]
        # The optimizer sees parameters in their shapes, which are views of the flat copies.
        views = zip(self.flats, self.buckets, strict=True)
        self.anchors = [[nn.Parameter(view) for view in unflatten(flat, like)] for flat, like in views]
        self.optim = optim_spec.build([anchor for bucket in self.anchors for anchor in bucket])

    @torch.no_grad()
    def round(self, comm: Communicator | None) -> None:
        """End a round: average, update, and set this rank's parameters to the result. None: a rank alone."""
        for flat, bucket, anchors in zip(self.flats, self.buckets, self.anchors, strict=True):
            pseudo_gradient = flat - flatten(bucket)
            if comm is not None:
                average_flat(comm, pseudo_gradient, self.codec)
            for anchor, gradient in zip(anchors, unflatten(pseudo_gradient, anchors), strict=True):
                anchor.grad = gradient
        self.optim.step()
        self.optim.zero_grad()
        for flat, bucket in zip(self.flats, self.buckets, strict=True):
            write_back(flat, bucket)

    def state_dict(self) -> dict[str, Any]:
        """The global parameters and the optimizer's state."""
        return {"theta": [flat.clone() for flat in self.flats], "optim": self.optim.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for flat, saved in zip(self.flats, state["theta"], strict=True):
            flat.copy_(saved)
        self.optim.load_state_dict(state["optim"])
