"""Run folders written by hand, with all that a page can show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from exogym_core.results.fit_result import FitResult
from exogym_core.results.run_folder import RunFolder
from netsim import Protocol, Recorder, Topology
from netsim.network.trace import write_trace
from netsim.transfers import Flow, time_flows

if TYPE_CHECKING:
    from pathlib import Path

NETWORK: dict[str, Any] = {
    "name": "three homes and a long name that wants to be broken somewhere",
    "source": "made up",
    "hosts": ["ann", "bob", "cho"],
    "routers": ["exchange"],
    "links": [
        {"between": [home, "exchange"], "up": "20 Mbit/s", "down": "300 Mbit/s", "latency": "10 ms"}
        for home in ("ann", "bob", "cho")
    ],
    "events": [{"at": "10 s", "link": ["bob", "exchange"], "down": True, "for": "5 s"}],
    "protocol": "ideal",
}
NAMES = ("AllReduce", "DiLoCo", "SPARTA+DiLoCo", "<img src=x onerror=alert(1)>")
SEEDS = (0, 1, 2)
STEPS = 40


def write_run(path: Path, speed: float = 1.0, *, is_traced: bool = False, **settings: Any) -> Path:
    """A run of four strategies with three seeds each, one of which went on without a rank for a while."""
    run = RunFolder.create(path, "run")
    plain: dict[str, Any] = {
        "name": "pages",
        "task": {"name": "digits"},
        "workers": {"count": 3},
        "steps": STEPS,
        "batch_size": 8,
        "evaluate": {"every": 4},
        "seeds": list(SEEDS),
        "target_loss": 0.3,
        "topology": NETWORK,
        "strategies": [{"name": name} for name in NAMES],
    }
    run.write_text("experiment.yaml", yaml.safe_dump(plain | settings))
    run.write_environment()
    entries = []
    for position, name in enumerate(NAMES):
        by_seed = [_seed(run, name, seed, speed * (4 - position) / 2, position) for seed in SEEDS]
        entries.append({"name": name, "strategy": name, "steps": STEPS, "seeds": list(SEEDS), "by_seed": by_seed,
                        **{key: by_seed[1][key] for key in by_seed[1] if key != "seed"}})  # fmt: skip
    run.write_summary(entries)
    run.release()
    if is_traced:
        recorder = Recorder()
        flows = [Flow(0.0, 0, 1, 5_000_000), Flow(4.0, 1, 0, 10_000_000)]
        network = Topology.from_mapping(NETWORK, "here")
        time_flows(network, flows, Protocol.parse("ideal"), recorder=recorder)
        write_trace(recorder, path / "trace.json.gz")
    return path


def _seed(run: RunFolder, name: str, seed: int, pace: float, position: int) -> dict[str, Any]:
    train = [
        {
            "step": step,
            "train_loss": 2.0 / step + 0.01 * seed,
            "virtual_seconds": step * pace,
            "bytes_sent": 3000 * (step // (1 + 9 * position)),
            "wan_bytes": 3000 * (step // (1 + 9 * position)),
        }
        for step in range(1, STEPS + 1)
    ]
    worse = (1 + 0.05 * seed) * 0.9**position * pace**0.1
    looks = [
        {"step": step, "judged_loss": 2.3 / (1 + step / 5) * worse, "judged_step": step,
         "judged_virtual_seconds": step * pace, "accuracy": step / STEPS}
        for step in range(0, STEPS + 1, 4)
    ]  # fmt: skip
    links = [
        {"virtual_seconds": at, "ann->exchange": min(at, 10.0) * 2.5e6 / (1 + position), "exchange->bob": 1e6 * at}
        for at in (0.0, 10.0, 20.0, 80.0) if seed == SEEDS[0]
    ]  # fmt: skip
    run.write_result(name, FitResult(history=train, validation=looks, link_history=links), seed=seed)
    away = {
        "rank": 1,
        "step": 8,
        "virtual_seconds": 8 * pace,
        "back_step": 12,
        "back_virtual_seconds": 12 * pace,
    }
    return {
        "seed": seed,
        "final_loss": looks[-1]["judged_loss"],
        "accuracy": 1.0,
        "virtual_seconds": STEPS * pace,
        "virtual_seconds_to_target": 36 * pace,
        "target": "held",
        "compute_utilisation": 0.5,
        "bytes_sent_per_worker": train[-1]["bytes_sent"] // 3,
        "wan_bytes": train[-1]["wan_bytes"],
        "judged": "outer",
        "collectives": {"all_reduce": ["ring", "two-level-direct"]},
        "dropped_peers": [away] if name == "DiLoCo" else [],
    }
