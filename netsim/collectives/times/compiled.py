"""Schedules in which messages meet on links, timed by the compiled loop of the `fast` extra."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from netsim.collectives.times.recurrence import Lines
from netsim.fluid.wires import padded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from netsim.collectives.schedules.schedule import Schedule
    from netsim.fluid.wires import Wires

__all__ = ["compiled_seconds"]


def compiled_seconds(
    schedule: Schedule, hosts: Sequence[int], arrivals: npt.NDArray[np.float64], wires: Wires
) -> npt.NDArray[np.float64]:
    """When each member is through, on an ideal network that carries nothing else. Needs numba."""
    from netsim.fluid.compiled import run_steps  # seconds to load, and only where it pays

    lines = Lines(wires, hosts)
    steps = [phase.step(index) for phase in schedule.phases for index in range(phase.num_steps)]
    source = np.concatenate([step.src for step in steps])
    target = np.concatenate([step.dst for step in steps])
    number, latency, _ = lines.of(source, target)
    _, seconds = run_steps(
        wires.bytes_per_second,
        padded(lines.links, len(wires.bytes_per_second)),
        number,
        latency,
        np.concatenate([step.num_bytes for step in steps]).astype(np.float64),
        np.repeat(np.arange(len(steps)), [len(step.src) for step in steps]),
        source,
        target,
        np.array(schedule.gates, np.int64),
        np.asarray(arrivals, np.float64),
    )
    if schedule.op == "sendrecv":
        seconds[0] = max(seconds[0], arrivals[1])  # a send completes with its receive
    return seconds
