"""State that a class declares: what is saved, and that it comes back in place, older forms included."""

from __future__ import annotations

from typing import Any

import torch

from exogym_core.strategy import MODULES, STRATEGIES, Chain, State, Strategy
from exogym_core.strategy.parts.state import Stateful
from netgym.strategy_check import Workload, find_faults


class Kept(Stateful):
    """One attribute of every kind."""

    state = State("tensor", "tensors", "residuals", "plain", renamed="_own", generator="_generator")

    def __init__(self) -> None:
        self.tensor, self.tensors, self.residuals = (
            torch.zeros(4),
            [torch.zeros(2), torch.zeros(3)],
            [None, None],
        )
        self.plain: Any = {"of": [0]}
        self._own, self._generator = 0, torch.Generator().manual_seed(1)


class KeptMore(Kept):
    state = State("more")
    more: Any = None


def changed() -> KeptMore:
    module = KeptMore()
    module.tensor += 1
    module.tensors[1] += 2
    module.plain["of"].append(3)
    module._own, module.more = 4, torch.ones(1)
    torch.rand(5, generator=module._generator)
    return module


def test_what_classes_and_bases_declare_comes_back_in_place_and_as_copies() -> None:
    module, fresh = changed(), KeptMore()
    view, state = fresh.tensor[:2], module.state_dict()
    assert list(state) == ["tensor", "tensors", "residuals", "plain", "renamed", "generator", "more"]
    fresh.load_state_dict(state)
    assert view.tolist() == [1, 1]
    assert [each.tolist() for each in fresh.tensors] == [[0, 0], [2, 2, 2]]
    assert (fresh.residuals, fresh.plain, fresh._own) == ([None, None], {"of": [0, 3]}, 4)
    assert torch.equal(fresh.more, module.more)
    assert torch.equal(torch.rand(3, generator=fresh._generator), torch.rand(3, generator=module._generator))
    module.tensor += 1
    module.plain["of"].append(5)
    assert (state["tensor"].tolist(), state["plain"]) == ([1] * 4, {"of": [0, 3]})
    assert fresh.plain == {"of": [0, 3]}


def test_a_list_that_grows_is_replaced() -> None:
    module, fresh = KeptMore(), KeptMore()
    module.tensors.append(torch.ones(1))
    module.plain = [1, None]
    fresh.load_state_dict(module.state_dict())
    assert ([len(each) for each in fresh.tensors], fresh.plain) == ([2, 3, 1], [1, None])


class Drift(Strategy):
    """Own strategy with a state that is declared."""

    state = State("_total")
    judged = "own"

    def _init_node(self, model: Any, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self._total = torch.zeros(1)

    def step(self) -> None:
        self._total += 1
        with torch.no_grad():
            for parameter in self.trainable:
                parameter.mul_(1 - 1e-3 * float(self.comm.all_reduce(self._total.clone(), "avg")))
        self.optimizer_step()
        super().step()


def test_declared_state_keeps_the_law_that_netgym_check_asks_for() -> None:
    assert find_faults(Drift(), Workload.small(3, 12), ["state", "resume"]) == []


def test_names_of_classes_are_those_that_they_say() -> None:
    class Mine(Chain, name="Mine of tests"):
        pass

    class Heir(Mine):
        pass

    try:
        assert Strategy.registry["Mine of tests"] is Mine
        assert Heir not in Strategy.registry.values()
    finally:
        del Strategy.registry["Mine of tests"]
    assert list(STRATEGIES) == sorted(STRATEGIES, key=str.casefold)
    assert all(issubclass(kind, Strategy) for kind in MODULES.values())
