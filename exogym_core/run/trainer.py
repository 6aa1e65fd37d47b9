"""`Trainer.fit`: places ranks, runs them here or as one of torchrun's, gathers model and result.

Rank 0 monitors a run under torchrun, and no rank gathers all models.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from textwrap import indent
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, cast

from exogym_core.config import OPTIONS, RunConfig, checked_config, open_device
from exogym_core.meeting_place import registered_sites
from exogym_core.results.fit_result import FitResult
from exogym_core.results.recorder import mean_utilisation, where_time_went
from exogym_core.run.monitor import RunMonitor, planned_together
from exogym_core.run.program import Program
from exogym_core.run.record import followed
from exogym_core.run.request import FitRequest
from exogym_core.run.resumption import describe_last_checkpoint, go_on_after_restart, remember_checkpoints
from exogym_core.run.retiming import RecordedTraining
from exogym_core.run.snapshots import load_whole_state
from exogym_core.stages.split import whole_states
from exogym_core.successors import FIT_ARGUMENTS, unknown_arguments, unknown_attribute
from exogym_core.uncompiled import without_compiler
from exogym_core.workers.host import Sinks
from exogym_core.workers.torchrun.rank import TorchrunHost
from netsim.docstrings import section_of
from netsim.errors import DeadlockError, InputError, MismatchError, RankError
from netsim.network.clock import raised_gc_threshold
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import nn
    from torch.utils.data import Dataset

    class FittedModel(nn.Module):
        """Result of `fit`: a model like the one given, with the run's result."""

        fit_result: FitResult

    from collections.abc import Mapping

    from exogym_core.communicator.gloo.communicator import GlooCommunicator
    from exogym_core.run.loop import RankOutcome
    from exogym_core.workers.run import RunResult

    _Listener = Callable[[Mapping[str, Any]], None]

__all__ = ["LocalTrainer", "Trainer", "fill", "fit_local", "fit_torchrun"]

_UNCHARGED = (
    "{}: coding not charged: it sends encoded values, and compute.coding has a speed; encode with self.charged(codec), "
    "or call self.charge(name, 'encode' or 'decode', num_values)"
)


def fit_local(
    program: Program,
    result: FitResult,
    listeners: Sequence[_Listener],
    recording: RecordedTraining | None = None,
) -> Sequence[str]:
    """Train with all ranks, or retime a recording, and fill `result`; returns warnings for the user."""
    with RunMonitor(program, result, listeners, recording) as monitor:
        trains = program.request.carrier.host
        host = trains(program.job()) if recording is None else recording.host(program)
        run = host.run(program, monitor.sinks)
        if monitor.recorder.rounds is None:  # the last model exists when the run ends
            result.virtual_seconds = run.virtual_seconds
        monitor.take_final_models()
    if program.request.carrier.has_clock:
        about = (program, monitor.streams, monitor.found, run.results, result)
        result.recording = recording or RecordedTraining.of(*about)
    # Ranks left behind continue after the run has ended without them, at the time of its last row.
    return fill(result, program.request, run, left_behind=monitor.recorder.rounds is not None)


def fill(
    result: FitResult, request: FitRequest, run: RunResult[RankOutcome], *, left_behind: bool = False
) -> list[str]:
    """Fill `result` with the outcome of the workers that ran here; returns warnings for the user.

    If ranks may have been `left_behind`, the run has ended without them, at the time that `result` has already.
    """
    number = request.num_training
    workers = run.results[:number]
    result.rank_states = [outcome.state for outcome in workers]
    if request.stages is not None:
        result.rank_states = whole_states(result.rank_states, request.stages.count)
    result.max_steps, result.options = workers[0].max_steps, dict(workers[0].options)
    coding = {outcome.coding for outcome in workers}
    result.coding = next((each for each in ("not charged", "charged") if each in coding), None)
    result.collectives, result.window_limit = run.collectives, run.window_limit
    result.link_history = run.link_history
    result.compute_seconds = run.compute_seconds[:number]
    result.exposed_seconds = run.exposed_seconds[:number]
    if not left_behind:
        result.virtual_seconds = run.virtual_seconds
    if run.virtual_seconds is not None and (total := result.virtual_seconds) is not None:
        times = where_time_went(result.compute_seconds, run.network_seconds[:number], total)
        result.computing_seconds, result.network_seconds, result.waiting_seconds = times
        result.compute_utilisation = mean_utilisation(
            [min(each, total) for each in result.compute_seconds], total
        )
        result.later_weather = request.weather_after(total)
    remarks = [remark for outcome in workers for remark in outcome.remarks]
    return [*remarks, _UNCHARGED.format(result.strategy)] if result.coding == "not charged" else remarks


def fit_torchrun(program: Program, result: FitResult, listeners: Sequence[_Listener]) -> Sequence[str]:
    """Train as this rank and fill `result`; returns warnings for the user.

    On rank 0 `listeners` are called with rows, besides those that the request names.
    On rank 0 `result` has the rows of all ranks and the final models. On the others it has neither, and its models, as
    `rank_states` on all of them, are this rank's own.
    """
    if program.request.place:
        program.request.finds_minibatch = False  # rank 0 finds it
        program.prepare()  # at the same time as rank 0
        return _train_joined(program, result, None)
    go_on_after_restart(program)
    with RunMonitor(program, result, listeners) as watcher:
        remember_checkpoints(program)
        return _train_joined(program, result, watcher)


def _train_joined(program: Program, result: FitResult, watcher: RunMonitor | None) -> Sequence[str]:
    request = program.request
    host = TorchrunHost(
        partial(describe_last_checkpoint, program),
        request.seed,
        request.timeout_seconds,
        request.compare_calls,
    )

    def body(comm: GlooCommunicator) -> RankOutcome:
        planned_together(program, result, host, watcher)
        if watcher is not None:
            about_run = {"strategy": type(request.strategy).__name__, "steps": request.max_steps}
            host.side.post("run", json.dumps(about_run))  # for `netgym status`
        outcome = program(comm)
        remarks = host.gather(outcome.remarks)
        result.mean_state = result.judged_state = outcome.state
        if watcher is not None:
            watcher.take_final_models()
        return replace(outcome, remarks=tuple(remark for own in remarks for remark in own))

    return fill(result, request, host.run(body, Sinks() if watcher is None else watcher.sinks))


P = ParamSpec("P")


def _with_keywords_of(
    config: Callable[P, RunConfig],
) -> Callable[[Callable[[Trainer, RunConfig], FittedModel]], Callable[Concatenate[Trainer, P], FittedModel]]:
    """Decorator of `fit`: its keywords are the fields of `config`, for type checkers, `help` and at run time."""

    def decorate(
        fit: Callable[[Trainer, RunConfig], FittedModel],
    ) -> Callable[Concatenate[Trainer, P], FittedModel]:
        @wraps(fit)
        def checked(self: Trainer, /, *positional: P.args, **keywords: P.kwargs) -> FittedModel:
            if not keywords.keys() <= OPTIONS.keys():
                unknown = [name for name in keywords if name not in OPTIONS]
                raise unknown_arguments("fit", unknown, OPTIONS, FIT_ARGUMENTS)
            try:
                return fit(self, checked_config(*positional, **keywords))
            except (RankError, MismatchError, DeadlockError) as error:
                raise error.with_traceback(None) from None  # their text has the frames that are the user's

        options = signature(config).parameters.values()
        own = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
        made = Signature([own, *options], return_annotation=signature(fit).return_annotation)
        checked.__signature__ = made  # type: ignore[attr-defined]
        del checked.__wrapped__  # tools would show its one parameter
        attributes = indent(section_of(RunConfig), " " * 8)
        checked.__doc__ = re.sub(r" +options: .*\n", lambda _: f"{attributes}\n", fit.__doc__ or "")
        return checked

    return decorate


class Trainer:
    """Trains a model on many virtual workers, and measures loss and virtual time together.

    Args:
        model: `model(batch)` returns the batch's mean loss, a scalar. Where that is a mean over something else than the
            samples, such as the tokens that are not ignored, it returns `(loss, count)`, or a mapping with `loss` and
            `count`: micro-batches, ranks and evaluations are then weighed by the count. It is copied, never changed.
        train_dataset: a `Dataset`, dealt out over ranks so that each sample is seen at most once per epoch; or
            a factory `f(rank, num_nodes, train_dataset) -> Dataset`, called with keywords, whose datasets
            are each rank's own.
        val_dataset: a `Dataset`, or a factory, called for rank 0 with `train_dataset=False`. None: no evaluation.
        start_port: accepted for users of EXO Gym; no port is opened.
        device: where ranks compute; by default cuda, mps or cpu, whichever is there first.
        devices: CUDA devices that ranks take in turn.
        unknown: other names, which are refused.

    Attributes:
        result: the `FitResult` of the last `fit`, complete or not; None before.
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

    if not TYPE_CHECKING:  # type checkers report missing attributes themselves

        def __getattr__(self, name: str) -> Any:
            raise unknown_attribute(type(self).__name__, name)

    @_with_keywords_of(RunConfig)
    def fit(self, options: RunConfig) -> FittedModel:
        """Train, and return a new model: the mean of all ranks' models, as EXO Gym does.

        Floating parameters and buffers are averaged; whole-number and truth-value buffers are rank 0's. This mean
        costs no virtual time, and between a strategy's rounds it is a model that no rank has: targets, tables and
        verdicts judge the one that could be shipped, which is in `fit_result.judged_state`. The model's
        `fit_result`, and this trainer's `result`, hold history, seconds, bytes and rank states.

        Args:
            options: the fields of `RunConfig`, as keywords.

        Raises:
            InputError: an argument is wrong; the line says which and what to do.
            RankError: a rank failed.
            RecordError: a checkpoint cannot be written, or is damaged.
            MismatchError: ranks disagreed about a call.
            DeadlockError: ranks wait for each other.
            KeyboardInterrupt: on Ctrl-C; `result` holds what was done.

        A loss that is nan or infinite does not end the run: it is recorded, a warning names the step, and
        `first_non_finite_step` holds it.
        """
        for name in ("device", "devices"):
            own, asked = open_device(getattr(self, name)), getattr(options, name)
            if own is not None and asked is not None and own != asked:
                raise InputError(f"fit: {name} is {asked!r}, but Trainer was given {own!r}; keep one of them")
            setattr(options, name, own if asked is None else asked)
        result = self._run(options)
        model = copy.deepcopy(self.model)
        load_whole_state(model, result.mean_state)
        model.fit_result = result  # type: ignore[assignment]
        return cast("FittedModel", model)

    @raised_gc_threshold()
    def retime(self, recording: RecordedTraining, **options: Any) -> FitResult:
        """The result of `fit` with these options, whose losses are those of a recording.

        Args:
            recording: of a training whose options are others only in those of the network.
            options: of `fit`; no checkpoints are made.

        Raises:
            InputError: an option is wrong, or the recording is of another training, or cannot be retimed.
        """
        free = {"checkpoint_interval": None, "resume_from": None}
        return self._run(checked_config(**(options | free)), recording)

    def _run(self, options: RunConfig, recording: RecordedTraining | None = None) -> FitResult:
        """Train, or retime a recording."""
        request = FitRequest.check(options)
        fit: Callable[..., Sequence[str]] = partial(fit_local, recording=recording)
        if recording is None and request.launch == "site":
            module, _, name = registered_sites().partition(":")
            fit = getattr(importlib.import_module(module), name)
        elif recording is None and request.launch == "torchrun":
            fit = fit_torchrun
        # What a run leaves behind is found while it is young: not by searches of all that is imported.
        with raised_gc_threshold(request.num_nodes), without_compiler():
            about = (request, self.model, self.train_dataset, self.val_dataset)
            program = Program(*about, is_tried=recording is not None)
            result = FitResult(
                strategy=type(request.strategy).__name__,
                num_nodes=request.num_nodes,
                max_steps=program.known_max_steps() or 0,
                target_loss=request.target_loss,
                judged=request.strategy.judged,
                parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            )
            every, steps = request.checkpoint_interval, result.max_steps
            if every is not None and 0 < steps < every:
                line = f"checkpoints every {every} steps: none is made in {format_count(steps, 'step')}"
                warnings.warn(f"{line}: shorten the interval, or leave it out", UserWarning, stacklevel=4)
            following: AbstractContextManager[list[_Listener]] = nullcontext([])
            if request.progress or request.out is not None or request.resume_from is not None:
                following = followed(program, result)
            with following as listeners:
                self.result = result
                _conclude(fit(program, result, listeners), result)
        if recording is None and result.recording is not None:
            result.recording.trainer, result.recording.options = copy.copy(self), options
        return result


LocalTrainer = Trainer
"""Former name of `Trainer` for local training."""


def _conclude(remarks: Sequence[str], result: FitResult) -> None:
    result.complete = True
    for remark in dict.fromkeys(remarks):
        warnings.warn(remark, UserWarning, stacklevel=5)
    if result.history and result.num_nodes > 1 and not result.bytes_sent:
        span = format_count(len(result.history), "step")
        warnings.warn(
            f"fit: {result.strategy} sent nothing in {span}: the workers trained each on their own: "
            "to have them exchange, shorten the period (H) or train for more steps",
            UserWarning,
            stacklevel=5,
        )
    if result.first_non_finite_step is not None:
        warnings.warn(
            f"fit: the loss was not finite at step {result.first_non_finite_step} and training continued; "
            "lower the learning rate or clip gradients (max_norm)",
            UserWarning,
            stacklevel=5,
        )
