"""Tokens made of text: a local corpus, streamed through a tokenizer that is made here."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from netgym.cli.main import main as netgym
from netgym.experiment.experiment import Experiment
from netgym.planning.planned import trained_model
from netgym.tasks import build_task
from netgym.tasks.task import MissingDataError
from netgym.tasks.tokens import SHIPPED, Corpus, write_tokens
from netsim.errors import InputError
from netsim.files.documents import Document

tokenizers = pytest.importorskip("tokenizers")
if importlib.util.find_spec("datasets") is None:  # imported later: it is large
    pytest.skip("datasets is missing", allow_module_level=True)

DOCUMENTS = [f"the {number}. sentence of {number % 7} words, and no more." for number in range(1300)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for name, part in (("a.jsonl", DOCUMENTS[:800]), ("b.jsonl", ["", *DOCUMENTS[800:]])):
        (folder / name).write_text("".join(json.dumps({"text": each, "url": "x"}) + "\n" for each in part))
    with gzip.open(folder / "c.txt.gz", "wt") as file:
        file.write("\n".join(DOCUMENTS))
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["</s>"], show_progress=False)
    made.train_from_iterator(DOCUMENTS, trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("NETGYM_CACHE", str(tmp_path / "cache"))
    # A hub that is not reached is tried for long.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


def expected(home: Path) -> list[int]:
    coder = tokenizers.Tokenizer.from_file(str(home / "tokenizer.json"))
    return [token for each in DOCUMENTS for token in [*coder.encode(each).ids, coder.token_to_id("</s>")]]


@pytest.mark.parametrize("names", [["a.jsonl", "b.jsonl"], ["c.txt.gz"]])
def test_documents_become_tokens_in_their_order(home: Path, tmp_path: Path, names: list[str]) -> None:
    files = [str(home / name) for name in names]
    written = write_tokens(files, tmp_path / "out.bin", str(home / "tokenizer.json"))
    found = np.fromfile(tmp_path / "out.bin", dtype="uint16")
    assert found.tolist() == expected(home)
    assert (written.num_documents, written.num_tokens, written.end) == (1300, len(found), "</s>")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.bin"]


def test_the_command_stops_when_there_are_enough_and_says_how_to_train_with_them(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ["--tokenizer", str(home / "tokenizer.json"), "--out", "few.bin"]
    assert netgym(["tokens", str(home / "a.jsonl"), *tokenizer, "--most", "5000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("task: {name: text, paths: few.bin, vocab_size: ")
    assert lines[-1] == "few.bin"
    assert np.fromfile("few.bin", dtype="uint16").tolist() == expected(home)[:5000]
    monkeypatch.setenv("CORPUS", "few")
    task = build_task("text", paths="${CORPUS}.bin", block_size=16)
    inputs, _ = task.train[0]  # type: ignore[index]
    assert inputs.tolist() == expected(home)[:16]


@pytest.mark.parametrize(
    ("corpus", "options", "line"),
    [
        ("a.jsonl", {"column": "body"}, "has no column 'body' of texts; there are text, url"),
        ("a.jsonl", {"end": "<stop>"}, "has no token '<stop>'; name one that it has"),
        ("none.jsonl", {}, "cannot be read: "),
        ("a.jsonl", {"tokenizer": "none/such"}, "none/such is no file here, and as a model cannot be read"),
        (["a.jsonl", "c.txt.gz"], {}, "give files of one kind (.txt, .json, .jsonl, .csv, .parquet)"),
        ("a.jsonl", {"split": "test"}, "is a local file, which has no split: test: leave it out"),
    ],
)
def test_unreadable_input_is_reported_in_a_line(
    home: Path,
    tmp_path: Path,
    corpus: str | list[str],
    options: dict[str, str],
    line: str,
) -> None:
    names = [str(home / name) for name in ([corpus] if isinstance(corpus, str) else corpus)]
    given = {"tokenizer": str(home / "tokenizer.json"), **options}
    with pytest.raises(InputError) as error:
        write_tokens(names, tmp_path / "out.bin", **given)  # type: ignore[arg-type]
    assert str(error.value).startswith("tokens: ")
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out.bin").exists()


def test_a_folder_by_name_is_tokenised_once(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stories"
    folder.mkdir()
    for name in ("train-a.jsonl", "train-b.jsonl"):
        (folder / name).write_text((home / f"{name[6]}.jsonl").read_text())
    (folder / "validation.jsonl").write_text('{"text": "kept apart"}\n')
    asked = {"name": "stories", "tokenizer": str(home / "tokenizer.json"), "num_tokens": 9000}
    task: Any = build_task("text", dataset=asked, block_size=16)
    made = task.train.files[0].path
    assert np.fromfile(made, dtype="uint16").tolist() == expected(home)[:9000]
    assert task.model_options["gpt"]["vocab_size"] == 400
    written = made.stat().st_ino
    assert Corpus(**asked).cached()[0].stat().st_ino == written, "found again"
    made.with_name("made.json").unlink()  # as a kill leaves the folder
    made.with_name(".tokens.bin.1f.tmp").write_bytes(b"half")
    assert Corpus(**asked).cached()[0] == made
    assert sorted(path.name for path in made.parent.iterdir()) == ["made.json", "tokens.bin"]
    apart, _ = Corpus(name="stories", split="validation").cached()
    assert (apart.read_bytes(), apart.parent.name == made.parent.name) == (b"kept apart\n", False)
    (folder / "train-a.jsonl").write_text('{"text": "another", "url": "x"}\n')
    assert Corpus(**asked).cached()[0] != made


def test_the_shipped_text_is_there_as_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task: Any = build_task("text", dataset="alice", block_size=64)
    sides = [side.files[0].tokens.tobytes() for side in (task.train, task.validation)]
    assert b"".join(sides) == SHIPPED["alice"].read_bytes()
    assert task.model_options["gpt"]["vocab_size"] == 256
    assert netgym(["tokens", "alice", "--tokenizer", "bytes", "--most", "70", "--out", "few.bin"]) == 0
    assert capsys.readouterr().out.splitlines()[-2].endswith("vocab_size: 256, dtype: uint8}")
    assert Path("few.bin").read_bytes() == SHIPPED["alice"].read_bytes()[:70]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            {"dataset": "roneneldan/TinyStories"},
            "tokens: roneneldan/TinyStories is no file here, and as a data set",
        ),
        ({"dataset": {"name": "alice", "tokenizer": "gpt2"}}, "tokens: gpt2 is no file here, and as a model"),
    ],
)
def test_a_data_set_that_cannot_be_had_is_reported_in_a_line(
    options: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as error:
        build_task("text", **options)
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("cache/text/*"))


def test_a_missing_library_and_plans_without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"name": "text", "dataset": "roneneldan/TinyStories", "block_size": 8}
    asked = {"task": data, "workers": {"count": 2}, "steps": 1, "strategies": ["AllReduce"], "compute": "1 s"}
    document = Document("experiment", {**asked, "topology": "lan"})
    sequence, remarks = trained_model(Experiment.from_document(document, Path(), "experiment"))
    assert (sequence.length, remarks) == (8, ())
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(MissingDataError, match=r"datasets is not installed: pip install 'netgym\[text\]'"):
        build_task(**data)  # type: ignore[arg-type]
