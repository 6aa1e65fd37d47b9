"""Averages over ranks, plain or in a codec. What is sent is what is charged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exogym_core.strategy.parts.flat import flatten, plan_buckets, write_back

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.parts.codecs import Codec

__all__ = ["average_flat", "average_tensors", "encoded_average_bytes"]


def average_flat(comm: Communicator, flat: Tensor, codec: Codec | None = None) -> Tensor:
    """Average `flat` (1-D) over all ranks of `comm`, in place; all ranks end with the same bits.

    Without a codec this is one all-reduce. With one it is a reduce-scatter and an all-gather of encoded
    parts: part j goes to rank j, which decodes, sums in rank order in fp32, divides, encodes again and sends
    the mean to all. Over all ranks that is 2(n - 1) times the encoded size, as in a ring.
    """
    if comm.world_size == 1:
        return flat
    if codec is None:
        comm.all_reduce(flat, "avg")
        return flat
    parts = flat.tensor_split(comm.world_size)
    with comm.counted_as(encoded_average_bytes(len(flat), comm.world_size, codec)):
        received = comm.all_to_all([codec.encode(part) for part in parts])
        own_size = len(parts[comm.rank])
        total = codec.decode(received[0], own_size)
        for message in received[1:]:
            total += codec.decode(message, own_size)
        mean = codec.encode(total / comm.world_size)
        means = comm.all_to_all([mean] * comm.world_size)
    for part, message in zip(parts, means, strict=True):
        part.copy_(codec.decode(message, len(part)))
    return flat


def encoded_average_bytes(num_values: int, num_ranks: int, codec: Codec) -> int:
    """Encoded size of `num_values` values cut into one part a rank, as `average_flat` sends them.

    >>> from exogym_core.strategy.parts.codecs import Int8Codec
    >>> encoded_average_bytes(10_000, 4, Int8Codec(chunk=1000))
    10048
    """
    small, num_larger = divmod(num_values, num_ranks)
    return num_larger * codec.encoded_bytes(small + 1) + (num_ranks - num_larger) * codec.encoded_bytes(small)


@torch.no_grad()
def average_tensors(comm: Communicator, tensors: Sequence[Tensor], codec: Codec | None = None) -> None:
    """Average `tensors` over all ranks of `comm`, in place, in one bucket per dtype and device."""
    for bucket in plan_buckets(tensors):
        members = [tensors[index] for index in bucket]
        write_back(average_flat(comm, flatten(members), codec), members)
