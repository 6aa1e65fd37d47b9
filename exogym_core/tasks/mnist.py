"""MNIST and its like, from IDX files; downloaded only when asked for."""

from __future__ import annotations

import gzip
import hashlib
import struct
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from exogym_core.tasks.classifiers import classification_accuracy
from exogym_core.tasks.task import Task
from netsim.files.errors import InputError

__all__ = ["mnist", "read_idx"]

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
