"""Codecs: flat tensors to bytes on the wire and back, their sizes, and the virtual time of coding."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from netsim.errors import unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from exogym_core.communicator.base import Communicator, Traffic
    from exogym_core.cost.compute import Coding

__all__ = [
    "CODECS",
    "Blockwise8BitCodec",
    "CastCodec",
    "ChargedCodec",
    "Codec",
    "E3M0Codec",
    "Int8Codec",
    "Quantile8BitCodec",
    "ScaledFloat16Codec",
    "Uniform8BitCodec",
    "charge",
    "charged_codec",
    "codec_name",
    "codec_named",
    "coding_report",
    "read_as",
]


def read_as(message: Tensor, dtype: torch.dtype) -> Tensor:
    """`message` (flat uint8) as values of `dtype`, without a copy where its position in memory allows it."""
    if message.storage_offset() % dtype.itemsize:
        message = message.clone()
    return message.view(dtype)


class Codec(ABC):
    """Flat tensors of numbers to flat uint8 messages and back. Messages carry all that decoding needs.

    Attributes:
        name: in CODECS; empty for one of one's own.
        limit: the largest finite magnitude that comes back; what is larger comes back as that.
    """

    name = ""
    limit = math.inf

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """`values` (1-D, floating) as a 1-D uint8 tensor of `encoded_bytes(len(values))`."""

    @abstractmethod
    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """The `num_values` values that `message` stands for, in fp32."""

    @abstractmethod
    def encoded_bytes(self, num_values: int) -> int:
        """Size of the message for `num_values` values."""

    def on(self, device: torch.device) -> Codec:
        """Codec for tensors on `device`: on the meta device one whose messages have sizes and no values."""
        return _SizesAlone(self) if device.type == "meta" else self


class _SizesAlone(Codec):
    """Sizes of a codec's messages, without values to encode."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.name, self.limit = codec, codec.name, codec.limit

    def encode(self, values: Tensor) -> Tensor:
        """Empty message of the codec's size."""
        return values.new_empty(self.encoded_bytes(len(values)), dtype=torch.uint8)

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """Empty values in fp32."""
        return message.new_empty(num_values, dtype=torch.float32)

    def encoded_bytes(self, num_values: int) -> int:
        """Size of the codec's message."""
        return self.codec.encoded_bytes(num_values)


class CastCodec(Codec):
    """Cast to another floating dtype; finite values beyond it become its largest one, infinity and NaN stay."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.limit = dtype, torch.finfo(dtype).max

    def encode(self, values: Tensor) -> Tensor:
        """Clamp finite values to the dtype's range, and cast."""
        held = values.clamp(-self.limit, self.limit)
        return values.where(values.isinf(), held).to(self.dtype).view(torch.uint8)

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """Cast back to fp32."""
        return read_as(message, self.dtype).float()

    def encoded_bytes(self, num_values: int) -> int:
        """Two bytes a value for fp16 and bf16."""
        return num_values * self.dtype.itemsize


class _BlockCodec(Codec):
    """Codec of a byte per value, and an fp32 scale per block: its largest absolute value over `largest`."""

    largest: float

    def __init__(self, chunk: int) -> None:
        self.chunk = chunk

    def encode(self, values: Tensor) -> Tensor:
        """Scales first, then the bytes. A block that holds NaN or infinity decodes to NaN."""
        padding = -len(values) % self.chunk
        chunks = torch.nn.functional.pad(values.float(), (0, padding)).view(-1, self.chunk)
        scales = chunks.abs().amax(dim=1) / self.largest if len(values) else chunks.new_zeros(0)
        levels = chunks / scales.where(scales > 0, 1.0)[:, None]
        codes = self._codes(levels.nan_to_num(0.0)).view(torch.uint8).view(-1)
        scales = scales.where(scales.isfinite(), torch.nan)
        return torch.cat([scales.view(torch.uint8), codes[: len(values)]])

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """Multiply each level by its block's scale."""
        num_scale_bytes = 4 * self._num_chunks(num_values)
        scales = read_as(message[:num_scale_bytes], torch.float32)
        levels = self._levels(message[num_scale_bytes:])
        return levels * scales.repeat_interleave(self.chunk)[:num_values]

    def encoded_bytes(self, num_values: int) -> int:
        """Count a byte per value and four per block."""
        return num_values + 4 * self._num_chunks(num_values)

    def _num_chunks(self, num_values: int) -> int:
        return -(-num_values // self.chunk)

    @abstractmethod
    def _codes(self, levels: Tensor) -> Tensor:
        """A byte for each of `levels`, which lie between `-largest` and `largest`."""

    @abstractmethod
    def _levels(self, codes: Tensor) -> Tensor:
        """The levels that these bytes stand for, in fp32."""


class Int8Codec(_BlockCodec):
    """Codec of a signed byte per value, and an fp32 scale per chunk: `round(127 x / max |x|)` within each chunk."""

    largest = 127

    def __init__(self, chunk: int = 1024) -> None:
        super().__init__(chunk)

    def _codes(self, levels: Tensor) -> Tensor:
        return levels.round().clamp(-127, 127).to(torch.int8)

    def _levels(self, codes: Tensor) -> Tensor:
        return codes.view(torch.int8).float()


def _dynamic_levels() -> Tensor:
    """The 256 levels of dynamic 8-bit numbers, sorted.

    Besides 0 and 1 there are, of either sign, `2**i` levels in the decade that ends at `10**(i - 6)`, i from
    0 to 6, in the middles of as many equal parts: relative resolution grows with the magnitude.
    """
    decades = []
    for i in range(7):
        parts = torch.linspace(0.1, 1.0, 2**i + 1, dtype=torch.float64)
        decades.append((parts[:-1] + parts[1:]) / 2 * 10.0 ** (i - 6))
    positive = torch.cat(decades)
    return torch.cat([-positive, positive, torch.tensor([0.0, 1.0])]).sort().values.float()


class Blockwise8BitCodec(_BlockCodec):
    """Codec of a byte per value, the nearest level of a dynamic 8-bit number; scaled by `max |x|` of 4096 values.

    The levels are fixed, and so do not travel (OpenDiLoCo sends them too, 1 KiB a message).

    References:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861, section 2.
    """

    largest = 1

    def __init__(self, chunk: int = 4096) -> None:
        super().__init__(chunk)
        self._table = _dynamic_levels()
        self._borders = (self._table[:-1] + self._table[1:]) / 2

    def _codes(self, levels: Tensor) -> Tensor:
        return torch.bucketize(levels, self._borders.to(levels.device), out_int32=True).to(torch.uint8)

    def _levels(self, codes: Tensor) -> Tensor:
        return self._table.to(codes.device)[codes.int()]


class E3M0Codec(_BlockCodec):
    """Half a byte a value: a sign and three bits of exponent, and one fp32 scale s, `max |x|`, of 256 values.

    Level 0 is 0, level L from 1 to 7 is `2 ** (L - 7) s`; the nearest in logarithm is taken.

    References:
        Douillard et al., Streaming DiLoCo, arXiv 2501.18512, section 3.3: four bits without a mantissa. How values are
        scaled is not said there: blocks of 256 follow others' code.
    """

    largest = 1

    def __init__(self, chunk: int = 256) -> None:
        super().__init__(chunk)

    def encode(self, values: Tensor) -> Tensor:
        """Scales first, then two values a byte, the first in the lower half."""
        message = super().encode(values)
        start = 4 * self._num_chunks(len(values))
        codes = torch.nn.functional.pad(message[start:], (0, len(values) % 2))
        return torch.cat([message[:start], codes[::2] | codes[1::2] << 4])

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """Multiply each level by its block's scale."""
        start = 4 * self._num_chunks(num_values)
        pairs = message[start:]
        codes = torch.stack([pairs & 15, pairs >> 4], dim=1).view(-1)[:num_values]
        return super().decode(torch.cat([message[:start], codes]), num_values)

    def encoded_bytes(self, num_values: int) -> int:
        """Half a byte a value, rounded up, and four a block."""
        return -(-num_values // 2) + 4 * self._num_chunks(num_values)

    def _codes(self, levels: Tensor) -> Tensor:
        exponents = (levels.abs().log2().nan_to_num(neginf=-99.0).round() + 7).clamp(0, 7).to(torch.uint8)
        return exponents | (levels < 0).to(torch.uint8) << 3

    def _levels(self, codes: Tensor) -> Tensor:
        exponents = (codes & 7).float()
        magnitudes = torch.where(exponents > 0, (exponents - 7).exp2(), 0.0)
        return torch.where(codes & 8 > 0, -magnitudes, magnitudes)


class _HeadedCodec(Codec):
    """Values in pieces, each with a head of its own of `num_head` fp32 numbers before its codes."""

    #: Values in the 512 KiB of fp32 that OpenDiLoCo's averager compresses at a time.
    chunk = 2**17
    num_head: int
    code_dtype: torch.dtype

    def encode(self, values: Tensor) -> Tensor:
        """Head and codes of each piece in turn. A piece that holds NaN or infinity decodes to NaN."""
        parts = [torch.empty(0, dtype=torch.uint8, device=values.device)]
        for piece in torch.split(values.float(), self.chunk) if len(values) else ():
            head, codes = self._encode_piece(piece.nan_to_num(0.0, 0.0, 0.0))
            head = head.where(piece.isfinite().all(), torch.nan)
            parts += [head.view(torch.uint8), codes.view(torch.uint8)]
        return torch.cat(parts)

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """The pieces, one after the other."""
        pieces = [torch.empty(0, device=message.device)]
        for start in range(0, num_values, self.chunk):
            code_bytes = min(self.chunk, num_values - start) * self.code_dtype.itemsize
            head, codes, message = message.tensor_split([4 * self.num_head, 4 * self.num_head + code_bytes])
            pieces.append(self._decode_piece(read_as(head, torch.float32), read_as(codes, self.code_dtype)))
        return torch.cat(pieces)

    def encoded_bytes(self, num_values: int) -> int:
        """The codes, and a head for each piece."""
        num_pieces = -(-num_values // self.chunk)
        return num_values * self.code_dtype.itemsize + 4 * self.num_head * num_pieces

    @abstractmethod
    def _encode_piece(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Head and codes of finite `values`."""

    @abstractmethod
    def _decode_piece(self, head: Tensor, codes: Tensor) -> Tensor:
        """The values in fp32."""


class ScaledFloat16Codec(_HeadedCodec):
    """fp16 after the mean is taken off and the rest divided by its root mean square; both travel in fp32."""

    num_head = 2
    code_dtype = torch.float16

    def _encode_piece(self, values: Tensor) -> tuple[Tensor, Tensor]:
        mean, deviation = _moments(values)
        unit = deviation.where(deviation > 0, 1.0)
        return torch.stack([mean, deviation]), ((values - mean) / unit).to(torch.float16)

    def _decode_piece(self, head: Tensor, codes: Tensor) -> Tensor:
        return codes.float() * head[1] + head[0]


class _CodebookCodec(_HeadedCodec):
    """Codec of a byte per value, the number of its bin, and 256 fp32 numbers per piece: the means of the bins."""

    num_head = 256
    code_dtype = torch.uint8

    def _encode_piece(self, values: Tensor) -> tuple[Tensor, Tensor]:
        bins = self._bins(values)
        counts = torch.bincount(bins, minlength=256)
        sums = torch.zeros(256, device=values.device).scatter_add_(0, bins, values)
        return sums / counts.clamp(min=1), bins.to(torch.uint8)

    def _decode_piece(self, head: Tensor, codes: Tensor) -> Tensor:
        return head[codes.int()]

    @abstractmethod
    def _bins(self, values: Tensor) -> Tensor:
        """The bin of each value, from 0 to 255, in int64."""


class Uniform8BitCodec(_CodebookCodec):
    """256 bins of `6/256` standard deviations each around the mean; the outermost two take all beyond."""

    def _bins(self, values: Tensor) -> Tensor:
        mean, deviation = _moments(values)
        width = deviation * 6 / 256
        places = (values - mean) / width.where(width > 0, 1.0)
        return (places.round() + 128).clamp(0, 255).long()


class Quantile8BitCodec(_CodebookCodec):
    """256 bins with equally many values each: the smallest 256th, the next, and so on."""

    def _bins(self, values: Tensor) -> Tensor:
        order = values.argsort(stable=True)
        ranks = torch.arange(len(values), device=values.device)
        return torch.empty_like(order).scatter_(0, order, ranks * 256 // len(values))


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and root mean square deviation of at least one value."""
    mean = values.mean()
    return mean, (values - mean).square().mean().sqrt()


#: Codec by name; None stands for the tensors' own dtype. Those of OpenDiLoCo have the names they have there.
CODECS: dict[str, Codec | None] = {
    "bf16": CastCodec(torch.bfloat16),
    "blockwise8bit": Blockwise8BitCodec(),
    "e3m0": E3M0Codec(),
    "fp16": CastCodec(torch.float16),
    "fp32": None,
    "int8": Int8Codec(),
    "none": None,
    "quantile8bit": Quantile8BitCodec(),
    "scaled-fp16": ScaledFloat16Codec(),
    "uniform8bit": Uniform8BitCodec(),
}
for _name, _codec in CODECS.items():
    if _codec is not None:
        _codec.name = _name


def codec_name(codec: Codec) -> str:
    """Name of a codec in `compute.coding`: its name, or its class's."""
    return codec.name or type(codec).__name__


def codec_named(codec: str | Codec | None) -> Codec | None:
    """The codec called `codec`; None, "none" and "fp32" are the tensors' own dtype, uncompressed.

    Raises:
        UnknownNameError: there is none of that name.
    """
    if codec is None or isinstance(codec, Codec):
        return codec
    if codec not in CODECS:
        raise unknown_name("codec", str(codec), CODECS)
    return CODECS[codec]


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


def coding_report(traffic: Traffic, parameters: Iterable[Tensor]) -> str | None:
    """State of a rank's coding, "charged" or "not charged"; None: it sent its values as they are.

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
    """Codec whose encoding and decoding take virtual time.

    Args:
        codec: does the work.
        coding: the speeds.
        comm: whose clock advances.
    """

    def __init__(self, codec: Codec, coding: Coding, comm: Communicator) -> None:
        self.codec, self.name, self.limit = codec, codec_name(codec), codec.limit
        self._coding, self._comm = coding, comm

    def encode(self, values: Tensor) -> Tensor:
        """Encode, on the clock."""
        charge(self._comm, self._coding, self.name, "encode", len(values))
        return self.codec.encode(values)

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """Decode, on the clock."""
        charge(self._comm, self._coding, self.name, "decode", num_values)
        return self.codec.decode(message, num_values)

    def encoded_bytes(self, num_values: int) -> int:
        """Size of the codec's message."""
        return self.codec.encoded_bytes(num_values)

    def on(self, device: torch.device) -> Codec:
        """Charge for the codec on that device."""
        return ChargedCodec(self.codec.on(device), self._coding, self._comm)
