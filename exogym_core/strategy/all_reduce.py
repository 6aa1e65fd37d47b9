"""AllReduce: average gradients at every step, as torch's DistributedDataParallel does."""

from __future__ import annotations

from typing import Any

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import flag, option, options_of
from exogym_core.strategy.participation.options import StepPatienceOptions
from exogym_core.strategy.participation.site import GradientOptions
from exogym_core.strategy.parts.flat import flatten, write_back
from netsim.errors import InputError

__all__ = ["AllReduceStrategy", "SimpleReduceStrategy"]


class AllReduceStrategy(Strategy, name="AllReduce"):
    """Average gradients over all ranks, clip, step (data-parallel SGD): all ranks are one site.

    Gradients travel in flat buckets, the last layers' first. A bucket leaves as soon as the last backward
    pass of a step has filled it, always in the same order on all ranks, so that communication hides behind
    the rest of that pass. A parameter that a rank did not use counts as a zero gradient there; one that no
    rank used is left alone.

    Bytes: a ring sends `2 (n - 1) / n` times the gradient's bytes per worker and step. With `sharding` this is
    FSDP, where each rank holds a part of the optimizer's state: as many bytes with "SHARD_GRAD_OP", half as
    many again with "FULL_SHARD", which gathers parameters for the backward pass once more.

    Args:
        optim_spec: the optimizer (AdamW by default).
        max_norm: clip the norm of the mean gradient to this.
        broadcast_buffers: at the end of a step all ranks take rank 0's buffers, such as BatchNorm's running means, as
            DistributedDataParallel does before each forward pass: a message a type of value.
        averaging_timeout, deadline, min_ranks, ...: steps that go on without absent ranks, see `StepPatienceOptions`.
        options: of `exogym_core.strategy.participation.site:GradientOptions`: `bucket_bytes`, `codec` (codecs
            other than fp32 communicate after the backward pass), `error_feedback`, `aggregate`, `sharding`,
            `ranks_per_node`; and of every Strategy: `lr`, `lr_scheduler`, ...

    References:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, arXiv 2006.15704.
        Zhao et al., PyTorch FSDP, arXiv 2304.11277.
    """

    broadcast_buffers: bool = option(False, flag)
    sites: GradientOptions = options_of(GradientOptions)
    patience: StepPatienceOptions = options_of(StepPatienceOptions)
    positional = ("optim_spec", "max_norm")
    variants = (("Lion", "optim_spec: lion"),)
    round_steps = 1
    weighs_by_samples = True
    plain_steps = property(lambda self: not self.broadcast_buffers)

    def __init__(self, *positional: Any, **given: Any) -> None:
        super().__init__(*positional, **given)
        if self.broadcast_buffers and self.patience.patience(self.where) is not None:
            raise InputError(
                f"{self.where}: time-outs need ranks that do without others between exchanges; leave out "
                "broadcast_buffers=",
                about=("broadcast_buffers",),
            )

    def step(self) -> None:
        """The mean gradient, clipped; then the update, and rank 0's buffers."""
        self.local_update()
        self.share_buffers()
        super().step()

    def skip_step(self) -> None:
        """Rank 0's buffers also where gradients overflowed."""
        self.share_buffers()
        super().skip_step()

    def share_buffers(self) -> None:
        """Take rank 0's buffers, with `broadcast_buffers`."""
        buffers = [*self.model.buffers()] if self.broadcast_buffers else []
        for dtype in dict.fromkeys(each.dtype for each in buffers):
            alike = [each for each in buffers if each.dtype == dtype]
            flat = flatten(alike)
            self.comm.broadcast(flat, 0)
            write_back(flat, alike)


#: The same strategy under the name of what it does.
SimpleReduceStrategy = AllReduceStrategy
