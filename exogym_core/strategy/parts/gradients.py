"""Mean gradients in flat buckets, which leave while the backward pass is still under way."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from exogym_core.strategy.parts.average import average_flat
from exogym_core.strategy.parts.flat import plan_buckets, unflatten
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.options.optim import OptimSpec
    from exogym_core.strategy.parts.codecs import Codec
    from exogym_core.strategy.sites.site import Workers

__all__ = ["DEFAULT_BUCKET_BYTES", "GradientAverager", "dense_gradient"]

_MIB = 2**20

#: DDP's default.
DEFAULT_BUCKET_BYTES = 25 * _MIB


def dense_gradient(parameter: Tensor) -> Tensor:
    """`parameter`'s gradient; zeros if it has none, as if this rank's samples did not depend on it.

    Raises:
        InputError: the gradient is sparse.
    """
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.layout != torch.strided:
        shape = tuple(parameter.shape)
        raise InputError(
            f"gradient of a parameter of shape {shape}: is sparse and cannot be averaged; "
            "make the embedding with sparse=False"
        )
    return gradient


class GradientAverager:
    """Averages the gradients of `parameters` over the ranks of `comm`.

    Gradients travel in flat buckets, the last parameters' first. While it listens, a bucket leaves as soon as
    the backward pass has filled it, always in the same order on all ranks; the rest leave in `average`.

    Args:
        parameters: in the model's order.
        comm: the ranks that average.
        bucket_bytes: size at which a bucket is closed; the first one at 1 MiB.
        codec: of the gradients on the wire; with one, all of them leave in `average`.

    Attributes:
        held: what this rank's optimizers update: all parameters here, parts of them where they are sharded.
    """

    held: Sequence[Tensor]

    def __init__(
        self,
        parameters: Sequence[Tensor],
        comm: Communicator,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        codec: Codec | None = None,
    ) -> None:
        self.comm, self.codec, self.held = comm, codec, parameters
        self._weight = 1.0
        reverse = parameters[::-1]
        plan = plan_buckets(reverse, bucket_bytes, min(_MIB, bucket_bytes))
        self._buckets = [[reverse[index] for index in bucket] for bucket in plan]
        self._posted: list[Callable[[], Tensor]] = []  # each waits for a bucket's average
        self._missing = [len(bucket) for bucket in self._buckets]
        self._listening = False
        self._hooks: list[RemovableHandle] = []

    @property
    def num_posted(self) -> int:
        """Buckets that have left already."""
        return len(self._posted)

    def listen(self, on: bool, weight: float = 1.0) -> None:
        """Whether the coming backward pass completes the gradients, so that buckets may leave during it.

        `weight` multiplies this rank's gradients.
        """
        if on and not self._hooks and self.comm.world_size > 1 and self.codec is None:
            # The last bucket is full when the backward pass is over: `average` sends it.
            for number, bucket in enumerate(self._buckets[:-1]):
                hook = partial(self._on_gradient, number)
                self._hooks += [_after_accumulation(parameter, hook) for parameter in bucket]
        self._listening, self._weight = on, weight

    def average(self, weight: float = 1.0) -> None:
        """Send what has not left yet, wait, and set the gradients to the means of `weight` times gradient."""
        self._listening, self._weight = False, weight
        if self.comm.world_size == 1:
            return
        for number in range(len(self._posted), len(self._buckets)):
            self._post(number)
        for bucket, average in zip(self._buckets, self._averages(), strict=True):
            self._deliver(bucket, average)
        self._posted = []
        self._missing = [len(bucket) for bucket in self._buckets]

    def clip(self, max_norm: float) -> Tensor:
        """Clip the norm of the averaged gradients to `max_norm`; returns what it was."""
        return clip_grad_norm_(self.held, max_norm)

    def share_overflow(self) -> None:
        """Have all ranks see what is not finite in the averaged gradients; here they are alike anyway."""

    def gather(self) -> None:
        """After an update: bring `held` to the ranks that hold it not; here everyone has updated it all."""

    def optimizer(self, spec: OptimSpec, model: nn.Module) -> Optimizer:
        """The optimizer that `spec` makes of `model` on this rank."""
        return self.build(spec, spec.groups(model))

    def build(self, spec: OptimSpec, groups: Iterable[Any]) -> Optimizer:
        """The optimizer of parameters or parameter groups on this rank."""
        return spec.build(groups)

    def between(self, workers: Workers) -> Workers:
        """How `held` is averaged over workers."""
        return workers

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _on_gradient(self, number: int, _: Tensor) -> None:
        if not self._listening:
            return
        self._missing[number] -= 1
        while (ready := len(self._posted)) < len(self._buckets) - 1 and self._missing[ready] == 0:
            self._post(ready)

    def _post(self, number: int) -> None:
        flat = torch.cat([dense_gradient(parameter).reshape(-1) for parameter in self._buckets[number]])
        if self._weight != 1.0:
            flat *= self._weight
        self._posted.append(self._exchange(flat))

    # --- what is sent ---------------------------------------------------------------------------------------

    def _exchange(self, flat: Tensor) -> Callable[[], Tensor]:
        """Send a bucket's gradients; what is returned waits for their average."""
        if self.codec is None:
            return self.comm.all_reduce(flat, "avg", async_op=True).wait  # type: ignore[no-any-return]
        average = average_flat(self.comm, flat, self.codec)
        return lambda: average

    def _averages(self) -> list[Tensor]:
        """The averages of all buckets, which have left."""
        return [wait() for wait in self._posted]

    def _deliver(self, bucket: Sequence[Tensor], average: Tensor) -> None:
        """Set the gradients of a bucket's parameters."""
        for parameter, gradient in zip(bucket, unflatten(average, bucket), strict=True):
            parameter.grad = gradient


def _after_accumulation(parameter: Tensor, hook: Callable[[Tensor], None]) -> RemovableHandle:
    return parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return, no-untyped-call]
