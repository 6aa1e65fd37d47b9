"""What can be added to the weather while it goes on."""

from __future__ import annotations

import math

from netsim.files.errors import InputError
from netsim.topology.weather import Background, Drift, HostEvent, LinkEvent, Trace

__all__ = ["Entry", "check"]

Entry = LinkEvent | HostEvent | Trace | Background | Drift


def check(entry: Entry, num_links: int, num_hosts: int) -> None:
    """Refuse what a topology file could not have said either. Raises InputError."""
    links = getattr(entry, "links", ())
    hosts = [getattr(entry, name) for name in ("host", "source", "target") if hasattr(entry, name)]
    problem = None
    if wrong := [link for link in links if not 0 <= link < num_links]:
        problem = f"there is no link {wrong[0]}"
    elif wrong := [host for host in hosts if not 0 <= host < num_hosts]:
        problem = f"there is no host {wrong[0]}"
    elif not 0 <= getattr(entry, "at_seconds", 0.0) < math.inf:
        problem = "at_seconds must be finite and not negative"
    elif isinstance(entry, LinkEvent):
        settings = (entry.is_up, entry.bits_per_second, entry.latency_seconds, entry.loss)
        if sum(value is not None for value in settings) != 1:
            problem = "give exactly one of is_up, bits_per_second, latency_seconds and loss"
    elif isinstance(entry, Background):
        if entry.source == entry.target:
            problem = "it leads from a host to itself"
        elif (entry.bits_per_second is None) == (entry.num_bytes is None or entry.every_seconds is None):
            problem = "give either bits_per_second, or num_bytes and every_seconds"
    elif isinstance(entry, Drift) and not entry.every_seconds > 0:
        problem = "every_seconds must be above zero"
    if problem is not None:
        raise InputError(f"{entry}: {problem}")
