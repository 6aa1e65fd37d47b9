"""DiLoCo as an optimizer for a training loop of one's own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from exogym_core.meeting_place import processes_of_site
from exogym_core.strategy.diloco import DiLoCoOptions
from exogym_core.strategy.optimizers import ensure_optim_spec, without_updates
from exogym_core.strategy.options import (
    Configured,
    accepted_arguments,
    checked_options,
    positive_int,
)
from exogym_core.strategy.participation.absence import LOST, Absence
from exogym_core.strategy.participation.site import (
    ShardedReplica,
    Site,
    cut_by_torch,
    is_cut,
    load_outer,
    outer_to_keep,
    part_of,
    part_to_keep,
    refuse_other_sites,
)
from exogym_core.strategy.parts.gradients import clip_norm
from exogym_core.strategy.parts.outer import OuterStep
from exogym_core.successors import unknown_arguments
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor
    from torch.optim.lr_scheduler import LRScheduler

    from exogym_core.communicator.base import Communicator
    from exogym_core.strategy.optimizers import OptimizerLike

__all__ = ["DiLoCoOptimizer"]

#: Arguments of OpenDiLoCo's optimizer that are gone -> what to do instead.
_SUCCESSORS = {
    "averager_opts": "the communicator carries the averages; leave it out",
    "dht": "workers meet through communicator=, for example GlooCommunicator.from_environment() under torchrun",
    "optimizer": "say which: inner_optimizer= or outer_optimizer=",
    "target_batch_size": "a round is num_inner_steps= steps of batch_size= samples",
    "tracker_opts": "rounds are counted in steps and need no tracker; leave it out",
}


class DiLoCoOptimizer(Configured, Optimizer):
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
        options: of `exogym_core.strategy.diloco:DiLoCoOptions`, as `DiLoCoStrategy` takes them, among them
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
        Options: the class of its options.
        param_groups, state: the inner optimizer's.
        communicator, run_id, scheduler: as given.
        num_inner_steps: steps a round.
        inner_optimizer: for `scaler.unscale_(optimizer.inner_optimizer)` and schedules of one's own.
        outer_optimizer: the one that ends rounds.
        local_step, local_epoch, num_samples: steps, rounds and this rank's samples so far.
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

    Options = DiLoCoOptions

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
        diloco: DiLoCoOptions
        diloco, unknown = checked_options(DiLoCoOptimizer, (), options)
        if unknown:
            raise unknown_arguments(where, unknown, accepted_arguments(DiLoCoOptimizer), _SUCCESSORS)
        if communicator is None and processes_of_site() > 1:
            raise InputError(
                f"{where}: torchrun has started {processes_of_site()} processes, but communicator is "
                "missing; pass communicator=GlooCommunicator.from_environment()"
            )
        self.batch_size = positive_int(where, "batch_size", batch_size)
        self.num_inner_steps = diloco.H
        self.communicator, self.run_id = communicator, run_id
        self.local_step = self.num_samples = 0
        ranks_per_worker = diloco.ranks_per_worker
        self._site = None if communicator is None else Site.of(communicator, ranks_per_worker, where)
        inside = None if self._site is None else self._site.inside
        groups = list(params)
        super().__init__(groups, {})
        parameters = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        self._parameters, self._held = parameters, [part_of(parameter) for parameter in parameters]
        refuse_other_sites(where, parameters, ranks_per_worker, diloco.sharding)
        if self._site is not None and cut_by_torch(parameters):  # torch averages gradients inside the site
            self._site, inside = Site(None, self._site.between), None
        patience = diloco.patience(where)
        self._absence: Absence | None = None
        if patience is not None and communicator is not None and communicator.world_size > 1:
            self._absence = Absence(patience, self.num_inner_steps)
            self._absence.connect(communicator, ranks_per_worker, where)
        if not skip_load_from_peers and communicator is not None and communicator.world_size > 1:
            assert self._site is not None
            self._load_from_first(self._site, self._held)
        self._gradients = None if inside is None else diloco.averager(parameters, inside)
        self._was_updated = self._is_averaged = self._is_shared = False
        self.inner_optimizer = self._built(inner_optimizer, groups)
        self.inner_optimizer.register_step_post_hook(self._note_update)
        self._share_inner_state()
        held = self._held if self._gradients is None else self._gradients.held
        self._outer = OuterStep(held, diloco.outer_optim(), diloco.averaging())
        if self._site is not None and self._gradients is not None:
            self._site = self._gradients.between(self._site)
        self.scheduler = None if scheduler is None else scheduler(self.inner_optimizer)
        if self._absence is not None:
            self._absence.follow(self._outer, self._site, self._gradients)
            self._absence.begin()
            self._catch_up()

    def _built(self, inner_optimizer: OptimizerLike | Optimizer, groups: list[Any]) -> Optimizer:
        if not isinstance(inner_optimizer, Optimizer):
            spec = ensure_optim_spec(inner_optimizer)
            return spec.build(groups) if self._gradients is None else self._gradients.build(spec, groups)
        if isinstance(self._gradients, ShardedReplica):
            where = type(self).__name__
            raise InputError(f"{where}: sharding needs inner_optimizer as a factory, not built already")
        return inner_optimizer

    def _load_from_first(self, site: Site, parameters: list[Tensor]) -> None:
        """Load the first rank's parameters; a rank that joins late gets them, or newer ones, then."""
        if self._absence is None:
            site.broadcast(parameters)
        elif site.between.members_change:  # sites meet when this optimizer is complete
            if site.inside is not None:
                Site(None, site.inside).broadcast(parameters)
        elif site.between.rank in self._absence.present:
            there = site.between.group(self._absence.present)
            Site(None, there).broadcast(parameters)

    def _catch_up(self) -> None:
        """Count the steps that others have done while this rank was away."""
        assert self._absence is not None
        missed = self._absence.number * self.num_inner_steps - self.local_step
        self.local_step += max(missed, 0)
        if self.scheduler is not None and self._absence.number != LOST:
            with without_updates():
                for _ in range(missed):
                    self.scheduler.step()

    @property
    def averaged_ranks(self) -> list[int]:
        """The ranks of the last round."""
        if self._absence is not None:
            return list(self._absence.present)
        return [0] if self.communicator is None else list(range(self.communicator.world_size))

    @property
    def outer_optimizer(self) -> Optimizer:
        """The optimizer of the rounds, over its own copy of the parameters."""
        return self._outer.optim

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
        self._was_updated = False
        loss: Any = None
        if scaler is not None:
            self._check_averaged()
            scaler.step(self.inner_optimizer)
        elif closure is not None:
            loss = self.inner_optimizer.step(lambda: self._averaged(closure))
        else:
            if not self._is_averaged:
                self.average_gradients()
            self.inner_optimizer.step()
        self._is_averaged = False
        # The schedule counts steps, also those that overflowed, which ranks may not share.
        if self.scheduler is not None:
            with nullcontext() if self._was_updated else without_updates():
                self.scheduler.step()
        self.local_step += 1
        self.num_samples += batch_size or self.batch_size
        if self.local_step % self.num_inner_steps == 0:
            self._round()
        if self._gradients is not None:
            self._gradients.gather()
        return loss  # type: ignore[no-any-return]

    def _round(self) -> None:
        if self._absence is None:
            self._outer.apply(self._outer.begin(self._site).wait())
            self._outer.reset_parameters()
        else:
            self._absence.round()
            self._catch_up()

    def average_gradients(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Average the gradients over the ranks of this site, if it has several.

        `step` does it where it has not been done since the last one. Gradients that are unscaled or clipped
        before `step` must be averaged before that, after the step's last backward pass. With `sharding` say
        the scaler here: an overflow in one rank's part is then seen by all.
        """
        if self._gradients is not None:
            self._gradients.listen(False)
            self._gradients.average()
            if scaler is not None:
                self._gradients.share_overflow()
        self._is_averaged, self._is_shared = True, scaler is not None

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Average the gradients if that has not been done, and clip their norm to `max_norm`; returns what it was.

        As FSDP's method of that name: with `sharding` it is the norm over all ranks of the site.
        """
        if not self._is_averaged:
            self.average_gradients()
        if self._gradients is not None:
            return self._gradients.clip(max_norm)
        norm: Any = clip_norm(self._parameters, max_norm)
        return norm.full_tensor() if is_cut(norm) else norm  # type: ignore[no-any-return]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the last step's gradients, where they are sharded too; `set_to_none` as torch has it."""
        if isinstance(self._gradients, ShardedReplica):
            for parameter in self._parameters:
                parameter.grad = None
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises InputError: each `param_group` is given at construction, as the outer optimizer copies parameters."""
        if "inner_optimizer" in self.__dict__ and "_outer" in self.__dict__:
            raise InputError(f"{type(self).__name__}: give all parameters at construction")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The parameters, both optimizers' states, the parameters that the round began with, and the counts."""
        return {
            "parameters": list(map(part_to_keep, self._held, self._parameters)),
            "inner": self.inner_optimizer.state_dict(),
            "outer": outer_to_keep(self._outer, self._parameters),
            "scheduler": self.scheduler and self.scheduler.state_dict(),
            "local_step": self.local_step,
            "num_samples": self.num_samples,
            "absence": self._absence and self._absence.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, the parameters too: building this optimizer made them rank 0's.

        So any order is right: model, optimizer, its state, as torch's users write it, or the model last.
        """
        with torch.no_grad():
            for held, saved in zip(self._held, state_dict["parameters"], strict=True):
                held.copy_(part_of(saved))
        self.inner_optimizer.load_state_dict(state_dict["inner"])
        self._share_inner_state()
        load_outer(self._outer, state_dict["outer"], self._parameters)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state_dict["scheduler"])
        self.local_step = state_dict["local_step"]
        self.num_samples = state_dict["num_samples"]
        if self._absence is not None:
            self._absence.load_state_dict(state_dict["absence"])

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
        if self._gradients is not None and not self._is_averaged:
            raise InputError(
                f"{type(self).__name__}.step: with a scaler and several ranks per site call "
                "average_gradients() after the backward pass, before scaler.unscale_ and step"
            )
        if isinstance(self._gradients, ShardedReplica) and not self._is_shared:
            raise InputError(
                f"{type(self).__name__}.step: with a scaler and sharding call average_gradients(scaler), so "
                "that an overflow in one rank's part is seen by all"
            )
