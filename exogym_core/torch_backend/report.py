"""What is to be told of a program that ran on a simulated network: its time, and where its ranks waited."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from exogym_core.ranks.carrier import Carrier
    from exogym_core.ranks.sent import SentBytes
    from netsim.ranks.kernel import StampedRow

__all__ = ["Exposure", "ProgramReport", "report_of"]


@dataclass
class ProgramReport:
    """What a program's run came to.

    Attributes:
        virtual_seconds: when the last rank ended.
        rank_virtual_seconds: when each did.
        compute_utilisation: computing / the run's whole virtual time, mean over ranks.
        slowest_rank: the one that ended last.
        exposed_seconds: per place (`file:line`) of the program and operation, seconds that ranks waited there; mean
            over ranks, the longest first.
        bytes_sent: payload that left each rank.
        wan_bytes: of all ranks, to other regions.
        link_bytes: per link, both as the network counts them.
    """

    virtual_seconds: float
    rank_virtual_seconds: list[float]
    compute_utilisation: float
    slowest_rank: int
    exposed_seconds: list[tuple[str, str, float]]
    bytes_sent: list[int]
    wan_bytes: int
    link_bytes: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


class Exposure:
    """Sums up, by place, what marks tell of waiting."""

    def __init__(self, num_ranks: int) -> None:
        self._until = [0.0] * num_ranks
        self.seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._num_ranks = num_ranks

    def take(self, row: StampedRow) -> None:
        """Count what the rank has waited since its last mark."""
        if "waited" in row.row:
            seconds = row.exposed_seconds - self._until[row.rank]
            self.seconds[row.row["place"], row.row["waited"]] += seconds / self._num_ranks
            self._until[row.rank] = row.exposed_seconds


def report_of(run: Carrier, exposure: Exposure, sent: SentBytes) -> ProgramReport:
    """What a run that has ended came to."""
    kernel, network, world = run.simulation.kernel, run.simulation.network, run.simulation.world
    ends = list(kernel.end_seconds)
    whole, num_ranks = max(ends), len(ends)
    assert network is not None
    assert world.topology is not None
    links = {
        f"{link.source} -> {link.target}": float(count)
        for link, count in zip(world.topology.links, network.link_bytes, strict=True)
        if count
    }
    counts = sent.bytes_of(num_ranks, run.simulation.schedules)
    return ProgramReport(
        whole,
        ends,
        sum(kernel.compute_seconds) / (whole * num_ranks) if whole else 1.0,
        max(range(num_ranks), key=lambda rank: (ends[rank], -rank)),
        sorted(((*place, s) for place, s in exposure.seconds.items()), key=lambda each: -each[2]),
        [own for own, _ in counts],
        sum(wan for _, wan in counts),
        links,
    )
