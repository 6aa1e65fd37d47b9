"""Settings, collectives and times of runs, and a paper's paragraph on methods."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from exogym_core.names import file_name, visible
from exogym_core.results.reading import COMPARISON, SEARCH, WALL_CLOCK, value_key, value_text, value_texts
from exogym_core.results.report.table import count_text, evaluated_every, short_count
from exogym_core.results.templates import rendered
from exogym_core.stages.options import Stages, hosts_of
from netsim import Protocol, Topology
from netsim.errors import InputError
from netsim.files.documents import load_document
from netsim.units import format_count, format_seconds, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from exogym_core.results.reading import Results
    from exogym_core.results.run_folder import RunFolder

__all__ = ["head_facts", "methods", "options_text", "origins", "placements", "run_facts", "search_methods"]

_JUDGED = {
    "replica": "the replica, the same on all workers",
    "outer": "the outer parameters of the last round that ended",
    "server": "the server's",
    "own": "each worker's own model: the mean of their losses",
}


_MOST_NETWORKS = 3  # that a line on trainings names
_MOST_SPANS = 12  # strategies whose steps are listed
_REAL_NETWORK = "the real one; seconds are by the clock"


def head_facts(results: Results) -> list[tuple[str, str]]:
    """Names and values of the settings that all strategies share.

    Raises:
        InputError: the experiment is not a resolved one.
    """
    settings = results.settings
    task, workers = results.setting("task.name"), results.setting("workers.count")
    if task is None or workers is None:
        raise InputError("experiment.yaml: is no resolved experiment: task and workers are missing")
    topology = settings.get("topology")
    by_speed = " in the mean, by speed; weighed by samples" if settings.get("batch_by_speed") else ""
    facts = [
        ("task", visible(task)),
        ("workers", visible(workers)),
        ("steps", _steps(results)),
        ("batch size per worker", visible(settings.get("batch_size")) + by_speed),
        ("seed" if len(results.seeds) == 1 else "seeds", _seeds([results])),
    ]
    if (until := settings.get("until")) is not None:
        facts.append(("ends at the latest after", f"{visible(until)} of {results.clock}"))
    if parameters := {run.parameters for each in results.strategies for run in each.runs if run.parameters}:
        facts.append(("parameters", short_count(max(parameters))))
    if every := evaluated_every(results):
        facts.append(("evaluated every", every))
    if results.clock == WALL_CLOCK:  # whatever topology the file names
        return [*facts, ("network", _REAL_NETWORK)]
    if not isinstance(topology, dict):
        return [*facts, ("network", "none: no virtual time")]
    protocol = settings.get("protocol") or topology.get("protocol") or "ideal"  # as earlier versions took it
    if isinstance(protocol, str) and protocol != "ideal":
        protocol = {"preset": protocol, "streams": 1}
    elif isinstance(protocol, Mapping):
        protocol = {"preset": Protocol.parse(None).name, **protocol}
    collectives = settings.get("collectives") or "auto"
    return [
        *facts,
        ("network", visible(topology.get("name", ""))),
        ("protocol", visible(_plain(protocol), 120)),
        ("collectives", visible(_plain(collectives), 120)),
        ("compute", visible(_compute(settings.get("compute")), 200)),
        ("placement", _placement(results, topology)),
    ]


def _steps(results: Results) -> str:
    """Steps of the experiment; where runs ended before them, how many each strategy did."""
    wanted = results.settings.get("steps")
    done = {each.name: [run.steps for run in each.runs if run.steps] for each in results.strategies}
    if all(steps == wanted for runs in done.values() for steps in runs):
        return visible(wanted)
    if len(done) > _MOST_SPANS:
        return f"{visible(wanted)} at most ({_span([steps for runs in done.values() for steps in runs])})"
    spans = [f"{visible(name)} {_span(runs)}" for name, runs in done.items() if runs]
    return f"{visible(wanted)} at most ({', '.join(spans)})"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def _seeds(runs: Sequence[Results]) -> str:
    seeds = dict.fromkeys(seed for results in runs for seed in results.seeds)
    fixed = dict.fromkeys(results.settings.get("network_seed") for results in runs)
    networks = ", ".join(str(each) for each in fixed if each is not None)
    return visible(", ".join(map(str, seeds)) + (f" (of the network: {networks})" if networks else ""), 200)


def _plain(value: Any) -> str:
    """A mapping or a name on one line."""
    if not isinstance(value, Mapping):
        return str(value)
    name = value.get("preset", "")
    rest = ", ".join(f"{key} {_plain(each)}" for key, each in value.items() if key != "preset")
    return f"{name}, {rest}" if name and rest else str(name) or rest


def _compute(compute: Any) -> str:
    """Settings of compute, such as `50 ms a step, jitter 0.1`."""
    if not isinstance(compute, Mapping):
        return str(compute)
    words = []
    for key, value in compute.items():
        if key == "fixed" and isinstance(value, str):
            words.append(f"{format_seconds(parse_seconds(value))} a step")
        else:
            words.append(f"{key} {_plain(value)}" if value not in ({}, None) else str(key))
    return ", ".join(words if "jitter" in compute else [*words, "no jitter"])


def placements(runs: Iterable[Results]) -> list[str]:
    """Hosts of workers, a line for each network and number of workers."""
    lines = {}
    for results in runs:
        topology = results.settings.get("topology")
        keys = [results.settings.get(key) for key in ("topology", "workers", "stages", "placement")]
        if (
            isinstance(topology, dict)
            and results.clock != WALL_CLOCK
            and (key := json.dumps(keys)) not in lines
        ):
            lines[key] = f"{visible(topology.get('name', ''))}: {_placement(results, topology)}"
    return list(dict.fromkeys(lines.values()))


def origins(runs: Iterable[tuple[RunFolder, Results]]) -> str | None:
    """Line on runs that were trained, retimed, trained again with the reason, and stopped; None: each just trained.

    Of one folder it names those in which retimed runs were trained.
    """
    num_folders = num_trained = num_retimed = num_again = num_stopped = 0
    networks, again, sources = dict[str, None](), dict[str, None](), dict[str, None]()
    for folder, results in runs:
        num_folders += 1
        retimed, reasons = folder.read_retimed(), folder.read_trained_again()
        lengths = {
            strategy.name: sum(not run.incomplete for run in strategy.runs) for strategy in results.strategies
        }
        num_stopped += sum(run.incomplete for strategy in results.strategies for run in strategy.runs)
        repeated = sum(length for label, length in lengths.items() if label in reasons)
        first = sum(lengths.values()) - repeated - len(retimed)
        num_trained, num_retimed, num_again = (
            num_trained + first,
            num_retimed + len(retimed),
            num_again + repeated,
        )
        topology = results.settings.get("topology")
        if first and isinstance(topology, dict):
            networks[visible(topology.get("name", ""), 100)] = None
        sources |= dict.fromkeys(visible(each, 100) for each in retimed.values())
        again |= {f"{visible(label)} ({visible(reason, 100)})": None for label, reason in reasons.items()}
    if not (num_retimed or again):
        return None
    on = f" on {', '.join(networks)}" if len(networks) <= _MOST_NETWORKS else ""
    parts = [f"trained: {format_count(num_trained, 'run')}{on}"] if num_trained else []
    trained_in = f", trained in {', '.join(sources)}" if num_folders == 1 else ""
    parts += [f"retimed: {format_count(num_retimed, 'run')}{trained_in}"] if num_retimed else []
    parts += [f"trained again: {format_count(num_again, 'run')} of {', '.join(again)}"] if again else []
    parts += [f"not finished: {format_count(num_stopped, 'run')}"] if num_stopped else []
    return "; ".join(parts)


def _placement(results: Results, topology: Mapping[str, Any]) -> str:
    network = Topology.from_mapping(topology, "experiment.yaml: topology")
    count = results.setting("workers.count")
    if not isinstance(count, int):
        raise InputError("experiment.yaml: workers.count: expected a whole number")
    stages = Stages.parse(results.settings.get("stages"))
    placement = results.settings.get("placement")
    hosts = hosts_of(network, count, stages, placement, names_servers=True)
    places = Counter(network.region_of(host) for host in hosts)
    counts = ", ".join(f"{visible(place, 30)}: {count}" for place, count in list(places.items())[:12])
    more = f" and {len(places) - 12} more" if len(places) > 12 else ""
    on_hosts, kind = Counter(hosts), "workers" if stages is None else "ranks of workers"
    if (most := max(on_hosts.values(), default=0)) > 1:
        more += f" ({len(hosts)} {kind} on {format_count(len(on_hosts), 'host')}, up to {most} on one)"
    return f"{counts}{more}"


def run_facts(results: Results) -> list[tuple[str, list[str]]]:
    """Judged model, collectives, and seconds of computing, network and waiting of each strategy that has any."""
    rows = []
    for result in results.strategies:
        used = "; ".join(f"{op}: {_algorithms(each)}" for op, each in result.collectives.items())
        seconds = (result.computing_seconds, result.network_seconds, result.waiting_seconds)
        times = ["-" if each is None else format_seconds(each) for each in seconds]
        cells = [_JUDGED.get(result.judged or "", "-"), visible(used, 300) or "-", *times]
        if any(cell != "-" for cell in cells):
            rows.append((visible(result.name), cells))
    return rows


def _algorithms(used: Any) -> str:
    if isinstance(used, Mapping):
        return ", ".join(f"{key} {_algorithms(each)}" for key, each in used.items())
    if isinstance(used, list | tuple):
        return ", ".join(map(str, used))
    return str(used)


# --- methods --------------------------------------------------------------------------------------------------

_TRAINING = ("task", "model", "workers", "steps", "batch_size")
_MOST_NAMED = 40  # strategies
_TIMED = {
    "network": "network",
    "protocol": "protocol",
    "collectives": "collective algorithms",
    "compute": "compute time",
    "placement": "workers by place",
}
"""Facts that times depend on, and their words."""


def methods(runs: Sequence[Results], *, are_retimed: bool = False) -> str:
    """A paper's paragraph on how runs were made; sentences that several share appear once.

    Args:
        runs: all of them.
        are_retimed: whether some were timed from recorded trainings.

    Raises:
        InputError: an experiment is not a resolved one.
    """
    alike: dict[str, list[Results]] = {}
    for results in runs:
        alike.setdefault(str([results.settings.get(key) for key in _TRAINING]), []).append(results)
    named = dict.fromkeys(
        visible(_strategy_text(results, each), 600)
        for results in runs
        for each in results.settings.get("strategies") or ()
        if isinstance(each, dict)
    )
    strategies = [
        *list(named)[:_MOST_NAMED],
        *[f"{len(named) - _MOST_NAMED} more"][: len(named) > _MOST_NAMED],
    ]
    sentences: dict[str, None] = {}
    timed: dict[str, dict[str, str]] = {}  # different facts of `_TIMED`
    for same, results in [(each, results) for each in alike.values() for results in each]:
        settings, model, facts = results.settings, results.settings.get("model"), dict(head_facts(results))
        text = rendered(
            "results/report/methods.txt",
            facts=facts,
            workers=count_text(settings["workers"].get("count"), "worker"),
            model=_setting_text(model) if isinstance(model, dict) else None,
            task=_setting_text(settings["task"]),
            steps=count_text(settings.get("steps"), "step"),
            done=facts["steps"].partition(" at most ")[2],
            until=settings.get("until"),
            clock=results.clock,
            parameters=facts.get("parameters"),
            is_resolved=any(each.options for each in results.strategies),
            samples=count_text(settings.get("batch_size"), "sample"),
            seeds=_seeds(same),
            strategies=strategies,
            target_loss=results.target_loss,
            is_real=results.clock == WALL_CLOCK,
        )
        sentences |= dict.fromkeys(text.splitlines())
        if "protocol" in facts:
            own = {key: facts[key] for key in _TIMED}
            timed[value_key(own)] = own
    texts = [*sentences, _timing(list(timed.values()))]
    if are_retimed:
        texts.append(
            "Runs that were not trained on their network were timed there from recorded trainings, to the bit as if "
            "trained there."
        )
    return " ".join(filter(None, texts))


def _timing(settings: Sequence[Mapping[str, str]]) -> str:
    """Sentences on how communication was timed: what all settings share, then a list of what varies."""
    if len(settings) == 1:
        return (
            "Communication was timed on a simulation of the network {network} under the protocol {protocol}, with "
            "collective algorithms: {collectives}. Compute time: {compute}. Workers by place: {placement}."
        ).format_map(settings[0])
    if not settings:
        return ""
    shared = {key for key in _TIMED if len({each[key] for each in settings}) == 1} - {"network"}
    rows = []
    for each in settings:
        own = [f"{_TIMED[key]}: {each[key]}" for key in _TIMED if key not in shared and key != "network"]
        rows.append(each["network"] + (f" ({'; '.join(own)})" if own else ""))
    same = "".join(f"; {_TIMED[key]}: {settings[0][key]}" for key in _TIMED if key in shared)
    return (
        f"Communication was timed on simulations of {len(settings)} networks and settings{same}. "
        f"They are {'; '.join(f'({number}) {row}' for number, row in enumerate(rows, 1))}."
    )


def _strategy_text(results: Results, setting: Mapping[str, Any]) -> str:
    """A strategy with its options: those that it was run with, where these are recorded."""
    label = setting.get("label") or setting.get("name")
    used = next((each.options for each in results.strategies if each.name == label and each.options), None)
    return _setting_text(setting if used is None else {**setting, **options_text(used)})


def options_text(used: Mapping[str, Any]) -> dict[str, str]:
    """Options that a strategy was run with as texts; optimizers with their own."""
    plain = _without_lists({key: value for key, value in used.items() if key != "optimizers"})
    texts = {key: _plain(value) for key, value in plain.items()}
    built = [each for each in used.get("optimizers") or () if isinstance(each, Mapping)]
    for name, each in zip(
        ("optimizer", "outer optimizer", *("further optimizer",) * len(built)), built, strict=False
    ):
        texts[name] = _setting_text(_without_lists(each))
    return texts


def _without_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: f"({', '.join(map(str, value))})" if isinstance(value, list) else value
        for key, value in values.items()
    }


def _setting_text(setting: Mapping[str, Any]) -> str:
    """Label or name of a strategy, model or task, in brackets the name behind a label and the options."""
    name = str(setting.get("name"))
    label = str(setting.get("label") or name)
    options = [f"{key} {value_text(value)}" for key, value in setting.items() if key not in ("name", "label")]
    inside = ", ".join(options if label == name else [name, *options])
    return f"{label} ({inside})" if inside else label


# --- the search -----------------------------------------------------------------------------------------------

_SEARCHES = {"grid": "a grid", "random": "a random search", "optuna": "Optuna"}


def search_methods(folder: Path, *, has_target: bool) -> str:
    """Sentences on the search whose best points the run of a folder compares; empty where there was none.

    Args:
        folder: of the run.
        has_target: whether the search was for a target loss.

    Raises:
        InputError: a file of the search is damaged.
    """
    whole, outcome = folder.parent, folder.parent / "tune.json"
    if folder.name != COMPARISON or not (whole / SEARCH).is_dir() or not outcome.is_file():
        return ""
    document = load_document(outcome)
    found = document.data
    if not isinstance(found, dict) or not isinstance(found.get("chosen"), list):
        raise document.error((), "is no result of netgym tune: it has no list `chosen`")
    tried = "; ".join(visible(_tried(each, whole / SEARCH), 600) for each in found["chosen"])
    best = "had the lowest mean final loss"
    if has_target:
        best = f"held the target with every tuning seed, soonest in the mean; where none held it, it {best}"
    seeds = ", ".join(map(str, found.get("tuning_seeds") or ()))
    return (
        f"Before the comparison, settings of each strategy were searched on the tuning seeds {seeds} alone: {tried}. "
        f"The best point {best}."
    )


def _tried(chosen: Mapping[str, Any], searches: Path) -> str:
    """Method, space and best point of a strategy's search."""
    strategy = str(chosen["strategy"])
    experiment = load_document(searches / file_name(strategy) / "experiment.yaml").data
    sweep = dict(experiment.get("sweep") or {}) if isinstance(experiment, dict) else {}
    method = _SEARCHES.get(str(sweep.pop("search", "grid")), "a search")
    axes = {key.rpartition("*.")[2]: each for key, each in sweep.items() if key.startswith("strategies.")}
    space = "; ".join(_axis(name, values) for name, values in axes.items())
    texts = {name: value_texts(each) for name, each in axes.items() if isinstance(each, list)}
    best = ", ".join(
        f"{name} {texts.get(name, {}).get(value_key(value)) or value_text(value)}"
        for name, value in chosen["point"].items()
    )
    edges = ", ".join(line.partition(":")[0] for line in chosen["edges"])
    points = format_count(chosen["num_points"], "point")
    failed = f", of which {chosen['num_failed']} failed" if chosen["num_failed"] else ""
    return (
        f"{strategy} by {method} of {points}{failed} ({space}), best: {best or 'none'}"
        f"{f', at an edge: {edges}' if edges else ''}"
    )


def _axis(name: str, values: Any) -> str:
    if isinstance(values, Mapping):
        scale = " on a logarithmic scale" if values.get("log") else ""
        return f"{name} from {value_text(values.get('low'))} to {value_text(values.get('high'))}{scale}"
    return f"{name} of {', '.join(value_texts(values if isinstance(values, list) else [values]).values())}"
