"""Random numbers that datasets draw while they are read: a function of the run's seed and the place in the data.

torch's, numpy's and `random`'s global generators are seeded for each reading and restored after it, and so are
generators that a dataset holds itself (`self.rng = numpy.random.default_rng(3)`), which the ranks of one process share.
So draws depend on no loader's workers, process, model or earlier reading, and a resumed run repeats them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from exogym_core.workers.rng import RandomStates

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Draws", "StreamOfDraws", "held_generators"]

Generator: TypeAlias = np.random.Generator | np.random.RandomState | random.Random | torch.Generator

_LONGEST_LIST = 64  # longer ones hold samples
_MOST_OBJECTS = 10_000
_KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)


def held_generators(root: object) -> list[Generator]:
    """The random generators that an object reaches through attributes and short lists and mappings."""
    found: list[Generator] = []
    seen: set[int] = set()
    todo = [root]
    while todo and len(seen) < _MOST_OBJECTS:
        value = todo.pop()
        if id(value) in seen or value is random._inst or value is torch.default_generator:
            continue
        seen.add(id(value))
        if isinstance(value, _KINDS):
            found.append(value)
        elif isinstance(value, Mapping):
            todo.extend(value.values() if len(value) <= _LONGEST_LIST else ())
        elif isinstance(value, list | tuple | set):
            todo.extend(value if len(value) <= _LONGEST_LIST else ())
        elif not isinstance(value, type | torch.Tensor | np.ndarray):
            todo.extend(getattr(value, "__dict__", {}).values())
    return found[::-1]


def _state(generator: Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return (
        generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()
    )


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _seed(generator: Generator, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed % 2**32)


class Draws:
    """The random numbers of one dataset.

    Args:
        dataset: its own generators are seeded too, from the run's seed and their states now.
        seed: of the run.
    """

    def __init__(self, dataset: object, seed: int) -> None:
        self._held = held_generators(dataset)
        digest = hashlib.blake2b(str(seed).encode())
        for generator in self._held:
            state = _state(generator)
            digest.update(repr(state.tolist() if isinstance(state, torch.Tensor) else state).encode())
        self._key = digest.digest()

    def seed(self, *place: int) -> None:
        """Seed all generators, global ones and those held, for the reading at `place`."""
        digest = hashlib.blake2b(self._key + repr(place).encode(), digest_size=32).digest()
        words = [int.from_bytes(digest[start : start + 8], "little") for start in range(0, 32, 8)]
        torch.default_generator.manual_seed(words[0])
        random.seed(words[1])
        np.random.seed(words[2] % 2**32)
        for position, generator in enumerate(self._held):
            _seed(generator, (words[3] + position) % 2**63)

    @contextmanager
    def at(self, *place: int) -> Iterator[None]:
        """Seed generators for the reading at `place`, such as (rank, epoch, step), and restore them after the block."""
        before, held = RandomStates.of_process(), self.held_states()
        self.seed(*place)
        try:
            yield
        finally:
            before.load()
            self.set_held_states(held)

    def stream(self, *place: int) -> StreamOfDraws:
        """Draws of a reading from `place` on that alternates with others."""
        return StreamOfDraws(self, place)

    def held_states(self) -> list[Any]:
        """Current states of the dataset's own generators."""
        return [_state(generator) for generator in self._held]

    def set_held_states(self, states: list[Any]) -> None:
        """Restore states of `held_states`."""
        for generator, state in zip(self._held, states, strict=True):
            _set_state(generator, state)


class StreamOfDraws:
    """A reading in several pieces, each of which continues the draws of the last."""

    def __init__(self, draws: Draws, place: tuple[int, ...]) -> None:
        self._draws, self._place = draws, place
        self._states: RandomStates | None = None
        self._held: list[Any] = []

    @contextmanager
    def continued(self) -> Iterator[None]:
        """Continue the draws for the next piece, and restore generators after the block."""
        before, held = RandomStates.of_process(), self._draws.held_states()
        if self._states is None:
            self._draws.seed(*self._place)
        else:
            self._states.load()
            self._draws.set_held_states(self._held)
        try:
            yield
        finally:
            self._states, self._held = RandomStates.of_process(), self._draws.held_states()
            before.load()
            self._draws.set_held_states(held)
