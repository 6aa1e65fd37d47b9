"""Studies that train each distinct training once, against training every point: processor seconds.

    python benchmarks/once.py [CASE]...        # digits (its example), sweep (12 points), networks (50), gpt (1 M)

The first point trains, after a run that imports what it needs; all others are retimed. Training every point takes the
first point's time once a point: the network changes nothing in what is computed.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import harness

from netgym.studies.study import Study
from netgym.studies.sweep import SweepProgress, cpu_seconds, run_here, run_sweep
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


def seconds_of(form: dict[str, Any]) -> list[float]:
    """Processor seconds of each point, in order."""
    taken = []

    def one_by_one(points: Any) -> Any:
        for point in points:
            before = cpu_seconds()
            yield from run_here([point])
            taken.append(cpu_seconds() - before)

    with tempfile.TemporaryDirectory() as folder:
        study = Study.create(Document("study", form), EXAMPLE.parent, folder, "study")
        run_sweep(study, SweepProgress(lambda *_: None, study.sweep.num_points), one_by_one)
        study.folder.release()
    return taken


def main() -> None:
    """Print a row a case."""
    parser = harness.parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="[all]")
    asked = parser.parse_args().cases or list(CASES)
    seconds_of(CASES["digits"] | {"steps": 1, "sweep": {"topology": ["lan"]}})
    print("| study | points | a training | a retimed point | share | trained each | once | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name in asked:
        first, *others = seconds_of(CASES[name])
        mean, number = sum(others) / len(others), 1 + len(others)
        total = first + sum(others)
        print(
            f"| {name} | {number} | {first:.2f} s | {mean:.3f} s | {mean / first:.1%} | {number * first:.0f} s "
            f"| {total:.1f} s | {number * first / total:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
