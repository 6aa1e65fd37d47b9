"""`check`: a strategy that is broken in one way is found by exactly that law's row."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from exogym_core import Strategy
from exogym_core.communicator import Communicator
from exogym_core.strategy import STRATEGIES, Chain
from netgym.cli.main import main
from netgym.strategy_check import LAWS, CheckReport, check
from netsim.errors import InputError


class Momentum(Strategy):
    """Steps along the mean of all ranks' momenta; each fault below breaks one thing of it."""

    def setup(
        self, model: nn.Module, comm: Communicator, max_steps: int, seed: int, coding: Any = None
    ) -> None:
        super().setup(model, comm, max_steps, seed, coding)
        self.momentum = torch.zeros(sum(p.numel() for p in self.trainable))

    def gradient(self) -> Tensor:
        return torch.cat([p.grad.reshape(-1) for p in self.trainable if p.grad is not None])

    def mean(self, flat: Tensor) -> Tensor:
        return self.comm.all_reduce(flat.clone(), "avg")

    def step(self) -> None:
        self.momentum = 0.9 * self.momentum + self.mean(self.gradient())
        for parameter, piece in zip(
            self.trainable, self.momentum.split([p.numel() for p in self.trainable]), strict=True
        ):
            parameter.grad = piece.view_as(parameter).clone()
        self.optimizer_step()
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "momentum": self.momentum}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.momentum = state["momentum"].clone()


class Raises(Momentum):
    def mean(self, flat: Tensor) -> Tensor:
        raise ZeroDivisionError("by the number of peers")


class Idles(Strategy):
    """It communicates and never updates."""

    def step(self) -> None:
        self.comm.all_reduce(torch.ones(3))
        super().step()


class Silent(Momentum):
    def mean(self, flat: Tensor) -> Tensor:
        return flat


class NeverCommunicates(Silent):
    def communicate(self, step: int) -> None:
        super().mean(self.gradient())

    def before_update(self) -> Tensor:
        return self.gradient()

    def step(self) -> None:
        assert self.before_update().isfinite().all()  # its result is used
        super().step()


class NeverCalls(Momentum):
    def communicate(self, step: int) -> None:
        raise ZeroDivisionError("while step() sends by itself")


class Drifts(Momentum):
    def gradient(self) -> Tensor:
        return super().gradient() + 0.1 * self.rank

    def step(self) -> None:
        super().step()
        with torch.no_grad():
            self.trainable[0].add_(0.01 * self.rank)


class Outer(Momentum):
    """Its judged model is a copy of the newest replica, and of another one in the faults below."""

    judged = "outer"

    def judged_state(self) -> dict[str, Tensor]:
        return {name: self.shipped(parameter.detach()) for name, parameter in self.named_trainable()}

    def shipped(self, value: Tensor) -> Tensor:
        return value.clone()


class JudgesZeros(Outer):
    def shipped(self, value: Tensor) -> Tensor:
        return torch.zeros_like(value)


class JudgesTheStart(Outer):
    def setup(self, model: nn.Module, *others: Any, **options: Any) -> None:
        super().setup(model, *others, **options)
        self.first = {name: parameter.detach().clone() for name, parameter in self.named_trainable()}

    def judged_state(self) -> dict[str, Tensor]:
        return self.first


class JudgesAnotherModel(Outer):
    def shipped(self, value: Tensor) -> Tensor:
        return value.flip(0) if self.local_step else value.clone()


class JudgesItsOwn(Outer):
    """Ranks' models differ, and each ships its own."""

    def gradient(self) -> Tensor:
        return super().gradient() + 0.1 * self.rank

    def mean(self, flat: Tensor) -> Tensor:
        super().mean(flat)
        return flat


class AveragesForFree(Momentum):
    def mean(self, flat: Tensor) -> Tensor:
        super().mean(flat[:1])
        with self.comm.off_clock():
            return super().mean(flat)


class DeclaresAnotherRound(Momentum):
    round_steps = 3

    def mean(self, flat: Tensor) -> Tensor:
        return super().mean(flat) if self.local_step % 2 else flat * 0


class JudgesInVain(Outer):
    judged = "own"


class SendsAfterwards(Momentum):
    def step(self) -> None:
        super().step()
        self.mean(torch.ones(3))


class Undercounts(Momentum):
    def mean(self, flat: Tensor) -> Tensor:
        mean = super().mean(flat)
        self.comm.traffic.bytes_sent -= 1
        return mean


class DrawsGlobally(Momentum):
    def mean(self, flat: Tensor) -> Tensor:
        mean = super().mean(flat)
        torch.rand(1)
        return mean


class DrawsFromTheSystem(Momentum):
    def mean(self, flat: Tensor) -> Tensor:
        return super().mean(flat * (1 + os.urandom(1)[0] / 1e4))


class Forgets(Momentum):
    def state_dict(self) -> dict[str, Any]:
        return Strategy.state_dict(self)

    def load_state_dict(self, state: Any) -> None:
        Strategy.load_state_dict(self, state)


class ForgetsTheCount(Momentum):
    def load_state_dict(self, state: Any) -> None:
        self.optim.load_state_dict(state["optim"])
        self.momentum = state["momentum"].clone()


class KeepsLambda(Momentum):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rule": lambda: None}


class SharesTheClass(Momentum):
    """Ranks in threads read each other's class attributes."""

    seen: ClassVar[dict[int, int]] = {}

    def mean(self, flat: Tensor) -> Tensor:
        mean = super().mean(flat)
        type(self).seen[self.rank] = self.local_step
        self.comm.barrier()
        return mean * (1 + 0.001 * sum(self.seen.values()))


class KnowsTheTransport(Momentum):
    def mean(self, flat: Tensor) -> Tensor:
        return super().mean(flat * (1.01 if self.comm.transport == "gloo" else 1))


class KeepsInTheClass(Momentum):
    """What a rank keeps between steps is in its process, and so in no checkpoint."""

    steps_here: ClassVar[dict[int, int]] = {}

    def mean(self, flat: Tensor) -> Tensor:
        steps = self.steps_here.get(self.rank, 0) if self.local_step else 0
        self.steps_here[self.rank] = steps + 1
        return super().mean(flat * (1 + 0.01 * steps))


class EncodesForNothing(Momentum):
    def mean(self, flat: Tensor) -> Tensor:
        return super().mean(flat.bfloat16()).float()


class NeedsAModel(Silent):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()


PLANTED: list[tuple[type[Strategy], str, str]] = [
    (Raises, "runs", "by the number of peers"),
    (Silent, "runs", "nothing was sent in 5 steps: "),
    (NeverCommunicates, "runs", "nothing was sent: step() never calls self.communicate(); call it there, or"),
    (NeverCalls, "runs", "step() never calls self.communicate(); call it there, or leave step() out"),
    (Idles, "runs", "no parameter changed in 5 steps: call self.optimizer_step()"),
    (Drifts, "judged", "judged = 'replica' says that all ranks' models are equal"),
    (JudgesZeros, "judged", "is not the model's before the first step"),
    (JudgesTheStart, "judged", "is still the model of the start after 5 steps"),
    (JudgesAnotherModel, "judged", "away from the mean of the ranks' models, which moved by"),
    (JudgesItsOwn, "judged", "judged_state() of version 1 is another on rank 1 than on rank 0"),
    (AveragesForFree, "clock", "in the run that withholds what comes off the clock"),
    (DeclaresAnotherRound, "round", "round_steps is 3, and rank 0 sends"),
    (JudgesInVain, "judged", "judges ranks' models, so that judged_state() would be ignored"),
    (SendsAfterwards, "bytes", "call super().step() last"),
    (Undercounts, "bytes", "leave comm.traffic to the communicator"),
    (DrawsGlobally, "generator", "torch's in step 1 on rank 0 draws from the global generator"),
    (DrawsFromTheSystem, "twice", "in the second run: take nothing from clocks"),
    (Forgets, "state", "declare what step() reads of 'momentum' in Forgets: state = State('momentum')"),
    (ForgetsTheCount, "state", "call super().load_state_dict(state) in ForgetsTheCount"),
    (KeepsLambda, "state", "KeepsLambda.state_dict()"),
    (SharesTheClass, "processes", "in the run in processes: keep what a rank has in self"),
    (KnowsTheTransport, "gloo", "in the run over gloo: let no value depend on comm.transport"),
    (KeepsInTheClass, "resume", "in the run resumed from its checkpoint of step 3"),
    (EncodesForNothing, "coding", "self.charge(NAME, 'encode', num_values)"),
]


def failed(report: CheckReport) -> list[str]:
    return [row.law for row in report.rows if row.status == "failed"]


def leave_out_processes(monkeypatch: pytest.MonkeyPatch, law: str = "") -> dict[str, Any]:
    """Try no law that starts processes, but for this one: sound strategies try all of them below."""
    slow = {"processes", "gloo", "resume"} - {law}
    tried = {name: each for name, each in LAWS.items() if name not in slow}
    monkeypatch.setattr("netgym.strategy_check.LAWS", tried)
    return tried


@pytest.mark.parametrize(
    ("strategy", "law", "line"), PLANTED, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_fault_is_found_by_its_law_alone(
    strategy: type[Strategy], law: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = leave_out_processes(monkeypatch, law)
    for shared in (SharesTheClass.seen, KeepsInTheClass.steps_here):
        shared.clear()
    report = check(strategy, {"optim_spec": "sgd", "lr": 0.02}, num_workers=2, num_steps=5)
    assert failed(report) == [law], str(report)
    assert not report.passed
    (row,) = (row for row in report.rows if row.law == law)
    assert line in row.line
    assert "\n" not in row.line
    # What builds on a broken law is not tried: it would only repeat the same.
    skipped = {row.law for row in report.rows if row.status == "skipped"}
    assert skipped == {name for name, each in tried.items() if law in each.after}


def test_every_law_has_a_planted_fault() -> None:
    assert {law for _, law, _ in PLANTED} == set(LAWS)


# Outer strategies and asynchronous ones: the others keep the same laws in conformance/ and in laws/.
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (Outer, {"optim_spec": "sgd", "lr": 0.02}),
        ("FedAvg", {"H": 2, "island_size": 2}),  # one of three is left over, another in each round
        pytest.param("HALoS", {"H": 2, "K": 1}, marks=pytest.mark.thorough),
    ],
)
def test_a_sound_strategy_passes(strategy: Any, options: dict[str, Any]) -> None:
    report = check(strategy, options, num_workers=3, num_steps=5)
    assert "failed" not in {row.status for row in report.rows}, str(report)
    assert strategy == "HALoS" or {row.status for row in report.rows} == {"passed"}
    assert len(report.rows) == len(LAWS)


def test_it_takes_factories_references_and_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_processes(monkeypatch)
    short = {"num_steps": 3, "num_workers": 2}
    made = check(lambda period, lr: STRATEGIES["DiLoCo"](H=period, lr=lr), {"period": 2, "lr": 0.1}, **short)
    assert (made.passed, made.strategy) == (True, "DiLoCoStrategy")
    assert check("exogym_core.strategy:FedAvgStrategy", {"H": 1}, **short).passed
    assert check("Chain", {"modules": [{"name": "DiLoCo", "H": 2}]}, **short).passed
    alone = check(Chain(), **short)  # of which ranks' models are judged
    assert alone.rows[0].line.startswith("nothing was sent in 3 steps: ")
    with pytest.raises(InputError, match="check: test_check:NeedsAModel: needs model: give it in options"):
        check("test_check:NeedsAModel", **short)


def test_the_command_names_the_broken_law(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    tried = leave_out_processes(monkeypatch)
    (tmp_path / "own_drift.py").write_text(
        "from exogym_core.strategy import AllReduceStrategy\n\n\n"
        "class Drift(AllReduceStrategy):\n"
        "    def __init__(self, by=0.0, **options):\n"
        "        super().__init__(**options)\n"
        "        self.by = by\n\n"
        "    def step(self):\n"
        "        super().step()\n"
        "        self.trainable[0].data.add_(self.by * self.rank)\n"
    )
    assert main(["check", "own_drift:Drift", "--steps", "3", "--workers", "2"]) == 0
    seen = capsys.readouterr()
    assert "code: object own_drift:Drift of own_drift.py" in seen.err
    assert f"{len(tried)} of {len(tried)} laws passed, 0 failed" in seen.out
    assert main(["check", "own_drift:Drift", "by=0.1", "--set", "lr=0.01", "--steps", "3", "--json"]) == 1
    output = json.loads(capsys.readouterr().out)
    assert output["options"] == {"by": 0.1, "lr": 0.01}
    assert [row["law"] for row in output["rows"] if row["status"] == "failed"] == ["judged"]
