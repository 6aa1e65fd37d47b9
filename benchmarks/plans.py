"""Processor time of plans: `netgym advise` on twenty unlike homes, and `netgym plan` of 70B parameters on 64 workers.

    python benchmarks/plans.py [advise|DiLoCo|AllReduce ...]

The homes are those of docs/planning.md. Prints one JSON row a case.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import yaml

KINDS = ((20, 300, 10, "0.01 %"), (3, 25, 15, "0.05 %"), (1000, 1000, 3, "0 %"))  # cable, DSL, fibre


def homes(number: int = 20) -> dict[str, Any]:
    """Unlike homes around one exchange: each of a kind has a tenth more up than the one before."""
    links = []
    for home in range(number):
        up, down, milliseconds, loss = KINDS[home % 3]
        rates = {
            "up": f"{up * (1 + home // 3 / 10):g} Mbit/s",
            "down": f"{down * (1 + home // 3 / 20):g} Mbit/s",
        }
        latency = f"{milliseconds + home % 4} ms"
        links.append({"between": [f"home{home}", "exchange"], **rates, "latency": latency, "loss": loss})
    devices = {f"home{home}": {"device": "rtx-3090" if home % 2 else "rtx-4090"} for home in range(number)}
    return {"name": "twenty-homes", "routers": ["exchange"], "hosts": devices, "links": links}


def words(case: str, folder: Path) -> list[str]:
    """Command line of a case."""
    if case != "advise":
        where = "--topology wan-4-regions --workers 64 --device h100 --devices-per-worker 8"
        return ["plan", "--model", "llama-3-70b", "--strategy", case, *where.split()]
    network = folder / "twenty-homes.yaml"
    network.write_text(yaml.safe_dump(homes()), encoding="utf-8")
    asked = "--model llama-150m --tokens 3B --batch-size 32 --sequence 1024"
    return ["advise", str(network), *asked.split()]


def main() -> None:
    for case in sys.argv[1:] or ["advise", "DiLoCo", "AllReduce"]:
        before = harness.cpu_seconds(resource.RUSAGE_CHILDREN)
        with tempfile.TemporaryDirectory() as folder:
            command = [*harness.NETGYM, *words(case, Path(folder)), "--json"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = harness.cpu_seconds(resource.RUSAGE_CHILDREN) - before
        print(json.dumps({"case": case, "processor_seconds": round(seconds, 1)}), flush=True)


if __name__ == "__main__":
    main()
