"""What a strategy needs on a network: seconds, bytes, memory and money, extrapolated from rounds that repeat."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from exogym_core.cost.compute import StepDurations
from exogym_core.cost.devices import DEFAULT_DEVICE, find_device
from exogym_core.planning.pace import Pace, pace_apart, pace_together
from exogym_core.planning.rank import draws_bytes
from exogym_core.planning.rhythm import Rhythm, rhythm
from exogym_core.planning.simulated_rounds import SimulatedRounds
from exogym_core.planning.weather import differs_for_ever, num_rounds_needed, told_of_rounds
from exogym_core.training.servers import with_servers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from exogym_core.cost.compute import Compute
    from exogym_core.planning.models import SequenceModel
    from exogym_core.planning.round_figures import RoundFigures
    from exogym_core.strategy.base import Strategy
    from netsim.topology.topology import Topology

__all__ = ["Measured", "Plan", "Setting", "measure"]

_ROUNDS_OF_NEW_PEERS = 24  # ranks that take turns among 256 others do so three times
_ROUNDS = 3  # the first meets cold connections; the next two show that they repeat
_ROUNDS_APART = 12  # of each worker, where workers go their own pace
_STEPS_WITHOUT_RHYTHM = 64
_SECONDS_A_DAY = 86_400


@dataclass(frozen=True)
class Setting:
    """Where a plan takes place: everything but the strategy.

    Attributes:
        model: whose shapes travel.
        topology: the network.
        compute: how long a step takes.
        num_ranks: workers.
        batch_size: sequences of each worker in a step.
        tokens: the budget; None: no days and no cost.
        placement, protocol, collectives: as `run_ranks` has them.
        half: the model computes in half precision.
        dollars_per_hour: of one worker; None: no cost.
        seed: of jitter and stragglers.
        devices_per_worker: devices that compute a worker's batch together, without loss.
    """

    model: SequenceModel
    topology: Topology
    compute: Compute
    num_ranks: int
    batch_size: int
    tokens: float | None = None
    placement: Sequence[str] | None = None
    protocol: str | Mapping[str, Any] | None = None
    collectives: str | Mapping[str, str] | None = "auto"
    half: bool = True
    dollars_per_hour: float | None = None
    seed: int = 0
    devices_per_worker: int = 1

    def durations(self) -> list[StepDurations]:
        """How long each rank computes a step, by its host's device."""
        hosts = self.topology.place(self.num_ranks, self.placement)
        flops = self.model.sequence_flops * self.batch_size / self.devices_per_worker
        made = []
        for host in hosts:
            machine = self.topology.hosts[host]
            seconds = self.compute.step_seconds(flops, machine.device, f"host {machine.name}: ", self.half)
            made.append(StepDurations(self.compute, seconds, self.seed, hosts.index(host)))
        return made

    def is_even(self) -> bool:
        """Whether every step takes as long as the one before, whenever it is, and no link charges for traffic."""
        compute, topology = self.compute, self.topology
        even = not compute.jitter and not compute.straggler_fraction
        return even and not topology.weather and not any(link.dollars_per_byte for link in topology.links)

    def differs_for_ever(self) -> bool:
        """Whether rounds go on to differ by chance."""
        return differs_for_ever(self.compute, self.topology.weather)

    def tokens_a_round(self, period: int) -> int:
        """Of all workers in so many steps."""
        return period * self.num_ranks * self.batch_size * self.model.length

    def num_rounds(self, period: int) -> float | None:
        """That the budget of tokens has, of so many steps each; None without a budget."""
        return None if self.tokens is None else self.tokens / self.tokens_a_round(period)

    def memory_available(self) -> float | None:
        """Bytes that the worker with least memory has on its devices; None where no device's memory is known."""
        if self.compute.kind != "flops":
            return None  # a time was given, and no device
        hosts = self.topology.place(self.num_ranks, self.placement)
        names = {self.compute.device or self.topology.hosts[host].device or DEFAULT_DEVICE for host in hosts}
        known = [find_device(name).memory_bytes for name in sorted(names)]
        return min((each * self.devices_per_worker for each in known if each is not None), default=None)


@dataclass(frozen=True)
class Plan:
    """What one strategy needs.

    Attributes:
        strategy: its label.
        seconds_per_step: mean over a round that repeats.
        seconds_per_round: such a round.
        steps_per_round: its length.
        compute_utilisation: computing / all time, mean over ranks.
        exposed_seconds_per_round: waiting without computing, mean over ranks.
        tokens_per_second: of all workers.
        days: to the budget of tokens, the first round included.
        cost: dollars until then, for the workers' hours if they have a price, and for traffic that links charge
            (`egress`); None where nothing has a price.
        cost_by: its parts, `workers` (None without a price) and `egress`; empty without a budget.
        bytes_per_worker: payload that leaves a worker a round, the largest worker's.
        payload_bytes: the encoded message of a round, once.
        wan_bytes: payload between regions a round, over all workers.
        memory_per_worker: bytes of weights, gradients, optimizers' and outer states.
        memory: the same by purpose.
        memory_available: what the worker with least has on its devices; None: not known.
        fits: whether the one goes into the other; what does not fit as it is has to be sharded or offloaded.
        steady: whether rounds were seen to repeat; else means over what was simulated.
        staleness: displacements that a server has taken in since a worker had its parameters, when that worker's own
            comes, in the mean; None without such a server.
        limit: what holds it up, and the cheapest remedy.
        expected_bytes: the bytes are those to be expected, as they depend on random numbers.
        collectives: the algorithms that were used, by operation.
        remarks: what is to be known besides.
    """

    strategy: str
    seconds_per_step: float
    seconds_per_round: float
    steps_per_round: int
    compute_utilisation: float
    exposed_seconds_per_round: float
    tokens_per_second: float
    days: float | None
    cost: float | None
    cost_by: dict[str, float | None]
    bytes_per_worker: float
    payload_bytes: float
    wan_bytes: float
    memory_per_worker: int
    memory: dict[str, int]
    memory_available: float | None
    fits: bool | None
    steady: bool
    staleness: float | None = None
    limit: dict[str, Any] = field(default_factory=dict)
    expected_bytes: bool = False
    collectives: dict[str, list[str]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """Plain data, in the order of the attributes."""
        return {**vars(self), "remarks": list(self.remarks)}


class Measured:
    """A strategy that has been simulated, and can be simulated elsewhere.

    Attributes:
        plan: what it needs.
        figures: what was simulated.
        first_round_seconds: what its first round took.
    """

    def __init__(self, strategy: Strategy, setting: Setting, label: str | None = None) -> None:
        name = label or type(strategy).__name__
        coding, num_ranks = setting.compute.coding, setting.num_ranks + strategy.num_servers
        found = rhythm(strategy, num_ranks)
        remarks: tuple[str, ...] = ()
        if found.period is None:
            found, num_rounds = Rhythm(_STEPS_WITHOUT_RHYTHM), 1
            remarks = (f"its steps have no rhythm: figures are means over its first {found.period} steps",)
        elif not strategy.is_synchronous:
            num_rounds = _ROUNDS_APART
        elif found.are_peers_new or (setting.differs_for_ever() and not found.goes_alone):
            num_rounds = _ROUNDS_OF_NEW_PEERS  # what such ranks request cannot be lengthened
        else:
            num_rounds = _ROUNDS
        self._strategy = strategy
        self._rounds = SimulatedRounds(
            strategy,
            setting.model.model,
            num_ranks,
            num_rounds,
            found,
            [*(durations.seconds for durations in setting.durations()), *[_no_time] * strategy.num_servers],
            collectives=setting.collectives,
            coding=coding if coding.speeds else None,
            leaves_out=setting.is_even() and strategy.is_synchronous,
        )
        assert found.period is not None
        budget = setting.num_rounds(found.period)
        figures = self._simulated(setting)
        if strategy.is_synchronous and not found.are_peers_new:
            weather, compute = setting.topology.weather, setting.compute
            calls = self._rounds.calls_a_round
            needed = num_rounds_needed(compute, weather, figures.round_seconds, calls, budget)
            if calls and needed > len(figures.round_seconds):
                figures = self._simulated(setting, needed)
            remarks += told_of_rounds(compute, weather, figures.round_seconds, budget)
        self.figures = figures
        self.first_round_seconds = figures.round_seconds[0]
        if strategy.is_synchronous:
            pace = pace_together(
                figures, are_peers_new=found.are_peers_new, differ=setting.differs_for_ever()
            )
        else:
            pace = pace_apart(figures)
        told = _told(name, setting, figures, found.period, pace._replace(remarks=(*remarks, *pace.remarks)))
        self.plan = replace(told, expected_bytes=draws_bytes(strategy))

    def _simulated(self, setting: Setting, num_rounds: int | None = None) -> RoundFigures:
        return self._rounds.on(
            setting.topology,
            placement=with_servers(
                setting.topology, setting.num_ranks, setting.placement, self._strategy.server_groups
            ),
            protocol=setting.protocol,
            num_rounds=num_rounds,
        )

    def first_round_on(self, setting: Setting) -> float:
        """Seconds of the first round on another network, its algorithms as they were chosen on the own one."""
        return self._simulated(setting, 1).round_seconds[0]


def _no_time(step: int) -> float:
    return 0.0


def measure(strategy: Strategy, setting: Setting, label: str | None = None) -> Plan:
    """SimulatedRounds `strategy` until its rounds repeat, and say what it needs.

    Args:
        strategy: not set up.
        setting: where.
        label: its name in results; its class's if None.
    """
    return Measured(strategy, setting, label).plan


def _told(name: str, setting: Setting, figures: RoundFigures, period: int, pace: Pace) -> Plan:
    num_rounds = len(figures.round_seconds)
    tokens_a_round = setting.tokens_a_round(period)
    days = cost = None
    cost_by: dict[str, float | None] = {}
    if setting.tokens is not None:
        rounds = setting.tokens / tokens_a_round
        days = pace.seconds_until(rounds) / _SECONDS_A_DAY
        egress = setting.topology.egress_dollars(figures.link_bytes) / num_rounds * rounds
        hourly = setting.dollars_per_hour
        workers = None if hourly is None else days * 24 * hourly * setting.num_ranks
        cost_by = {"workers": workers, "egress": egress}
        # Without a price of hours, what links charge is all that is known.
        cost = egress if workers is None and egress else None if workers is None else workers + egress
    available = setting.memory_available()
    from_servers = figures.server_wan_bytes / num_rounds
    return Plan(
        strategy=name,
        seconds_per_step=pace.seconds / period,
        seconds_per_round=pace.seconds,
        steps_per_round=period,
        compute_utilisation=pace.computing_seconds / pace.seconds if pace.seconds else 1.0,
        exposed_seconds_per_round=max(pace.seconds - pace.computing_seconds, 0.0),
        tokens_per_second=tokens_a_round / pace.seconds if pace.seconds else float("inf"),
        days=days,
        cost=cost,
        cost_by=cost_by,
        bytes_per_worker=max(_a_round(figures.bytes_sent, pace.span)),
        payload_bytes=max(_a_round(figures.payload_bytes, pace.span)),
        wan_bytes=_whole(sum(_a_round(figures.wan_bytes, pace.span)) + from_servers),
        memory_per_worker=figures.memory["total"],
        memory=figures.memory,
        memory_available=available,
        fits=None if available is None else figures.memory["total"] <= available,
        steady=pace.steady,
        staleness=sum(figures.staleness) / len(figures.staleness) if figures.staleness else None,
        collectives=figures.collectives,
        remarks=pace.remarks,
    )


def _a_round(counts: list[list[int]], span: int) -> list[float]:
    """What each rank sent in a round, on average over the last `span` rounds."""
    return [_whole((count[-1] - (count[-1 - span] if len(count) > span else 0)) / span) for count in counts]


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number
