"""Checkpoints on disk: what is kept exactly, what never loads, what a crash leaves, what is refused."""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import importlib
import json
import linecache
import math
import os
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from experiments import Squares, fitted
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from exogym_core.checkpoints import checkpoint, files, writing
from exogym_core.checkpoints.checkpoint import StoredCheckpoint, find_checkpoint, run_identity
from exogym_core.checkpoints.files import LogWriter, decode, encode, read_logs, read_state, write_state
from exogym_core.checkpoints.writing import VARIABLE, CheckpointWriter, OwnParts, RankCheckpoints, mark_of
from exogym_core.communicator.deadlines import Deadline
from exogym_core.communicator.simulated.meeting_requests import Join
from exogym_core.events import (
    EvaluationPoint,
    EvaluationTaken,
    Grid,
    RoundPlace,
    Saved,
    StepDone,
)
from exogym_core.results.disk import RecordError
from exogym_core.results.fit_result import FitResult
from exogym_core.strategy import (
    AllReduceStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OneBitAdamStrategy,
    Strategy,
    build_strategy,
)
from exogym_core.strategy.parts.state import State, Stateful
from exogym_core.workers.host import untimed_row
from exogym_core.workers.journal import request_from_record
from netsim.errors import InputError
from netsim.ranks import Advance, Call, Key, Mark, MessageGroup, Post, Take, Wait
from netsim.units import format_bytes

NUM_NODES, NUM_STEPS = 2, 5


class Model(nn.Module):
    def __init__(self, width: int = 3, bias: bool = True, dropout: float = 0.5, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(4, width, bias), nn.Dropout(dropout), nn.Linear(width, 1))
        self.layer[2].bias.requires_grad_(not frozen)

    def forward(self, batch: tuple[torch.Tensor]) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()


DATA = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))


def fit(
    model: nn.Module | None = None, strategy: Strategy | None = None, data: Any = None, **options: Any
) -> FitResult:
    given = {"max_steps": NUM_STEPS, "strategy": strategy or DiLoCoStrategy(H=2), "workers": "auto"}
    return fitted(model or Model(), data or DATA, **{**given, **options})


def outcome(result: FitResult) -> Any:
    states = [{name: value.tolist() for name, value in state.items()} for state in result.rank_states]
    # The seconds of a real transport are those of the machine.
    rows = [{name: value for name, value in row.items() if name != "wall_seconds"} for row in result.history]
    return rows, states


@cache
def unbroken() -> Any:
    """The outcome of a run that is never stopped."""
    return outcome(fit())


def load(path: Path) -> StoredCheckpoint:
    """Read all of a checkpoint."""
    found = StoredCheckpoint.open(path)
    found.past()
    for rank in range(NUM_NODES):
        found.rank_state(rank)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run's checkpoints."""
    folder = tmp_path_factory.mktemp("run") / "saved"
    assert fit(checkpoint_interval=2, save_dir=folder).checkpoint_folder == folder / "DiLoCoStrategy"
    return folder


@pytest.fixture
def saved(run: Path, tmp_path: Path) -> Path:
    """A copy of the step folder of a run's last checkpoint."""
    (path,) = (shutil.copytree(run, tmp_path / "saved") / "DiLoCoStrategy").iterdir()
    assert path.name == "step-00000004"
    return path


# --- what is kept exactly ----------------------------------------------------------------------------------

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$", "a"]), inner)
    ),
    max_leaves=8,
)


@settings(max_examples=10)
@given(plain_values)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    found = decode(encode(value, tensors), tensors)
    assert repr(found) == repr(value)


def test_tensors_of_an_accelerator_come_on_the_rank_s_device_again():
    """As those of messages under way do; random streams and optimizers' counts of steps stay on the CPU."""
    plain = {"kept": {"$": "tensor", "name": "0"}, "sent": [{"$": "tensor", "name": "1", "on_device": True}]}
    found = decode(plain, {"0": torch.zeros(1), "1": torch.ones(2)}, torch.device("meta"))
    assert found["kept"].device.type == "cpu"
    assert found["sent"][0].is_meta
    assert not decode(plain, {"0": torch.zeros(1), "1": torch.ones(2)})["sent"][0].is_meta


def test_everything_else_that_states_hold_comes_back_too(tmp_path: Path) -> None:
    state = {
        "tensors": [torch.arange(6).view(2, 3).T, torch.tensor(float("nan")), torch.zeros(0, 3)],
        "dtypes": [torch.tensor([1.5], dtype=t) for t in (torch.bfloat16, torch.float16, torch.float64)],
        "array": np.arange(3, dtype=np.uint32),
        "counter": Counter({2: 1, 4: 2}),
        "odd": [torch.float16, torch.device("cpu"), np.float64(0.1), np.int64(3), math.inf, -math.inf],
        0: {"parameter": nn.Parameter(torch.ones(2))},
    }
    facts = write_state(tmp_path, "state", state)
    found = read_state(tmp_path, "state", facts)
    for kind in ("tensors", "dtypes"):
        for before, after in zip(state[kind], found[kind], strict=True):
            assert before.dtype == after.dtype
            assert before.shape == after.shape
            assert (
                before.reshape(-1).view(torch.uint8).tolist() == after.reshape(-1).view(torch.uint8).tolist()
            )
    assert found["array"].dtype == np.uint32
    assert found["array"].tolist() == [0, 1, 2]
    assert type(found["counter"]) is Counter
    assert found["counter"] == state["counter"]
    assert found["odd"] == [torch.float16, torch.device("cpu"), 0.1, 3, math.inf, -math.inf]
    assert found[0]["parameter"].tolist() == [1.0, 1.0]


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(InputError, match=r"^state\.a\[1\]\[2\] is a Generator; it must hold tensors"):
        encode({"a": [0, {2: torch.Generator()}]}, {})


def test_a_log_is_appended_and_each_checkpoint_reads_its_part(tmp_path: Path) -> None:
    call = Call("all_to_all", (0, 1), 7, 0, 4, ((1, 2), (3, 4)))
    key = Key((("message", (0, 1), 0), 5), ((1, "a"), 2))
    done = StepDone(3, math.inf, 2, 0.1, 7, 7, 0, 1.5, RoundPlace(2, [0, 1], missed_round=1), 0.25)
    streams = [
        [Advance(0.1), Advance(0.1), Post(key, 1, call), Wait(key), Mark({"loss": math.inf, "to": [None]})],
        [Mark(done), Mark(EvaluationTaken(EvaluationPoint(Grid.END), None))],
    ]
    message = Post(Key(MessageGroup(0, 1, 0, 7), 3), 1, Call("sendrecv", (1, 0), 8))
    join = Join(Key(("present", 0), None), 1, (0, 1), 2.0, deadline=Deadline(median=1))
    streams[0] += [message, Wait(message.key), join, Take((0, 1, "box"), is_past=True, seconds=math.inf)]
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for path in (first, second, third):
        path.mkdir()
    log = LogWriter(tmp_path, 2, [])
    added = [(rank, request) for rank, stream in enumerate(streams) for request in stream]
    for each in added:
        log.add(*each)
    parts = log.link_into(first, [9, 2], (0, 0))
    log.add(1, Advance(7.0))
    more = log.link_into(second, [9, 3], (0, 0))
    log.close()
    # The file goes on behind what belongs to the first checkpoint: who reads that does not see it.
    assert (first / parts[0].name).stat().st_ino == (second / more[0].name).stat().st_ino, "written once"
    assert repr(read_logs(first, parts, 2)[0]) == repr(streams), "with all classes"
    # After a restart it goes on in another file, and what is replayed is not written again.
    again = LogWriter(tmp_path, 2, [(second, part) for part in more])
    for each in [*added, (1, Advance(7.0)), (1, Advance(1e-300))]:
        again.add(*each)
    last = again.link_into(third, [0, 1], (0, 0))
    again.close()
    assert read_logs(third, last, 2)[0][1] == [*streams[1], Advance(7.0), Advance(1e-300)]
    with pytest.raises(InputError, match=r"^rank 0, checkpoint: the row .* cannot be kept"):
        log.add(0, Mark({"tensor": torch.ones(1)}))


def test_requests_of_earlier_logs_are_read() -> None:
    group, about = ["present", 0], [1, [0, 1], 2.0, 9.0, 3.0]
    assert request_from_record(["take", [0, 1, "box"], "inf", True]) == Take((0, 1, "box"), math.inf, True)
    assert repr(request_from_record(["wait", [0, 1, 0, 7], 3])) == repr(
        Wait(Key(MessageGroup(0, 1, 0, 7), 3))
    )
    found = request_from_record(["joinnext", group, *about, True, [0.0, 0.0, 0.5, 0.0, 2]])
    about[1] = (0, 1)
    deadline = Deadline(quantile=0.5, quorum=2)
    assert found == Join(Key(("present", 0), None), *about, is_past=True, deadline=deadline)


def test_checkpoints_of_earlier_versions_name_all_reduce_otherwise(tmp_path: Path) -> None:
    folder = fit(strategy=AllReduceStrategy(), checkpoint_interval=2, save_dir=tmp_path).checkpoint_folder
    (manifest,) = tmp_path.glob("*/step-*/manifest.json")
    body = json.loads(manifest.read_text())["body"]
    body["identity"]["strategy"] = "SimpleReduceStrategy"
    manifest.write_text(checkpoint.manifest_text(body))
    assert fit(strategy=AllReduceStrategy(), resume_from=folder).resumed_step == 4


# --- what never loads --------------------------------------------------------------------------------------


def test_a_damaged_file_never_loads_and_is_named(saved: Path) -> None:
    assert load(saved).step == 4
    draw = random.Random(0)
    for path in sorted(saved.iterdir()):
        content = path.read_bytes()
        damages = [flipped(content, draw.randrange(len(content) * 8)) for _ in range(5)]
        damages += [content[: draw.randrange(len(content))] for _ in range(2)]
        damages += [b"", bytes(len(content)), content[:-1]]
        damages += [content + b"\n"] * (not path.name.startswith("log-"))  # which goes on behind its end
        for damage in damages:
            path.write_bytes(damage)
            with pytest.raises(RecordError) as caught:
                load(saved)
            assert str(caught.value).startswith(f"{path}: is damaged (")
            assert f"delete {saved} to continue" in str(caught.value)
        path.unlink()
        with pytest.raises(RecordError, match=path.name):
            load(saved)
        path.write_bytes(content)
    assert load(saved).step == 4


def resealed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a manifest that hashes to what it says, as somebody who means harm would."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())["body"]
    change(body)
    path.write_text(checkpoint.manifest_text(body))


FORGED = [
    ("step",),
    ("identity",),
    ("identity", "world size"),
    ("files",),
    ("files", "rank-0000.json"),
    ("logs",),
]
FORGED += [("logs", 0), *(("logs", 0, key) for key in ("name", "num_bytes", "sha256", "lengths", "observed"))]


@pytest.mark.parametrize("place", FORGED)
def test_a_forged_manifest_is_refused_in_a_line(place: tuple[Any, ...], saved: Path) -> None:
    """Any part of it replaced, and its SHA-256 made anew: no other error than ours, and no path elsewhere."""
    whole = (saved / "manifest.json").read_text()
    (saved.parents[1] / "outside").write_text("")
    for value in (None, -1, 1.5, "x", "../../outside", [], {}, [[0, 1]], [10**12] * 2):

        def change(body: dict[str, Any], value: Any = value) -> None:
            for key in place[:-1]:
                body = body[key]
            body[place[-1]] = value

        (saved / "manifest.json").write_text(whole)
        resealed(saved, change)
        with contextlib.suppress(RecordError, InputError):
            load(saved)
        with contextlib.suppress(RecordError, InputError):
            stored = StoredCheckpoint.open(saved)
            assert "/" not in "".join((*stored.files, *(log.name for log in stored.logs)))


def test_crafted_files_cost_no_memory_and_are_named(saved: Path) -> None:
    """Deeply nested JSON, and a log that unpacks to 4 GB of one line; under honest digests."""

    def write(name: str, content: bytes) -> None:
        facts = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (saved / name).write_bytes(content)

        def change(body: dict[str, Any]) -> None:
            if name in body["files"]:
                body["files"][name] = facts
            else:
                body["logs"][0] |= facts

        resealed(saved, change)

    nested = b"[" * 200_000 + b"]" * 200_000
    good = (saved / "rank-0000.json").read_bytes()
    write("rank-0000.json", nested)
    with pytest.raises(RecordError, match=r"rank-0000\.json: is damaged"):
        StoredCheckpoint.open(saved).rank_state(0)
    write("rank-0000.json", good)
    bomb = b"".join([gzip.compress(bytes(1 << 22), mtime=0)] * 1000)
    write("log-0001.jsonl.gz", bomb)
    with pytest.raises(RecordError, match=r"log-0001\.jsonl\.gz: is damaged \(it has a line of"):
        StoredCheckpoint.open(saved).past()
    (saved / "manifest.json").write_bytes(nested)
    with pytest.raises(RecordError, match=r"manifest\.json: is damaged"):
        StoredCheckpoint.open(saved)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# --- what a crash leaves -----------------------------------------------------------------------------------


class Killed(BaseException):
    pass


def stages_of_a_save(tmp_path: Path) -> list[str]:
    writer = CheckpointWriter(tmp_path, {}, 1)
    (tmp_path / ".step-00000001").mkdir()
    return list(writer.stages(1, {}, {0: 0}))


@pytest.mark.parametrize("crash_after", range(5))
def test_a_crash_while_a_checkpoint_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_after: int
) -> None:
    names = ["log", "manifest", "renamed", "complete", "alone"]
    assert stages_of_a_save(tmp_path) == names
    stages = CheckpointWriter.stages

    def crashing(writer: CheckpointWriter, step: int, *rest: Any) -> Iterator[str]:
        for number, stage in enumerate(stages(writer, step, *rest)):
            yield stage
            if step == 3 and number == crash_after:
                raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "stages", crashing)
        patch.setattr(CheckpointWriter, "close", lambda writer: None)  # as after kill -9: nothing is tidied
        with pytest.raises(Killed):
            fit(checkpoint_interval=1, save_dir=tmp_path)
    check_resumed(tmp_path / "DiLoCoStrategy", {2 if crash_after < 2 else 3})


@pytest.mark.parametrize("crash_at", [5 * 2, 5 * 3 - 1])
def test_a_crash_while_a_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: int
) -> None:
    """Two files a rank and the manifest make five a checkpoint; half of the file in hand is there."""
    write_new, num_written = files.write_new, 0

    def crashing(path: Path, content: bytes) -> Any:
        nonlocal num_written
        if num_written == crash_at:
            path.write_bytes(content[: len(content) // 2])
            raise Killed
        num_written += 1
        return write_new(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write_new", crashing)
        patch.setattr(writing, "write_new", crashing)
        patch.setattr(CheckpointWriter, "close", lambda writer: None)
        with pytest.raises(BaseException, match=r"Killed|^$"):
            fit(checkpoint_interval=1, save_dir=tmp_path)
    # A rank may be a step ahead of what the clock has served: the one before may not be complete yet.
    check_resumed(tmp_path / "DiLoCoStrategy", {1, 2})


def check_resumed(folder: Path, steps: set[int]) -> None:
    """Whoever goes on finds the checkpoint of one of these whole, and gets the same bits without leaving a trace."""
    found = find_checkpoint(folder)
    assert found is not None
    assert found.step in steps
    resumed = fit(checkpoint_interval=1, resume_from=folder)
    assert resumed.resumed_step == found.step
    assert outcome(resumed) == unbroken()
    assert [path.name for path in folder.iterdir()] == ["step-00000005"]


@pytest.mark.parametrize(
    ("nth", "workers"), [(4, {"kind": "processes", "processes": 2}), (6, "threads")], ids=["p", "t"]
)
def test_a_full_disk_is_reported_and_leaves_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int, workers: Any
) -> None:
    fsync, folder, limit = os.fsync, tmp_path / "DiLoCoStrategy", [0]

    def full(descriptor: int) -> None:
        limit[0] += any(folder.glob("step-*"))
        if limit[0] == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RecordError, match="cannot be written: No space left on device"):
            fit(checkpoint_interval=2, save_dir=tmp_path, max_steps=20, workers=workers, num_epochs=9)
    (left,) = folder.iterdir()
    assert int(left.name.removeprefix("step-")) >= 2
    load(left)


MODEL_BYTES = NUM_NODES * sum(each.nbytes for each in Model().state_dict().values())


@pytest.mark.parametrize("free", [100, 2 * MODEL_BYTES])
def test_a_disk_without_room_for_a_first_checkpoint_ends_the_run_before_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    """AdamW keeps two values a weight, which count before a step is taken."""
    rows: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        with pytest.raises(
            RecordError,
            match=rf"new: a checkpoint of this run needs at least .*, and {format_bytes(free)} are free",
        ):
            fit(checkpoint_interval=2, save_dir=tmp_path / "new", on_event=rows.append)
    assert rows == []
    assert list(tmp_path.iterdir()) == []


def test_rights_are_those_that_the_umask_leaves(saved: Path) -> None:
    os.umask(umask := os.umask(0))
    for path in (saved.parent, saved, *saved.iterdir()):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path


# --- what is refused ---------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_nodes": 3}, "the checkpoint's world size is 2, this run's is 3; make them equal"),
    ({"strategy": FedAvgStrategy(H=2)}, "strategy is DiLoCoStrategy, this run's is FedAvgStrategy;"),
    ({"strategy": DiLoCoStrategy(H=3)}, "strategy's options: H is 2, this run's is 3;"),
    (
        {"strategy": DiLoCoStrategy(H=2, outer_lr=0.5)},
        "strategy's options: outer_lr is None, this run's is 0.5;",
    ),
    (
        {"strategy": DiLoCoStrategy(H=2, lr=0.5)},
        "strategy's options: lr is absent, this run's is 0.5;",
    ),
    ({"model": Model(5)}, "model: layer.0.weight is float32[3, 4], this run's is float32[5, 4];"),
    ({"model": Model(bias=False)}, "model: layer.0.bias is float32[3], this run's is absent;"),
    (
        {"model": Model(dropout=0.2)},
        "modules: layer.1 is Dropout(p=0.5, inplace=False), this run's is Dropout(p=0.2,",
    ),
    ({"model": Model(frozen=True)}, "out_features=1, bias=True, bias frozen); make them equal"),
    ({"seed": 1}, "settings: seed is 42, this run's is 1;"),
    ({"batch_size": 5}, "settings: batch_size is 4, this run's is 5;"),
    ({"transport": "gloo"}, "settings: transport is netsim, this run's is gloo"),
    ({"topology": "lan", "compute": "1 ms"}, "settings: topology is None, this run's is lan ("),
]


@pytest.mark.parametrize(("changed", "line"), REFUSED)
def test_another_run_is_refused_with_both_values(saved: Path, changed: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        fit(resume_from=saved.parent, **changed)
    assert line in str(caught.value)
    assert str(caught.value).startswith(f"{saved}: ")


def test_another_version_is_refused_with_both_values(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = checkpoint.run_identity

    def newer(*arguments: Any) -> dict[str, Any]:
        found = identity(*arguments)
        found["versions"]["torch"] = "99.0"
        return found

    monkeypatch.setattr("exogym_core.run.resumption.run_identity", newer)
    with pytest.raises(InputError, match=r"versions: torch is .*, this run's is 99\.0;"):
        fit(resume_from=saved.parent)


def test_another_format_is_refused_with_both_values(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_FORMAT", 6)
    with pytest.raises(InputError, match="the checkpoint's format is 5, this run's is 6;"):
        find_checkpoint(saved)


def test_other_options_of_objects_given_as_arguments_are_refused(tmp_path: Path) -> None:
    """It went on with another H, in silence: an object was compared by its class alone."""
    options: dict[str, Any] = {"checkpoint_interval": 2, "save_dir": tmp_path, "workers": "threads"}
    begun = fit(strategy=build_strategy("Chain", modules=[{"name": "DiLoCo", "H": 2}]), **options)
    again = {**options, "resume_from": begun.checkpoint_folder}
    with pytest.raises(InputError, match="strategy's options: modules"):
        fit(strategy=build_strategy("Chain", modules=[{"name": "DiLoCo", "H": 3}]), **again)
    same = fit(strategy=build_strategy("Chain", modules=[{"name": "DiLoCo", "H": 2}]), **again)
    assert same.resumed_step == 4


class Counted(Dataset[Any]):
    """Samples one by one, the last ones other than before."""

    def __init__(self, count: int = 40, last: float = 0.0) -> None:
        self.count, self.last = count, last

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.full((4,), self.last if index > 30 else index / 40) + torch.rand(4),)


OTHER = TensorDataset(DATA.tensors[0].clone().index_fill(0, torch.tensor([17]), 0.5))


@pytest.mark.parametrize(
    ("first", "then", "line"),
    [
        (
            DATA,
            OTHER,
            r"checkpoint's training set is TensorDataset of 40 samples \(\w{12}\), this run's is Tensor",
        ),
        (
            Counted(),
            Counted(last=1.0),
            r"is Counted of 40 samples \(\w+\), this run's is Counted of 40 samples",
        ),
        (
            lambda rank, num_nodes, train_dataset: Counted(),
            lambda rank, num_nodes, train_dataset: Counted(last=float(rank)),
            "checkpoint's training set is Counted of 40 samples",
        ),
    ],
)
def test_a_checkpoint_knows_its_data(first: Any, then: Any, line: str, tmp_path: Path) -> None:
    """Other data of the same shape used to be accepted, and fewer samples to end in ZeroDivisionError."""
    options = {"checkpoint_interval": 2, "save_dir": tmp_path, "workers": "threads"}
    folder = fit(data=first, **options).checkpoint_folder
    with pytest.raises(InputError, match=line) as error:
        fit(data=then, resume_from=folder, workers="threads")
    assert "\n" not in str(error.value)
    assert fit(data=first, resume_from=folder, workers="threads").complete


@pytest.mark.parametrize("length", [{"max_steps": 3}, {"max_steps": None, "num_epochs": 1, "batch_size": 8}])
def test_fewer_steps_than_were_done_are_refused(length: dict[str, Any], tmp_path: Path) -> None:
    """The checkpoint's result used to be returned as if it were that of the shorter run."""
    *_, name = (name for name in length if name != "batch_size")
    longer = {**length, name: 4 if name == "max_steps" else 2}
    folder = fit(**longer, checkpoint_interval=4, save_dir=tmp_path).checkpoint_folder
    line = rf"fit: {name} ends the run after 3 steps, but .*step-00000004 has done 4"
    with pytest.raises(InputError, match=line):
        fit(resume_from=folder, **length)


def test_a_new_run_takes_a_new_folder(saved: Path, tmp_path: Path) -> None:
    again = fit(checkpoint_interval=2, save_dir=tmp_path / "saved")
    assert again.checkpoint_folder == tmp_path / "saved" / "DiLoCoStrategy-2"
    load(saved)


class Unfinished(Strategy):
    """Leaves a call of its step to the next one."""

    def step(self) -> None:
        self.optim.step()
        self.handle = self.comm.all_reduce(torch.ones(3), async_op=True)
        super().step()


@pytest.mark.parametrize("transport", ["netsim", "gloo"])
def test_a_call_in_flight_is_refused(transport: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        fit(strategy=Unfinished(), checkpoint_interval=1, save_dir=tmp_path, transport=transport)
    assert re.match(
        r"rank \d, checkpoint: all_reduce\(float32\[3\], op=sum\) at test_checkpoint.py:", str(caught.value)
    )
    assert "is still in flight at the end of the step; wait for its handle" in str(caught.value)


# --- code of one's own ---------------------------------------------------------------------------------------

OWN = """\
from exogym_core.strategy import State, Strategy
from {helper} import part

FACTOR = 0.5


class Own(Strategy):
    judged = "own"

    def __init__(self, **options):
        super().__init__(**options)
        self.by_pair, self.names, self.circular = {{(0, 1): 0.5}}, {{"a", "b", "c", "d"}}, []
        self.circular.append(self.circular)

    def step(self):
        for parameter in self.trainable:
            parameter.data += FACTOR * part(self)
        self.optimizer_step()
        super().step()
"""
HELPER = """\
def part(strategy):
    return strategy.rank + 1
"""


def own_strategy(folder: Path, name: str, source: str = OWN, helper: str = HELPER) -> Strategy:
    """The strategy of a module `name`, which is taken from the disk as it is now."""
    (folder / f"{name}.py").write_text(source.format(helper=f"{name}_helper"))
    (folder / f"{name}_helper.py").write_text(helper)
    for each in (name, f"{name}_helper"):
        sys.modules.pop(each, None)
    importlib.invalidate_caches()
    linecache.clearcache()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(sys, "dont_write_bytecode", True)
        strategy: Strategy = importlib.import_module(name).Own(lr=0.1)
    return strategy


EDITS: dict[str, tuple[str, str, str]] = {
    "its module": ("source", "FACTOR = 0.5", "FACTOR = 0.25"),
    "another module": ("helper", "strategy.rank + 1", "strategy.rank + 2"),
}


@pytest.mark.parametrize("what", EDITS)
def test_edited_code_of_ones_own_is_refused_on_the_way_on(what: str, tmp_path: Path) -> None:
    """It went on with the new formula, without a word."""
    options: dict[str, Any] = {"workers": "threads", "checkpoint_interval": 2, "save_dir": tmp_path / "saved"}
    name = f"own_{list(EDITS).index(what)}"
    begun = fit(strategy=own_strategy(tmp_path, name), max_steps=3, **options)
    again = {**options, "resume_from": begun.checkpoint_folder}
    file, before, after = EDITS[what]
    texts = {"source": OWN, "helper": HELPER}
    edited = {**texts, file: texts[file].replace(before, after)}
    with pytest.raises(InputError) as caught:
        fit(strategy=own_strategy(tmp_path, name, **edited), **again)
    changed = name if file == "source" else f"{name}_helper"
    assert f"step-00000002: {changed} was edited" in str(caught.value)
    assert (
        "since this checkpoint; undo the edit, or add --edited-code (fit: edited_code=True) to continue "
        "with the current code"
    ) in str(caught.value)
    assert fit(strategy=own_strategy(tmp_path, name), **again).resumed_step == 2
    with pytest.warns(UserWarning, match="the run continues with the current code"):
        accepted = fit(strategy=own_strategy(tmp_path, name, **edited), edited_code=True, **again)
    assert accepted.resumed_step == 4


class Scaled(Squares):
    """What its constructor is given is in no tensor."""

    def __init__(self, scales: list[float]) -> None:
        super().__init__()
        self.scales = scales

    def forward(self, batch: Any) -> torch.Tensor:
        return self.scales[0] * super().forward(batch)


def test_another_plain_attribute_of_ones_own_model_is_refused_on_the_way_on(tmp_path: Path) -> None:
    """It went on with the new loss, without a word."""
    options: dict[str, Any] = {"workers": "threads", "checkpoint_interval": 1, "save_dir": tmp_path}
    begun = fitted(Scaled([1.0]), max_steps=2, **options)
    again = {**options, "resume_from": begun.checkpoint_folder}
    with pytest.raises(InputError, match=r"test_checkpoint\.Scaled.scales was edited since this checkpoint"):
        fitted(Scaled([2.0]), **again)
    assert fitted(Scaled([1.0]), **again).resumed_step == 2


def test_a_declared_attribute_that_is_missing_is_named(tmp_path: Path) -> None:
    strategy = own_strategy(
        tmp_path, "declares", OWN.replace('judged = "own"', 'judged = "own"\n    state = State("phi")')
    )
    with pytest.raises(InputError, match=r"Own: declares State\('phi'\) and has no attribute 'phi'"):
        fit(strategy=strategy, checkpoint_interval=1, save_dir=tmp_path / "saved", workers="threads")


COSINE = {"lr_scheduler": "lambda_cosine", "lr_scheduler_kwargs": {"cosine_anneal": True, "warmup_steps": 2}}


@pytest.mark.parametrize("make", [lambda: DiLoCoStrategy(H=2, **COSINE), OneBitAdamStrategy])
def test_a_schedule_that_ends_with_the_run_goes_on_for_no_other_length(
    make: Callable[[], Strategy], tmp_path: Path
) -> None:
    """Step 9 would have had the rate of the shorter run's end, and step 10 that of a longer one."""
    options = {"checkpoint_interval": 4, "save_dir": tmp_path}
    folder = fit(strategy=make(), max_steps=8, **options).checkpoint_folder
    with pytest.raises(
        InputError, match=r"settings: steps of a schedule is \[\d+\], this run's is \[\d+\]; make them"
    ):
        fit(strategy=make(), max_steps=16, resume_from=folder)
    assert fit(strategy=make(), max_steps=8, resume_from=folder).resumed_step == 8


@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_scheduler": "StepLR", "lr_scheduler_kwargs": {"step_size": 3, "gamma": 0.5}},
        {
            "lr_scheduler": "lambda_cosine",
            "lr_scheduler_kwargs": {"cosine_anneal": True, "warmup_steps": 2, "max_steps": 6},
        },
    ],
)
def test_a_schedule_of_its_own_length_goes_on_as_unbroken(schedule: dict[str, Any], tmp_path: Path) -> None:
    def make() -> Strategy:
        return DiLoCoStrategy(H=2, **schedule)

    options = {"checkpoint_interval": 4, "save_dir": tmp_path}
    folder = fit(strategy=make(), max_steps=8, **options).checkpoint_folder
    longer = fit(strategy=make(), max_steps=12, resume_from=folder)
    assert outcome(longer) == outcome(fit(strategy=make(), max_steps=12))


# --- state that a class declares ----------------------------------------------------------------------------


# --- parts on disks that rank 0 does not see ----------------------------------------------------------------

IDENTITY = run_identity(torch.nn.Linear(1, 1), "S", {}, 2, {})


class TwoDisks:
    """Rank 0 with the run's folder, and rank 1 that does not see it."""

    def __init__(self, folder: Path, resumed: StoredCheckpoint | None = None) -> None:
        self.home, self.scratch = folder / "run", folder / "scratch"
        for path in (self.home, self.scratch):
            path.mkdir(exist_ok=True)
        completed = [-1]
        self.own = OwnParts(self.scratch, (1, 2), lambda: completed[-1])
        self.writer = CheckpointWriter(self.home, IDENTITY, 2, resumed)
        self.writer.on_complete = completed.append

    def save(self, step: int, *ranks: int) -> list[str]:
        """Write the parts of these ranks; the checkpoints that rank 0's disk then has."""
        for rank in ranks:
            own, state = self.own if rank else None, {"step": step, "weights": torch.ones(3)}
            files = RankCheckpoints(self.home, 5, None, own).save(step, rank, state)
            self.writer.add(untimed_row(rank, Saved(step, files)))
        self.writer.settle({})
        return [path.name for path in self.home.glob("step-*")]


def test_a_part_stays_on_its_disk_until_a_newer_checkpoint_is_complete(tmp_path: Path) -> None:
    """Whatever is killed between two of them, there is a whole one: rank 1 alone has written that of step 15."""
    disks = TwoDisks(tmp_path)
    assert disks.save(5, 1) == []
    assert disks.save(5, 0) == ["step-00000005"]
    assert disks.save(10, 0, 1) == disks.save(15, 1) == ["step-00000010"]
    assert sorted(path.name for path in disks.scratch.glob("part-*")) == ["part-00000010", "part-00000015"]
    disks.writer.close()
    disks.writer.release()
    last = StoredCheckpoint.open(disks.home / "step-00000010")
    again = TwoDisks(tmp_path, last)
    seen = StoredCheckpoint.of_manifest(last.path, (last.path / "manifest.json").read_text())
    assert again.own.opened(seen).rank_state(1)["step"] == last.rank_state(0)["step"] == 10
    again.own.keep_only(10)
    assert [path.name for path in again.scratch.glob("part-*")] == ["part-00000010"]
    path = again.scratch / "part-00000010" / "rank-0001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(
        InputError, match=r"step-00000010: rank 1 on .* lacks its part: .*; it was written on "
    ):
        again.own.opened(last)
    assert again.save(15, 0, 1) == ["step-00000015"]
    again.writer.close()


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


class Kept(Stateful):
    state = State("tensor", "plain")

    def __init__(self) -> None:
        self.tensor, self.plain = torch.zeros(4), {"of": [0]}


def test_declared_state_is_a_copy_both_ways() -> None:
    module, fresh = Kept(), Kept()
    state = module.state_dict()
    fresh.load_state_dict(state)
    for each in (module, fresh):
        each.tensor += 1
        each.plain["of"].append(5)
    assert (state["tensor"].tolist(), state["plain"]) == ([0] * 4, {"of": [0]})
