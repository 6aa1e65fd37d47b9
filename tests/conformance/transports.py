"""Transports that the conformance tests run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from exogym_core.communicator import Communicator, RunResult, run_ranks

# A transport is a row here: arguments of `run_ranks`.
TRANSPORTS: dict[str, dict[str, Any]] = {
    "threads": {"transport": "netsim", "workers": "threads"},
    "processes": {"transport": "netsim", "workers": {"kind": "processes", "processes": 2}},
    "gloo": {"transport": "gloo"},
}


def run(transport: str, body: Callable[[Communicator], Any], num_ranks: int, **more: Any) -> RunResult[Any]:
    """`run_ranks` over one of TRANSPORTS."""
    return run_ranks(body, num_ranks, **TRANSPORTS[transport], **more)
