"""Setting of a plan: network, workers, compute time of a step, and crashes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from exogym_core.cost.compute import Compute, Flops, StepDurations
from exogym_core.cost.devices import find_device
from exogym_core.data.samples import shared_out
from exogym_core.stages.options import hosts_of
from exogym_core.stages.split import Cut
from exogym_core.strategy.base import Strategy
from netgym.planning.models import memory_in_use
from netgym.planning.stages import batch_of, dtypes_in_half
from netgym.planning.tables import published_share
from netsim import Protocol
from netsim.errors import InputError, unknown_name
from netsim.topology.protocol import spare_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from exogym_core.stages.options import Stages
    from netgym.planning.models import SequenceModel
    from netsim import Topology

__all__ = ["Crashes", "Known", "Setting", "with_wan_bandwidth"]

T = TypeVar("T")

_MOST_ROUNDS = 10**15  # that money pays for
_MOST_NAMED = 4  # links in an error
_STEPS = 1_000  # of a run without a budget

#: Least and most share of their devices' peak that published trainings reached while computing: Llama 3 405B 38 to 43 %
#: (arXiv 2407.21783, 3.3.2), PaLM 540B 46.2 % (2204.02311; 45.7 % without self-attention), both checked in their text.
#: INTELLECT-1 had 43.3 % without communication (2412.01152, table 2, by an account of it); the 36.2 to 41.4 % of its
#: abstract contain its waiting between sites.
PUBLISHED_MFU = (0.38, 0.46)


class Known:
    """Cache of results, and display of progress, shared by the plans of one command.

    Attributes:
        on_round: called with the rounds simulated so far and in all, and what the simulation is for; None: not called.
        purpose: of the present simulation.
    """

    def __init__(self) -> None:
        self.on_round: Callable[[int, int, str], None] | None = None
        self.purpose = "rounds"
        self._found: dict[tuple[int, ...], Any] = {}
        self._seen: list[Any] = []

    def once(self, key: Iterable[object], find: Callable[[], T]) -> T:
        """Result of `find`, cached under the parts of `key`, which need not be hashable.

        Strategies of one class with equal arguments and servers are equal.

        >>> known = Known()
        >>> known.once(("a", {"b": 1}), lambda: 1), known.once(("a", {"b": 1}), lambda: 2)
        (1, 1)
        """
        numbers = tuple(map(self._number_of, key))
        if numbers not in self._found:
            self._found[numbers] = find()
        found: T = self._found[numbers]
        return found

    def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Result of `function(*arguments)`, cached."""
        return self.once((function, *arguments), lambda: function(*arguments))

    def _number_of(self, thing: object) -> int:
        """Number shared by equal things."""
        if isinstance(thing, Strategy):
            thing = type(thing), thing.arguments, list(thing.server_groups)
        for number, seen in enumerate(self._seen):
            if seen is thing or (type(seen) is type(thing) and seen == thing):
                return number
        self._seen.append(thing)
        return len(self._seen) - 1


def with_wan_bandwidth(topology: Topology, bits_per_second: float) -> Topology:
    """Network with this bandwidth on each link between sites, in each direction.

    Raises:
        InputError: the network has no links between sites.
    """
    inside = {host.name for host in topology.hosts if host.region is not None}
    between = {link for link in topology.links if not inside & {link.source, link.target}}
    if not between:
        pairs = list(dict.fromkeys(" - ".join(sorted((link.source, link.target))) for link in topology.links))
        links = ", ".join(pairs[:_MOST_NAMED])
        more = f" and {len(pairs) - _MOST_NAMED} more" if len(pairs) > _MOST_NAMED else ""
        raise InputError(
            f"wan.bandwidth: {topology.name} has no links between sites, only those of hosts: {links}{more}; leave it "
            "out, or change them in the topology"
        )
    changed = (
        replace(link, bits_per_second=bits_per_second) if link in between else link for link in topology.links
    )
    return replace(topology, links=tuple(changed))


@dataclass(frozen=True)
class Crashes:
    """Rate of crashes of hosts: independent, at exponential times.

    Attributes:
        mean_seconds: from a repair to the next crash of one host.
        repair_seconds: from a crash to the repair.
    """

    mean_seconds: float
    repair_seconds: float


@dataclass(frozen=True)
class Setting:
    """Setting of a plan: everything but the strategy.

    Attributes:
        model: whose shapes travel.
        topology: the network.
        compute: how long a step takes.
        num_ranks: workers.
        batch_size: sequences of each worker in a step.
        tokens: the budget; None: no days and no cost.
        is_of_steps: the budget stands for a number of steps, which absences do not change.
        dollars: a budget of money in place of tokens; as many whole rounds are planned as it pays for.
        placement, protocol, collectives: as `run_ranks` has them.
        half: the model computes in half precision.
        dollars_per_hour: of one worker, or by its host or region; None: no cost.
        seed: of jitter and stragglers.
        devices_per_worker: devices that compute a worker's batch together, without loss, or by its host or region.
        batch_by_speed: all workers' sequences of a step are shared out by their devices' speed.
        failures: how often workers' hosts crash; None: never.
        stages: ranks of each worker, which hold a stage of the model each; None: one rank a worker.
        until: virtual seconds after which nothing is begun any more; None: the budget is worked through.
        utilisation: share of the devices' peak by host or region; None: compute's.
        memory: how workers keep less in memory, of `MEMORY_CHOICES`.
        micro_batch: sequences that a device computes at once: their activations are in memory.
        published_range: least and greatest factor on computing time, where `utilisation` has published shares.
        is_utilisation_given: compute's utilisation is the user's; else its default stands for a range.
        remarks: notes on the plan.
        known: cache of results, shared with other plans.
    """

    model: SequenceModel
    topology: Topology
    compute: Compute
    num_ranks: int
    batch_size: int
    tokens: float | None = None
    dollars: float | None = None
    placement: Sequence[str] | None = None
    protocol: str | Mapping[str, Any] | Protocol | None = None
    collectives: str | Mapping[str, str] | None = "auto"
    half: bool = True
    dollars_per_hour: float | Mapping[str, float] | None = None
    seed: int = 0
    devices_per_worker: int | Mapping[str, int] = 1
    batch_by_speed: bool = False
    failures: Crashes | None = None
    until: float | None = None
    stages: Stages | None = None
    utilisation: Mapping[str, float] | None = None
    memory: tuple[str, ...] = ()
    micro_batch: int = 1
    published_range: tuple[float, float] | None = None
    is_utilisation_given: bool = False
    remarks: tuple[str, ...] = ()
    known: Known = field(default_factory=Known, compare=False, repr=False)
    is_of_steps: bool = False

    @property
    def hosts(self) -> Sequence[int]:
        """Host of each rank that trains: of each worker, or of each rank of its chain of stages."""
        return hosts_of(self.topology, self.num_ranks, self.stages, self.placement, names_servers=True)

    @property
    def ranks_a_worker(self) -> int:
        """Ranks of a worker."""
        return 1 if self.stages is None else self.stages.count

    @property
    def cut(self) -> Cut | None:
        """Cut of the model into stages; None without stages.

        Raises:
            InputError: the model cannot be cut so.
        """
        stages, model = self.stages, self.model
        if stages is None:
            return None
        number = self.batch_size // (stages.microbatches or 1)
        found = self.known.once(
            ("cut", stages, model.model, number),
            lambda: Cut.of(stages, model.model, batch_of(model.samples, number), number, None),
        )
        if not self.half:
            return found
        parts = self.known.once(
            ("half", stages.split, model.model), lambda: dtypes_in_half(stages, model.model, model.samples)
        )
        return found.with_dtypes([parts[edge] for edge in found.edges[:-1]])

    def _shares(self) -> list[float]:
        """Share of its worker's computing of each rank that trains."""
        cut, count = self.cut, self.ranks_a_worker
        own = [1.0] if cut is None else [sum(cut.shares[place::count]) for place in range(count)]
        return own * self.num_ranks

    def durations(self) -> list[StepDurations]:
        """Compute time of each rank's step, by its host's device."""
        hosts = self.hosts
        return [
            StepDurations(self.compute, self._step_seconds(host, batch), self.seed, hosts.index(host))
            for host, batch in zip(hosts, self._batches_of_ranks(), strict=True)
        ]

    def computing_seconds(self) -> list[float]:
        """Mean computing of each rank in a step: of a worker's step, or of its stages' share."""
        steps = zip(self.durations(), self._shares(), strict=True)
        return [each.mean_seconds * share for each, share in steps]

    def rounds_to_fill(self, period: int) -> int:
        """First rounds, of `period` steps each, in which ranks of chains compute less than later."""
        return 0 if self.stages is None else -(-self.stages.staleness(0) // period)

    def _batches_of_ranks(self) -> list[int]:
        return [batch for batch in self.batches() for _ in range(self.ranks_a_worker)]

    def _step_seconds(self, host: int, batch: float) -> float:
        devices = self._of_site("devices per worker", self.devices_per_worker, host)
        flops = self.model.sequence_flops * batch / devices
        machine = self.topology.hosts[host]
        compute = self.compute.with_utilisation(self._utilisation(host))
        seconds = compute.step_seconds(flops, machine.device, f"host {machine.name}: ", self.half)
        return seconds * self._slowdown(host)

    def _slowdown(self, host: int) -> float:
        """Slowdown of a step, and reduction of a worker's memory, where workers share a host's devices."""
        machine = self.topology.hosts[host]
        if machine.devices is None or self.compute.shared_cores is not None:  # then ranks compute on those
            return 1.0
        devices = self._of_site("devices per worker", self.devices_per_worker, host)
        return machine.slowdown(self.hosts.count(host) * devices)

    def cut_sequences(self) -> str | None:
        """Remark on batches that devices cannot divide into whole sequences, or None."""
        for host, batch in zip(self.hosts, self._batches_of_ranks(), strict=True):
            devices = self._of_site("devices per worker", self.devices_per_worker, host)
            if batch % devices:
                longer = math.ceil(batch / devices) * devices / batch
                return (
                    f"{batch} sequences are computed by {devices} devices without loss, as by tensor parallelism; in "
                    f"whole sequences computing takes {longer:.3g} times as long"
                )
        return None

    def _utilisation(self, host: int) -> float:
        """Share of its devices' peak that a host's computing reaches."""
        given: float | Mapping[str, float] = self.compute.utilisation
        return self._of_site("utilisation", given if self.utilisation is None else self.utilisation, host)

    def mfu(self, seconds_per_step: Sequence[float]) -> dict[str, float]:
        """Model FLOP utilisation by site, from each rank's seconds; empty where steps have a fixed time."""
        if self.compute.flops is None or not all(seconds_per_step):
            return {}
        found: dict[str, list[float]] = {}
        ranks = zip(self.hosts, self._batches_of_ranks(), self._shares(), seconds_per_step, strict=True)
        for host, batch, of_worker, seconds in ranks:
            # Computing alone reaches the utilisation; waiting takes its share away.
            share = self._step_seconds(host, batch) * of_worker / seconds * self._utilisation(host)
            found.setdefault(self.topology.region_of(host), []).append(share)
        return {site: sum(shares) / len(shares) for site, shares in found.items()}

    def at_published_shares(self) -> Setting:
        """Setting in which each host with workers reaches the published share of its device's peak for this model.

        Raises:
            InputError: steps have a fixed time, or nothing is published for a device or the model's size.
        """
        if self.compute.flops is None:
            raise InputError(
                "plan: --utilisation published: steps have a fixed time: leave compute.fixed out"
            )
        shares = {}
        for host in self.hosts:
            machine = self.topology.hosts[host]
            device = self.compute.device or machine.device
            shares[machine.name] = published_share(device, self.model.num_parameters)
        fast = min(share.median / share.most for share in shares.values())
        slow = max(share.median / share.least for share in shares.values())
        texts = dict.fromkeys(share.text for share in shares.values())
        return replace(
            self,
            utilisation={name: share.median for name, share in shares.items()},
            published_range=(fast, slow),
            remarks=(*self.remarks, f"published shares of the peak: {'; '.join(texts)}"),
        )

    def computing_range(self) -> tuple[float, float]:
        """Least and greatest factor on the planned computing time; 1 where the time or utilisation is given."""
        if self.published_range is not None:
            return self.published_range
        share = self.compute.utilisation
        is_given = self.is_utilisation_given or self.utilisation is not None or share != Flops().utilisation
        if self.compute.flops is None or is_given:
            return 1.0, 1.0
        return share / PUBLISHED_MFU[1], share / PUBLISHED_MFU[0]

    def memory_of(
        self, states: Sequence[Mapping[str, int]], choices: Sequence[str] | None = None
    ) -> dict[str, int]:
        """Memory of a worker on its devices; with stages that of the rank with most, see `memory_of_ranks`."""
        return max(self.memory_of_ranks(states or [{}], choices), key=lambda memory: memory["total"])

    def memory_of_ranks(
        self, states: Sequence[Mapping[str, int]], choices: Sequence[str] | None = None
    ) -> list[dict[str, int]]:
        """Memory of the states of each rank of a worker, of copies of its weights, and of its activations.

        Args:
            states: bytes by purpose of each rank.
            choices: replace the setting's.
        """
        given = self.memory if choices is None else choices
        number = max(
            self._of_site("devices per worker", self.devices_per_worker, host) for host in self.hosts
        )
        stages, model = self.stages, self.model
        sequences = float(min(number * self.micro_batch, max(self.batches())))
        found = []
        for place, own in enumerate(states):
            if stages is not None:
                alive = stages.most_alive(place) * self.batch_size // (stages.microbatches or 1)
                sequences = alive * self._shares()[place]
                copies = stages.staleness(place)  # of the weights, for passes in flight
                own = {**own, "weights": own.get("weights", 0) * (1 + copies)}
            sizes = (model.activation_bytes, model.checkpointed_bytes)
            kept, few = (math.ceil(sequences * size) // (2 if self.half else 1) for size in sizes)
            found.append(memory_in_use(own, kept, few, given))
        return found

    def batches(self) -> list[int]:
        """Whole sequences of each worker in a step, at least one; the total is that of equal batches.

        Raises:
            InputError: batches by speed, with a fixed time of steps.
        """
        if not self.batch_by_speed:
            return [self.batch_size] * self.num_ranks
        if self.compute.flops is None:
            raise InputError(
                "plan: batches by speed need devices' speeds; leave compute.fixed out, or give --device"
            )
        speeds = [1 / self._step_seconds(host, 1) for host in self.hosts]
        return shared_out(self.batch_size * self.num_ranks, speeds)

    def without(self, sites: Sequence[str]) -> Setting:
        """Setting without the workers of some sites (regions, or hosts outside of any).

        Raises:
            UnknownNameError: no worker is at a site of this name.
            InputError: no worker would be left.
        """
        topology, hosts = self.topology, self.hosts
        there = list(dict.fromkeys(topology.region_of(host) for host in hosts))
        for site in sites:
            if site not in there:
                raise unknown_name("site with workers", site, there)
        kept = [topology.hosts[host].name for host in hosts if topology.region_of(host) not in sites]
        if not kept:
            raise InputError(f"plan: without {' and '.join(sites)} no worker is left; leave a site")
        return replace(self, num_ranks=len(kept), placement=kept)

    def workers_by_site(self) -> dict[str, int]:
        """Number of workers of each region, or host outside of any, in the order of ranks."""
        return dict(Counter(map(self.topology.region_of, self.hosts)))

    def is_even(self) -> bool:
        """True if all steps always take equally long, and no link charges for traffic."""
        topology = self.topology
        is_steady = not self.compute.varies and not topology.weather
        return is_steady and not any(topology.dollars_per_byte)

    @property
    def resolved_protocol(self) -> Protocol:
        """Protocol of the plan, else of its topology, else the default."""
        return Protocol.resolve(self.protocol, self.topology.protocol)

    def with_streams(self, streams: int) -> Setting:
        """Setting with `streams` streams per transfer."""
        return replace(self, protocol=replace(self.resolved_protocol, streams=streams))

    def spare_streams(self, stores: Iterable[int] = (), *, go_alone: bool = False) -> str | None:
        """Remark on streams that bring nothing, as fewer fill each route that carries; or None.

        Args:
            stores: hosts of the stores and relays in use.
            go_alone: workers send to these alone, and not to each other.
        """
        topology, protocol = self.topology, self.resolved_protocol
        if go_alone:
            return spare_streams(topology, protocol, self.hosts, stores)
        return spare_streams(topology, protocol, [*self.hosts, *stores])

    def differs_for_ever(self) -> bool:
        """True if rounds never repeat: with jitter, stragglers, drift, or endless background traffic."""
        return self.compute.varies or self.topology.weather.is_endless

    def tokens_a_round(self, period: int) -> int:
        """Tokens of all workers in `period` steps."""
        return period * self.num_ranks * self.batch_size * self.model.length

    def num_steps(self, missed: float = 0) -> int | None:
        """Number of steps in the budget of tokens; None without a budget.

        Args:
            missed: steps of one worker each that do not count, and are made up for if the budget is of tokens.
        """
        if self.tokens is None:
            return None
        more = 0.0 if self.is_of_steps else missed / self.num_ranks
        return max(1, math.ceil(self.tokens / self.tokens_a_round(1) + more - 1e-9))

    def missing_steps(self, steps: int) -> float:
        """Whole steps' worth of samples that the short last batches of epochs lack in a run of `steps` steps."""
        if self.model.epoch is None or not self.is_of_steps:
            return 0.0
        in_epoch, share = self.model.epoch
        return steps // in_epoch * (1 - share)

    @property
    def max_steps(self) -> int:
        """Steps of the run: those of the budget of tokens, or 1,000 without a budget."""
        return self.num_steps() or _STEPS

    def affordable_rounds(self, bill: Callable[[int], tuple[float, float]]) -> int:
        """Number of whole rounds that `dollars` pays for.

        Args:
            bill: seconds, and dollars of traffic, of a number of rounds.

        Raises:
            InputError: workers have no price, nothing costs anything, or the first round costs more.
        """
        hourly, budget = self.hourly_dollars(), self.dollars
        assert budget is not None
        if hourly is None:
            raise InputError("plan: --budget needs the price of a worker's hour: add --price DOLLARS")

        def cost(rounds: int) -> float:
            seconds, egress = bill(rounds)
            return seconds / 3600 * hourly + egress

        if cost(1) > budget:
            raise InputError(
                f"plan: --budget {budget:g}: a round costs {cost(1):.4g} dollars, give at least these"
            )
        more = bisect_right(range(2, _MOST_ROUNDS), budget, key=cost)
        if more == _MOST_ROUNDS - 2:
            raise InputError("plan: --budget: a round costs nothing; plan with --tokens, or add a --price")
        return 1 + more

    def memory_available(self) -> float | None:
        """Bytes on the devices of the worker with least memory; None where no device's memory is listed."""
        if self.compute.flops is None:
            return None  # a time was given, and no device
        found = []
        for host, device in self._devices().items():
            memory = find_device(device).memory_bytes if device is not None else None
            if memory is not None:
                devices = self._of_site("devices per worker", self.devices_per_worker, host)
                found.append(memory * devices / self._slowdown(host))
        return min(found, default=None)

    def fits(self, states: Sequence[Mapping[str, int]], choices: Sequence[str] | None = None) -> bool | None:
        """True if states and activations, see `memory_of`, fit into every worker's devices; None if unknown."""
        available = self.memory_available()
        if not states or available is None:
            return None
        is_enough = self.memory_of(states, choices)["total"] <= available
        return None if is_enough and self.devices_of_unknown_memory() else is_enough

    def devices_of_unknown_memory(self) -> list[str]:
        """Devices of workers whose memory is not listed, such as laptops, which share the machine's."""
        devices = dict.fromkeys(self._devices().values())
        return [name for name in devices if name is not None and find_device(name).memory_bytes is None]

    def _devices(self) -> dict[int, str | None]:
        """Device of each host with workers."""
        hosts = sorted(set(self.hosts))
        return {host: self.compute.device or self.topology.hosts[host].device for host in hosts}

    def hourly_dollars(self) -> float | None:
        """Dollars an hour of all workers; None without a price."""
        prices = [self.price_of(host) or 0.0 for host in self.hosts]
        return None if self.dollars_per_hour is None else sum(prices)

    def price_of(self, host: int) -> float | None:
        """Dollars of a host's hour; None without a price."""
        prices = self.dollars_per_hour
        return None if prices is None else self._of_site("price", prices, host)

    def _of_site(self, what: str, given: T | Mapping[str, T], host: int) -> T:
        """Value for a host: its own, or its region's."""
        if not isinstance(given, Mapping):
            return given
        topology = self.topology
        known, region = self.sites(), topology.region_of(host)
        for name in given:
            if name not in known:
                raise unknown_name("site", name, known)
        for name in (topology.hosts[host].name, region):
            if name in given:
                return given[name]
        raise InputError(f"plan: {what}: nothing is given for {region}; add {region}=...")

    def sites(self) -> list[str]:
        """Names of regions and hosts, by which values may be given."""
        hosts = self.topology.hosts
        regions = map(self.topology.region_of, range(len(hosts)))
        return list(dict.fromkeys([*regions, *(each.name for each in hosts)]))
