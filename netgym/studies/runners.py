"""Points of a sweep as jobs on a cluster's nodes: tasks of Ray, or an array of Slurm.

A job is sent the experiment, the modules next to its file and the recordings that it retimes, runs in a folder of its
own, and returns that folder's files. Nothing of ours listens on a network.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from exogym_core.config import yaml_text
from exogym_core.names import seeded_name, visible
from exogym_core.results.disk import RecordError
from exogym_core.results.progress import warnings_to
from exogym_core.results.reading import find_runs, tidy_rows, write_tables
from exogym_core.results.run_folder import RunFolder
from exogym_core.workers.ray import RayCluster
from netgym.experiment.comparison import TrainedRun, settle_code
from netgym.experiment.experiment import Experiment
from netgym.studies.points import batches_of
from netgym.studies.report import StudyReport
from netgym.studies.slurm import SlurmCluster
from netgym.studies.sweep import (
    PointQueue,
    SweepProgress,
    estimated,
    failed_by,
    found_by,
    run_here,
    run_sweep,
    settle,
    train_in,
)
from netsim.errors import InputError
from netsim.files.documents import load_document, parse_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from netgym.studies.study import Study
    from netgym.studies.sweep import Estimate, Found, PointRun, PointRunner, Probe

__all__ = ["Cluster", "ClusterRunner", "prepare", "run_points", "runner_at", "write_results"]

_TRIES = 4  # of a point whose node is lost
_MOST_CODE_BYTES = 10_000_000
_NOT_SENT = ("experiment.yaml", "environment.json", "log.txt")


@contextlib.contextmanager
def runner_at(where: str | None, measured: Probe | None, jobs: int | None = None) -> Iterator[PointRunner]:
    """The runner for a place that a user names, or for None (this machine).

    Args:
        where: `ray`, the address of a Ray cluster, or `slurm`, with options as in `slurm:partition=gpu,time=2:00:00`.
        measured: the probe of a point, whose memory a job asks for; None: not measured.
        jobs: points at once on this machine; None: as many as cores and memory allow.

    Raises:
        InputError: no such place or cluster, or `jobs` on a cluster.
    """
    cluster = _cluster_at(where, jobs)
    if cluster is None:
        yield partial(run_here, num_jobs=jobs, measured=measured)
        return
    with cluster as pool:
        yield ClusterRunner(pool, measured).run


def _cluster_at(where: str | None, jobs: int | None) -> SlurmCluster | RayCluster | None:
    """The cluster for a place, not connected yet; None for this machine."""
    if where is None:
        return None
    if jobs is not None:
        raise InputError(
            f"--jobs {jobs}: is for this machine, and --on {visible(where)} is not: leave one out"
        )
    kind, separator, options = where.partition(":")
    if kind == "slurm":
        return SlurmCluster(options)
    if where not in ("ray", "auto") and not separator:
        raise InputError(
            f"--on {visible(where)}: write --on ray, --on slurm, or the address of a Ray cluster such as 10.0.0.1:6379"
        )
    return RayCluster(None if where == "ray" else where)


def run_points(
    study: Study,
    write: Callable[..., None],
    place: str | None = None,
    jobs: int | None = None,
) -> None:
    """Run a sweep's points, after an estimate of time and memory where several are left.

    Args:
        study: in its folder.
        write: a `LineWriter`.
        place, jobs: see `runner_at`.

    Raises:
        InputError: the code was edited since the first results, which is not accepted; or there is no such place.
    """
    _cluster_at(place, jobs)  # refused before the estimate runs
    if study.is_changed or not all(map(study.finished, range(study.sweep.num_points))):
        with warnings_to(write):
            settle_code(study.folder, study.own_code(), accepted=study.edited_code)
    if not study.entries:
        study.refuse_untaken(own_code=True)
    measured, found = prepare(study, write, place, jobs)
    with runner_at(place, measured, jobs) as runner:
        run_sweep(study, SweepProgress(write, study.sweep.num_points, found), runner)
    study.folder.log("done")


def prepare(
    study: Study, write: Callable[[str], None], place: str | None, jobs: int | None
) -> tuple[Probe | None, Estimate | None]:
    """Settle points of a changed sweep, and write the estimate where several are left; returns probe and estimate.

    At a place, one is enough: its nodes are asked for the memory that the probe has measured.
    """
    if study.is_changed:
        settle(study, 0, next(batches_of(study.sweep))[0], write)

    def num_left() -> int:
        return sum(study.finished(number) is None for number in range(study.sweep.num_points))

    if num_left() and (others := study.reopen_judged_otherwise()):
        numbers = ", ".join(str(number + 1) for number in others)
        write(f"trained again, as an earlier version judged another model: point {numbers}")
    if num_left() < (1 if place else 2):
        return None, None
    line, measured, found = estimated(study, 1 if place else jobs)
    write(line)
    return measured, found


def write_results(study: Study) -> StudyReport | None:
    """Write a sweep's tables and page, if a strategy of a point has ended; returns the report."""
    if not any(entry.get("strategies") for entry in study.entries):
        return None
    path = study.folder.path
    write_tables(study.folder, tidy_rows(find_runs([path])))
    report = StudyReport([path])
    study.folder.write_text("report.html", report.html())
    return report


class Cluster(Protocol):
    """A cluster that runs calls: `RayCluster` or `SlurmCluster`."""

    def room(self, num_under_way: int) -> int:
        """Number of calls to submit now."""

    def require(self, needs: Mapping[str, float], who: str) -> None:
        """Raise InputError if the cluster can never hold a call with these `needs`."""

    def batch(self, folder: Path) -> AbstractContextManager[None]:
        """Block that submits calls, which may then be submitted at its end; `folder` is of the sweep."""

    def submit(self, call: Callable[..., Any], job: Any, *, needs: Mapping[str, float], tries: int) -> Any:
        """Run `call(job)` on a node; returns a reference."""

    def ready(self, references: Sequence[Any], timeout_seconds: float) -> Sequence[Any]:
        """Finished references, waiting up to `timeout_seconds` for the first."""

    def result(self, reference: Any) -> Any:
        """Result of a call, or a text with the cause where there is none."""

    def cancel(self, reference: Any) -> None:
        """Cancel a submitted call that has not ended."""


class ClusterRunner:
    """Runs points on the nodes of a cluster.

    Args:
        pool: the cluster, connected.
        measured: the probe of a point, whose memory each job asks for; None: not measured.
    """

    def __init__(self, pool: Cluster, measured: Probe | None) -> None:
        self._pool, self._measured = pool, measured

    def run(self, points: Sequence[PointRun]) -> Iterator[tuple[int, Found]]:
        """Run points, as many at once as the cluster has room for."""
        queue = PointQueue(points)
        under_way: dict[Any, tuple[PointRun, RunFolder]] = {}
        try:
            while queue.waiting or under_way:
                room, refused = self._pool.room(len(under_way)), []
                with self._pool.batch(points[0].study.folder.path):
                    while room > 0 and (each := queue.take()) is not None:
                        folder, _ = each.begin()
                        try:
                            experiment = each.experiment(folder)
                            job = _Job.of(experiment, folder.path.name, each.sources)
                        except RecordError:
                            raise
                        except Exception as error:
                            queue.end(each)
                            refused.append((each.number, each.end(folder, failed_by(error, folder))))
                            continue
                        needs = self._needs(experiment)
                        self._pool.require(needs, f"point {each.number}")
                        under_way[self._pool.submit(_train, job, needs=needs, tries=_TRIES)] = each, folder
                        room -= 1
                yield from refused
                for reference in self._pool.ready(list(under_way), timeout_seconds=1.0):
                    each, folder = under_way.pop(reference)
                    queue.end(each)
                    yield each.number, each.end(folder, self._received(reference, folder))
                for each, _ in list(under_way.values())[:1]:
                    each.progress.waiting(len(under_way))
        finally:
            for reference, (_, folder) in under_way.items():
                self._pool.cancel(reference)
                folder.release()

    def _needs(self, experiment: Experiment) -> dict[str, float]:
        """Resources of a node that a run takes: `num_cpus`, `num_gpus`, `memory` (bytes)."""
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
        """Write the files that a job returned."""
        parcel = self._pool.result(reference)
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
        for name, source in parcel.retimed.items():
            folder.note_retimed(name, source)
        for label, reason in parcel.again.items():
            folder.note_trained_again(label, reason)
        return parcel.found


@dataclass(frozen=True)
class _Job:
    """Input of a job.

    Attributes:
        experiment: resolved.
        code: modules next to its file, by path.
        folder: the sweep's working directory, for relative paths of data.
        name: of the point's folder.
        sources: of strategies that another point has trained alike, by label: that folder's name, and the label there.
        recorded: files of these trainings, by path from the folder of points.
    """

    experiment: str
    code: Mapping[str, str]
    folder: str
    name: str
    sources: Mapping[str, tuple[str, str]]
    recorded: Mapping[str, bytes]

    @classmethod
    def of(cls, experiment: Experiment, name: str, sources: Mapping[str, TrainedRun]) -> _Job:
        code: dict[str, str] = {}
        for folder in {own.folder for own in experiment.own_code if own.folder is not None}:
            inside = [path.parent.rglob("*.py") for path in folder.glob("*/__init__.py")]  # of its packages
            for path in sorted(itertools.chain(folder.glob("*.py"), *inside)):
                code[str(path.relative_to(folder))] = path.read_text(encoding="utf-8")
        if sum(map(len, code.values())) > _MOST_CODE_BYTES:
            raise InputError(
                f"the Python files next to the experiment have more than {_MOST_CODE_BYTES // 10**6} MB: keep its "
                "modules in a folder of their own, or install them on the cluster's nodes"
            )
        mapping = experiment.to_mapping()
        if mapping["workers"]["kind"] == "auto":  # the same bits, on one core
            mapping["workers"]["kind"] = "threads"
        seeds = experiment.seeds if len(experiment.seeds) > 1 else [None]
        recorded = {
            path.relative_to(source.folder.parent).as_posix(): path.read_bytes()
            for source in sources.values()
            for seed in seeds
            for kind in ("requests", "model")
            if (path := RunFolder(source.folder).place(kind, seeded_name(source.label, seed))).is_file()
        }
        names = {label: (source.folder.name, source.label) for label, source in sources.items()}
        return cls(yaml_text(mapping), code, os.getcwd(), name, names, recorded)


@dataclass(frozen=True)
class _Parcel:
    """Output of a job.

    Attributes:
        found: the result.
        files: of its folder, without those that the sweep's process writes.
        settled: keys of the experiment that the run determined, such as a measured `compute`.
        log: lines.
        retimed: names of runs that were retimed, with the folder in which each was trained.
        again: strategies that could not be retimed, by label, with the reason.
    """

    found: Found
    files: dict[str, bytes]
    settled: dict[str, Any]
    log: list[str]
    retimed: dict[str, str]
    again: dict[str, str]


def _train(job: _Job) -> _Parcel:
    """Train or retime one point in a temporary folder, beside the folders of what it retimes."""
    with TemporaryDirectory(prefix="netgym-point-") as place:
        source = Path(place, "source")
        for name, text in job.code.items():
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        source.mkdir(exist_ok=True)
        with contextlib.suppress(OSError):
            os.chdir(job.folder)
        points = Path(place, "points")
        for name, content in job.recorded.items():
            path = points / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        sources = {label: TrainedRun(points / name, other) for label, (name, other) in job.sources.items()}
        folder = RunFolder.create(str(points / job.name), "point")
        document = parse_document(job.experiment, "experiment.yaml")
        asked: dict[str, Any] = {}

        def run() -> list[dict[str, Any]]:
            experiment = Experiment.from_document(document, source, "experiment", source)
            asked.update(experiment.to_mapping())
            folder.write_text("experiment.yaml", experiment.to_yaml())
            unheard = SweepProgress(lambda *line: None, 1).point(0, "")  # rows are in the folder
            return train_in(folder, experiment, unheard, sources=sources)

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
        return _Parcel(found, files, settled, lines, folder.read_retimed(), folder.read_trained_again())


def _plain(path: Path) -> dict[str, Any]:
    """A resolved experiment's mapping."""
    data = load_document(path).data
    assert isinstance(data, dict)
    return data
