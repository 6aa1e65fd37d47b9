"""Random generators that belong to a rank, though the process has only one of each.

torch's default generator, numpy's and `random`'s are one per process. Ranks that share a process take turns;
on every hand-over the leaving rank's states are kept and the entering rank's put in place.
"""

from __future__ import annotations

import ctypes
import random
from typing import Any

import numpy as np
import torch

__all__ = ["RandomStates"]

_MT19937_BYTES = 625 * 4  # 624 words of key and the position


def _numpy_address() -> int:
    """Where numpy's global generator keeps its words; 0 if it is no Mersenne twister."""
    generator = np.random.mtrand._rand._bit_generator
    return int(generator.ctypes.state_address) if isinstance(generator, np.random.MT19937) else 0


class RandomStates:
    """The states of torch's, numpy's and `random`'s global generators as one rank left them.

    numpy's own get_state and set_state cost 36 us each. Its words are copied directly (0.3 us); only the
    Gaussian that it keeps for the next call lies elsewhere, and that needs the slow way.
    """

    def __init__(self, seed: int, rank: int) -> None:
        """A stream of its own for (seed, rank), the same wherever the rank runs."""
        words = np.random.SeedSequence([seed % 2**64, rank]).generate_state(4, dtype=np.uint32)
        self._torch = torch.Generator().manual_seed(int(words[0]) << 32 | int(words[1])).get_state()
        self._random: Any = random.Random(int(words[2])).getstate()
        self._numpy: Any = np.random.RandomState(int(words[3])).get_state(legacy=False)
        self._numpy_words: bytes | None = None

    @classmethod
    def of_process(cls) -> RandomStates:
        """The process's generators as they are now."""
        states = cls(0, 0)
        states.save()
        return states

    def save(self) -> None:
        """Keep the process's generators as this rank's."""
        self._torch = torch.default_generator.get_state()
        self._random = random.getstate()
        address = _numpy_address()
        words = ctypes.string_at(address, _MT19937_BYTES) if address else None
        if words is None or words != self._numpy_words or self._numpy["has_gauss"]:
            self._numpy = np.random.get_state(legacy=False)
            self._numpy_words = words

    def load(self, leaving: RandomStates | None = None) -> None:
        """Make this rank's generators the process's.

        Args:
            leaving: whose states the process holds now, just saved; None if nobody knows.
        """
        torch.default_generator.set_state(self._torch)
        random.setstate(self._random)
        address = _numpy_address()
        kept_gaussian = leaving is None or leaving._numpy["has_gauss"] or self._numpy["has_gauss"]
        if kept_gaussian or self._numpy_words is None or not address:
            np.random.set_state(self._numpy)
            self._numpy_words = ctypes.string_at(address, _MT19937_BYTES) if address else None
        else:
            ctypes.memmove(address, self._numpy_words, _MT19937_BYTES)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint; call `save` first if the rank is running."""
        return {"torch": self._torch, "random": self._random, "numpy": self._numpy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; `load` then makes it the process's."""
        self._torch, self._random, self._numpy = state["torch"], state["random"], state["numpy"]
        self._numpy_words = None
