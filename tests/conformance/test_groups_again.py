"""Groups that are made once and used again, over every transport."""

from __future__ import annotations

import pytest
import torch

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import AveragingCommunicator


@pytest.mark.parametrize("transport", ["netsim", "gloo"])
def test_reuse_gives_one_group_for_the_same_ranks(transport: str) -> None:
    def body(comm: Communicator) -> list[float]:
        got = []
        for round_number in range(4):
            pair = [0, comm.rank or 1 + round_number % 2]
            if comm.rank in (0, 1 + round_number % 2):
                group = comm.group(pair, reuse=True)
                handle = group.all_reduce(torch.tensor([float(comm.rank + round_number)]), async_op=True)
                got.append(float(comm.group(pair, reuse=True).all_reduce(torch.tensor([1.0]))))
                got.append(float(handle.wait()))
                # Another order and a group of its own are others.
                got.append(float(comm.group(pair[::-1], reuse=True).broadcast(torch.tensor([comm.rank]))))
                got.append(float(comm.group(pair).all_reduce(torch.tensor([2.0]))))
        return got

    zero, one, two = run_ranks(body, 3, transport=transport).results  # type: ignore[arg-type]
    assert one == [2.0, 1.0, 1.0, 4.0, 2.0, 5.0, 1.0, 4.0]
    assert two == [2.0, 4.0, 2.0, 4.0, 2.0, 8.0, 2.0, 4.0]
    assert zero == one[:4] + two[:4] + one[4:] + two[4:]


def test_islands_over_sockets_connect_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import strategy_reference as reference

    from exogym_core.communicator.gloo.rendezvous import Rendezvous
    from exogym_core.strategy import FedAvgStrategy

    model, batches = reference.make_problem(3, 8, 3, 3, seed=1)
    made = Rendezvous.subgroup
    asked: list[tuple[int, ...]] = []

    def subgroup(self: Rendezvous, ranks: tuple[int, ...], where: tuple[str, int]) -> object:
        asked.append(tuple(ranks))
        assert len(asked) == len(set(asked)), "an island that comes again is connected already"
        return made(self, ranks, where)

    monkeypatch.setattr(Rendezvous, "subgroup", subgroup)  # ranks are forked: each has a list of its own
    islands = AveragingCommunicator(2, H=1)
    islands.seed = 0
    drawn = [tuple(islands.island(0, 3, round_number)) for round_number in range(8)]
    assert len(set(drawn)) < len(drawn)
    strategy = FedAvgStrategy("sgd", lr=0.1, island_size=2)
    real = reference.run_strategy(strategy, model, batches, transport="gloo")
    simulated = reference.run_strategy(strategy, model, batches)
    for ours, theirs in zip(simulated.results, real.results, strict=True):
        torch.testing.assert_close(ours, theirs)
