"""Tokens of a corpus, streamed through a tokenizer into one file that the task `text` maps.

It needs the extra `text` (`tokenizers` and `datasets`). Only a batch of documents is in memory, so a corpus may be
larger than memory and disk; the file gets its name when it is whole.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from exogym_core.names import visible
from exogym_core.results.disk import FolderLock, cache_folder, record_errors
from netgym.tasks.task import MissingDataError
from netsim.errors import InputError
from netsim.files.plain_files import check_output, output_file
from netsim.files.schemas import Schema
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["SHIPPED", "Corpus", "WrittenTokens", "print_progress", "write_tokens"]

SHIPPED = {"alice": Path(__file__).with_name("alice.txt")}
"""Texts that come with NetGym, a document a line: the first four chapters of Lewis Carroll's Alice's Adventures in
Wonderland (1865, in the public domain)."""

_FORMAT = 1  # of the cache: another number makes all of it again
_HUB_SECONDS = 10.0
_BATCH = 500  # documents
_SPLIT, _COLUMN = "train", "text"  # where not given
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # end of a document, by tokenizer
# Loaders of `datasets` by suffix.
_KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_PACKED = (".gz", ".zst", ".xz", ".bz2")


@dataclass(frozen=True)
class WrittenTokens:
    """Result of `write_tokens`: counts, type and vocabulary of the file.

    Attributes:
        num_documents, num_tokens: numbers written.
        dtype: of a token in the file: uint8 for bytes, else uint16, or uint32 for larger vocabularies.
        vocab_size: of the tokenizer.
        end: the token after each document; None where the tokenizer has none.
    """

    num_documents: int
    num_tokens: int
    dtype: str
    vocab_size: int
    end: str | None


def write_tokens(
    corpus: str | Sequence[str],
    out: str | Path,
    tokenizer: str,
    *,
    config: str | None = None,
    split: str = _SPLIT,
    column: str = _COLUMN,
    end: str | None = None,
    most_tokens: int | None = None,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> WrittenTokens:
    """Write the tokens of a corpus, one document after the other, each with a token at its end.

    Args:
        corpus: files (.txt, a document a line; .jsonl, .csv, .parquet; packed or not), a folder of such files, a data
            set of the Hugging Face hub such as `allenai/c4`, or a name in `SHIPPED`.
        out: the file; `.bin` for the task `text`.
        tokenizer: `bytes` (of UTF-8), a `tokenizer.json`, or the name of a model on the hub.
        config, split: of a data set of the hub, or of a folder; files have none.
        column: the documents' text.
        end: the token after each document; by default a newline after bytes, else the first that the tokenizer has of
            the usual ones.
        most_tokens: number of tokens at which to stop.
        progress: called with documents and tokens so far.

    Raises:
        MissingDataError: the extra is missing, or the hub cannot be read.
        InputError: a file cannot be read, there is no such column, or no document at all.
    """
    check_output(out, ".bin")
    coder = _Bytes() if tokenizer == "bytes" else _tokenizer(tokenizer)
    ends = ("\n" if tokenizer == "bytes" else _ENDS) if end is None else (end,)
    found = next((name for name in ends if coder.token_to_id(name) is not None), None)
    if end is not None and found is None:
        raise InputError(f"tokens: {tokenizer} has no token {end!r}; name one that it has")
    last = [] if found is None else [coder.token_to_id(found)]
    size = coder.get_vocab_size()
    dtype = "uint8" if size <= 1 << 8 else "uint16" if size <= 1 << 16 else "uint32"
    num_documents = num_tokens = 0
    with output_file(out) as file:
        for batch in _batches(_documents(corpus, config, split, column)):
            coded = [[*each.ids, *last] for each in coder.encode_batch(batch, add_special_tokens=False)]
            tokens = np.fromiter(itertools.chain.from_iterable(coded), dtype=dtype)
            if most_tokens is not None:
                tokens = tokens[: most_tokens - num_tokens]
            file.write(tokens.tobytes())
            num_documents, num_tokens = num_documents + len(batch), num_tokens + len(tokens)
            progress(num_documents, num_tokens)
            if num_tokens == most_tokens:
                break
        if not num_tokens:
            raise InputError(f"tokens: {_name_of(corpus)} has no text in {column!r} of {split!r}")
    return WrittenTokens(num_documents, num_tokens, dtype, size, found)


def print_progress(documents: int, tokens: int) -> None:
    """Rewrite a line with the counts, where stderr is a terminal."""
    if sys.stderr.isatty():
        line = f"\r{format_count(documents, 'document')}, {format_count(tokens, 'token')}"
        print(line, end="", file=sys.stderr, flush=True)


class Corpus(Schema):
    """Option `dataset` of the task `text`: documents by name, whose tokens are made once and kept.

    Attributes:
        name: a data set of the Hugging Face hub, a file (.txt, a document a line; .jsonl, .csv, .parquet; packed or
            not), a folder of such files, or `alice`, which comes with NetGym.
        config, split: of a data set of the hub, or of a folder; files have none.
        column: the documents' text.
        tokenizer: `bytes`, a `tokenizer.json`, or the name of a model on the hub.
        num_tokens: number of tokens at which to stop.
    """

    name: str
    config: str | None = None
    split: str = _SPLIT
    column: str = _COLUMN
    tokenizer: str = "bytes"
    num_tokens: Annotated[int, Field(gt=0)] = 10_000_000

    def cached(self) -> tuple[Path, WrittenTokens]:
        """The file of tokens in the cache, made where it is not there, and what it holds.

        The folder has the name of a digest of these options and of the names, sizes and times of local files. One
        process makes it and others wait; after a kill it is made again.

        Raises:
            InputError: as `write_tokens`; the folder cannot be written.
        """
        places = [
            path for name in (self.name, self.tokenizer) for path in _files(str(SHIPPED.get(name, name)))
        ]
        stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in places]
        made_of = json.dumps([_FORMAT, self.model_dump(), stats], sort_keys=True)
        folder = cache_folder() / "text" / hashlib.sha256(made_of.encode()).hexdigest()[:16]
        out, record = folder / "tokens.bin", folder / "made.json"
        while not (record.is_file() and out.is_file()):
            try:
                with record_errors(folder, "made"):
                    folder.mkdir(parents=True, exist_ok=True)
                lock = FolderLock(folder)
            except (InputError, FileNotFoundError):
                time.sleep(0.1)  # another process makes it, or has given up
                continue
            try:
                for partial in folder.glob(".*.tmp"):  # of a process that was killed
                    partial.unlink(missing_ok=True)
                options = self.model_dump(exclude={"name", "num_tokens", "tokenizer"})
                written = write_tokens(
                    self.name,
                    out,
                    self.tokenizer,
                    most_tokens=self.num_tokens,
                    progress=print_progress,
                    **options,
                )
                with output_file(record) as file:
                    made = {"made_of": json.loads(made_of), "tokens": asdict(written)}
                    file.write(json.dumps(made, indent=2).encode())
                counts = f"{format_count(written.num_tokens, 'token')} of {visible(self.name)}"
                print(f"{counts} are kept in {visible(out)}", file=sys.stderr)
            finally:
                lock.release()
                with contextlib.suppress(OSError):  # which holds something
                    folder.rmdir()
        return out, WrittenTokens(**json.loads(record.read_text(encoding="utf-8"))["tokens"])


class _Bytes:
    """The bytes of UTF-8 as tokens, in the form of a tokenizer of `tokenizers`."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[_Encoded]:
        return [_Encoded(text.encode(errors="replace")) for text in texts]

    def token_to_id(self, token: str) -> int | None:
        return ord(token) if len(token.encode()) == 1 else None

    def get_vocab_size(self) -> int:
        return 256


@dataclass(frozen=True)
class _Encoded:
    ids: bytes


def _name_of(corpus: str | Sequence[str]) -> str:
    return corpus if isinstance(corpus, str) else ", ".join(corpus)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(documents)
    while batch := list(itertools.islice(rest, _BATCH)):
        yield batch


def _needed(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise MissingDataError(f"tokens: {name} is not installed: pip install 'netgym[text]'") from None


def _tokenizer(name: str) -> Any:
    module = _needed("tokenizers")
    try:
        if Path(name).is_file():
            return module.Tokenizer.from_file(name)
        known = _needed("huggingface_hub").try_to_load_from_cache(name, "tokenizer.json")
        if isinstance(known, str):
            return module.Tokenizer.from_file(known)
        _ask_hub("model", name)
        return module.Tokenizer.from_pretrained(name)
    except InputError:
        raise
    except Exception as error:  # whatever the hub or the parser says
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"tokens: {name} is no tokenizer.json, nor a model of the hub that can be read: {reason}"
        ) from None


def _ask_hub(kind: str, name: str) -> None:
    """Ask the hub once whether it has a name: its libraries try for half a minute before they give up."""
    api = _needed("huggingface_hub").HfApi()
    try:
        (api.model_info if kind == "model" else api.dataset_info)(name, timeout=_HUB_SECONDS)
    except Exception as error:  # whatever the network or the hub says
        reason = visible(str(error).partition("\n")[0], 200)
        meant = difflib.get_close_matches(name, SHIPPED, 1) if kind == "data set" else []
        near = f"did you mean {meant[0]}, which comes with NetGym? Else " if meant else ""
        raise MissingDataError(
            f"tokens: {visible(name)} is no file here, and as a {kind} cannot be read from {api.endpoint} ({reason}): "
            f"{near}check the name and the network, or give a file"
        ) from None


def _files(name: str) -> list[Path]:
    """The local file of this name, or the files of this folder; nothing for a name of the hub."""
    path = Path(name)
    return [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())


def _documents(corpus: str | Sequence[str], config: str | None, split: str, column: str) -> Iterator[str]:
    names = [corpus] if isinstance(corpus, str) else list(corpus)
    is_shipped = len(names) == 1 and names[0] in SHIPPED
    if is_shipped or all(os.path.isfile(name) for name in names):
        given = {"config": config, "split": split, "column": column if is_shipped else _COLUMN}
        plain = {"config": None, "split": _SPLIT, "column": _COLUMN}
        if idle := [f"{key}: {value}" for key, value in given.items() if value != plain[key]]:
            kind = "the text that comes with NetGym" if is_shipped else "a local file"
            raise InputError(
                f"tokens: {_name_of(corpus)} is {kind}, which has no {' and '.join(idle)}: leave it out"
            )
    if is_shipped:
        yield from SHIPPED[names[0]].read_text(encoding="utf-8").splitlines()
        return
    module = _needed("datasets")
    files = [name for name in names if os.path.isfile(name) or _kind(name) is not None]
    try:
        if files:
            kinds = {_kind(name) for name in files}
            if len(kinds) != 1 or None in kinds or len(files) != len(names):
                remedy = f"give files of one kind ({', '.join(_KINDS)}), a folder, or one data set of the hub"
                raise InputError(f"tokens: {_name_of(corpus)}: {remedy}")
            data = module.load_dataset(kinds.pop(), data_files={split: files}, split=split, streaming=True)
        elif len(names) == 1:
            if not os.path.isdir(names[0]):
                _ask_hub("data set", names[0])
            data = module.load_dataset(names[0], config, split=split, streaming=True)
        else:
            raise InputError(
                f"tokens: {_name_of(corpus)}: give one data set of the hub, one folder, or files that are there"
            )
        for row in data:
            text = row.get(column)
            if not isinstance(text, str | None) or column not in row:
                texts = ", ".join(sorted(key for key, value in row.items() if isinstance(value, str)))
                raise InputError(
                    f"tokens: {_name_of(corpus)} has no column {column!r} of texts; there are {texts or 'none'}"
                )
            if text:
                yield text
    except InputError:
        raise
    except Exception as error:  # whatever the hub, a file or its parser says
        reason = str(error).partition("\n")[0]
        raise InputError(f"tokens: {_name_of(corpus)} cannot be read: {reason}") from None


def _kind(name: str) -> str | None:
    path = Path(name)
    while path.suffix in _PACKED:
        path = path.with_suffix("")
    return _KINDS.get(path.suffix)
