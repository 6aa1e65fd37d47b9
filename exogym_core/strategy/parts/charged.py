"""A codec whose work costs virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exogym_core.strategy.parts.codecs import Codec

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

__all__ = ["ChargedCodec"]


class ChargedCodec(Codec):
    """Another codec, with time passing at each call.

    Args:
        codec: does the work.
        seconds: of encoding and decoding: `(codec's name, "encode" or "decode", number of values)`.
        advance: lets so many seconds pass, as `Communicator.advance`.
    """

    def __init__(
        self, codec: Codec, seconds: Callable[[str, str, int], float], advance: Callable[[float], None]
    ) -> None:
        self.codec, self.name, self.limit = codec, codec.name or type(codec).__name__, codec.limit
        self._seconds, self._advance = seconds, advance

    def encode(self, values: Tensor) -> Tensor:
        """As the codec does."""
        self._advance(self._seconds(self.name, "encode", len(values)))
        return self.codec.encode(values)

    def decode(self, message: Tensor, num_values: int) -> Tensor:
        """As the codec does."""
        self._advance(self._seconds(self.name, "decode", num_values))
        return self.codec.decode(message, num_values)

    def encoded_bytes(self, num_values: int) -> int:
        """As the codec does."""
        return self.codec.encoded_bytes(num_values)

    def on(self, device: torch.device) -> Codec:
        """The same charge for what the codec does there."""
        return ChargedCodec(self.codec.on(device), self._seconds, self._advance)
