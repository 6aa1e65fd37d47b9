"""Tokens of a corpus, streamed through a tokenizer into one file that the task `text` maps.

It needs the extra `text` (`tokenizers` and `datasets`). Only a batch of documents is in memory, so a corpus may be
larger than memory and disk; the file gets its name when it is whole.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from netsim.errors import InputError
from netsim.files.plain_files import check_output, output_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

__all__ = ["WrittenTokens", "write_tokens"]

_BATCH = 500  # documents
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")  # end of a document, by tokenizer
# Loaders of `datasets` by suffix.
_KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
_PACKED = (".gz", ".zst", ".xz", ".bz2")


@dataclass(frozen=True)
class WrittenTokens:
    """Result of `write_tokens`: counts, type and vocabulary of the file.

    Attributes:
        num_documents, num_tokens: numbers written.
        dtype: of a token in the file: uint16, or uint32 for larger vocabularies.
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
    split: str = "train",
    column: str = "text",
    end: str | None = None,
    most_tokens: int | None = None,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> WrittenTokens:
    """Write the tokens of a corpus, one document after the other, each with a token at its end.

    Args:
        corpus: files (.txt, a document a line; .jsonl, .csv, .parquet; packed or not), or a data set of the Hugging
            Face hub such as `allenai/c4`.
        out: the file; `.bin` for the task `text`.
        tokenizer: a `tokenizer.json`, or the name of a model on the hub.
        config, split: of a data set of the hub.
        column: the documents' text.
        end: the token after each document; by default the first that the tokenizer has of the usual ones.
        most_tokens: number of tokens at which to stop.
        progress: called with documents and tokens so far.

    Raises:
        InputError: the extra is missing, a file cannot be read, there is no such column, or no document at all.
    """
    check_output(out, ".bin")
    coder = _tokenizer(tokenizer)
    ends = _ENDS if end is None else (end,)
    found = next((name for name in ends if coder.token_to_id(name) is not None), None)
    if end is not None and found is None:
        raise InputError(f"tokens: {tokenizer} has no token {end!r}; name one that it has")
    last = [] if found is None else [coder.token_to_id(found)]
    size = coder.get_vocab_size()
    dtype = "uint16" if size <= 1 << 16 else "uint32"
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
        raise InputError(f"tokens: {name} is not installed: pip install 'netgym[text]'") from None


def _tokenizer(name: str) -> Any:
    module = _needed("tokenizers")
    make = module.Tokenizer.from_file if Path(name).is_file() else module.Tokenizer.from_pretrained
    try:
        return make(name)
    except Exception as error:  # whatever the hub or the parser says
        reason = str(error).partition("\n")[0]
        raise InputError(
            f"tokens: {name} is no tokenizer.json, nor a model of the hub that can be read: {reason}"
        ) from None


def _documents(corpus: str | Sequence[str], config: str | None, split: str, column: str) -> Iterator[str]:
    module = _needed("datasets")
    names = [corpus] if isinstance(corpus, str) else list(corpus)
    files = [name for name in names if os.path.exists(name) or _kind(name) is not None]
    try:
        if files:
            kinds = {_kind(name) for name in files}
            if len(kinds) != 1 or None in kinds or len(files) != len(names):
                remedy = f"give files of one kind ({', '.join(_KINDS)}), or one data set of the hub"
                raise InputError(f"tokens: {_name_of(corpus)}: {remedy}")
            data = module.load_dataset(kinds.pop(), data_files={split: files}, split=split, streaming=True)
        elif len(names) == 1:
            data = module.load_dataset(names[0], config, split=split, streaming=True)
        else:
            raise InputError(
                f"tokens: {_name_of(corpus)}: give one data set of the hub, or files that are there"
            )
        rows = iter(data)
        first = next(rows, None)
    except InputError:
        raise
    except Exception as error:  # whatever the hub, a file or its parser says
        reason = str(error).partition("\n")[0]
        raise InputError(f"tokens: {_name_of(corpus)} cannot be read: {reason}") from None
    if first is not None and column not in first:
        raise InputError(
            f"tokens: {_name_of(corpus)} has no column {column!r}; there are {', '.join(sorted(first))}"
        )
    for row in itertools.chain([] if first is None else [first], rows):
        if row[column]:
            yield row[column]


def _kind(name: str) -> str | None:
    path = Path(name)
    while path.suffix in _PACKED:
        path = path.with_suffix("")
    return _KINDS.get(path.suffix)
