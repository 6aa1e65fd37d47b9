"""How samples are dealt out and drawn: disjoint, complete, equal numbers of steps, and resumable."""

from __future__ import annotations

import multiprocessing
import random
from collections import Counter, namedtuple

import experiments
import numpy as np
import pytest
import torch
from experiments import fit
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from exogym_core.data.batches import batch_reader, move_batch
from exogym_core.data.samples import (
    Draws,
    EpochOrder,
    OwnData,
    Reading,
    SharedData,
    StreamedData,
)
from netsim.errors import InputError

worlds = st.integers(1, 6)
batches = st.integers(1, 5)


def numbers(count):
    return TensorDataset(torch.arange(count))


def shared(count, rank, world, batch, mini=None, *, shuffle=True, seed=0, **options):
    order = EpochOrder(count, shuffle, seed)
    return SharedData(numbers(count), order, Reading(rank, world, batch, mini or batch, **options))


def own(lengths, rank, batch, mini=None, *, shuffle=True, seed=0, **options):
    order = EpochOrder(lengths[rank], shuffle, seed, rank + 1)
    reading = Reading(rank, len(lengths), batch, mini or batch, **options)
    return OwnData(numbers(lengths[rank]), order, lengths, reading)


def samples_of(step):
    return [int(value) for batch, _ in step.micro_batches for value in batch[0]]


def epoch_of(source):
    return [source.next_step() for _ in range(source.steps_per_epoch)]


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter((torch.tensor(index),) for index in range(self.count))


@given(count=st.integers(1, 90), world=worlds, batch=batches, seed=st.integers(0, 3))
def test_each_sample_is_seen_at_most_once_and_few_are_left_out(count, world, batch, seed):
    if count < world:
        with pytest.raises(InputError, match=f"has {count} samples?, but {world} ranks need {world}"):
            shared(count, 0, world, batch)
        return
    epochs = [epoch_of(shared(count, rank, world, batch, seed=seed)) for rank in range(world)]
    assert len({len(steps) for steps in epochs}) == 1
    for steps in zip(*epochs, strict=True):
        sizes = [len(samples_of(step)) for step in steps]
        assert sizes == [step.samples for step in steps]
        assert {step.total_samples for step in steps} == {sum(sizes)}
        assert 1 <= min(sizes) <= max(sizes) <= min(batch, min(sizes) + 1)
    seen = Counter(sample for steps in epochs for step in steps for sample in samples_of(step))
    assert max(seen.values()) == 1
    assert count - len(seen) < world


@given(count=st.integers(6, 90), world=worlds, batch=batches)
def test_ranks_together_see_what_one_rank_with_a_larger_batch_sees(count, world, batch):
    alone = epoch_of(shared(count, 0, 1, world * batch))
    together = [epoch_of(shared(count, rank, world, batch)) for rank in range(world)]
    for step, *parts in zip(alone, *together, strict=False):
        assert set(samples_of(step)) == {sample for part in parts for sample in samples_of(part)}


@given(count=st.integers(6, 60), world=worlds, batch=batches, rank=st.integers(0, 5))
def test_a_stream_is_dealt_out_like_an_unshuffled_dataset(count, world, batch, rank):
    rank %= world
    indexed = shared(count, rank, world, batch, shuffle=False)
    streamed = StreamedData(Stream(count), Reading(rank, world, batch, batch))
    for _ in range(2 * indexed.steps_per_epoch):
        one, other = indexed.next_step(), streamed.next_step()
        assert samples_of(one) == samples_of(other)
        assert (one.samples, one.total_samples) == (other.samples, other.total_samples)


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), batch=batches)
def test_own_datasets_give_every_rank_the_same_number_of_steps(lengths, batch):
    sources = [own(lengths, rank, batch, seed=1) for rank in range(len(lengths))]
    assert len({source.steps_per_epoch for source in sources}) == 1
    for steps in zip(*map(epoch_of, sources), strict=True):
        assert {step.total_samples for step in steps} == {sum(step.samples for step in steps)}
        assert all(len(set(samples_of(step))) == step.samples > 0 for step in steps)


def test_order_is_new_each_epoch_repeatable_and_seeded():
    source = shared(40, 0, 2, 5)
    first, second = ([samples_of(step) for step in epoch_of(source)] for _ in range(2))
    assert first != second
    again = shared(40, 0, 2, 5)
    assert [samples_of(step) for step in epoch_of(again)] == first
    assert [samples_of(step) for step in epoch_of(shared(40, 0, 2, 5, seed=1))] != first
    plain = shared(10, 1, 2, 2, shuffle=False)
    assert [samples_of(step) for step in epoch_of(plain)] == [[1, 3], [5, 7], [9]]
    assert samples_of(plain.next_step()) == [1, 3]


@pytest.mark.parametrize("kind", ["shared", "own", "stream"])
@pytest.mark.parametrize("stop", [3, 8])
def test_a_source_goes_on_where_its_state_was_taken(kind, stop):
    def make():
        if kind == "shared":
            return shared(23, 1, 2, 3)
        if kind == "own":
            return own([11, 11], 1, 3, 2, seed=4)
        return StreamedData(Stream(23), Reading(1, 2, 3, 3))

    source = make()
    for _ in range(stop):
        source.next_step()
    resumed = make()
    resumed.load_state_dict(source.state_dict())
    for _ in range(6):
        assert samples_of(resumed.next_step()) == samples_of(source.next_step())


@pytest.mark.parametrize(
    "make", [lambda: shared(8, 0, 2, 2), lambda: StreamedData(Stream(8), Reading(0, 2, 2, 2))]
)
def test_a_source_ends_after_its_epochs(make):
    source = make()
    source.num_epochs = 2
    steps = [source.next_step() for _ in range(5)]
    assert [step is None for step in steps] == [False, False, False, False, True]


def test_drop_last_leaves_out_a_partial_step():
    assert shared(11, 0, 2, 3).steps_per_epoch == 2
    assert shared(11, 0, 2, 3, drop_last=True).steps_per_epoch == 1
    with pytest.raises(InputError, match="2 ranks need 6 for a step"):
        shared(5, 0, 2, 3, drop_last=True)
    assert StreamedData(Stream(11), Reading(0, 2, 3, 3, drop_last=True)).next_step().samples == 3
    assert own([5, 9], 0, 3, shuffle=False, drop_last=True).steps_per_epoch == 1
    with pytest.raises(InputError, match="factory made for rank 1 has 0 samples"):
        own([5, 0], 0, 3, shuffle=False)


def test_a_stream_too_short_for_a_step_is_refused():
    with pytest.raises(InputError, match="an epoch of the iterable training set has 1 sample,"):
        StreamedData(Stream(1), Reading(0, 2, 1, 1)).next_step()


def test_an_empty_stream_is_said_to_be_empty() -> None:
    """It was an IndexError of the batch that is tried first."""
    with pytest.raises(InputError, match=r"^fit: the training set is empty$"):
        fit(data=Stream(0), workers="auto", progress=False)


def test_streams_of_their_own_take_full_steps_only():
    source = StreamedData(Stream(5), Reading(0, 3, 2, 2), is_own=True)
    assert [samples_of(source.next_step()) for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
    assert source.next_step().total_samples == 6


class Squares(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"x": torch.tensor(index), "y": [index**2, "name"]}


class Fetched(Squares):
    def __getitems__(self, indices):
        return [torch.tensor(index) for index in indices]


class Batched(Squares):
    def batch(self, indices):
        return indices * 2


def test_readers():
    indices = torch.tensor([3, 1])
    data = TensorDataset(torch.arange(10), torch.arange(10) * 10)
    assert [part.tolist() for part in batch_reader(data)(indices)] == [[3, 1], [30, 10]]
    nested = Subset(Subset(data, range(5, 10)), [4, 3, 2, 1])
    assert batch_reader(nested)(indices)[0].tolist() == [6, 8]
    batch = batch_reader(Squares())(indices)
    assert batch["x"].tolist() == [3, 1]
    assert batch["y"][0].tolist() == [9, 1]
    assert batch_reader(Fetched())(indices).tolist() == [3, 1]
    assert batch_reader(Batched())(indices).tolist() == [6, 2]
    assert batch_reader(data, len)(indices) == 2
    pairs = batch_reader([(torch.tensor(index), index) for index in range(4)])(indices)
    assert isinstance(pairs, tuple)


def test_batches_move_with_their_containers():
    Pair = namedtuple("Pair", "a b")
    ones = torch.ones(2)
    moved = move_batch({"x": [ones, (ones, "name")], "y": Pair(ones, 3)}, torch.device("meta"))
    assert moved["x"][0].is_meta
    assert moved["x"][1][0].is_meta
    assert moved["x"][1][1] == "name"
    assert isinstance(moved["y"], Pair)
    assert moved["y"].a.is_meta


# --- what datasets draw at random ---------------------------------------------------------------------------


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


def drawing(dataset, rank=0, seed=0, mini=4, **options):
    reading = Reading(rank, 2, 4, mini, draws=Draws(dataset, seed), **options)
    return SharedData(dataset, EpochOrder(24, False, seed), reading)


def flat(steps):
    return torch.cat([batch.flatten() for step in steps for batch in step])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", [Noise, HoldingNoise])
def test_noise_is_new_for_each_seed_rank_epoch_and_step_and_the_same_with_workers(kind):
    """A loader used to be seeded by the epoch alone: all ranks and seeds drew the same noise."""
    one = drawing(kind())
    steps = [flat([step])[:3] for step in steps_of(one, 6)]  # two epochs of three steps
    other_rank, other_seed = (
        flat(steps_of(drawing(kind(), rank=1), 1)),
        flat(steps_of(drawing(kind(), seed=1), 1)),
    )
    noises = [*steps, other_rank[:3], other_seed[:3]]
    assert all(not torch.isclose(a, b).any() for i, a in enumerate(noises) for b in noises[:i])
    by_workers = drawing(kind(), loader={"num_workers": 1}, mini=2)
    assert torch.equal(flat(steps_of(by_workers, 4)), flat(steps_of(drawing(kind()), 4)))
    by_workers.close()


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


def test_a_stream_that_draws_goes_on_in_a_later_epoch_as_if_never_stopped():
    def make():
        dataset = ShuffledStream()
        return StreamedData(dataset, Reading(1, 2, 4, 2, draws=Draws(dataset, 7)))

    whole, part, resumed = make(), make(), make()
    expected = steps_of(whole, 6)
    steps_of(part, 4)
    torch.rand(3)  # training draws meanwhile
    resumed.load_state_dict(part.state_dict())
    assert str(steps_of(resumed, 2)) == str(expected[4:])


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


def fit_noisy(data, validation=None, **arguments):
    return experiments.fit(data=data, validation=validation, **({"num_nodes": 4, "max_steps": 4} | arguments))


def weights(model):
    return torch.cat([value.flatten() for value in model.state_dict().values()])


def test_a_dataset_with_a_generator_of_its_own_gives_the_same_run_in_any_number_of_processes():
    """Ranks of one process used to advance one generator in turn."""
    runs = [
        fit_noisy(NoisyPairs(), workers=workers)
        for workers in ("threads", {"kind": "processes", "processes": 2})
    ]
    assert torch.equal(weights(runs[0]), weights(runs[1]))


def test_all_evaluations_see_the_same_noise():
    """The first and the last rank used to draw their own validation noise: equal models had two losses."""
    rows = fit_noisy(NoisyPairs(), NoisyPairs(), val_interval=2, val_size=8).fit_result.validation
    assert len(rows) == 3
    for row in rows:
        assert row["local_loss"] == pytest.approx(row["global_loss"], rel=1e-6)


def test_a_factory_draws_the_same_for_a_rank_wherever_it_is_called():
    """Rank 0's dataset used to be drawn from the caller's stream where a first batch was looked at before."""

    def factory(rank, num_nodes, train_dataset):
        return TensorDataset(torch.randn(16, 6), torch.randint(3, (16,)))

    torch.manual_seed(1)
    one = fit_noisy(factory)
    torch.manual_seed(2)
    other = fit_noisy(factory, workers="auto", topology="lan", compute="1 s")
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
    model = fit_noisy(streams(tells=tells), num_nodes=2, num_epochs=2, max_steps=50)
    assert len(model.fit_result.history) == 8


def test_a_stream_shorter_than_it_says_is_reported_in_one_line():
    with pytest.raises(
        InputError, match=r"training set of rank 1 ended at step 5 of an epoch that should have 6"
    ):
        fit_noisy(streams(says=24), num_nodes=2, num_epochs=1, max_steps=50)
    with pytest.raises(InputError, match="factory made for rank 1 has 2 samples, too few for a step"):
        fit_noisy(lambda rank, num_nodes, train_dataset: OfLength(2 if rank else 9), num_nodes=2, max_steps=3)


def test_loader_arguments_that_a_stream_does_not_use_are_reported():
    options = {"dataloader_kwargs": {"num_workers": 2}, "num_nodes": 2}
    with pytest.warns(UserWarning, match="has num_workers, which an iterable training set does not use"):
        fit_noisy(OfLength(40), **options)


def test_loader_workers_of_forked_ranks_read_after_those_of_threads_and_end_with_the_run():
    """A thread that sends tensors to loader workers is started once a process: forked ranks had none."""
    options = {"num_nodes": 1, "max_steps": 1, "dataloader_kwargs": {"num_workers": 1}}
    kinds = ("threads", {"kind": "processes", "processes": 1})
    first, second = (weights(fit_noisy(NoisyPairs(), workers=kind, **options)) for kind in kinds)
    assert torch.equal(first, second)
    assert not multiprocessing.active_children()
