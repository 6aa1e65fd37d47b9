"""Judging models without touching the run: fixed samples, modes and random states as they were."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from exogym_core.data.batches import batch_reader, move_batch
from exogym_core.data.draws import Draws
from exogym_core.data.losses import as_mean_loss
from exogym_core.data.samples import EpochOrder
from exogym_core.ranks.rng import RandomStates, seed_device
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["PRECISIONS", "Evaluation", "autocast_to", "kept_rng"]

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
    """Losses on the same samples every time, with the same random numbers where a model draws some.

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
        self._device, self._accuracy, self._autocast, self._seed = device, accuracy, autocast, seed
        # Every rank that judges reads for itself: what is drawn in doing so is the same on all of them.
        with kept_rng(device), Draws(dataset, seed).at(_ORDER_STREAM):
            batches = _fixed_batches(dataset, val_size, batch_size, seed, collate)
        self._batches = [(move_batch(batch, device), samples) for batch, samples in batches]
        self.num_samples = sum(samples for _, samples in self._batches)
        if not self.num_samples:
            raise InputError("fit: the validation set is empty; pass val_size=0 to go without one")

    def loss(self, model: nn.Module) -> float:
        """Mean loss over the samples, each counting once, in evaluation mode."""
        return self._mean(model, lambda batch: float(as_mean_loss(model(batch), "evaluation")))

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
            RandomStates(self._seed, _ORDER_STREAM).load()
            seed_device(self._device, self._seed, _ORDER_STREAM)
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
