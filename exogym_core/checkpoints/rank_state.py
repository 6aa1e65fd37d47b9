"""Nested states on disk: tensors as safetensors, everything else as JSON, nothing pickled.

    facts = write_state(folder, "rank-0000", state)    # size and digest of the two files it makes
    state = read_state(folder, "rank-0000", facts)     # refuses files that are not those

What JSON cannot say is written as `exogym_core.plain` does.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from exogym_core.names import visible
from exogym_core.plain import decode, encode
from exogym_core.results.disk import RecordError
from netsim.files.errors import InputError
from netsim.files.plain_files import read_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

__all__ = [
    "FileFacts",
    "damaged",
    "decode",
    "encode",
    "random_streams",
    "read_checked",
    "read_state",
    "restore_random_streams",
    "write_new",
    "write_state",
]

FileFacts = dict[str, dict[str, Any]]
"""Name of a file -> its `num_bytes` and `sha256`."""


# --- random streams ----------------------------------------------------------------------------------------


def random_streams(device: torch.device) -> dict[str, Any]:
    """The states of the process's generators, which are the running rank's, as `encode` takes them."""
    states = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    return states if device.type != "cuda" else {**states, "cuda": torch.cuda.get_rng_state(device)}


def restore_random_streams(states: Mapping[str, Any], device: torch.device) -> None:
    """Make what `random_streams` returned the states of the process's generators."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


# --- files -------------------------------------------------------------------------------------------------


def write_new(path: Path, content: bytes) -> FileFacts:
    """Write a file that is not there yet, down to the disk, and return its facts.

    Raises:
        RecordError: it cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise RecordError(f"{visible(path)}: cannot be written: {error.strerror or error}") from error
    return {path.name: {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}


def read_checked(path: Path, facts: FileFacts) -> bytes:
    """The file's content, if it is what was written.

    Raises:
        RecordError: it is missing or damaged.
    """
    try:
        content = read_bytes(path)
    except InputError as error:
        raise damaged(path, error) from error
    except OSError as error:
        raise RecordError(f"{visible(path)}: cannot be read: {error.strerror or error}") from error
    expected = facts.get(path.name)
    if expected is None or hashlib.sha256(content).hexdigest() != expected["sha256"]:
        size = f"{len(content)} bytes" if expected is None or len(content) != expected["num_bytes"] else ""
        written = f", {expected['num_bytes']} were written" if expected is not None and size else ""
        raise damaged(path, f"{size}{written}" or "its SHA-256 is another")
    return content


def damaged(path: Path, reason: object) -> RecordError:
    """The error for a file that is not what was written."""
    return RecordError(
        f"{visible(path)}: is damaged ({visible(reason, 200)}): delete {visible(path.parent)} to go on from "
        "an older checkpoint or, where there is none, from the start"
    )


def write_state(folder: Path, name: str, state: Any) -> FileFacts:
    """Write `state` as two new files of that name.

    Raises:
        InputError: it holds what cannot be kept.
        RecordError: a file cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(encode(state, tensors, f"checkpoint: {name}"), separators=(",", ":"))
    facts = write_new(folder / f"{name}.json", plain.encode())
    return {**facts, **write_new(folder / f"{name}.safetensors", save(tensors))}


def read_state(folder: Path, name: str, facts: FileFacts) -> Any:
    """The state that `write_state` wrote under that name, its tensors on the CPU.

    Raises:
        RecordError: a file is missing or damaged.
    """
    path = folder / f"{name}.json"
    plain, stored = read_checked(path, facts), read_checked(folder / f"{name}.safetensors", facts)
    try:
        return decode(json.loads(plain), load(stored))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise damaged(path, error) from error
