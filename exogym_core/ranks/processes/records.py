"""What travels between the process of the simulation and those of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.ranks.processes.arena import blocks_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from exogym_core.communicator.exchange import Signature
    from exogym_core.communicator.simulated.port import RankState
    from exogym_core.ranks.processes.arena import Block, TensorRef
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
    """`rank` waits for its values as a member of a call."""

    rank: int
    key: Key
    member: int


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
    """These parts of the arena have been read; to ranks: they are yours to use again."""

    blocks: list[Block]


# --- to ranks ----------------------------------------------------------------------------------------------


class Done(NamedTuple):
    """The values of a call for some `members` that live in one process; `own` where they differ.

    `freed` are parts of the arena that this process may use again.
    """

    key: Key
    members: tuple[int, ...]
    shared: list[TensorRef]
    own: dict[int, list[TensorRef]]
    error: MismatchError | BrokenCallError | None
    freed: list[Block]

    @property
    def blocks(self) -> list[Block]:
        """The parts of the arena that these values lie in."""
        return blocks_in([*self.shared, *(ref for refs in self.own.values() for ref in refs)])


class Answered(NamedTuple):
    """The clock's answer to `rank`."""

    rank: int
    value: Answer


class Abort(NamedTuple):
    """The run has failed: unwind."""

    reason: str
