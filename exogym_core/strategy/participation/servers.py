"""Strategies with servers: no worker waits for another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from exogym_core.strategy.base import Strategy
from exogym_core.strategy.options import flag, option, positive_int
from exogym_core.strategy.parts.flat import flatten, unflatten, widened, write_back
from exogym_core.strategy.parts.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "ROUNDING_STEPS",
    "ServedStrategy",
    "from_message",
    "to_message",
]


class _WithoutValues(Tensor):
    """Message on the meta device: a shape, and the numbers behind it, which decide its receiver."""

    numbers: tuple[float, ...]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` as for any tensor; copies, as communicators make them, keep the numbers."""
        made = super().__torch_function__(func, types, args, dict(kwargs or {}))  # type: ignore[no-untyped-call]
        if func in (Tensor.clone, Tensor.detach, Tensor.to):
            made.numbers = args[0].numbers
        return made


def to_message(flat: Tensor, *numbers: float) -> Tensor:
    """`flat` (1-D, floating) with `numbers` behind, in its dtype.

    Without values the numbers are attributes, so that plans go where training would.

    >>> to_message(torch.zeros(2), 3, 0.5).tolist()
    [0.0, 0.0, 3.0, 0.5]
    >>> from_message(to_message(torch.zeros(2, device="meta"), 3, 0.5), 2)[1]
    [3.0, 0.5]
    """
    behind = torch.tensor(numbers, dtype=flat.dtype, device="cpu" if flat.is_meta else flat.device)
    if not flat.is_meta:
        return torch.cat([flat, behind])
    message = flat.new_empty(len(flat) + len(numbers)).as_subclass(_WithoutValues)
    message.numbers = tuple(behind.tolist())  # rounded as they would be
    return message


def from_message(message: Tensor, count: int) -> tuple[Tensor, list[float]]:
    """The flat tensor of a message, and the last `count` numbers behind it."""
    if isinstance(message, _WithoutValues):
        return message.as_subclass(Tensor)[:-count], list(message.numbers[-count:])
    return message[:-count], message[-count:].tolist()


#: Local steps that dynamic local updates forgive: speeds travel in fp32, and the fastest worker's is its own.
ROUNDING_STEPS = 1e-4
_TAIL = 2  # values behind the parameters: local steps, and their speed


class ServedStrategy(Strategy):
    """Workers train alone for a round, send their displacement to their server, and continue from its answer.

    Subclasses define how the server applies a displacement (`outer`, or `arrived`); it answers `self.phi`. Messages are
    flat, in fp32 (fp64 parameters as they are), with two values behind: the round's local steps and the worker's speed,
    the answer with the fastest one's.

    Args:
        H: local steps a round (of the fastest worker, with `dylu`).
        dylu: workers do `floor(H v / max v)` local steps, v: steps a second (dynamic local updates).

    Attributes:
        phi: on a server its parameters, on a worker those at the begin of its round; flat.
        num_arrived: displacements that the server has applied.
        answers_box: the mailbox in which its senders await answers.
        num_sharing: servers that share the workers among them.
    """

    H: int = option(50, positive_int)
    dylu: bool = option(False, flag)
    positional = ("optim_spec",)

    num_servers = 1
    accepted_servers: ClassVar[tuple[int, float]] = (1, 1)
    is_synchronous = False
    judged = "server"
    round_steps = property(lambda self: self.H)
    answers_box = "answers"
    num_sharing = 1
    arithmetic: ClassVar[tuple[str, ...]] = ("arrived",)
    state = State(
        *("phi", "num_arrived", "_fastest", "_round_steps", "_steps_left", "_round_began", "_served")
    )

    def prepare(self) -> None:
        """Begin with the same parameters on workers and servers."""
        self.phi = self._flat()
        self.num_arrived = 0
        self._round_steps, self._steps_left = self.H, self.H
        self._round_began = 0.0
        self._fastest: dict[int, float] = {}  # worker -> steps a second, as the server has heard
        self._served = 0.0  # local steps behind the displacements received

    def _flat(self) -> Tensor:
        return flatten(list(map(widened, self.trainable)))

    # --- a worker ------------------------------------------------------------------------------------------

    @property
    def server(self) -> int:
        """The rank that this worker sends to."""
        return self.comm.world_size - 1

    def step(self) -> None:
        """A local step; at the end of a round an exchange with the server."""
        self.clip_gradients()
        self.optimizer_step()
        self._steps_left -= 1
        if self._steps_left == 0:
            self._exchange()
        super().step()

    def _exchange(self) -> None:
        now = self.comm.now()
        passed = now - self._round_began
        speed = self._round_steps / passed if passed > 0 else 0.0
        displacement = self.phi - self._flat()
        self.comm.put(to_message(displacement, self._round_steps, speed), self.server)
        answers = self.comm.take("answers", wait=math.inf)
        if answers:
            self.phi, (fastest,) = from_message(answers[-1][1], 1)
            write_back(self.phi, self.trainable)
            self._round_steps = self.H
            if self.dylu and speed and fastest:
                self._round_steps = max(1, self._whole_steps(self.H * min(speed / fastest, 1.0)))
        self._steps_left = self._round_steps
        self._round_began = self.comm.now()

    def _whole_steps(self, steps: float) -> int:
        return math.floor(steps + ROUNDING_STEPS)

    # --- the server ----------------------------------------------------------------------------------------

    def serve(self, updated: Callable[[float], None]) -> None:
        """Apply displacements in order of arrival, and answer each at once."""
        while messages := self.comm.take(wait=math.inf):
            for source, message in messages:
                self._served += self.take_in(source, message)
            updated(self._served * self.num_sharing / self.num_nodes)

    def take_in(self, source: int, message: Tensor) -> float:
        """Apply one worker's displacement and answer; returns the local steps behind it."""
        displacement, (steps, speed) = from_message(message, _TAIL)
        self._fastest[source] = speed
        self.arrived(source, displacement, int(steps))
        self.num_arrived += 1
        self.comm.put(to_message(self.phi, max(self._fastest.values())), source, self.answers_box)
        return steps

    def arrived(self, source: int, displacement: Tensor, steps: int) -> None:
        """Apply a displacement, flat and fp32, to `self.phi`; by default by a step of `self.outer`."""
        self.outer.step(displacement)

    def judged_state(self) -> dict[str, Tensor] | None:
        """On the server, its parameters."""
        if self.rank < self.num_nodes:
            return None
        named = self.named_trainable()
        parts = unflatten(self.phi, [value for _, value in named])
        return {name: part.to(value.dtype) for (name, value), part in zip(named, parts, strict=True)}

    @property
    def judged_version(self) -> int:
        """Number of displacements that the server has applied."""
        return self.num_arrived
