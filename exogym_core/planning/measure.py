"""What a strategy needs on a network: seconds, bytes, memory and money, extrapolated from rounds that repeat."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from exogym_core.cost.compute import StepDurations
from exogym_core.cost.devices import DEFAULT_DEVICE, find_device
from exogym_core.planning.rank import draws_bytes
from exogym_core.planning.rhythm import Rhythm, rhythm
from exogym_core.planning.rounds import period_of, repeats_from
from exogym_core.planning.simulated_rounds import RoundFigures, SimulatedRounds

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from exogym_core.cost.compute import Compute
    from exogym_core.planning.models import SequenceModel
    from exogym_core.strategy.base import Strategy
    from netsim.topology.topology import Topology

__all__ = ["Measured", "Plan", "Setting", "measure"]

_ROUNDS_OF_NEW_PEERS = 24  # ranks that take turns among 256 others do so three times
_ROUNDS = 3  # the first meets cold connections; the next two show that they repeat
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
        cost: dollars until then, for the workers' hours and for traffic that links charge (`egress`); None without a
            price of hours.
        cost_by: its parts, `workers` (None without a price) and `egress`; empty without a budget.
        bytes_per_worker: payload that leaves a worker a round, the largest worker's.
        payload_bytes: the encoded message of a round, once.
        wan_bytes: payload between regions a round, over all workers.
        memory_per_worker: bytes of weights, gradients, optimizers' and outer states.
        memory: the same by purpose.
        memory_available: what the worker with least has on its devices; None: not known.
        fits: whether the one goes into the other; what does not fit as it is has to be sharded or offloaded.
        steady: whether rounds were seen to repeat; else means over what was simulated.
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
        first_round_seconds: what its first round took.
    """

    def __init__(self, strategy: Strategy, setting: Setting, label: str | None = None) -> None:
        name = label or type(strategy).__name__
        coding, found = setting.compute.coding, rhythm(strategy, setting.num_ranks)
        remarks = []
        if found.period is None:
            found, num_rounds = Rhythm(_STEPS_WITHOUT_RHYTHM), 1
            remarks.append(f"its steps have no rhythm: figures are means over its first {found.period} steps")
        else:
            num_rounds = _ROUNDS_OF_NEW_PEERS if found.are_peers_new else _ROUNDS
        self._setting = setting
        self._rounds = SimulatedRounds(
            strategy,
            setting.model.model,
            setting.num_ranks,
            num_rounds,
            found,
            [durations.seconds for durations in setting.durations()],
            collectives=setting.collectives,
            coding=coding if coding.speeds else None,
        )
        simulated = self._simulated(setting)
        self.first_round_seconds = simulated.round_seconds[0]
        assert found.period is not None
        told = _told(name, setting, simulated, found.period, remarks, are_peers_new=found.are_peers_new)
        self.plan = replace(told, expected_bytes=draws_bytes(strategy))

    def _simulated(self, setting: Setting, num_rounds: int | None = None) -> RoundFigures:
        return self._rounds.on(
            setting.topology,
            placement=setting.placement,
            protocol=setting.protocol,
            num_rounds=num_rounds,
        )

    def first_round_on(self, setting: Setting) -> float:
        """Seconds of the first round on another network, its algorithms as they were chosen on the own one."""
        return self._simulated(setting, 1).round_seconds[0]


def measure(strategy: Strategy, setting: Setting, label: str | None = None) -> Plan:
    """SimulatedRounds `strategy` until its rounds repeat, and say what it needs.

    Args:
        strategy: not set up.
        setting: where.
        label: its name in results; its class's if None.
    """
    return Measured(strategy, setting, label).plan


def _told(
    name: str,
    setting: Setting,
    simulated: RoundFigures,
    period: int,
    remarks: list[str],
    *,
    are_peers_new: bool,
) -> Plan:
    ends = [0.0, *simulated.round_seconds]
    num_simulated = len(simulated.round_seconds)
    rounds, span = [later - earlier for earlier, later in pairwise(ends)], 1
    if are_peers_new:
        rounds, span = _of_new_peers(rounds, simulated.peers, remarks)
    first = repeats_from(rounds)
    steady = first is not None
    if first is None:
        first = 1 if len(rounds) > 1 else 0
        if span == 1:
            told = ", ".join(f"{seconds:.6g}" for seconds in rounds)
            remarks.append(
                f"no two rounds took equally long ({told} s): figures are means over what was simulated"
            )
    kept = rounds[-1:] if steady else rounds[first:]
    a_round = sum(kept) / len(kept)
    computing = [seconds / ends[-1] for seconds in simulated.compute_seconds]
    computed = sum(computing) / len(computing) * ends[-1] / num_simulated  # mean seconds a round
    tokens_a_round = period * setting.num_ranks * setting.batch_size * setting.model.length
    days = cost = None
    cost_by: dict[str, float | None] = {}
    if setting.tokens is not None:
        num_rounds = setting.tokens / tokens_a_round
        cold = ends[first] - first * a_round if span == 1 and num_rounds >= first else 0.0
        days = (num_rounds * a_round + cold) / _SECONDS_A_DAY
        egress = setting.topology.egress_dollars(simulated.link_bytes) / num_simulated * num_rounds
        hourly = setting.dollars_per_hour
        workers = None if hourly is None else days * 24 * hourly * setting.num_ranks
        cost_by = {"workers": workers, "egress": egress}
        cost = None if workers is None else workers + egress
    available = setting.memory_available()
    return Plan(
        strategy=name,
        seconds_per_step=a_round / period,
        seconds_per_round=a_round,
        steps_per_round=period,
        compute_utilisation=min(computed / a_round, 1.0) if a_round else 1.0,
        exposed_seconds_per_round=max(a_round - computed, 0.0),
        tokens_per_second=tokens_a_round / a_round if a_round else float("inf"),
        days=days,
        cost=cost,
        cost_by=cost_by,
        bytes_per_worker=max(_a_round(simulated.bytes_sent, span)),
        payload_bytes=max(_a_round(simulated.payload_bytes, span)),
        wan_bytes=sum(_a_round(simulated.wan_bytes, span)),
        memory_per_worker=simulated.memory["total"],
        memory=simulated.memory,
        memory_available=available,
        fits=None if available is None else simulated.memory["total"] <= available,
        steady=steady,
        collectives=simulated.collectives,
        remarks=tuple(remarks),
    )


def _of_new_peers(rounds: list[float], peers: list[Hashable], remarks: list[str]) -> tuple[list[float], int]:
    """Where ranks meet others every round: means over whole turns of whom they meet, and rounds a turn.

    Without such turns there is one mean, over all rounds but the first.
    """
    turn = period_of(peers) if peers else None
    if turn is None:
        span = max(len(rounds) - 1, 1)
        rest = rounds[-span:]
        remarks.append(
            f"whom ranks meet is drawn anew each round: figures are means over {span} rounds, the shortest "
            f"{min(rest):.6g} s and the longest {max(rest):.6g} s"
        )
        return [sum(rest) / span] * 2, span
    turns = [rounds[i : i + turn] for i in range(0, len(rounds) - turn + 1, turn)]
    if turn > 1:
        remarks.append(f"ranks meet others in turn: figures are means over the {turn} rounds of a turn")
    return [sum(each) / turn for each in turns], turn


def _a_round(counts: list[list[int]], span: int) -> list[float]:
    """What each rank sent in a round, on average over the last `span` rounds."""
    found = []
    for count in counts:
        before = count[-1 - span] if len(count) > span else 0
        sent = (count[-1] - before) / span
        found.append(int(sent) if sent == int(sent) else sent)
    return found
