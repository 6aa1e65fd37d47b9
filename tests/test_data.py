"""How samples are dealt out: disjoint, complete, the same number of steps everywhere, and resumable."""

from __future__ import annotations

from collections import Counter, namedtuple

import pytest
import torch
from experiments import fit, samples
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from exogym_core.data.batches import batch_reader, collate_of, move_batch
from exogym_core.data.samples import EpochOrder, OwnData, Reading, SharedData, StreamedData
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


def test_micro_batches_cut_a_step():
    step = shared(100, 0, 1, 10, 4).next_step()
    assert [samples for _, samples in step.micro_batches] == [4, 4, 2]


@pytest.mark.parametrize("kind", ["shared", "own", "stream"])
@pytest.mark.parametrize("stop", [0, 1, 3, 5, 8])
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


def test_dataloader_arguments_are_checked():
    assert collate_of(None) == (None, False, {})
    assert collate_of({"collate_fn": len, "drop_last": True, "num_workers": 0}) == (len, True, {})
    assert collate_of({"num_workers": 2, "collate_fn": len}) == (len, False, {"num_workers": 2})


class WrongLength(Dataset):
    def __len__(self):
        return -1

    def __getitem__(self, index):
        return torch.zeros(6), 0


@pytest.mark.parametrize("is_validation", [False, True])
def test_a_dataset_with_a_wrong_length_is_named(is_validation):
    wrong = WrongLength()
    sets = (samples(8), wrong) if is_validation else (lambda rank, num_nodes, train_dataset: wrong, None)
    with pytest.raises(
        InputError, match=r"^fit: len\(\) of WrongLength fails: .* return the number of samples$"
    ):
        fit(None, *sets)
