"""What a rank hands over to the observer: a copy of its model as it is, and of the one that could be shipped.

A rank goes on at once; nothing here waits for anybody, in virtual time or in host time, and nothing comes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from exogym_core.training.snapshot import named_tensors, pack
from netsim.files.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy

__all__ = ["END", "TIMED", "Deposits", "Looks"]

TIMED = 1 << 40  # looks by the clock are counted from here, in place of steps
_JUDGED = ("outer", "own", "replica", "server")
END = 1 << 62  # the step of the last look where ranks do different numbers of them


@dataclass(frozen=True)
class Looks:
    """When the run is looked at.

    Attributes:
        evaluate_every: steps between evaluations; there is one at step 0 and one at the end too. None: none.
        correlate_every: steps between comparisons of the replicas; None for none.
        evaluate_seconds: virtual seconds between evaluations, in place of steps; None: steps count.
    """

    evaluate_every: int | None = None
    correlate_every: int | None = None
    evaluate_seconds: float | None = None

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluations at all."""
        return self.evaluate_every is not None

    def due(self, step: int) -> list[str]:
        """What is looked at after so many steps."""
        by_steps = self.evaluate_every if self.evaluate_seconds is None else None
        every = {"evaluate": by_steps, "correlate": self.correlate_every if step else None}
        return [what for what, steps in every.items() if steps is not None and step % steps == 0]


def _check_judged(strategy: Strategy) -> None:
    """Refuse a kind of judged model that there is not, or that the strategy cannot have."""
    where, judged = type(strategy).__name__, strategy.judged
    if judged not in _JUDGED:
        raise unknown_name(f"judged of {where}", str(judged), _JUDGED)
    if judged == "server" and not strategy.num_servers:
        raise InputError(f"{where}: judged = 'server', but num_servers is 0; write judged = 'own' or 'outer'")


class Deposits:
    """One rank's side of looking on.

    Only ranks that the strategy has not left behind are looked at. All of them deposit their replicas; the judged
    model, where it is another, comes once from the lowest of them (in parts from all, if it is in parts).

    Args:
        comm: the rank's.
        model: its replica.
        strategy: its own, set up.
        looks: when there is something to look at.
    """

    def __init__(self, comm: Communicator, model: nn.Module, strategy: Strategy, looks: Looks) -> None:
        _check_judged(strategy)
        self._comm, self._model, self._strategy, self._looks = comm, model, strategy, looks
        self._version = 0
        self._born: int | None = 0  # the step that brought that version about; None: the end
        self._given = -1  # the newest version that has been deposited
        self._has_buffers = any(True for _ in model.buffers())
        self._buffers: dict[str, Tensor] = {}  # as they were then
        self._keep_buffers()
        self._num_timed = 0  # looks by the clock so far

    @property
    def _is_worker(self) -> bool:
        return self._comm.rank < self._strategy.num_nodes

    def look(self, step: int) -> None:
        """Called when a step is about to begin, with how many have been done; by servers when so many have gone in."""
        self._look_by_clock(step)
        due = self._looks.due(step)
        if self._strategy.num_servers:  # the server is judged, at its own time
            due = [what for what in due if (what == "evaluate") != self._is_worker]
        if due:
            self._deposit(step, due)

    def _look_by_clock(self, step: int) -> None:
        """Evaluate for each point of the grid of virtual seconds that has come since the last call."""
        every = self._looks.evaluate_seconds
        if every is None or not self._looks.evaluates or (self._strategy.num_servers and self._is_worker):
            return
        now = self._comm.now()
        while self._num_timed * every <= now:
            key = TIMED + self._num_timed
            self._num_timed += 1
            if self._comm.rank in (0, self._comm.world_size - self._strategy.num_servers):
                self._comm.mark({"looked": key, "at_step": step})
            self._deposit(key, ["evaluate"])

    def looks_so_far(self) -> dict[str, tuple[int, int]]:
        """The looks by the clock that there have been, if there are any: their keys, first and end."""
        return {} if self._looks.evaluate_seconds is None else {"looks": (TIMED, TIMED + self._num_timed)}

    def at_end(self, step: int) -> None:
        """When nothing more will happen, what was in flight included: a last evaluation, and the final models."""
        self.after_step(None)
        self._given = -1  # the final model is told whole
        evaluate = ["evaluate"] if self._looks.evaluate_every is not None else []
        is_timed = self._looks.evaluate_seconds is not None
        if is_timed or not self._strategy.is_synchronous:  # whatever number of steps ranks have done
            self._deposit(END, [*evaluate, "final"])
            return
        self._deposit(
            step, [*evaluate, *(what for what in self._looks.due(step) if what not in evaluate), "final"]
        )

    def after_step(self, step: int | None) -> None:
        """Called when so many steps have been done (None: all), to see whether a new judged model has come to exist."""
        version = self._strategy.judged_version
        if version != self._version:
            self._version, self._born = version, step
            if self._has_buffers:
                self._keep_buffers()

    @property
    def _is_apart(self) -> bool:
        """Whether the judged model is another than the replicas."""
        return self._strategy.judged not in ("replica", "own")

    def _keep_buffers(self) -> None:
        if self._has_buffers and self._is_apart:
            self._buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}

    def _deposit(self, step: int, what: list[str]) -> None:
        absence = self._strategy.absence
        present = list(range(self._comm.world_size) if absence is None else absence.present)
        if self._strategy.num_servers:
            present = self._served(what)
        if self._comm.members_change:  # nobody gathers models: the lowest site has the one that counts
            here = self._site()
            what = what if min(present) in here else [each for each in what if each == "final"]
            present = here if what else []
        if self._comm.rank not in present:
            return
        parameters = dict(self._model.named_parameters())
        buffers = {
            name: value for name, value in named_tensors(self._model).items() if name not in parameters
        }
        sections: dict[str, Mapping[str, Tensor]] = {"parameters": parameters, "buffers": buffers}
        sections |= self._judged(present)
        layouts, tensors = {}, []
        for name, named in sections.items():
            layouts[name], flats = pack(named)
            tensors += flats
        is_first = self._comm.rank == present[0]
        is_replica = self._is_worker or len(present) == 1
        note = {
            "is_replica": is_replica,
            "is_worker": self._is_worker,
            "step": step,
            "what": what,
            "present": present,
            "judged": self._strategy.judged,
            "strategy": type(self._strategy).__name__,
            "rank": self._comm.rank,
            "num_steps": self._strategy.local_step,
            "version": self._version,
            "born": self._born,
            "layouts": layouts,
            "extra": self._extra() if is_first and "final" in what else {},
        }
        self._comm.deposit(note, tensors)

    def _site(self) -> list[int]:
        """The ranks of this rank's site, where members change."""
        inside, rank = self._comm.inside, self._comm.rank
        first, size = (rank, 1) if inside is None else (rank - inside.rank, inside.world_size)
        return list(range(first, first + size))

    def _served(self, what: list[str]) -> list[int]:
        """Where there are servers: workers and the last server at the end, else those that are looked at."""
        workers, last = list(range(self._strategy.num_nodes)), self._comm.world_size - 1
        if "final" in what:
            return [*workers, last]
        return [last] if "evaluate" in what else workers

    def _judged(self, present: list[int]) -> dict[str, Mapping[str, Tensor]]:
        """The judged model, if it is another than the replicas and this rank is to tell it."""
        if not self._is_apart or self._version == self._given:
            return {}
        state = self._strategy.judged_state()
        self._given = self._version
        is_first = self._comm.rank == (
            self._comm.world_size - 1 if self._strategy.num_servers else present[0]
        )
        if is_first:
            self._check(state)
        if state is None:
            return {}
        if not is_first:
            state = {name: value for name, value in state.items() if "[" in name}
        return {"judged": state, "judged_buffers": self._buffers if is_first else {}}

    def _check(self, state: Mapping[str, Tensor] | None) -> None:
        """Refuse a judged model of which something is missing: the rest would be this rank's replica, untold."""
        where = f"{type(self._strategy).__name__}.judged_state()"
        if state is None:
            raise InputError(
                f"{where}: returns None on rank {self._comm.rank}, but judged = {self._strategy.judged!r}; return the "
                "parameters by name, or write judged = 'own' to judge each rank's model"
            )
        told = {name.partition("[")[0] for name in state}
        wanted = {name for name, _ in self._strategy.named_trainable()}
        is_divided = any("[" in name for name in state)  # other ranks of the site have the rest
        if not is_divided and (missing := sorted(wanted - told)):
            raise InputError(f"{where}: lacks {missing[0]!r}; return all trainable parameters by name")
        if unknown := sorted(told - set(named_tensors(self._model))):
            raise InputError(f"{where}: has {unknown[0]!r}, which the model does not; leave it out")

    def _extra(self) -> dict[str, Any]:
        """What the model's state_dict holds besides tensors."""
        tensors = named_tensors(self._model).keys()
        state = self._model.state_dict()
        return {
            name: value
            for name, value in state.items()
            if name not in tensors and not isinstance(value, Tensor)
        }

    def state_dict(self) -> dict[str, Any]:
        """What a step changes."""
        return {
            "version": self._version,
            "born": self._born,
            "given": self._given,
            "num_timed": self._num_timed,
            "buffers": dict(self._buffers),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._version, self._born, self._given = state["version"], state["born"], state["given"]
        self._num_timed = state["num_timed"]
        self._buffers = dict(state["buffers"])
