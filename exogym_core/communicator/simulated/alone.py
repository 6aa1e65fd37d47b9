"""One rank without the others: they are taken to do what it does, so whatever it posts is complete at once.

For code in which no rank goes by what others have sent, and for tensors without values: what comes of a call then has
the shapes that it has among real peers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
from exogym_core.communicator.simulated.port import RankState
from exogym_core.communicator.simulated.simulation import Schedules, World
from exogym_core.communicator.values import Outcome, combine
from netsim.files.errors import InputError
from netsim.ranks.requests import Advance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from exogym_core.communicator.exchange import Signature
    from netsim.ranks.requests import Answer, Key, Question, Request

__all__ = ["Computing", "run_alone"]


class Computing(NamedTuple):
    """A share of a step's computing, whatever that takes on a rank's host."""

    step: int
    share: float


class _Alone:
    """A port behind which there is nobody: requests are kept, and values are everybody's own."""

    copies = False

    def __init__(self) -> None:
        self.requests: list[Request | Computing] = []

    def request(self, request: Request) -> None:
        self.requests.append(request)

    def post(
        self,
        key: Key,
        ranks: tuple[int, ...],
        member: int,
        signature: Signature,
        tensors: Sequence[Tensor],
        waits: bool = False,
    ) -> Outcome:
        if signature.name == "sendrecv":
            raise InputError("a rank alone has nobody to send to")
        if signature.name == "all_to_all":
            return Outcome(own={member: (tensors[member],) * len(ranks)})
        num = 1 if signature.name == "all_reduce" else len(ranks)  # a sum is as large as what it is of
        return combine(signature.name, [tensors] * num, signature.reduce_op, signature.root)

    def take(self, ticket: Outcome, member: int) -> tuple[Tensor, ...]:
        return ticket.of(member)

    def taken(self, ticket: Outcome) -> None:
        """Nothing to give back."""

    def ready(self, ticket: Outcome, member: int) -> bool:
        return True

    def forget(self, ticket: Outcome, member: int) -> None:
        """Nothing is kept."""

    def deposit(self, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Nobody looks on."""

    def flush(self) -> None:
        """There is no clock."""

    def ask(self, question: Question) -> Answer:
        raise InputError("a rank alone has no clock to ask")


def run_alone(
    body: Callable[[SimulatedCommunicator, Callable[[int, float], None]], None],
    num_ranks: int,
    collectives: str | Mapping[str, str] | None = "auto",
    rank: int = 0,
) -> list[Request | Computing]:
    """What `rank` of `num_ranks` requests, if that does not depend on what others send.

    Args:
        body: called with its communicator, and with what tells (step, share) of computing.
        num_ranks: of the world that it takes itself to be in.
        collectives: as `run_ranks` has them.
        rank: which it is.

    Raises:
        InputError: it sends to a single rank, or asks for the time.
    """
    port, state = _Alone(), RankState()
    book = Schedules(World.build(num_ranks, None, None, None, collectives))
    comm = SimulatedCommunicator(port, range(num_ranks), rank, book, state)

    def computing(step: int, share: float) -> None:
        if state.pending_seconds:
            port.request(Advance(state.pending_seconds))
            state.pending_seconds = 0.0
        port.requests.append(Computing(step, share))

    body(comm, computing)
    if state.pending_seconds:
        port.request(Advance(state.pending_seconds))
    return port.requests
