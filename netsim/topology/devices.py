"""Names of common devices, for `device:` in topologies, with their peak speeds, from `topologies/devices.csv`.

netsim does not use devices: training and plans compute on them.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import topologies
from netsim.errors import InputError, UnknownNameError, unknown_name
from netsim.files.documents import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["device_name", "device_problems", "device_table"]


@cache
def device_table() -> Mapping[str, Mapping[str, str]]:
    """Rows of the shipped device table by name, with columns as written.

    They are kind, teraflops by dtype ("" for none), the share of the bf16 peak that the fastest product of matrices was
    measured at ("" where not known), gigabytes of memory of the largest model ("" where it is the machine's), its
    gigabytes a second, microseconds that an operation takes at least, and source.
    """
    text = Path(topologies.__path__[0], "devices.csv").read_text(encoding="utf-8")
    return {row["name"]: row for row in csv.DictReader(text.splitlines())}


def device_name(given: object, where: str = "") -> str:
    """The name in the table that is meant, however it is spelt ("RTX 4090" is "rtx-4090").

    Args:
        given: as a user wrote it.
        where: prefix of the error's line, such as "host us.0: ".

    Raises:
        UnknownNameError: no such device; the line lists them, the likeliest first.
        InputError: it is no text.
    """
    if not isinstance(given, str):
        raise InputError(f"{where}device {given!r} is no name; write one such as rtx-4090")
    plain = given.strip().lower().replace(" ", "-").replace("_", "-")
    if plain not in device_table():
        error = unknown_name("device", given, device_table())
        raise type(error)(f"{where}{error}")
    return plain


def device_problems(data: Any) -> Iterator[ConfigError]:
    """Mistakes in the device names of a topology file's plain data, by key."""
    for group in ("hosts", "regions"):
        entries = data.get(group) if isinstance(data, Mapping) else None
        for name, entry in entries.items() if isinstance(entries, Mapping) else ():
            device = entry.get("device") if isinstance(entry, Mapping) else None
            try:
                if device is not None:
                    device_name(device)
            except InputError as error:
                yield ConfigError(
                    (group, str(name), "device"), str(error), isinstance(error, UnknownNameError)
                )
