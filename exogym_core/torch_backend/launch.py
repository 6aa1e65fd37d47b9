"""A launch: a script, and where it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from exogym_core.communicator.simulated.simulation import World

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from netsim.topology import Topology

__all__ = ["Launch", "Script"]


@dataclass(frozen=True)
class Script:
    """A script or module, and what its command line holds besides.

    Attributes:
        name: the script's path, or the module's name.
        arguments: of its command line.
        is_module: run `name` as `python -m` does.
        prints_to_stderr: all that it prints goes to stderr.
    """

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    prints_to_stderr: bool = False


@dataclass(frozen=True)
class Launch:
    """A script and where it runs.

    Attributes:
        script: what is run.
        num_ranks: how many processes run it, a rank each; None: one, which starts its ranks itself.
        topology: the network.
        compute: what computing costs, as text.
        placement: host names, one a rank.
        protocol: how transfers use links; None: as the topology says, else `gloo`.
        collectives: algorithms of collectives.
        until_seconds: of virtual time, at which the run is cut.
        cuda_as_cpu: CUDA devices that the script names are the CPU.
        trace: a file for Perfetto.
        chakra: a folder for execution traces, one a rank.
    """

    script: Script
    num_ranks: int | None
    topology: Topology
    compute: str = "live"
    placement: Sequence[str] | None = None
    protocol: str | None = None
    collectives: str | None = None
    until_seconds: float = math.inf
    cuda_as_cpu: bool = False
    trace: Path | None = None
    chakra: Path | None = None

    def world(self, num_ranks: int) -> World:
        """Hosts of so many ranks.

        Raises:
            InputError: placement, protocol or algorithms are wrong.
        """
        protocol = self.protocol or self.topology.protocol or "gloo"
        return World.build(num_ranks, self.topology, self.placement, protocol, self.collectives)

    def about(self) -> dict[str, Any]:
        """Fields of a report that describe it."""
        source: Literal["option", "topology", "default"] = "option" if self.protocol else "default"
        return {
            "script": self.script.name,
            "arguments": list(self.script.arguments),
            "is_module": self.script.is_module,
            "protocol_from": "topology" if self.topology.protocol and not self.protocol else source,
            "compute": self.compute,
            "cuda_as_cpu": self.cuda_as_cpu,
            "until_seconds": None if math.isinf(self.until_seconds) else self.until_seconds,
        }
