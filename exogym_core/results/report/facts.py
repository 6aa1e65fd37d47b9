"""What was run, in a few words each: the head of the page, and a line for each strategy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from netsim.files.errors import InputError
from netsim.files.units import format_seconds, parse_seconds
from netsim.topology.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exogym_core.results.report.results import Results, StrategyResult

__all__ = ["head_facts", "run_facts", "shared_hosts"]

_JUDGED = {
    "replica": "the replica, the same on all workers",
    "outer": "the outer parameters of the last round that ended",
    "server": "the server's",
    "own": "each worker's own model: the mean of their losses",
}


def head_facts(results: Results) -> list[tuple[str, str]]:
    """Name and value of what all strategies have in common.

    Raises:
        InputError: the experiment is not a resolved one.
    """
    settings = results.settings
    task, workers, topology = settings.get("task"), settings.get("workers"), settings.get("topology")
    if not isinstance(task, dict) or not isinstance(workers, dict):
        raise InputError("experiment.yaml: is no resolved experiment: task and workers are missing")
    evaluate = settings.get("evaluate")
    facts = [
        ("task", visible(task.get("name"))),
        ("workers", visible(workers.get("count"))),
        ("steps", visible(settings.get("steps"))),
        ("batch size per worker", visible(settings.get("batch_size"))),
        ("seed" if len(results.seeds) == 1 else "seeds", _seeds(results)),
    ]
    if isinstance(evaluate, dict):
        facts.append(("evaluated every", f"{visible(evaluate.get('every'))} steps"))
    if not isinstance(topology, dict):
        known = (
            "the real one; seconds are by the clock"
            if any(each.is_wall for each in results.strategies)
            else None
        )
        return [*facts, ("network", known or "none: nothing is known of time")]
    protocol = settings.get("protocol") or topology.get("protocol") or "ideal"
    collectives = settings.get("collectives") or "auto"
    return [
        *facts,
        ("network", visible(topology.get("name", ""))),
        ("protocol", visible(_plain(protocol), 120)),
        ("collectives", visible(_plain(collectives), 120)),
        ("compute", visible(_compute(settings.get("compute")), 200)),
        ("placement", _placement(results, topology)),
    ]


def _seeds(results: Results) -> str:
    fixed = results.settings.get("network_seed")
    network = f" (of the network: {fixed})" if fixed is not None else ""
    return visible(", ".join(map(str, results.seeds)) + network, 80)


def _plain(value: Any) -> str:
    """A mapping or a name as a reader would say it."""
    if not isinstance(value, Mapping):
        return str(value)
    name = value.get("preset", "")
    rest = ", ".join(f"{key} {_plain(each)}" for key, each in value.items() if key != "preset")
    return f"{name}, {rest}" if name and rest else str(name) or rest


def _compute(compute: Any) -> str:
    """Such as `50 ms a step, jitter 0.1`."""
    if not isinstance(compute, Mapping):
        return str(compute)
    words = []
    for key, value in compute.items():
        if key == "fixed" and isinstance(value, str):
            words.append(f"{format_seconds(parse_seconds(value))} a step")
        else:
            words.append(f"{key} {_plain(value)}" if value not in ({}, None) else str(key))
    return ", ".join(words if "jitter" in compute else [*words, "no jitter"])


def _placement(results: Results, topology: Mapping[str, Any]) -> str:
    network = Topology.from_mapping(topology, "experiment.yaml: topology")
    hosts = _hosts(results, network)
    places = Counter(network.region_of(host) for host in hosts)
    told = ", ".join(f"{visible(place, 30)}: {count}" for place, count in list(places.items())[:12])
    more = f" and {len(places) - 12} more" if len(places) > 12 else ""
    shared = shared_hosts(hosts)
    return f"{told}{more}" + (f" ({shared})" if shared else "")


def _hosts(results: Results, network: Topology) -> Sequence[int]:
    count = results.settings["workers"].get("count")
    if not isinstance(count, int):
        raise InputError("experiment.yaml: workers.count: expected a whole number")
    return network.place(count, results.settings.get("placement"))


def shared_hosts(hosts: Sequence[int]) -> str:
    """A few words where hosts carry several workers each; empty where none does."""
    most = max(Counter(hosts).values(), default=0)
    if most < 2:
        return ""
    return f"{len(hosts)} workers on {len(set(hosts))} hosts, up to {most} on one"


def run_facts(results: Results) -> list[tuple[str, list[str]]]:
    """For each strategy that says so: its judged model, its collectives, and where its time went."""
    rows = []
    for result in results.strategies:
        cells = [_JUDGED.get(result.judged or "", "-"), _collectives(result), *_times(result)]
        if any(cell != "-" for cell in cells):
            rows.append((visible(result.name, 40), cells))
    return rows


def _times(result: StrategyResult) -> list[str]:
    seconds = (result.computing_seconds, result.network_seconds, result.waiting_seconds)
    return ["-" if each is None else format_seconds(each) for each in seconds]


def _collectives(result: StrategyResult) -> str:
    told = [f"{op}: {_algorithms(used)}" for op, used in result.collectives.items()]
    return visible("; ".join(told), 300) or "-"


def _algorithms(used: Any) -> str:
    if isinstance(used, Mapping):
        return ", ".join(f"{key} {_algorithms(each)}" for key, each in used.items())
    if isinstance(used, list | tuple):
        return ", ".join(map(str, used))
    return str(used)
