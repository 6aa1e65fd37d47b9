"""The whole way on one network: probe it, import what iperf3 and ping measured, plan, export, and run for real.

    sudo python benchmarks/from_probe_to_run.py [--out DIR]

Namespaces are joined by shaped links (benchmarks/shaped_links.py) with figures that nothing below uses. `netsim probe`
and, where they are installed, iperf3 and ping measure between them, and make a topology each. `netgym plan` plans a
round of a small model on the probed one, `netsim export` writes tc scripts for it (checked for syntax), and the same
experiment runs on the same namespaces over gloo. Printed is what was set, measured and planned, and the real rounds.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import probe
import yaml
from harness import NETGYM, NETSIM, REALTIME
from real_runs import run_real, run_simulated, steps_of
from shaped_links import ShapedLinks, why_not

from netsim import Topology

SET = {
    "name": "set",
    "regions": {
        "asia": {"hosts": 1, "nic": "10 Gbit/s"},
        "eu": {"hosts": 1, "up": "24 Mbit/s", "down": "40 Mbit/s"},
        "us": {"hosts": 1, "nic": "10 Gbit/s"},
    },
    "wan": [
        {"between": ["asia", "eu"], "bandwidth": "15 Mbit/s", "rtt": "40 ms"},
        {"between": ["asia", "us"], "up": "20 Mbit/s", "down": "30 Mbit/s", "rtt": "30 ms"},
        {"between": ["eu", "us"], "bandwidth": "35 Mbit/s", "rtt": "20 ms"},
    ],
}
EXPERIMENT: dict[str, Any] = {
    "name": "chain",
    "task": {"name": "text", "block_size": 32},
    "model": {"name": "gpt", "preset": "byte", "num_layers": 2, "width": 128, "num_heads": 4},
    "workers": {"count": 3},
    "device": "cpu",
    "protocol": "gloo",
    "collectives": "gloo",
    "steps": 24,
    "batch_size": 1,  # so that the network decides, not two cores for three ranks
    "evaluate": {"samples": 0},
    "compare_calls": False,
    "strategies": [
        {"name": "DiLoCo", "H": 4, "lr": 1e-3},
        {"name": "DiLoCo", "label": "DiLoCo-int8", "H": 4, "codec": "int8", "lr": 1e-3},
    ],
}


def output(*words: str, check: bool = True) -> str:
    """Output of a command that what else this machine does should not delay, as real runs."""
    done = subprocess.run([*REALTIME, *words], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


def by_hand(net: ShapedLinks, folder: Path) -> list[Path]:
    """iperf3 -J (8 streams) and ping between all hosts, each in a file FROM--TO; none where these are missing."""
    if not all(map(shutil.which, ("iperf3", "ping"))):
        return []
    files = []
    names = {host.name: host.name.removesuffix(".0") for host in net.topology.hosts}
    for one, other in itertools.permutations(names, 2):
        path = folder / f"{names[one]}--{names[other]}.json"
        server = subprocess.Popen(
            [*net.inside(other), *REALTIME, "iperf3", "-s", "-1"], stdout=subprocess.DEVNULL
        )
        try:
            time.sleep(0.5)
            client = ["iperf3", *["-J", "-P", "8", "-t", "4", "-O", "1", "-c"], net.address(other)]
            path.write_text(output(*net.inside(one), *REALTIME, *client, check=False))
            server.wait(20)
            ping = ["ping", *["-c", "20", "-i", "0.05"], net.address(other)]
            path.with_suffix(".txt").write_text(output(*net.inside(one), *ping, check=False))
        except subprocess.TimeoutExpired:
            server.kill()
            return []
        files += [path, path.with_suffix(".txt")]
    return files


def report(title: str, wanted: Topology, found: Topology, with_lines: bool) -> None:
    print(title)
    for what, was_set, got in probe.rows(wanted, found):
        if not with_lines and ("sends" in what or "receives" in what):
            continue  # separate measurements of routes cannot find hosts' own lines
        print(f"    {what:22} set {was_set:8.2f}  found {got:8.2f}  {got / was_set - 1:+.1%}")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--out", type=Path, help="keep all files here")
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"from_probe_to_run: {reason}")
    with tempfile.TemporaryDirectory() as scratch:
        chain(args.out or Path(scratch))


def chain(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    wanted = Topology.from_mapping(SET)
    with ShapedLinks(wanted) as net:
        text = probe.probe(net, ["--seconds", "2", "--name", "mine"], 300.0)
        (out / "mine.yaml").write_text(text)
        report("netsim probe", wanted, Topology.load(out / "mine.yaml"), True)
        measured = by_hand(net, out)
        if measured:
            imported = output(*NETSIM, "import", *map(str, measured), "--name", "byhand")
            (out / "byhand.yaml").write_text(imported)
            report("netsim import of iperf3 and ping", wanted, Topology.load(out / "byhand.yaml"), False)
        experiment = {**EXPERIMENT, "topology": "mine.yaml"}
        timed = {"measured": {}, "coding": "measured"}
        (out / "chain.yaml").write_text(yaml.safe_dump({**experiment, "compute": timed}))
        run_simulated(out / "chain.yaml", out / "simulated", [])
        # Plans take what a step was measured to take on this machine, which the simulated run has stored.
        compute = yaml.safe_load((out / "simulated" / "experiment.yaml").read_text())["compute"]
        (out / "plan.yaml").write_text(yaml.safe_dump({**experiment, "compute": compute}))
        plans = json.loads(output(*NETGYM, "plan", str(out / "plan.yaml"), "--json"))
        output(*NETSIM, "export", str(out / "mine.yaml"), "--format", "tc", "--out", str(out / "tc"))
        scripts = sorted((out / "tc").glob("*.sh"))
        for script in scripts:
            subprocess.run(["sh", "-n", str(script)], check=True)
        print(f"netsim export: {', '.join(script.name for script in scripts)} (syntax checked)")
        run_real(out / "chain.yaml", net, out / "real", [], 600.0)
    print(f"load {os.getloadavg()[0]:.1f}")
    for plan, strategy in zip(plans, EXPERIMENT["strategies"], strict=True):
        name = strategy.get("label", strategy["name"])
        rounds = {
            kind: rounds_of(steps_of(out / kind, name), strategy["H"]) for kind in ("real", "simulated")
        }
        real, simulated = (statistics.median(rounds[kind][1:]) for kind in ("real", "simulated"))
        print(
            f"{name}: planned {plan['seconds_per_round']:.3f} s, simulated with measured compute {simulated:.3f} s,"
        )
        print(
            f"    measured {real:.3f} s ({plan['seconds_per_round'] / real - 1:+.1%}, {simulated / real - 1:+.1%})"
        )
        print("    measured rounds:  " + " ".join(f"{each:.3f}" for each in rounds["real"]))
        print("    simulated rounds: " + " ".join(f"{each:.3f}" for each in rounds["simulated"]))


def rounds_of(steps: list[dict[str, float]], length: int) -> list[float]:
    """Seconds of each round; the first without its first step."""
    ends = [
        steps[0]["seconds"],
        *(steps[index]["seconds"] for index in range(length - 1, len(steps), length)),
    ]
    return [after - before for before, after in itertools.pairwise(ends)]


if __name__ == "__main__":
    main()
