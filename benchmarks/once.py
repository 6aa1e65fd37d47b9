"""Studies that train each distinct training once, against training every point: processor seconds.

    python benchmarks/once.py [CASE]...        # digits (its example), sweep (12 points), networks (50), gpt (1 M)

The first point trains, after a run that imports what it needs; all others are retimed, and the page is written.
Training every point takes the first point's time once a point: the network changes nothing in what is computed. Last
come the host seconds that were estimated before the first step, and those that the points and the page then took, one
point after the other.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import harness

from netgym.studies.runners import write_results
from netgym.studies.study import Study
from netgym.studies.sweep import SweepProgress, cpu_seconds, estimated, run_here, run_sweep
from netsim.files.documents import Document, load_document

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits_wan.yaml"
NETWORKS = ["wan-4-regions", "home-tiers", "lan", "wan-10-regions"]


def digits(**changes: Any) -> dict[str, Any]:
    """The digits' example with one seed."""
    form = load_document(EXAMPLE).data
    assert isinstance(form, dict)
    return form | {"seeds": 1} | changes


def of_rate(megabits: int) -> dict[str, Any]:
    """Network of two regions."""
    regions = {name: {"hosts": 4, "nic": "1 Gbit/s", "latency": "50 us"} for name in ("us", "eu")}
    return {
        "regions": regions,
        "wan": [{"between": ["us", "eu"], "bandwidth": f"{megabits} Mbit/s", "rtt": "90 ms"}],
    }


SWEEP = {"topology": NETWORKS[:3], "protocol": ["ideal", "linux-tcp"], "compute.jitter": [0.1, 0.3]}
CASES: dict[str, dict[str, Any]] = {
    "digits": digits(sweep={"topology": NETWORKS}),
    "sweep": digits(sweep=SWEEP),
    "networks": digits(sweep={"topology": [of_rate(10 * number) for number in range(1, 51)]}),
    "gpt": {
        "task": {"name": "text", "num_bytes": 200_000},
        "model": {"name": "gpt", "preset": "byte"},
        "workers": {"count": 4, "kind": "threads"},
        "topology": "lan",
        "compute": "100 ms",
        "steps": 20,
        "evaluate": {"every": 20, "samples": 16},
        "strategies": ["AllReduce", {"name": "DiLoCo", "H": 10}],
        "sweep": {"topology": NETWORKS},
    },
}


class Took(NamedTuple):
    """Processor seconds of each point, in order, and of the page; host seconds of all, and their estimate."""

    points: list[float]
    page: float
    wall: float
    estimate: float


def seconds_of(form: dict[str, Any]) -> Took:
    """Run a sweep, one point after the other."""
    taken = []

    def one_by_one(points: Any) -> Any:
        for point in points:
            before = cpu_seconds()
            yield from run_here([point])
            taken.append(cpu_seconds() - before)

    with tempfile.TemporaryDirectory() as folder:
        study = Study.create(Document("study", form), EXAMPLE.parent, folder, "study")
        _, _, estimate = estimated(study, 1)
        assert estimate is not None
        began = time.perf_counter()
        run_sweep(study, SweepProgress(lambda *_: None, study.sweep.num_points), one_by_one)
        before = cpu_seconds()
        write_results(study)
        page, wall = cpu_seconds() - before, time.perf_counter() - began
        study.folder.release()
    return Took(taken, page, wall, estimate.seconds)


def main() -> None:
    """Print a row a case."""
    parser = harness.parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="[all]")
    asked = parser.parse_args().cases or list(CASES)
    seconds_of(CASES["digits"] | {"steps": 1, "sweep": {"topology": ["lan"]}})
    harness.heading(
        *("study", "points", "a training", "a retimed point", "share", "the page", "trained each", "once"),
        *("ratio", "host s", "estimated", "ratio"),
    )
    for name in asked:
        took = seconds_of(CASES[name])
        first, *others = took.points
        mean, number = sum(others) / len(others), len(took.points)
        each, once = number * first + took.page, sum(took.points) + took.page
        harness.row(
            *(name, number, f"{first:.2f} s", f"{mean:.3f} s", f"{mean / first:.1%}", f"{took.page:.2f} s"),
            *(f"{each:.0f} s", f"{once:.1f} s", f"{each / once:.1f}", f"{took.wall:.1f}"),
            *(f"{took.estimate:.1f}", f"{took.estimate / took.wall:.2f}"),
        )


if __name__ == "__main__":
    main()
