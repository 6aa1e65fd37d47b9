"""What a recorder keeps of small cases, and a run's trace file.

Records and points are sorted and freed of what no time passes in, so that only what happened is compared: `transfers`
are [source, target, bytes, delivered] and their times apart, `use` and `capacity` are links' [instant, rate].
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from frozen_collectives import Drive as CollectiveDrive
from frozen_networks import PROTOCOLS, digest, mapping_of, star, with_weather
from frozen_transfers import Drive as TransferDrive
from frozen_transfers import actions_of

import netsim
from exogym_core.communicator import Communicator, run_ranks
from netsim import Recorder

__all__ = ["answer", "names"]

_PRESETS = ("ideal", "linux-tcp", "gloo")
_WEATHERS = ("none", "direct", "events", "steady", "periodic", "crash", "mixed")
_SCENARIOS = ("jittered", "overlapped", "thrice", "cancelled", "weather")
_INSTANT_SECONDS = 1e-9  # points nearer to each other than this are one
_SAME_RATE = 1e-9


def names() -> list[str]:
    """Protocol, what is recorded, and in which weather or scenario."""
    cases = [f"{protocol} transfers {weather}" for protocol in _PRESETS for weather in _WEATHERS]
    cases += [f"{protocol} collectives {scenario}" for protocol in _PRESETS for scenario in _SCENARIOS]
    return cases + [f"{protocol} file {weather}" for protocol in _PRESETS for weather in ("none", "mixed")]


def answer(name: str) -> dict[str, Any]:
    """What is recorded of a case."""
    protocol, what, how = name.split()
    draw = Random(f"traces {name}")
    if what == "file":
        return _file(protocol, how, draw)
    recorder = Recorder()
    if what == "transfers":
        mapping = mapping_of("tree" if draw.randrange(2) else "star", draw)
        actions = actions_of(netsim.Topology.from_mapping(mapping), how, draw, 8)
        mapping = with_weather(mapping, how, draw, 3000)
        drive: Any = TransferDrive(mapping, PROTOCOLS[protocol], actions, how)
        recorder.watch(drive.network)
        drive.run()
        return {"given": digest([mapping, actions]), **_recorded(recorder)}
    mapping = mapping_of("star", draw)
    if how == "weather":
        mapping = with_weather(mapping, "mixed", draw, 400)
    drive = CollectiveDrive(mapping, protocol, how, draw)
    recorder.watch(drive.network)
    plan = drive.plan(draw.choice(["all_reduce", "all_gather", "broadcast"]), "gloo")
    drive.run(plan)
    return {"given": digest([mapping, plan.given]), **_recorded(recorder)}


def _recorded(recorder: Recorder) -> dict[str, Any]:
    records = sorted(
        recorder.transfers.values(),
        key=lambda each: (each.source, each.target, each.num_bytes, round(each.begin_seconds, 7)),
    )
    return {
        "transfers": [
            [each.source, each.target, each.num_bytes, round(each.delivered_bytes, 3)] for each in records
        ],
        "times": [[each.begin_seconds, each.arriving_seconds, each.end_seconds] for each in records],
        "use": _by_link(recorder.link_use.items()),
        "capacity": _by_link(recorder.link_capacity.items()),
    }


def _by_link(points: Iterable[tuple[int, Sequence[tuple[float, float]]]]) -> dict[str, Any]:
    return {str(link): kept for link, of_link in sorted(points) if (kept := _in_time(of_link))}


def _in_time(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    """Points without those that hold for no time, or say again what holds."""
    lasting: list[list[float]] = []
    for instant, rate in points:
        if lasting and instant - lasting[-1][0] <= _INSTANT_SECONDS:
            lasting[-1][1] = float(rate)
        else:
            lasting.append([float(instant), float(rate)])
    kept: list[list[float]] = []
    for instant, rate in lasting:
        before = kept[-1][1] if kept else 0.0
        if abs(rate - before) > _SAME_RATE * max(rate, before):
            kept.append([instant, rate])
    return kept


# -- a run's file ---------------------------------------------------------------------------------------------------


def _body(comm: Communicator) -> None:
    """Ranks that compute unevenly, overlap a collective with computing, and send to each other."""
    for step in range(2):
        comm.advance(0.1 * (comm.rank + 1))
        handle = comm.all_reduce(torch.ones(50_000), async_op=True)
        comm.advance(0.05)
        handle.wait()
        comm.mark({"step": step})
    if comm.rank == 0:
        comm.send(torch.ones(1000), 3)
    if comm.rank == 3:
        comm.recv(torch.empty(1000), 0)


def _file(protocol: str, weather: str, draw: Random) -> dict[str, Any]:
    mapping = with_weather(star(5), weather, draw, 700)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        run_ranks(_body, 4, mapping, protocol=protocol, trace=path, collectives="ring")
        events = json.loads(path.read_bytes())["traceEvents"]
    # Arrows' ids and the rows that overlapping messages share are the engine's; counters are compared above.
    shown = [
        [[each.get(key) for key in ("ph", "pid", "name", "cat")], _plain(each), each["ts"], each.get("dur")]
        for each in events
        if each["ph"] in "Xsf"
    ]
    shown.sort(key=lambda each: (json.dumps(each[:2], sort_keys=True), round(each[2], 1), each[2]))
    return {
        "given": digest(mapping),
        "events": [each[:2] for each in shown],
        "microseconds": [each[2:] for each in shown],
    }


def _plain(event: dict[str, Any]) -> dict[str, Any]:
    """An event's arguments, whole numbers of bytes as floats like others."""
    arguments = event.get("args", {})
    return {key: float(value) if isinstance(value, int) else value for key, value in arguments.items()}
