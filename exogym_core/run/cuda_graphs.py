"""Forward and backward passes as CUDA graphs: `workers: {cuda_graphs: true}`.

A pass of a small model is hundreds of kernels that each take less time than their launch. A graph holds them all and is
launched once (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). It repeats kernels, not Python: a
comparison refuses a model that decides by values or counts calls.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from exogym_core.data.batches import batch_layout, batch_tensors, joined_batch
from exogym_core.workers.rng import kept_rng
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Compute = Callable[[Any], tuple[Tensor, dict[str, Tensor]]]

__all__ = ["GraphedPass"]

_TOLERANCE = 1e-3  # of gradients, relative to the largest: more than rounding is another computation


def _near(gradient: Tensor, reference: Tensor) -> bool:
    """True if a gradient differs from another by no more than rounding does."""
    scale = float(reference.abs().max()) or 1.0
    return float((gradient - reference).abs().max()) <= _TOLERANCE * scale


def _copied(parts: Sequence[Any]) -> Any:
    return parts[0].clone() if isinstance(parts[0], Tensor) else parts[0]


_live: weakref.WeakSet[_Graph] = weakref.WeakSet()


class _Graph:
    """Kernels of a pass over a batch of one layout.

    Graphs of one device share their memory: one runs at a time, and its results are copied.

    Args:
        compute: the pass.
        batch: any; copied.
        device: of the batch.
    """

    def __init__(self, compute: Compute, batch: Any, device: torch.device) -> None:
        self.device = device
        self._batch = joined_batch([batch], _copied)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):  # libraries allocate their workspaces
            compute(self._batch)
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        pool = next((each.graph.pool() for each in _live if each.device == device), None)
        with torch.cuda.graph(self.graph, pool=pool):
            self._loss, self._gradients = compute(self._batch)
        _live.add(self)

    @torch.no_grad()
    def launch(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of a batch, the caller's own."""
        torch._foreach_copy_(batch_tensors(self._batch), batch_tensors(batch))
        self.graph.replay()
        own = [torch.empty_like(each) for each in self._gradients.values()]
        torch._foreach_copy_(own, list(self._gradients.values()))
        return self._loss.clone(), dict(zip(self._gradients, own, strict=True))


class GraphedPass:
    """A forward and backward pass that becomes a CUDA graph.

    The second batch is captured, the third computed both ways, and all later ones of its layout are launched. Batches
    of other layouts are computed as ever.

    Args:
        compute: from a batch on the device to its loss (or losses) and gradients by name; gradients are new tensors.
        buffers: the model's, which a pass may change.
        device: CUDA.
    """

    def __init__(self, compute: Compute, buffers: Iterable[Tensor], device: torch.device) -> None:
        self._compute, self._buffers, self._device = compute, list(buffers), device
        self._num_passes, self._layout = 0, cast("object", None)
        self._graph: _Graph | None = None

    def __call__(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients of a batch.

        Raises:
            InputError: the model's passes cannot be captured, or do not repeat themselves.
        """
        layout = batch_layout(batch)
        if self._layout is None:
            self._layout = layout
        if layout != self._layout:
            return self._compute(batch)
        self._num_passes += 1
        if self._num_passes == 2:
            self._graph, _, _ = self._tried(self._captured, batch)
        if self._graph is None or self._num_passes == 2:
            return self._compute(batch)
        return self._compared(self._graph, batch) if self._num_passes == 3 else self._graph.launch(batch)

    def _captured(self, batch: Any) -> _Graph:
        with torch.cuda.device(self._device):
            try:
                return _Graph(self._compute, batch, self._device)
            except Exception as error:
                raise _refusal(f"a pass cannot be captured ({str(error).strip().splitlines()[0]})") from error

    def _compared(self, graph: _Graph, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients without the graph, which must have the same, as far as they repeat themselves."""
        (_, launched), buffers, drawn = self._tried(graph.launch, batch)
        (_, again), _, _ = self._tried(self._compute, batch)
        loss, gradients = self._compute(batch)
        for name, own in gradients.items():
            spread = float((own - again[name]).abs().max())  # some kernels add in any order
            if not _near(launched[name], own) and float((launched[name] - own).abs().max()) > 4 * spread:
                raise _refusal(f"the graph has another gradient of {name}")
        if not all(map(torch.equal, buffers, self._buffers)):
            raise _refusal("the graph leaves other buffers")
        if not torch.equal(drawn, torch.cuda.get_rng_state(self._device)):
            raise _refusal("the graph draws other random numbers")
        return loss, gradients

    def _tried(self, work: Callable[[Any], Any], batch: Any) -> tuple[Any, list[Tensor], Tensor]:
        """Result of work on a batch, and the buffers and random stream that it leaves, which are then put back."""
        before = [each.clone() for each in self._buffers]
        with kept_rng(self._device):
            result = work(batch)
            drawn = torch.cuda.get_rng_state(self._device)
        after = [each.clone() for each in self._buffers]
        self._restore(before)
        return result, after, drawn

    @torch.no_grad()
    def _restore(self, values: Iterable[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)


def _refusal(reason: str) -> InputError:
    return InputError(
        f"workers: cuda_graphs is not for this model: {reason}; leave it out", about=("workers",)
    )
