"""Random states of ranks, which share the generators of a process.

torch's default generators (one on the CPU, one a GPU), numpy's and `random`'s are one per process. Ranks that
share a process take turns; on every hand-over the leaving rank's states are kept and the entering rank's put
in place.

The public calls that get and set the states of numpy's and Python's generators make 625 Python integers or take
36 us, torch's take 2 us; two of them a hand-over cost a tenth of a small model's step. All are Mersenne twisters whose
2,500 bytes of words lie in one piece, so those are copied directly (0.1 us) where a check shows that they lie as
expected.
"""

from __future__ import annotations

import ctypes
import random
import struct
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


__all__ = [
    "RandomStates",
    "kept_rng",
    "random_streams",
    "restore_random_streams",
    "seed_device",
    "seed_process",
]

_TWISTER_BYTES = 625 * 4  # 624 words and the position among them
# In torch before its words: the seed, two positions and a flag. Behind them: a normal sample for the next call, twice.
_TORCH_HEAD, _TORCH_BYTES = 20, 2544


@lru_cache(maxsize=1)
def _numpy_words(generator: object) -> memoryview | None:
    """Words of numpy's global `generator`, then its position; None if it is no Mersenne twister."""
    return _memory(generator.ctypes.state_address) if isinstance(generator, np.random.MT19937) else None


@cache
def _python_words() -> memoryview | None:
    """Position of the `random` module's generator, then its words; None if not as in CPython."""
    if random.Random.__basicsize__ < object.__basicsize__ + _TWISTER_BYTES:
        return None
    memory = _memory(id(random._inst) + object.__basicsize__)
    position, *words = struct.unpack("=i624I", memory)
    return memory if (*words, position) == random.getstate()[1] else None


@cache
def _torch_words() -> memoryview | None:
    """State of torch's default generator on the CPU; None if one cannot be copied to another by its bytes."""
    first, second = torch.Generator(), torch.Generator()
    places: list[int] = [each._cdata for each in (first, second, torch.default_generator)]  # type: ignore[attr-defined]
    for dtype in (torch.float32, torch.float64):  # each keeps a sample
        torch.randn(1, dtype=dtype, generator=first)
    words = first.get_state().numpy().view("<u8")[3:627].astype("<u4").tobytes()
    start = bytes(_memory(places[0], _TORCH_BYTES)).find(words[:64]) - _TORCH_HEAD
    if start < 0:
        return None
    theirs, own, default = (_memory(place + start, _TORCH_BYTES) for place in places)
    own[:] = theirs
    return default if torch.equal(first.get_state(), second.get_state()) else None


def _memory(address: int, num_bytes: int = _TWISTER_BYTES) -> memoryview:
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


def _stream_seeds(seed: int, rank: int) -> tuple[int, int, int]:
    """Seeds of torch's, Python's and numpy's streams of (seed, rank), independent of where the rank runs."""
    high, low, python, numpy = map(int, np.random.SeedSequence([seed % 2**64, rank]).generate_state(4))
    return high << 32 | low, python, numpy


def seed_process(seed: int, rank: int) -> None:
    """Seed the process's generators with the streams of (seed, rank)."""
    torch_seed, python_seed, numpy_seed = _stream_seeds(seed, rank)
    torch.default_generator.manual_seed(torch_seed)
    random.seed(python_seed)
    np.random.seed(numpy_seed)


def seed_device(device: torch.device, seed: int, rank: int) -> None:
    """Seed the stream of `rank` on `device`.

    `seed_process` cannot do it beforehand: it would have to start CUDA in processes that do not use it.
    """
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = device.index if device.index is not None else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(_stream_seeds(seed, rank)[0])


@contextmanager
def kept_rng(device: torch.device) -> Iterator[None]:
    """Restore torch's, numpy's and `random`'s global generators at the end of the block."""
    states = RandomStates.of_process()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            states.load()


def random_streams(device: torch.device) -> dict[str, Any]:
    """States of the process's generators, which are the running rank's, as plain values."""
    states = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    return states if device.type != "cuda" else {**states, "cuda": torch.cuda.get_rng_state(device)}


def restore_random_streams(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the process's generators to states that `random_streams` returned."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


class RandomStates:
    """The states of the process's global generators as one rank left them.

    Apart from the twister's words, numpy's and Python's generators keep a Gaussian for the next call. Python's is an
    attribute; numpy's can only be had the slow way, which is taken when the rank has drawn or one was kept.
    """

    _random_words: bytes | None = None
    _numpy_words: bytes | None = None
    _numpy: Any  # state of its generator
    _torch: Any  # its bytes, or as torch gives it

    @classmethod
    def of_process(cls) -> RandomStates:
        """The process's generators as they are now."""
        states = cls()
        states.save()
        return states

    def save(self) -> None:
        """Keep the process's generators as this rank's."""
        memory = _torch_words()
        self._torch = torch.default_generator.get_state() if memory is None else memory.tobytes()
        self._cuda = []  # of GPUs, once something has been done on one
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._cuda = [(each, each.get_state()) for each in torch.cuda.default_generators]
        memory = _python_words()
        if memory is not None:
            self._random_words = memory.tobytes()
            self._random = random._inst.gauss_next  # type: ignore[attr-defined]
        else:
            self._random = random.getstate()
        memory = _numpy_words(np.random.mtrand._rand._bit_generator)
        words = memory.tobytes() if memory is not None else None
        if words is None or words != self._numpy_words or self._numpy["has_gauss"]:
            self._numpy = np.random.get_state(legacy=False)
            self._numpy_words = words

    def load(self, leaving: RandomStates | None = None) -> None:
        """Make this rank's generators the process's.

        Args:
            leaving: states that the process holds now, just saved; None if unknown.
        """
        memory = _torch_words()
        if memory is not None and isinstance(self._torch, bytes):
            memory[:] = self._torch
        else:
            torch.default_generator.set_state(self._torch)
        for generator, state in self._cuda:
            generator.set_state(state)
        memory = _python_words()
        if memory is not None and self._random_words is not None:
            memory[:] = self._random_words
            random._inst.gauss_next = self._random  # type: ignore[attr-defined]
        else:
            random.setstate(self._random)
        memory = _numpy_words(np.random.mtrand._rand._bit_generator)
        kept_gaussian = leaving is None or leaving._numpy["has_gauss"] or self._numpy["has_gauss"]
        if kept_gaussian or self._numpy_words is None or memory is None:
            np.random.set_state(self._numpy)
            self._numpy_words = memory.tobytes() if memory is not None else None
        else:
            memory[:] = self._numpy_words
