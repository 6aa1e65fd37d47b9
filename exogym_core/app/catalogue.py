"""What can be named in an experiment, section by section, with a line on each."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from netsim.topology.topology import Topology

__all__ = ["SECTIONS"]

Section = list[tuple[str, str]]


def _with_summaries(makers: Mapping[str, Any]) -> Section:
    return [(name, _first_line(maker)) for name, maker in sorted(makers.items(), key=_by_name)]


def _by_name(item: tuple[str, Any]) -> str:
    return item[0].casefold()


def _first_line(maker: Any) -> str:
    return (inspect.getdoc(maker) or "").partition("\n")[0]


def _strategies() -> Section:
    from exogym_core.strategy import STRATEGIES

    return [(name, _with_papers(line, STRATEGIES[name])) for name, line in _with_summaries(STRATEGIES)]


def _with_papers(line: str, strategy: Any) -> str:
    found = re.findall(r"(arXiv|openreview)\s+(\d{4}\.\d{5}|\w{8,})", inspect.getdoc(strategy) or "")
    papers = dict.fromkeys(f"{where} {number}" for where, number in found if number not in line)
    return f"{line} [{', '.join(papers)}]" if papers else line


def _tasks() -> Section:
    from exogym_core.tasks import TASKS

    return _with_summaries(TASKS)


def _models() -> Section:
    from exogym_core.tasks import MODELS

    return _with_summaries(MODELS)


def _topologies() -> Section:
    from netsim.topology.topology import Topology, shipped_topologies

    return [(name, _network_line(Topology.load(name))) for name in shipped_topologies()]


def _network_line(network: Topology) -> str:
    where = f" in {len(network.regions)} regions" if len(network.regions) > 1 else ""
    return f"{len(network.hosts)} hosts{where}"


def _devices() -> Section:
    from exogym_core.cost.devices import DEVICES

    return [(name, _speeds(device.flops)) for name, device in DEVICES.items()]


def _speeds(flops: Mapping[str, float]) -> str:
    return ", ".join(f"{dtype} {speed / 1e12:g} Tflop/s" for dtype, speed in flops.items())


def _protocols() -> Section:
    from netsim.topology.protocol import PRESETS

    return [(name, "") for name in PRESETS]


def _planned() -> Section:
    from exogym_core.planning.models import PLANNED_MODELS

    return [
        (name, f"{sizes['num_layers']} layers of width {sizes['width']}, for netgym plan")
        for name, sizes in PLANNED_MODELS.items()
    ]


SECTIONS: Mapping[str, Callable[[], Section]] = {
    "strategies": _strategies,
    "tasks": _tasks,
    "models": _models,
    "topologies": _topologies,
    "planned models": _planned,
    "devices": _devices,
    "protocols": _protocols,
}
"""Section -> what makes its (name, description) pairs."""
