"""Means of encoded values. A sum of codes is no code, so they travel by ways of their own, which `CARRIERS` lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.parts.codecs import Codec
    from exogym_core.strategy.parts.flight import Steps

__all__ = ["CARRIERS"]

Parts = tuple[Tensor, ...]


def _summed(codec: Codec, messages: Sequence[Tensor], num_values: int) -> Tensor:
    """The sum of what messages stand for, in their order, in fp32."""
    total = codec.decode(messages[0], num_values)
    for message in messages[1:]:
        total += codec.decode(message, num_values)
    return total


def _encoded(codec: Codec, values: Tensor, lost: Tensor | None, times: int = 1) -> Tensor:
    """The message for `values`; what it rounds off, `times` over, is added to `lost`."""
    message = codec.encode(values)
    if lost is not None:
        lost += times * (values - codec.decode(message, len(values)))
    return message


def direct(comm: Communicator, parts: Parts, codec: Codec, lost: Parts | None) -> Steps[list[Tensor]]:
    """Part j goes to rank j, which decodes, sums in rank order, encodes the mean and sends it to all."""
    num_ranks, rank = comm.world_size, comm.rank
    messages = [
        _encoded(codec, part, lost[index] if lost is not None else None) for index, part in enumerate(parts)
    ]
    sizes = [(codec.encoded_bytes(len(part)),) for part in parts]
    received = yield comm.all_to_all(messages, async_op=True, shapes=[sizes[rank]] * num_ranks)
    total = _summed(codec, received, len(parts[rank]))
    mean = _encoded(codec, total / num_ranks, lost[rank] if lost is not None else None, num_ranks)
    means = yield comm.all_to_all([mean] * num_ranks, async_op=True, shapes=sizes)
    return list(means)


def ring(comm: Communicator, parts: Parts, codec: Codec, lost: Parts | None) -> Steps[list[Tensor]]:
    """Sums go around a ring and are encoded again at every hop, then the means do: the bytes of a plain ring."""
    num_ranks, rank = comm.world_size, comm.rank

    def encoded_part(values: Tensor, index: int) -> Tensor:
        return _encoded(codec, values, lost[index] if lost is not None else None)

    def passed_on(message: Tensor, index: int) -> Steps[Tensor]:
        """What comes from the rank before, part `index`, while `message` goes to the next one."""
        incoming = message.new_empty(codec.encoded_bytes(len(parts[index])))
        sent = comm.isend(message, (rank + 1) % num_ranks)
        received: Tensor = yield comm.irecv(incoming, (rank - 1) % num_ranks)
        yield sent
        return received

    total, message = parts[rank], encoded_part(parts[rank - 1], rank - 1)
    for hop in range(2, num_ranks + 1):
        index = (rank - hop) % num_ranks
        received = yield from passed_on(message, index)
        total = parts[index] + codec.decode(received, len(parts[index]))
        if hop < num_ranks:
            message = encoded_part(total, index)
    means: dict[int, Tensor] = {}
    means[rank] = _encoded(codec, total / num_ranks, lost[rank] if lost is not None else None, num_ranks)
    for hop in range(1, num_ranks):
        index = (rank - hop) % num_ranks
        means[index] = yield from passed_on(means[(index + 1) % num_ranks], index)
    return [means[index] for index in range(num_ranks)]


CARRIERS: Mapping[str, Callable[[Communicator, Parts, Codec, Parts | None], Steps[list[Tensor]]]] = {
    "direct": direct,
    "ring": ring,
}
"""Name -> the encoded mean of each part, alike on all ranks, given one part a rank.

What encoding rounds off is added to `lost`, one tensor a part: of this rank's own values, of sums that it passed
on, and of the means that it made (times the number of ranks, so that the next mean is larger by just that).
"""
