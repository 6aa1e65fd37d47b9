"""Communicators: the contract, and the transports that keep it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.communicator.base import Communicator, Deadline, Handle, Traffic

if TYPE_CHECKING:
    from exogym_core.communicator.gloo.communicator import GlooCommunicator
    from exogym_core.workers.run import RunResult, run_ranks

__all__ = [
    "Communicator",
    "Deadline",
    "GlooCommunicator",
    "Handle",
    "RunResult",
    "Traffic",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    # Imported when asked for: the simulation needs no sockets, and `run_ranks` starts ranks, which use
    # communicators.
    if name == "GlooCommunicator":
        from exogym_core.communicator.gloo.communicator import GlooCommunicator

        return GlooCommunicator
    if name in ("RunResult", "run_ranks"):
        from exogym_core.workers import run

        return getattr(run, name)
    if name == "SiteCommunicator":
        from exogym_core.moved import moved

        return moved(f"{__name__}.{name}", "netgym.sites.communicator")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
