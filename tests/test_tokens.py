"""Tokens made of text: a local corpus, streamed through a tokenizer that is made here."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from netgym.cli.main import main as netgym
from netgym.tasks import build_task
from netgym.tasks.tokens import write_tokens
from netsim.errors import InputError

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
        ("a.jsonl", {"column": "body"}, "has no column 'body'; there are text, url"),
        ("a.jsonl", {"end": "<stop>"}, "has no token '<stop>'; name one that it has"),
        ("none.jsonl", {}, "cannot be read: "),
        ("a.jsonl", {"tokenizer": "none/such"}, "none/such is no tokenizer.json, nor a model of the hub"),
        (["a.jsonl", "c.txt.gz"], {}, "give files of one kind (.txt, .json, .jsonl, .csv, .parquet)"),
    ],
)
def test_unreadable_input_is_reported_in_a_line(
    home: Path,
    tmp_path: Path,
    corpus: str | list[str],
    options: dict[str, str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.constants.HF_HUB_OFFLINE", True
    )  # a hub that is not reached is tried for long
    names = [str(home / name) for name in ([corpus] if isinstance(corpus, str) else corpus)]
    given = {"tokenizer": str(home / "tokenizer.json"), **options}
    with pytest.raises(InputError) as error:
        write_tokens(names, tmp_path / "out.bin", **given)  # type: ignore[arg-type]
    assert str(error.value).startswith("tokens: ")
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out.bin").exists()
