"""What commands print on fixed input: text word by word, JSON as what it says.

They are started as `pyproject.toml` names them, each in a process of its own.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from forks import Fork
from frozen_networks import digest

__all__ = ["answer", "names"]

_ROOT = Path(__file__).parents[2]
_FILES = {
    "stormy.yaml": """\
name: stormy
regions:
  us: {hosts: 2, nic: 1 Gbit/s, latency: 50 us}
  eu: {hosts: 2, nic: 1 Gbit/s, latency: 50 us, device: h100}
wan:
  - {between: [us, eu], bandwidth: 100 Mbit/s, rtt: 80 ms, loss: 0.01 %, egress: 0.02 $/GB}
events:
  - {at: 1 s, link: [us, eu], down: true, for: 5 s}
  - {at: 30 s, link: [us, eu], bandwidth: 10 Mbit/s, for: 1 min}
traces:
  - {link: [us.0, us], bandwidth: [[0 s, 1 Gbit/s], [20 s, 300 Mbit/s], [60 s, 1 Gbit/s]]}
background:
  - {from: us.0, to: eu.0, rate: 5 Mbit/s, start: 5 s}
drift:
  - {link: [eu.0, eu], kind: lognormal, every: 1 s, sigma: 0.3, seed: 1}
protocol: linux-tcp
""",
    "broken.yaml": """\
hosts: [a, b]
links:
  - {between: [a, c], bandwidth: 10 Mbit/s, latency: 1}
  - {between: [a, b], bandwith: 10 Mbit/s}
protocol: tpc
""",
    "flows.csv": """\
start_s,src,dst,bytes
0,us.0,eu.0,1000000
0,us.1,eu.0,250000
0.5,eu.1,us.0,3000000
0.9,us.0,eu.1,0
20,us.0,us.1,12345678
""",
    "wrong.csv": "start_s,src,dst,bytes\n0,us.0,nowhere,1\n",
    "experiment.yaml": """\
task: digits
workers: {count: 4}
topology: wan-4-regions
compute: 50 ms
steps: 20
batch_size: 16
strategies:
  - {name: AllReduce, lr: 16e-3}
  - {name: DiLoCo, H: 40, lr: 8e-3}
""",
    "mistaken.yaml": "task: digits\nworkers: {cuont: 4}\nsteps: none\nstrategies: [AlReduce]\n",
}


def names() -> list[str]:
    """Command lines."""
    topologies = (
        "wan-4-regions",
        "lan",
        "home-broadband",
        "two-datacenters",
        "opendiloco-4-sites",
        "stormy.yaml",
    )
    shown = [f"netsim show {where}{form}" for where in topologies for form in ("", " --json")]
    checked = [f"netsim validate {where}" for where in ("stormy.yaml", "broken.yaml", "nowhere.yaml")]
    timed = [
        f"netsim flows stormy.yaml {rows}{protocol}"
        for rows in ("flows.csv", "wrong.csv")
        for protocol in ("", " --protocol ideal", " --protocol gloo")
    ]
    collectives = [
        f"netsim collective {where} {what}{protocol}{form}"
        for where in ("wan-4-regions", "stormy.yaml")
        for what in (
            "all_reduce --bytes 25MB",
            "all_gather --bytes 3MB --algorithm ring --repeat 3",
            "all_to_all --bytes 100kB",
            "barrier",
        )
        for protocol in ("", " --protocol gloo")
        for form in ("", " --json")
    ]
    wrong = [
        "netsim collective lan all_reduce",
        "netsim collective lan all_reduce --bytes 1MB --algorithm rnig",
        "netsim collective lan broadcast --bytes 1MB --root lan.9",
        "netsim collective lan sendrecv --bytes 1MB --ranks lan.0,lan.1",
    ]
    listed = [
        "netgym list",
        "netgym list --json",
        *(f"netgym list {what}" for what in ("topologies", "protocols")),
    ]
    experiments = ("experiment.yaml", "mistaken.yaml", "stormy.yaml", "broken.yaml")
    validated = [f"netgym validate {name}{form}" for name in experiments for form in ("", " --json")]
    return [*shown, *checked, *timed, *collectives, *wrong, *listed, *validated]


def answer(name: str) -> dict[str, Any]:
    """Exit status, and what was printed."""
    command, *arguments = name.split()
    with open(_ROOT / "pyproject.toml", "rb") as file:
        module, function = tomllib.load(file)["project"]["scripts"][command].split(":")
    environment = {"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"}

    def run() -> None:
        sys.argv = [command, *arguments]
        sys.exit(getattr(importlib.import_module(module), function)())

    with tempfile.TemporaryDirectory() as folder:
        for file_name, text in _FILES.items():
            (Path(folder) / file_name).write_text(text, encoding="utf-8")
        done = Fork(run, folder=folder, environment=environment).end()
    result = {"given": digest([name, _FILES]), "status": done.returncode, "stderr": done.stderr.splitlines()}
    try:
        return {**result, "json": json.loads(done.stdout)}
    except json.JSONDecodeError:
        return {**result, "text": done.stdout.splitlines()}
