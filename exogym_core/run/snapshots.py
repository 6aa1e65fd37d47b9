"""Snapshots of a rank's model for evaluation, and states of models.

A rank deposits a copy of its model and of the judged one and continues at once: it waits for nothing, in virtual time
or host time. A whole state is a model's `state_dict` and the buffers that this leaves out.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from exogym_core.data.batches import device_of
from exogym_core.events import EvaluationPoint, EvaluationTaken, Grid, Snapshot
from exogym_core.strategy.parts.flat import in_buckets, pack_named
from exogym_core.strategy.parts.state import State, Stateful
from netsim.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.base import Strategy

__all__ = [
    "EvaluationTimes",
    "Snapshots",
    "broadcast_state",
    "final_state",
    "load_named",
    "load_whole_state",
    "named_tensors",
    "passing_buffers",
    "take_shapes",
    "whole_state",
]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters and buffers as they are now: a buffer may be another tensor after a forward pass."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@torch.no_grad()
def load_named(model: nn.Module, named: Mapping[str, Tensor]) -> None:
    """Give a model these values; buffers also where they have other shapes, or are None."""
    take_shapes(model, named)
    own = named_tensors(model)
    for name, value in named.items():
        own[name].copy_(value)


def take_shapes(model: nn.Module, state: Mapping[str, Any], *, is_whole: bool = False) -> None:
    """Replace a model's buffers that have other shapes than those of a `state`, or are None.

    Of an `is_whole` state, those that it lacks become None: a forward pass may have dropped them.
    """
    device = device_of(model)
    for home, module in model.named_modules():
        for name, own in list(module._buffers.items()):
            value = state.get(f"{home}.{name}" if home else name)
            if isinstance(value, Tensor) and (own is None or own.shape != value.shape):
                module._buffers[name] = torch.empty_like(value, device=device if own is None else own.device)
            elif value is None and is_whole:
                module._buffers[name] = None


def broadcast_state(model: nn.Module, comm: Communicator) -> None:
    """Make every rank's parameters and buffers rank 0's, one message a dtype and device."""
    in_buckets(list(named_tensors(model).values()), comm.broadcast)


def passing_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that the model's own state_dict leaves out."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


def final_state(model: nn.Module) -> dict[str, Any]:
    """The state_dict of a model that is not used again: tensors on the CPU are its own, not copies.

    Copied are those that share memory, as tied parameters and rows of stacked replicas do.
    """
    taken: set[int] = set()

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        storage = value.untyped_storage()
        is_whole = value.is_cpu and storage.nbytes() == value.nbytes and storage.data_ptr() not in taken
        taken.add(storage.data_ptr())
        return value.detach() if is_whole else value.detach().to("cpu", copy=True)

    return {name: own(value) for name, value in model.state_dict().items()}


def whole_state(model: nn.Module) -> dict[str, Any]:
    """A copy of a model's state_dict and passing buffers on the CPU, with extra states that are no tensors."""
    named = {**model.state_dict(), **passing_buffers(model)}
    return {
        name: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
        for name, value in named.items()
    }


def load_whole_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a `whole_state` into a model of the same kind."""
    take_shapes(model, state, is_whole=True)
    passing = passing_buffers(model)
    model.load_state_dict({name: value for name, value in state.items() if name not in passing})
    with torch.no_grad():
        for name in passing.keys() & state.keys():
            passing[name].copy_(state[name])


_JUDGED = ("outer", "own", "replica", "server")


class EvaluationTimes(NamedTuple):
    """Steps and virtual times of evaluations.

    Attributes:
        evaluate_every: steps between evaluations; there is one at step 0 and one at the end too. None: none.
        correlate_every: steps between comparisons of the replicas; None for none.
        evaluate_seconds: virtual seconds between evaluations, in place of steps; None: steps count.
    """

    evaluate_every: int | None = None
    correlate_every: int | None = None
    evaluate_seconds: float | None = None


def refuse_other_parameters(model: nn.Module, trained: Mapping[str, Tensor]) -> None:
    """Raise InputError where a model's parameters are no longer the tensors, by name, that are trained."""
    found = dict(model.named_parameters())
    for odd in [name for name in {**trained, **found} if found.get(name) is not trained.get(name)]:
        what = "adds" if odd not in trained else "replaces" if odd in found else "removes"
        raise InputError(
            f"{type(model).__name__}: the model {what} its parameter {odd!r} after training has begun, which no "
            "optimizer would notice: create parameters in __init__ and change their values in place"
        )


class Snapshots(Stateful):
    """Snapshots of one rank, deposited for evaluation.

    Only ranks that the strategy has not left behind are evaluated. All of them deposit their replicas; the judged
    model, where it is another, comes once from the lowest of them (in parts from all, if it is in parts).

    Args:
        comm: the rank's.
        model: its replica.
        strategy: its own, set up.
        evaluations: steps and times of evaluations.

    Attributes:
        num_timed: evaluations by the clock so far.
        num_deposited: snapshots deposited in this process.
    """

    state = State("num_timed", version="_version", born="_born", given="_given", buffers="_buffers")

    def __init__(
        self, comm: Communicator, model: nn.Module, strategy: Strategy, evaluations: EvaluationTimes
    ) -> None:
        where, judged = type(strategy).__name__, strategy.judged
        if judged not in _JUDGED:
            raise unknown_name(f"judged of {where}", str(judged), _JUDGED)
        if judged == "server" and not strategy.num_servers:
            raise InputError(
                f"{where}: judged = 'server', but num_servers is 0; write judged = 'own' or 'outer'"
            )
        if judged in ("replica", "own") and strategy.judged_state() is not None:
            raise InputError(
                f"{where}: judged = {judged!r} judges ranks' models, so that judged_state() would be ignored; write "
                "judged = 'outer', or leave judged_state() out"
            )
        self._comm, self._model, self._strategy, self._evaluations = comm, model, strategy, evaluations
        self._parameters = dict(model.named_parameters())
        self._frozen = [name for name, value in self._parameters.items() if not value.requires_grad]
        self._version = 0
        self._born: int | None = 0  # the step that brought that version about; None: the end
        self._given = -1  # the newest version that has been deposited
        self._has_buffers = next(model.buffers(), None) is not None
        self._buffers: dict[str, Tensor] = {}  # as they were then
        if self._has_buffers:
            self._keep_buffers()
        self.num_timed = self.num_deposited = 0

    @property
    def _is_worker(self) -> bool:
        return self._comm.rank < self._strategy.num_nodes

    def evaluate(self, step: int) -> None:
        """Deposit what is due before the next step: `step` are done, or, on a server, have gone in."""
        every, correlate_every, seconds = self._evaluations
        due = []
        if every is not None and seconds is not None:
            self._evaluate_by_clock(step, seconds)
        elif every is not None and step % every == 0:
            due.append("evaluate")
        if correlate_every is not None and step and step % correlate_every == 0:
            due.append("correlate")
        if self._strategy.num_servers:  # the server is judged, at its own time
            due = [what for what in due if (what == "evaluate") != self._is_worker]
        if due:
            self._deposit(EvaluationPoint(Grid.STEP, step), due)

    def _evaluate_by_clock(self, step: int, every: float) -> None:
        """Evaluate for each point of the grid of `every` virtual seconds that has come since the last call."""
        if self._strategy.num_servers and self._is_worker:
            return
        now = self._comm.now()
        while self.num_timed * every <= now:
            point = EvaluationPoint(Grid.CLOCK, self.num_timed)
            self.num_timed += 1
            if self._comm.rank in (0, self._comm.world_size - self._strategy.num_servers):
                self._comm.mark(EvaluationTaken(point, step))
            self._deposit(point, ["evaluate"])

    def at_end(self, step: int) -> None:
        """Deposit the last evaluation and the final models; nothing is in flight any more."""
        self.after_step(None)
        self._given = -1  # the final model is deposited whole
        every, correlate_every, seconds = self._evaluations
        evaluate = [] if every is None else ["evaluate"]
        # Whatever number of steps ranks have done.
        if seconds is not None or not self._strategy.is_synchronous:
            self._deposit(EvaluationPoint(Grid.END), [*evaluate, "final"])
        else:
            if correlate_every is not None and step and step % correlate_every == 0:
                evaluate.append("correlate")
            self._deposit(EvaluationPoint(Grid.STEP, step), [*evaluate, "final"])

    def after_step(self, step: int | None) -> None:
        """Note a new judged model after `step` steps (None: all)."""
        version = self._strategy.judged_version
        if version != self._version:
            self._version, self._born = version, step
            if self._has_buffers:
                self._keep_buffers()

    @property
    def _is_apart(self) -> bool:
        """True if the judged model differs from the replicas."""
        return self._strategy.judged not in ("replica", "own")

    def _keep_buffers(self) -> None:
        if self._is_apart:
            self._buffers = {name: buffer.detach().clone() for name, buffer in self._model.named_buffers()}

    def _deposit(self, point: EvaluationPoint, what: list[str]) -> None:
        present = self._strategy.workers.present
        if self._strategy.num_servers:  # the last server is evaluated, and all models at the end
            workers, last = range(self._strategy.num_nodes), self._comm.world_size - 1
            present = [*workers, last] if "final" in what else [last] if "evaluate" in what else workers
        if self._comm.members_change:  # models are not gathered: the lowest site has the one that counts
            inside, rank = self._comm.inside, self._comm.rank
            first, size = (rank, 1) if inside is None else (rank - inside.rank, inside.world_size)
            here = range(first, first + size)
            # A site that has come back between two rounds may know of no other; those do the evaluation.
            is_lowest = min(present, default=-1) in here
            what = what if is_lowest else [each for each in what if each == "final"]
            present = here if what else range(0)
        if self._comm.rank not in present:
            return
        parameters = self.parameters()
        buffers = {
            name: value for name, value in named_tensors(self._model).items() if name not in parameters
        }
        sections: dict[str, Mapping[str, Tensor]] = {"parameters": parameters, "buffers": buffers}
        sections |= self._judged(present)
        layouts, tensors = {}, []
        for name, named in sections.items():
            layouts[name], flats = pack_named(named, self._comm)
            tensors += flats
        is_first = self._comm.rank == present[0]
        extra: dict[str, Any] = {}
        if is_first and "final" in what:
            state = self._model.state_dict()
            extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        snapshot = Snapshot(
            point,
            what,
            present,
            is_worker=self._is_worker,
            is_replica=self._is_worker or len(present) == 1,
            num_steps=self._strategy.local_step,
            version=self._version,
            born=self._born,
            layouts=layouts,
            extra=extra,
        )
        self.num_deposited += 1
        self._comm.deposit(snapshot, tensors)

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name, checked to be those that the strategy was set up with.

        Raises:
            InputError: they are not those with which the strategy was set up, which it still updates.
        """
        refuse_other_parameters(self._model, self._parameters)
        if late := [name for name in self._frozen if self._parameters[name].requires_grad]:
            raise InputError(
                f"{type(self._model).__name__}: the model sets requires_grad of its parameter {late[0]!r} after "
                "training has begun, which no optimizer would notice: set it before"
            )
        return self._parameters

    def _judged(self, present: Sequence[int]) -> dict[str, Mapping[str, Tensor]]:
        """The judged model, if it differs from the replicas and this rank deposits it."""
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
        """Refuse an incomplete judged model: the rest would silently be this rank's replica."""
        where = f"{type(self._strategy).__name__}.judged_state()"
        if state is None:
            raise InputError(
                f"{where}: returns None on rank {self._comm.rank}, but judged = {self._strategy.judged!r}; return the "
                "parameters by name, or write judged = 'own' to judge each rank's model"
            )
        names = {name.partition("[")[0] for name in state}
        wanted = {name for name, _ in self._strategy.named_trainable()}
        is_divided = any("[" in name for name in state)  # other ranks of the site have the rest
        if not is_divided and (missing := sorted(wanted - names)):
            raise InputError(f"{where}: lacks {missing[0]!r}; return all trainable parameters by name")
        own = named_tensors(self._model)
        if unknown := sorted(names - set(own)):
            raise InputError(f"{where}: has {unknown[0]!r}, which the model does not; leave it out")
        is_start = self._strategy.local_step == self._version == 0 and self._is_worker
        for name in wanted.intersection(state) if is_start else ():
            if not torch.equal(state[name].to(own[name]), own[name]):
                raise InputError(
                    f"{where}: {name!r} is not the model's before the first step; return a copy of the parameters that "
                    "setup() was given until there is a newer model"
                )
