"""Plans: the strategies' own code without values gives the bytes and seconds that training has."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from worlds import regions_form, star

from exogym_core import Trainer
from exogym_core.cost.compute import Compute
from exogym_core.results.fit_result import FitResult
from exogym_core.run.recording import record_kinds
from exogym_core.strategy import Chain, CommunicationModule, DiLoCoCommunicator, Strategy, build_strategy
from exogym_core.strategy.participation.sampling import draw_clients
from exogym_core.strategy.parts.average import Averaging, Flight
from exogym_core.strategy.parts.codecs import codec_named
from netgym.experiment.experiment import Experiment
from netgym.planning.measure import Measured, RefusedPlanError, Setting, measure
from netgym.planning.models import SequenceModel, planned_model
from netgym.planning.plan import plan
from netgym.planning.setting import Known
from netgym.planning.tables import PLANNED_MODELS
from netsim import Topology
from netsim.collectives import estimate
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

NETWORK = regions_form({"a": 2, "b": 2}, latency="1 ms", wan="10 Mbit/s", protocol="ideal")


class Tiny(nn.Module):
    """Two layers, and a loss for a batch of tokens or of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.Sequential(nn.Linear(8, 33), nn.ReLU(), nn.Linear(33, 10))

    def forward(self, batch: Any) -> torch.Tensor:
        tokens, targets = batch
        logits = self.layers(self.embedding(tokens))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@cache  # counting its operations takes longer than a plan of it
def tiny_model() -> SequenceModel:
    with torch.device("meta"):
        return SequenceModel(Tiny(), 4)


def setting(compute: Any = "50 ms", **options: Any) -> Setting:
    return Setting(tiny_model(), Topology.from_mapping(NETWORK), Compute.parse(compute), 4, 2, 1e6, **options)


def trained(name: str, options: dict[str, Any], steps: int, **given: Any) -> FitResult:
    """A real run of so many steps, of four ranks in threads."""
    return trained_as(build_strategy(name, **options), steps, **given)


def trained_as(strategy: Strategy, steps: int, model: nn.Module | None = None, **given: Any) -> FitResult:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randint(10, (1024, 4), generator=generator) for _ in range(2)))
    usual = {"num_nodes": 4, "topology": NETWORK, "compute": "50 ms", "seed": 0, "workers": "threads"}
    usual |= {"batch_size": 2, "max_steps": steps, "disable_logging": True, "val_size": 0}
    return Trainer(model or Tiny(), data).fit(strategy=strategy, **(usual | given)).fit_result


def test_every_strategy_declares_its_round() -> None:
    """Without it each step of a plan is simulated."""
    shipped = [kind for kind in Strategy.registry.values() if kind.__module__.startswith("exogym_core.")]
    undeclared = [kind.__name__ for kind in shipped if kind().round_steps is None]
    assert undeclared == ["CoCoDCStrategy"]  # which fragments there are is known with the model
    assert Chain([DiLoCoCommunicator(H=4), CommunicatesWhenever()]).round_steps is None


class CommunicatesWhenever(CommunicationModule):
    """Module of one's own that declares nothing."""

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        """Send nothing."""


#: Every strategy, with odd options; and each overlapped one so that a single step of a round sends.
TABLE = [
    ("AllReduce", {}),
    ("AllReduce", {"codec": "int8"}),
    ("AllReduce", {"bucket_bytes": 500}),
    ("DiLoCo", {"H": 5}),
    ("DiLoCo", {"H": 5, "codec": "int8"}),
    ("FedAvg", {"H": 3}),
    ("FedAvg", {"H": 2, "island_size": 2}),
    ("LocalSGD", {"H": 2}),
    ("DeMo", {}),
    ("DeMo", {"compression_topk": 3, "compression_chunk": 8}),
    ("SPARTA", {"p_sparta": 0.1, "interval": 3}),
    ("SPARTA", {"p_sparta": 0.37, "index_selector": "partitioned"}),
    ("SPARTA+DiLoCo", {"H": 6, "p_sparta": 0.1, "interval": 4}),
    ("AsyncSPARTA", {"interval": 4, "delay": 1, "p_sparta": 0.9}),
    ("AsyncSPARTA", {"interval": 3, "delay": 2, "p_sparta": 0.3}),
    ("DESLOC", {"H": 2, "Ku": 3, "Kv": 5}),
    ("DelayedDiLoCo", {"H": 3}),
    ("DelayedDiLoCo", {"H": 4, "codec": "int8"}),
    ("EagerDiLoCo", {"H": 3}),
    ("StreamingDiLoCo", {"H": 5, "num_fragments": 2}),
    ("StreamingDiLoCo", {"H": 5, "num_fragments": 1, "tau": 3}),
    ("StreamingDiLoCo", {"H": 5, "num_fragments": 1, "tau": 3, "codec": "int8"}),
    ("CoCoDC", {"H": 6, "num_fragments": 1, "transmissions": 1, "tau": 5}),
    ("CoCoDC", {"H": 6, "num_fragments": 1, "transmissions": 3, "tau": 3}),
    ("SignSGD", {}),
    ("SignSGD", {"vote": "all"}),
    ("OneBitAdam", {"freeze_step": 14}),
    ("QSGD", {}),
    ("PowerSGD", {}),
    ("Dion", {}),
    ("DGC", {"density_warmup_steps": 4}),
    ("QsparseLocalSGD", {"H": 3}),
    ("SparseLoCo", {"H": 3}),
    ("MuLoCo", {"H": 3, "bits": 2, "quantizer": "linear"}),
    ("SlowMo", {"H": 3, "buffers": "average"}),
    ("DPSGD", {"graph": "complete"}),
    ("DPSGD", {"mix": "after"}),
    ("SGP", {}),
    ("GASLoC", {"H": 2}),
    ("NoLoCo", {"H": 2}),
    ("ADPSGD", {}),
    ("AsyncDiLoCo", {"H": 3}),
    ("HeLoCo", {"H": 3}),
    ("HALoS", {"H": 2, "K": 3}),
    ("DecoupledDiLoCo", {"H": 4, "num_fragments": 2}),
    ("SNOO", {"H": 3}),
    ("GPA", {}),
    ("ACCO", {}),
    ("EDiT", {"H": 3, "outlier_warmup": 2}),
    ("SparseLoCo", {"H": 3, "exchange": {"name": "store", "host": "r2"}}),
    ("DiLoCo", {"H": 4, "codec": "int8", "exchange": {"name": "store", "host": "r2", "relays": ["edge"]}}),
    ("StreamingDiLoCo", {"H": 5, "num_fragments": 2, "exchange": {"name": "store", "host": "r2"}}),
]
#: Clients drawn for each round: ranks send unequally.
DRAWN = [("DiLoCo", {"H": 2, "clients_per_round": 2}), ("FedAvg", {"H": 2, "fraction": 0.5})]
ODD = regions_form({"a": 4, "b": 2, "c": 1}, latency="1 ms", wan="10 Mbit/s")
ODD |= {
    "hosts": {"r2": {"store": {"latency": "3 ms"}}, "edge": {"store": {}}},
    "links": [
        {"between": ["r2", "b"], "bandwidth": "30 Mbit/s", "latency": "2 ms"},
        {"between": ["edge", "a"], "bandwidth": "50 Mbit/s"},
    ],
}
WORLDS = [(3, "linux-tcp"), (5, "ideal"), (7, "gloo"), (7, "ideal"), (5, "linux-tcp")]


def as_trained(
    strategy: Strategy, num_ranks: int, protocol: str = "ideal", seed: int = 0, compute: Any = "50 ms"
) -> Measured:
    """Plan of a strategy on odd sites; the ends of its rounds and of the run and all bytes are those of a real run."""
    odd = {"topology": Topology.from_mapping(ODD), "num_ranks": num_ranks, "tokens": None}
    where = replace(setting(compute, protocol=protocol), **odd, seed=seed)
    made = Measured(copy.deepcopy(strategy), where)
    figures, period = made.figures, made.plan.steps_per_round
    steps = period * len(figures.round_seconds)
    given = {"num_nodes": num_ranks, "topology": ODD, "protocol": protocol, "progress": False, "seed": seed}
    run = trained_as(strategy, steps, **given, compute=compute)
    assert figures.end_seconds == pytest.approx(run.virtual_seconds, abs=1e-9)
    crossed = [num_bytes for name, num_bytes in run.link_history[-1].items() if name != "virtual_seconds"]
    assert sum(crossed) == pytest.approx(sum(figures.link_bytes), abs=len(crossed))
    rows = {row["step"]: row for row in run.history}
    for number, seconds in enumerate(figures.round_seconds):
        row = rows[(number + 1) * period]
        assert row["virtual_seconds"] == pytest.approx(seconds, abs=1e-9)
        if not strategy.num_servers:
            assert row["bytes_sent"] == sum(sent[number] for sent in figures.counts["bytes_sent"])
            assert row["wan_bytes"] == sum(sent[number] for sent in figures.counts["wan_bytes"])
    if not strategy.num_servers:
        # Rounds of drawn clients differ: their mean.
        first = period if strategy.clients.are_drawn else steps - period
        sent = rows[steps]["payload_bytes"] - (rows[first]["payload_bytes"] if first else 0)
        assert made.plan.payload_bytes == pytest.approx(sent * period / (steps - first), abs=1)
    return made


def rows_of_table() -> list[Any]:
    """Every row with a world; at each commit the first row of every fourth strategy."""
    rows, names = [*TABLE, *DRAWN], set[str]()
    made = []
    for place, (name, options) in enumerate(rows):
        marks = [pytest.mark.thorough] if name in names or len(names) % 4 else []
        made.append(pytest.param(name, options, WORLDS[place % len(WORLDS)], marks=marks))
        names.add(name)
    return made


@pytest.mark.parametrize(("name", "options", "world"), rows_of_table(), ids=str)
def test_a_plan_is_what_training_takes(name: str, options: dict[str, Any], world: tuple[int, str]) -> None:
    """To the byte and the nanosecond, of ranks that are neither a power of two nor evenly spread."""
    made = as_trained(build_strategy(name, **options), *world)
    assert made.plan.bytes_per_worker > 0


def test_a_first_rank_that_is_not_drawn_again_is_planned() -> None:
    """It hands its model on before it asks for anything, which failed; memory is that of a client that takes part."""
    strategy = build_strategy("FedAvg", H=2, clients_per_round=2)
    assert [0 in draw_clients(42, number, 5, 2) for number in range(3)] == [True, True, False]
    plan = as_trained(strategy, 5, seed=42).plan
    assert plan.memory["weights"] == 4 * sum(each.numel() for each in Tiny().parameters())


def test_every_strategy_is_in_the_table() -> None:
    names = {name for name, kind in Strategy.registry.items() if kind.__module__.startswith("exogym_core.")}
    assert names == {name for name, _ in TABLE}


class Own(Strategy):
    """Sends its parameters after every `every` steps, and waits for them `late` steps later."""

    judged = "own"

    def __init__(self, every: int, late: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.every, self.late, self.sent, self.due = every, late, None, -1  # type: ignore[var-annotated]

    def step(self) -> None:
        self.optimizer_step()
        if self.sent is not None and self.local_step == self.due:
            self.sent.wait()
            self.sent = None
        if (self.local_step + 1) % self.every == 0:
            flat = torch.cat([parameter.detach().flatten() for parameter in self.trainable])
            self.sent, self.due = self.comm.all_reduce(flat, async_op=True), self.local_step + self.late
            if not self.late:
                self.sent.wait()
                self.sent = None
        super().step()

    def finish(self) -> None:
        if self.sent is not None:
            self.sent.wait()


class Declared(Own):
    """The same, with its period."""

    round_steps = property(lambda self: self.every)


@pytest.mark.parametrize("steps", [3, 38])  # less than a round, and more than the rounds that are simulated
@pytest.mark.parametrize(
    "strategy",
    [
        build_strategy("DiLoCo", H=14, ranks_per_worker=2),
        build_strategy("SPARTA+DiLoCo", H=6, interval=4),
        build_strategy("StreamingDiLoCo", H=7, num_fragments=1, tau=3, codec="int8"),
        Declared(7, 2),
    ],
    ids=lambda strategy: type(strategy).__name__,
)
def test_a_plan_of_some_steps_is_what_a_run_of_them_takes(strategy: Strategy, steps: int) -> None:
    """Whole rounds, the steps after them, and what is in flight at the end; declared or not."""
    where = setting()
    made = measure(strategy, replace(where, tokens=float(where.tokens_a_round(steps))))
    assert made.steps == steps
    assert made.tokens == where.tokens_a_round(steps)
    assert made.days * 86_400 == pytest.approx(trained_as(strategy, steps).virtual_seconds, abs=1e-9)


class Hiding(Own):
    """Says that each step sends the same, which most do: nothing."""

    round_steps = 1


def test_what_does_not_say_when_it_sends_is_simulated_or_refused() -> None:
    """An own strategy that averages every 50 steps was planned with 0 bytes, steadily."""
    found = measure(Own(50), setting())  # 31,250 steps: 32 times 977
    assert found.bytes_per_worker > 0
    assert found.seconds_per_step > 0.05
    assert not found.steady
    with pytest.raises(RefusedPlanError, match="sends nothing in its first 977 steps, so a plan"):
        measure(Own(2_000), setting())
    few = replace(setting(), tokens=float(setting().tokens_a_round(30)))
    alone = "every worker trains on its own"
    assert f"Own sends nothing in its 30 steps: {alone}" in measure(Own(50), few).remarks
    for strategy in (Declared(50), build_strategy("DiLoCo", H=50), build_strategy("AsyncDiLoCo", H=50)):
        row = measure(strategy, few)
        assert (row.steps, row.rounds, row.steps_per_round) == (30, 0, 50)
        assert row.payload_bytes > 0  # of a round
        remark = f"nothing is sent in 30 steps, before the first round of 50 ends: {alone}"
        assert remark in " ".join(row.remarks)
        assert "step, round, utilisation, MFU and bytes those of a whole round" in " ".join(row.remarks)
    with pytest.raises(RefusedPlanError, match="Hiding sends nothing in its first 1,000 steps, so a plan"):
        measure(Hiding(1_777), setting())
    late = measure(build_strategy("StreamingDiLoCo", H=40, num_fragments=2), few)
    assert not any("nothing is sent" in remark for remark in late.remarks)
    assert "no round of 40 steps ends in 30 steps; days" in " ".join(late.remarks)
    declared = measure(Declared(2_000), setting())
    assert declared.bytes_per_worker == found.bytes_per_worker / 19
    assert declared.steady


def test_a_declared_round_that_is_none_is_reported() -> None:
    """A subclass that sends otherwise than it inherits to say is not planned as if it did not."""

    class Wrong(Declared):
        round_steps = 3

    with pytest.raises(RefusedPlanError, match=r"rounds of 3 steps do not send the same: .* step 4 differs"):
        measure(Wrong(4), setting())
    for period in (0, 2.5, True):
        Wrong.round_steps = period  # type: ignore[assignment]
        with pytest.raises(InputError, match="must be a whole number of steps"):
            measure(Wrong(4), setting())


class Changing(Declared):
    """Sends twice as much in each round from step 30 on, or from `beyond` on; it counts steps itself, or asks."""

    def __init__(self, every: int, beyond: int = 30, counts: bool = False) -> None:
        super().__init__(every)
        self.beyond, self.counts, self.count = beyond, counts, 0

    def step(self) -> None:
        self.count += 1
        step = self.count - 1 if self.counts else self.local_step
        if step >= self.beyond and step % self.every == 0:
            self.comm.all_reduce(torch.cat([each.detach().flatten() for each in self.trainable]))
        super().step()


@pytest.mark.parametrize(
    ("strategy", "step"),
    [
        (Hiding(300), 300),
        (Changing(5), 31),
        (Changing(50, 3_000), 3_851),
        (Changing(1, 900, counts=True), 901),
    ],
)
def test_a_round_that_differs_later_in_the_run_is_reported(strategy: Strategy, step: int) -> None:
    """The beginning was planned as if it were the whole run, an average every seven steps as 0 bytes."""
    with pytest.raises(RefusedPlanError, match=f"the one that begins with step {step:,} differs: declare in"):
        measure(strategy, setting())


@pytest.mark.parametrize(
    ("name", "options", "turn"),
    [("SGP", {}, 2), ("NoLoCo", {"H": 2}, None)],
    ids=str,
)
def test_ranks_that_meet_others_are_simulated_through_a_turn(
    name: str, options: dict[str, Any], turn: int | None
) -> None:
    """Four ranks on two sites: a round's time is the mean over those whom ranks meet, not that of the first peers."""
    planned = measure(build_strategy(name, **options), setting())
    rounds, period = 24, planned.steps_per_round
    last = rounds * period
    ends = {row["step"]: row for row in trained(name, options, last).history}
    span = turn or rounds - 1
    before = ends[last - span * period]
    mean = (ends[last]["virtual_seconds"] - before["virtual_seconds"]) / span
    assert planned.seconds_per_round == pytest.approx(mean, rel=1e-4)
    assert planned.wan_bytes == pytest.approx((ends[last]["wan_bytes"] - before["wan_bytes"]) / span)
    assert any("meet" in remark for remark in planned.remarks)


SERVED = [
    ("AsyncDiLoCo", {"H": 3}),
    ("AsyncDiLoCo", {"H": 4, "dylu": True}),
    ("HeLoCo", {"H": 3}),
    ("HALoS", {"H": 2, "K": 3, "regions": 2}),
    ("DecoupledDiLoCo", {"H": 4, "num_fragments": 2, "quorum": 2}),
]


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [(*SERVED[1], 13), (*SERVED[3], 13), (*SERVED[0], 70), (*SERVED[-1], 70)],
    ids=str,
)
def test_a_budget_of_workers_at_their_own_pace_ends_with_the_slowest(
    name: str, options: dict[str, Any], steps: int
) -> None:
    """It ended as if all shared the steps: 28 to 50 % too soon. Whole where it is simulated, then at that pace."""
    where = replace(setting(), topology=Topology.from_mapping(NETWORK), num_ranks=3, seed=4)
    made = measure(
        build_strategy(name, **options), replace(where, tokens=float(steps * where.tokens_a_round(1)))
    )
    result = trained(name, options, steps, num_nodes=3, topology=NETWORK, seed=4)
    assert (made.steps, made.days) == (
        steps,
        pytest.approx(result.virtual_seconds / 86_400, rel=1e-9 if steps < 20 else 0.05),
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("StreamingDiLoCo", {"H": 6, "num_fragments": 2}, marks=pytest.mark.thorough),
        ("DiLoCo", {"H": 2, "ranks_per_worker": 2, "sharding": "FULL_SHARD", "max_norm": 1.0}),
    ],
)
def test_a_rank_that_stands_for_others_changes_nothing(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running every rank gives the same plan, also where four ranks encode parts of two sizes."""
    strategy = build_strategy(name, **options)
    alone = Measured(strategy, setting())
    assert not alone.rounds.runs_together

    def refuse(*_: Any) -> None:
        raise InputError("together")

    monkeypatch.setattr("netgym.planning.rounds.record_kinds", refuse)
    together = Measured(strategy, setting())
    assert together.rounds.runs_together
    assert together.plan == alone.plan


def test_few_of_many_ranks_run_where_parts_are_of_two_sizes() -> None:
    """Of 60 ranks that encode 60 parts a dozen run, the two kinds meet where the parts' sizes change."""
    ran: list[int] = []

    def body(comm: Any, computing: Any) -> None:
        ran.append(comm.rank)
        flat = torch.empty(200, device="meta")
        Flight(Averaging(codec_named("int8")).steps(comm, flat)).wait()
        comm.mark({})

    made = record_kinds(body, 60)
    assert len(ran) < 15
    assert made.kinds == [0] * 20 + [1] * 40


def test_collectives_with_a_root_are_recorded_of_ranks_alone() -> None:
    """Also of ranks that receive nothing from themselves."""

    def body(comm: Any, computing: Any) -> None:
        flat = torch.empty(3, device="meta")
        comm.scatter(flat, [flat] * 3 if comm.rank == 1 else None, 1)
        comm.reduce(flat, 1)
        assert (comm.gather(flat, 1) is None) == (comm.rank != 1)
        comm.mark({})

    assert {call.op for call in record_kinds(body, 3).calls} == {"scatter", "reduce", "gather"}


def test_layers_that_are_alike_take_as_long_as_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very many calls a few layers are simulated, and the rest follows."""
    model = planned_model("llama-2m", 16, num_layers=24)
    where = replace(
        setting("50 ms", protocol="linux-tcp"), topology=Topology.load("wan-4-regions"), model=model
    )
    strategy = build_strategy("AllReduce", bucket_bytes=100_000)
    whole = measure(strategy, where)
    monkeypatch.setattr("exogym_core.run.recording.MOST_CALLS", 0)
    found = measure(strategy, replace(where, known=Known()))
    for name in ("seconds_per_round", "days", "compute_utilisation", "bytes_per_worker", "wan_bytes"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-4), name
    assert found.seconds_per_round != whole.seconds_per_round


def test_coding_takes_its_time() -> None:
    """Where encoding has a speed, a plan's round is longer by it, and by nothing else."""
    slow = {"fixed": "50 ms", "coding": "1 kB/s"}
    free, charged = (
        measure(build_strategy("DiLoCo", H=2, codec="int8"), replace(setting(), compute=Compute.parse(spec)))
        for spec in ({"fixed": "50 ms"}, slow)
    )
    # Its parts are encoded and all decoded, then as many means: three times the tensor and a quarter, for four ranks.
    assert (
        free.coding_bytes == charged.coding_bytes == pytest.approx(3.25 * charged.memory["weights"], rel=0.01)
    )
    assert charged.seconds_per_round - free.seconds_per_round == pytest.approx(
        free.coding_bytes / 1000, rel=1e-4
    )
    assert charged.bytes_per_worker == free.bytes_per_worker


def _homes(*up: int, latency: int = 1) -> Topology:
    """Homes that send so many Mbit/s, at distances of 0 ms and up, below `latency`."""
    links = [
        {"between": [f"home{i}", "net"], "up": f"{rate} Mbit/s", "down": "300 Mbit/s"}
        | {"latency": f"{i % latency} ms"}
        for i, rate in enumerate(up)
    ]
    hosts = {f"home{i}": {} for i in range(len(up))}
    return Topology.from_mapping({"hosts": hosts, "routers": ["net"], "links": links, "protocol": "ideal"})


@pytest.mark.parametrize("name", ["AllReduce", "AsyncDiLoCo"])
def test_the_limit_is_what_shortens_a_round_most_when_doubled(name: str) -> None:
    """Each of two things is doubled by hand: what a plan says it saves is what a plan of it takes less."""
    homes = replace(
        setting("1 s"), topology=_homes(3, 3, 20, 20), model=planned_model("llama-2m", 64), tokens=1e8
    )
    strategy = build_strategy(name, **({} if name == "AllReduce" else {"H": 2}))
    before = plan(strategy, homes)
    saved = {each["by"]: each["saves_seconds_per_round"] for each in before.limit["tried"]}
    assert before.limit["by"] == max(saved, key=lambda by: saved[by])
    by_hand = {
        "compute": replace(homes, compute=Compute.parse("500 ms")),
        "2 links of about 3 Mbit/s (home0 - net, home1 - net)": replace(homes, topology=_homes(6, 6, 20, 20)),
    }
    for by, where in by_hand.items():
        less = before.seconds_per_round - measure(strategy, where).seconds_per_round
        if by in saved:
            assert saved[by] == pytest.approx(less, rel=0.02, abs=0.02), by
        else:  # it could not be the limit, and was not simulated
            assert less < 0.9 * max(saved.values()), by


def test_the_limit_counts_steps_that_are_not_simulated() -> None:
    """Gradients cross slow cards inside sites at each of 50 steps, displacements the line between sites once."""
    network = json.loads(json.dumps(NETWORK))
    for region in network["regions"].values():
        region["nic"] = "50 Mbit/s"
    slow = replace(
        setting("1 ms"), topology=Topology.from_mapping(network), model=planned_model("llama-2m", 64)
    )
    found = plan(build_strategy("DiLoCo", H=50, ranks_per_worker=2), slow)
    assert found.limit["by"].startswith("4 links of about 50 Mbit/s")
    assert found.limit["shortens_by"] > 0.3


_FAST = star(4, "1 Gbit/s", "0 s")


@pytest.mark.parametrize(
    ("by", "protocol", "eased"),
    [
        ("core of 4 hosts (h0, h1 and 2 more)", {"core": "20 Mbit/s"}, {"core": "40 Mbit/s"}),
        ("software of ideal", {"software": "1 s"}, {"software": "500 ms"}),
    ],
)
def test_the_limit_names_what_a_protocol_limits(
    by: str, protocol: Mapping[str, str], eased: Mapping[str, str]
) -> None:
    """And saves what a plan with the protocol's limit eased takes less: faster links would save nothing."""
    where = replace(setting("10 ms"), topology=_FAST, model=planned_model("llama-2m", 64), tokens=None)
    strategy = build_strategy("AllReduce")
    found, less = (
        plan(strategy, replace(where, protocol={"preset": "ideal", **each})) for each in (protocol, eased)
    )
    assert found.limit["by"] == by
    saved = found.seconds_per_round - less.seconds_per_round
    assert found.limit["saves_seconds_per_round"] == pytest.approx(saved, rel=1e-3)


def test_the_limit_names_a_short_queue_of_hosts_that_refuses_packets() -> None:
    """Three sockets of a host want six packets in a queue of four, and wait for their timers."""
    short, long = (
        replace(_FAST, links=tuple(replace(link, queue_packets=packets) for link in _FAST.links))
        for packets in (4, 8)
    )
    model = planned_model("llama-2m", 64)
    where = replace(
        setting("10 ms"), topology=short, model=model, tokens=None, protocol="linux-tcp", collectives="direct"
    )
    found, less = (plan(build_strategy("AllReduce"), replace(where, topology=each)) for each in (short, long))
    assert found.limit["by"].startswith("queue of 4 links of about 1 Gbit/s")
    saved = found.seconds_per_round - less.seconds_per_round
    assert found.limit["saves_seconds_per_round"] == pytest.approx(saved, rel=1e-3)
    assert not any("queue" in each["by"] for each in less.limit["tried"])


def test_published_dimensions() -> None:
    """The presets have the numbers of parameters that their papers print."""
    printed = {"llama-7b": 6.74e9, "llama-13b": 13.02e9, "llama-3-8b": 8.03e9, "intellect-1": 10.21e9}
    for name, number in printed.items():
        made = planned_model(name, 64, num_layers=1)
        layers = PLANNED_MODELS[name]["num_layers"]
        layer = sum(parameter.numel() for parameter in made.model.blocks[0].parameters())  # type: ignore[union-attr,index]
        assert made.num_parameters + (layers - 1) * layer == pytest.approx(number, rel=2e-3)


@pytest.mark.parametrize("name", ["llama-2m", "gpt-small"])
def test_operations_are_counted_by_layers(name: str) -> None:
    """One more layer is as many operations wherever it stands: counting the whole model gives the same."""
    made = planned_model(name, 32, num_layers=5)
    assert made.sequence_flops == SequenceModel(made.model, 32).sequence_flops


def test_rounds_are_simulated_until_they_repeat() -> None:
    """Windows grow for three rounds here; the mean of the second and the third was a quarter too long."""
    wan = Topology.load("wan-4-regions")
    where = replace(setting(protocol="linux-tcp"), model=planned_model("llama-2m", 64), topology=wan)
    measured = Measured(build_strategy("AllReduce"), where)
    ends = measured.rounds.on(where, 12).round_seconds
    assert ends[1] - ends[0] > 1.4 * (ends[-1] - ends[-2]), "the second round is not like later ones"
    assert measured.plan.seconds_per_round == pytest.approx(ends[-1] - ends[-2], rel=1e-4)
    assert measured.plan.steady
    one_round = measure(build_strategy("AllReduce"), replace(where, tokens=64 * 8))
    assert one_round.days == pytest.approx(ends[0] / 86_400)


def test_settings_go_inside_a_protocol_and_a_compute_time_that_are_one_word(tmp_path: Any) -> None:
    """`--set protocol.streams=8` changes one setting of the file's `protocol: linux-tcp`."""
    path = tmp_path / "small.yaml"
    path.write_text(
        "task: digits\nworkers: {count: 2}\ntopology: lan\nprotocol: linux-tcp\ncompute: 1 s\nsteps: 1\n"
        "strategies: [AllReduce]\n"
    )
    loaded = Experiment.load(path, ["protocol.streams=8", "compute.jitter=0.1"])
    assert loaded.settings.protocol == {"preset": "linux-tcp", "streams": 8}
    assert (loaded.settings.compute.fixed, loaded.settings.compute.jitter) == (1.0, 0.1)
    path.write_text(path.read_text().replace("1 s", "flops"))
    loaded = Experiment.load(path, ["compute.flops.device=a100"])
    assert loaded.settings.compute.flops.device == "a100"


# --- very many workers --------------------------------------------------------------------------------------


def homes(number: int, **more: Any) -> Setting:
    """No two alike: uploads of 10 to 100 Mbit/s, downloads of 100 to 1,000, and 3 to 60 ms."""
    rates = [10 + 90 * (0.61803 * i % 1) for i in range(number)]
    links = [
        {
            "between": [f"h{i}", "net"],
            "up": f"{rate:.5f} Mbit/s",
            "down": f"{100 + 900 * (0.41421 * i % 1):.5f} Mbit/s",
            "latency": f"{3 + 57 * (0.73205 * i % 1):.5f} ms",
        }
        for i, rate in enumerate(rates)
    ]
    network = {
        "hosts": {f"h{i}": {} for i in range(number)},
        "routers": ["net"],
        "links": links,
        "protocol": "ideal",
    }
    model = planned_model("llama-2m", 32)
    return Setting(model, Topology.from_mapping(network), Compute.parse("1 s"), number, 2, 1e6, **more)


@pytest.mark.parametrize(
    "protocol", ["ideal", "linux-tcp", {"preset": "linux-tcp", "window": "64 KiB"}], ids=str
)
def test_a_crowd_takes_what_its_busiest_link_takes(protocol: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty-four homes that send codes to each other: seconds to two hundredths, and every link's bytes."""
    where = homes(24, protocol=protocol)
    strategy = build_strategy("DiLoCo", H=2, codec="int8")
    whole = Measured(strategy, where)
    monkeypatch.setattr(estimate, "_MOST_WHOLE", 300)
    monkeypatch.setattr(estimate, "_MOST_UNLIKE", 300)
    reckoned = Measured(strategy, homes(24, protocol=protocol))
    assert reckoned.plan.seconds_per_round == pytest.approx(whole.plan.seconds_per_round, rel=0.02)
    assert reckoned.plan.wan_bytes == whole.plan.wan_bytes
    assert reckoned.figures.link_bytes == pytest.approx(whole.figures.link_bytes)
    assert any("busiest link" in remark for remark in reckoned.plan.remarks)


def test_too_many_ranks_that_read_the_clock_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staged codes in flight have every rank run: of thousands one line says what to do, at once."""
    monkeypatch.setattr("netgym.planning.rounds._MOST_LIVE_RANKS", 8)
    where = homes(9)
    with pytest.raises(InputError, match="reads the clock, so each of 9 ranks has to run, 8 at most"):
        measure(build_strategy("StreamingDiLoCo", H=10, codec="int8", tau=2, num_fragments=2), where)
