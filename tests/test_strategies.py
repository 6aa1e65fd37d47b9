"""Strategies' options, schedules and habits; what they compute is in laws/test_strategy_laws.py."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import pytest
import strategy_reference as reference
import torch
from experiments import fitted
from torch import Tensor, nn

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.strategy import (
    STRATEGIES,
    AllReduceStrategy,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    CommunicationModule,
    DeMoStrategy,
    DiLoCoStrategy,
    IndexSelector,
    OptimSpec,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
    build_strategy,
    ensure_optim_spec,
)
from exogym_core.strategy.base import StepContext
from exogym_core.strategy.options import accepted_arguments, option, options_of, positive_int
from exogym_core.strategy.parts.codecs import codec_named
from exogym_core.strategy.parts.rounds import FragmentOptions
from netsim.errors import InputError, UnknownNameError

WITHOUT_SERVERS = [name for name in STRATEGIES if not build_strategy(name).num_servers]

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def on_one_rank(strategy: Strategy, model: nn.Module | None = None, max_steps: int = 10) -> Strategy:
    """`strategy` set up on a world of one, to look at."""
    model = model or nn.Linear(3, 2)

    def body(comm: Communicator) -> Strategy:
        strategy.setup(model, comm, max_steps, 0)
        return strategy

    return run_ranks(body, 1).results[0]


def problem(num_ranks: int = 3, steps: int = 4) -> tuple[reference.Net, reference.Batches]:
    return reference.make_problem(num_ranks, steps, 4, 6, seed=3)


# --- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_an_unknown_argument_is_refused_with_the_accepted_ones(name: str) -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown argument of .* 'inner_optin': did you mean 'inner_optim'"
    ):
        build_strategy(name, inner_optin="adam")


@pytest.mark.parametrize("name", WITHOUT_SERVERS)
def test_the_optimizer_has_three_names_in_every_strategy(name: str) -> None:
    whole_updates = ("DGC", "DeMo", "Dion", "OneBitAdam", "SignSGD")  # others would take these for gradients
    kind = torch.optim.SGD if name in whole_updates else torch.optim.RMSprop
    text = kind.__name__
    for argument, optim in (
        ("optim_spec", text.lower()),
        ("inner_optim_spec", kind),
        ("inner_optim", {"name": text.lower()}),
    ):
        strategy = on_one_rank(build_strategy(name, **{argument: optim}, lr=0.25))
        assert isinstance(strategy.optim, kind)
        assert strategy.learning_rate == 0.25


def test_optimizers_come_from_strings_classes_factories_and_groups() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(requires_grad=False)
    for text in ("adam", "adamw", "sgd", "rmsprop", "adagrad"):
        assert type(OptimSpec(text).build(model)).__name__.lower() == text
    assert OptimSpec(torch.optim.Adam, lr=0.5).build(model).param_groups[0]["lr"] == 0.5
    assert len(OptimSpec(SGD).build(model).param_groups[0]["params"]) == 1, "what is frozen is left out"
    groups = OptimSpec("sgd", params=lambda m: [{"params": [m.weight], "lr": 0.3}], lr=0.1).build(model)
    assert groups.param_groups[0]["lr"] == 0.3
    assert ensure_optim_spec("adam", lr=0.2) == OptimSpec(torch.optim.Adam, lr=0.2)
    assert ensure_optim_spec(None) == OptimSpec("adamw")


def test_lion_takes_the_steps_of_its_paper() -> None:
    """Algorithm 2 of arXiv 2302.06675 in numbers of Python; where momentum and gradient are zero only decay acts."""
    weights, gradients = (
        [0.5, -0.25, 1.0],
        [[0.1, 0.0, 0.0], [-1.0, 0.2, 0.0], [0.3, -0.3, 0.0], [-0.01, 0.0, 0.0]],
    )
    parameter = nn.Parameter(torch.tensor(weights, dtype=torch.float64))
    optimizer = OptimSpec("lion", lr=0.1, betas=[0.8, 0.9], weight_decay=0.5).build([parameter])
    momenta = [0.0, 0.0, 0.0]
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        for at, (weight, momentum, each) in enumerate(zip(weights, momenta, gradient, strict=True)):
            direction = 0.8 * momentum + 0.2 * each
            sign = (direction > 0) - (direction < 0)
            weights[at] = weight - 0.1 * (sign + 0.5 * weight)
            momenta[at] = 0.9 * momentum + 0.1 * each
        assert parameter.tolist() == pytest.approx(weights, rel=1e-12)


@pytest.mark.parametrize("kind", [DiLoCoStrategy, SPARTADiLoCoStrategy])
def test_the_outer_optimizer_is_what_was_asked_for(kind: Any) -> None:
    outer = on_one_rank(kind()).optimizers[1].param_groups[0]
    assert (outer["lr"], outer["momentum"], outer["nesterov"]) == (0.7, 0.9, True)
    outer = on_one_rank(kind(outer_lr=0.4, outer_momentum=0.5)).optimizers[1].param_groups[0]
    assert (outer["lr"], outer["momentum"]) == (0.4, 0.5)
    assert isinstance(on_one_rank(kind(outer_optim_spec="adam")).optimizers[1], torch.optim.Adam)


@pytest.mark.parametrize("name", ["DiLoCo", "StreamingDiLoCo"])
def test_an_outer_step_takes_no_momentum_as_well(name: str) -> None:
    """`outer_momentum: 0` failed in every rank: torch has no Nesterov momentum of 0."""
    fitted(strategy=build_strategy(name, outer_momentum=0.0, lr=0.01))


def test_opendilocos_names_are_accepted() -> None:
    theirs = DiLoCoStrategy(
        inner_optimizer=SGD, outer_optimizer=SGD, num_inner_steps=5, hivemind_compression="fp16"
    )
    assert theirs.H == DiLoCoStrategy(local_steps=5).H == 5
    assert theirs.averaging.codec is codec_named("fp16")


# --- learning rates ----------------------------------------------------------------------------------------


def rates(strategy: Strategy, steps: int) -> list[float]:
    """The learning rate of each step."""
    strategy = on_one_rank(strategy, max_steps=steps)
    found = []
    for _ in range(steps):
        found.append(strategy.learning_rate)
        strategy.model(torch.ones(1, 3)).sum().backward()
        strategy.step()
    return found


def test_lambda_cosine_warms_up_from_above_zero_and_ends_at_a_tenth() -> None:
    options = {"warmup_steps": 4, "cosine_anneal": True}
    found = rates(
        AllReduceStrategy("sgd", lr=1.0, lr_scheduler="lambda_cosine", lr_scheduler_kwargs=options), 11
    )
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert found == sorted(found[:4]) + sorted(found[4:], reverse=True)
    assert found[-1] == pytest.approx(
        0.1 + 0.9 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * 6 / 7)).item())
    )
    assert rates(AllReduceStrategy("sgd", lr=1.0, lr_scheduler="lambda_cosine"), 3) == [1.0] * 3


# --- strategies of one's own -------------------------------------------------------------------------------


class SignSGD(Strategy):
    """As a user of EXO Gym writes it: options set before the constructor, step calls super's last."""

    def __init__(self, optim_spec: Any = None, **kwargs: Any) -> None:
        self.optim_spec = ensure_optim_spec(optim_spec, OptimSpec(torch.optim.SGD, lr=0.01))
        super().__init__(**kwargs)

    def _init_node(self, model: nn.Module, rank: int, num_nodes: int) -> None:
        super()._init_node(model, rank, num_nodes)
        self.optim = self.optim_spec.build(model)
        self._setup_scheduler()
        self.prepared = (rank, num_nodes)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = self.comm.all_reduce(parameter.grad.sign()).sign()
        self.optim.step()
        super().step()


def test_a_strategy_in_exo_gyms_manner_works() -> None:
    model, batches = problem()
    seen = []

    def body(comm: Communicator) -> Tensor:
        strategy, replica = SignSGD(lr_scheduler="lambda_cosine"), copy.deepcopy(model)
        strategy.setup(replica, comm, len(batches), 0)
        reference.train(strategy, replica, comm, batches)
        seen.append((strategy.prepared, strategy.local_step, type(strategy.optim), strategy.nbytes))
        return reference.vector(replica)

    results = run_ranks(body, 3).results
    num_bytes = 8 * results[0].numel()
    assert sorted(seen) == [((rank, 3), 4, torch.optim.SGD, num_bytes) for rank in range(3)]
    assert all(torch.equal(results[0], result) for result in results)
    assert torch.allclose((results[0] - reference.vector(model)).abs().max(), torch.tensor(0.04).double())
    with pytest.raises(UnknownNameError, match=r"unknown argument of SignSGD 'H'; accepted: "):
        SignSGD(H=3)


class Meeting(Strategy):
    """Strategy without a step of its own, that exchanges after an update."""

    def communicate(self, step: int) -> None:
        self.model.weight.data.mul_(10**step)


class Exchanging(Strategy):
    """Likewise before an update."""

    def before_update(self) -> None:
        self.model.weight.grad.mul_(3)


class Extended(Meeting):
    """A step of its own, over a class without one: `super().step()` counts it."""

    def step(self) -> None:
        self.local_update()
        self.communicate(self.local_step + 1)
        super().step()


class OfParts(Meeting):
    """The same, by the parts of a local update."""

    def step(self) -> None:
        self.clip_gradients()
        self.optimizer_step()
        self.communicate(self.local_step + 1)
        super().step()


@pytest.mark.parametrize(
    ("kind", "weights"),
    [(Meeting, [0, -100]), (Exchanging, [-2, -5]), (Extended, [0, -100]), (OfParts, [0, -100])],
)
def test_a_strategy_without_step_updates_and_exchanges(kind: type[Strategy], weights: list[float]) -> None:
    def body(comm: Any) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        strategy, found = kind(optim_spec=OptimSpec("sgd", lr=1.0)), []
        strategy.setup(model, comm, 2, 0)
        for _ in range(2):
            strategy.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            strategy.step()
            found.append(model.weight.item())
        assert strategy.local_step == 2
        return found

    assert run_ranks(body, 1).results == [weights]


class InFragments(Strategy):
    """A strategy of one's own that has fragments, and no rounds in which they leave."""

    cut: FragmentOptions = options_of(FragmentOptions)


class InFragmentsOfARound(InFragments):
    H: int = option(2, positive_int)


def test_fragments_need_a_round_and_are_held_to_it() -> None:
    with pytest.raises(
        InputError, match=r"^InFragments: has FragmentOptions, but no H.*: declare H: int = option"
    ):
        InFragments()
    assert InFragmentsOfARound(num_fragments=2).cut.num_fragments == 2
    with pytest.raises(InputError, match="InFragmentsOfARound: num_fragments=3 must be at most H=2"):
        InFragmentsOfARound(num_fragments=3)


class Turning(nn.Module):
    """With a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.turn, self.linear = nn.Parameter(torch.eye(2, dtype=torch.complex64)), nn.Linear(2, 2)

    def forward(self, values: Tensor) -> Tensor:
        return (self.linear(values).to(torch.complex64) @ self.turn).abs().square().mean()


@pytest.mark.parametrize("name", STRATEGIES)
def test_complex_weights_train_or_are_refused_by_name_before_the_first_step(name: str) -> None:
    taken: list[int] = []

    def body(comm: Any) -> None:
        options = {
            key: v for key, v in {"H": 2, "tau": 1}.items() if key in accepted_arguments(STRATEGIES[name])
        }
        strategy, model = build_strategy(name, **options), Turning()
        strategy.setup(model, comm, 4, 0)
        if comm.rank >= strategy.num_nodes:
            strategy.serve(lambda steps: None)
            return
        for number in range(4):
            strategy.begin_step(StepContext(number))
            strategy.zero_grad()
            loss = model(torch.ones(1, 2))
            strategy.before_backward(last_micro_batch=True)
            loss.backward()
            strategy.step()
            taken.append(number)
        strategy.finish()

    if STRATEGIES[name].takes_complex:
        run_ranks(body, 5)
        return
    with pytest.raises(InputError, match=r"parameter 'turn' is torch.complex64, and ranks bring real ones"):
        run_ranks(body, 5)
    assert not taken


def sgd_of(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1)


def foreign() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


WRONG_FACTORIES: list[tuple[Any, str]] = [
    (lambda given: sgd_of(list(given)[:1]), "leaves out 'bias' (1 of 2 parameters): give it all of them"),
    (lambda given: sgd_of([foreign()]), "leaves out 'weight' (2 of 2 parameters)"),
    (
        lambda given: sgd_of([*given, foreign()]),
        "updates 1 parameter, one of shape (3,), that the model does not",
    ),
    (lambda given: None, "the factory returned None: return a torch.optim.Optimizer over the parameters"),
    (lambda given: torch.optim.SGD, "the factory returned the class SGD: return a torch.optim.Optimizer"),
    (lambda given: list(given)[:0], "the factory returned []: return a torch.optim.Optimizer"),
]


@pytest.mark.parametrize(("factory", "line"), WRONG_FACTORIES)
def test_an_optimizer_of_other_parameters_than_the_models_is_refused(factory: Any, line: str) -> None:
    strategy = AllReduceStrategy(optim_spec=factory)

    def body(comm: Any) -> None:
        copy.deepcopy(strategy).setup(nn.Linear(2, 2), comm, 4, 0)

    with pytest.raises(InputError, match=rf"^optimizer OptimSpec\(<lambda>\): {re.escape(line)}"):
        run_ranks(body, 5)


class Pull(CommunicationModule):
    """Every third step, moves half way to rank 0."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []

    def communicate(self, model: nn.Module, rank: int, num_nodes: int, local_step: int) -> None:
        self.calls.append((rank, num_nodes, local_step))
        if local_step % 3 == 2:
            weights = nn.utils.parameters_to_vector(model.parameters()).detach()
            weights += self.comm.broadcast(weights.clone())
            nn.utils.vector_to_parameters(weights / 2, model.parameters())


def test_modules_are_called_in_order_after_the_local_update() -> None:
    model, batches = problem(2, 3)
    strategy = CommunicateOptimizeStrategy([Pull(), Pull()], optim_spec=SGD, max_norm=1.0)
    run = reference.run_strategy(strategy, model, batches)

    def after_step(number: int, replicas: list[nn.Module]) -> None:
        if number == 3:
            for _ in range(2):
                pulled = (reference.vector(replicas[0]) + reference.vector(replicas[1])) / 2
                nn.utils.vector_to_parameters(pulled, replicas[1].parameters())

    expected = reference.reference_local(model, batches, SGD, after_step, max_norm=1.0)
    for got, replica in zip(run.results, expected, strict=True):
        torch.testing.assert_close(got, reference.vector(replica))
    module = strategy.communication_modules[0]
    assert isinstance(module, Pull)
    assert module.calls == [], "ranks work on copies"


class FirstValues(IndexSelector):
    """A selector as EXO Gym has them: a mask of the tensor's shape."""

    def get_indices(self, param: Tensor, iteration: int) -> Tensor:
        mask = torch.zeros_like(param, dtype=torch.bool)
        mask[: iteration + 1] = True
        return mask


def test_sparta_takes_a_selector_of_ones_own() -> None:
    model, batches = problem(2, 3)
    run = reference.run_strategy(SPARTAStrategy(SGD, index_selector=FirstValues(0.1)), model, batches)
    assert run.traffic[0].payload_bytes == 8 * (1 + 2 + 3)
    first, second = run.results
    assert torch.equal(first[:3], second[:3])
    assert not torch.equal(first[3:], second[3:])


# --- gradients ---------------------------------------------------------------------------------------------


def test_uneven_batches_are_weighted_by_samples_in_demo() -> None:
    """Three samples on one rank and one on the other give what two and two give; AllReduce: test_trainer.py."""
    torch.manual_seed(0)
    model, samples = nn.Linear(4, 1, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)

    def train(cut: int) -> list[Tensor]:
        def body(comm: Communicator) -> Tensor:
            strategy, replica = DeMoStrategy(lr=0.1), copy.deepcopy(model)
            strategy.setup(replica, comm, 1, 0)
            own = samples[:cut] if comm.rank == 0 else samples[cut:]
            strategy.begin_step(StepContext(samples=len(own), samples_of=[cut, len(samples) - cut]))
            replica(own).pow(2).mean().backward()
            strategy.step()
            return reference.vector(replica)

        return run_ranks(body, 2).results

    for even, uneven in zip(train(2), train(3), strict=True):
        torch.testing.assert_close(even, uneven)


class Odd(nn.Module):
    """What models have besides plain parameters: frozen, tied, unused and empty ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(requires_grad=False)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.head(self.frozen(self.embedding(tokens)))
        return nn.functional.cross_entropy(scores.float(), tokens) + self.empty.sum()


@pytest.mark.parametrize(
    ("num_ranks", "dtype"),
    [
        (2, torch.bfloat16),
        pytest.param(2, torch.float32, marks=pytest.mark.thorough),
        pytest.param(1, torch.float16, marks=pytest.mark.thorough),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", WITHOUT_SERVERS)
def test_frozen_tied_unused_and_empty_parameters_are_no_trouble(
    name: str, num_ranks: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Odd().to(dtype)
    rounds = {key: v for key, v in {"H": 2, "tau": 1}.items() if key in accepted_arguments(STRATEGIES[name])}
    strategy = build_strategy(name, optim_spec="sgd", lr=0.1, max_norm=1.0, **rounds)
    batches: Any = [[torch.arange(5) for _ in range(num_ranks)] for _ in range(4)]
    run = reference.run_strategy(strategy, model, batches)
    trained = copy.deepcopy(model)
    for result in run.results:
        nn.utils.vector_to_parameters(result, trained.parameters())
        assert bool(result.isfinite().all())
        assert torch.equal(trained.frozen.weight, model.frozen.weight)
        assert trained.head.weight is trained.embedding.weight
        assert trained(torch.arange(5)).item() < model(torch.arange(5)).item()


# --- published sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("codec", "resolution"), [("released", 2**-24), ("compact", 2**-8)])
def test_what_demos_codec_rounds_off_stays_in_the_momentum(codec: str, resolution: float) -> None:
    model, _ = problem(1, 1)
    strategy = on_one_rank(DeMoStrategy(compression_topk=4096, codec=codec, lr=0.1), model)
    for parameter in model.parameters():
        parameter.grad = torch.linspace(1, 2, parameter.numel(), dtype=torch.float64).view_as(parameter)
    norm = sum(float(0.01 * (p.grad**2).sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    strategy.step()
    rest = torch.cat([momentum.view(-1) for momentum in strategy.state_dict()["momentum"]])
    assert 0 < float(rest.norm()) <= resolution * norm


def test_islands_are_drawn_again_for_each_round_and_partition_the_world() -> None:
    module = AveragingCommunicator(3, H=1)
    module.seed = 5
    drawn = set()
    for round_number in range(6):
        islands = {tuple(module.island(rank, 8, round_number)) for rank in range(8)}
        assert sorted(rank for island in islands for rank in island) == list(range(8))
        assert sorted(map(len, islands)) == [2, 3, 3]
        drawn.add(frozenset(islands))
    assert len(drawn) > 3


class Shapes(nn.Module):
    """Parameters without values."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.empty(s, device="meta")) for s in shapes)


@pytest.mark.parametrize(("topk", "megabytes"), [(32, 110.32), (2, 6.90)])
def test_demo_sends_what_its_paper_says_for_olmo_1b(topk: int, megabytes: float) -> None:
    layer = [(6144, 2048), (2048, 2048), (16384, 2048), (2048, 8192)]
    olmo = Shapes((50304, 2048), *layer * 16)

    def message_bytes(codec: str) -> int:
        strategy: Any = on_one_rank(DeMoStrategy(compression_topk=topk, codec=codec), olmo)
        return sum(blocks.num_bytes for blocks in strategy.blocks)

    assert round(message_bytes("released") / 1e6, 2) == megabytes
    assert message_bytes("compact") * 3 == message_bytes("released")
