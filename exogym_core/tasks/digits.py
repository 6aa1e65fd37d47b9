"""scikit-learn's bundled 8x8 handwritten digits: 1,797 real images, no download."""

from __future__ import annotations

import torch
from torch.utils.data import TensorDataset

from exogym_core.tasks.classifiers import classification_accuracy
from exogym_core.tasks.task import Task
from netsim.files.errors import InputError

__all__ = ["digits"]


def digits(validation_fraction: float = 0.2, seed: int = 0, images: bool = False) -> Task:
    """Handwritten digits (Alpaydin and Kaynak, UCI optical recognition): 64 pixels from 0 to 1, ten classes.

    Args:
        validation_fraction: share of the images kept for validation, more than 0 and less than 1.
        seed: of the split.
        images: samples of shape (1, 8, 8), for a CNN; else rows of 64.

    Raises:
        InputError: scikit-learn is not installed, or the fraction leaves one side empty.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(
            "task digits: scikit-learn, which brings the images, is not installed; "
            "run: pip install 'netgym[demo]'"
        ) from None
    pixels, labels = load_digits(return_X_y=True)
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
