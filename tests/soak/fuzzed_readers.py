"""The readers that anybody's files reach, and what must hold whatever is in them.

Whatever bytes a file holds: it is accepted, or refused by one of our errors whose first line is printable and names
it; within seconds and a bounded memory. What is accepted can be used, and what we write of it reads back.
"""

from __future__ import annotations

from collections.abc import Callable

from fuzzed_checkpoints import checkpoint
from fuzzed_documents import experiment, topology
from fuzzed_folder import FOLDER
from fuzzed_formats import foreign
from fuzzed_tables import flows, traces

__all__ = ["FOLDER", "READERS", "one_input"]

READERS: dict[str, Callable[[bytes], bool]] = {
    "topology": topology,
    "experiment": experiment,
    "flows": flows,
    "traces": traces,
    "checkpoint": checkpoint,
    "foreign": foreign,
}


def one_input(reader: str, data: bytes) -> bool:
    """Give one input to a reader; whether it was accepted. Whatever is raised is a finding."""
    return READERS[reader](data)
