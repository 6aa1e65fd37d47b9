"""Parts of checkpoints on disks that rank 0 does not see: verified where they lie, and kept until no longer needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from exogym_core.checkpoints.checkpoint import StoredCheckpoint, run_identity
from exogym_core.checkpoints.writing import VARIABLE, CheckpointWriter, OwnParts, RankCheckpoints, mark_of
from exogym_core.events import Saved
from exogym_core.results.disk import RecordError
from exogym_core.workers.host import untimed_row
from netsim.errors import InputError

IDENTITY = run_identity(torch.nn.Linear(1, 1), "S", {}, 2, {})


def state(step: int, rank: int) -> dict[str, Any]:
    return {"step": step, "rank": rank, "weights": torch.full((3,), float(step))}


class TwoDisks:
    """Rank 0 with the run's folder, and rank 1 that does not see it."""

    def __init__(self, folder: Path, resumed: StoredCheckpoint | None = None) -> None:
        self.home, self.scratch = folder / "run", folder / "scratch"
        for path in (self.home, self.scratch):
            path.mkdir(exist_ok=True)
        self.newest = -1
        self.own = OwnParts(self.scratch, (1, 2), lambda: self.newest)
        self.writer = CheckpointWriter(self.home, IDENTITY, 2, resumed)
        self.writer.on_complete = self.completed

    def completed(self, step: int) -> None:
        self.newest = step

    def save(self, step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        for rank in ranks:
            own = self.own if rank else None
            files = RankCheckpoints(self.home, 5, None, own).save(step, rank, state(step, rank))
            self.writer.add(untimed_row(rank, Saved(step, files)))
        self.writer.settle()

    def parts(self) -> list[str]:
        return sorted(path.name for path in self.scratch.glob("part-*"))


def test_a_checkpoint_is_complete_when_each_disk_has_its_part(tmp_path: Path) -> None:
    disks = TwoDisks(tmp_path)
    disks.save(5, ranks=(1,))
    assert not list(disks.home.glob("step-*"))
    disks.save(5, ranks=(0,))
    found = StoredCheckpoint.open(disks.home / "step-00000005")
    assert found.rank_state(0)["rank"] == 0
    seen = disks.own.opened(
        StoredCheckpoint.of_manifest(found.path, (found.path / "manifest.json").read_text())
    )
    assert seen.rank_state(1)["weights"].tolist() == [5.0] * 3
    disks.writer.close()


def test_a_part_stays_until_a_newer_checkpoint_is_complete(tmp_path: Path) -> None:
    """Whatever is killed between two of them, there is a whole one: rank 1 alone has written that of step 15."""
    disks = TwoDisks(tmp_path)
    disks.save(5)
    disks.save(10)
    disks.save(15, ranks=(1,))
    assert disks.parts() == ["part-00000010", "part-00000015"]
    disks.writer.close()
    disks.writer.release()
    last = StoredCheckpoint.open(disks.home / "step-00000010")
    again = TwoDisks(tmp_path, last)
    assert again.own.opened(last).rank_state(1)["step"] == 10
    again.own.keep_only(10)
    assert again.parts() == ["part-00000010"]
    again.save(15)
    assert again.newest == 15
    again.writer.close()


@pytest.mark.parametrize("damage", ["gone", "other bytes"])
def test_the_error_for_a_missing_part_names_its_machine(tmp_path: Path, damage: str) -> None:
    disks = TwoDisks(tmp_path)
    disks.save(5)
    disks.writer.close()
    path = disks.scratch / "part-00000005" / "rank-0001.safetensors"
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-1] + b"x")
    last = StoredCheckpoint.open(disks.home / "step-00000005")
    with pytest.raises(
        InputError, match=r"step-00000005: rank 1 on .* lacks its part: .*; it was written on "
    ):
        disks.own.opened(last)


def test_a_rank_that_sees_the_folder_of_rank_0_writes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless its machine's own disk is named; folders of several runs lie apart there."""
    monkeypatch.delenv(VARIABLE, raising=False)
    mark = mark_of(tmp_path)
    assert OwnParts.where_needed(tmp_path, mark, (1, 2), lambda: -1) is None
    unseen = OwnParts.where_needed(tmp_path / "elsewhere", mark, (1, 2), lambda: -1)
    assert unseen.folder == tmp_path / "elsewhere"
    monkeypatch.setenv(VARIABLE, str(tmp_path / "disk"))
    own = OwnParts.where_needed(tmp_path / "run", mark, (1, 2), lambda: -1)
    assert own.folder == Path(f"{tmp_path}/disk{tmp_path}/run")


def test_a_manifest_may_name_files_elsewhere_and_no_others(tmp_path: Path) -> None:
    """What is of no other disk must be there, as before."""
    disks = TwoDisks(tmp_path)
    disks.save(5)
    disks.writer.close()
    body = json.loads((disks.home / "step-00000005" / "manifest.json").read_text())["body"]
    assert {name for name, about in body["files"].items() if "host" in about} == {
        "rank-0001.json", "rank-0001.safetensors",
    }  # fmt: skip
    (disks.home / "step-00000005" / "rank-0000.json").unlink()
    with pytest.raises(RecordError, match="it is missing"):
        StoredCheckpoint.open(disks.home / "step-00000005")
