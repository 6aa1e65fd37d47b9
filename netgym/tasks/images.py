"""Images: a multilayer perceptron, a convolutional network, and the tasks `digits` and `mnist`."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import struct
import urllib.request
import zlib
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from exogym_core.stages.split import StagePart
from netgym.tasks.task import Task
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["CNN", "MLP", "Classifier", "classification_accuracy", "digits", "mnist", "read_idx"]


class Classifier(nn.Module):
    """A model whose batch is `(inputs, labels)` and whose output is the mean cross-entropy, a scalar.

    Subclasses give `logits`; labels are integers, one for each row of these.
    """

    def logits(self, inputs: Tensor) -> Tensor:
        """Unnormalised log-probabilities, (samples, classes) or (samples, length, classes)."""
        raise NotImplementedError

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        """The batch's mean cross-entropy in nats."""
        inputs, labels = batch
        return _cross_entropy(self.logits(inputs), labels)

    def logit_parts(self) -> list[nn.Module]:
        """Parts of `logits`, each called with what the one before returns, for stages."""
        raise InputError(
            f"model {type(self).__name__}: stages need its parts: add a method logit_parts() that returns a list of "
            "modules which compute logits(inputs) one after the other"
        )

    def pipeline_parts(self) -> list[nn.Module]:
        """Parts of the model for stages, see `exogym_core.stages`."""
        first, *middle, last = self.logit_parts()
        return [
            StagePart(lambda batch: first(batch[0]), first),
            *middle,
            StagePart(lambda value, batch: _cross_entropy(last(value), batch[1]), last),
        ]


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class MLP(Classifier):
    """Linear layers with ReLU between them; inputs of any shape are flattened.

    >>> sum(parameter.numel() for parameter in MLP().parameters())
    17226
    """

    def __init__(self, inputs: int = 64, hidden: Sequence[int] = (128, 64), classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = inputs
        for size in hidden:
            layers += [nn.Linear(width, size), nn.ReLU()]
            width = size
        self.layers = nn.Sequential(*layers, nn.Linear(width, classes))

    def logits(self, inputs: Tensor) -> Tensor:
        """Unnormalised log-probabilities, (samples, classes)."""
        output: Tensor = self.layers(inputs.flatten(1))
        return output

    def logit_parts(self) -> list[nn.Module]:
        """Parts of `logits`, for stages."""
        return [nn.Flatten(1), *self.layers]


class CNN(Classifier):
    """Two blocks of two 3x3 convolutions with batch norm, pooling and dropout, then two linear layers.

    The network of EXO Gym's MNIST example: 1.87 million parameters at its defaults.

    Args:
        channels: input channels.
        image_size: height and width of the square input; divisible by 4.
        widths: channels of the two blocks.
        hidden: width of the linear layer before the output.
        classes: number of classes.
        dropout: rate in the blocks; the linear layer has twice as much.
        batch_norm: whether each convolution's output is normalised. Its running means are buffers, which no strategy
            averages: without them all of a model is in its parameters.
    """

    def __init__(
        self,
        channels: int = 1,
        image_size: int = 28,
        widths: Sequence[int] = (64, 128),
        hidden: int = 256,
        classes: int = 10,
        dropout: float = 0.25,
        batch_norm: bool = True,
    ) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for width in widths:
            for source in (channels, width):
                norm = [nn.BatchNorm2d(width)] if batch_norm else []
                blocks += [nn.Conv2d(source, width, 3, padding=1), *norm, nn.ReLU()]
            blocks += [nn.MaxPool2d(2), nn.Dropout2d(dropout)]
            channels = width
        side = image_size >> len(widths)
        self.features = nn.Sequential(*blocks)
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.Linear(channels * side * side, hidden),
            nn.ReLU(),
            nn.Dropout(min(2 * dropout, 0.9)),
            nn.Linear(hidden, classes),
        )

    def logits(self, inputs: Tensor) -> Tensor:
        """Unnormalised log-probabilities, (samples, classes)."""
        output: Tensor = self.head(self.features(inputs))
        return output

    def logit_parts(self) -> list[nn.Module]:
        """Parts of `logits`, for stages."""
        return [*self.features, *self.head]


def classification_accuracy(model: nn.Module, batch: Sequence[Tensor]) -> float:
    """The fraction of a batch's samples whose likeliest class is the label.

    Raises:
        InputError: `model` has no `logits(inputs)`, as every `Classifier` has.
    """
    inputs, labels = batch
    if not callable(of_inputs := getattr(model, "logits", None)):
        name = type(model).__name__
        raise InputError(
            f"model {name}: has no logits(inputs), from which this task computes the accuracy: add that method, or "
            "derive the model from netgym.tasks.Classifier"
        )
    logits = of_inputs(inputs)
    return float((torch.argmax(logits, dim=-1) == labels).float().mean())


# Every comparison and point of a sweep asks for the task; below, its rows are copied and not changed.
_read_once = cache(partial(np.loadtxt, delimiter=","))


def digits(validation_fraction: float = 0.2, seed: int = 0, images: bool = False) -> Task:
    """Handwritten digits (Alpaydin and Kaynak, UCI optical recognition): 64 pixels from 0 to 1, ten classes.

    Args:
        validation_fraction: share of the images kept for validation, more than 0 and less than 1.
        seed: of the split.
        images: samples of shape (1, 8, 8), for a CNN; else rows of 64.

    Raises:
        InputError: scikit-learn is not installed, or the fraction leaves one side empty.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise InputError(
            "task digits: scikit-learn, which brings the images, is not installed; "
            "run: pip install 'netgym[demo]'"
        )
    # Its file of images alone: the package takes longer to import than torch.
    rows = _read_once(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz")
    pixels, labels = rows[:, :-1], rows[:, -1]
    num_validation = round(len(pixels) * validation_fraction)
    if not 0 < num_validation < len(pixels):
        raise InputError(
            f"task digits: validation_fraction {validation_fraction} leaves one side empty; try 0.2"
        )
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(seed))
    inputs = torch.as_tensor(pixels, dtype=torch.float32)[order] / 16.0
    inputs = inputs.view(-1, 1, 8, 8) if images else inputs
    targets = torch.as_tensor(labels, dtype=torch.int64)[order]
    return Task(
        train=TensorDataset(inputs[num_validation:], targets[num_validation:]),
        validation=TensorDataset(inputs[:num_validation], targets[:num_validation]),
        model="cnn" if images else "mlp",
        model_options={"mlp": {"inputs": 64, "classes": 10}} | ({"cnn": {"image_size": 8}} if images else {}),
        accuracy=classification_accuracy,
    )


_ORIGIN = "https://ossci-datasets.s3.amazonaws.com/mnist/"
# The MD5 sums that torchvision has published for these files for years; enough against a torn download.
_FILES = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
_MAX_BYTES = _MAX_DOWNLOAD_BYTES = 100_000_000
_MEAN, _DEVIATION = 0.1307, 0.3081  # of the training pixels, as every MNIST example normalises


def read_idx(path: Path) -> np.ndarray:
    """The array in an IDX file of bytes, gzipped or not (format: LeCun's MNIST page).

    Raises:
        InputError: the file is not such a file, or ends early.
    """
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            with gzip.open(path) as file:
                raw = file.read(_MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(f"{path}: broken gzip file ({error}); fetch it again") from None
    if len(raw) > _MAX_BYTES:
        raise InputError(
            f"{path}: holds more than {_MAX_BYTES:,} bytes, MNIST's files do not; fetch it again"
        )
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise InputError(f"{path}: not an IDX file of unsigned bytes; give MNIST's own files")
    num_dimensions = raw[3]
    start = 4 + 4 * num_dimensions
    if len(raw) < start:
        raise InputError(f"{path}: ends within its header; fetch it again")
    shape = struct.unpack(f">{num_dimensions}I", raw[4:start])
    if len(raw) - start != int(np.prod(shape, dtype=np.int64)):
        raise InputError(
            f"{path}: holds {len(raw) - start} bytes where its header says {shape}; fetch it again"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape)


def _locate(folder: Path, name: str, download: bool) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz", folder / "MNIST" / "raw" / name):
        if candidate.is_file():
            return candidate
    if not download:
        raise InputError(
            f"task mnist: {folder / name}[.gz] is missing; put the IDX files there or set download: true"
        )
    # A fixed https address, and the digest below.
    try:
        with urllib.request.urlopen(f"{_ORIGIN}{name}.gz", timeout=60) as answer:  # nosec B310
            content: bytes = answer.read(_MAX_DOWNLOAD_BYTES)
    except OSError as error:
        raise InputError(f"task mnist: {_ORIGIN}{name}.gz cannot be fetched: {error}") from error
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != _FILES[name]:
        raise InputError(f"task mnist: the download of {name}.gz is not the published file; try again")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}.gz"
    target.write_bytes(content)
    return target


def _split(folder: Path, prefix: str, download: bool) -> TensorDataset:
    images = read_idx(_locate(folder, f"{prefix}-images-idx3-ubyte", download))
    labels = read_idx(_locate(folder, f"{prefix}-labels-idx1-ubyte", download))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise InputError(
            f"task mnist: {prefix} images {images.shape} and labels {labels.shape} in {folder} do not match; "
            "fetch them again"
        )
    inputs = (torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 255.0 - _MEAN) / _DEVIATION
    return TensorDataset(inputs, torch.tensor(labels, dtype=torch.int64))


def mnist(path: str = "data", download: bool = False) -> Task:
    """Handwritten digits of 28x28 pixels (LeCun et al., 1998): 60,000 to train on, 10,000 to validate.

    Args:
        path: folder with the four IDX files, gzipped or not (or torchvision's folder).
        download: fetch what is missing into `path` and check it.

    Raises:
        InputError: a file is missing and `download` is off, or is not what it should be.
    """
    folder = Path(path)
    return Task(
        train=_split(folder, "train", download),
        validation=_split(folder, "t10k", download),
        model="cnn",
        model_options={"mlp": {"inputs": 784, "classes": 10}, "cnn": {"channels": 1, "image_size": 28}},
        accuracy=classification_accuracy,
    )
