"""AllReduce: average gradients at every step, as torch's DistributedDataParallel does."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym_core.strategy.arguments import positive_int
from exogym_core.strategy.base import Strategy
from exogym_core.strategy.parts.average import average_flat
from exogym_core.strategy.parts.codecs import Codec, codec_named
from exogym_core.strategy.parts.flat import plan_buckets, unflatten

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from exogym_core.communicator.base import Communicator, Handle

__all__ = ["AllReduceStrategy", "SimpleReduceStrategy"]

_MIB = 2**20


class SimpleReduceStrategy(Strategy):
    """Average gradients over all ranks, clip, step (data-parallel SGD).

    Gradients travel in flat buckets, the last layers' first. A bucket leaves as soon as the last backward
    pass of a step has filled it, always in the same order on all ranks, so that communication hides behind
    the rest of that pass. A parameter that this step did not use counts as a zero gradient.

    Bytes: a ring sends `2 (n - 1) / n` times the gradient's bytes per worker and step.

    Args:
        bucket_bytes: size at which a bucket is closed; the first one at 1 MiB (DDP's defaults).
        codec: "fp32" (as it is), "fp16", "bf16" or "int8" on the wire; codecs other than fp32 communicate
            after the backward pass.
        options: of every Strategy: `optim_spec`, `lr`, `max_norm`, `lr_scheduler`, ...

    References:
        Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, arXiv 2006.15704.
    """

    overlaps_backward = True

    def __init__(
        self,
        optim_spec: Any = None,
        max_norm: float | None = None,
        *,
        bucket_bytes: int = 25 * _MIB,
        codec: str | Codec | None = None,
        **options: Any,
    ) -> None:
        super().__init__(optim_spec=optim_spec, max_norm=max_norm, **options)
        self.bucket_bytes = positive_int(type(self).__name__, "bucket_bytes", bucket_bytes)
        self.codec = codec_named(codec)
        self.overlaps_backward = self.codec is None
        self._hooks: list[RemovableHandle] = []

    def setup(self, model: nn.Module, comm: Communicator, max_steps: int, seed: int) -> None:
        """Plan the buckets and hook the parameters."""
        super().setup(model, comm, max_steps, seed)
        parameters = self.trainable[::-1]
        plan = plan_buckets(parameters, self.bucket_bytes, min(_MIB, self.bucket_bytes))
        self._buckets = [[parameters[index] for index in bucket] for bucket in plan]
        self._posted: list[tuple[Tensor, Handle[Tensor] | None]] = []
        self._missing = [len(bucket) for bucket in self._buckets]
        self._listening = False
        if comm.world_size == 1 or self.codec is not None:
            return
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket:
                hook = partial(self._on_gradient, number)
                self._hooks.append(_after_accumulation(parameter, hook))

    def before_backward(self, last_micro_batch: bool) -> None:
        """Buckets leave during the last micro-batch's backward pass only."""
        self._listening = last_micro_batch

    def step(self) -> None:
        """Wait for the averages, clip, update."""
        self._listening = False
        if self.num_nodes > 1:
            self._average_gradients()
        self.clip_gradients()
        self.optimizer_step()
        super().step()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, number: int, _: Tensor) -> None:
        if not self._listening:
            return
        self._missing[number] -= 1
        while (ready := len(self._posted)) < len(self._buckets) and self._missing[ready] == 0:
            self._post(ready)

    def _post(self, number: int) -> None:
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._buckets[number]]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        if self.sample_weight != 1.0:
            flat *= self.sample_weight
        if self.codec is None:
            self._posted.append((flat, self.comm.all_reduce(flat, "avg", async_op=True)))
        else:
            self._posted.append((average_flat(self.comm, flat, self.codec), None))

    def _average_gradients(self) -> None:
        for number in range(len(self._posted), len(self._buckets)):
            self._post(number)
        for bucket, (flat, handle) in zip(self._buckets, self._posted, strict=True):
            if handle is not None:
                handle.wait()
            for parameter, gradient in zip(bucket, unflatten(flat, bucket), strict=True):
                parameter.grad = gradient
        self._posted = []
        self._missing = [len(bucket) for bucket in self._buckets]


def _after_accumulation(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]


#: The same strategy under the name of what it does.
AllReduceStrategy = SimpleReduceStrategy
