"""Run monitor: history, loggers, evaluation, checkpoints and the folder of `fit(out=...)`, fed by the ranks' rows.

The observer works in the turn of ranks that are threads, or in a thread of its own.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from exogym_core.config import OPTIONS, resolved_protocol, yaml_text
from exogym_core.names import PROGRAM_TASK, file_name, visible
from exogym_core.results.disk import warned
from exogym_core.results.loggers import FolderLogger, Logger, WandbLogger, close_logger, flat
from exogym_core.results.recorder import RowRecorder
from exogym_core.results.run_folder import RunFolder, is_run_folder
from exogym_core.run.resumption import begin_checkpoints, find_resumed, follow, plan
from exogym_core.run.snapshots import passing_buffers
from exogym_core.strategy.base import Strategy
from exogym_core.workers.host import Sinks
from exogym_core.workers.journal import SnapshotThread
from netsim.errors import InputError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from exogym_core.results.fit_result import FitResult
    from exogym_core.run.observer import FinalModels, Observer
    from exogym_core.run.program import Program
    from exogym_core.run.request import FitRequest
    from exogym_core.workers.torchrun.rank import TorchrunHost
    from netsim.ranks import StampedRow

__all__ = [
    "Evaluations",
    "RunMonitor",
    "RunRecord",
    "StoppedError",
    "make_loggers",
    "note_settled",
    "plain_arguments",
    "planned_together",
    "run_config",
    "run_record",
]

_PLAIN = (bool, int, float, str, type(None))


def plain_arguments(strategy: Strategy) -> dict[str, Any]:
    """Arguments of a strategy by name, as plain values; of others their `repr`."""
    given = sorted(strategy.arguments.items())
    return {name: value if isinstance(value, _PLAIN) else repr(value) for name, value in given}


class RunRecord:
    """Folder of one `fit(out=...)`.

    Args:
        folder: owned by this process.
        program: of the run.
        is_continued: a run has begun there, which stays as it is until there is a step that it had not done.
    """

    def __init__(self, folder: RunFolder, program: Program, is_continued: bool) -> None:
        request, model = program.request, program.model
        self.folder, self._request, self.is_continued = folder, request, is_continued
        self._has_begun = False
        self._name, self.label = _names(request.strategy)
        self._task = {"name": f"{PROGRAM_TASK}{type(program.train_dataset).__name__})"}
        given = plain_arguments(request.strategy)
        self._arguments = {name: value for name, value in given.items() if value is not None}
        self._passing = passing_buffers(model).keys()
        self._model = {
            "name": type(model).__name__,
            "parameters": sum(each.numel() for each in model.parameters()),
        }

    def begin(self, result: FitResult) -> None:
        """Write what is settled before the first step."""
        if self.is_continued:
            self.folder.log("resumed")
        self.folder.write_text("experiment.yaml", self._experiment(result))
        self.folder.write_environment()
        self.folder.write_summary([])
        self._has_begun = True

    def follow(self, result: FitResult, row: Mapping[str, Any]) -> None:
        """Take a row of a run that goes on: its first own step begins it."""
        if not self._has_begun and row["kind"] == "step" and row["step"] > result.resumed_step:
            self.begin(result)

    def end(self, result: FitResult) -> None:
        """Write metrics, model, summary and page; nothing where no step was done."""
        if not result.complete and not (self._has_begun and result.history):
            return
        from exogym_core.results.report import write_report

        self.folder.write_text("experiment.yaml", self._experiment(result))
        judged = result.judged_state
        state = (
            {name: judged[name] for name in judged if name not in self._passing} if result.complete else None
        )
        self.folder.write_result(self.label, result)
        self.folder.write_summary([result.summary(self.label, self._name)])
        self.folder.record_tables(are_final=True)
        if state is not None:
            self.folder.write_model(self.label, state)
        with warned(f"{visible(self.folder.path)}: has no page yet (netgym report writes one)"):
            write_report(self.folder)

    def _experiment(self, result: FitResult) -> str:
        """The request in the form of a resolved experiment file."""
        request = self._request
        own = {
            "autocast": request.autocast or False,
            "num_nodes": request.num_nodes,
            "max_steps": result.max_steps or request.max_steps,
            "workers": request.workers.model_dump(exclude={"num_gpus"}),
            "device": str(request.device or "auto"),
            "topology": None if request.topology is None else request.topology.to_mapping(),
            "protocol": resolved_protocol(request.protocol, request.topology),
            "compute": result.compute
            or (request.compute.to_mapping() if request.compute is not None else None),
        }
        plain: dict[str, Any] = {
            "name": self.folder.path.resolve().name,
            "task": self._task,
            "model": self._model,
            "strategies": [{"name": self._name, "label": self.label, **self._arguments}],
        }
        for name in sorted(OPTIONS, key=lambda name: (OPTIONS[name].key or "").count(".")):  # groups first
            if (key := OPTIONS[name].key) is None:
                continue
            *groups, last = key.split(".")
            place = plain
            for group in groups:
                place = place.setdefault(group, {})
            value = own[name] if name in own else getattr(request, name)
            place[last] = value if isinstance(value, (*_PLAIN, dict, list)) else _plain(value)
        if request.checkpoint_interval is None:
            plain["checkpoint"] = None
        return yaml_text(plain)


@contextmanager
def run_record(program: Program) -> Iterator[RunRecord | None]:
    """Folder of a run, owned by this process while the block runs; the program gets its checkpoints in there.

    None where no folder is asked for, and for ranks other than the first of those that torchrun started for the run.

    Raises:
        InputError: the folder of `out` is not empty, or is in use.
        RecordError: it cannot be made.
    """
    request = program.request
    continued = _continued(request)
    out = request.out if continued is None else continued
    if out is None or request.place:
        if continued is not None:
            program.request = replace(request, resume_from=None)
        yield None
        return
    if continued is None:
        folder = RunFolder.create(out, "")
    else:
        folder = RunFolder.open(out).owned()
        folder.clean()
    try:
        if continued is not None:
            _refuse_other_run(folder, _names(request.strategy)[1])
        if request.checkpoint_interval is not None or continued is not None:
            checkpoints = folder.make_folder("checkpoints", _names(request.strategy)[1])
            program.request = replace(request, resume_from=checkpoints)
        yield RunRecord(folder, program, continued is not None)
    except BaseException:
        if continued is None and not folder.has_trained():
            folder.discard()
        raise
    finally:
        folder.release()


def _refuse_other_run(folder: RunFolder, label: str) -> None:
    """Raise InputError for a run that has come somewhere, and has no checkpoint from which `label` could go on."""
    kept = sorted({path.parent.name for path in folder.path.glob("checkpoints/*/step-*")})
    if file_name(label) not in kept and folder.has_trained():
        there = (
            f"checkpoints of {', '.join(map(visible, kept))}"
            if kept
            else "none (checkpoint_interval= makes some)"
        )
        raise InputError(
            f"fit: resume_from: {visible(folder.path)} has no checkpoint of {label}, but {there}: start a new run"
        )


def _continued(request: FitRequest) -> Path | None:
    """The run folder that `resume_from` names; None where it names none.

    Raises:
        InputError: `out` is another folder.
    """
    if request.resume_from is None or not is_run_folder(Path(request.resume_from)):
        return None
    path = Path(request.resume_from)
    if request.out is not None and Path(request.out).resolve() != path.resolve():
        raise InputError(
            f"fit: resume_from is the run folder {visible(path)}, in which the run continues: leave out "
            f"out={request.out!r}"
        )
    return path


def _names(strategy: Strategy) -> tuple[str, str]:
    """The strategy's name in experiment files, and its label."""
    kind = type(strategy)
    known = next((name for name, each in Strategy.registry.items() if each is kind), None)
    return (f"{kind.__module__}:{kind.__qualname__}", kind.__name__) if known is None else (known, known)


def _plain(value: Any) -> Any:
    if hasattr(value, "to_mapping"):
        return value.to_mapping()
    try:
        return dict(value)
    except (TypeError, ValueError):
        return str(value) if not isinstance(value, tuple) else list(value)


def run_config(request: FitRequest, model: nn.Module) -> dict[str, Any]:
    """Settings of a run for loggers, in plain values."""
    own = {name: value for name, value in vars(request).items() if isinstance(value, _PLAIN)}
    return {
        "model": type(model).__name__,
        "model_parameters": sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        "strategy": type(request.strategy).__name__,
        "strategy_config": plain_arguments(request.strategy),
        "topology": request.topology.name if request.topology is not None else None,
        "hosts": request.hosts,
        "compute": request.compute.to_mapping() if request.compute is not None else None,
        **own,
    }


def make_loggers(request: FitRequest, model: nn.Module, checkpoints: Path | None = None) -> list[Logger]:
    """The loggers that the request names; none where logging is disabled.

    Args:
        request: of the run.
        model: of the run.
        checkpoints: folder of the run's checkpoints, which has the id of its wandb run too.
    """
    loggers: list[Logger] = []
    if request.disable_logging:
        return loggers
    config = run_config(request, model)
    if request.wandb_project is not None:
        id_file = checkpoints / "wandb" if checkpoints is not None else None
        loggers.append(
            WandbLogger(
                request.wandb_project, request.run_name, dict(flat(config)), request.log_x_axis, id_file
            )
        )
    if request.run_name is not None:
        loggers.append(FolderLogger(request.run_name, config))
    return loggers


class Evaluations(SnapshotThread):
    """Evaluation of snapshots: in the turn of the rank that deposits one, or in a thread that no rank waits for.

    The thread starts with the first snapshot: processes forked before do not have it.

    Args:
        observer: evaluates; in that thread alone, until `finish`.
        intra_op_threads: torch's threads for one operator in the thread; they change last bits. None: no thread.

    Attributes:
        num_given, num_taken: snapshots deposited, and those of them that are evaluated.
    """

    def __init__(self, observer: Observer, intra_op_threads: int | None) -> None:
        super().__init__(observer.take, observer.spill, "observer", intra_op_threads)
        self._observer, self._is_inline = observer, intra_op_threads is None
        self.num_given = 0

    def take(self, rank: int, note: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Take a snapshot; its tensors may be reused afterwards.

        Raises an exception that the thread has raised since.
        """
        self.raise_if_failed()
        self.num_given += 1
        if self._is_inline:
            self.num_taken += 1
            self._observer.take(rank, note, tensors)
        else:
            self.put(rank, note, [tensor.clone() for tensor in tensors])

    def finish(self) -> FinalModels:
        """Wait until all snapshots are evaluated; the last has been deposited."""
        self.stop()
        self.raise_if_failed()
        return self._observer.finish()

    def abandon(self) -> None:
        """Drop waiting snapshots, and end the thread."""
        self.failure = self.failure or RuntimeError("the run is over")
        self.stop()


class StoppedError(NetsimError):
    """`on_event` has raised StopIteration: no further rows are wanted."""


def _tell(listener: Callable[[Mapping[str, Any]], None], row: Mapping[str, Any]) -> None:
    try:
        listener(row)
    except StopIteration:
        raise StoppedError(
            f"fit: on_event stopped the run at step {row['step']}; the trainer's `result` has what was done until then"
        ) from None


_COMPLETE = "newest complete checkpoint"


class RunMonitor:
    """Context manager that monitors a run: takes rows and snapshots of its ranks.

    Made before they start, since it prepares `program`.

    Args:
        program: of the ranks.
        result: filled as rows come.
        listeners: called with rows, besides those that the request names.

    Attributes:
        resumed: the checkpoint that the run resumes from; None for a run from the start.
        writer: completes checkpoints.
        recorder: merges rows.
        evaluations: evaluates snapshots, in its own thread or in the depositing rank's turn.
    """

    def __init__(
        self, program: Program, result: FitResult, listeners: Sequence[Callable[[Mapping[str, Any]], None]]
    ) -> None:
        self.resumed = find_resumed(program)
        program.prepare()
        request = program.request
        self.writer = begin_checkpoints(program, self.resumed)
        self._loggers = make_loggers(request, program.model, program.checkpoints.home)
        listening = [*listeners, *(logger.event for logger in self._loggers)]
        if request.on_event is not None:
            listening.append(partial(_tell, request.on_event))
        has_clock, workers = request.carrier.has_clock, program.workers()
        clock = "virtual_seconds" if has_clock else "wall_seconds"
        self.recorder = RowRecorder(result, request.topology is not None, listening, clock)
        self._observed: deque[Mapping[str, Any]] = deque()  # perhaps in another thread
        self._observer = program.observer(self._observed.append, self.writer.observed)
        # Threads take turns with the evaluation; elsewhere it has a thread of its own.
        is_inline = has_clock and workers.in_one_process
        self.evaluations = Evaluations(self._observer, None if is_inline else workers.intra_op_threads)
        self._result = result
        note_settled(result, program)
        for row in self.writer.observed:
            self.recorder.observe(row)
        self._lock = threading.RLock()  # rows may come in several threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(failed=kind is not None)

    @property
    def sinks(self) -> Sinks:
        """Receivers of rows, snapshots and the journal."""
        return Sinks(self.take, self.evaluations.take, self.writer.journal)

    def take(self, marked: StampedRow) -> None:
        """Record a row of a rank."""
        with self._lock:
            self.recorder.add(marked)
            self.writer.add(marked, self._num_deposited_at(marked.row))
            self.settle()

    def _num_deposited_at(self, row: Mapping[str, Any]) -> int:
        """Snapshots of all ranks that have been deposited when a row was marked."""
        return self.evaluations.num_given

    def take_final_models(self) -> None:
        """Wait for the last evaluations, after all rows and snapshots, and keep the models in the result."""
        final = self.evaluations.finish()
        with self._lock:
            self.settle()
        self._result.mean_state, self._result.judged_state = final.mean, final.judged

    def observe(self, row: Mapping[str, Any]) -> None:
        """Record a row of the observer."""
        self.recorder.observe(row)
        self.writer.add_observed(row)

    def settle(self) -> None:
        """Record the rows that the observer has finished since the last call."""
        num_taken = self.evaluations.num_taken  # first: rows that come after it do no harm
        while self._observed:
            self.observe(self._observed.popleft())
        self.writer.settle(num_taken)

    def close(self, failed: bool) -> None:
        """Write what was recorded and release all resources."""
        with self._lock:
            if failed:
                self.evaluations.abandon()
            try:
                self.recorder.finish()  # a listener may press Ctrl-C here too
            finally:
                self.writer.close()
                self.writer.release()
                self._observer.close()
                error = sys.exception() if failed else None
                for logger in self._loggers:
                    close_logger(logger, None if error is None else type(error))


def note_settled(result: FitResult, program: Program) -> None:
    """Note in `result` what is settled before the first step."""
    checkpoints, request = program.checkpoints, program.request
    result.checkpoint_folder = checkpoints.folder
    result.resumed_step = 0 if checkpoints.resumed is None else checkpoints.resumed.step
    result.minibatch_size, result.hosts = request.minibatch_size, request.hosts
    result.compute = program.compute.to_mapping() if program.compute is not None else None


def planned_together(
    program: Program, result: FitResult, host: TorchrunHost, monitor: RunMonitor | None
) -> None:
    """Share the monitoring process's preparations among processes that torchrun has started, off the clock.

    Raises:
        InputError: a rank's part of the checkpoint to resume from is missing; on all of them.
    """
    comm, side = host.comm, host.side

    def newest_complete() -> int:
        return int(side.posted(_COMPLETE) or -1)

    own, refused = None, ""
    with comm.off_clock():
        planned: Mapping[str, Any] = comm.broadcast_object(
            None if monitor is None else plan(program, monitor.resumed)
        )
        if monitor is None:
            try:
                own = follow(program, planned, (comm.rank, comm.world_size), newest_complete)
            except InputError as error:
                refused = str(error)
        refusals = [text for text in comm.all_gather_object(refused) if text]
    if monitor is not None:
        if planned["mark"]:
            (Path(planned["home"]) / planned["mark"]).unlink(missing_ok=True)
        monitor.writer.on_complete = lambda step: side.post(_COMPLETE, str(step))
    if refusals:
        raise InputError("\n".join(refusals))
    if own is not None:
        own.keep_only(planned["resumed step"] or None)
    note_settled(result, program)
