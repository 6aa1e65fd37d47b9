"""Report of a program's run on the simulated network, as `launch.json` holds it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.communicator.simulated.simulation import Simulation, World
    from exogym_core.ranks.call_sites import CallSites, Instant
    from netsim.topology.protocol import Protocol

__all__ = ["CallTimes", "Ending", "LaunchReport", "RankTimes", "SteadyState", "report_of"]

Ending = Literal["finished", "until", "interrupted", "failed"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class RankTimes(_Part):
    """One rank's time: computing, waiting, network and down sum to its virtual seconds."""

    rank: int
    host: str
    startup_seconds: float = Field(description="computing before init_process_group, which is not charged")
    virtual_seconds: float = Field(description="when it ended, from init_process_group on")
    computing_seconds: float
    waiting_seconds: float = Field(description="for other ranks, which had not come to the call yet")
    network_seconds: float = Field(description="waited while the network was at work")
    down_seconds: float = Field(description="its host was down, or what it had computed was lost by that")
    bytes_sent: int = Field(description="payload that left it")
    steps: int = Field(description="calls of step() by the first optimizer that stepped")


class CallTimes(_Part):
    """Calls of one operation at one place of the script; means over all ranks."""

    place: str = Field(description="file:line of the script, for its own folder's files relative to that")
    op: str
    calls: float = Field(description="calls a rank; 0 where the script only waits for calls made elsewhere")
    bytes_per_call: float = Field(description="of the tensor; for gathers and scatters of all parts")
    waiting_seconds: float = Field(description="waited there for other ranks")
    network_seconds: float = Field(description="waited there while the network was at work")


class SteadyState(_Part):
    """One step between the end of the first and the end of the last one; means over ranks and steps."""

    steps: int = Field(description="that the means are over, on the rank with the fewest")
    told_by: str = Field(description="what ends a step")
    seconds: float
    computing_seconds: float
    waiting_seconds: float
    network_seconds: float


class LaunchReport(_Part):
    """A launched program's run. All seconds are virtual, from init_process_group on, unless a field says otherwise."""

    run_folder: str | None = None
    script: str
    arguments: list[str]
    is_module: bool
    ending: Ending
    error: str | None = Field(default=None, description="the line that says why it failed")
    num_ranks: int
    topology: dict[str, Any] = Field(description="as a topology's file holds it")
    protocol: str
    protocol_from: Literal["option", "topology", "default"]
    protocol_settings: dict[str, Any] = Field(description="every setting; null: without limit")
    placement: list[str] = Field(description="host of each rank")
    algorithms: dict[str, list[str]] = Field(description="those that each operation went by")
    algorithms_from: str = Field(description="'auto': the fastest of each call on this network")
    compute: str = Field(description="what computing costs, as --compute has it")
    cuda_as_cpu: bool
    until_seconds: float | None
    virtual_seconds: float = Field(description="when the last rank ended, or the run did")
    compute_utilisation: float = Field(description="computing / virtual seconds, mean over ranks")
    slowest_rank: int = Field(description="the one that ended last")
    ranks: list[RankTimes]
    steady_state: SteadyState | None = Field(description="null where fewer than two steps were told")
    calls: list[CallTimes] = Field(description="the longest waiting first")
    wan_bytes: int = Field(description="payload of all ranks to other regions")
    link_bytes: dict[str, float] = Field(description="as the network counts them")
    uncharged: list[str] = Field(description="what the program used beside the simulated network")

    def mean_seconds(self, name: str) -> float:
        """A field of `RankTimes`, as mean over ranks."""
        return float(sum(getattr(rank, name) for rank in self.ranks) / max(len(self.ranks), 1))


def report_of(
    simulation: Simulation, sites: CallSites, about: dict[str, Any], ending: Ending, error: str | None
) -> LaunchReport:
    """Report of a run, at its end or as far as it got.

    Args:
        simulation: that ended, or was left.
        sites: what it told.
        about: fields of the report that do not depend on the run.
        ending: how it ended.
        error: why it failed.
    """
    kernel, network, world = simulation.kernel, simulation.network, simulation.world
    assert network is not None
    assert world.topology is not None
    instant = kernel.until_seconds if ending == "until" else float(kernel.clock.now)
    ends = [instant if rank in kernel.running else end for rank, end in enumerate(kernel.end_seconds)]
    waited = [kernel.exposed_until(rank, end) for rank, end in enumerate(ends)]
    totals, size = sites.finish(waited), world.num_ranks
    hosts = [world.topology.hosts[host].name for host in world.hosts]
    ranks = [
        _rank_times(rank, hosts[rank], end, kernel.compute_seconds[rank], waited[rank], sites)
        for rank, end in enumerate(ends)
    ]
    whole = max(ends)
    return LaunchReport(
        **about,
        **_about_network(world),
        ending=ending,
        error=error,
        num_ranks=size,
        placement=hosts,
        algorithms={op: sorted(names) for op, names in sorted(simulation.algorithms.items())},
        virtual_seconds=whole,
        compute_utilisation=sum(rank.computing_seconds for rank in ranks) / (whole * size) if whole else 1.0,
        slowest_rank=max(range(size), key=lambda rank: (ends[rank], -rank)),
        ranks=ranks,
        steady_state=_steady_state(list(sites.first_steps.values()), list(sites.last_steps.values())),
        calls=[
            CallTimes(
                place=site.place,
                op=site.op,
                calls=each.calls / size,
                bytes_per_call=each.num_bytes / each.calls if each.calls else 0.0,
                waiting_seconds=(each.exposed_seconds - each.network_seconds) / size,
                network_seconds=each.network_seconds / size,
            )
            for site, each in totals.items()
        ],
        wan_bytes=sum(sites.wan_bytes),
        link_bytes={
            f"{link.source} -> {link.target}": float(count)
            for link, count in zip(world.topology.links, network.link_bytes, strict=True)
            if count
        },
        uncharged=list(sites.uncharged),
    )


def _about_network(world: World) -> dict[str, Any]:
    assert world.topology is not None
    return {
        "topology": world.topology.to_mapping(),
        "protocol": world.protocol.name,
        "protocol_settings": _settings(world.protocol),
        "algorithms_from": ", ".join(f"{op} {name}" for op, name in world.collectives.items()) or "auto",
    }


def _settings(protocol: Protocol) -> dict[str, Any]:
    return {name: None if value == math.inf else value for name, value in protocol.to_mapping().items()}


def _rank_times(
    rank: int, host: str, end: float, computed: float, waited: tuple[float, float], sites: CallSites
) -> RankTimes:
    exposed, network = waited
    computing = min(computed, max(end - exposed, 0.0))  # what is under way was counted as a whole
    return RankTimes(
        rank=rank,
        host=host,
        startup_seconds=sites.startup_seconds[rank],
        virtual_seconds=end,
        computing_seconds=computing,
        waiting_seconds=exposed - network,
        network_seconds=network,
        down_seconds=max(end - exposed - computing, 0.0),
        bytes_sent=sites.bytes_sent[rank],
        steps=sites.last_steps[rank].step if rank in sites.last_steps else 0,
    )


def _steady_state(first: Sequence[Instant], last: Sequence[Instant]) -> SteadyState | None:
    """Means over ranks that have reported steps; None where one of them has reported only one."""
    pairs = list(zip(first, last, strict=True))
    fewest = min((end.step - begin.step for begin, end in pairs), default=0)
    if not fewest:
        return None

    def mean(field: str) -> float:
        each = (
            (getattr(end, field) - getattr(begin, field)) / (end.step - begin.step) for begin, end in pairs
        )
        return float(sum(each) / len(pairs))

    network = mean("network_seconds")
    return SteadyState(
        steps=fewest,
        told_by="optimizer.step()",
        seconds=mean("virtual_seconds"),
        computing_seconds=mean("compute_seconds"),
        waiting_seconds=mean("exposed_seconds") - network,
        network_seconds=network,
    )
