"""How numbers look on the wire: each codec turns a flat tensor into bytes and back, and knows the size."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from netsim.errors import unknown_name

__all__ = ["CODECS", "CastCodec", "Codec", "Int8Codec", "codec_named", "read_as"]


def read_as(message: Tensor, dtype: torch.dtype) -> Tensor:
    """`message` (flat uint8) as values of `dtype`, without a copy where its position in memory allows it."""
    if message.storage_offset() % dtype.itemsize:
        message = message.clone()
    return message.view(dtype)


class Codec(ABC):
    """Flat tensors of numbers to flat uint8 messages and back. Messages carry all that decoding needs."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """`values` (1-D, floating) as a 1-D uint8 tensor of `encoded_bytes(len(values))`."""

    @abstractmethod
    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """The `num_values` values that `message` stands for, in fp32."""

    @abstractmethod
    def encoded_bytes(self, num_values: int) -> int:
        """Size of the message for `num_values` values."""


class CastCodec(Codec):
    """Another floating dtype; what it cannot hold becomes its largest finite value."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, values: Tensor) -> Tensor:
        """Clamp and cast."""
        limit = torch.finfo(self.dtype).max
        return values.clamp(-limit, limit).to(self.dtype).view(torch.uint8)

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """Cast back to fp32."""
        return read_as(message, self.dtype).float()

    def encoded_bytes(self, num_values: int) -> int:
        """Two bytes a value for fp16 and bf16."""
        return num_values * self.dtype.itemsize


class Int8Codec(Codec):
    """One signed byte a value, and one fp32 scale a chunk: `round(127 x / max |x|)` within each chunk."""

    def __init__(self, chunk: int = 1024) -> None:
        self.chunk = chunk

    def encode(self, values: Tensor) -> Tensor:
        """Scales first, then the bytes. A chunk that holds NaN or infinity decodes to NaN."""
        padding = -len(values) % self.chunk
        chunks = torch.nn.functional.pad(values.float(), (0, padding)).view(-1, self.chunk)
        scales = chunks.abs().amax(dim=1) / 127 if len(values) else chunks.new_zeros(0)
        levels = chunks / scales.where(scales > 0, 1.0)[:, None]
        levels = levels.nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8).view(-1)
        scales = scales.where(scales.isfinite(), torch.nan)
        return torch.cat([scales.view(torch.uint8), levels[: len(values)].view(torch.uint8)])

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """Level times scale."""
        num_scale_bytes = 4 * self._num_chunks(num_values)
        scales = read_as(message[:num_scale_bytes], torch.float32)
        levels = message[num_scale_bytes:].view(torch.int8).float()
        return levels * scales.repeat_interleave(self.chunk)[:num_values]

    def encoded_bytes(self, num_values: int) -> int:
        """One byte a value and four a chunk."""
        return num_values + 4 * self._num_chunks(num_values)

    def _num_chunks(self, num_values: int) -> int:
        return -(-num_values // self.chunk)


#: Codec by name; None stands for the tensors' own dtype.
CODECS: dict[str, Codec | None] = {
    "bf16": CastCodec(torch.bfloat16),
    "fp16": CastCodec(torch.float16),
    "fp32": None,
    "int8": Int8Codec(),
}


def codec_named(codec: str | Codec | None) -> Codec | None:
    """The codec called `codec`; None and "fp32" are the tensors' own dtype, uncompressed.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if codec is None or isinstance(codec, Codec):
        return codec
    if codec not in CODECS:
        raise unknown_name("codec", str(codec), CODECS)
    return CODECS[codec]
