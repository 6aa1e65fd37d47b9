"""What a rank of a torch.distributed program tells of where it waits."""

from __future__ import annotations

from typing import Any

from exogym_core.torch_backend.report import Exposure
from exogym_core.torch_backend.session import ComputeClock, RankSession
from netsim.ranks.kernel import StampedRow


class _Told:
    """A communicator that keeps what it is told, on a clock of its own."""

    def __init__(self) -> None:
        self.exposed, self.rows = 0.0, list[StampedRow]()

    def mark(self, row: dict[str, Any]) -> None:
        self.rows.append(StampedRow(0, 0.0, 0.0, self.exposed, row))


def test_places_are_told_once_for_all_waits_in_a_row() -> None:
    """A loop that waits at one place tells it at its end; what each place has cost is known all the same."""
    told = _Told()
    session = RankSession(told, ComputeClock("marks"))  # type: ignore[arg-type]

    def waits(op: str, seconds: float) -> None:
        session.waits(op)
        told.exposed += seconds

    for _ in range(5):
        waits("all_reduce", 1.0)
    assert told.rows == []
    for _ in range(2):
        waits("barrier", 0.5)
    waits("all_reduce", 0.25)
    session.end()
    session.end()
    assert [row.row["waited"] for row in told.rows] == ["all_reduce", "barrier", "all_reduce"]
    exposure = Exposure(1)
    for row in told.rows:
        exposure.take(row)
    assert {op: seconds for (_, op), seconds in exposure.seconds.items()} == {
        "all_reduce": 5.25,
        "barrier": 1.0,
    }
    assert all(place.startswith("test_torch_session.py:") for place, _ in exposure.seconds)
