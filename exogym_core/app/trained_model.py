"""The model that an experiment would train, without values, and what a sample costs it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, IterableDataset, default_collate

from exogym_core.cost.flops import count_flops
from exogym_core.data.batches import batch_reader
from exogym_core.planning.models import SequenceModel, kept_bytes, without_values
from exogym_core.tasks import Task, TokenWindows
from exogym_core.tasks.task import MissingDataError

if TYPE_CHECKING:
    from exogym_core.app.experiment import Experiment

__all__ = ["trained_model"]

_COUNTED_SAMPLES = 2  # of one alone some normalisations refuse to train
_BLOCK_SIZE, _BYTES, _TOKENS = 128, 256, 50304  # as the task text has them


def trained_model(experiment: Experiment) -> tuple[SequenceModel, tuple[str, ...]]:
    """The experiment's own model on its task's samples, and what is to be known of them.

    The task is made as a run makes it, and two of its samples are read. Where the task `text` misses its files, what
    its options say is taken.

    Raises:
        InputError: the task or the model cannot be made, or what a step takes cannot be counted.
    """
    remarks: tuple[str, ...] = ()
    try:
        task = experiment.build_task()
        batch = _first_samples(task, experiment.settings.workers.count)
    except MissingDataError as error:
        task, remarks = _without_files(experiment, error)
        batch = _first_samples(task, 1)
    with without_values():
        model = experiment.build_model(task).to("meta")
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    is_text = isinstance(inputs, torch.Tensor) and inputs.dim() == 2 and not inputs.is_floating_point()
    if not is_text:
        remarks += ("its samples are no rows of tokens: a token of this plan is a sample",)
    length, shapes = inputs.shape[1] if is_text else 1, tree_map(_without_values, batch)
    flops = 0
    if experiment.compute.kind == "flops":
        counted = count_flops(model, shapes)
        counted.warn_or_refuse()
        flops = counted.total // _COUNTED_SAMPLES
    kept = kept_bytes(model, shapes, length) // _COUNTED_SAMPLES
    return SequenceModel(model, length, flops, kept), remarks


def _without_values(part: Any) -> Any:
    return part.to("meta") if isinstance(part, torch.Tensor) else part


def _first_samples(task: Task, num_workers: int) -> Any:
    """A batch of the first ones, which may be those of the first rank alone."""
    if isinstance(task.train, TokenWindows):
        return _tokens(task.train.block_size)
    data: Any = task.train
    if not isinstance(data, Dataset) and callable(data):
        data = data(rank=0, num_nodes=num_workers, train_dataset=True)
    if isinstance(data, IterableDataset):
        return default_collate(list(itertools.islice(data, _COUNTED_SAMPLES)))
    return batch_reader(data)(torch.arange(_COUNTED_SAMPLES))


def _tokens(length: int) -> list[torch.Tensor]:
    return [torch.zeros(_COUNTED_SAMPLES, length, dtype=torch.long, device="meta")] * 2


def _without_files(experiment: Experiment, error: MissingDataError) -> tuple[Task, tuple[str, ...]]:
    """The task `text` by its options alone."""
    options = experiment.settings.task.options
    paths = options.get("paths") or []
    suffixes = {Path(path).suffix for path in ([paths] if isinstance(paths, str) else paths)}
    is_bytes = bool(suffixes) and not suffixes & {".bin", ".npy", ""}
    vocabulary = options.get("vocab_size") or (_BYTES if is_bytes else _TOKENS)
    sizes = {"vocab_size": vocabulary, "block_size": options.get("block_size", _BLOCK_SIZE)}
    task = Task(TokenWindows([], sizes["block_size"]), None, "gpt", {"gpt": sizes, "llama": sizes})
    model = experiment.settings.model
    if "vocab_size" in options or (model is not None and "vocab_size" in model.options):
        return task, ()
    told = str(error).splitlines()[0]
    return task, (
        f"ITS VOCABULARY IS GUESSED as {vocabulary:,} tokens, since its data are not here ({told}): with another one "
        "bytes, memory and seconds are others; say --set task.vocab_size=...",
    )
