"""AllReduce: average gradients at every step, as torch's DistributedDataParallel does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options.arguments import positive_int
from exogym_core.strategy.parts.codecs import Codec, codec_named
from exogym_core.strategy.parts.gradients import DEFAULT_BUCKET_BYTES, GradientAverager
from exogym_core.strategy.sites.sharding import Sharding
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["AllReduceStrategy", "SimpleReduceStrategy"]


class SimpleReduceStrategy(Strategy):
    """Average gradients over all ranks, clip, step (data-parallel SGD).

    Gradients travel in flat buckets, the last layers' first. A bucket leaves as soon as the last backward
    pass of a step has filled it, always in the same order on all ranks, so that communication hides behind
    the rest of that pass. A parameter that this step did not use counts as a zero gradient.

    Bytes: a ring sends `2 (n - 1) / n` times the gradient's bytes per worker and step. With `sharding` this is
    FSDP, where each rank holds a part of the optimizer's state: as many bytes with "SHARD_GRAD_OP", half as
    many again with "FULL_SHARD", which gathers parameters for the backward pass once more.

    Args:
        bucket_bytes: size at which a bucket is closed; the first one at 1 MiB (DDP's defaults).
        codec: of the gradients on the wire, by its name in CODECS: "fp32" (as they are), "fp16", "int8", ...;
            codecs other than fp32 communicate after the backward pass.
        sharding: "NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD", or within machines "HYBRID_SHARD".
        ranks_per_node: consecutive ranks that are a machine, for "HYBRID_SHARD".
        options: of every Strategy: `optim_spec`, `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, arXiv 2006.15704.
        Zhao et al., PyTorch FSDP, arXiv 2304.11277.
    """

    overlaps_backward = True
    gradients: GradientAverager

    def __init__(
        self,
        optim_spec: Any = None,
        max_norm: float | None = None,
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        codec: str | Codec | None = None,
        sharding: str = "NO_SHARD",
        ranks_per_node: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(optim_spec=optim_spec, max_norm=max_norm, **options)
        self.bucket_bytes = positive_int(type(self).__name__, "bucket_bytes", bucket_bytes)
        self.codec = codec_named(codec)
        self.sharding = Sharding(sharding, ranks_per_node)
        if self.codec is not None and sharding != "NO_SHARD":
            raise InputError(
                f"{type(self).__name__}: gradients in shards travel as they are; leave out codec= or sharding="
            )
        self.overlaps_backward = self.codec is None

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        self.local_step, codec = 0, self.charged(self.codec)
        self.gradients = self.sharding.averager(self.trainable, self.comm, self.bucket_bytes, codec)
        self.optim = self.gradients.optimizer(self.optim_spec, model)

    def step(self) -> None:
        """Wait for the averages, clip, update; parameters in shards are gathered."""
        self.gradients.average(self.sample_weight)
        self.clip_gradients()
        self.optimizer_step()
        self.gradients.gather()
        super().step()


#: The same strategy under the name of what it does.
AllReduceStrategy = SimpleReduceStrategy
