"""How right the network is: against SimGrid, ns-3 and real gloo, case by case.

    python benchmarks/accuracy.py [simgrid|ns3|gloo ...] [--plots DIR]

With --plots the two pictures of docs/accuracy.md are drawn into DIR.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gloo
import network

PARTS = ("simgrid", "ns3", "gloo")


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
    ns3_cases = network.ns3_cases
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
    for file in sorted(gloo.CASES.glob("*.json")):
        for each in gloo.compare(json.loads(file.read_text())):
            if each.measured >= gloo.COUNTED_SECONDS:
                groups.setdefault(each.label.split()[0], []).append((each.measured, each.error))
    draw(path, "gloo's model against real gloo over shaped links", groups)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="what to compare with; by default all")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the pictures into this folder")
    arguments = parser.parse_args()
    parts = arguments.parts or PARTS
    if "simgrid" in parts:
        network.show_simgrid_accuracy()
    if "ns3" in parts:
        network.show_ns3_accuracy()
    if "gloo" in parts:
        gloo.main([])
    if arguments.plots is not None:
        plot_ns3(arguments.plots / "accuracy-ns3.png")
        plot_gloo(arguments.plots / "accuracy-gloo.png")


if __name__ == "__main__":
    main()
