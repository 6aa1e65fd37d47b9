"""Damaged checkpoints, by accident or on purpose."""

from __future__ import annotations

import functools
import gzip
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from drawn_damage import RAW, Choices, as_json, damaged_text, damaged_tree, keys_of
from fuzzed_folder import FOLDER, accepted
from torch.utils.data import TensorDataset

from exogym_core import Trainer
from exogym_core.checkpoints.checkpoint import StoredCheckpoint, manifest_text
from exogym_core.strategy import DiLoCoStrategy

__all__ = ["checkpoint"]


@functools.cache
def _made_checkpoint() -> tuple[Path, dict[str, bytes]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5), torch.nn.Flatten(0))
    data = TensorDataset(torch.randn(16, 3))

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, batch: Any) -> torch.Tensor:
            return self.inner(batch[0]).square().mean()

    trainer = Trainer(Loss(), data)
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 3, "batch_size": 2, "device": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        trainer.fit(strategy=DiLoCoStrategy(H=2), checkpoint_interval=2, save_dir=folder, **options)
        (made,) = Path(folder).glob("*/step-*")
        path = FOLDER.path / made.name
        shutil.copytree(made, path)
    return path, {each.name: each.read_bytes() for each in sorted(path.iterdir())}


def checkpoint(data: bytes) -> bool:
    """A file of a checkpoint changed; with honest digests, as somebody who means harm would, or without."""
    folder, files = _made_checkpoint()
    choices = Choices(data)
    name, honest = choices.pick(sorted(files)), choices.below(4) > 0
    content = _damaged_part(choices, name, files[name])
    written = {name: content}
    if honest:
        body = json.loads(files["manifest.json"])["body"]
        if name == "manifest.json":
            body = damaged_tree(
                choices, body, [*keys_of([body]), "../x"], [*map(str, RAW), 0, -1, True, 1e9, None, []]
            )
        else:
            facts = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            (body["files"].get(name) or body["logs"][0]).update(facts)
        written["manifest.json"] = manifest_text(body).encode()
    for each, new in written.items():
        (folder / each).write_bytes(new)
    try:
        loaded = accepted(folder, lambda: _loaded(folder))
        same = content == files[name] or (name.startswith("log-") and content.startswith(files[name]))
        assert honest or loaded is None or same, f"{name} was changed, and loads"
        return loaded is not None
    finally:
        for each in written:
            (folder / each).write_bytes(files[each])


def _damaged_part(choices: Choices, name: str, content: bytes) -> bytes:
    if name.endswith(".json") and choices.below(4):
        tree = json.loads(content)
        return as_json(
            damaged_tree(choices, tree, [*keys_of([tree]), "$"], [*map(str, RAW), 0, -1, 1e9, None, []])
        ).encode()
    words = [b"[", b"]", b"{", b'"', b"-1", b"1e999", b"null", b",", b"\n", b"\xff", b"9" * 30]
    if name.endswith(".gz") and choices.below(4):
        return gzip.compress(damaged_text(choices, gzip.decompress(content), words), 1)
    return damaged_text(choices, content, words)


def _loaded(folder: Path) -> bool:
    found = StoredCheckpoint.open(folder)
    found.past()
    found.messages()
    for rank in range(min(found.world_size, 4)):
        found.rank_state(rank)
    return True
