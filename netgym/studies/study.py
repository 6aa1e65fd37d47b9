"""A sweep's folder: the experiment, and the result of each point. Written whole at every point's end.

study = Study.create(document, folder_of_the_file, out=None, name="digits")     # runs/digits-sweep-1
study.experiment_at({"steps": 20})           # the experiment of one point
study.note(point, {"failed": True, ...})     # in summary.json
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from exogym_core.config import yaml_text
from exogym_core.names import visible
from exogym_core.results.progress import NotebookBar
from exogym_core.results.reading import POINTS, is_study
from exogym_core.results.run_folder import RunFolder, code_folder_of, is_own, require_folder, require_own
from netgym.experiment.comparison import add_seeds, judged_otherwise
from netgym.experiment.experiment import (
    Experiment,
    apply_values,
    differing_key,
    more_seeds,
    refuse_replaced,
)
from netgym.studies.points import Range, Sweep, batches_of, point_text
from netsim import Topology
from netsim.cli.terminal import plain_console
from netsim.errors import InputError
from netsim.files.documents import Document, load_document
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from netgym.experiment.own_code import OwnCode
    from netgym.studies.points import Point
    from netsim.files.documents import KeyPath

__all__ = [
    "LineWriter",
    "Study",
    "check_sweep",
    "over_networks",
    "read_experiment",
    "refuse_set_twice",
    "with_sweep",
]

_NAMING_CODE = {"task", "model", "strategies"}  # keys whose values may be a module:callable
_MOST_KEPT = 500  # experiments of points, of some 0.1 MB each
_CHANGED = ".changed"  # file in the folder of a sweep whose points may be of another experiment
_MOVED, _REMOVED = "moved", "removed"  # folders: of points between two numbers, of one that goes


def read_experiment(experiment: str | Path | Mapping[str, Any]) -> tuple[Document, Path, str]:
    """Document, folder and name of an experiment's file, or of a mapping, whose paths are relative to here."""
    if isinstance(experiment, Mapping):
        return Document("experiment", copy.deepcopy(dict(experiment))), Path(), "experiment"
    path = Path(experiment)
    return load_document(path), path.parent, path.stem


def with_sweep(
    document: Document, keys: Mapping[str, Any], origins: Mapping[str, str] | None = None
) -> Document:
    """The document with these keys in its `sweep`, beside those of the file; `origins` begin errors about some.

    Raises:
        InputError: a key is set by --set too.
    """
    if not isinstance(document.data, dict):
        return document  # the schema names the mistake
    refuse_set_twice(document, [("sweep", key) for key in keys])
    swept = {**(document.data.get("sweep") or {}), **keys}
    replaced = {("sweep", key) for key in keys}
    lines = {at: line for at, line in document.lines.items() if at[:2] not in replaced}
    lines |= {("sweep", key): origin for key, origin in (origins or {}).items()}
    return replace(document, data={**document.data, "sweep": swept}, lines=lines) if swept else document


def refuse_set_twice(document: Document, paths: Iterable[KeyPath]) -> None:
    """Raise InputError if an option such as --set gives one of `paths`, which another option replaces."""
    for path in paths:
        if str(document.lines.get(path)).startswith("--"):
            raise document.error(path, "another option gives it too: leave one of them out")


def over_networks(
    document: Document, networks: Sequence[Any], experiment: Experiment | None, origin: str
) -> Document:
    """The document with a sweep over networks in place of its own, and the strategies of `experiment` alone.

    Errors about the networks begin with `origin`.
    """
    data = dict(document.data) if isinstance(document.data, dict) else {}
    if experiment is not None:
        data["strategies"] = [entry.to_mapping() for entry in experiment.strategies]
    lines = {**document.lines, ("topology",): origin}
    of_networks = replace(document, data={**data, "sweep": {}}, lines=lines)
    return with_sweep(of_networks, {"topology": list(networks)}, {"topology": origin})


class LineWriter:
    """Writes lines to stderr and to the folder's log; in a notebook those of a sweep's points share a bar."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder, self._console = folder, plain_console(stderr=True)
        self._bar: NotebookBar | None = None

    def __call__(self, line: str, done: float | None = None, num_points: int = 1) -> None:
        """Write a line; of a sweep, with its number of finished points and of all."""
        self._folder.log(line)
        if done is None or not self._console.is_jupyter:
            self._console.print(Text(line), soft_wrap=True)
            return
        self._bar = self._bar or NotebookBar(num_points, line)
        self._bar.update(done, line)
        if done >= num_points:  # the next one is of another sweep
            self._bar = None


def check_sweep(file: Path) -> str:
    """Read the sweep of an experiment file and check every point of a grid; returns a line that counts the points."""
    study = Study.planned(load_document(file), file.parent)
    for point in study.sweep.grid() if study.sweep.search == "grid" else ():
        study.experiment_at(point)
    return f"a sweep of {format_count(study.sweep.num_points, 'point')}"


@dataclass
class Study:
    """A sweep in its folder.

    Attributes:
        document: the experiment as it was given, with its `sweep`; topologies inlined, so that it stands alone.
        sweep: its points.
        folder: of the sweep.
        edited_code: resume although the user's code was edited since.
        is_changed: the folder is another user's, or its experiment was changed since: begun points may be of another.
        entries: one object a point that has been begun, in order: `name` (of its folder), `point`, and `failed`
            with `error`, `incomplete`, or `strategies`: the objects of its own summary.
    """

    document: Document
    sweep: Sweep
    folder: RunFolder
    source_folder: Path
    entries: list[dict[str, Any]] = field(default_factory=list)
    is_changed: bool = False
    edited_code: bool = False
    # By folder, and point as JSON.
    _experiments: dict[tuple[Path, str], Experiment] = field(default_factory=dict)

    @classmethod
    def planned(cls, document: Document, source_folder: Path) -> Study:
        """Study without a folder: nothing is written.

        Raises:
            InputError: the sweep or the experiment is wrong, or no point takes one of the sweep's values.
        """
        document = _inlined(document, source_folder)
        study = cls(document, Sweep.parse(document), RunFolder(source_folder), source_folder)
        study.base()
        study.refuse_untaken()
        study._refuse_replaced()
        return study

    def refuse_untaken(self, *, own_code: bool = False) -> None:
        """Refuse a value of the sweep that no point takes; with `own_code`, strategies of the user's are tried too.

        Raises:
            InputError: of the first such value.
        """
        sweep, taken, refused = self.sweep, set[tuple[str, str]](), dict[tuple[str, str], InputError]()
        for point in next(batches_of(sweep))[0]:
            values = {
                (key, "" if isinstance(sweep.axes.get(key), Range) else json.dumps(value, sort_keys=True))
                for key, value in point.items()
            }
            try:
                if not values <= taken:
                    found = self.experiment_at(point)
                    for entry in found.strategies:
                        if own_code and entry.own_code:
                            found.build_strategy(entry)
                    taken |= values
            except InputError as error:
                for each in values:
                    refused.setdefault(each, error)
        for each, refusal in refused.items():
            if each not in taken:
                raise refusal

    def _refuse_replaced(self) -> None:
        """Refuse an option such as --set or --topology whose value every point replaces by its own."""
        sweep, (first, *others) = self.sweep, self.sweep.listed
        values: list[tuple[str, Any, KeyPath]] = [
            (key, each.low if isinstance(each, Range) else each[0], ("sweep", key))
            for key, each in sweep.axes.items()
        ]
        values += [
            (key, value, ("sweep", "points", 0, key))
            for key, value in first.items()
            if all(key in other for other in others)
        ]
        if sweep.seeds is not None:
            values.append(("seeds", sweep.seeds, ("sweep", "seeds")))
        refuse_replaced(self.document, values, self.source_folder)

    @classmethod
    def create(cls, document: Document, source_folder: Path, out: str | None, name: str) -> Study:
        """Make a new folder, `out` or `runs/<name>-sweep-<n>`; nothing is trained.

        Raises:
            InputError: the sweep, the experiment or `out` is wrong.
        """
        study = cls.planned(document, source_folder)
        document, base = study.document, study.base()
        name = str(base.settings.name if base.settings.name != "experiment" else name)
        study.folder = RunFolder.create(out, f"{name}-sweep")
        assert isinstance(document.data, dict)
        study.folder.write_text("experiment.yaml", yaml_text({"name": name} | document.data))
        code_folder = next((code.folder for code in study.own_code() if code.folder), None)
        study.folder.write_environment(code_folder)
        study.folder.make_folder(POINTS)
        study.folder.write_summary([])
        return study

    @classmethod
    def open(cls, path: Path, *, trust: bool = False, edited_code: bool = False) -> Study:
        """Open an existing folder.

        Raises:
            InputError: it is no sweep's, it is damaged, or another user made it and there is no `trust`.
        """
        require_folder(path)
        if not is_study(path):
            raise InputError(f"{visible(path)}: is no sweep's folder: it has no {POINTS} and experiment.yaml")
        if not trust:
            require_own(path, "sweep")
        folder = RunFolder.open(path)
        document = load_document(path / "experiment.yaml")
        entries = folder.read_summary()
        is_changed = not is_own(path) or (path / _CHANGED).exists()
        return cls(document, Sweep.parse(document), folder, path, entries, is_changed, edited_code)

    def experiment_at(self, point: Point) -> Experiment:
        """The experiment with the keys of `point` replaced.

        Raises:
            InputError: the point makes no valid experiment; the line names the point.
        """
        key = self.folder.path, json.dumps(point, default=repr)
        if (known := self._experiments.get(key)) is not None:
            return known
        origin = f"point {self.point_text(point)}"
        document = apply_values(self.document, point, origin, self.source_folder) if point else self.document
        if not isinstance(document.data, dict):
            raise document.error((), "is not an experiment: expected a mapping")
        data = {key: value for key, value in document.data.items() if key not in ("sweep", "scales", "tune")}
        if self.sweep.seeds is not None:
            data["seeds"] = self.sweep.seeds
        code_folder = code_folder_of(self.folder.path)
        document = replace(document, data=data)
        found = Experiment.from_document(document, self.source_folder, "experiment", code_folder)
        if len(self._experiments) < _MOST_KEPT:
            self._experiments[key] = found
        return found

    def point_text(self, point: Point) -> str:
        """The point on one line, distinct among the sweep's."""
        return point_text(point, self._texts)

    @cached_property
    def _texts(self) -> dict[str, dict[str, str]]:
        return self.sweep.texts()

    def base(self) -> Experiment:
        """The experiment of no point; where only points have a network, with the first one's, which times need."""
        data, values = self.document.data, self.sweep.axes.get("topology")
        networks = (
            values if isinstance(values, list) else [each.get("topology") for each in self.sweep.listed]
        )
        is_open = isinstance(data, dict) and data.get("topology") is None and networks[0] is not None
        return self.experiment_at({"topology": networks[0]} if is_open else {})

    def own_code(self) -> list[OwnCode]:
        """Places of the user's code that the experiment and values of its points name, each once."""
        points: list[Point] = [{}, *self.sweep.listed]
        for key, values in self.sweep.axes.items():
            points += [{key: value} for value in values] if isinstance(values, list) else []
        found: dict[OwnCode, None] = dict.fromkeys(self.base().own_code)
        for point in points:
            if _NAMING_CODE & {key.partition(".")[0] for key in point}:
                with contextlib.suppress(InputError):  # the point will report it
                    found |= dict.fromkeys(self.experiment_at(point).own_code)
        return list(found)

    def point_folder(self, number: int) -> RunFolder:
        """The run folder of the point of that number, counted from 0; made where it is not there."""
        return RunFolder(self.folder.make_folder(POINTS, _name(number)))

    def entry(self, number: int) -> dict[str, Any] | None:
        """Entry of the point with that number; None: not begun."""
        return next((entry for entry in self.entries if entry["name"] == _name(number)), None)

    def finished(self, number: int) -> dict[str, Any] | None:
        """Entry of the point with that number, if it has ended well and its folder is there."""
        found = self.entry(number)
        is_over = found is not None and not (found.get("failed") or found.get("incomplete"))
        stored = self.folder.path / POINTS / _name(number) / "experiment.yaml"
        return found if is_over and stored.is_file() else None

    def difference(self, number: int, point: Point) -> str | None:
        """First key in which the begun point of that number is of another experiment than `point`; None: of the same.

        Raises:
            InputError: `point` makes no valid experiment.
        """
        known, stored = self.entry(number), self.folder.path / POINTS / _name(number) / "experiment.yaml"
        if known is None:
            return None
        now = json.loads(json.dumps(point, default=str))
        if known["point"] != now:
            before = known["point"]
            return next(str(key) for key in [*now, *before] if now.get(key) != before.get(key))
        asked = self.experiment_at(point)
        is_there = stored.is_file()  # which a process that was killed may have removed
        return differing_key(Experiment.load(stored, trust=True), asked) if is_there else "experiment"

    def extend(self, number: int, point: Point) -> bool:
        """Have a begun point continue with seeds that were added to its own; returns whether some were.

        Raises:
            InputError: `point` makes no valid experiment.
        """
        known, folder = self.entry(number), self.folder.path / POINTS / _name(number)
        if known is None or not (folder / "experiment.yaml").is_file():
            return False
        stored, asked = Experiment.load(folder / "experiment.yaml", trust=True), self.experiment_at(point)
        more = stored.with_settings(seed=asked.settings.seed, seeds=asked.settings.seeds)
        if not set(stored.seeds) < set(asked.seeds) or differing_key(more, asked):
            return False
        # First, so that none is left out after a kill.
        self.note(number, point, {**known, "incomplete": True})
        add_seeds(RunFolder(folder), stored, asked.seeds)
        return True

    def reopen_judged_otherwise(self) -> list[int]:
        """Mark points as incomplete of which an earlier version judged another model; returns their numbers."""
        found = []
        for number, entry in ((int(each["name"]), each) for each in self.entries):
            with contextlib.suppress(InputError):  # of a changed sweep
                if self.finished(number) and judged_otherwise(
                    self.experiment_at(entry["point"]), entry["strategies"]
                ):
                    entry["incomplete"] = True
                    found.append(number)
        if found:
            self.folder.write_summary(self.entries)
        return found

    def with_seeds(self, seeds: object) -> Study:
        """The sweep with more seeds, which is written to its folder: points keep the results that they have.

        Raises:
            InputError: not all of its seeds are among the new ones; or points have seeds of their own.
        """
        data = copy.deepcopy(self.document.data)
        assert isinstance(data, dict)
        if any({"seed", "seeds"} & point.keys() for point in [self.sweep.axes, *self.sweep.listed]):
            where = visible(self.folder.path)
            raise InputError(f"--seeds: points of {where} have seeds of their own: edit its experiment.yaml")
        seeds = more_seeds(self.base().seeds, seeds, self.folder.path)
        (data if self.sweep.seeds is None else data["sweep"])["seeds"] = seeds
        document = replace(self.document, data=data)
        more = replace(self, document=document, sweep=Sweep.parse(document), is_changed=True, _experiments={})
        more.base()
        self.begin_change()
        self.folder.write_text("experiment.yaml", yaml_text(data))
        return more

    def begin_change(self) -> None:
        """Note in the folder that points may be of another experiment than the sweep, until `end_change`."""
        (self.folder.path / _CHANGED).touch()

    def end_change(self) -> None:
        """Seal the folder, of which all points are of the sweep's experiment: another --resume needs no --trust."""
        self.folder.seal()
        (self.folder.path / _CHANGED).unlink()

    def renumber(self, moved: Mapping[int, int]) -> None:
        """Give points other numbers, old -> new, and rename them where retimed runs name their folders."""
        points = self.folder.path / POINTS
        others = {_name(old): _name(new) for old, new in moved.items() if old != new}
        names = {f"../{old}": f"../{others.get(old, old)}" for old in (each["name"] for each in self.entries)}
        for entry in self.entries:
            old, retimed = entry["name"], RunFolder(points / entry["name"]).read_retimed()
            sources = {run: names.get(place, "a point that was removed") for run, place in retimed.items()}
            entry |= {"name": others.get(old, old), "moved": {"from": old, "sources": sources}}
        for old in others:
            if (points / old).is_dir():
                (points / old).rename(self.folder.make_folder(_MOVED) / old)
        self.entries.sort(key=lambda each: str(each["name"]))
        # A process that is killed before this keeps the old numbers, one killed later gets the new ones.
        self.folder.write_summary(self.entries)
        self.finish_change()

    def finish_change(self) -> None:
        """Finish what a process that was killed began: points between two numbers get their places."""
        points, aside = self.folder.path / POINTS, self.folder.path / _MOVED
        shutil.rmtree(self.folder.path / _REMOVED, ignore_errors=True)
        now = {each["moved"]["from"]: each["name"] for each in self.entries if "moved" in each}
        for place in sorted(aside.iterdir()) if aside.is_dir() else ():
            place.rename(points / now.get(place.name, place.name))
        for entry in self.entries if now else ():
            if sources := entry["moved"]["sources"]:
                RunFolder(points / entry["name"]).replace_sources(sources)
        if now:
            self.entries = [{key: entry[key] for key in entry if key != "moved"} for entry in self.entries]
            self.folder.write_summary(self.entries)
        shutil.rmtree(aside, ignore_errors=True)

    def discard(self, number: int) -> None:
        """Remove the point of that number and its folder, of which a kill leaves all or nothing in its place."""
        place, removed = self.folder.path / POINTS / _name(number), self.folder.path / _REMOVED
        if place.is_dir():
            place.rename(removed)
        self.entries = [entry for entry in self.entries if entry["name"] != place.name]
        self.folder.write_summary(self.entries)
        shutil.rmtree(removed, ignore_errors=True)

    def note(self, number: int, point: Point, found: dict[str, Any]) -> None:
        """Write a point's result."""
        entry = {"name": _name(number), "point": point, **found}
        # As it will be read back.
        entry = json.loads(json.dumps(entry, default=str))
        known = self.entry(number)
        if known is None:
            self.entries.append(entry)
            self.entries.sort(key=lambda each: str(each["name"]))  # trainings begin before what retimes them
        else:
            self.entries[self.entries.index(known)] = entry
        self.folder.write_summary(self.entries)

    def discard_if_empty(self) -> bool:
        """Remove the new folder of a sweep of which no point was begun; returns whether none was."""
        if not self.entries and self.folder.is_new:
            with contextlib.suppress(OSError):  # something else was put there
                (self.folder.path / POINTS).rmdir()
                self.folder.discard()
        return not self.entries

    def digest(self) -> str:
        """SHA-256 over the points and their digests: the same for equal sweeps, stopped in between or not."""
        total = hashlib.sha256()
        for entry in self.entries:
            digest = RunFolder(self.folder.path / POINTS / entry["name"]).digest()
            total.update(f"{json.dumps(entry['point'], sort_keys=True)} {digest}\n".encode())
        return total.hexdigest()


def _name(number: int) -> str:
    return f"{number:04d}"


def _inlined(document: Document, folder: Path) -> Document:
    """The document with topology files written out, in `topology` and in the sweep."""
    if not isinstance(document.data, dict):
        return document
    data = copy.deepcopy(document.data)
    sweep = data["sweep"] if isinstance(data.get("sweep"), dict) else {}
    points = sweep["points"] if isinstance(sweep.get("points"), list) else []
    for mapping in (data, *(point for point in points if isinstance(point, dict)), sweep):
        if "topology" in mapping:
            mapping["topology"] = _inlined_network(mapping["topology"], folder)
    return replace(document, data=data)


def _inlined_network(value: Any, folder: Path) -> Any:
    """A topology's file as the mapping that it holds, in lists too; anything else as it is."""
    if isinstance(value, list):
        return [_inlined_network(each, folder) for each in value]
    if not isinstance(value, str):
        return value
    path = next((path for path in (folder / value, Path(value)) if path.is_file()), None)
    return value if path is None else Topology.document_of(path).data
