"""Points of a sweep as Ray tasks, on a cluster's nodes; their run folders come back to this machine.

A task is sent the experiment and the modules beside its file, trains in a folder of its own, and returns that folder's
files. Ray runs it again when its node is lost. Nothing of ours listens on a network.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from exogym_core.app.experiment import Experiment
from exogym_core.app.settings import yaml_text
from exogym_core.app.studies.point_run import failed_by, found_by, train_in
from exogym_core.app.studies.sweep import Here
from exogym_core.names import visible
from exogym_core.ranks.ray.cluster import RayCluster
from exogym_core.results.disk import RecordError
from exogym_core.results.record import RunFolder
from netsim.files.documents import load_document, parse_document
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from types import TracebackType

    from exogym_core.app.studies.estimate import Probe
    from exogym_core.app.studies.point_run import Found, PointRun
    from exogym_core.app.studies.sweep import PointRunner
    from exogym_core.results.fit_result import FitResult

__all__ = ["OnRay", "runner_at"]

_TRIES = 4  # of a point whose node is lost
_MOST_CODE_BYTES = 10_000_000
_NOT_SENT = ("experiment.yaml", "environment.json", "log.txt")


def runner_at(where: str | None, measured: Probe | None) -> AbstractContextManager[PointRunner]:
    """What runs points at a place that a user names: `ray`, a cluster's address, or None (here).

    Raises:
        InputError: it is neither; on entering, there is no such cluster.
    """
    if where is None:
        return contextlib.nullcontext(Here())
    if where not in ("ray", "auto") and ":" not in where:
        raise InputError(
            f"--on {visible(where)}: write --on ray, or the address of a Ray cluster such as 10.0.0.1:6379"
        )
    return OnRay(None if where == "ray" else where, measured)


class OnRay:
    """A place for points: context manager, connected while entered.

    Args:
        address: the cluster's, as `ray.init` takes it; None: that of RAY_ADDRESS, else one that is started on this
            machine and ended on leaving.
        measured: what a point was found to take, whose memory each task asks for; None: nothing was measured.
    """

    def __init__(self, address: str | None, measured: Probe | None) -> None:
        self._cluster = RayCluster(address)
        self._measured = measured

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cluster.__exit__(kind, error, trace)

    def run(self, points: Iterable[PointRun]) -> Iterator[tuple[int, Found]]:
        """Run each, as many side by side as the cluster has room for."""
        waiting = iter(points)
        under_way: dict[Any, tuple[PointRun, RunFolder]] = {}
        more = True
        try:
            while more or under_way:
                while more and len(under_way) < 2 * self._cluster.num_cpus:
                    each = next(waiting, None)
                    if each is None:
                        more = False
                        break
                    folder, _ = each.begin()
                    reference, refused = self._submit(each, folder)
                    if refused is not None:
                        yield each.number, each.end(folder, refused)
                    else:
                        under_way[reference] = each, folder
                for reference in self._cluster.ready(list(under_way), timeout_seconds=1.0):
                    each, folder = under_way.pop(reference)
                    yield each.number, each.end(folder, self._received(reference, folder))
                for each, _ in list(under_way.values())[:1]:
                    each.progress.waiting()
        finally:
            for reference, (_, folder) in under_way.items():
                self._cluster.cancel(reference)
                folder.release()

    def _submit(self, each: PointRun, folder: RunFolder) -> tuple[Any, Found | None]:
        """A point's task, or what came of it already."""
        try:
            experiment = each.experiment(folder)
            job = _Job.of(experiment)
        except RecordError:
            raise
        except Exception as error:
            return None, failed_by(error, folder)
        needs = self._needs(experiment)
        self._cluster.require(needs, f"point {each.number}")
        return self._cluster.submit(_train, job, needs=needs, tries=_TRIES), None

    def _needs(self, experiment: Experiment) -> dict[str, float]:
        """What one of its runs takes of a node, in Ray's words."""
        workers = experiment.settings.workers
        several = workers.kind == "processes"
        cores = min(workers.processes or workers.count, workers.count) if several else 1
        needs: dict[str, float] = {"num_cpus": cores * workers.intra_op_threads}
        devices = experiment.settings.device
        cuda = [name for name in (devices if isinstance(devices, list) else [devices]) if "cuda" in name]
        if cuda:
            needs["num_gpus"] = len(cuda)
        if self._measured is not None:
            needs["memory"] = self._measured.memory_bytes
        return needs

    def _received(self, reference: Any, folder: RunFolder) -> Found:
        """Write down what a task has returned."""
        parcel = self._cluster.result(reference)
        if isinstance(parcel, str):
            return {"failed": True, "error": visible(parcel, 500), "strategies": []}
        assert isinstance(parcel, _Parcel)
        for name, content in parcel.files.items():
            folder.write_text(name, content)
        if parcel.settled:
            stored = _plain(folder.path / "experiment.yaml")
            folder.write_text("experiment.yaml", yaml_text(stored | parcel.settled))
        for line in parcel.log:
            folder.log(line)
        return parcel.found


@dataclass(frozen=True)
class _Job:
    """What a task is sent: the experiment, resolved, and the modules beside its file."""

    experiment: str
    code: Mapping[str, str]
    folder: str  # where the sweep was started, for data that the experiment names by a relative path

    @classmethod
    def of(cls, experiment: Experiment) -> _Job:
        code: dict[str, str] = {}
        for folder in {own.folder for own in experiment.own_code if own.folder is not None}:
            for path in _modules_in(folder):
                code[str(path.relative_to(folder))] = path.read_text(encoding="utf-8")
        if sum(map(len, code.values())) > _MOST_CODE_BYTES:
            raise InputError(
                f"the Python files beside the experiment have more than {_MOST_CODE_BYTES // 10**6} MB: keep its "
                "modules in a folder of their own, or install them on the cluster's nodes"
            )
        mapping = experiment.to_mapping()
        if mapping["workers"]["kind"] == "auto":  # the same bits, and the one core that is asked for
            mapping["workers"]["kind"] = "threads"
        return cls(yaml_text(mapping), code, os.getcwd())


def _modules_in(folder: Path) -> Iterator[Path]:
    """Python files there and in the packages there."""
    yield from sorted(folder.glob("*.py"))
    for package in sorted(folder.glob("*/__init__.py")):
        yield from sorted(package.parent.rglob("*.py"))


@dataclass(frozen=True)
class _Parcel:
    """What a task returns.

    Attributes:
        found: what came of it.
        files: of its folder, but for those that this machine writes.
        settled: keys of the experiment that the run found out, such as a measured `compute`.
        log: lines.
    """

    found: Found
    files: dict[str, bytes]
    settled: dict[str, Any] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


def _train(job: _Job) -> _Parcel:
    """Train one point, on whatever node this is."""
    with TemporaryDirectory(prefix="netgym-point-") as place:
        source = Path(place, "source")
        for name, text in job.code.items():
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        source.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):
            os.chdir(job.folder)
        folder = RunFolder.create(str(Path(place, "run")), "point")
        document = parse_document(job.experiment, "experiment.yaml")
        asked: dict[str, Any] = {}

        def run() -> list[dict[str, Any]]:
            experiment = Experiment.from_document(document, source, "experiment", source)
            asked.update(experiment.to_mapping())
            folder.write_text("experiment.yaml", experiment.to_yaml())
            return train_in(folder, experiment, _Nobody())

        found = found_by(run, folder)
        folder.release()
        files = {
            str(path.relative_to(folder.path)): path.read_bytes()
            for path in sorted(folder.path.rglob("*"))
            if path.is_file() and path.name not in _NOT_SENT and "checkpoints" not in path.parts
        }
        stored = _plain(folder.path / "experiment.yaml") if asked else {}
        settled = {key: value for key, value in stored.items() if value != asked[key]}
        log = folder.path / "log.txt"
        lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
        return _Parcel(found, files, settled, lines)


def _plain(path: Path) -> dict[str, Any]:
    """A resolved experiment's mapping."""
    data = load_document(path).data
    assert isinstance(data, dict)
    return data


class _Nobody:
    """A `Listener`: a task's rows are in its folder."""

    def begin(self, label: str, position: int, num_strategies: int, num_steps: int) -> None:
        """A strategy starts."""

    def event(self, row: Mapping[str, Any]) -> None:
        """A row of metrics."""

    def end(self, result: FitResult) -> None:
        """The strategy is through."""
