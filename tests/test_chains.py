"""Chains of modules: that they compose, that EXO Gym's names work on top, and what files say."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import strategy_reference as reference
import torch
from experiments import experiment, fit
from torch import Tensor, nn

from exogym_core.strategy import (
    MODULES,
    AllReduceStrategy,
    AveragingCommunicator,
    Chain,
    CommunicateOptimizeStrategy,
    CommunicationModule,
    DiLoCoCommunicator,
    DiLoCoStrategy,
    FedAvgStrategy,
    Sites,
    SparseCommunicator,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    all_reduce,
)
from exogym_core.strategy.parts.codecs import Int8Codec
from netgym.experiment.experiment import Experiment
from netsim.errors import InputError

SEED = 3
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def same_runs(first: Any, second: Any, num_ranks: int = 4) -> None:
    """Both strategies give the same bits and send the same bytes."""
    model, batches = reference.make_problem(num_ranks, 6, 4, 6, seed=1)
    one, other = (reference.run_strategy(strategy, model, batches, SEED) for strategy in (first, second))
    assert all(map(torch.equal, one.results, other.results))
    assert one.traffic == other.traffic


@pytest.mark.parametrize(
    ("strategy", "chain"),
    [
        (DiLoCoStrategy(ADAMW, H=2), Chain([DiLoCoCommunicator(H=2)], ADAMW)),
        (
            DiLoCoStrategy(ADAMW, H=2, ranks_per_worker=2, max_norm=0.3),
            Chain([Sites(2), DiLoCoCommunicator(H=2)], ADAMW, max_norm=0.3),
        ),
        (
            DiLoCoStrategy(ADAMW, H=2, ranks_per_worker=2, sharding="FULL_SHARD"),
            Chain([DiLoCoCommunicator(H=2), Sites(2, sharding="FULL_SHARD")], ADAMW),
        ),
        (
            DiLoCoStrategy(ADAMW, H=2, ranks_per_worker=2),
            CommunicateOptimizeStrategy([DiLoCoCommunicator(2, ranks_per_worker=2)], ADAMW),
        ),
        (
            SPARTADiLoCoStrategy(ADAMW, p_sparta=0.3, H=3),
            Chain([SparseCommunicator(p_sparta=0.3), DiLoCoCommunicator(3)], ADAMW),
        ),
        (FedAvgStrategy(ADAMW, island_size=2), Chain([AveragingCommunicator(2)], ADAMW)),
        (AllReduceStrategy(ADAMW), Chain([Sites()], ADAMW)),
        (AllReduceStrategy(ADAMW), Chain([Sites(4)], ADAMW)),
    ],
)
def test_strategies_are_chains(strategy: Any, chain: Any) -> None:
    same_runs(strategy, chain)


def sum_of_displacements(strategy: Any) -> Tensor:
    """Where many steps of tiny gradients lead to."""
    torch.manual_seed(0)
    model, batches = reference.make_problem(2, 30, 3, 4, seed=2)
    return reference.run_strategy(strategy, model, batches, SEED).results[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda **how: AllReduceStrategy(SGD, **how),
        lambda **how: SPARTAStrategy(SGD, p_sparta=1.0, **how),
        lambda **how: Chain([Sites(1), DiLoCoCommunicator(H=2, **how)], SGD),
    ],
    ids=["AllReduce", "SPARTA", "Chain"],
)
def test_error_feedback_helps_any_of_them(make: Any) -> None:
    """What a coarse codec rounds off is not lost: the run ends nearer to the one that rounds nothing."""

    class Coarse(Int8Codec):
        largest = 7

        def nearest(self, levels: Tensor) -> Tensor:
            return levels.round().clamp(-7, 7).to(torch.int8)

    exact = sum_of_displacements(make())
    plain = sum_of_displacements(make(codec=Coarse(chunk=64)))
    fed = sum_of_displacements(make(codec=Coarse(chunk=64), error_feedback=True))
    assert float((fed - exact).norm()) < float((plain - exact).norm())


# --- hooks -------------------------------------------------------------------------------------------------


def test_members_have_the_chains_replica_and_progress() -> None:
    """A member that EXO Gym's users wrote keeps what `_init_node` is given, as they do."""

    class Own(AveragingCommunicator):
        def prepare(self) -> None:
            super().prepare()
            self.rank, self.num_nodes, self.seen = self.rank, self.num_nodes, []

        def communicate(self, step: int) -> None:
            super().communicate(step)
            self.seen.append((self.local_step, self.rank, self.num_nodes))

    def body(comm: Any) -> list[Any]:
        member, model = Own(2), nn.Linear(1, 1)
        chain = Chain([member], SGD, lr_scheduler="lambda_cosine")
        chain.setup(model, comm, 4, SEED)
        assert (member.model, member.optim, member.site) == (model, chain.optim, chain.site)
        assert (member.scheduler, member.seed, member.max_steps) == (chain.scheduler, SEED, 4)
        for _ in range(3):
            chain.zero_grad()
            model(torch.ones(1)).sum().backward()
            chain.step()
        assert "local_step" not in member.state_dict()
        return member.seen

    result = reference.run_ranks(body, 2)
    assert result.results == [[(step, rank, 2) for step in range(3)] for rank in range(2)]


# --- files and mistakes ------------------------------------------------------------------------------------

FILE = experiment(
    model="{name: mlp}",
    workers="{count: 2}",
    device=None,
    topology="two-datacenters",
    compute="1 ms",
    batch_size=8,
    evaluate=None,
    strategies="[{name: Chain, lr: 0.1, modules: [{name: Sites, ranks_per_worker: 2}, {name: DiLoCo, H: 2}]}]",
)


def test_files_name_modules(tmp_path: Any) -> None:
    path = tmp_path / "chains.yaml"
    path.write_text(FILE)
    experiment = Experiment.load(path)
    chain = experiment.build_strategy(experiment.strategies[0])
    assert isinstance(chain, Chain)
    assert [type(module) for module in chain.modules] == [Sites, DiLoCoCommunicator]
    assert chain.judged == "outer"
    path.write_text(FILE.replace("name: DiLoCo,", "name: DiLoCoCommunicator,"))  # as in Python
    experiment = Experiment.load(path)
    assert experiment.build_strategy(experiment.strategies[0]).modules[1].H == 2
    path.write_text(FILE.replace(", modules: [{name: Sites, ranks_per_worker: 2}, {name: DiLoCo, H: 2}]", ""))
    with pytest.raises(InputError, match="Chain: give modules: a list such as"):
        Experiment.load(path)
    path.write_text(FILE.replace("name: Sites", "name: Site"))
    with pytest.raises(InputError, match="unknown module 'Site': did you mean 'Sites'"):
        Experiment.load(path)


def test_files_name_modules_of_ones_own_and_reading_them_runs_nothing(tmp_path: Any) -> None:
    path, code = tmp_path / "chains.yaml", tmp_path / "own_member.py"
    path.write_text(FILE.replace("{name: DiLoCo, H: 2}", "{name: 'own_member:Mine', H: 5}"))
    code.write_text("raise SystemExit")
    loaded = Experiment.load(path)
    assert [each.reference for each in loaded.own_code] == ["own_member:Mine"]
    loaded.check_runs(elsewhere=True)
    code.write_text("from exogym_core.strategy import DiLoCoCommunicator as Mine")
    chain = Experiment.load(path).build_strategy(loaded.strategies[0])
    assert [(type(each), each.H) for each in chain.modules[1:]] == [(DiLoCoCommunicator, 5)]  # type: ignore[attr-defined]
    path.write_text(FILE.replace("name: DiLoCo,", "name: 'nowhere:Mine',"))
    with pytest.raises(InputError, match=r"chains\.yaml:\d+: strategies\[0\]: strategy 'nowhere:Mine'"):
        Experiment.load(path)


class Silent(CommunicationModule):
    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        pass


def test_rounds_that_go_on_do_not_combine_with_modules_that_wait_for_all() -> None:
    line = "Chain: rounds that continue without absent ranks do not combine with Silent, which waits for all"
    with pytest.raises(InputError, match=line):
        Chain([DiLoCoCommunicator(averaging_timeout="9 s"), Silent()])


def test_exchanges_go_through_the_strategys_communicator() -> None:
    with pytest.raises(InputError, match=r"write self\.comm\.all_reduce\(tensor\)"):
        all_reduce(torch.ones(1))


@pytest.mark.parametrize("name", [*MODULES][::3])
def test_a_module_of_ones_own_may_derive_from_a_published_one(name: str, tmp_path: Any) -> None:
    """Checkpoints took the model's parameters, of which it has lists, for a state that was not kept."""
    derived, options = type("Derived", (MODULES[name],), {}), MODULES[name].Options.names()
    given = {key: value for key, value in {"H": 2, "num_fragments": 1, "tau": 1}.items() if key in options}
    modules = [derived(**given), AveragingCommunicator(H=1)]
    fit(strategy=Chain(modules, SGD), checkpoint_interval=2, save_dir=tmp_path)
    assert list(tmp_path.rglob("*.safetensors"))
