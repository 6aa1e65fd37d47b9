"""`minibatch_size="auto"`: the largest micro-batch whose memory all ranks of this machine have at once.

Two small forward passes tell what a sample costs: what autograd keeps of it for the backward pass. The rest
is a straight line, so nothing has to run out of memory to be found out, and an error in the model comes out
as it is. The answer depends on the machine and changes last bits: it is kept in the resolved experiment.
"""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exogym_core.training.evaluation import autocast_to, kept_rng

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

__all__ = ["fitting_size", "memory_limit", "saved_bytes"]

_SHARE_OF_GPU, _SHARE_OF_RAM = 0.9, 0.5  # EXO Gym's
_MARGIN = 1.3  # temporaries that autograd does not keep, and fragments
_COPIES = 5  # parameters, their gradients, two moments, and a copy for averages


def memory_limit(device: torch.device) -> float:
    """Bytes that all ranks on `device` together may take."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory) * _SHARE_OF_GPU
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, float(Path(path).read_text()))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return total * _SHARE_OF_RAM


def saved_bytes(model: nn.Module, batch: Any, precision: str | None = None) -> int:
    """Bytes that autograd keeps between the forward and the backward pass of `model` on `batch`."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = tensor  # alive, so that no other storage gets its address
        return tensor

    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    model.train()
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        autocast_to(precision, device),
    ):
        model(batch)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def fitting_size(
    model: nn.Module,
    sample_batch: Callable[[int], Any],
    batch_size: int,
    num_ranks: int,
    *,
    limit_bytes: float | None = None,
    precision: str | None = None,
) -> int:
    """The largest divisor of `batch_size` with which `num_ranks` ranks fit into memory.

    Args:
        model: on its device; it is copied.
        sample_batch: makes a batch of so many samples, on the model's device.
        batch_size: samples a rank and step.
        num_ranks: ranks that share the memory.
        limit_bytes: what they may take together; by default 90 % of the GPU's memory, half of this machine's.
        precision: of the forward pass, as `autocast`.

    Raises:
        Exception: whatever the model raises, at once.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if limit_bytes is None:
        limit_bytes = memory_limit(device)
    sizes = [size for size in range(1, batch_size + 1) if batch_size % size == 0]
    if len(sizes) == 1:
        return 1
    with kept_rng(device):
        replica = copy.deepcopy(model)
        # From 2 on: batch normalisation refuses a single sample.
        few, more = 2, 4
        costs = [saved_bytes(replica, sample_batch(size), precision) for size in (few, more)]
    per_sample = max(costs[1] - costs[0], 0) / (more - few)
    once = max(costs[0] - few * per_sample, 0.0)
    weights = sum(value.nbytes for value in [*model.parameters(), *model.buffers()])

    def needed(size: int) -> float:
        return num_ranks * _MARGIN * (_COPIES * weights + once + size * per_sample)

    fitting = [size for size in sizes if needed(size) <= limit_bytes]
    if not fitting:
        warnings.warn(
            f"fit: {num_ranks} ranks need {needed(1) / 1e9:.1f} GB even with one sample at a time, of "
            f"{limit_bytes / 1e9:.1f} GB that they should take; use fewer ranks or a smaller model",
            UserWarning,
            stacklevel=2,
        )
    return max(fitting, default=1)
