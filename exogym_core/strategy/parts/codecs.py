"""Codecs: flat tensors to bytes on the wire and back, their sizes, and the virtual time of coding."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from netsim.errors import unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from exogym_core.communicator.base import Traffic

__all__ = [
    "CODECS",
    "AveragersPieces",
    "BlockCodec",
    "Blockwise8BitCodec",
    "CastCodec",
    "ChargedCodec",
    "Codec",
    "E3M0Codec",
    "HeadedCodec",
    "Int8Codec",
    "PiecewiseCodec",
    "Quantile8BitCodec",
    "ScaledFloat16Codec",
    "Uniform8BitCodec",
    "codec_name",
    "codec_named",
    "coding_report",
    "in_rows",
    "pack",
    "packed_bytes",
    "read_as",
    "unpack",
]


def read_as(message: Tensor, dtype: torch.dtype) -> Tensor:
    """`message` (flat uint8) as values of `dtype`, without a copy where its position in memory allows it."""
    if message.storage_offset() % dtype.itemsize:
        message = message.clone()
    return message.view(dtype)


class Codec(ABC):
    """Encodes flat tensors of numbers as flat uint8 messages, which carry all that decoding needs.

    Attributes:
        name: in CODECS; empty for user-defined codecs.
        limit: the largest finite magnitude; larger values saturate to it.
    """

    name = ""
    limit = math.inf

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """`values` (1-D, floating) as a 1-D uint8 tensor of `encoded_bytes(len(values))`."""

    @abstractmethod
    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """The `num_values` values of `message`, in fp32, or in a wider dtype if they travel in it."""

    @abstractmethod
    def encoded_bytes(self, num_values: int) -> int:
        """Size of the message for `num_values` values."""

    def on(self, device: torch.device) -> Codec:
        """Codec for tensors on `device`; on the meta device messages have sizes but no values."""
        return _SizesAlone(self) if device.type == "meta" else self


class _WrappedCodec(Codec):
    """Codec whose messages are another's."""

    def __init__(self, codec: Codec) -> None:
        self.codec, self.name, self.limit = codec, codec_name(codec), codec.limit

    def encoded_bytes(self, num_values: int) -> int:
        return self.codec.encoded_bytes(num_values)


class _SizesAlone(_WrappedCodec):
    """Sizes of a codec's messages, without values to encode."""

    def encode(self, values: Tensor) -> Tensor:
        return values.new_empty(self.encoded_bytes(len(values)), dtype=torch.uint8)

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        return message.new_empty(num_values, dtype=torch.float32)


class CastCodec(Codec):
    """Cast to another floating dtype; finite values beyond it become its largest one, infinity and NaN stay.

    8-bit dtypes without infinity, such as `torch.float8_e4m3fn`, hold what torch makes of it: NaN or the largest value.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.limit = dtype, torch.finfo(dtype).max
        # Torch promotes no 8-bit dtypes.
        self.decoded = max(torch.float32, dtype, key=lambda each: each.itemsize)

    def encode(self, values: Tensor) -> Tensor:
        limit = min(self.limit, torch.finfo(values.dtype).max)
        held = values.clamp(-limit, limit)
        return values.where(values.isinf(), held).to(self.dtype).view(torch.uint8)

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        return read_as(message, self.dtype).to(self.decoded)

    def encoded_bytes(self, num_values: int) -> int:
        return num_values * self.dtype.itemsize


# --- a head, and a code for each value -----------------------------------------------------------------------

_WHOLE_BYTES = {8: torch.uint8, 16: torch.int16}


def in_rows(values: Tensor, width: int) -> Tensor:
    """Flat `values` in rows of `width`, the last one filled with zeros."""
    return torch.nn.functional.pad(values, (0, -len(values) % width)).view(-1, width)


def packed_bytes(num_codes: int, bits: int) -> int:
    """Bytes of `num_codes` codes of `bits` bits each: the last byte is padded."""
    return -(-num_codes * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """`codes` (1-D, integers from 0 to below `2 ** bits`) as flat uint8, the lowest bit of the first code first.

    >>> pack(torch.tensor([1, 2, 3]), 12).tolist()
    [1, 32, 0, 3, 0]
    """
    if bits in _WHOLE_BYTES:
        return codes.to(_WHOLE_BYTES[bits]).view(torch.uint8)
    of_code, of_byte = _places(bits, codes.device)
    words = (in_rows(codes.to(of_code.dtype), len(of_code)) << of_code).sum(1, dtype=of_code.dtype)
    return (words[:, None] >> of_byte & 255).to(torch.uint8).view(-1)[: packed_bytes(len(codes), bits)]


def unpack(message: Tensor, bits: int, num_codes: int) -> Tensor:
    """The `num_codes` codes that were packed into `message`, as integers of some width; of 16 bits in int16.

    >>> unpack(pack(torch.tensor([1, 2, 3]), 12), 12, 3).tolist()
    [1, 2, 3]
    """
    if bits in _WHOLE_BYTES:
        return read_as(message, _WHOLE_BYTES[bits])
    of_code, of_byte = _places(bits, message.device)
    words = (in_rows(message, len(of_byte)).to(of_byte.dtype) << of_byte).sum(1, dtype=of_byte.dtype)
    codes: Tensor = words[:, None] >> of_code & 2**bits - 1
    return codes.view(-1)[:num_codes]


def _places(bits: int, device: torch.device) -> list[Tensor]:
    """Places of codes, and of bytes, in the smallest word that whole numbers of both fill."""
    word = math.lcm(bits, 8)
    dtype = torch.uint8 if word == 8 else torch.int64
    return [torch.arange(0, word, step, dtype=dtype, device=device) for step in (bits, 8)]


class HeadedCodec(Codec):
    """Codec of a head of fp32 numbers, and a code of `bits` bits for each value."""

    bits: int

    @abstractmethod
    def num_head(self, num_values: int) -> int:
        """Count of numbers in the head."""

    @abstractmethod
    def coded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Head, and code of each of the flat `values`."""

    @abstractmethod
    def restored(self, head: Tensor, codes: Tensor) -> Tensor:
        """The values in fp32 that the codes stand for under this head."""

    def encode(self, values: Tensor) -> Tensor:
        # Of plans, in which only sizes count: torch takes long to find the shape of each operation.
        if values.is_meta:
            return values.new_empty(self.encoded_bytes(len(values)), dtype=torch.uint8)
        head, codes = self.coded(values)
        return torch.cat([head.view(torch.uint8), pack(codes, self.bits)])

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        if message.is_meta:
            return message.new_empty(num_values, dtype=torch.float32)
        start = 4 * self.num_head(num_values)
        codes = unpack(message[start:], self.bits, num_values)
        return self.restored(read_as(message[:start], torch.float32), codes)

    def encoded_bytes(self, num_values: int) -> int:
        return 4 * self.num_head(num_values) + packed_bytes(num_values, self.bits)


class BlockCodec(HeadedCodec):
    """Codec with a scale for each block of `chunk` values: its largest absolute value over `largest`.

    A block that holds NaN or infinity decodes to NaN.
    """

    bits = 8
    chunk: int
    largest: float = 1

    def __init__(self, chunk: int | None = None) -> None:
        self.chunk = self.chunk if chunk is None else chunk

    @abstractmethod
    def nearest(self, levels: Tensor) -> Tensor:
        """Code of each of `levels`, which lie between `-largest` and `largest`."""

    @abstractmethod
    def levels(self, codes: Tensor) -> Tensor:
        """The levels that these codes stand for, in fp32."""

    def num_head(self, num_values: int) -> int:
        return -(-num_values // self.chunk)

    def coded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        blocks = in_rows(values.float(), self.chunk)
        scales = blocks.abs().amax(dim=1) / self.largest if len(values) else blocks.new_zeros(0)
        levels = blocks / scales.where(scales > 0, 1.0)[:, None]
        codes = self.nearest(levels.nan_to_num(0.0)).view(-1)[: len(values)]
        return scales.where(scales.isfinite(), torch.nan), codes

    def restored(self, head: Tensor, codes: Tensor) -> Tensor:
        return self.levels(codes) * head.repeat_interleave(self.chunk)[: len(codes)]


class Int8Codec(BlockCodec):
    """Codec of a signed byte per value, and an fp32 scale per chunk: `round(127 x / max |x|)` within each chunk."""

    chunk, largest = 1024, 127

    def nearest(self, levels: Tensor) -> Tensor:
        return levels.round().clamp(-127, 127).to(torch.int8).view(torch.uint8)

    def levels(self, codes: Tensor) -> Tensor:
        return codes.view(torch.int8).float()


def _dynamic_levels() -> Tensor:
    """The 256 levels of dynamic 8-bit numbers, sorted.

    0, 1, and of either sign `2**i` levels in the decade that ends at `10**(i - 6)`, i from 0 to 6, at the
    midpoints of equal parts: relative resolution grows with the magnitude.
    """
    decades = []
    for i in range(7):
        parts = torch.linspace(0.1, 1.0, 2**i + 1, dtype=torch.float64)
        decades.append((parts[:-1] + parts[1:]) / 2 * 10.0 ** (i - 6))
    positive = torch.cat(decades)
    return torch.cat([-positive, positive, torch.tensor([0.0, 1.0])]).sort().values.float()


class Blockwise8BitCodec(BlockCodec):
    """Codec of a byte per value, the nearest level of a dynamic 8-bit number; scaled by `max |x|` of 4096 values.

    The levels are fixed, and so do not travel (OpenDiLoCo sends them too, 1 KiB a message).

    References:
        Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861, section 2.
    """

    chunk = 4096

    def __init__(self, chunk: int | None = None) -> None:
        super().__init__(chunk)
        self._table = _dynamic_levels()
        self._borders = (self._table[:-1] + self._table[1:]) / 2

    def nearest(self, levels: Tensor) -> Tensor:
        return torch.bucketize(levels, self._borders.to(levels.device), out_int32=True)

    def levels(self, codes: Tensor) -> Tensor:
        return self._table.to(codes.device)[codes.int()]


class E3M0Codec(BlockCodec):
    """Half a byte a value: a sign and three bits of exponent, and one fp32 scale s, `max |x|`, of 256 values.

    Level 0 is 0, level L from 1 to 7 is `2 ** (L - 7) s`; the nearest in logarithm is taken.

    References:
        Douillard et al., Streaming DiLoCo, arXiv 2501.18512, section 3.3: four bits without a mantissa. How values are
        scaled is not described there: blocks of 256 follow other authors' code.
    """

    bits, chunk = 4, 256

    def nearest(self, levels: Tensor) -> Tensor:
        exponents = (levels.abs().log2().nan_to_num(neginf=-99.0).round() + 7).clamp(0, 7).to(torch.uint8)
        return exponents | (levels < 0).to(torch.uint8) << 3

    def levels(self, codes: Tensor) -> Tensor:
        exponents = (codes & 7).float()
        magnitudes = torch.where(exponents > 0, (exponents - 7).exp2(), 0.0)
        return torch.where(codes & 8 > 0, -magnitudes, magnitudes)


# --- codecs of pieces ----------------------------------------------------------------------------------------


class PiecewiseCodec(Codec):
    """Codec of a flat tensor in pieces, with one message each, concatenated."""

    @abstractmethod
    def pieces(self, num_values: int) -> Sequence[tuple[int, Codec]]:
        """Size and codec of each piece."""

    def encode(self, values: Tensor) -> Tensor:
        pieces = self.pieces(len(values))
        parts = torch.split(values, [size for size, _ in pieces])
        messages = [codec.encode(part) for (_, codec), part in zip(pieces, parts, strict=True)]
        return torch.cat([values.new_empty(0, dtype=torch.uint8), *messages])

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        pieces = self.pieces(num_values)
        messages = torch.split(message, [codec.encoded_bytes(size) for size, codec in pieces])
        parts = [codec.decode(each, size) for (size, codec), each in zip(pieces, messages, strict=True)]
        return torch.cat([message.new_empty(0, dtype=torch.float32), *parts])

    def encoded_bytes(self, num_values: int) -> int:
        return sum(codec.encoded_bytes(size) for size, codec in self.pieces(num_values))


class AveragersPieces(PiecewiseCodec):
    """Pieces of 512 KiB of fp32, which OpenDiLoCo's averager compresses at a time."""

    chunk = 2**17

    def __init__(self, codec: Codec) -> None:
        self.codec = codec

    def pieces(self, num_values: int) -> list[tuple[int, Codec]]:
        return [(min(self.chunk, num_values - at), self.codec) for at in range(0, num_values, self.chunk)]


class _FiniteCodec(HeadedCodec):
    """Codec of finite values; if there is NaN or infinity among them, all decode to NaN."""

    @abstractmethod
    def coded_finite(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Head and codes of finite `values` in fp32."""

    def coded(self, values: Tensor) -> tuple[Tensor, Tensor]:
        wide = values.float()
        head, codes = self.coded_finite(wide.nan_to_num(0.0, 0.0, 0.0))
        return head.where(wide.isfinite().all(), torch.nan), codes


class ScaledFloat16Codec(_FiniteCodec):
    """fp16 after the mean is taken off and the rest divided by its root mean square; both travel in fp32."""

    bits = 16

    def num_head(self, num_values: int) -> int:
        return 2

    def coded_finite(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation, and the rest in units of it."""
        mean, deviation = _moments(values)
        unit = deviation.where(deviation > 0, 1.0)
        codes = ((values - mean) / unit).to(torch.float16).view(torch.int16)
        return torch.stack([mean, deviation]), codes

    def restored(self, head: Tensor, codes: Tensor) -> Tensor:
        return codes.view(torch.float16).float() * head[1] + head[0]


class _CodebookCodec(_FiniteCodec):
    """Codec of a byte per value, the number of its bin, and 256 fp32 numbers: the means of the bins."""

    bits = 8

    @abstractmethod
    def bins(self, values: Tensor) -> Tensor:
        """The bin of each value, from 0 to 255, in int64."""

    def num_head(self, num_values: int) -> int:
        return 256

    def coded_finite(self, values: Tensor) -> tuple[Tensor, Tensor]:
        bins = self.bins(values)
        counts = torch.bincount(bins, minlength=256)
        sums = torch.zeros(256, device=values.device).scatter_add_(0, bins, values)
        return sums / counts.clamp(min=1), bins

    def restored(self, head: Tensor, codes: Tensor) -> Tensor:
        return head[codes.int()]


class Uniform8BitCodec(_CodebookCodec):
    """256 bins of `6/256` standard deviations each around the mean; the outermost two take all beyond."""

    def bins(self, values: Tensor) -> Tensor:
        mean, deviation = _moments(values)
        width = deviation * 6 / 256
        places = (values - mean) / width.where(width > 0, 1.0)
        return (places.round() + 128).clamp(0, 255).long()


class Quantile8BitCodec(_CodebookCodec):
    """256 bins with equally many values each: the smallest 256th, the next, and so on."""

    def bins(self, values: Tensor) -> Tensor:
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
    "quantile8bit": AveragersPieces(Quantile8BitCodec()),
    "scaled-fp16": AveragersPieces(ScaledFloat16Codec()),
    "uniform8bit": AveragersPieces(Uniform8BitCodec()),
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
    if not isinstance(codec, str) or codec not in CODECS:
        raise unknown_name("codec", str(codec), CODECS)
    return CODECS[codec]


_LEAST_SHARE = 0.01  # of the payload, to count as coded: flags and counters do not


def coding_report(traffic: Traffic, parameters: Iterable[Tensor]) -> str | None:
    """State of a rank's coding, "charged" or "not charged"; None: it sent its values as they are.

    Values are encoded if they travel as integers, or in fewer bytes each than the parameters. Downloaded states, and
    values on boundaries of stages without a codec, are not.
    """
    if traffic.charged_values:
        return "charged"
    widths = [parameter.itemsize for parameter in parameters if parameter.is_floating_point()]
    coded = 0
    for name, num_bytes in traffic.bytes_by_dtype.items():
        dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
        if not dtype.is_floating_point or dtype.itemsize < max(widths, default=0):
            coded += num_bytes
    return "not charged" if coded > _LEAST_SHARE * traffic.payload_bytes else None


class ChargedCodec(_WrappedCodec):
    """Codec whose encoding and decoding take virtual time.

    Args:
        codec: does the work.
        charge: advances virtual time, given the codec's name, "encode" or "decode", and the number of values.
    """

    def __init__(self, codec: Codec, charge: Callable[[str, str, int], None]) -> None:
        super().__init__(codec)
        self._charge = charge

    def encode(self, values: Tensor) -> Tensor:
        self._charge(self.name, "encode", len(values))
        return self.codec.encode(values)

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        self._charge(self.name, "decode", num_values)
        return self.codec.decode(message, num_values)

    def on(self, device: torch.device) -> Codec:
        return ChargedCodec(self.codec.on(device), self._charge)
