"""Run folders: private, whole, and inside their parent whatever the name."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch
import yaml

from exogym_core.names import file_name, unique_labels, visible
from exogym_core.results.disk import RecordError, write_whole
from exogym_core.results.fit_result import FitResult
from exogym_core.results.loggers import FolderLogger
from exogym_core.results.run_folder import RunFolder
from netsim.errors import InputError

ESCAPES = yaml.safe_load(Path(__file__).with_name("hostile.yaml").read_text(encoding="utf-8"))["names"]


@pytest.mark.parametrize("name", ESCAPES)
def test_run_names_cannot_leave_the_folder(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, logger = RunFolder.create(None, name), FolderLogger(name, {})
    for path, parent in ((folder.path, "runs"), (logger.path, "logs")):
        assert path.resolve().parent == tmp_path.resolve() / parent
        assert len(path.name) <= 90
        assert path.name.isprintable()
        assert path.name.isascii()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "runs"]


@pytest.mark.parametrize("name", ["plots", "metrics"])
def test_a_folder_that_is_a_link_is_not_written_through(name: str, tmp_path: Path) -> None:
    """A report of another user's run replaced pictures wherever its `plots` led."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "loss.png").write_bytes(b"mine")
    folder = RunFolder.create(tmp_path / "run", "run")
    (folder.path / name).symlink_to(outside)
    with pytest.raises(
        RecordError, match=f"{name}: is a link, which could lead anywhere: put a folder in its place"
    ):
        folder.write_text(f"{name}/loss.png", b"theirs")
    with pytest.raises(RecordError, match="is a link"):
        folder.make_folder(name, "DiLoCo")
    assert [path.read_bytes() for path in outside.iterdir()] == [b"mine"]


def test_a_log_shows_escapes_and_the_environment_names_no_path(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "out", "digits")
    folder.write_environment()
    folder.log("a\x1b[31mline")
    assert (folder.path / "log.txt").read_text() == "a\\x1b[31mline\n"
    assert "/" not in (folder.path / "environment.json").read_text()
    environment = json.loads((folder.path / "environment.json").read_text())
    assert environment["MKL_CBWR"] == os.environ["MKL_CBWR"]


@pytest.mark.parametrize("content", ["old", None])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    path = tmp_path / "summary.json"
    if content is not None:
        path.write_text(content)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RecordError, match=r"summary\.json: cannot be written: No space left on device"):
        write_whole(path, "new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ([] if content is None else [content])


def test_out_must_be_new_or_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="the folder is not empty"):
        RunFolder.create(tmp_path, "digits")
    with pytest.raises(InputError, match="is a file"):
        RunFolder.create(tmp_path / "file", "digits")
    with pytest.raises(InputError, match="file/below: cannot be made: Not a directory"):
        RunFolder.create(tmp_path / "file" / "below", "digits")
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty", "digits").path == tmp_path / "empty"


def test_floats_read_back_exactly(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "out", "digits")
    rows = [{"step": 1, "train_loss": 0.1 + 0.2, "lr": 1e-300}, {"step": 2, "train_loss": float("nan")}]
    folder.write_result("DiLoCo", FitResult(history=rows))
    first, second = folder.read_metrics("DiLoCo")
    assert first == rows[0]
    assert second["train_loss"] != second["train_loss"]


def test_what_is_not_finite_is_null_in_the_summary(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "out", "digits")
    folder.write_summary([{"name": "DiLoCo", "final_loss": float("nan")}])
    assert folder.read_summary() == [{"name": "DiLoCo", "final_loss": None}]


def test_the_digest_is_of_results_alone(tmp_path: Path) -> None:
    folders = [RunFolder.create(tmp_path / name, "digits") for name in "ab"]
    for folder in folders:
        folder.write_text("experiment.yaml", str(folder.path))
        folder.write_result("DiLoCo", FitResult(history=[{"step": 1}]))
        folder.write_model("DiLoCo", {"w": torch.ones(3)})
    assert folders[0].digest() == folders[1].digest()
    folders[1].write_result("DiLoCo", FitResult(history=[{"step": 2}]))
    assert folders[0].digest() != folders[1].digest()


def test_labels_never_share_a_file() -> None:
    labels = unique_labels([("DiLoCo", "a/b"), ("DiLoCo", "a-b"), ("SPARTA", "A-B"), ("x" * 99, None)] * 2)
    assert len({file_name(label).casefold() for label in labels}) == 8


def test_visible_keeps_ordinary_text() -> None:
    assert visible("caf\xe9 \u4e2d") == "caf\xe9 \u4e2d"
    assert visible("a\r\nb") == "a\\r\\nb"
    assert len(visible("x" * 999)) == 200
