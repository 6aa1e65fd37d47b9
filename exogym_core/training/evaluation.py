"""Judging models without touching the run: fixed samples, modes and random states as they were."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from exogym_core.data.batches import batch_reader, move_batch
from exogym_core.data.draws import Draws
from exogym_core.data.samples import EpochOrder
from exogym_core.ranks.rng import RandomStates
from exogym_core.strategy.parts.flat import flatten, plan_buckets, write_back
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from exogym_core.communicator.base import Communicator, Handle

__all__ = ["PRECISIONS", "Evaluation", "FlatState", "autocast_to", "correlation_of", "kept_rng"]

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What `autocast` can be, by name."""

_ORDER_STREAM = 1 << 32  # keeps the choice of evaluation samples apart from the training order


@contextmanager
def kept_rng(device: torch.device) -> Iterator[None]:
    """What is drawn inside leaves torch's, numpy's and `random`'s global generators as they were."""
    states = RandomStates.of_process()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            states.load()


def autocast_to(precision: str | None, device: torch.device) -> AbstractContextManager[object]:
    """A context in which forward passes compute in that key of PRECISIONS; None changes nothing."""
    return nullcontext() if precision is None else torch.autocast(device.type, PRECISIONS[precision])


class Evaluation:
    """Losses on the same samples every time.

    Args:
        dataset: to take samples from.
        val_size: how many; all of the dataset where it has fewer.
        batch_size: samples a forward pass.
        seed: of the choice, which is the same on all ranks.
        device: where models are.
        accuracy: `f(model, batch) -> fraction right`.
        collate: makes a batch of samples.
        autocast: a key of PRECISIONS to compute in; None for the model's own.

    Raises:
        InputError: there is nothing to take.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        val_size: int,
        batch_size: int,
        seed: int,
        device: torch.device,
        accuracy: Callable[[nn.Module, Any], float] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        autocast: str | None = None,
    ) -> None:
        self._device, self._accuracy, self._autocast = device, accuracy, autocast
        # Every rank that judges reads for itself: what is drawn in doing so is the same on all of them.
        with kept_rng(device), Draws(dataset, seed).at(_ORDER_STREAM):
            batches = _fixed_batches(dataset, val_size, batch_size, seed, collate)
        self._batches = [(move_batch(batch, device), samples) for batch, samples in batches]
        self.num_samples = sum(samples for _, samples in self._batches)
        if not self.num_samples:
            raise InputError("fit: the validation set is empty; pass val_size=0 to go without one")

    def loss(self, model: nn.Module) -> float:
        """Mean loss over the samples, each counting once, in evaluation mode."""
        return self._mean(model, lambda batch: float(model(batch)))

    def accuracy(self, model: nn.Module) -> float | None:
        """Fraction of the samples right, None where no measure was given."""
        measure = self._accuracy
        return None if measure is None else self._mean(model, lambda batch: float(measure(model, batch)))

    def _mean(self, model: nn.Module, measure: Callable[[Any], float]) -> float:
        modes = [(module, module.training) for module in model.modules()]
        with (
            kept_rng(self._device),
            torch.no_grad(),
            autocast_to(self._autocast, self._device),
        ):
            model.eval()
            try:
                total = sum(measure(batch) * samples for batch, samples in self._batches)
            finally:
                for module, training in modes:
                    module.training = training
        return total / self.num_samples


def _fixed_batches(
    dataset: Dataset[Any],
    val_size: int,
    batch_size: int,
    seed: int,
    collate: Callable[[list[Any]], Any] | None,
) -> list[tuple[Any, int]]:
    if isinstance(dataset, IterableDataset):
        samples = list(islice(dataset, val_size))
        pieces = [samples[start : start + batch_size] for start in range(0, len(samples), batch_size)]
        gather = collate if collate is not None else default_collate
        return [(gather(piece), len(piece)) for piece in pieces]
    order = EpochOrder(len(dataset), True, seed, _ORDER_STREAM)  # type: ignore[arg-type]
    read = batch_reader(dataset, collate)
    return [(read(indices), len(indices)) for indices in torch.split(order.of(0)[:val_size], batch_size)]


class FlatState:
    """A model's parameters and buffers as one flat tensor a dtype, to be sent whole.

    Averages are taken of floating values only; whole numbers and truth values (counters, masks) have no mean
    and stay each model's own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
        self._buckets = plan_buckets(self._tensors)

    def _members(self, floating: bool) -> list[list[Tensor]]:
        members = [[self._tensors[index] for index in bucket] for bucket in self._buckets]
        return [bucket for bucket in members if bucket[0].is_floating_point() or not floating]

    def broadcast(self, comm: Communicator, src: int = 0) -> None:
        """Make every rank's model rank `src`'s."""
        for bucket in self._members(floating=False):
            write_back(comm.broadcast(flatten(bucket), src), bucket)

    def post_average(self, comm: Communicator, dst: int) -> list[Handle[Tensor]]:
        """Send this model's values towards their mean on rank `dst`; one handle a dtype."""
        return [comm.reduce(flatten(bucket), dst, "avg", async_op=True) for bucket in self._members(True)]

    def receive(self, handles: Sequence[Handle[Tensor]]) -> None:
        """Wait for `post_average`'s handles, on rank `dst`, and make this model the mean."""
        for handle, bucket in zip(handles, self._members(True), strict=True):
            write_back(handle.wait(), bucket)

    def parameters(self) -> Tensor:
        """All floating values in one flat double tensor on the CPU."""
        return torch.cat([flatten(bucket).double().cpu() for bucket in self._members(True)])


def correlation_of(replicas: Sequence[Tensor]) -> float:
    """Mean Pearson correlation over all pairs of replicas: 1 where they agree, less as they drift apart.

    `nan` for a single replica, which has no pair, and for constant ones.
    """
    count = len(replicas)
    if count < 2:
        return float("nan")
    matrix = torch.corrcoef(torch.stack(list(replicas)))
    pairs = torch.triu_indices(count, count, offset=1)
    return float(matrix[pairs[0], pairs[1]].mean())
