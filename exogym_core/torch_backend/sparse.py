"""Sums of sparse tensors, as gloo makes them: everybody gets everybody's indices and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from exogym_core.communicator import Communicator

__all__ = ["add_up_sparse"]


def add_up_sparse(comm: Communicator, tensor: Tensor) -> Tensor:
    """The sum over ranks of sparse tensors of one shape, which may differ in what they hold.

    Each rank sends as many elements as the fullest one has.
    """
    own = tensor.detach().coalesce()
    indices, values = own.indices(), own.values()
    counts = [int(count) for count in comm.all_gather(torch.tensor([values.shape[0]]))]
    most = max(counts)
    all_indices = comm.all_gather(_padded(indices.t(), most))
    all_values = comm.all_gather(_padded(values, most))
    parts = zip(all_indices, all_values, counts, strict=True)
    kept = [(index[:count], value[:count]) for index, value, count in parts]
    index = torch.cat([index for index, _ in kept]).t()
    return torch.sparse_coo_tensor(index, torch.cat([value for _, value in kept]), own.shape).coalesce()


def _padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros((count - rows.shape[0], *rows.shape[1:]))]).contiguous()
