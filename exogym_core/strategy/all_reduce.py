"""AllReduce: average gradients at every step, as torch's DistributedDataParallel does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.strategy.arguments import positive_int
from exogym_core.strategy.base import Strategy
from exogym_core.strategy.parts.codecs import Codec, codec_named
from exogym_core.strategy.parts.gradients import DEFAULT_BUCKET_BYTES, GradientAverager

if TYPE_CHECKING:
    from torch import nn

    from exogym_core.communicator.base import Communicator

__all__ = ["AllReduceStrategy", "SimpleReduceStrategy"]


class SimpleReduceStrategy(Strategy):
    """Average gradients over all ranks, clip, step (data-parallel SGD).

    Gradients travel in flat buckets, the last layers' first. A bucket leaves as soon as the last backward
    pass of a step has filled it, always in the same order on all ranks, so that communication hides behind
    the rest of that pass. A parameter that this step did not use counts as a zero gradient.

    Bytes: a ring sends `2 (n - 1) / n` times the gradient's bytes per worker and step.

    Args:
        bucket_bytes: size at which a bucket is closed; the first one at 1 MiB (DDP's defaults).
        codec: of the gradients on the wire, by its name in CODECS: "fp32" (as they are), "fp16", "int8", ...;
            codecs other than fp32 communicate after the backward pass.
        options: of every Strategy: `optim_spec`, `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, arXiv 2006.15704.
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
        **options: Any,
    ) -> None:
        super().__init__(optim_spec=optim_spec, max_norm=max_norm, **options)
        self.bucket_bytes = positive_int(type(self).__name__, "bucket_bytes", bucket_bytes)
        self.codec = codec_named(codec)
        self.overlaps_backward = self.codec is None

    def setup(self, model: nn.Module, comm: Communicator, max_steps: int, seed: int) -> None:
        """Plan the buckets."""
        super().setup(model, comm, max_steps, seed)
        self.gradients = GradientAverager(self.trainable, comm, self.bucket_bytes, self.codec)

    def before_backward(self, last_micro_batch: bool) -> None:
        """Buckets leave during the last micro-batch's backward pass only."""
        self.gradients.listen(last_micro_batch, self.sample_weight)

    def step(self) -> None:
        """Wait for the averages, clip, update."""
        self.gradients.average(self.sample_weight)
        self.clip_gradients()
        self.optimizer_step()
        super().step()

    def close(self) -> None:
        """Remove the hooks."""
        self.gradients.close()


#: The same strategy under the name of what it does.
AllReduceStrategy = SimpleReduceStrategy
