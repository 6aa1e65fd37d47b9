"""`Trainer.fit`: places ranks, runs them, gathers model and result."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import fields
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, cast

from exogym_core.ranks.torchrun.rank import torchrun_rank
from exogym_core.results.fit_result import FitResult
from exogym_core.results.progress import shown
from exogym_core.successors import FIT_ARGUMENTS, unknown_arguments, unknown_attribute
from exogym_core.training.apart import fit_apart
from exogym_core.training.here import fit_here
from exogym_core.training.joined import fit_joined
from exogym_core.training.options import OPTIONS, RunOptions, open_device
from exogym_core.training.program import Program
from exogym_core.training.request import FitRequest
from exogym_core.training.snapshot import load_whole_state
from netsim.files.errors import DeadlockError, InputError, MismatchError, RankError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from typing import Unpack

    import torch
    from torch import nn
    from torch.utils.data import Dataset

    from exogym_core.cost.compute import Compute
    from exogym_core.ranks.spec import WorkerSpec
    from exogym_core.strategy.base import Strategy
    from exogym_core.training.options import OtherOptions
    from netsim.topology.topology import Topology

    class FittedModel(nn.Module):
        """Result of `fit`: a model like the one given, with the run's result."""

        fit_result: FitResult


__all__ = ["LocalTrainer", "Trainer"]


def _show_all_options(fit: Callable[..., Any]) -> None:
    """Have `help` and editors that run code see the options that `fit` does not spell out."""
    spelt = signature(fit)
    *named, others = spelt.parameters.values()
    hidden = [each for each in fields(RunOptions) if each.name not in spelt.parameters]
    added = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in hidden
    ]
    fit.__signature__ = spelt.replace(parameters=[*named, *added, others])  # type: ignore[attr-defined]
    told = "".join(f"            {each.name}: {OPTIONS[each.name].about}\n" for each in hidden)
    fit.__doc__ = (fit.__doc__ or "").replace("            others: ", f"{told}            others: ")


class Trainer:
    """Trains a model on many virtual workers, and tells loss and virtual time together.

    Args:
        model: `model(batch)` returns the batch's mean loss, a scalar. It is copied, never changed.
        train_dataset: a `Dataset`, dealt out over ranks so that each sample is seen at most once per epoch; or
            a factory `f(rank, num_nodes, train_dataset) -> Dataset`, called with keywords, whose datasets
            are each rank's own.
        val_dataset: likewise; a factory is called for rank 0 with `train_dataset=False`. None: no evaluation.
        start_port: taken for EXO Gym's users; nothing here listens on a port.
        device: where ranks compute; by default cuda, mps or cpu, whichever is there first.
        devices: CUDA devices that ranks take in turn.
        unknown: refused.

    Attributes:
        result: the `FitResult` of the last `fit`, as far as it got; None before.
    """

    def __init__(
        self,
        model: nn.Module,
        train_dataset: Dataset[Any] | Callable[..., Dataset[Any]],
        val_dataset: Dataset[Any] | Callable[..., Dataset[Any]] | None = None,
        start_port: int | None = None,
        device: str | torch.device | None = None,
        devices: Sequence[int | str | torch.device] | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            known = list(signature(Trainer).parameters)[:-1]
            raise unknown_arguments("Trainer", unknown, known, FIT_ARGUMENTS)
        self.model = model
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        self.start_port = start_port
        self.device = device
        self.devices = devices
        self.result: FitResult | None = None

    if not TYPE_CHECKING:  # type checkers tell of every missing attribute themselves

        def __getattr__(self, name: str) -> Any:
            raise unknown_attribute(type(self).__name__, name)

    def fit(
        self,
        num_epochs: int | None = None,
        strategy: Strategy | None = None,
        num_nodes: int | None = None,
        max_steps: int | None = None,
        device: str | torch.device | None = None,
        devices: Sequence[int | str | torch.device] | None = None,
        batch_size: int = 16,
        minibatch_size: int | str | None = None,
        shuffle: bool = True,
        val_size: int = 64,
        val_interval: int = 100,
        autocast: bool | str = False,
        checkpoint_interval: int | None = None,
        correlation_interval: int | None = None,
        save_dir: str | Path = "./checkpoints",
        dataloader_kwargs: Mapping[str, Any] | None = None,
        *,
        seed: int = 42,
        run_name: str | None = None,
        wandb_project: str | None = None,
        log_x_axis: str = "step",
        disable_logging: bool = False,
        topology: Topology | str | Path | Mapping[str, Any] | None = None,
        placement: Sequence[str] | None = None,
        protocol: str | Mapping[str, Any] | None = None,
        collectives: str | Mapping[str, str] = "auto",
        compute: float | str | Mapping[str, Any] | Compute | None = None,
        transport: str = "netsim",
        workers: str | Mapping[str, Any] | WorkerSpec = "auto",
        target_loss: float | None = None,
        resume_from: str | Path | None = None,
        trace: str | Path | None = None,
        accuracy: Callable[[nn.Module, Any], float] | None = None,
        on_event: Callable[[Mapping[str, Any]], None] | None = None,
        **others: Unpack[OtherOptions],
    ) -> FittedModel:
        """Train, and return a new model: the mean of all ranks' models, as EXO Gym does.

        Floating parameters and buffers are averaged; whole-number and truth-value buffers are rank 0's. This mean
        costs no virtual time, and between a strategy's rounds it is a model that nobody has: targets, tables and
        verdicts judge the one that could be shipped, which is in `fit_result.judged_state`. The model's
        `fit_result`, and this trainer's `result`, hold history, seconds, bytes and rank states.

        Args:
            num_epochs: passes over the training set; one where neither this nor `max_steps` is given.
            strategy: what happens at the end of a local step; each rank gets its own copy.
            num_nodes: number of ranks; by default torchrun's world size, or the hosts of the topology.
            max_steps: steps to do; with `num_epochs`, whichever ends first.
            device: as for `Trainer`; giving different ones to both is an error. "auto" and "" leave it open.
            devices: likewise.
            batch_size: samples a rank and step. The last step of an epoch may be smaller; averages over ranks
                are weighted by samples.
            minibatch_size: samples a forward pass; divides `batch_size`, changes no result but for random
                draws inside the model. `auto`: the largest for which there is memory.
            shuffle: a new order each epoch, made from `seed`.
            val_size: samples to evaluate on, the same every time; 0 for no evaluation.
            val_interval: steps between evaluations; also at step 0 and at the end. They cost no virtual time.
            autocast: forward passes in half precision: `bf16` (or True), or `fp16`, which scales the loss and
                leaves out steps whose gradients overflow.
            checkpoint_interval: steps between checkpoints of the whole run; they cost no virtual time. Only the
                newest is kept.
            correlation_interval: steps between comparisons of the replicas.
            save_dir: where checkpoints go, in a new folder called as the run or its strategy;
                `result.checkpoint_folder` is its path.
            dataloader_kwargs: `collate_fn`, `drop_last`, `num_workers` and the like.
            seed: of data order, of every rank's own random stream, and of virtual jitter.
            run_name: write `logs/<run_name>/` with train.csv, validation.csv and config.json. Nothing is
                written without it.
            wandb_project: log to Weights & Biases too (extra `tracking`).
            log_x_axis: of these logs: `step`, `examples` or `virtual_seconds`.
            disable_logging: neither of both.
            topology: the network: a file, the name of a shipped one, a mapping or a Topology. None: no
                virtual time.
            placement: host names, one a rank; spread evenly over regions otherwise.
            protocol: how transfers use links, over the topology's own choice.
            collectives: algorithms of the simulated collectives: `auto`, the fastest for each operation, group and
                size on this network (`gloo`'s own under that protocol); a name such as `ring`; or a mapping of
                operations to names. `result.collectives` tells which were used.
            compute: virtual seconds of a step, see `Compute.parse`; by default by FLOPs on each host's device,
                which the topology must name.
            transport: `netsim`; `gloo` for real processes and sockets (torchrun's, where it has started us:
                then rank 0 has the history and returns the mean model, the others return their own); or one that was
                registered (`exogym_core.ranks.run`).
            workers: `auto`, `threads`, `processes`, or a mapping of kind, processes and intra_op_threads.
            target_loss: `target` tells whether the loss was held, and `virtual_seconds_to_target`, if it was, when the
                first judged model that reached it came to exist.
            resume_from: a folder of checkpoints; goes on from its newest, or from the start where there is none
                yet, to the same bits as without an interruption; new checkpoints go there too. All other
                arguments must be those of the interrupted run, but for its length and `workers`.
            trace: a file to write what happened to, for Perfetto, such as `trace.json.gz`; costs no virtual time.
            accuracy: `f(model, batch) -> fraction right`, for the judged model.
            on_event: called with every finished row, with its `kind`, while the run goes on.
            others: the options that `exogym_core.training.options` has besides; unknown ones are refused.

        Raises:
            InputError: an argument is wrong; the line says which and what to do.
            RankError: a rank failed.
            RecordError: a checkpoint cannot be written, or is damaged.
            MismatchError: ranks disagreed about a call.
            DeadlockError: ranks wait for each other.
            KeyboardInterrupt: on Ctrl-C; `result` holds what was done.

        A loss that is nan or infinite does not end the run: it is recorded, a warning tells the step, and
        `first_non_finite_step` holds it.
        """
        given = dict(locals())  # `check` takes them by name
        for name in ("self", "others"):
            del given[name]
        if unknown := [name for name in others if name not in OPTIONS]:
            raise unknown_arguments("fit", unknown, OPTIONS, FIT_ARGUMENTS)
        given |= others
        for name in ("device", "devices"):
            given[name] = _one_of(name, getattr(self, name), given[name])
        request = FitRequest.check(given)
        program = Program(request, self.model, self.train_dataset, self.val_dataset)
        result = self.result = FitResult(
            strategy=type(request.strategy).__name__,
            num_nodes=request.num_nodes,
            max_steps=program.known_max_steps() or 0,
            target_loss=request.target_loss,
            judged=request.strategy.judged,
        )
        label, steps = request.run_name or result.strategy, result.max_steps
        is_shown = request.progress and not torchrun_rank()
        with shown(label, steps, result) if is_shown else nullcontext() as show:
            fit = fit_apart if request.is_apart else fit_joined if request.is_joining else fit_here
            try:
                _conclude(fit(program, result, [] if show is None else [show]), result)
            except (RankError, MismatchError, DeadlockError) as error:
                raise error.with_traceback(None) from None  # their text has the frames that are the user's
        model = copy.deepcopy(self.model)
        load_whole_state(model, result.mean_state)
        model.fit_result = result  # type: ignore[assignment]
        return cast("FittedModel", model)


_show_all_options(Trainer.fit)

LocalTrainer = Trainer
"""The name that the first users of local training know."""


def _one_of(name: str, of_trainer: Any, of_fit: Any) -> Any:
    of_trainer, of_fit = open_device(name, of_trainer), open_device(name, of_fit)
    if of_trainer is not None and of_fit is not None and of_trainer != of_fit:
        raise InputError(f"fit: {name} is {of_fit!r}, but Trainer was given {of_trainer!r}; keep one of them")
    return of_fit if of_fit is not None else of_trainer


def _conclude(remarks: Sequence[str], result: FitResult) -> None:
    result.complete = True
    for remark in dict.fromkeys(remarks):
        warnings.warn(remark, UserWarning, stacklevel=3)
    if result.first_non_finite_step is not None:
        warnings.warn(
            f"fit: the loss was not finite at step {result.first_non_finite_step} and training went on; "
            "lower the learning rate or clip gradients (max_norm)",
            UserWarning,
            stacklevel=3,
        )
