"""Random states of ranks, which share the generators of a process.

torch's default generators (one on the CPU, one a GPU), numpy's and `random`'s are one per process. Ranks that
share a process take turns; on every hand-over the leaving rank's states are kept and the entering rank's put
in place.

The public calls that get and set the states of numpy's and Python's generators make 625 Python integers or take
36 us; two of them a hand-over cost a tenth of a small model's step. Both are Mersenne twisters whose 2,500 bytes of
words lie in one piece, so those are copied directly (0.1 us) where a check shows that they lie as expected. torch's
calls take 1 us and 0.4.
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


def _memory(address: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * _TWISTER_BYTES).from_address(address)).cast("B")


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

    @classmethod
    def of_process(cls) -> RandomStates:
        """The process's generators as they are now."""
        states = cls()
        states.save()
        return states

    def save(self) -> None:
        """Keep the process's generators as this rank's."""
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            generators += torch.cuda.default_generators
        self._torch = [(each, each.get_state()) for each in generators]
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
        for generator, state in self._torch:
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
