"""The commands `netgym compare`, `run`, `retime`, `sweep` and `plan` as functions: results, not printed tables."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import yaml

from exogym_core.config import yaml_text
from exogym_core.meeting_place import is_at_rendezvous, under_torchrun
from exogym_core.names import file_name, visible
from exogym_core.results.report import write_report
from exogym_core.results.run_folder import RunFolder, code_folder_of, is_own, require_own
from netgym.cli.run_commands import retimed_experiment, train_new
from netgym.command_options import is_place
from netgym.experiment.experiment import Experiment, apply_values
from netgym.planning.commands import plan_rows
from netgym.planning.planned import request_of
from netgym.planning.sweep import placed
from netgym.results import Comparison, SweepResult
from netgym.studies.runners import run_points, write_results
from netgym.studies.study import Study, over_networks, with_sweep
from netsim import Topology
from netsim.cli.terminal import DelayedProgress
from netsim.errors import InputError, unknown_name
from netsim.files.documents import Document, load_document, parse_document

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Unpack

Network: TypeAlias = str | Path | Topology | Mapping[str, Any]

__all__ = ["Changes", "PlanOptions", "compare", "plan", "retime", "run", "sweep"]


class Changes(TypedDict, total=False):
    """Keywords of `compare`, `run` and `sweep`: changes to an experiment, and where its results go.

    Attributes:
        out: the folder of results, new or empty; None: a temporary folder, removed with the result.
        seeds: number of seeds, counted up from the experiment's, or a list.
        topology: another network: a shipped name, a file, a mapping or a `Topology`; of `compare` also a list of them.
        protocol: another protocol.
        overrides: values by key path, such as `{"steps": 20, "strategies.DiLoCo.H": 50}`.
        jobs: runs at once, to the same results; None: as many as cores and memory allow.
        progress: print progress to stderr, as a bar in notebooks.
    """

    out: str | Path | None
    seeds: int | Sequence[int] | None
    topology: Network | Sequence[Network] | None
    protocol: str | Mapping[str, Any] | None
    overrides: Mapping[str, Any] | None
    jobs: int | None
    progress: bool


class PlanOptions(TypedDict, total=False):
    """Further keywords of `plan`, those of `netgym plan`; a mapping is by host or region.

    Attributes:
        device: every worker's device; None: the hosts' own.
        utilisation: share of the device's peak that computing reaches.
        memory: any of `bf16`, `8bit`, `offload`, `checkpointing`.
        micro_batch: sequences that a device computes at once.
        devices_per_worker: devices that share a worker's batch.
        batch_size: sequences of a worker in a step.
        sequence: tokens of a sequence.
        protocol: another protocol.
        price: dollars of a worker's hour.
        batch_by_speed: share a step's sequences out by the devices' speed.
        trust: run the code that a run's folder names, even if another user has made it.
    """

    device: str | None
    utilisation: float | Mapping[str, float] | None
    memory: tuple[str, ...]
    micro_batch: int
    devices_per_worker: int | Mapping[str, int]
    batch_size: int | None
    sequence: int | None
    protocol: str | None
    price: float | Mapping[str, float] | None
    batch_by_speed: bool
    trust: bool


def compare(
    experiment: str | Path | Mapping[str, Any], *, strategy: str | None = None, **changes: Unpack[Changes]
) -> Comparison:
    """Train with every strategy of an experiment, as `netgym compare` does.

    On several topologies each training is done once, and timed on the others; the result is a `SweepResult`.

    Args:
        experiment: a YAML file, or the same as a mapping; paths in a mapping are relative to the current folder.
        strategy: name or label of the only strategy to train.
        changes: `out`, `seeds`, `topology`, `protocol`, `overrides`, `jobs` and `progress`, see `Changes`.

    Raises:
        InputError: the experiment is wrong, a line a mistake; or this process is one of several.
        RankError: the only strategy failed. Where others continue, the summary marks it and a line on stderr says so.
    """
    _refuse_unknown(compare, changes, Changes)
    networks = changes.get("topology")
    if isinstance(networks, list | tuple):
        return _on_networks(experiment, strategy, networks, changes)
    loaded = _load(experiment, changes, "netgym.compare")
    return _train(loaded if strategy is None else loaded.only(strategy), changes)


def run(
    experiment: str | Path | Mapping[str, Any], *, strategy: str | None = None, **changes: Unpack[Changes]
) -> Comparison:
    """Train with one strategy of an experiment, as `netgym run` does.

    Args:
        experiment, changes: as in `compare`.
        strategy: name or label; None where the experiment has only one.

    Raises:
        InputError: as in `compare`; or the experiment has several strategies and none is named.
    """
    _refuse_unknown(run, changes, Changes)
    loaded = _load(experiment, changes, "netgym.run")
    if strategy is None and len(loaded.strategies) > 1:
        labels = ", ".join(str(entry.label) for entry in loaded.strategies)
        raise loaded.document.error(
            ("strategies",), f"netgym.run trains one: add strategy= with one of {labels}"
        )
    return _train(loaded if strategy is None else loaded.only(strategy), changes)


def retime(
    folder: str | Path,
    *,
    topology: Network | None = None,
    protocol: str | Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    trust: bool = False,
    jobs: int | None = None,
    progress: bool = True,
) -> Comparison:
    """Time a finished run on another network, to the bit as if trained there, as `netgym retime` does.

    Args:
        folder: of the run.
        topology: another network: a shipped name, a file, a mapping or a `Topology`.
        protocol: another protocol.
        overrides: values of the network by key path, such as `{"compute.jitter": 0.2}`.
        out, jobs, progress: as in `Changes`.
        trust: accept a run that another user made or changed.

    Raises:
        InputError: there is no finished run, the change is wrong, or it changes the training.
    """
    path = Path(folder)
    if (path / "launch.json").is_file():
        raise InputError(
            f"{visible(path)}: is a launched run: use the command: netgym retime {visible(path)}"
        )
    if not trust:
        require_own(path, "run")

    def apply(document: Document, options: Mapping[str, Any]) -> Document:
        return apply_values(document, {**options, **(overrides or {})}, "netgym.retime", path)

    experiment = retimed_experiment(path, _plain_network(topology), protocol, apply)
    return _train(experiment, Changes(out=out, jobs=jobs, progress=progress), RunFolder.open(path))


def sweep(
    experiment: str | Path | Mapping[str, Any],
    *,
    over: Mapping[str, Any] | None = None,
    search: str | None = None,
    trials: int | None = None,
    minimise: str | None = None,
    on: str | None = None,
    **changes: Unpack[Changes],
) -> SweepResult:
    """Train an experiment at every point of its `sweep:`, as `netgym sweep` does.

    Args:
        experiment, changes: as in `compare`; seeds are those of every point.
        over: values by key path, such as `{"strategies.*.lr": [0.01, 0.03]}`, added to the file's `sweep:`.
        search: `grid` (all points), `random` or `optuna`.
        trials: number of points that a search tries.
        minimise: field of the summary that a search minimises.
        on: None: this machine; `ray`, a Ray cluster's address, or `slurm:KEY=VALUE,...`.

    Raises:
        InputError: the experiment or the sweep is wrong. A point that fails is marked, and the others run.
    """
    _refuse_unknown(sweep, changes, Changes)
    document, folder, name, _ = _document(experiment, changes, "netgym.sweep")
    given = {"search": search, "trials": trials, "minimise": minimise, "seeds": _seeds(changes)}
    keys = {**(over or {}), **{key: value for key, value in given.items() if value is not None}}
    return _study(with_sweep(document, keys), folder, name, changes, on)


def _on_networks(
    experiment: str | Path | Mapping[str, Any],
    strategy: str | None,
    networks: Sequence[Network],
    changes: Changes,
) -> SweepResult:
    """Sweep of an experiment over several networks, in place of its own."""
    caller = "netgym.compare"
    if not networks:
        raise InputError(f"{caller}: topology is an empty list: give networks, or leave it out")
    if inside := next((key for key in changes.get("overrides") or {} if key.startswith("topology.")), None):
        raise InputError(
            f"{caller}: overrides: {inside} changes one topology, and several are given: leave one out"
        )
    first = changes | Changes(topology=networks[0])
    document, folder, name, code = _document(experiment, first, caller)
    loaded = None
    if strategy is not None:
        loaded = Experiment.from_document(document, folder, name, code).only(strategy)
    document = over_networks(document, list(map(_plain_network, networks)), loaded, f"{caller}: topology")
    return _study(document, folder, name, changes, None)


def _study(document: Document, folder: Path, name: str, changes: Changes, on: str | None) -> SweepResult:
    """Train a document's sweep."""
    is_shown = changes.get("progress", True)

    def write(line: str, *progress: float) -> None:
        study.folder.log(line)
        if is_shown:
            print(visible(line, 500), file=sys.stderr)

    with _place(changes, f"{name}-sweep") as (path, temporary):
        study = Study.create(document, folder, str(path), name)
        try:
            run_points(study, write, on, changes.get("jobs"))
            write_results(study)
        except BaseException:
            study.discard_if_empty()
            raise
        finally:
            study.folder.release()
        return SweepResult(study.folder.path, temporary)


def plan(
    experiment: str | Path | None = None,
    *,
    model: str | None = None,
    strategies: str | Sequence[str] = (),
    topology: str | None = None,
    workers: int | None = None,
    tokens: str | None = None,
    budget: str | float | None = None,
    overrides: Mapping[str, Any] | None = None,
    **options: Unpack[PlanOptions],
) -> list[dict[str, Any]]:
    """Plan an experiment without training, as `netgym plan --json` does: an object a strategy.

    Args:
        experiment: a file or a run's folder; None: `model`, `strategies` and `topology` are given.
        model: such as `llama-13b`.
        strategies: a name, or several.
        topology: a shipped network or a file.
        workers: how many; None: one a host.
        tokens: the budget, such as `200B`.
        budget: dollars to spend in place of `tokens`, with `price=`; tokens and days are those that it pays for.
        overrides: values by key path.
        options: further options of the command, as in `PlanOptions`, such as `device="h100"` or `price=20`.

    Raises:
        InputError: the experiment is wrong, or no strategy can be planned.
    """
    _refuse_unknown(plan, options, PlanOptions)
    if isinstance(strategies, str):
        strategies = (strategies,)
    request = request_of(
        None if experiment is None else Path(experiment),
        {},
        model=model,
        strategies=strategies,
        topology=topology,
        workers=workers,
        tokens=tokens,
        budget=budget,
        overrides=[f"{key}={json.dumps(value)}" for key, value in (overrides or {}).items()],
        **options,
    )
    request = request.of_own_sites(request.setting.sites())
    failures: list[Exception] = []
    with DelayedProgress("planning") as progress:
        rows = list(plan_rows(request, (), progress, failures=failures))
    if len(failures) == len(rows):
        raise failures[0]
    return placed(rows)


def _refuse_unknown(function: Callable[..., Any], given: Mapping[str, Any], keywords: type) -> None:
    """Raise InputError for a keyword that neither `function` nor `keywords` has."""
    if wrong := [name for name in given if name not in keywords.__annotations__]:
        named = [name for name in function.__annotations__ if name not in ("changes", "options", "return")]
        what = f"argument of netgym.{function.__name__}"
        raise unknown_name(what, wrong[0], [*named, *keywords.__annotations__])


def _document(
    experiment: str | Path | Mapping[str, Any], changes: Changes, caller: str
) -> tuple[Document, Path, str, Path | None]:
    """The changed document, the folder of its paths, its name, and the folder of its modules."""
    if under_torchrun() or is_at_rendezvous():
        raise InputError(
            f"{caller}: trains in one process, and the environment is that of several: use the command "
            f"{caller.replace('.', ' ')} EXPERIMENT"
        )
    if isinstance(experiment, Mapping):
        try:
            data = parse_document(yaml_text(experiment), "experiment").data
        except yaml.YAMLError as error:
            raise InputError(
                f"experiment: {visible(error.args[-1], 200)} is no plain value (text, number, list or mapping): "
                "name your own code as 'module:callable', or train it with Trainer(...).fit(...)"
            ) from None
        document, folder, name, code = Document("experiment", data), Path(), "experiment", None
    else:
        path = Path(experiment)
        document, folder, name = load_document(path), path.parent, path.stem
        code = code_folder_of(folder) if is_own(folder) else None
    given = {"topology": _plain_network(changes.get("topology")), "protocol": changes.get("protocol")}
    if caller != "netgym.sweep":
        given["seeds"] = _seeds(changes)
    values = {key: value for key, value in given.items() if value is not None}
    overrides = dict(changes.get("overrides") or {})
    if both := sorted(values.keys() & overrides.keys()):
        raise InputError(f"{caller}: overrides: {both[0]} is given as an argument too: leave one of them out")
    return apply_values(document, values | overrides, caller, folder), folder, name, code


def _plain_network(network: Any) -> Any:
    """A network as a file has it; its path is relative to the current folder, not to the experiment's."""
    if isinstance(network, Topology):
        return network.to_mapping()
    if isinstance(network, Path) or (isinstance(network, str) and is_place(network)):
        return str(Path(network).resolve())
    return network


def _load(experiment: str | Path | Mapping[str, Any], changes: Changes, caller: str) -> Experiment:
    return Experiment.from_document(*_document(experiment, changes, caller))


@contextmanager
def _place(changes: Changes, name: str) -> Iterator[tuple[Path, Path | None]]:
    """The folder for results, and the temporary one around it.

    That is removed after an exception, but after Ctrl-C with results in it kept and named.
    """
    out = changes.get("out")
    temporary = Path(tempfile.mkdtemp(prefix="netgym-")) if out is None else None
    path = Path(out) if temporary is None else temporary / file_name(name)  # type: ignore[arg-type]
    try:
        yield path, temporary
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and path.is_dir() and RunFolder(path).has_trained():
            print(f"interrupted: results so far: netgym.load({str(path)!r})", file=sys.stderr)
        elif temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _train(experiment: Experiment, changes: Changes, source: RunFolder | None = None) -> Comparison:
    name = str(experiment.settings.name)
    experiment.check_runs()  # before there is a folder
    with _place(changes, name) as (path, temporary):
        folder = RunFolder.create(path, name)
        try:
            is_shown = changes.get("progress", True)
            train_new(experiment, folder, jobs=changes.get("jobs"), progress=is_shown, source=source)
            write_report(folder)
        except KeyboardInterrupt:
            folder.discard_if_untrained()
            raise
        finally:
            folder.release()
        return Comparison(folder.path, temporary)


def _seeds(changes: Changes) -> int | list[int] | None:
    seeds = changes.get("seeds")
    return seeds if seeds is None or isinstance(seeds, int) else list(seeds)
