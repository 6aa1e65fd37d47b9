"""Small classifiers: a multilayer perceptron and a convolutional network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CNN", "MLP", "Classifier", "classification_accuracy"]


class Classifier(nn.Module):
    """A model whose batch is `(inputs, labels)` and whose output is the mean cross-entropy, a scalar.

    Subclasses give `logits`.
    """

    def logits(self, inputs: Tensor) -> Tensor:
        """Unnormalised log-probabilities, (samples, classes)."""
        raise NotImplementedError

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        """The batch's mean cross-entropy in nats."""
        inputs, labels = batch
        return F.cross_entropy(self.logits(inputs), labels)


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


def classification_accuracy(model: nn.Module, batch: Sequence[Tensor]) -> float:
    """The fraction of a batch's samples whose likeliest class is the label.

    `model` has `logits(inputs)`, as every `Classifier` has.
    """
    inputs, labels = batch
    logits = model.logits(inputs)  # type: ignore[operator]
    return float((torch.argmax(logits, dim=-1) == labels).float().mean())
