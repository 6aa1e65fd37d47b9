"""A source and a sink for tests of the kernel without ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from netsim.ranks import Answer, Exit, Kernel, RankSink, RankSource, Request, StampedRow


class Ports(RankSource, RankSink):
    """Ranks that have requested everything already; what the kernel reports is kept."""

    def __init__(self, num_ranks: int) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self.rows: list[StampedRow] = []
        self.log: list[list[Request]] = [[] for _ in range(num_ranks)]

    def refill(self, rank: int) -> None:
        raise AssertionError(f"the stream of rank {rank} has no Exit")

    def answer(self, rank: int, value: Answer) -> None:
        self.answers.append((rank, value))

    def row(self, row: StampedRow) -> None:
        self.rows.append(row)

    def served(self, rank: int, request: Request) -> None:
        self.log[rank].append(request)


def finished(streams: Sequence[Sequence[Request]], **options: Any) -> tuple[Kernel, Ports]:
    """A kernel that has run these streams to their end; `options` are its own."""
    ports = Ports(len(streams))
    kernel = Kernel(len(streams), ports, ports, **options)
    for stream, requests in zip(kernel.streams, streams, strict=True):
        stream.extend([*requests, Exit()])
    kernel.run()
    return kernel, ports
