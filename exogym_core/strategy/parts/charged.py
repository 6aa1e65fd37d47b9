"""Coding that costs virtual time, and whether a strategy that codes has charged it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.parts.codecs import Codec, codec_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from exogym_core.communicator.base import Communicator
    from exogym_core.communicator.handle import Traffic
    from exogym_core.cost.coding import Coding

__all__ = ["ChargedCodec", "charge", "charged_codec", "told_coding"]

_LEAST_SHARE = 0.01  # of the payload, to count as coded: flags and counters do not


def charge(comm: Communicator, coding: Coding | None, codec: str, way: str, num_values: int) -> None:
    """Let the virtual time pass that `codec` takes to "encode" or "decode" so many values; None: coding is free.

    Raises:
        InputError: `compute.coding` has speeds, but none for this codec.
    """
    if coding is not None:
        comm.advance(coding.seconds(codec, way, num_values))
        comm.traffic.charged_values += num_values


def charged_codec(comm: Communicator, coding: Coding | None, codec: Codec) -> Codec:
    """`codec`, its work on the clock of `comm` where that costs time.

    Raises:
        InputError: `compute.coding` has speeds, but none for this codec.
    """
    if coding is None or not coding.speeds:
        return codec
    charged = ChargedCodec(codec, coding, comm)
    coding.seconds(charged.name, "encode", 0)  # raises now, not in the first round
    return charged


def told_coding(traffic: Traffic, parameters: Iterable[Tensor]) -> str | None:
    """Whether what a rank encoded was "charged" or "not charged"; None: it sent its values as they are.

    Encoded is what travels as whole numbers, or in fewer bytes a value than the parameters have.
    """
    if traffic.charged_values:
        return "charged"
    widths = [parameter.itemsize for parameter in parameters if parameter.is_floating_point()]
    coded = 0
    for name, num_bytes in traffic.bytes_by_dtype.items():
        dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
        if not dtype.is_floating_point or dtype.itemsize < max(widths, default=0):
            coded += num_bytes
    return "not charged" if coded > _LEAST_SHARE * sum(traffic.bytes_by_dtype.values()) else None


class ChargedCodec(Codec):
    """Another codec, with time passing at each call.

    Args:
        codec: does the work.
        coding: the speeds.
        comm: whose clock goes on.
    """

    def __init__(self, codec: Codec, coding: Coding, comm: Communicator) -> None:
        self.codec, self.name, self.limit = codec, codec_name(codec), codec.limit
        self._coding, self._comm = coding, comm

    def encode(self, values: Tensor) -> Tensor:
        """As the codec does."""
        charge(self._comm, self._coding, self.name, "encode", len(values))
        return self.codec.encode(values)

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """As the codec does."""
        charge(self._comm, self._coding, self.name, "decode", num_values)
        return self.codec.decode(message, num_values)

    def encoded_bytes(self, num_values: int) -> int:
        """As the codec does."""
        return self.codec.encoded_bytes(num_values)

    def on(self, device: torch.device) -> Codec:
        """The same charge for what the codec does there."""
        return ChargedCodec(self.codec.on(device), self._coding, self._comm)
