"""What `iperf3 -J` writes, one file a run, and what `ping` prints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netsim.files.errors import InputError
from netsim.files.problems import printable

if TYPE_CHECKING:
    from netsim.topology.foreign.pairs import Pairs

__all__ = ["ends_by_name", "is_iperf3", "is_ping", "parsed_json", "read_iperf3", "read_ping"]

_STATISTICS = re.compile(
    r"(?:rtt|round-trip) min/avg/max/(?:mdev|stddev) = (\d+(?:\.\d*)?)/(\d+(?:\.\d*)?)/(\d+(?:\.\d*)?)"
)
_LOST = re.compile(r"(\d+(?:\.\d*)?)% packet loss")
_PINGED = re.compile(r"^PING (\S+)", re.MULTILINE)


def ends_by_name(path: str | Path) -> tuple[str, str] | None:
    """From a file called FROM--TO.json the two places; None for other names.

    >>> ends_by_name("runs/us-east--eu.json"), ends_by_name("run1.json")
    (('us-east', 'eu'), None)
    """
    one, mark, other = Path(path).name.rsplit(".", 1)[0].partition("--")
    return (one, other) if mark and one and other else None


def is_iperf3(data: object) -> bool:
    """Whether JSON is a run of iperf3."""
    return isinstance(data, dict) and "start" in data and ("end" in data or "error" in data)


def read_iperf3(path: str | Path, data: dict[str, Any], pairs: Pairs) -> None:
    """One run: goodput as the receiver counted it, and the least round trip that the sender saw.

    Raises InputError for a run that failed, or that lacks these.
    """
    if data.get("error"):
        raise InputError(f"{path}: iperf3 failed: {printable(data['error'])}")
    try:
        start, end = data["start"], data["end"]
        test, connected = start["test_start"], start["connected"]
        local, remote = connected[0]["local_host"], connected[0]["remote_host"]
        received = float(end["sum_received"]["bits_per_second"])
        retransmits = end.get("sum_sent", {}).get("retransmits")
        streams = int(test.get("num_streams", len(connected)))
        when = start.get("timestamp", {}).get("time", "")
        trips = [
            float(sender[key])
            for stream in end.get("streams", [])
            for sender in [stream.get("sender", {})]
            for key in ("min_rtt", "mean_rtt")
            if sender.get(key)
        ]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path}: is no finished TCP run of iperf3 -J: {error!r} is missing or wrong"
        ) from None
    named = ends_by_name(path)
    one, other = named if named is not None else (str(local), str(remote))
    if test.get("reverse"):
        one, other = other, one
    lost = f", {retransmits} retransmits" if retransmits is not None else ""
    pairs.add(
        one,
        other,
        bits_per_second=received,
        rtt_seconds=min(trips) * 1e-6 if trips else None,
        note=f"iperf3 with {streams} stream{'s' if streams > 1 else ''}{lost}",
    )
    pairs.sources.append(f"{Path(path).name}: iperf3{f', {when}' if when else ''}.")


def is_ping(text: str) -> bool:
    """Whether text is what ping prints."""
    return _STATISTICS.search(text) is not None


def read_ping(path: str | Path, text: str, pairs: Pairs) -> None:
    """The least round trip, and the share that was lost. From `here`, unless the file is called FROM--TO.txt."""
    found = _STATISTICS.search(text)
    pinged = _PINGED.search(text)
    assert found is not None
    named = ends_by_name(path)
    if named is None and pinged is None:
        raise InputError(f"{path}: it does not say what was pinged: call the file FROM--TO.txt")
    one, other = named if named is not None else ("here", pinged.group(1))  # type: ignore[union-attr]
    lost = _LOST.search(text)
    pairs.add(
        one,
        other,
        rtt_seconds=float(found.group(1)) * 1e-3,
        loss=float(lost.group(1)) / 100 if lost is not None and float(lost.group(1)) < 100 else None,
        note=f"ping, {found.group(2)} ms in the mean",
    )
    pairs.sources.append(f"{Path(path).name}: ping.")


def parsed_json(path: str | Path, text: str) -> Any:
    """JSON, or InputError with the place of the mistake."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is no JSON: {error}") from None
