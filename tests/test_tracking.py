"""Loggers that an experiment names, against stand-ins for the packages."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from exogym_core.experiment import Experiment
from exogym_core.record import RunFolder
from exogym_core.tracking import open_loggers
from netsim.documents import parse_document
from netsim.errors import InputError


def experiment(loggers: str) -> Experiment:
    text = f"task: digits\nworkers: {{count: 2}}\nsteps: 1\nstrategies: [AllReduce]\nloggers: {loggers}\n"
    return Experiment.from_document(parse_document(text))


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_told_with_the_remedy(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    with (
        pytest.raises(InputError, match=rf"{package}.* not installed.* pip install 'netgym\[tracking\]'"),
        open_loggers(experiment(f"[{package}]"), RunFolder(tmp_path), "DiLoCo"),
    ):
        pass


def test_tensorboard_gets_scalars_by_step_and_by_virtual_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    class SummaryWriter:
        def __init__(self, path: str) -> None:
            written.append(Path(path).relative_to(tmp_path).as_posix())

        def add_scalar(self, *scalar: object) -> None:
            written.append(scalar)

        def close(self) -> None:
            written.append("closed")

    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with open_loggers(experiment("[csv, tensorboard]"), RunFolder(tmp_path), "a/b") as loggers:
        for logger in loggers:
            logger.event({"kind": "step", "step": 3, "train_loss": 0.5, "virtual_seconds": 1.25})
            logger.event({"kind": "step", "step": 4, "train_loss": 0.4, "virtual_seconds": None})
    assert written == [
        "tensorboard/a-b",
        ("train_loss", 0.5, 3),
        ("by_virtual_ms/train_loss", 0.5, 1250),
        ("virtual_seconds", 1.25, 3),
        ("train_loss", 0.4, 4),
        "closed",
    ]
