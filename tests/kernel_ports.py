"""A source and a sink for tests of the kernel without ranks."""

from __future__ import annotations

from netsim.ranks import Answer, RankSink, RankSource, Request, StampedRow


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
