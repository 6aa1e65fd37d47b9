"""What datasets draw at random is made from (seed, rank, epoch, step): disjoint, repeatable, resumable."""

from __future__ import annotations

import random

import experiments
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from exogym_core.data.samples import (
    Draws,
    EpochOrder,
    Reading,
    SharedData,
    StreamedData,
    StreamOfDraws,
    held_generators,
)
from netsim.errors import InputError


class Noise(Dataset):
    """Every kind of generator that a sample can be drawn from."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.cat([torch.randn(1), torch.tensor([random.random(), np.random.random(), index])])


class HoldingNoise(Noise):
    def __init__(self, seed=0):
        self.transforms = [{"jitter": np.random.default_rng(seed)}]
        self.others = (random.Random(seed), torch.Generator().manual_seed(seed), np.random.RandomState(seed))

    def __getitem__(self, index):
        mine = self.transforms[0]["jitter"].random(), self.others[0].random(), self.others[2].rand()
        return torch.cat([torch.tensor(mine), torch.rand(1, generator=self.others[1])])


class ShuffledStream(IterableDataset):
    def __init__(self, count=24):
        self.count = count

    def __iter__(self):
        for index in torch.randperm(self.count):
            yield index, random.random()


def steps_of(source, count):
    return [[batch for batch, _ in source.next_step().micro_batches] for _ in range(count)]


def shared(dataset, rank=0, seed=0, mini=4, **options):
    reading = Reading(rank, 2, 4, mini, draws=Draws(dataset, seed), **options)
    return SharedData(dataset, EpochOrder(24, False, seed), reading)


def flat(steps):
    return torch.cat([batch.flatten() for step in steps for batch in step])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [Noise, HoldingNoise])
def test_noise_is_new_for_each_seed_rank_epoch_and_step_and_the_same_with_workers(kind):
    """A loader used to be seeded by the epoch alone: all ranks and seeds drew the same noise."""
    one = shared(kind())
    steps = [flat([step])[:3] for step in steps_of(one, 6)]  # two epochs of three steps
    other_rank, other_seed = (
        flat(steps_of(shared(kind(), rank=1), 1)),
        flat(steps_of(shared(kind(), seed=1), 1)),
    )
    noises = [*steps, other_rank[:3], other_seed[:3]]
    assert all(not torch.isclose(a, b).any() for i, a in enumerate(noises) for b in noises[:i])
    by_workers = shared(kind(), loader={"num_workers": 1}, mini=2)
    assert torch.equal(flat(steps_of(by_workers, 4)), flat(steps_of(shared(kind()), 4)))


def test_how_a_dataset_has_seeded_its_own_generators_counts():
    assert not torch.equal(
        flat(steps_of(shared(HoldingNoise(0)), 1)), flat(steps_of(shared(HoldingNoise(1)), 1))
    )


def test_reading_leaves_every_generator_as_it_was():
    dataset = HoldingNoise()
    draws = Draws(dataset, 0)

    def states():
        own = random.getstate(), np.random.get_state(), torch.get_rng_state().tolist(), draws.states()[1]
        return str(own)

    before = states()
    with draws.at(1, 2):
        dataset[0], torch.rand(1), random.gauss(0, 1), np.random.randn()
    with StreamOfDraws(draws, (3,)).continued():
        dataset[0], torch.rand(1), random.gauss(0, 1), np.random.randn()
    assert states() == before


def test_generators_are_found_through_attributes_and_short_lists_once():
    dataset = HoldingNoise()
    dataset.again, dataset.itself = dataset.transforms, dataset
    assert len(held_generators(dataset)) == 4
    assert held_generators([object()] * 1000) == []


def test_a_shuffled_stream_is_dealt_out_without_repetition_and_new_in_each_epoch():
    """Ranks used to draw the order from streams of their own: the same sample on two ranks."""
    dataset = ShuffledStream()
    sources = [StreamedData(dataset, Reading(rank, 2, 4, 4, draws=Draws(dataset, 0))) for rank in range(2)]
    epochs = [
        [int(i) for s in sources for b in s.next_step().micro_batches for i in b[0][0]] for _ in range(6)
    ]
    first, second = ([i for step in part for i in step] for part in (epochs[:3], epochs[3:]))
    assert sorted(first) == sorted(second) == list(range(24))
    assert first != second


@pytest.mark.parametrize("stop", [2, 4])
def test_a_stream_that_draws_goes_on_in_a_later_epoch_as_if_never_stopped(stop):
    def make():
        dataset = ShuffledStream()
        return StreamedData(dataset, Reading(1, 2, 4, 2, draws=Draws(dataset, 7)))

    whole, part, resumed = make(), make(), make()
    expected = steps_of(whole, 6)
    steps_of(part, stop)
    torch.rand(3)  # training draws meanwhile
    resumed.load_state_dict(part.state_dict())
    assert str(steps_of(resumed, 6 - stop)) == str(expected[stop:])


# --- whole runs ------------------------------------------------------------------------------------------------


class NoisyPairs(Dataset):
    """Adds noise from a generator of its own, which ranks in one process share."""

    def __init__(self, count=40):
        self.inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        noise = torch.from_numpy(self.rng.normal(size=6).astype("float32")) + torch.randn(6)
        return self.inputs[index] + noise, self.inputs[index, :3].argmax()


def fit(data, validation=None, **arguments):
    return experiments.fit(data=data, validation=validation, **({"num_nodes": 4, "max_steps": 4} | arguments))


def weights(model):
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def test_a_dataset_with_a_generator_of_its_own_gives_the_same_run_in_any_number_of_processes():
    """Ranks of one process used to advance one generator in turn."""
    runs = [
        fit(NoisyPairs(), workers=workers) for workers in ("threads", {"kind": "processes", "processes": 2})
    ]
    assert torch.equal(weights(runs[0]), weights(runs[1]))


def test_all_evaluations_see_the_same_noise():
    """The first and the last rank used to draw their own validation noise: equal models had two losses."""
    rows = fit(NoisyPairs(), NoisyPairs(), val_interval=2, val_size=8).fit_result.validation
    assert len(rows) == 3
    for row in rows:
        assert row["local_loss"] == pytest.approx(row["global_loss"], rel=1e-6)


def test_a_factory_draws_the_same_for_a_rank_wherever_it_is_called():
    """Rank 0's dataset used to be drawn from the caller's stream where a first batch was looked at before."""

    def factory(rank, num_nodes, train_dataset):
        return TensorDataset(torch.randn(16, 6), torch.randint(3, (16,)))

    torch.manual_seed(1)
    one = fit(factory)
    torch.manual_seed(2)
    other = fit(factory, workers="auto", topology="lan", compute="1 s")
    assert torch.equal(weights(one), weights(other))


class OfLength(IterableDataset):
    def __init__(self, count, tells=True, says=None):
        self.count = count
        if tells:
            self.__class__ = Told
            self.says = says if says is not None else count

    def __iter__(self):
        pairs = NoisyPairs(self.count)
        return iter((pairs.inputs[i], pairs.inputs[i, :3].argmax()) for i in range(self.count))


class Told(OfLength):
    def __len__(self):
        return self.says


def streams(**options):
    return lambda rank, num_nodes, train_dataset: OfLength(16 if rank else 24, **options)


@pytest.mark.parametrize("tells", [True, False])
def test_streams_of_unequal_lengths_end_their_epochs_together(tells):
    """One rank used to begin another step while the other was through: a deadlock."""
    model = fit(streams(tells=tells), num_nodes=2, num_epochs=2, max_steps=50)
    assert len(model.fit_result.history) == 8


def test_a_stream_shorter_than_it_says_is_reported_in_one_line():
    with pytest.raises(
        InputError, match=r"training set of rank 1 ended at step 5 of an epoch that should have 6"
    ):
        fit(streams(says=24), num_nodes=2, num_epochs=1, max_steps=50)
    with pytest.raises(InputError, match="factory made for rank 1 has 2 samples, too few for a step"):
        fit(lambda rank, num_nodes, train_dataset: OfLength(2 if rank else 9), num_nodes=2, max_steps=3)


def test_loader_arguments_that_a_stream_does_not_use_are_reported():
    options = {"dataloader_kwargs": {"num_workers": 2}, "num_nodes": 2}
    with pytest.warns(UserWarning, match="has num_workers, which an iterable training set does not use"):
        fit(OfLength(40), **options)
    with pytest.warns(UserWarning, match="has num_workers, which an iterable training set does not use"):
        fit(streams(), **options)


def test_loader_workers_of_forked_ranks_read_after_those_of_threads():
    """A thread that sends tensors to loader workers is started once a process: forked ranks had none."""
    options = {"num_nodes": 2, "max_steps": 2, "dataloader_kwargs": {"num_workers": 1}}
    kinds = ("threads", {"kind": "processes", "processes": 2})
    first, second = (weights(fit(NoisyPairs(), workers=kind, **options)) for kind in kinds)
    assert torch.equal(first, second)
