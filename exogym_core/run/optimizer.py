"""DiLoCo as an optimizer for a training loop of one's own."""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from exogym_core.communicator.base import CallState
from exogym_core.meeting_place import processes_of_site
from exogym_core.strategy.base import Strategy
from exogym_core.strategy.diloco import DiLoCoStrategy
from exogym_core.strategy.optimizers import OptimSpec, ensure_optim_spec, without_updates
from exogym_core.strategy.options import accepted_arguments, checked_options, positive_int
from exogym_core.strategy.participation.site import (
    LOST,
    ShardedReplica,
    Site,
    cut_by_torch,
    load_outer,
    outer_to_keep,
    part_of,
    part_to_keep,
)
from exogym_core.successors import unknown_arguments
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.optim.lr_scheduler import LRScheduler

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.optimizers import OptimizerLike
    from exogym_core.strategy.parts.outer import OuterStep

__all__ = ["DiLoCoOptimizer"]

#: Arguments of OpenDiLoCo's optimizer that are gone -> what to do instead.
_SUCCESSORS = {
    "averager_opts": "the communicator carries the averages; leave it out",
    "dht": "workers meet through communicator=, for example GlooCommunicator.from_environment() under torchrun",
    "optimizer": "say which: inner_optimizer= or outer_optimizer=",
    "target_batch_size": "a round is num_inner_steps= steps of batch_size= samples",
    "tracker_opts": "rounds are counted in steps and need no tracker; leave it out",
}


class _Parameters(nn.Module):
    """Parameters that an optimizer was given, as a model."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self._given = given

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        return ((str(number), parameter) for number, parameter in enumerate(self._given))


class _OneRank:
    """Communicator of a rank that is alone."""

    rank, world_size, members_change, inside = 0, 1, False, None

    def __init__(self) -> None:
        self.state = CallState()

    def room(self, tensors: Any) -> None:
        return None


class _Rounds(DiLoCoStrategy):
    """DiLoCo on parameters that a training loop of one's own updates; they become rank 0's, unless `is_equal`."""

    is_equal = False

    def enter_site(self) -> None:
        """As every strategy; parameters become the first rank's before the site takes them."""
        is_several = self.comm.world_size > 1
        connected = self.sites.connected(self) if is_several else Site(None, self.comm)
        self.site = connected
        self.workers = self.patience.workers(self)
        if is_several and not self.is_equal:
            self._load_from_first([part_of(parameter) for parameter in self.trainable])
        self.site = self.sites.filled(connected, self)

    def _load_from_first(self, parameters: list[Tensor]) -> None:
        """Load the first rank's parameters; a rank that joins late gets them, or newer ones, then."""
        site, present = self.site, self.workers.present
        if cut_by_torch(*self.trainable):  # each rank of a site has its own parts
            site = Site(None, site.between)
        if not self.workers.has_absences:
            site.broadcast(parameters)
        elif self.comm.members_change:  # sites meet when this optimizer is complete
            if site.inside is not None:
                Site(None, site.inside).broadcast(parameters)
        elif site.between.rank in present:
            Site(None, site.between.group(present)).broadcast(parameters)


class DiLoCoOptimizer(Optimizer):
    """An optimizer whose `step` is the inner one's, and every `num_inner_steps` steps a DiLoCo round.

    It takes OpenDiLoCo's arguments, with `communicator` in the place of the DHT. At construction every rank
    takes over rank 0's parameters; a round averages pseudo-gradients over all ranks of the communicator.
    `param_groups` and `state` are the inner optimizer's.

    With `ranks_per_worker=k` every k consecutive ranks are a site, such as GPUs of one machine: gradients are
    averaged among them at each step, and only rounds go to other sites. Code that unscales or clips
    gradients calls `average_gradients()` before. With `sharding` each of them updates a part of the parameters, as with
    FSDP, and has that part's optimizer states; gradients are clipped with `clip_grad_norm_` here. The second
    gather of "FULL_SHARD" is done when gradients are averaged, once a step.

    A model that torch's `fully_shard` has cut among the k ranks of each site goes with `ranks_per_worker=k` and
    without `sharding`: torch averages gradients, and each rank brings its parts together with its like in other sites
    and holds both optimizers' states for these alone. `state_dict` returns them as DTensors.

    With a time-out a round continues without ranks that are late or cut off, as in `DiLoCoStrategy`: a rank that is
    left out downloads the others' state, and its `local_step` and `local_epoch` are theirs from then on. So count
    rounds, `while optimizer.local_epoch < rounds`, not steps.

    Args:
        communicator: connects the ranks; None for one alone.
        batch_size: samples a step, counted in `num_samples`.
        inner_optimizer: a factory such as `functools.partial(torch.optim.AdamW, lr=4e-4)`, or an optimizer
            built already.
        params: parameters or parameter groups, as for any optimizer.
        scheduler: a factory of a learning-rate schedule on the inner optimizer; it moves at each step.
        options: of `DiLoCoStrategy`, among them
            `num_inner_steps`, steps a round; `outer_optimizer`, SGD with Nesterov momentum 0.9 and learning rate
            0.7 if None; and `grad_compression`, such as "fp16", "scaled-fp16" or "uniform8bit". `sharding` does
            not go with an inner optimizer that is built already.
        run_id: a name for the run; nothing depends on it.
        skip_load_from_peers: the parameters are equal already; do not take over rank 0's.

    Raises:
        UnknownNameError: an argument that does not exist; for one of OpenDiLoCo's, what to do instead.
        InputError: torchrun has started several processes and no communicator is given, or the number of
            ranks is no multiple of `ranks_per_worker`.

    Attributes:
        strategy: DiLoCo's rounds: a DiLoCoStrategy.
        param_groups, state: the inner optimizer's.
        communicator, run_id, scheduler: as given.
        num_inner_steps: steps a round.
        inner_optimizer: for schedules of one's own; a scaler may unscale this optimizer or the inner one.
        outer_optimizer: the one that ends rounds.
        local_step, local_epoch, num_samples: steps, rounds and this rank's samples so far.
        grad_scale, found_inf: set by GradScaler.step while it calls `step`.
        averaged_ranks: the ranks of the last round, also on those left out.

    References:
        Douillard et al., DiLoCo, arXiv 2311.08105. Jaghouar et al., OpenDiLoCo, arXiv 2407.07852.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> inner = lambda params: torch.optim.SGD(params, lr=0.5)
    >>> optimizer = DiLoCoOptimizer(
    ...     batch_size=1, num_inner_steps=2, inner_optimizer=inner, outer_optimizer=inner, params=[weight]
    ... )
    >>> for _ in range(2):
    ...     weight.grad = torch.ones(2)
    ...     optimizer.step()
    >>> weight.tolist(), optimizer.local_epoch
    ([0.5, 0.5], 1)
    """

    # GradScaler.step(self) calls `step` then, overflow or not, and a round ends on all ranks in the same step.
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None
    found_inf: Tensor

    def __init__(
        self,
        *,
        batch_size: int,
        inner_optimizer: OptimizerLike | Optimizer,
        params: Iterable[Any],
        communicator: Communicator | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        run_id: str | None = None,
        skip_load_from_peers: bool = False,
        **options: Any,
    ) -> None:
        where = type(self).__name__
        of_all = {name: options.pop(name) for name in Strategy.common if name in options}
        diloco, unknown = checked_options(DiLoCoStrategy, (), options, where)
        if unknown := unknown | of_all:
            own = inspect.signature(type(self)).parameters
            known = [name for name in accepted_arguments(DiLoCoStrategy) if name not in Strategy.common]
            raise unknown_arguments(where, unknown, [*own, *known], _SUCCESSORS)
        if communicator is None and processes_of_site() > 1:
            raise InputError(
                f"{where}: torchrun has started {processes_of_site()} processes, but communicator is "
                "missing; pass communicator=GlooCommunicator.from_environment()"
            )
        self.batch_size = positive_int(where, "batch_size", batch_size)
        self.communicator, self.run_id, self.num_samples = communicator, run_id, 0
        self._was_updated = self._is_averaged = self._is_shared = False
        groups = list(params)
        super().__init__(groups, {})
        parameters = [each for group in self.param_groups for each in group["params"]]
        self._parameters = [each for each in parameters if each.requires_grad]
        self.strategy = _Rounds(
            **{name: getattr(diloco, name) for name in diloco.names() if name not in Strategy.common}
        )
        self.strategy.where, self.strategy.is_equal = where, skip_load_from_peers
        self.strategy.optim_spec = self._spec(inner_optimizer, groups)
        self.strategy.setup(_Parameters(self._parameters), communicator or _OneRank(), max_steps=1, seed=0)  # type: ignore[arg-type]
        self.inner_optimizer = self.strategy.optim
        self.inner_optimizer.register_step_post_hook(self._note_update)
        self._share_inner_state()
        self.scheduler = None if scheduler is None else scheduler(self.inner_optimizer)
        self.strategy.scheduler = self.scheduler
        self.strategy.workers.join()
        self._catch_up()

    def _spec(self, inner_optimizer: OptimizerLike | Optimizer, groups: list[Any]) -> OptimSpec:
        """The inner optimizer, built of the groups given; or one that is built already."""
        if not isinstance(inner_optimizer, Optimizer):
            spec = ensure_optim_spec(inner_optimizer)
            return OptimSpec(spec.cls, params=lambda model: groups, **spec.kwargs)
        if self.strategy.sites.sharding != "NO_SHARD":
            where = type(self).__name__
            raise InputError(f"{where}: sharding needs inner_optimizer as a factory, not built already")
        return OptimSpec(lambda parameters: inner_optimizer)

    def _catch_up(self) -> None:
        """Count the steps that others have done while this rank was away."""
        number = self.strategy.workers.number
        if number is None:
            return
        missed = number * self.num_inner_steps - self.local_step
        self.strategy.local_step += max(missed, 0)
        if self.scheduler is not None and number != LOST:
            with without_updates():
                for _ in range(missed):
                    self.scheduler.step()

    @property
    def averaged_ranks(self) -> list[int]:
        """The ranks of the last round."""
        return list(self.strategy.workers.present)

    @property
    def num_inner_steps(self) -> int:
        """Local steps of a round."""
        return self.strategy.H

    @property
    def local_step(self) -> int:
        """Local steps done so far."""
        return self.strategy.local_step

    @property
    def outer_optimizer(self) -> Optimizer:
        """The optimizer of the rounds, over its own copy of the parameters."""
        outer: OuterStep = self.strategy.outer
        return outer.optim

    @property
    def local_epoch(self) -> int:
        """Number of finished rounds."""
        return self.local_step // self.num_inner_steps

    def step(  # type: ignore[override]
        self,
        closure: Callable[[], Tensor] | None = None,
        batch_size: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor | None:
        """Take an inner step, and the outer step if it completes a round.

        Args:
            closure: computes the loss and the gradients again; the inner optimizer calls it. A GradScaler
                given here, as in `step(scaler)`, is taken for `scaler`.
            batch_size: samples of this step, where other than usual.
            scaler: skips the inner update if gradients are not finite; its `update()` stays the caller's.

        Returns:
            What `closure` returned, or None.
        """
        if isinstance(closure, torch.amp.GradScaler):
            closure, scaler = None, closure
        if scaler is not None and closure is not None:
            raise InputError(f"{type(self).__name__}.step: closure and scaler cannot be used together")
        if scaler is not None and scaler.is_enabled():
            return scaler.step(self, batch_size=batch_size)  # type: ignore[return-value]  # calls `step` again
        self._was_updated = False
        loss: Any = None
        if "found_inf" in self.__dict__:  # `scaler.step(self)` has called
            try:
                self._check_averaged()
            except InputError:
                del self.found_inf, self.grad_scale  # as the scaler does after a step
                raise
            self._step_if_finite()
        elif closure is not None:
            loss = self.inner_optimizer.step(lambda: self._averaged(closure))
        else:
            if not self._is_averaged:
                self.average_gradients()
            self.inner_optimizer.step()
        self._is_averaged = False
        self.num_samples += batch_size or self.batch_size
        self.strategy.communicate(self.local_step + 1)
        self.strategy.context.is_skipped = not self._was_updated
        Strategy.step(self.strategy)
        self._catch_up()
        return loss  # type: ignore[no-any-return]

    def _step_if_finite(self) -> None:
        """Take the inner step in `scaler.step(self)`: unscale, unless that is done, and skip what has overflowed.

        A scaler notes by optimizer whether gradients are unscaled, and hands over its note of this one. Of the inner
        one only the scaler knows, and it does not hand over itself: it is the caller.
        """
        if self.grad_scale is not None:
            frame = sys._getframe(1)
            while not isinstance(scaler := frame.f_locals.get("self"), torch.amp.GradScaler):
                if frame.f_back is None:
                    where = type(self).__name__
                    raise InputError(
                        f"{where}.step: found_inf is set, but no torch.amp.GradScaler has called"
                    )
                frame = frame.f_back
            with contextlib.suppress(RuntimeError):  # unscaled by `scaler.unscale_(self.inner_optimizer)`
                scaler.unscale_(self.inner_optimizer)
        if not self.found_inf:
            self.inner_optimizer.step()

    def average_gradients(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Average the gradients over the ranks of this site, if it has several.

        `step` does it where it has not been done since the last one. Gradients that are unscaled or clipped
        before `step` must be averaged before that, after the step's last backward pass. With `sharding` say
        the scaler here: an overflow in one rank's part is then seen by all.
        """
        gradients = self.strategy.site.gradients
        if gradients is not None:
            gradients.listen(False)
            gradients.average()
            if scaler is not None:
                gradients.share_overflow()
        self._is_averaged, self._is_shared = True, scaler is not None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Average the gradients if that has not been done, and clip their norm to `max_norm`; returns what it was.

        As FSDP's method of that name: with `sharding` it is the norm over all ranks of the site.
        """
        if not self._is_averaged:
            self.average_gradients()
        norm: Any = self.strategy.site.clip(max_norm)
        return norm.full_tensor() if cut_by_torch(norm) else norm  # type: ignore[no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the last step's gradients, where they are sharded too; `set_to_none` as torch has it."""
        if isinstance(self.strategy.site.gradients, ShardedReplica):
            for parameter in self._parameters:
                parameter.grad = None
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises InputError: each `param_group` is given at construction, as the outer optimizer copies parameters."""
        if "inner_optimizer" in self.__dict__ and "strategy" in self.__dict__:
            raise InputError(f"{type(self).__name__}: give all parameters at construction")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The parameters, both optimizers' states, the parameters that the round began with, and the counts."""
        return {
            "parameters": list(map(part_to_keep, map(part_of, self._parameters), self._parameters)),
            "inner": self.inner_optimizer.state_dict(),
            "outer": outer_to_keep(self.strategy.outer, self._parameters),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "local_step": self.local_step,
            "num_samples": self.num_samples,
            "absence": self.strategy.workers.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, the parameters too: building this optimizer made them rank 0's.

        So any order is right: model, optimizer, its state, as torch's users write it, or the model last.
        """
        with torch.no_grad():
            for held, saved in zip(map(part_of, self._parameters), state_dict["parameters"], strict=True):
                held.copy_(part_of(saved))
        self.inner_optimizer.load_state_dict(state_dict["inner"])
        self._share_inner_state()
        load_outer(self.strategy.outer, state_dict["outer"], self._parameters)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])
        self.strategy.local_step = state_dict["local_step"]
        self.num_samples = state_dict["num_samples"]
        self.strategy.workers.load_state_dict(state_dict["absence"])

    def _share_inner_state(self) -> None:
        self.param_groups = self.inner_optimizer.param_groups
        self.state = self.inner_optimizer.state

    def _note_update(self, *_: Any) -> None:
        self._was_updated = True

    def _averaged(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.average_gradients()
        return loss

    def _check_averaged(self) -> None:
        # A scaler looks for overflow when gradients are unscaled: the ranks of a site must see the same ones.
        gradients = self.strategy.site.gradients
        if gradients is not None and not self._is_averaged:
            raise InputError(
                f"{type(self).__name__}.step: with a scaler and several ranks per site call "
                "average_gradients() after the backward pass, before scaler.unscale_ and step"
            )
        if isinstance(gradients, ShardedReplica) and not self._is_shared:
            raise InputError(
                f"{type(self).__name__}.step: with a scaler and sharding call average_gradients(scaler), so "
                "that an overflow in one rank's part is seen by all"
            )
