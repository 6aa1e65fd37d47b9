"""`netgym tune`: each strategy's own best settings on tuning seeds, then the comparison of all on other seeds.

    tune:
      seeds: 2                          # of the search; the comparison uses none of them
      over:
        "*": {lr: [0.004, 0.008, 0.016]}   # of every strategy
        DiLoCo: {H: [20, 40]}              # of one, in addition

    result = tune("examples/digits_wan.yaml")
    result.chosen[0].point              # {"lr": 0.008}
    result.chosen[0].edges              # ["lr at its largest value 0.016: try larger ones"]

Each strategy is searched by a sweep of its own (`search/<strategy>` in the folder), so that a stopped search resumes.
The best point holds the target with every tuning seed, soonest in the mean; among equals, and where no point holds it,
the lowest mean final loss decides.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.config import yaml_text
from exogym_core.names import file_name, visible
from exogym_core.results.progress import progress_for, warnings_to
from exogym_core.results.reading import POINTS, SEARCH, comparison_of, is_study, value_texts
from exogym_core.results.report import Results, verdict, write_report
from exogym_core.results.run_folder import RunFolder, code_folder_of, is_own, require_folder, require_own
from exogym_core.strategy.options import accepted_arguments
from netgym.experiment.comparison import settle_code
from netgym.experiment.experiment import Experiment, apply_values, differing_key, refuse_replaced
from netgym.studies.points import Range, Sweep, TuneSettings, point_text
from netgym.studies.runners import prepare, runner_at
from netgym.studies.study import LineWriter, Study, read_experiment, refuse_set_twice
from netgym.studies.sweep import SweepProgress, run_sweep, train_in
from netsim.cli.terminal import plain_console
from netsim.errors import InputError, unknown_name
from netsim.files.documents import Document, load_document
from netsim.files.schemas import validate_document
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from exogym_core.config import StrategySettings
    from netgym.experiment.own_code import OwnCode
    from netsim.files.documents import KeyPath

__all__ = ["Chosen", "TuneResult", "Tuning", "check_tune", "tune", "with_tune"]

_FACTORS = {"lr": (0.25, 0.5, 1, 2, 4), "outer_lr": (0.5, 1, 1.5)}
"""Default space: these multiples of the values in the file."""
_USUAL_LR = 1e-3  # torch's default for AdamW, for strategies whose lr the file leaves out
_FIRST_TUNING_SEED = 1000
_NEAR = 0.02  # of a range's span: values this close to an end count as at its edge
_PREFIX = "strategies.*."


def check_tune(file: Path) -> str:
    """Check the `tune:` of an experiment file; returns a line that names the number of strategies and seeds.

    Raises:
        InputError: `tune` is wrong, or a strategy has no such option, or does not take a value of it.
    """
    tuning = Tuning.planned(load_document(file), file.parent, file.stem)
    seeds = format_count(len(tuning.tuning_seeds), "seed")
    return f"tuning of {format_count(len(tuning.spaces), 'strategy')} on {seeds}"


@dataclass(frozen=True)
class Chosen:
    """The best point of one strategy.

    Attributes:
        strategy: its label.
        point: option -> value; empty where every point failed.
        final_loss, virtual_seconds_to_target: means over the tuning seeds; None: not there, or not held.
        edges: options that lie at an end of their values, each with the remedy.
        neighbours: points that differ in one option by one value, and their figures, each as `point`, `final_loss`,
            `virtual_seconds_to_target`.
        num_points, num_failed: tried, and failed of these.
    """

    strategy: str
    point: dict[str, Any]
    final_loss: float | None = None
    virtual_seconds_to_target: float | None = None
    edges: list[str] = field(default_factory=list)
    neighbours: list[dict[str, Any]] = field(default_factory=list)
    num_points: int = 0
    num_failed: int = 0


@dataclass(frozen=True)
class TuneResult:
    """The chosen points and the comparison at them.

    Attributes:
        folder: of the whole; `search/` has the sweeps, `comparison/` the run.
        tuning_seeds, seeds: of the search, and of the comparison.
        chosen: one a strategy, in the experiment's order.
        summary: one object a strategy of the comparison.
        winner, verdict: of the comparison.
    """

    folder: Path
    tuning_seeds: list[int]
    seeds: list[int]
    chosen: list[Chosen]
    summary: list[dict[str, Any]]
    winner: str | None
    verdict: str

    @property
    def comparison(self) -> RunFolder:
        """The run of all strategies at their chosen points."""
        return RunFolder.open(self.folder / "comparison")

    def _repr_html_(self) -> str:
        """Chosen points and verdict, for notebooks; `netgym.load(folder)` has the table, figures and page."""
        lines = [*map(_line, self.chosen), self.verdict]
        return "".join(f"<p>{escape(line)}</p>" for line in lines)

    def to_mapping(self) -> dict[str, Any]:
        """Plain data, as `tune.json` and `--json` have it."""
        plain = asdict(self) | {"run_folder": str(self.folder), "digest": self.comparison.digest()}
        del plain["folder"]
        return plain


def _space(over: Mapping[str, Mapping[str, Any]], entry: StrategySettings) -> dict[str, Any]:
    """Option -> values of one strategy: as given, else multiples of the file's learning rates."""
    given = {**over.get("*", {}), **over.get(str(entry.label), {})}
    if given:
        return given
    spec = entry.options.get("optim_spec")
    bases = {"lr": entry.options.get("lr", _USUAL_LR)}
    if isinstance(spec, dict) and "lr" in spec:
        bases = {"optim_spec.lr": spec["lr"]}
    if "outer_lr" in entry.options:
        bases["outer_lr"] = entry.options["outer_lr"]
    return {
        key: [float(f"{factor * float(base):.6g}") for factor in _FACTORS[key.rpartition(".")[2]]]
        for key, base in bases.items()
    }


def _seeds(part: Document, settings: TuneSettings, experiment: Experiment) -> list[int]:
    """Seeds of the search: a number of them, counted from 1000, or a list; none of the comparison's."""
    given, taken = settings.seeds, set(experiment.seeds)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 1:
        free = (seed for seed in range(_FIRST_TUNING_SEED, 2**31) if seed not in taken)
        return [next(free) for _ in range(given)]
    if not isinstance(given, list) or not given or not all(isinstance(seed, int) for seed in given):
        raise part.error(("seeds",), f"expected a number of seeds or a list of them, got {given!r}")
    if both := sorted(taken & set(given)):
        remedy = f"search on others, such as seeds: {_FIRST_TUNING_SEED}"
        raise part.error(("seeds",), f"{both[0]} is a seed of the comparison too: {remedy}")
    return list(given)


def _figures(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Final loss, and seconds to the target where it was held, of a point."""
    (strategy,) = entry["strategies"]
    seconds = strategy.get("virtual_seconds_to_target") if strategy.get("target") == "held" else None
    return {"final_loss": strategy.get("final_loss"), "virtual_seconds_to_target": seconds}


def _rank(entry: Mapping[str, Any]) -> list[float]:
    """Sort key, the best point first: seconds, then loss."""
    return [math.inf if figure is None else figure for figure in reversed(_figures(entry).values())]


def _choose(label: str, study: Study) -> Chosen:
    """The best point of a finished search."""
    tried = [entry for entry in study.entries if entry.get("strategies") and not entry.get("failed")]
    failed = sum(bool(entry.get("failed")) for entry in study.entries)
    chosen = Chosen(label, {}, num_points=len(study.entries), num_failed=failed)
    if not tried:
        return chosen
    best = min(tried, key=_rank)
    return replace(
        chosen,
        point=_short(best["point"]),
        edges=[line for key in best["point"] if (line := _edge(key, best["point"][key], study))],
        neighbours=[
            {"point": _short(each["point"]), **_figures(each)} for each in _neighbours(best, tried, study)
        ],
        **_figures(best),
    )


def _short(point: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(_PREFIX): value for key, value in point.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _edge(key: str, value: Any, study: Study) -> str | None:
    """The line that names an end of `key`'s values, where `value` lies at one."""
    values = study.sweep.axes.get(key)
    if not _is_number(value) or values is None:
        return None
    near, numbers = 0.0, [values.low, values.high] if isinstance(values, Range) else values
    numbers = [each for each in (*numbers, value) if _is_number(each)]
    if isinstance(values, Range):
        near, numbers = _NEAR, list(map(math.log, numbers)) if values.log else numbers
    low, high, at = min(numbers), max(numbers), numbers[-1]
    share = (at - low) / (high - low) if high > low else 0.5
    if near < share < 1 - near:
        return None
    side, remedy = ("smallest", "smaller") if share <= near else ("largest", "larger")
    return f"{key.removeprefix(_PREFIX)} at its {side} value {value:g}: try {remedy} ones"


def _neighbours(best: Mapping[str, Any], tried: Sequence[Any], study: Study) -> list[Mapping[str, Any]]:
    """Tried points that differ from the best in one option, by one value."""
    found = []
    for key, values in study.sweep.axes.items():
        if isinstance(values, Range):
            continue
        order = sorted(values) if all(map(_is_number, values)) else list(values)
        place = order.index(best["point"][key])
        for value in (*order[max(place - 1, 0) : place], *order[place + 1 : place + 2]):
            wanted = {**best["point"], key: value}
            found += [entry for entry in tried if entry["point"] == wanted]
    return found


@dataclass
class Tuning:
    """A search and its comparison in one folder, owned by this process until it is released.

    Attributes:
        document: the experiment as it was given.
        source_folder: of its file.
        experiment: checked.
        settings: its `tune:`.
        tuning_seeds: of the search.
        spaces: label -> option -> values.
        folder: `search/` gets a sweep for each strategy, `comparison/` the run.
        edited_code: resume although the user's code was edited since.
        is_changed: the folder is another user's, or its experiment was changed since it was begun.
        chosen: the best point so far of each strategy whose search has begun.
        result: once all is done.
    """

    document: Document
    source_folder: Path
    experiment: Experiment
    settings: TuneSettings
    tuning_seeds: list[int]
    spaces: dict[str, dict[str, Any]]
    folder: RunFolder
    chosen: list[Chosen] = field(default_factory=list)
    result: TuneResult | None = None
    is_changed: bool = False
    edited_code: bool = False

    @classmethod
    def planned(cls, document: Document, source_folder: Path, name: str) -> Tuning:
        """Check a document, with each value of each strategy's options; nothing is written."""
        data = document.data if isinstance(document.data, dict) else {}
        part = document.part(("tune",)) if data.get("tune") is not None else Document(document.where, {})
        settings = validate_document(TuneSettings, part)
        if settings.search == "grid" and settings.trials:
            problem = "a grid tries all points: leave trials out, or add search: random"
            raise part.error(("trials",), problem)
        experiment = Experiment.from_document(document, source_folder, name)
        labels = [str(entry.label) for entry in experiment.strategies]
        for given in settings.over:
            if given != "*" and given not in labels:
                raise part.error(("over",), unknown_name("strategy", given, labels))
            if wrong := settings.over[given].keys() & {"name", "label"}:
                problem = f"'{min(wrong)}' is no option: list one more strategy instead"
                raise part.error(("over", given, min(wrong)), problem)
        known = [experiment.build_strategy(each) for each in experiment.strategies if not each.own_code]
        options = {name for each in known for name in accepted_arguments(type(each))}
        for key in settings.over.get("*", {}) if known else ():
            owner, dot, _ = key.partition(".")
            if dot and owner not in options:
                problem = (
                    f"'{visible(owner)}' is no strategy of the experiment ({visible(', '.join(labels), 300)})"
                )
                raise part.error(("over", "*", key), f"{problem}, and no option of one")
        spaces = {str(entry.label): _space(settings.over, entry) for entry in experiment.strategies}
        seeds = _seeds(part, settings, experiment)
        tuning = cls(document, source_folder, experiment, settings, seeds, spaces, RunFolder(source_folder))
        for number in range(len(spaces)):
            Study.planned(tuning.sweep_of(number), source_folder)
        places = {"*": "*"} | {label: str(number) for number, label in enumerate(labels)}
        values: list[tuple[str, Any, KeyPath]] = [
            (f"strategies.{places[name]}.{key}", each, ("tune", "over", name, key))
            for name, space in settings.over.items()
            for key, each in space.items()
        ]
        refuse_replaced(document, values, source_folder)
        return tuning

    @classmethod
    def create(cls, document: Document, source_folder: Path, name: str, out: str | Path | None) -> Tuning:
        """Begin in `out` or `runs/<name>-tune-<n>`; nothing is trained."""
        tuning = cls.planned(document, source_folder, name)
        experiment = tuning.experiment
        tuning.folder = folder = RunFolder.create(out, f"{experiment.settings.name}-tune")
        own = document.data["tune"] if isinstance(document.data, dict) else {}
        folder.write_text("experiment.yaml", yaml_text(experiment.to_mapping() | {"tune": own}))
        folder.write_environment(experiment.code_folder)
        return tuning

    @classmethod
    def open(cls, path: Path, *, trust: bool = False, edited_code: bool = False) -> Tuning:
        """Resume in a folder of an earlier process.

        Raises:
            InputError: it is no such folder, or another user made it and there is no `trust`.
        """
        require_folder(path)
        if not (path / SEARCH).is_dir():
            raise InputError(f"{visible(path)}: is no folder of netgym tune: it has no {SEARCH}/")
        if not trust:
            require_own(path, "search")
        document = load_document(path / "experiment.yaml")
        tuning = cls.planned(document, code_folder_of(path) or path, path.stem)
        tuning.folder = RunFolder.open(path).owned()
        tuning.is_changed, tuning.edited_code = not is_own(path), edited_code
        return tuning

    def own_code(self) -> list[OwnCode]:
        """Places of the user's code that the experiment and points of the search name, each once."""
        studies = (
            Study.planned(self.sweep_of(number), self.source_folder) for number in range(len(self.spaces))
        )
        found = dict.fromkeys(code for study in studies for code in study.own_code())
        return list(dict.fromkeys([*self.experiment.own_code, *found]))

    def sweep_of(self, number: int) -> Document:
        """The experiment of a strategy alone, with its sweep."""
        entry = self.experiment.strategies[number]
        settings, space = self.settings, self.spaces[str(entry.label)]
        sweep = {f"{_PREFIX}{key}": values for key, values in space.items()} | {"seeds": self.tuning_seeds}
        if settings.search != "grid":
            sweep |= {"search": settings.search, "trials": settings.trials or 20}
        if settings.search == "optuna":
            has_target = (
                self.experiment.settings.target_loss is not None and self.experiment.topology is not None
            )
            sweep["minimise"] = "virtual_seconds_to_target" if has_target else "final_loss"
        data = self.experiment.to_mapping() | {"strategies": [entry.to_mapping()], "sweep": sweep}
        data = {key: value for key, value in data.items() if key not in ("seed", "seeds")}
        return Document(self.document.where, data)

    def study(self, number: int, folder: Path) -> Study:
        """Begin or resume the sweep of a strategy; one of a search that was changed since gets what it asks for now."""
        document, label = self.sweep_of(number), str(self.experiment.strategies[number].label)
        if not is_study(folder):
            return Study.create(document, self.source_folder, str(folder), label)
        study = Study.open(folder, trust=True, edited_code=self.edited_code)
        if self.is_changed and isinstance(document.data, dict):
            study = replace(study, document=document, sweep=Sweep.parse(document), is_changed=True)
            study.folder.write_text("experiment.yaml", yaml_text({"name": label} | document.data))
        return study

    def tuned(self, chosen: Sequence[Chosen]) -> Experiment:
        """The experiment at the chosen points, on its own seeds; strategies without one are left out."""
        plain = self.experiment.to_mapping()
        strategies = []
        for mapping, each in zip(plain["strategies"], chosen, strict=True):
            if each.point:
                document = Document(self.document.where, {"strategies": [mapping]})
                values = {f"{_PREFIX}{key}": value for key, value in each.point.items()}
                strategies += apply_values(document, values, each.strategy).data["strategies"]  # type: ignore[index]
        if not strategies:
            raise InputError(
                f"{self.document.where}: every point of every strategy failed: see the lines above"
            )
        plain["strategies"] = strategies
        name = str(self.experiment.settings.name)
        return Experiment.from_document(Document(self.document.where, plain), self.source_folder, name)

    def run(self, write: Callable[..., None], on: str | None = None, jobs: int | None = None) -> TuneResult:
        """Search, compare, and write `tune.json`; `write` is a `LineWriter`.

        Raises:
            InputError: the code was edited since the first results, which is not accepted; or no point of any
                strategy finished.
        """
        with warnings_to(write):
            settle_code(self.folder, self.own_code(), accepted=self.edited_code)
        for number in range(len(self.spaces)):
            Study.planned(self.sweep_of(number), self.source_folder).refuse_untaken(own_code=True)
        with runner_at(on, None, jobs) as runner:
            for number, label in enumerate(self.spaces):
                study = self.study(number, self.folder.make_folder(SEARCH) / file_name(label))
                name = visible(label)
                if not study.entries:
                    space = ", ".join(f"{key} of {_values(each)}" for key, each in self.spaces[label].items())
                    seeds = ", ".join(map(str, self.tuning_seeds))
                    num_points = format_count(study.sweep.num_points, "point")
                    write(f"{name}: {num_points}: {space}; seeds {seeds}")
                try:

                    def named(line: str, *progress: Any, name: str = name) -> None:
                        write(f"{name}: {line}", *progress)

                    _, found = prepare(study, named, on, jobs)
                    run_sweep(study, SweepProgress(named, study.sweep.num_points, found), runner)
                finally:
                    study.folder.release()
                    self.chosen.append(_choose(label, study))
        if self.is_changed:
            self.folder.seal()  # its sweeps are of this experiment
        for each in self.chosen:
            write(_line(each, self.point_text(each)))
        self.result = self._compare(write, jobs)
        return self.result

    def point_text(self, chosen: Chosen) -> str:
        """A strategy's best point on one line, distinct among those of its search."""
        lists = {key: each for key, each in self.spaces[chosen.strategy].items() if isinstance(each, list)}
        return point_text(chosen.point, {key: value_texts(values) for key, values in lists.items()})

    def discard_if_empty(self) -> bool:
        """Remove a new folder if no point was begun; returns whether none was."""
        is_empty = not any(self.folder.path.glob(f"{SEARCH}/*/{POINTS}/*"))
        if is_empty and self.folder.is_new:
            shutil.rmtree(self.folder.path / SEARCH, ignore_errors=True)
            self.folder.discard()
        return is_empty

    def _compare(self, write: Callable[..., None], jobs: int | None) -> TuneResult:
        """Train all strategies at their chosen points, on its own seeds; write `tune.json` and the page."""
        path = comparison_of(self.folder.path)
        assert path is not None
        experiment = self.tuned(self.chosen)
        stored = path / "experiment.yaml"
        is_begun = stored.is_file()
        before = Experiment.load(stored, trust=True) if is_begun else experiment
        if (key := differing_key(before, experiment)) is not None:
            write(f"comparison: run again, as the experiment was changed since (another {key})")
            shutil.rmtree(path)
            is_begun = False
        run = RunFolder.open(path).owned() if is_begun else RunFolder.create(path, "")
        try:
            run.clean()
            if not run.read_summary():
                run.write_text("experiment.yaml", experiment.to_yaml())
                run.write_environment(experiment.code_folder)
            with progress_for(plain_console(stderr=True), run.log) as progress:
                train_in(run, replace(experiment, edited_code=self.edited_code), progress, jobs)
            (words, winner), summary = verdict(Results.load(run)), run.read_summary()
            seeds, of_runs = self.tuning_seeds, experiment.seeds
            result = TuneResult(self.folder.path, seeds, of_runs, self.chosen, summary, winner, words)
            text = json.dumps(result.to_mapping(), indent=2, allow_nan=False)
            self.folder.write_text("tune.json", f"{text}\n")
            write_report(run)  # whose methods are read from there
        finally:
            run.release()
        return result


def tune(
    experiment: str | Path | Mapping[str, Any],
    *,
    over: Mapping[str, Any] | None = None,
    seeds: int | Sequence[int] | None = None,
    search: str | None = None,
    trials: int | None = None,
    out: str | Path | None = None,
    on: str | None = None,
    jobs: int | None = None,
    resume: str | Path | None = None,
    edited_code: bool = False,
) -> TuneResult:
    """Find each strategy's best settings on tuning seeds, then compare all at their best on the experiment's seeds.

    Args:
        experiment: a file, or the mapping itself.
        over: option -> values (a list, or `{low, high, log}` for searches) for every strategy, or under a strategy's
            name its own mapping; added to the file's `tune: over:`. Without any: multiples of the learning rates.
        seeds: number of tuning seeds, or a list; the file's, else 2.
        search: `grid` (all points), `random` or `optuna`.
        trials: points of a search, for each strategy.
        out: the folder, new or empty; None: `runs/<name>-tune-<n>`.
        on: None: this machine; `ray`, or a cluster's address.
        jobs: runs at once on this machine; None: as many as cores and memory allow.
        resume: a folder to resume, in the place of `experiment` and `out`.
        edited_code: resume although your code was edited since; finished results are kept.

    Raises:
        InputError: the experiment, the space or a seed is wrong.
    """
    listed = seeds if seeds is None or isinstance(seeds, int) else list(seeds)
    if resume is None:
        document, folder, name = read_experiment(experiment)
        given = {"seeds": listed, "search": search, "trials": trials}
        tuning = Tuning.create(with_tune(document, over or {}, given), folder, name, out)
    else:
        tuning = Tuning.open(Path(resume), trust=True, edited_code=edited_code)
    try:
        return tuning.run(LineWriter(tuning.folder), on, jobs)
    except InputError:
        tuning.discard_if_empty()
        raise
    finally:
        tuning.folder.release()


def with_tune(document: Document, over: Mapping[str, Any], given: Mapping[str, Any]) -> Document:
    """The document with arguments or options merged into its `tune`.

    Raises:
        InputError: the file's `over` has options outside of a strategy's name, or --set gives a key too.
    """
    if not isinstance(document.data, dict):
        return document
    own = document.data.get("tune") or {}
    of_file = own.get("over") or {} if isinstance(own, dict) else None
    if not isinstance(own, dict) or not isinstance(of_file, dict):
        return document  # the schema names the mistake
    for name, space in of_file.items():
        if not isinstance(space, dict):
            raise document.error(
                ("tune", "over", name),
                f"expected a strategy's name or '*' with a mapping of its options, such as '*': {{{name}: ...}}",
            )
    own, spaces = dict(own), {name: dict(space) for name, space in of_file.items()}
    replaced: list[KeyPath] = []
    for key, values in over.items():
        is_of_one = isinstance(values, Mapping) and "low" not in values
        name, space = (key, values) if is_of_one else ("*", {key: values})
        spaces.setdefault(name, {}).update(space)
        replaced += [("tune", "over", name, option) for option in space]
    added = {key: value for key, value in given.items() if value is not None}
    refuse_set_twice(document, [*replaced, *(("tune", key) for key in added)])
    own |= added
    if spaces:
        own["over"] = spaces
    return replace(document, data={**document.data, "tune": own})


def _values(values: Any) -> str:
    if isinstance(values, Mapping):
        return f"{values.get('low')} to {values.get('high')}"
    return ", ".join(f"{each:g}" if _is_number(each) else visible(each, 40) for each in values)


def _line(chosen: Chosen, text: str | None = None) -> str:
    """A strategy's best point, which is shown as `text`."""
    label = visible(chosen.strategy)
    if not chosen.point:
        return f"{label}: every point failed ({chosen.num_failed} of {chosen.num_points}): left out of the comparison"
    edges = "".join(f"; {line}" for line in chosen.edges)
    return f"{label}: best is {text or point_text(chosen.point)}{edges}"
