"""Simulated gloo against real gloo over shaped links, case by case.

    python benchmarks/gloo.py [CASE.json ...]

Without arguments it simulates every case in tests/golden: those in `testbed`, after which the protocol was modelled,
those in `sites` and `unseen`, on which its queues were tried, those in `held_out`, drawn and recorded after the last
change of its queues, and those in `long`, after the last change of its rendezvous. A case is the network, and
operations with the seconds that torch.distributed's gloo backend took for them; all operations of a case run one after
the other on the same connections, as they were measured. Operations under 5 ms time the software rather than the
network: they are printed but not counted.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netsim import Clock, Network, Topology, schedule, start_collective

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from netsim.collectives.schedules.schedule import Schedule

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
FOLDERS = ("testbed", "sites", "unseen", "held_out", "long")
CASES = GOLDEN / "testbed"
COUNTED_SECONDS = 5e-3
FRAME_BYTES = 1514


@dataclass(frozen=True)
class Comparison:
    """One operation: what gloo took and what the model says, in seconds.

    Attributes:
        measured: median of the calls.
        low, high: fastest and slowest call, of all recordings.
        simulated: the model's median.
        again: medians of the same calls, recorded on other days.
    """

    case: str
    label: str
    measured: float
    low: float
    high: float
    simulated: float
    again: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.simulated / self.measured - 1.0

    @property
    def error_beyond(self) -> float:
        """Relative to the nearest of the real calls; zero between them."""
        return self.simulated / min(max(self.simulated, self.low), self.high) - 1.0


def topology_of(case: dict[str, Any]) -> Topology:
    """A case's network and its queues.

    What delay a link has one way only is split over both directions: paths keep theirs.
    """
    directed = {(link["from"], link["to"]): link for link in case["links"]}
    links = []
    for (first, second), there in directed.items():
        if (second, first) in directed and first < second:
            back = directed[second, first]
            links.append(
                {
                    "between": [first, second],
                    "up": f"{there['mbit']} Mbit/s",
                    "down": f"{back['mbit']} Mbit/s",
                    "latency": f"{(there['delay_ms'] + back['delay_ms']) / 2} ms",
                    **({"mtu": there["mtu"]} if "mtu" in there else {}),
                }
            )
    hosts = {key: {} for key in case["ranks"]}
    topology = Topology.from_mapping(
        {
            "name": case["case"],
            "source": "testbed",
            "hosts": hosts,
            "routers": case["routers"],
            "links": links,
        }
    )
    queues = {
        ends: link["queue_bytes"] // FRAME_BYTES for ends, link in directed.items() if "queue_bytes" in link
    }
    queued = [replace(link, queue_packets=queues.get((link.source, link.target))) for link in topology.links]
    return replace(topology, links=tuple(queued))


def calls_of(result: dict[str, Any], num: int) -> list[tuple[Schedule, tuple[int, ...]]]:
    """The collectives of one result in the order in which they are issued, each with its members' ranks."""
    op, num_bytes = result["op"].removesuffix("_list"), result["bytes"]
    everyone = tuple(range(num))
    gloo: dict[str, Any] = {"algorithm": "gloo", "element_bytes": 4}
    if op == "sendrecv":
        return [(schedule(op, 2, num_bytes=num_bytes, **gloo), tuple(pair)) for pair in result["pairs"]]
    if result["op"] == "reduce_scatter_list":
        return [(schedule("all_reduce", num, num_bytes=num_bytes // num, **gloo), everyone)] * num
    if op == "all_to_all_uneven":
        shares = [(2 * rank + 1) * (num_bytes // 4) // num**2 * 4 for rank in range(num)]
        return [(schedule("all_to_all", num, parts=[shares] * num, **gloo), everyone)]
    if op in ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"):
        num_bytes = num_bytes // 4 // num * num * 4
        num_bytes *= num if op == "all_to_all" else 1  # there `bytes` is what each rank has for all of them
    made = schedule(op, num, num_bytes=num_bytes, root=result.get("root", 0), **gloo)
    return [(made, everyone)] * result.get("concurrent", 1)


def time_calls(
    network: Network,
    calls: list[tuple[Schedule, tuple[int, ...]]],
    group: object,
    late: tuple[int, float] | None,
) -> float:
    """Seconds from the common start until the last rank is through all `calls`, two in flight, in order."""
    clock = network.env
    start = clock.now
    ends: list[float] = []
    lanes: dict[int, deque[Callable[[], None]]] = {}

    def enter_next(rank: int) -> None:
        if lanes[rank]:
            lanes[rank].popleft()()

    for made, ranks in calls:

        def on_done(member: int, ranks: tuple[int, ...] = ranks) -> None:
            ends.append(clock.now)
            enter_next(ranks[member])

        one = start_collective(network, made, ranks, group=group, on_done=on_done)
        for member, rank in enumerate(ranks):
            lanes.setdefault(rank, deque()).append(lambda one=one, member=member: one.arrive(member))

    def begin(rank: int, delay: float) -> Iterator[Any]:
        yield clock.timeout(delay)
        for _ in range(network.protocol.collectives_in_flight):
            enter_next(rank)

    for rank in lanes:
        clock.process(begin(rank, late[1] if late and late[0] == rank else 0.0))
    clock.run()
    return max(ends) - start


def compare(case: dict[str, Any], most_repetitions: int = 3) -> list[Comparison]:
    """Simulate all results of a case in order and compare medians.

    At most `most_repetitions` are counted, and as many before them run to warm up.
    """
    clock = Clock()
    network = Network(clock, topology_of(case), "gloo")
    num = len(case["ranks"])
    compared = []
    for number, result in enumerate(case["results"]):
        calls = calls_of(result, num)
        warmup = min(len(result.get("warmup", ())), most_repetitions)
        seconds = []
        for repetition in range(warmup + min(result["n"], most_repetitions)):
            clock.run(until=clock.now + result.get("gap_ms", 50) / 1e3)
            group = (number, repetition) if result.get("fresh") else "first"
            seconds.append(time_calls(network, calls, group, result.get("late")))
        again = result.get("again", ())
        compared.append(
            Comparison(
                case["case"],
                _label(result),
                result["median"],
                min(result["min"], *(low for _, low, _, _ in again)) if again else result["min"],
                max(result["max"], *(high for _, _, high, _ in again)) if again else result["max"],
                statistics.median(seconds[warmup:]),
                tuple(median for median, *_ in again),
            )
        )
    return compared


def _label(result: dict[str, Any]) -> str:
    notes = [
        f"{key}={result[key]}" for key in ("root", "pairs", "concurrent", "late", "gap_ms") if key in result
    ]
    return " ".join([result["op"], str(result["bytes"]), *notes, *(["fresh"] if result.get("fresh") else [])])


def summary(compared: list[Comparison]) -> tuple[int, float, float]:
    """Number, median and 95th percentile of the absolute errors of those of 5 ms and more."""
    errors = counted_errors(compared)
    return len(errors), statistics.median(errors), _high(errors)


def _high(errors: list[float]) -> float:
    """95th percentile of sorted errors."""
    return errors[min(len(errors) - 1, int(0.95 * len(errors)))]


def _described(errors: Iterable[float]) -> str:
    size = sorted(map(abs, errors))
    return (
        f"median {statistics.median(size):.2%}, mean {statistics.mean(size):.1%},"
        f" 95th percentile {_high(size):.1%}, worst {size[-1]:.1%}"
    )


def counted_errors(compared: list[Comparison]) -> list[float]:
    """Absolute errors of those of 5 ms and more, the smallest first."""
    return sorted(abs(each.error) for each in compared if each.measured >= COUNTED_SECONDS)


def show(compared: list[Comparison], name: str) -> None:
    """Print every comparison and the errors by case, by operation and in all."""
    for each in compared:
        inside = "" if each.measured >= COUNTED_SECONDS else "  (not counted)"
        print(
            f"{each.case:23} {each.label:44} gloo {each.measured:9.6f} [{each.low:9.6f} {each.high:9.6f}]"
            f"  netsim {each.simulated:9.6f}  {each.error:+7.1%}{inside}"
        )
    for kind in ("case", "op"):
        groups: dict[str, list[Comparison]] = {}
        for each in compared:
            groups.setdefault(each.case if kind == "case" else each.label.split()[0], []).append(each)
        for key, members in groups.items():
            if any(each.measured >= COUNTED_SECONDS for each in members):
                count, median, high = summary(members)
                print(f"{kind} {key:23} {count:4} results  median {median:6.2%}  p95 {high:6.1%}")
    counted = [each for each in compared if each.measured >= COUNTED_SECONDS]
    beyond = [each.error_beyond for each in counted]
    print(
        f"{name}: {len(counted)} results of 5 ms and more, error: {_described(each.error for each in counted)}"
    )
    print(
        f"{name}: beyond the range of the real calls ({beyond.count(0.0)} are within): {_described(beyond)}"
    )
    repeated = [each for each in counted if each.again]
    if repeated:
        pairs = [after / each.measured - 1.0 for each in repeated for after in each.again]
        print(f"{name}: {len(pairs)} medians recorded again, against the first: {_described(pairs)}")
        print(
            f"{name}: the model, of those {len(repeated)} results: {_described(each.error for each in repeated)}"
        )


def main(paths: list[str]) -> None:
    """Compare the cases at `paths`, or those of each folder."""
    folders = (
        {"all": [Path(path) for path in paths]}
        if paths
        else {folder: sorted((GOLDEN / folder).glob("*.json")) for folder in FOLDERS}
    )
    for name, cases in folders.items():
        show([each for path in cases for each in compare(json.loads(path.read_text()))], name)


if __name__ == "__main__":
    main(sys.argv[1:])
