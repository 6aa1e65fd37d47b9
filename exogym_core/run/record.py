"""Folder of `fit(out=...)`: what is written before, while and after a run trains, and which run may go on there."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.config import OPTIONS, resolved_protocol, yaml_text
from exogym_core.names import PROGRAM_TASK, file_name, strategy_name, visible
from exogym_core.results.disk import warned
from exogym_core.results.progress import shown
from exogym_core.results.run_folder import RunFolder, is_run_folder
from exogym_core.run.snapshots import passing_buffers
from exogym_core.strategy.base import Strategy
from netsim.errors import InputError
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from exogym_core.results.fit_result import FitResult
    from exogym_core.run.program import Program
    from exogym_core.run.request import FitRequest

    Listener = Callable[[Mapping[str, Any]], None]

__all__ = ["PLAIN", "RunRecord", "followed", "plain_arguments"]

PLAIN = (bool, int, float, str, type(None))


def plain_arguments(strategy: Strategy) -> dict[str, Any]:
    """Arguments of a strategy by name, as plain values; of others their `repr`."""
    given = sorted(strategy.arguments.items())
    return {name: value if isinstance(value, PLAIN) else repr(value) for name, value in given}


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
        self._held: list[str] = []  # lines of a run that has not begun to go on
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
            self.folder.log(f"resumed after {format_count(result.resumed_step, 'step')}")
        for line in self._held:
            self.folder.log(line)
        self.folder.write_text("experiment.yaml", self._experiment(result))
        self.folder.write_environment()
        self.folder.write_summary([])
        self._has_begun = True

    def log(self, line: str) -> None:
        """Add a line to the folder's log: of a run that goes on, from its first own step on."""
        if self.is_continued and not self._has_begun:
            self._held.append(line)
        else:
            self.folder.log(line)

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
            place[last] = value if isinstance(value, (*PLAIN, dict, list)) else _plain(value)
        if request.checkpoint_interval is None:
            plain["checkpoint"] = None
        return yaml_text(plain)


@contextmanager
def followed(program: Program, result: FitResult) -> Iterator[list[Listener]]:
    """Write the run's folder and show its progress, where these are asked for; gives the functions that take its rows.

    Raises:
        InputError: the folder of `out` is not empty, or is in use.
        RecordError: it cannot be made.
    """
    request = program.request
    is_quiet = not request.progress or bool(request.place)
    with _record(program) as record:
        listeners: list[Listener] = []
        if record is not None and record.is_continued:
            listeners.append(partial(record.follow, result))
        elif record is not None:
            record.begin(result)
        try:
            if record is None and is_quiet:
                yield listeners
                return
            name = request.run_name or result.strategy
            log, folder = (_nothing, None) if record is None else (record.log, record.folder.path)
            with shown(name, result, log, folder, is_quiet=is_quiet) as show:
                yield [*listeners, show]
        finally:
            if record is not None:
                record.end(result)


def _nothing(line: str) -> None:
    """Drop a line of the log: there is no folder."""


@contextmanager
def _record(program: Program) -> Iterator[RunRecord | None]:
    """Folder of a run, owned by this process while the block runs; the program gets its checkpoints in there.

    None where no folder is asked for, and for ranks other than the first of those that torchrun started for the run.
    """
    request = program.request
    continued = _continued(request)
    out = request.out if continued is None else continued
    if out is None or request.place:
        if continued is not None:
            request.resume_from = None
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
            request.resume_from = checkpoints
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
    name, kind = strategy_name(strategy), type(strategy)
    is_known = Strategy.registry.get(name) is kind
    return (name if is_known else f"{kind.__module__}:{kind.__qualname__}", name)


def _plain(value: Any) -> Any:
    if hasattr(value, "to_mapping"):
        return value.to_mapping()
    try:
        return dict(value)
    except (TypeError, ValueError):
        return str(value) if not isinstance(value, tuple) else list(value)
