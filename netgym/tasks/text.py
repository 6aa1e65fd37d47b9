"""Token streams cut into windows, read lazily: text files byte by byte, or tokenised memory maps."""

from __future__ import annotations

import bisect
import itertools
import os
import re
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from netgym.tasks.task import MissingDataError, Task
from netgym.tasks.tokens import Corpus
from netsim.errors import InputError
from netsim.files.documents import Document
from netsim.files.schemas import validate_document
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["TokenFile", "TokenWindows", "text"]


@dataclass(frozen=True)
class TokenFile:
    """A stretch of tokens in a file, mapped into memory at first use; sent to a process as its description.

    Attributes:
        path: the file.
        dtype: of one token, as numpy names it.
        offset: bytes before the first token.
        num_tokens: length of the stretch.
    """

    path: Path
    dtype: str
    offset: int
    num_tokens: int

    @classmethod
    def open(cls, name: str | Path, dtype: str = "uint16") -> TokenFile:
        """Open a whole file: `.npy` by its header, `.bin` as `dtype` (nanoGPT's uint16), others as bytes.

        Errors have the name as it is written: values of variables in it may be secrets.

        Args:
            name: path of the file, in which `$VARIABLE` stands for one of the environment.
            dtype: of the tokens in a `.bin` file.

        Raises:
            InputError: no such file, a `.npy` that is not one row of integers, or a variable of NetGym's own.
        """
        variables = re.findall(r"\$\{?(\w+)", str(name))
        if any(each.startswith("NETGYM_") for each in variables):
            raise InputError(f"task text: {name}: NetGym's own variables name no data: give the file's path")
        path = Path(os.path.expandvars(name))
        if not path.is_file():
            if unset := [each for each in variables if each not in os.environ]:
                raise MissingDataError(
                    f"task text: {name} is not set: export {unset[0]}=FILE, or --set task.paths=FILE; "
                    "netgym tokens makes one"
                )
            raise MissingDataError(
                f"task text: {name} is not a file; give text, .bin or .npy files, as netgym tokens makes them"
            )
        if path.suffix == ".npy":
            try:
                array = np.load(path, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise InputError(f"task text: {name} is not a readable .npy file ({error})") from None
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise InputError(
                    f"task text: {name} holds {array.dtype} of shape {array.shape}; "
                    "one row of integers is needed"
                )
            return cls(path, array.dtype.str, int(array.offset), len(array))
        kind = np.dtype(dtype if path.suffix == ".bin" else "uint8")
        return cls(path, kind.str, 0, path.stat().st_size // kind.itemsize)

    def part(self, start: int, stop: int) -> TokenFile:
        """The tokens from `start` to `stop`."""
        itemsize = np.dtype(self.dtype).itemsize
        return TokenFile(self.path, self.dtype, self.offset + start * itemsize, stop - start)

    @cached_property
    def tokens(self) -> np.ndarray:
        """Memory map of the tokens."""
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.num_tokens,))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "tokens"}


class TokenWindows(Dataset[tuple[Tensor, Tensor]]):
    """Neighbouring windows of `block_size` tokens and, as targets, the same shifted by one.

    Windows do not cross files and do not overlap; a file's last tokens that fill no window are left out.
    """

    def __init__(self, files: Sequence[TokenFile], block_size: int) -> None:
        if block_size < 1:
            raise InputError(f"task text: block_size {block_size} is no length; use 1 or more")
        self.block_size = block_size
        self.files = [file for file in files if file.num_tokens > block_size]
        self._ends = list(itertools.accumulate((file.num_tokens - 1) // block_size for file in self.files))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _window(self, index: int) -> np.ndarray:
        which = bisect.bisect_right(self._ends, index)
        start = (index - (self._ends[which - 1] if which else 0)) * self.block_size
        return self.files[which].tokens[start : start + self.block_size + 1]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        window = torch.from_numpy(self._window(index).astype(np.int64))
        return window[:-1], window[1:]

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The windows of these indices at once: inputs and targets, each (windows, block_size) of int64."""
        rows = np.stack([self._window(index) for index in indices.tolist()])
        windows = torch.from_numpy(rows.astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _standard_library(num_bytes: int) -> list[TokenFile]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files: list[TokenFile] = []
    for path in sorted(folder.glob("*.py")):
        file = TokenFile.open(path)
        file = file.part(0, min(file.num_tokens, num_bytes))
        files.append(file)
        num_bytes -= file.num_tokens
        if num_bytes <= 0:
            break
    return files


def _opened(paths: str | Sequence[str], dtype: str) -> list[TokenFile]:
    names = [paths] if isinstance(paths, str) else paths
    return [TokenFile.open(name, dtype) for name in names]


def text(
    paths: str | Sequence[str] | None = None,
    validation_paths: str | Sequence[str] | None = None,
    dataset: str | Mapping[str, Any] | None = None,
    block_size: int = 128,
    validation_fraction: float = 0.1,
    num_bytes: int = 4_000_000,
    dtype: str = "uint16",
    vocab_size: int | None = None,
) -> Task:
    """Next-token prediction on any text.

    Without `paths` and `dataset` the corpus is the source code of the running Python's standard library (its top-level
    modules by name, up to `num_bytes`), so it differs between Python versions.

    Args:
        paths: files to read; `.bin` and `.npy` hold tokens, every other file is taken byte by byte. A name may have
            variables of the environment in it, such as `$C4`.
        validation_paths: files to validate on; without them the last `validation_fraction` of all tokens.
        dataset: name of a data set of the Hugging Face hub, of a local file or folder, or `alice`; or a mapping with
            `name`, `config`, `split`, `column`, `tokenizer` and `num_tokens` (`netgym.tasks.tokens:Corpus`). Its tokens
            are made once, in the cache folder.
        block_size: tokens a sample.
        validation_fraction: share kept for validation, more than 0 and less than 1.
        num_bytes: most bytes taken of the standard library.
        dtype: of the tokens in `.bin` files.
        vocab_size: of the default model; where not given that of the tokenizer of `dataset`, 256 for bytes, or 50304
            for tokens.

    Raises:
        MissingDataError: a file is not there, a variable is not set, or a data set cannot be fetched.
        InputError: a file cannot be read as said, or one side has no window of `block_size`.
    """
    if not 0 < validation_fraction < 1:
        raise InputError(
            f"task text: validation_fraction={validation_fraction} must be between 0 and 1",
            about=("validation_fraction",),
        )
    try:
        counts = np.dtype(dtype).kind in "iu"
    except TypeError:
        counts = False
    if not counts:
        raise InputError(
            f"task text: dtype={dtype!r} is no kind of whole number; use 'uint16' or 'uint32'",
            about=("dtype",),
        )
    if dataset is not None:
        if paths is not None:
            raise InputError("task text: paths and dataset both name the text: leave one of them out")
        asked = Document("task text: dataset", {"name": dataset} if isinstance(dataset, str) else dataset)
        path, written = validate_document(Corpus, asked).cached()
        files, vocab_size = [TokenFile.open(path, written.dtype)], vocab_size or written.vocab_size
    else:
        files = _standard_library(num_bytes) if paths is None else _opened(paths, dtype)
    train, validation = files, []
    if validation_paths is not None:
        validation = _opened(validation_paths, dtype)
    else:  # the last tokens of all
        left, train = round(sum(file.num_tokens for file in files) * (1 - validation_fraction)), []
        for file in files:
            cut = min(file.num_tokens, left)
            train.append(file.part(0, cut))
            validation.append(file.part(cut, file.num_tokens))
            left -= cut
    sides = {"train": TokenWindows(train, block_size), "validation": TokenWindows(validation, block_size)}
    for side, windows in sides.items():
        if not len(windows):
            raise InputError(
                f"task text: the {side} side has no window of {format_count(block_size, 'token')}; "
                "give longer files, a smaller block_size or another validation_fraction"
            )
    tokenised = any(file.dtype != np.dtype("uint8").str for file in files)
    sizes = {"vocab_size": vocab_size or (50304 if tokenised else 256), "block_size": block_size}
    return Task(
        train=sides["train"],
        validation=sides["validation"],
        model="gpt",
        model_options={"gpt": sizes, "llama": sizes},
    )
