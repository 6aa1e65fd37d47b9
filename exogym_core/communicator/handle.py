"""What a communicator gives back beside tensors: calls in flight, and how much has been sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["Handle", "Traffic"]

T = TypeVar("T")


@dataclass
class Traffic:
    """What one rank has sent so far, in bytes.

    Attributes:
        bytes_sent: payload that left this rank, headers not counted.
        wan_bytes: the part of it that went to another region (0 where the transport knows no regions).
        payload_bytes: every message counted once in its encoded form, as papers count.
        bytes_by_dtype: the same bytes by the dtype of what was sent, such as "torch.uint8".
        charged_values: values whose encoding or decoding has been charged.
    """

    bytes_sent: int = 0
    wan_bytes: int = 0
    payload_bytes: int = 0
    bytes_by_dtype: dict[str, int] = field(default_factory=dict, compare=False)
    charged_values: int = field(default=0, compare=False)

    def count(self, tensors: Sequence[Tensor]) -> None:
        """Count a message of these tensors."""
        for tensor in tensors:
            num_bytes, dtype = tensor.nbytes, str(tensor.dtype)
            self.payload_bytes += num_bytes
            self.bytes_by_dtype[dtype] = self.bytes_by_dtype.get(dtype, 0) + num_bytes


class Handle(ABC, Generic[T]):
    """An operation in flight; `wait()` returns what the synchronous call would have returned."""

    @abstractmethod
    def wait(self) -> T:
        """Block until the result is there. Raises what the operation raised. May be called again."""

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether `wait()` would return at once; on a simulated network, at this rank's virtual time."""

    def cancel(self) -> bool:
        """Take a message back that the other side has not called for yet; returns whether that was so.

        A receive that is cancelled takes nothing: the next one of the same sender and tag gets the message. Wait
        for the handle only where this returns False.

        Raises:
            InputError: the operation is a collective, which others count on.
        """
        raise InputError("cancel: only messages can be cancelled; wait for the handle")
