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

__all__ = [
    "FailedMeasurementError",
    "ends_by_name",
    "is_iperf3",
    "is_ping",
    "parsed_json",
    "read_iperf3",
    "read_ping",
]

_STATISTICS = re.compile(
    r"(?:rtt|round-trip) min/avg/max(?:/mdev|/stddev)? = (\d+(?:\.\d*)?)/(\d+(?:\.\d*)?)/(\d+(?:\.\d*)?)[/ ]"
)
_WINDOWS = re.compile(r"Minimum = (\d+)ms, Maximum = \d+ms, Average = (\d+)ms")
_LOST = re.compile(r"(\d+(?:\.\d*)?)% (?:packet )?loss")
_SENT = re.compile(r"(\d+) packets transmitted|Sent = (\d+)")
_ENOUGH_PINGS = 100  # fewer tell nothing of a line's loss: one lost of ten may be one of ten thousand
_PINGED = re.compile(r"^P(?:ING|inging) ([^\s:]+)", re.MULTILINE)


class FailedMeasurementError(InputError):
    """A file that says itself that nothing was measured: others can do without it."""


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
    """One run, of a client or a server: goodput as the receiver counted it, and the least round trip that was seen.

    A run both ways (`--bidir`) tells of both. Raises InputError for a run that failed, was UDP, or lacks these.
    """
    if data.get("error"):
        raise FailedMeasurementError(f"{path}: iperf3 failed: {printable(data['error'])}")
    try:
        start, end = data["start"], data["end"]
        test, connected = start["test_start"], start["connected"]
        if test.get("protocol", "TCP") != "TCP":
            raise InputError(
                f"{path}: a run with {printable(test['protocol'])}: measure with TCP, as training does"
            )
        local, remote = connected[0]["local_host"], connected[0]["remote_host"]
        ways = [_way_of(end, "")]
        if "sum_received_bidir_reverse" in end:
            ways.append(_way_of(end, "_bidir_reverse"))
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
    ends = ends_by_name(path) or (_address(local), _address(remote))
    is_server = "accepted_connection" in start
    # A file's name says from where the client ran; addresses are those of the host that wrote the file.
    if bool(test.get("reverse")) != (is_server and ends_by_name(path) is None):
        ends = ends[::-1]
    for (one, other), (received, retransmits) in zip((ends, ends[::-1]), ways, strict=False):
        lost = f", {retransmits} retransmits" if retransmits is not None else ""
        pairs.add(
            one,
            other,
            bits_per_second=received,
            rtt_seconds=min(trips) * 1e-6 if trips else None,
            note=f"iperf3 with {streams} stream{'s' if streams > 1 else ''}{lost}",
        )
    pairs.sources.append(f"{Path(path).name}: iperf3{f', {when}' if when else ''}.")


def _way_of(end: dict[str, Any], suffix: str) -> tuple[float, int | None]:
    """Goodput that arrived, and segments sent again; a server's file may know only what was sent."""
    received = float(end[f"sum_received{suffix}"]["bits_per_second"])
    sent = end.get(f"sum_sent{suffix}", {})
    return received or float(sent.get("bits_per_second", 0.0)), sent.get("retransmits")


def _address(host: object) -> str:
    """Without the prefix of an IPv4 address that a socket of IPv6 tells."""
    return str(host).removeprefix("::ffff:")


def is_ping(text: str) -> bool:
    """Whether text is what ping prints, of Linux, BusyBox, macOS or Windows (in English)."""
    return _trips(text) is not None or _LOST.search(text) is not None


def _trips(text: str) -> tuple[float, float] | None:
    """The least and the mean round trip in ms."""
    found = _STATISTICS.search(text)
    if found is not None:
        return float(found.group(1)), float(found.group(2))
    found = _WINDOWS.search(text)
    return None if found is None else (float(found.group(1)), float(found.group(2)))


def read_ping(path: str | Path, text: str, pairs: Pairs) -> None:
    """The least round trip, and of 100 pings or more the share that was lost.

    From `here`, unless the file is called FROM--TO.txt.

    Raises InputError where nothing came back, or it is not known from where.
    """
    trips = _trips(text)
    if trips is None:
        raise FailedMeasurementError(f"{path}: nothing came back of this ping")
    pinged = _PINGED.search(text)
    named = ends_by_name(path)
    if named is None and pinged is None:
        raise InputError(f"{path}: it does not say what was pinged: call the file FROM--TO.txt")
    one, other = named if named is not None else ("here", pinged.group(1))  # type: ignore[union-attr]
    loss, told = _loss(text)
    pairs.add(
        one,
        other,
        rtt_seconds=trips[0] * 1e-3,
        loss=loss,
        note=f"ping, {trips[1]:g} ms in the mean{told}",
    )
    pairs.sources.append(f"{Path(path).name}: ping.")


def _loss(text: str) -> tuple[float | None, str]:
    """The share lost, of enough pings, and what is to be said of it."""
    lost, sent = _LOST.search(text), _SENT.search(text)
    share = float(lost.group(1)) / 100 if lost is not None else 1.0
    num = int(sent.group(1) or sent.group(2)) if sent is not None else 0
    if not 0 < share < 1:
        return (None if share else 0.0), ""
    told = f", {round(share * num):,} of {num:,} pings lost" if num else ", some pings lost"
    if num < _ENOUGH_PINGS:
        return None, f"{told}: too few for a loss, which takes {_ENOUGH_PINGS}"
    return share, told


def parsed_json(path: str | Path, text: str) -> list[Any]:
    """JSON, or several of it one after the other, as an iperf3 server writes them; else InputError with the place.

    What `iperf3 --json-stream` writes, an event a line, becomes the one run that it tells of.
    """
    try:
        return [json.loads(text)]
    except (ValueError, RecursionError) as error:
        told = f"{path}: is no JSON: {error}"
    documents, at, decoder = [], 0, json.JSONDecoder()
    try:
        while text[at:].strip():
            at += len(text[at:]) - len(text[at:].lstrip())
            document, at = decoder.raw_decode(text, at)
            documents.append(document)
    except (ValueError, RecursionError):
        raise InputError(told) from None
    if all(isinstance(document, dict) and "event" in document for document in documents):
        return [{document["event"]: document.get("data") for document in documents}]
    return documents
