"""Errors against SimGrid, ns-3, real gloo, the shipped networks' own rates and published computing times, by case.

    python benchmarks/accuracy.py [simgrid|ns3|gloo|measured|compute ...] [--plots DIR]

With --plots the two pictures of docs/accuracy.md are drawn into DIR.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests" / "golden")]

import compute_cases  # noqa: E402
import gloo  # noqa: E402
import harness  # noqa: E402
import ns3_cases  # noqa: E402
import simgrid_cases  # noqa: E402

from netsim import Topology, shipped_topologies  # noqa: E402
from netsim.transfers import time_flows  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PARTS = ("simgrid", "ns3", "gloo", "measured", "compute")
GOLDEN = ("star8.a2a8", "wan4_8.a2a8", "star64.a2a64", "random100.random_steady")


def cells(part: str) -> Iterator[dict[str, Any]]:
    """Cells of `netgym reproduce`: recorded and simulated seconds of simgrid, ns3, compute, or gloo's folders."""
    if part == "simgrid":
        for name, durations, expected in simgrid_durations():
            worst = int(np.argmax(np.abs(durations - expected) / expected))
            yield cell(f"{name}, {len(expected):,} transfers, the worst", expected[worst], durations[worst])
    elif part == "ns3":
        for case in ns3_cases.singles(lossy=False, know_queue=True):
            if case.num_bytes >= 1_000_000:
                yield cell(f"one transfer, {case.name}", case.expected[0], case.seconds[0])
        for case in ns3_cases.shared(know_queue=True):
            expected, found = ((case.start + each).max() for each in (case.expected, case.seconds))
            yield cell(f"makespan, {case.name}", expected, found)
    elif part == "compute":
        for name, (parts, tokens) in compute_cases.predictions().items():
            seconds = tokens / compute_cases.PUBLISHED[name]
            first = compute_cases.FIRST[name]
            yield {**cell(name, seconds, sum(parts.values()), "before"), "first": first}
    else:
        basis = "known" if part in ("held_out", "unseen") else "fitted"
        for file in sorted((gloo.GOLDEN / part).glob("*.json")):
            for each in gloo.compare(json.loads(file.read_text())):
                if each.measured >= gloo.COUNTED_SECONDS:
                    yield cell(f"{each.case}: {each.label}", each.measured, each.simulated, basis)


def cell(what: str, measured: float, predicted: float, basis: str = "known") -> dict[str, Any]:
    """Cell of `netgym reproduce` in seconds."""
    values = {"measured": float(measured), "predicted": float(predicted), "first": None, "cause": ""}
    return {"what": what, "basis": basis, "unit": "s", **values}


def simgrid_durations() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name of a case, and its transfers' durations here and in SimGrid, in seconds."""
    for name in GOLDEN:
        topology, rows = simgrid_cases.case(name)
        starts = np.array([row[0] for row in rows])
        ends = time_flows(topology, rows, "ideal"), np.array(simgrid_cases.golden(name))
        yield name, ends[0] - starts, ends[1] - starts


def show_simgrid_accuracy() -> None:
    print(f"{'SimGrid':28}{'transfers':>10}   largest error of a duration")
    for name, durations, expected in simgrid_durations():
        error = np.max(np.abs(durations - expected) / expected)
        print(f"{name:28}{len(expected):10}{error:12.1e}")


def show_ns3_accuracy() -> None:
    blind, knowing = ns3_cases.singles(lossy=False), ns3_cases.singles(lossy=False, know_queue=True)
    print(f"\n{'ns-3, one transfer':62}{'ns-3 s':>9}{'here s':>9}{'error':>8}{'queue known':>13}")
    show_rows(blind, knowing)
    large = [case for case in blind if case.num_bytes >= 1_000_000]
    summary("1 MB and more", [case.mean_error for case in large])
    large = [case for case in knowing if case.num_bytes >= 1_000_000]
    summary("1 MB and more, queue known", [case.mean_error for case in large])
    print("\nns-3, random loss")
    show_rows(ns3_cases.singles(lossy=True), ns3_cases.singles(lossy=True, know_queue=True))
    blind, knowing = ns3_cases.shared(), ns3_cases.shared(know_queue=True)
    print(f"\n{'ns-3, several transfers':48}{'makespan':>10}{'mean':>8}   with the queue known")
    for case, known in zip(blind, knowing, strict=True):
        print(
            f"{case.name:48}{case.makespan_error:+10.1%}{case.mean_error:+8.1%}   "
            f"{known.makespan_error:+8.1%}{known.mean_error:+8.1%}"
        )
    print("without staggered_n8 at 100 Mbit/s, in which one of ns-3's flows stood still for 12 s:")
    for label, cases in (("", blind), (", queue known", knowing)):
        counted = [case for case in cases if not case.name.startswith("staggered_n8, 100 ")]
        summary(f"makespan{label}", [case.makespan_error for case in counted])
        summary(f"mean{label}", [case.mean_error for case in counted])


def show_measured_links() -> None:
    """Largest error of one transfer with the measurement's streams, over every pair of regions of each network."""
    print(f"\n{'shipped network, linux-tcp':30}{'pairs':>6}{'once started':>14}{'100 s':>8}{'10 s':>8}")
    for name in sorted(shipped_topologies()):
        topology = Topology.load(name)
        first = {host.region: host for host in reversed(topology.hosts)}.values()
        errors = []
        for source, target in itertools.permutations(first, 2):
            links = [topology.links[index] for index in topology.route(source.index, target.index)]
            measured = [link for link in links if link.measured_streams]
            if measured:
                rate = min(link.bits_per_second for link in measured) / 8
                protocol = {
                    "preset": "linux-tcp",
                    "streams": max(link.measured_streams or 1 for link in measured),
                }
                sent = [(0.0, source.name, target.name, seconds * rate) for seconds in (10, 100, 200)]
                ten, hundred, more = (float(time_flows(topology, [each], protocol)[0]) for each in sent)
                errors.append((abs((more - hundred) / 100 - 1), hundred / 100 - 1, ten / 10 - 1))
        if errors:
            started, hundred, ten = map(max, zip(*errors, strict=True))
            print(f"{name:30}{len(errors):6}{started:14.3%}{hundred:+8.1%}{ten:+8.1%}")


def show_computing_times() -> None:
    """Steps by the roofline, and by their products alone at 40 % of the peak."""
    print(
        f"\n{'computing on A100':30}{'published':>11}{'here':>9}{'error':>8}{'products at 40 %':>18}   bound by"
    )
    for name, (parts, tokens) in compute_cases.predictions().items():
        whole, published = sum(parts.values()), tokens / compute_cases.PUBLISHED[name]
        alone = parts["products"] * compute_cases.A100.product_share / 0.4
        shares = ", ".join(f"{part} {seconds / whole:.0%}" for part, seconds in parts.most_common())
        print(
            f"{name:30}{published:9.3f} s{whole:7.3f} s{whole / published - 1:+8.1%}{alone / published - 1:+18.1%}   "
            f"{shares}"
        )


def show_rows(blind: list[ns3_cases.Comparison], knowing: list[ns3_cases.Comparison]) -> None:
    for case, known in zip(blind, knowing, strict=True):
        print(
            f"{case.name:62}{case.expected[0]:9.3f}{case.seconds[0]:9.3f}{case.mean_error:+8.1%}"
            f"{known.mean_error:+13.1%}"
        )


def summary(label: str, errors: Iterable[float]) -> None:
    size = np.abs(list(errors))
    print(
        f"  {label}: median {np.median(size):.2%}, p95 {np.quantile(size, 0.95):.1%}, worst {size.max():.1%}"
    )


def draw(path: Path, title: str, groups: dict[str, list[tuple[float, float]]]) -> None:
    """One dot a result: measured seconds across, relative error up; the band is 10 %."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    axes.axhspan(-10, 10, color="0.92")
    axes.axhline(0, color="0.5", linewidth=0.8)
    for name, points in groups.items():
        seconds, errors = zip(*points, strict=True)
        axes.plot(seconds, [100 * error for error in errors], "o", markersize=4, alpha=0.7, label=name)
    axes.set(
        xscale="log", ylim=(-60, 60), xlabel="measured (s)", ylabel="error of the model (%)", title=title
    )
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def plot_ns3(path: Path) -> None:
    groups = {
        "one transfer, 1 MB and more: duration": [
            (float(case.expected[0]), case.mean_error)
            for case in ns3_cases.singles(lossy=False)
            if case.num_bytes >= 1_000_000
        ],
        "several transfers: makespan": [
            (float((case.start + case.expected).max()), case.makespan_error) for case in ns3_cases.shared()
        ],
    }
    draw(path, "linux-tcp against ns-3", groups)


def plot_gloo(path: Path) -> None:
    groups: dict[str, list[tuple[float, float]]] = {}
    names = {"testbed": "stars, pairs and two sites", "sites": "sites", "unseen": "sites, compared at last"}
    names["held_out"] = "sites, drawn afterwards"
    names["long"] = "long links, drawn"
    for folder in gloo.FOLDERS:
        for file in sorted((gloo.GOLDEN / folder).glob("*.json")):
            for each in gloo.compare(json.loads(file.read_text())):
                if each.measured >= gloo.COUNTED_SECONDS:
                    groups.setdefault(names[folder], []).append((each.measured, each.error))
    draw(path, "gloo's model against real gloo over shaped links", groups)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="what to compare with; by default all")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the pictures into this folder")
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if "simgrid" in parts:
        show_simgrid_accuracy()
    if "ns3" in parts:
        show_ns3_accuracy()
    if "gloo" in parts:
        gloo.main([])
    if "measured" in parts:
        show_measured_links()
    if "compute" in parts:
        show_computing_times()
    if arguments.plots is not None:
        plot_ns3(arguments.plots / "accuracy-ns3.png")
        plot_gloo(arguments.plots / "accuracy-gloo.png")


if __name__ == "__main__":
    main()
