"""Folder of `fit(out=...)`: what is written before, while and after a run trains, and which run may go on there."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
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
        result: of the run.
        is_continued: a run has begun there, which stays as it is until there is a step that it had not done.
    """

    def __init__(self, folder: RunFolder, program: Program, result: FitResult, is_continued: bool) -> None:
        self._folder, self._program, self._result = folder, program, result
        self._is_continued, self._has_begun = is_continued, False
        self._held: list[str] = []  # lines of a run that has not begun to go on
        self._name, self._label = _names(program.request.strategy)
        if not is_continued:
            self._begin()

    def _begin(self) -> None:
        """Write what is settled before the first step."""
        if self._is_continued:
            self._folder.log(f"resumed after {format_count(self._result.resumed_step, 'step')}")
        for line in self._held:
            self._folder.log(line)
        self._folder.write_text("experiment.yaml", self._experiment())
        self._folder.write_environment()
        self._folder.write_summary([])
        self._has_begun = True

    def log(self, line: str) -> None:
        """Add a line to the folder's log: of a run that goes on, from its first own step on."""
        if self._has_begun:
            self._folder.log(line)
        else:
            self._held.append(line)

    def follow(self, row: Mapping[str, Any]) -> None:
        """Take a row; a run that goes on begins with its first own step."""
        if not self._has_begun and row["kind"] == "step" and row["step"] > self._result.resumed_step:
            self._begin()

    def end(self) -> None:
        """Write metrics, model, summary and page; nothing where no step was done."""
        folder, result, judged = self._folder, self._result, self._result.judged_state
        if not result.complete and not (self._has_begun and result.history):
            return
        from exogym_core.results.report import write_report

        folder.write_text("experiment.yaml", self._experiment())
        folder.write_result(self._label, result)
        folder.write_summary([result.summary(self._label, self._name)])
        folder.record_tables(are_final=True)
        if result.complete:
            passing = passing_buffers(self._program.model).keys()
            folder.write_model(self._label, {name: judged[name] for name in judged if name not in passing})
        with warned(f"{visible(folder.path)}: has no page yet (netgym report writes one)"):
            write_report(folder)

    def _experiment(self) -> str:
        """The request in the form of a resolved experiment file."""
        request, model, result = self._program.request, self._program.model, self._result
        arguments = plain_arguments(request.strategy).items()
        own = {
            "autocast": request.autocast or False,
            "num_nodes": request.num_nodes,
            "max_steps": result.max_steps or request.max_steps,
            "workers": request.workers.model_dump(exclude={"num_gpus"}),
            "device": str(request.device or "auto"),
            "topology": None if request.topology is None else request.topology.to_mapping(),
            "protocol": resolved_protocol(request.protocol, request.topology),
            "compute": result.compute
            or (request.compute.model_dump() if request.compute is not None else None),
        }
        plain: dict[str, Any] = {
            "name": self._folder.path.resolve().name,
            "task": {"name": f"{PROGRAM_TASK}{type(self._program.train_dataset).__name__})"},
            "model": {
                "name": type(model).__name__,
                "parameters": sum(each.numel() for each in model.parameters()),
            },
            "strategies": [
                {
                    "name": self._name,
                    "label": self._label,
                    **{name: value for name, value in arguments if value is not None},
                }
            ],
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

    This process owns the folder while the block runs; the program gets its checkpoints in there. Ranks other than the
    first of those that torchrun started for the run have none.

    Raises:
        InputError: the folder of `out` is not empty, or is in use.
        RecordError: it cannot be made.
    """
    request, continued = program.request, _continued(program.request)
    title, is_quiet = request.run_name or result.strategy, not request.progress or bool(request.place)
    if request.place or (request.out is None and continued is None):
        if continued is not None:
            request.resume_from = None
        with (
            nullcontext()
            if is_quiet
            else shown(title, result, lambda line: None, None, is_quiet=False) as show
        ):
            yield [] if show is None else [show]
        return
    if continued is None:
        folder = RunFolder.create(request.out, "")
    else:
        folder = RunFolder.open(continued).owned()
        folder.clean()
    try:
        label = _names(request.strategy)[1]
        if continued is not None:
            _refuse_other_run(folder, label)
        if request.checkpoint_interval is not None or continued is not None:
            request.resume_from = folder.make_folder("checkpoints", label)
        record = RunRecord(folder, program, result, continued is not None)
        try:
            with shown(title, result, record.log, folder.path, is_quiet=is_quiet) as show:
                yield [record.follow, show]
        finally:
            record.end()
    except BaseException:
        folder.discard_if_untrained()
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
