"""fit: what it accepts, what it returns, what ranks do together, and its time on a simulated network."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import random
import re
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from experiments import fit, fitted, mlp, samples
from forks import Fork
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from worlds import star_form

from exogym_core import FitResult, LocalTrainer, Trainer
from exogym_core.communicator import run_ranks
from exogym_core.cost.compute import Compute
from exogym_core.data.samples import EpochOrder, Reading, SharedData
from exogym_core.events import Evaluated, EvaluationPoint, Grid, StepDone
from exogym_core.learner import TorchLearner
from exogym_core.results.recorder import RowRecorder
from exogym_core.run.loop import Loop
from exogym_core.strategy import AllReduceStrategy, DiLoCoStrategy, FedAvgStrategy, OptimSpec, Strategy
from exogym_core.uncompiled import without_compiler
from netgym.tasks import MLP, build_model
from netsim.errors import InputError, RankError, UnknownNameError
from netsim.ranks import StampedRow


def sgd(lr=0.1):
    return AllReduceStrategy(optim_spec=OptimSpec(torch.optim.SGD, lr=lr))


def states_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_first_users_snippet_runs_unchanged():
    model, train_dataset, val_dataset = mlp(), samples(), samples(seed=1)

    trainer = LocalTrainer(model, train_dataset, val_dataset)
    strategy = DiLoCoStrategy(inner_optim="adam", H=100)
    trained = trainer.fit(strategy=strategy, num_nodes=4, device="cpu")

    assert isinstance(trained, MLP)
    assert trained is not model
    assert trainer.result is trained.fit_result
    assert isinstance(trainer.result, FitResult)
    assert len(trainer.result.history) == 1  # one epoch of 40 samples by 4 x 16
    assert trainer.result.virtual_seconds is None
    assert trainer.result.complete


def test_positions_are_those_of_exo_gym():
    trained = Trainer(mlp(), samples()).fit(2, sgd(), 2, None, "cpu", None, 10, 5, False)
    assert trained.fit_result.history[-1] == pytest.approx(
        {**trained.fit_result.history[-1], "step": 4, "examples_trained": 80}
    )


@pytest.mark.parametrize(
    ("limits", "steps"),
    [({}, 5), ({"num_epochs": 2}, 10), ({"max_steps": 7}, 7), ({"num_epochs": 3, "max_steps": 8.0}, 8)],
)
def test_epochs_and_steps_whichever_end_sooner(limits, steps):
    result = fit(**{"max_steps": None, **limits}).fit_result
    assert [row["step"] for row in result.history] == list(range(1, steps + 1))
    assert result.max_steps == steps


def train_alone(model, data, order, lr):
    """The same training in one process: plain SGD over batches of these indices."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for indices in order:
        optimizer.zero_grad()
        loss = model(data[indices])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@settings(max_examples=10)
@given(
    world=st.integers(1, 4),
    batch=st.integers(1, 4),
    count=st.integers(8, 30),
    mini=st.booleans(),
    seed=st.integers(0, 9),
)
def test_gradient_averaging_equals_one_process_with_the_whole_batch(world, batch, count, mini, seed):
    data, model = samples(count), mlp()
    trained = fit(
        model,
        data,
        num_nodes=world,
        batch_size=batch,
        minibatch_size=1 if mini else None,
        max_steps=None,
        num_epochs=1,
        shuffle=False,
        seed=seed,
    )
    stride = world * batch
    order = [range(start, min(start + stride, count)) for start in range(0, count, stride)]
    order = [list(indices) for indices in order if len(indices) >= world]
    alone, losses = train_alone(model, data, order, lr=0.1)
    for one, other in zip(trained.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert [row["train_loss"] for row in trained.fit_result.history] == pytest.approx(losses, rel=1e-4)


class Counting(nn.Module):
    """Floating, whole-number and truth-value buffers; the weight drifts with the rank's own stream."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("running", torch.zeros(2))

    def forward(self, batch):
        if self.training:
            self.seen += 1
            self.flag |= True
            self.running += torch.rand(2)
        return ((self.weight - torch.randn(2)) ** 2).mean()


def test_the_returned_model_is_the_mean_with_whole_numbers_of_rank_0():
    trained = fit(Counting(), strategy=FedAvgStrategy(H=100, inner_optim="sgd"), num_nodes=3)
    states = trained.fit_result.rank_states
    assert len(states) == 3
    for name in ("weight", "running"):
        values = [state[name] for state in states]
        assert not torch.equal(values[0], values[1])  # a random stream of its own per rank
        torch.testing.assert_close(trained.state_dict()[name], torch.stack(values).mean(dim=0))
    assert int(trained.seen) == 3
    assert bool(trained.flag)


def test_fit_changes_neither_its_model_nor_the_callers_random_state(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = mlp()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    expected = torch.rand(1), np.random.rand(), random.random()
    torch.manual_seed(3), np.random.seed(3), random.seed(3)
    fit(model, validation=samples(seed=1))
    assert (torch.rand(1), np.random.rand(), random.random()) == expected
    assert states_equal(model.state_dict(), before)
    assert not list(tmp_path.iterdir())


class Noisy(nn.Module):
    """Dropout and batch norm: shows whether evaluation leaves modes and random streams alone."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.frozen = nn.Dropout(0.5).eval()

    def forward(self, batch):
        inputs, labels = batch
        hidden = nn.functional.dropout(self.norm(inputs), 0.3, self.training)
        return nn.functional.cross_entropy(self.head(self.frozen(hidden)), labels)


def test_looking_changes_nothing_and_takes_no_virtual_time():
    torch.manual_seed(0)
    model = Noisy()
    runs = [
        fit(model, samples(60), samples(seed=1), max_steps=5, topology="lan", compute="1 s", **looking)
        for looking in (
            {"val_size": 0},
            {"val_interval": 1, "val_size": 7, "correlation_interval": 1},
            {"val_interval": 3, "accuracy": lambda model, batch: float(torch.rand(()))},
        )
    ]
    for run in runs[1:]:
        assert run.fit_result.history == runs[0].fit_result.history
        assert states_equal(run.state_dict(), runs[0].state_dict())
        assert run.fit_result.virtual_seconds == runs[0].fit_result.virtual_seconds
        assert run.fit_result.bytes_sent == runs[0].fit_result.bytes_sent
    looked = runs[1].fit_result
    by_step = {row["step"]: row["virtual_seconds"] for row in looked.history} | {0: 0.0}
    assert [row["virtual_seconds"] for row in looked.validation] == [by_step[step] for step in range(6)]
    assert runs[0].fit_result.validation == []
    assert not runs[0].frozen.training


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_evaluation_is_at_the_start_each_interval_and_the_end(num_nodes):
    validation = samples(23, seed=1)
    trained = fit(
        validation=validation,
        num_nodes=num_nodes,
        max_steps=5,
        val_interval=2,
        val_size=1000,
        target_loss=1e9,
        accuracy=lambda model, batch: float(model(batch)),
    )
    result = trained.fit_result
    assert [row["step"] for row in result.validation] == [0, 2, 4, 5]
    with torch.no_grad():
        expected = float(trained(validation[:]))
        of_rank_0 = copy.deepcopy(trained)
        of_rank_0.load_state_dict(result.rank_states[0])
        local = float(of_rank_0(validation[:]))
    assert result.final_loss == pytest.approx(expected)
    assert result.validation[-1]["global_loss"] == result.final_loss
    assert result.accuracy == pytest.approx(expected)
    assert result.validation[-1]["local_loss"] == pytest.approx(local)
    assert result.validation[-1]["global_perplexity"] == pytest.approx(np.exp(expected))
    assert result.validation[0]["local_loss"] == pytest.approx(result.validation[0]["global_loss"])


@pytest.mark.parametrize("val_size", [3, 24])
def test_evaluation_takes_any_number_of_fixed_samples(val_size):
    seen = []

    def accuracy(model, batch):
        seen.append(batch[0])
        return 1.0

    fit(validation=samples(23, seed=1), num_nodes=1, val_size=val_size, val_interval=1, accuracy=accuracy)
    per_round = len(seen) // 4
    rounds = [torch.cat(seen[start : start + per_round]) for start in range(0, len(seen), per_round)]
    assert all(torch.equal(rounds[0], other) for other in rounds)
    assert len(rounds[0]) == min(val_size, 23)


def test_warnings_name_the_line_that_calls_fit(tmp_path):
    trainer = Trainer(mlp(), samples())
    given = {"num_nodes": 2, "max_steps": 2, "batch_size": 4, "workers": "threads", "progress": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(
            strategy=DiLoCoStrategy(H=9), checkpoint_interval=5, save_dir=tmp_path, compute="1 s", **given
        )
    found = [(each.filename, str(each.message).partition(":")[0]) for each in caught]
    assert found == [(__file__, "fit"), (__file__, "checkpoints every 5 steps"), (__file__, "fit")]


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_period_longer_than_the_run_is_warned_of(num_nodes: int, recwarn: pytest.WarningsRecorder) -> None:
    """`netgym compare` warned, `fit` did not; one worker has nobody to send to."""
    warnings.simplefilter("always")
    for H in (3, 4):  # noqa: N806
        fit(strategy=DiLoCoStrategy(H=H), num_nodes=num_nodes)
    silent = "fit: DiLoCoStrategy sent nothing in 3 steps: the workers trained each on their own: "
    remedy = "to have them exchange, shorten the period (H) or train for more steps"
    assert [str(each.message) for each in recwarn] == [silent + remedy] * (num_nodes - 1)


def test_replicas_that_agree_correlate_and_those_that_drift_less():
    synchronous = fit(correlation_interval=1).fit_result.correlation
    assert [row["step"] for row in synchronous] == [1, 2, 3]
    assert synchronous[-1]["correlation"] == pytest.approx(1.0)
    drifting = fit(strategy=FedAvgStrategy(H=100, lr=0.1), correlation_interval=3).fit_result.correlation
    assert drifting[0]["correlation"] < 0.999


def test_events_are_the_rows():
    events = []
    result = fit(
        validation=samples(seed=1), val_interval=2, correlation_interval=3, on_event=events.append
    ).fit_result
    assert [event for event in events if event["kind"] == "step"] == [
        {"kind": "step", **row} for row in result.history
    ]
    assert [event["step"] for event in events if event["kind"] == "validation"] == [0, 2, 3]
    assert [event["step"] for event in events if event["kind"] == "correlation"] == [3]


# --- data of one's own -----------------------------------------------------------------------------------------


def test_a_factory_is_called_by_keyword_for_every_rank():
    calls = []

    def factory(rank, num_nodes, train_dataset):
        calls.append((rank, num_nodes, train_dataset))
        return samples(10 + rank, seed=rank)

    result = (
        Trainer(mlp(), factory, factory)
        .fit(strategy=sgd(), num_nodes=3, device="cpu", batch_size=4, workers="threads")
        .fit_result
    )
    assert sorted(set(calls)) == [(0, 3, False), (0, 3, True), (1, 3, True), (2, 3, True)]
    assert [row["examples_trained"] for row in result.history] == [12, 24, 24 + 2 + 3 + 4]


def test_equal_first_batches_are_warned_of():
    with pytest.warns(UserWarning, match="begin with the same batch on every rank"):
        fit(data=lambda rank, num_nodes, train_dataset: samples())


@pytest.mark.parametrize("lengths", [(40, 40, 40, 5), (12, 30, 30, 30)])
def test_samples_that_no_epoch_sees_are_warned_of_with_their_numbers(lengths):
    """Long datasets beside a short one were cut to its length, in silence."""

    def factory(rank, num_nodes, train_dataset):
        return samples(lengths[rank], seed=rank)

    steps = -(-min(lengths) // 8)
    seen = sum(min(length, 8 * steps) for length in lengths)
    line = f"from {min(lengths)} to {max(lengths)} .* after {steps} steps?, and sees {seen} of the {sum(lengths)}"
    with pytest.warns(UserWarning, match=line):
        fit(data=factory, num_nodes=4, batch_size=8, max_steps=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if steps > 1:  # a run that ends before leaves out what it would in any case
            fit(data=factory, num_nodes=4, batch_size=8, max_steps=1)


def repeated(loader):
    while True:
        yield from loader


@pytest.mark.parametrize(("num_nodes", "batch_size", "length"), [(3, 7, 50), (4, 16, 6)])
def test_the_sampler_of_torch_gives_the_losses_of_a_loop_with_it(num_nodes, batch_size, length):
    """Ranks of torch's own loaders, whose epoch nobody sets, as in EXO Gym; over several epochs."""
    model, data = mlp(), samples(length)
    loaders = [
        repeated(DataLoader(data, batch_size, sampler=DistributedSampler(data, num_nodes, rank)))
        for rank in range(num_nodes)
    ]
    trained = fit(
        copy.deepcopy(model),
        data,
        strategy=sgd(0.3),
        num_nodes=num_nodes,
        batch_size=batch_size,
        max_steps=12,
        sampler="torch",
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(12):
        optimizer.zero_grad()
        for loader in loaders:
            (model(next(loader)) / num_nodes).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained.state_dict()[name], parameter.data)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(samples(20))


def test_an_iterable_trains_and_ends_after_its_epochs():
    indexed = fit(data=samples(20), max_steps=5, shuffle=False)
    streamed = fit(data=Stream(), max_steps=5)
    assert streamed.fit_result.history == indexed.fit_result.history
    assert len(fit(data=Stream(), num_epochs=1, max_steps=50).fit_result.history) == 3
    own = fit(data=lambda rank, num_nodes, train_dataset: Stream(), num_epochs=1, max_steps=50)
    assert len(own.fit_result.history) == 5
    with pytest.raises(InputError, match="an iterable training set has no known length; pass max_steps"):
        fit(data=Stream(), max_steps=None)


# --- mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_devices_without_cuda_are_reported():
    with pytest.raises(InputError, match="there is no CUDA device here"):
        fit(device="cuda")
    with pytest.raises(
        InputError, match=r"fit: device 'cuda:1' is not here: there is none; pass device='cpu'"
    ):
        fit(device=None, devices=["cpu", 1])


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (lambda value: value.expand(3), r"a tensor of shape \[3\]"),
        (lambda value: 0.5, "float"),
        (lambda value: (value, value), r"\(Tensor, Tensor\)"),
    ],
)
def test_a_model_must_return_a_scalar(output, what):
    class Wrong(MLP):
        def forward(self, batch):
            return output(super().forward(batch))

    with pytest.raises((InputError, RankError), match=f"the model returned {what}; it must return"):
        fit(Wrong(6, [5], 3), validation=samples())


@pytest.mark.parametrize(
    ("model", "data", "message"),
    [
        (torch.nn.Linear(6, 3), None, "TypeError: linear(): argument 'input' (position 1) must be Tensor"),
        (None, [1, 2, 3, 4], ""),
    ],
)
def test_a_first_batch_that_fails_is_reported_before_ranks_start(model, data, message):
    with pytest.raises(InputError) as caught:
        fit(model, data, workers="auto")
    assert str(caught.value).startswith(f"fit: a first batch fails: {message}")


def test_a_loss_must_have_a_gradient():
    class Detached(MLP):
        def forward(self, batch):
            return super().forward(batch).detach()

    with pytest.raises(
        InputError, match="step 1: the model returned a loss without a gradient; do not detach"
    ):
        fit(Detached(6, [5], 3))


def test_a_loss_that_is_not_finite_is_recorded_and_warned_of():
    class Exploding(MLP):
        calls = 0

        def forward(self, batch):
            loss = super().forward(batch)
            Exploding.calls += 1
            return loss * float("nan") if Exploding.calls == 4 else loss

    with pytest.warns(UserWarning, match="the loss was not finite at step 2 and training continued"):
        result = fit(Exploding(6, [5], 3), max_steps=4).fit_result
    assert result.first_non_finite_step == 2
    assert len(result.history) == 4


def test_a_step_that_is_not_counted_is_refused():
    """Rounds by `local_step` never came, and the run ended well without having sent a byte."""

    class Forgetful(Strategy):
        judged = "own"

        def step(self):
            self.optimizer_step()
            if self.local_step % 2 == 1:
                self.comm.all_reduce(self.trainable[0].data, "avg")

    with pytest.raises(
        InputError, match=r"Forgetful: step\(\) has not counted step 1: end it with super\(\)\.step"
    ):
        fit(strategy=Forgetful(lr=0.1))


class _Stumbling(AllReduceStrategy):
    def step(self):
        if self.comm.rank == 1:
            raise ValueError("boom in my step")
        super().step()


@pytest.mark.parametrize("transport", ["netsim", "gloo"])
def test_what_is_read_last_of_a_failing_strategy_is_its_line(transport):
    """It stood between frames of the code that carries ranks and a second traceback that began with them."""
    with pytest.raises(RankError) as caught:
        fit(strategy=_Stumbling(optim_spec=OptimSpec(torch.optim.SGD, lr=0.1)), transport=transport)
    lines = str(caught.value).splitlines()
    assert re.fullmatch(r"rank 1 failed at test_trainer\.py:\d+: ValueError: boom in my step", lines[0])
    assert [line for line in lines if line.startswith("  File ")] == [lines[1]]
    assert "test_trainer.py" in lines[1]
    assert caught.value.__suppress_context__
    inside = [frame for frame in caught.traceback if "exogym_core" in str(frame.path)]
    assert len(inside) == 1  # of `fit` itself


def test_ctrl_c_comes_out_and_leaves_what_was_done():
    def press(event):
        if event["step"] == 3:
            raise KeyboardInterrupt

    trainer = Trainer(mlp(), samples())
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(
            strategy=sgd(), num_nodes=2, device="cpu", batch_size=4, on_event=press, workers="threads"
        )
    assert [row["step"] for row in trainer.result.history] == [1, 2, 3]
    assert not trainer.result.complete


def test_torchs_compiler_is_imported_when_it_is_used_and_not_before():
    """Optimizers import it in their first step, which takes a second for nothing where no code is compiled."""

    def dataset(rank, num_nodes, train_dataset):  # called in a rank's process
        return samples(seed=rank)

    def train():
        model = mlp()
        for name in ("torch._dynamo", "torch._dynamo.external_utils"):
            del sys.modules[name]
        fit(model, dataset, strategy=sgd(), max_steps=1, workers="processes")
        assert "torch._dynamo" not in sys.modules
        with without_compiler():
            ones = torch.compiler.disable(torch.ones_like)
            assert ones(torch.zeros(2)).sum() == 2
            importlib.metadata.version("torch")  # which asks all finders of modules for distributions
            assert not hasattr(sys.modules["torch._dynamo"], "__file__")
            own = importlib.import_module("torch._dynamo.external_utils")
            assert sys.modules["torch._dynamo"].external_utils is own is sys.modules[own.__name__]
            assert own.__spec__.origin == own.__file__
            assert ones(torch.zeros(2)).sum() == 2
        assert sys.modules["torch._dynamo"].__file__

    done = Fork(train).end()
    assert done.returncode == 0, done.stderr


# --- on a simulated network ---------------------------------------------------------------------------------


def network(latency="0 ms", bandwidth="100 Mbit/s", hosts=3, devices=()):
    named = {f"h{index}": {"device": device} for index, device in enumerate(devices)}
    every = {f"h{index}": named.get(f"h{index}", {}) for index in range(hosts)}
    return {**star_form(every, bandwidth, latency), "hosts": every}


def fit_on_network(**arguments):
    model = build_model("mlp", inputs=6, hidden=[300, 200], classes=3, seed=0)
    given = {"num_nodes": 3, "max_steps": 5, "topology": network(), "compute": "500 ms", "val_size": 8}
    given |= {"strategy": AllReduceStrategy(lr=1e-3)}
    return fitted(model, samples(120), samples(120), **(given | arguments))


def test_the_world_is_the_topologys_hosts_by_default():
    assert fit_on_network(num_nodes=None).num_nodes == 3


def test_communication_is_added_and_reported():
    slow, fast = fit_on_network(strategy=FedAvgStrategy(H=1)), fit_on_network(strategy=FedAvgStrategy(H=5))
    num_bytes = 4 * (7 * 300 + 301 * 200 + 201 * 3)
    ring = 2 * 2 / 3 * num_bytes * 8 / 100e6
    assert slow.virtual_seconds == pytest.approx(5 * (0.5 + ring), rel=1e-3)
    assert fast.virtual_seconds == pytest.approx(5 * 0.5 + ring, rel=1e-3)
    assert slow.compute_utilisation == pytest.approx(0.5 / (0.5 + ring), rel=1e-3)
    assert slow.bytes_sent == 5 * fast.bytes_sent == pytest.approx(5 * 4 * num_bytes, rel=1e-3)
    assert slow.exposed_seconds == pytest.approx([5 * ring] * 3, rel=1e-3)


def test_a_backward_pass_hides_the_communication_of_what_is_ready():
    # One bucket can leave only at the end; small ones leave while earlier layers are still differentiated.
    whole = fit_on_network(strategy=AllReduceStrategy(lr=1e-3))
    buckets = fit_on_network(strategy=AllReduceStrategy(lr=1e-3, bucket_bytes=1000))
    assert whole.bytes_sent == pytest.approx(buckets.bytes_sent, rel=1e-3)
    # The second layer's average begins when its gradient is ready, and the first layer's is computed meanwhile.
    first, second, values = 7 * 300, 301 * 200, 7 * 300 + 301 * 200 + 201 * 3
    shown = (first + second) * 4 * 4 / 3 * 8 / 100e6 - 0.5 * 2 / 3 * first / values
    assert buckets.virtual_seconds == pytest.approx(5 * (0.5 + shown), abs=5 * 2e-3)
    assert whole.virtual_seconds > buckets.virtual_seconds + 5 * 8e-3
    assert [row["train_loss"] for row in whole.history] == pytest.approx(
        [row["train_loss"] for row in buckets.history], rel=1e-6
    )


def test_only_the_last_micro_batch_communicates():
    whole, pieces = fit_on_network(), fit_on_network(minibatch_size=1)
    assert pieces.bytes_sent == whole.bytes_sent
    assert sum(pieces.compute_seconds) == pytest.approx(sum(whole.compute_seconds))
    # A quarter of the backward pass is left to hide behind.
    assert pieces.virtual_seconds >= whole.virtual_seconds


def test_all_strategies_meet_the_same_jitter():
    spread = {"fixed": "500 ms", "jitter": 0.3}
    one, other = fit_on_network(compute=spread), fit_on_network(compute=spread, strategy=FedAvgStrategy(H=2))
    assert one.compute_seconds == pytest.approx(other.compute_seconds, abs=1e-6)
    assert len({round(seconds, 6) for seconds in one.compute_seconds}) == 3
    assert fit_on_network(compute=spread, seed=7).compute_seconds != one.compute_seconds


def test_ranks_of_one_host_share_its_fate():
    spread = {"fixed": "500 ms", "jitter": 0.3}
    seconds = fit_on_network(compute=spread, placement=["h1", "h0", "h1"]).compute_seconds
    assert seconds[0] == pytest.approx(seconds[2], abs=1e-6)
    assert seconds[0] != pytest.approx(seconds[1], abs=1e-3)


def test_flops_are_divided_by_each_hosts_device():
    result = fit_on_network(
        topology=network(devices=["raspberry-pi-5", "a100", "a100"]), compute={"flops": {"utilisation": 0.5}}
    )
    slow, fast, _ = result.compute_seconds
    assert result.hosts == ["h0", "h1", "h2"]
    assert slow / fast == pytest.approx(19.5e12 / (4 * 2.4e9 * 16), rel=1e-2)
    with pytest.raises(InputError, match=r"host h1: names no device, .* give compute='measured'"):
        # Which was an a100 without a word.
        fit_on_network(topology=network(devices=["raspberry-pi-5"]), compute=None)
    with pytest.raises(UnknownNameError, match="host h1: unknown device 'a10o'"):
        fit_on_network(topology=network(devices=["a100", "a10o"]), compute=None)


def test_measured_seconds_are_settled_as_fixed():
    result = fit_on_network(compute={"measured": {"factor": 3}, "jitter": 0.1})
    settled = Compute.parse(result.compute)
    assert settled.jitter == 0.1
    assert settled.fixed > 0
    assert fit_on_network(compute=settled).history == result.history


# --- a rank's loop, and rows of ranks -----------------------------------------------------------------------


def test_all_ranks_start_as_rank_0_buffers_included():
    class Buffered(MLP):
        def __init__(self, rank):
            super().__init__(6, [5], 3)
            self.register_buffer("count", torch.tensor(rank))
            self.register_buffer("flag", torch.tensor([rank == 0]))
            torch.nn.init.constant_(self.layers[0].weight, float(rank + 1))

    def body(comm):
        source = SharedData(samples(48), EpochOrder(48, True, 0), Reading(comm.rank, 3, 4, 2))
        replica, strategy = Buffered(comm.rank), AllReduceStrategy()
        learner = partial(TorchLearner, replica, comm, strategy.before_backward, None, spreads_backward=False)
        return Loop(comm, replica, strategy, source, learner, 0).run(), comm.traffic.bytes_sent

    for outcome, bytes_sent in run_ranks(body, 3).results:
        assert int(outcome.state["count"]) == 0
        assert bool(outcome.state["flag"])
        assert float(outcome.state["layers.0.weight"].max()) == 1.0
        assert bytes_sent == 0  # off the clock


# --- rows of ranks merged ----------------------------------------------------------------------------------------


def marked(rank, seconds, row):
    return StampedRow(rank, seconds, seconds / 2, seconds / 2, row)


def step_row(rank, seconds, step, loss, samples=2, sent=10):
    return marked(rank, seconds, StepDone(step, loss, samples, 0.1, sent * step, step, 0))


def evaluation(step, loss, version=None, born=None, mean=9.0):
    version, born = step if version is None else version, step if born is None else born
    return Evaluated(EvaluationPoint(Grid.STEP, step), 2.0, mean, loss, 0.5, version, born)


def test_a_model_is_credited_with_the_time_at_which_it_came_to_exist():
    def recorded(target_loss, *evaluations):
        result = FitResult(num_nodes=1, target_loss=target_loss)
        recorder = RowRecorder(result, True)
        for step in range(1, 7):
            recorder.add(step_row(0, 10.0 * step, step, 1.0))
        for each in evaluations:
            recorder.observe(evaluation(*each, mean=0.1))
        recorder.finish()
        return result

    result = recorded(1.0, (0, 3.0, 0, 0), (2, 0.9, 1, 1), (4, 0.9, 1, 1), (6, 0.5, 2, 5))
    assert [row["judged_virtual_seconds"] for row in result.validation] == [0.0, 10.0, 10.0, 50.0]
    assert [row["virtual_seconds"] for row in result.validation] == [0.0, 20.0, 40.0, 60.0]
    assert (result.target, result.virtual_seconds_to_target) == ("touched", None)  # one other model follows
    result = recorded(3.5, (1, 3.6, 0, 0), (2, 0.9, 1, 1), (4, 0.9, 2, 3), (6, 0.5, 3, 5))
    assert (result.target, result.virtual_seconds_to_target) == ("held", 10.0)


def test_an_interrupted_step_of_some_ranks_reaches_no_listener():
    """Its row had the figures of the ranks that were ahead; a resumed run gives it with those of all."""
    steps = []

    def press(row):
        steps.append(row["step"])
        if row["step"] == 15:
            raise KeyboardInterrupt

    options = {
        "topology": "lan",
        "compute": {"fixed": "2 ms", "jitter": 1.0},
        "strategy": DiLoCoStrategy(H=20),
    }
    with pytest.raises(KeyboardInterrupt):
        fit(max_steps=20, on_event=press, **options)
    assert steps == list(range(1, 16))
