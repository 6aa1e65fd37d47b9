"""Waits at a rendezvous: long ones are told, with where those are who are waited for, and some end at once."""

from __future__ import annotations

from typing import Any

from exogym_core.ranks.rendezvous.roster import START, Roster


def roster_of_two(lines: list[str]) -> Roster:
    roster = Roster(2, "r", lambda site, message: None, lines.append)
    for site in range(2):
        roster.arrive(site, f"session {site}", {"where": f"host {site}"}, 0.0)
    return roster


def join(roster: Roster, site: int, number: int, now: float) -> None:
    asked: dict[str, Any] = {"seconds": 600.0, "averaging_seconds": 600.0, "weight": 1.0, "awaited": [0, 1]}
    roster.join(site, site + 1, {"number": number, **asked}, now)


def test_who_does_not_come_to_a_round_is_told_with_its_place() -> None:
    """Where sites wait for each other in different places nothing else tells it: they have no calls to compare."""
    lines: list[str] = []
    roster = roster_of_two(lines)
    roster.sites[1].pulse = {"step": 7, "place": "train at mine.py:12"}
    del lines[:]
    join(roster, 0, START, 0.0)
    for second in range(130):
        roster.sites[1].heard = float(second)
        roster.look(float(second))
    assert lines == [
        f"the run's begin: site 0 waits since {seconds} s: site 1 is not there, after step 7, in train at mine.py:12, "
        "heard of 0 s ago"
        for seconds in (30, 60, 120)
    ]


def test_who_does_not_come_through_an_average_is_told() -> None:
    lines: list[str] = []
    roster = roster_of_two(lines)
    for site in range(2):
        join(roster, site, START, 0.0)
    (attempt,) = roster._attempts.values()
    about = {"number": START, "attempt": 0, "group": attempt.group, "members": [0, 1], "seconds": 600.0}
    roster.confirm(1, 9, {**about, "is_through": True}, 1.0)
    del lines[:]
    roster.sites[0].heard = 30.0
    roster.look(31.0)
    assert lines == ["the run's begin: site 1 waits since 31 s: site 0 is not there, heard of 1 s ago"]


def test_who_downloads_from_a_site_that_dies_hears_so_at_once() -> None:
    """It may wait for that one's address; it asks again, and gets what it wants from another one."""
    sent: list[tuple[int, dict[str, Any]]] = []
    roster = Roster(3, "r", lambda site, message: sent.append((site, dict(message))))
    for site in range(3):
        roster.arrive(site, f"session {site}", {"where": f"host {site}"}, float(site))
    for site in (0, 1):
        roster.publish(site, 4, 5.0)
    wanted: dict[str, Any] = {"at_least": 4, "without": []}
    roster.fetch(2, 1, wanted, 5.0)
    group = next(message["group"] for site, message in sent if site == 2)
    roster.depart(0, "session 0", 6.0)
    assert sent[-1] == (2, {"push": "dissolved", "group": group})
    roster.fetch(2, 2, wanted, 6.0)
    assert sent[-1][1]["holder"] == 1
    roster.fetched(2, 4, 7.0)
    roster.depart(1, "session 1", 8.0)
    assert sent[-1][1]["id"] == 2, "it has what it wanted"
