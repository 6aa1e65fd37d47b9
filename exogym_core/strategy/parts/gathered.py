"""Encoded tensors of all ranks: everyone's message to everybody, or votes and means by ranks that serve a part each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.parts.codecs import Codec
    from exogym_core.strategy.parts.flight import Steps

__all__ = ["decoded", "gathering", "served_mean"]


def gathering(comm: Communicator, message: Tensor) -> Steps[list[Tensor]]:
    """Every rank's `message`, in rank order, by one all-gather: `n - 1` times its size leaves a rank."""
    if comm.world_size == 1:
        return [message]
    messages: list[Tensor] = yield comm.all_gather(message, async_op=True)
    return messages


def decoded(codec: Codec, messages: list[Tensor], like: Tensor) -> Iterator[Tensor]:
    """What each message stands for, one at a time, in the dtype of `like`, a flat tensor of as many values."""
    for message in messages:
        yield codec.decode(message, len(like)).to(like.dtype)


def served_mean(
    comm: Communicator,
    flat: Tensor,
    codec: Codec,
    error: Tensor | None = None,
    server_error: Tensor | None = None,
) -> Tensor:
    """The encoded mean of encoded values, by ranks that each serve one part; alike on all ranks.

    Every rank sends part j of `flat` to rank j, which averages what it gets, in rank order, and sends the encoded
    mean to all: `2 (n - 1) / n` times the encoded bytes of `flat` a rank.

    Args:
        comm: the ranks.
        flat: this rank's values; they stay as they are.
        codec: both ways.
        error: what encoding rounded off this rank's values before: added, and replaced.
        server_error: likewise of the means that this rank has encoded, as long as the part that it serves.

    References:
        Tang et al., 1-bit Adam, arXiv 2102.02888, algorithm 1, lines 8 to 12.
    """
    num_ranks, rank = comm.world_size, comm.rank
    sent = flat if error is None else flat + error
    parts = sent.tensor_split(num_ranks)
    messages = [codec.encode(part) for part in parts]
    if error is not None:
        pairs = zip(messages, parts, strict=True)
        error.copy_(sent - torch.cat([codec.decode(message, len(part)) for message, part in pairs]))
    with comm.counted_as(sum(len(message) for message in messages) if num_ranks > 1 else 0):
        sizes = [(codec.encoded_bytes(len(part)),) for part in parts]
        received = messages
        if num_ranks > 1:
            received = comm.all_to_all(messages, shapes=[sizes[rank]] * num_ranks)
        mean = torch.zeros_like(parts[rank])
        for part in decoded(codec, received, mean):
            mean += part
        mean /= num_ranks
        if server_error is not None:
            mean += server_error
        message = codec.encode(mean)
        if server_error is not None:
            server_error.copy_(mean - codec.decode(message, len(mean)))
        means = comm.all_to_all([message] * num_ranks, shapes=sizes) if num_ranks > 1 else [message]
    pairs = zip(means, parts, strict=True)
    return torch.cat([codec.decode(each, len(part)).to(flat.dtype) for each, part in pairs])
