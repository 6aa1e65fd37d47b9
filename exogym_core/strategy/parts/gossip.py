"""Averages with neighbours instead of everyone: graphs, weights, and the exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import torch

from exogym_core.strategy.parts.average import Flight
from exogym_core.strategy.parts.generators import shared_generator
from netsim.errors import InputError, about_option, unknown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy
    from exogym_core.strategy.parts.average import Steps

__all__ = ["GRAPHS", "Graph", "Mixing", "begin_mixing", "parse_graph"]


Edges = list[list[int]]


@dataclass(frozen=True)
class Mixing:
    """A rank's row of a mixing matrix: x_i becomes the sum over j of w_ij x_j.

    Every message is a rank's own values as they are, so that one message counts however many it goes to.

    Args:
        weights: w_ij by rank j, this rank's own among them.
        to: ranks that this rank sends to.
    """

    weights: Mapping[int, float]
    to: Sequence[int]

    def steps(self, comm: Communicator, flat: Tensor, residual: Tensor | None = None) -> Steps[Tensor]:
        """Mix `flat` (1-D) in place. All is posted at once, sums are in rank order, half precision's in fp32."""
        values = {comm.rank: flat.clone()}
        posted = []
        for number, rank in enumerate(self.to):
            with comm.counted_as(0 if number else flat.nbytes):
                posted.append(comm.isend(flat, rank))
        arriving = {
            rank: comm.irecv(torch.empty_like(flat), rank) for rank in self.weights if rank != comm.rank
        }
        for rank, handle in arriving.items():
            values[rank] = yield handle
        for sent in posted:
            _ = yield sent
        total = torch.zeros_like(flat, dtype=torch.promote_types(flat.dtype, torch.float32))
        for rank in sorted(self.weights):
            total.add_(values[rank], alpha=self.weights[rank])
        return flat.copy_(total)


@dataclass(frozen=True)
class Graph:
    """Directed edges between ranks, from exchange to exchange.

    Args:
        given: a name of GRAPHS, or of each rank the ranks that it sends to.
    """

    given: str | tuple[tuple[int, ...], ...]

    @about_option("graph")
    def check(self, size: int, where: str, balanced: bool) -> None:
        """Refuse a graph that has not `size` ranks.

        With `balanced` also graphs on which averages drift: edges must go both ways, or every rank must send to and
        hear from the same number of ranks.

        Raises:
            InputError: it is not.
        """
        if isinstance(self.given, str):
            return
        if len(self.given) != size:
            raise InputError(f"{where}: graph= has {len(self.given)} lists; {size} ranks mix, one list each")
        for rank, to in enumerate(self.given):
            if rank in to or len(set(to)) < len(to) or not all(0 <= peer < size for peer in to):
                raise InputError(
                    f"{where}: graph= has {list(to)} for rank {rank}; name others of 0 to {size - 1}, each once"
                )
        edges = {(rank, peer) for rank, to in enumerate(self.given) for peer in to}
        degrees = {len(to) for to in self.given} | {sum(p == r for _, p in edges) for r in range(size)}
        if balanced and len(degrees) > 1 and any((peer, rank) not in edges for rank, peer in edges):
            raise InputError(
                f"{where}: graph= has edges of one direction and unequal degrees, on which this average drifts; SGP "
                "corrects for it"
            )

    def edges(self, size: int, number: int, seed: int) -> Edges:
        """Receivers of each of `size` ranks in the 0-based exchange `number`, sorted."""
        if not isinstance(self.given, str):
            return [sorted(to) for to in self.given]
        return [sorted(set(to) - {rank}) for rank, to in enumerate(GRAPHS[self.given](size, number, seed))]

    def row(self, strategy: Strategy, number: int, *, balanced: bool = True) -> Mixing:
        """Row of this rank (this site) in the matrix of the 0-based exchange `number`.

        With `balanced` rows and columns of the matrix sum to 1; else only its columns do.
        """
        between = strategy.site.between
        edges = self.edges(between.world_size, number, strategy.seed)
        return (self.balanced if balanced else self.pushed)(between.rank, edges)

    def balanced(self, rank: int, edges: Edges) -> Mixing:
        """The row of a matrix whose rows and columns sum to 1: w_ij = 1 / (1 + max(d_i, d_j)), d degrees.

        Xiao and Boyd, Fast linear iterations for distributed averaging, 2004 (Metropolis weights).
        """
        heard = [peer for peer, to in enumerate(edges) if rank in to]
        weights = {p: Fraction(1, 1 + max(len(edges[rank]), len(edges[p]))) for p in heard}
        weights[rank] = 1 - sum(weights.values(), Fraction(0))
        return Mixing({peer: float(weight) for peer, weight in weights.items()}, edges[rank])

    def pushed(self, rank: int, edges: Edges) -> Mixing:
        """The row of a matrix whose columns sum to 1: every rank keeps and sends equal parts of its values."""
        heard = [rank, *(peer for peer, to in enumerate(edges) if rank in to)]
        return Mixing({peer: 1 / (1 + len(edges[peer])) for peer in heard}, edges[rank])


def _ring(size: int, number: int, seed: int) -> Edges:
    return [[(rank - 1) % size, (rank + 1) % size] for rank in range(size)]


def _complete(size: int, number: int, seed: int) -> Edges:
    return [list(range(size)) for _ in range(size)]


def _exponential(size: int, number: int, seed: int) -> Edges:
    hops = max(1, (size - 1).bit_length())  # powers of two below `size`
    return [[(rank + 2 ** (number % hops)) % size] for rank in range(size)]


def _static_exponential(size: int, number: int, seed: int) -> Edges:
    return [[(rank + 2**hop) % size for hop in range((size - 1).bit_length())] for rank in range(size)]


def _random(size: int, number: int, seed: int) -> Edges:
    order = torch.randperm(size, generator=shared_generator(seed, "matching", number)).tolist()
    pairs = list(zip(order[::2], order[1::2], strict=False))
    partner = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
    return [[partner[rank]] if rank in partner else [] for rank in range(size)]


#: Name of a graph -> the receivers of each rank: (ranks, number of the exchange, shared seed) -> lists by rank.
#: "exponential" sends to one rank, 1, 2, 4, ... places on in turn; "random" pairs ranks again each time.
GRAPHS: dict[str, Callable[[int, int, int], Edges]] = {
    "complete": _complete,
    "exponential": _exponential,
    "random": _random,
    "ring": _ring,
    "static-exponential": _static_exponential,
}


def parse_graph(where: str, name: str, value: object) -> Graph:
    """A graph from its name, or from lists of those that each rank sends to.

    Raises:
        UnknownNameError: no graph has that name.
        InputError: it is neither a name nor such lists.
    """
    if isinstance(value, Graph):
        return value
    if isinstance(value, str):
        if value not in GRAPHS:
            raise unknown_name(name, value, GRAPHS)
        return Graph(value)
    rows = list(value) if isinstance(value, Sequence) else []
    if not rows or not all(
        isinstance(to, Sequence) and not isinstance(to, str) and all(type(peer) is int for peer in to)
        for to in rows
    ):
        raise InputError(
            f"{where}: {name}={value!r} must be a name, or a list of receivers for each rank: [[1], [2], [0]]"
        )
    return Graph(tuple(tuple(to) for to in rows))


def begin_mixing(strategy: Strategy, flats: Sequence[Tensor], row: Mixing) -> list[Flight[Tensor]]:
    """Post the exchange of `flats` with the neighbours'; they are mixed when it is waited for."""
    return [Flight(strategy.site.steps(row, flat)) for flat in flats]
