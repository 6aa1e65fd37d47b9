"""What travels between the process of the simulation and those of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from exogym_core.communicator.exchange import Signature
    from exogym_core.communicator.simulated.port import RankState
    from exogym_core.ranks.processes.arena import TensorRef
    from netsim.files.errors import BrokenCallError, MismatchError, NetsimError
    from netsim.ranks.requests import Answer, Key, Request

__all__ = [
    "Abort",
    "Answered",
    "Asking",
    "Blocked",
    "Deposited",
    "Done",
    "Ended",
    "Failed",
    "Freed",
    "Requests",
    "Values",
]

# --- from ranks --------------------------------------------------------------------------------------------


class Requests(NamedTuple):
    """What `rank` has requested of the clock since the last flush."""

    rank: int
    requests: list[Request]


class Values(NamedTuple):
    """One member's values for a call."""

    rank: int
    key: Key
    ranks: tuple[int, ...]
    member: int
    signature: Signature
    refs: list[TensorRef]


class Blocked(NamedTuple):
    """`rank` waits for the values of a call."""

    rank: int
    key: Key


class Asking(NamedTuple):
    """`rank` waits for the clock's answer."""

    rank: int


class Ended(NamedTuple):
    """`rank` is through; its result is pickled."""

    rank: int
    result: bytes
    state: RankState


class Failed(NamedTuple):
    """`rank` has failed."""

    rank: int
    error: NetsimError


class Deposited(NamedTuple):
    """What `rank` hands over to the observer."""

    rank: int
    note: Mapping[str, Any]
    refs: list[TensorRef]


class Freed(NamedTuple):
    """These values have been taken; to ranks too, of what they have deposited."""

    refs: list[TensorRef]


# --- to ranks ----------------------------------------------------------------------------------------------


class Done(NamedTuple):
    """The values of a call for the members that live in one process; `own` where they differ."""

    key: Key
    shared: list[TensorRef]
    own: dict[int, list[TensorRef]]
    error: MismatchError | BrokenCallError | None


class Answered(NamedTuple):
    """The clock's answer to `rank`."""

    rank: int
    value: Answer


class Abort(NamedTuple):
    """The run has failed: unwind."""

    reason: str
