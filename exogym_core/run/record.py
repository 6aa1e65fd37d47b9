"""The run folder that `fit(out=...)` writes, with the files of one that `netgym run` writes."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.config import OPTIONS, PROGRAM_TASK, yaml_text
from exogym_core.names import visible
from exogym_core.results.run_folder import RunFolder
from exogym_core.strategy.base import Strategy
from exogym_core.workers.torchrun.rank import torchrun_rank
from netsim import Protocol
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from exogym_core.results.fit_result import FitResult
    from exogym_core.run.request import FitRequest

__all__ = ["RunRecord", "plain_arguments", "run_record"]

_PLAIN = (bool, int, float, str, type(None))


def plain_arguments(strategy: Strategy) -> dict[str, Any]:
    """Arguments of a strategy by name, as plain values; of others their `repr`."""
    given = sorted(strategy.arguments.items())
    return {name: value if isinstance(value, _PLAIN) else repr(value) for name, value in given}


class RunRecord:
    """Folder of one `fit(out=...)`.

    Args:
        folder: owned by this process.
        request: of the run.
        model, dataset: named in experiment.yaml.
    """

    def __init__(self, folder: RunFolder, request: FitRequest, model: nn.Module, dataset: object) -> None:
        self.folder, self._request = folder, request
        self._name, self.label = _names(request.strategy)
        self._task = {"name": f"{PROGRAM_TASK}{type(dataset).__name__})"}
        given = plain_arguments(request.strategy)
        self._arguments = {name: value for name, value in given.items() if value is not None}
        self._names = list(model.state_dict())
        self._model = {
            "name": type(model).__name__,
            "parameters": sum(each.numel() for each in model.parameters()),
        }

    def begin(self, result: FitResult) -> None:
        """Write what is settled before the first step."""
        self.folder.write_text("experiment.yaml", self._experiment(result))
        self.folder.write_environment()
        self.folder.write_summary([])

    def end(self, result: FitResult) -> None:
        """Write metrics, model, summary and page."""
        from exogym_core.results.report import write_report

        self.folder.write_text("experiment.yaml", self._experiment(result))
        state = {name: result.judged_state[name] for name in self._names} if result.complete else None
        self.folder.write_result(self.label, result, state)
        self.folder.write_summary([result.summary(self.label, self._name)])
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
            "protocol": request.protocol or _protocol_of(request),
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
def run_record(
    request: FitRequest, model: nn.Module, dataset: object
) -> Iterator[tuple[FitRequest, RunRecord | None]]:
    """Folder of a run, owned by this process while the block runs, and the request with its checkpoints in there.

    None where no folder is asked for, and for torchrun's ranks other than rank 0.

    Raises:
        InputError: the folder of `out` is not empty, or is in use.
        RecordError: it cannot be made.
    """
    continued = _continued(request)
    out = request.out if continued is None else continued
    if out is None or torchrun_rank():
        yield replace(request, resume_from=None) if continued is not None else request, None
        return
    if continued is None:
        folder = RunFolder.create(out, "")
    else:
        folder = RunFolder.open(out).owned()
        folder.clean()
        folder.log("resumed")
    try:
        if request.checkpoint_interval is not None or continued is not None:
            checkpoints = folder.make_folder("checkpoints", _names(request.strategy)[1])
            request = replace(request, resume_from=checkpoints)
        yield request, RunRecord(folder, request, model, dataset)
    except BaseException:
        if not folder.has_trained():
            folder.discard()
        raise
    finally:
        folder.release()


def _continued(request: FitRequest) -> Path | None:
    """The run folder that `resume_from` names; None where it names none.

    Raises:
        InputError: `out` is another folder.
    """
    if request.resume_from is None or not (Path(request.resume_from) / "experiment.yaml").is_file():
        return None
    path = Path(request.resume_from)
    if request.out is not None and Path(request.out).resolve() != path.resolve():
        raise InputError(
            f"fit: resume_from is the run folder {visible(path)}, where the run goes on; leave out out={request.out!r}"
        )
    return path


def _names(strategy: Strategy) -> tuple[str, str]:
    """The strategy's name in experiment files, and its label."""
    kind = type(strategy)
    known = next((name for name, each in Strategy.registry.items() if each is kind), None)
    return (f"{kind.__module__}:{kind.__qualname__}", kind.__name__) if known is None else (known, known)


def _protocol_of(request: FitRequest) -> Any:
    if request.topology is None:
        return None
    given = request.topology.protocol
    return Protocol.parse(None).name if given is None else given if isinstance(given, str) else dict(given)


def _plain(value: Any) -> Any:
    if hasattr(value, "to_mapping"):
        return value.to_mapping()
    try:
        return dict(value)
    except (TypeError, ValueError):
        return str(value) if not isinstance(value, tuple) else list(value)
