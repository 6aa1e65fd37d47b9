"""A rank's loop: the order of the backward pass, equal starts, states that come back."""

from __future__ import annotations

import itertools

import pytest
import torch
from experiments import mlp, samples

from exogym_core.communicator import run_ranks
from exogym_core.cost.compute import Compute, StepDurations
from exogym_core.data.samples import EpochOrder, Reading, SharedData
from exogym_core.events import Evaluated, EvaluationPoint, EvaluationTaken, Grid, StepDone
from exogym_core.results.fit_result import FitResult
from exogym_core.results.recorder import RowRecorder, mean_utilisation
from exogym_core.run.learner import TorchLearner
from exogym_core.run.loop import Loop
from exogym_core.strategy import AllReduceStrategy
from netgym.tasks import MLP
from netsim.ranks import StampedRow


def data(rank=0, world=1, batch=4, mini=2):
    return SharedData(samples(48), EpochOrder(48, True, 0), Reading(rank, world, batch, mini))


def loop(comm, replica, strategy, source, max_steps, seconds=None):
    cost = None if seconds is None else StepDurations(Compute(), seconds, seed=0, host=0)

    def make_learner():
        spreads = strategy.overlaps_backward
        return TorchLearner(replica, comm, strategy.before_backward, cost, spreads_backward=spreads)

    return Loop(comm, replica, strategy, source, make_learner, max_steps)


class Watching(AllReduceStrategy):
    """Notes what the clock says when a gradient is ready."""

    overlaps_backward = True

    def setup(self, model, comm, max_steps, seed):
        super().setup(model, comm, max_steps, seed)
        self.seen = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: self.seen.append(comm.advanced))

    def step(self):
        self.seen.append(self.comm.advanced)
        super().step()


def clocked(comm):
    """A communicator that also notes how far its rank has advanced."""

    class Clocked(type(comm)):
        advanced = 0.0

        def advance(self, seconds):
            self.advanced += seconds
            super().advance(seconds)

    comm.__class__ = Clocked
    return comm


@pytest.mark.parametrize("mini", [4, 2])
def test_time_for_a_gradient_passes_before_the_strategy_sees_it(mini):
    def body(comm):
        strategy = Watching()
        loop(clocked(comm), mlp(), strategy, data(mini=mini), 1, seconds=6.0).run()
        return strategy.seen

    (seen,) = run_ranks(body, 1).results
    sizes = [parameter.numel() for parameter in mlp().parameters()]
    seconds = 6.0 * mini / 4  # of the last micro-batch, which alone is spread out
    *ready, stepped = seen[-5:]
    shares = [after - before for before, after in itertools.pairwise([6.0 - seconds * 2 / 3, *ready])]
    assert sorted(shares) == pytest.approx(sorted(seconds * 2 / 3 * size / sum(sizes) for size in sizes))
    assert stepped == pytest.approx(6.0)


def test_hooks_are_gone_after_training():
    trained = mlp()

    def body(comm):
        return loop(comm, trained, AllReduceStrategy(), data(), 1, seconds=1.0).run()

    run_ranks(body, 1)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in trained.parameters())


def test_all_ranks_start_as_rank_0_buffers_included():
    class Buffered(MLP):
        def __init__(self, rank):
            super().__init__(6, [5], 3)
            self.register_buffer("count", torch.tensor(rank))
            self.register_buffer("flag", torch.tensor([rank == 0]))
            torch.nn.init.constant_(self.layers[0].weight, float(rank + 1))

    def body(comm):
        made = loop(comm, Buffered(comm.rank), AllReduceStrategy(), data(comm.rank, 3), 0)
        return made.run(), comm.traffic.bytes_sent

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


def test_rows_of_ranks_become_one_a_step():
    result, events = FitResult(num_nodes=2), []
    recorder = RowRecorder(result, True, [events.append])
    recorder.observe(evaluation(0, 3.0))
    recorder.add(step_row(1, 1.0, 1, 1.0, samples=1))
    recorder.add(step_row(0, 2.0, 1, 4.0, samples=2))
    recorder.add(step_row(1, 2.5, 2, 1.0))
    recorder.observe(evaluation(2, 1.5))
    assert len(result.validation) == 1  # rank 0 has not finished step 2 yet
    recorder.add(step_row(0, 4.0, 2, 2.0))
    assert [row["train_loss"] for row in result.history] == [3.0, 1.5]
    assert [row["virtual_seconds"] for row in result.history] == [2.0, 4.0]
    assert [row["examples_trained"] for row in result.history] == [3, 7]
    assert [row["bytes_sent"] for row in result.history] == [20, 40]
    # Over the time that all had: the rank that was through earlier waited for the other.
    assert [row["compute_utilisation"] for row in result.history] == [1.5 / 2 / 2, 3.25 / 2 / 4]
    assert [row["virtual_seconds"] for row in result.validation] == [0.0, 4.0]
    assert (result.final_loss, result.accuracy, result.mean_of_replicas_loss) == (1.5, 0.5, 9.0)
    assert [event["kind"] for event in events] == ["validation", "step", "step", "validation"]


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


def test_a_servers_model_has_the_servers_time_even_if_workers_rows_come_first():
    """Which of the two comes first hangs on threads; the time at which it was judged must not."""
    for told_first in (False, True):
        result = FitResult(num_nodes=1, judged="server")
        recorder = RowRecorder(result, True)
        taken = marked(1, 5.0, EvaluationTaken(EvaluationPoint(Grid.STEP, 1), 1))
        if told_first:
            recorder.add(taken)
        recorder.observe(evaluation(1, 0.5)._replace(local_loss=None, global_loss=None))
        recorder.add(step_row(0, 4.0, 1, 1.0))
        if not told_first:
            recorder.add(taken)
        assert [row["judged_virtual_seconds"] for row in result.validation] == [5.0]
        assert result.validation[0]["global_perplexity"] is None


def test_what_comes_to_exist_at_the_very_end_is_credited_with_the_end():
    result = FitResult(num_nodes=1)
    recorder = RowRecorder(result, True)
    recorder.add(step_row(0, 10.0, 1, 1.0))
    recorder.observe(evaluation(1, 0.5)._replace(judged_step=None))
    assert not result.validation
    result.virtual_seconds = 12.0
    recorder.finish()
    assert [row["judged_virtual_seconds"] for row in result.validation] == [12.0]


def test_utilisation_of_a_clock_that_never_moved_is_whole():
    assert mean_utilisation([0.0, 0.0], 0.0) == 1.0
