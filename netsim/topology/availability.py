"""Joins and leaves of hosts as data: a CSV file, spot-like or diurnal absences; they become crashes of `events`."""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING, Annotated, Self

import pydantic
from pydantic import Field

from netsim.errors import InputError
from netsim.files.schemas import Schema
from netsim.topology.values import Duration, Interval, Name
from netsim.topology.weather import HostEvent, check_number_drawn, random_crashes, read_csv_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from netsim.files.documents import KeyPath
    from netsim.topology.topology import Topology

__all__ = ["Availability", "availability_events", "diurnal_absences"]

_HEADER = ["start_s", "host", "event"]


class Preemptions(Schema):
    """Preemptions at exponential times, as of spot instances.

    Attributes:
        mtbf: mean time from a return to the next preemption.
        away: time from a preemption to the return.
    """

    mtbf: Interval
    away: Interval


class Diurnal(Schema):
    """Absences once a day, as of computers that are in use by day.

    Attributes:
        away: length of an absence, less than a day.
        day: from the start of one absence to that of the next.
        spread: latest start of a host's absences after the start of the day, at most a day; each host draws its own.
    """

    away: Interval
    day: Interval = 86400.0
    spread: Duration = 0.0

    @pydantic.model_validator(mode="after")
    def _ends(self) -> Self:
        if self.away >= self.day:
            raise InputError("away must be shorter than day")
        if self.spread > self.day:
            raise InputError("spread must be at most day")
        return self


class Availability(Schema):
    """Absences of hosts; give exactly one of file, spot and diurnal.

    Attributes:
        file: CSV file with the columns start_s, host, event (`join` or `leave`); a host that joins first is away from
            the start.
        hosts: whose absences are drawn; None: all.
        spot: preemptions at random.
        diurnal: absences once a day.
        until: time from which no drawn absence begins.
        seed: of the draws.
    """

    file: str | None = None
    hosts: list[Name] | None = None
    spot: Preemptions | None = None
    diurnal: Diurnal | None = None
    until: Interval | None = None
    seed: Annotated[int, Field(ge=0)] = 0

    @pydantic.model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        if sum(each is not None for each in (self.file, self.spot, self.diurnal)) != 1:
            raise InputError("give exactly one of file, spot or diurnal")
        if self.file is not None and (self.hosts is not None or self.until is not None):
            raise InputError("a file names its hosts and times: leave hosts and until out")
        if self.file is None and self.until is None:
            raise InputError("drawn absences need until, the time from which none begins")
        if self.hosts == []:
            raise InputError("hosts is empty: name some, or leave it out for all")
        return self


def diurnal_absences(
    hosts: Sequence[str], away: float, day: float, spread: float, until: float, seed: int
) -> list[HostEvent]:
    """Absences of each host once a day, from a time of the day that it draws for all days.

    Args:
        hosts: names of hosts; a host's draw depends on (seed, place among `hosts`) alone.
        away: seconds of an absence.
        day: seconds from one to the next.
        spread: seconds; starts are uniform in [0, spread].
        until: virtual time from which none begins.
        seed: of the draws.

    >>> [(event.at, event.for_) for event in diurnal_absences(["a"], 10.0, 100.0, 0.0, 250.0, seed=0)]
    [(0.0, 10.0), (100.0, 10.0), (200.0, 10.0)]
    """
    import numpy as np

    check_number_drawn(len(hosts), day, until)
    events = []
    for place, host in enumerate(hosts):
        at = float(np.random.default_rng([seed, place]).uniform(0.0, spread)) if spread else 0.0
        while at < until:
            events.append(HostEvent(at=at, host=host, crash=True, for_=away))
            at += day
    return sorted(events, key=lambda event: event.at)


def availability_events(
    entries: Sequence[Availability],
    net: Topology,
    folder: Path,
    report: Callable[[KeyPath, str | InputError], None],
) -> list[HostEvent]:
    """Crashes that the entries of a topology file stand for; mistakes go to `report`, as key path and message."""
    events: list[HostEvent] = []
    for position, entry in enumerate(entries):
        names = [host.name for host in net.hosts] if entry.hosts is None else entry.hosts
        try:
            for name in names:
                net.host_index(name)
            if entry.file is not None:
                events += _of_file(folder, entry.file, net)
            elif entry.spot is not None:
                spot, until = entry.spot, entry.until or 0.0
                events += random_crashes(names, spot.mtbf, spot.away, until, entry.seed)
            elif entry.diurnal is not None:
                daily, until = entry.diurnal, entry.until or 0.0
                events += diurnal_absences(names, daily.away, daily.day, daily.spread, until, entry.seed)
        except InputError as error:
            report(("availability", position), error)
    return events


def _of_file(folder: Path, name: str, net: Topology) -> list[HostEvent]:
    """Absences of a CSV file."""
    events = []
    last: dict[str, tuple[float, str]] = {}  # by host: its row before
    for number, cells in enumerate(csv.reader(read_csv_lines(folder, name, _HEADER)), start=2):
        where = f"{name} line {number}"
        if len(cells) != len(_HEADER) or cells[2].strip() not in ("join", "leave"):
            raise InputError(f"{where}: expected seconds, the name of a host, and join or leave")
        try:
            at = float(cells[0])
        except ValueError:
            at = -1.0
        if not 0 <= at < float("inf"):
            raise InputError(f"{where}: expected seconds of at least 0")
        host, what = cells[1].strip(), cells[2].strip()
        net.host_index(host)
        before, other = last.get(host, (0.0, "leave" if what == "join" else "join"))
        if what == other:
            raise InputError(f"{where}: {host} has a second {what} in a row; leaves and joins alternate")
        if at < before:
            raise InputError(f"{where}: times of {host} descend; give them in order")
        last[host] = at, what
        if what == "join" and at > before:
            events.append(HostEvent(at=before, host=host, crash=True, for_=at - before))
    left = [(host, at) for host, (at, what) in last.items() if what == "leave"]
    return [*events, *(HostEvent(at=at, host=host, crash=True) for host, at in left)]
