"""Membership and pending rounds at a rendezvous: reports of long waits, waits that end at once, restarts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from netgym.sites.membership import START, Membership
from netgym.sites.session import RunSession


def two_sites(lines: list[str]) -> Membership:
    members = Membership(2, "r", lambda site, message: None, lines.append)
    for site in range(2):
        members.arrive(site, f"session {site}", {"where": f"host {site}"}, 0.0)
    return members


def members_of(num_sites: int, **hello: Any) -> tuple[Membership, list[tuple[int, dict[str, Any]]]]:
    """Sites that have all arrived, and the messages sent to them."""
    sent: list[tuple[int, dict[str, Any]]] = []
    members = Membership(num_sites, "r", lambda site, message: sent.append((site, dict(message))))
    for site in range(num_sites):
        members.arrive(site, f"session {site}", {"where": f"host {site}", **hello}, float(site))
    return members, sent


def join(members: Membership, site: int, number: int, now: float) -> None:
    asked: dict[str, Any] = {"seconds": 600.0, "averaging_seconds": 600.0, "weight": 1.0, "awaited": [0, 1]}
    members.join(site, site + 1, {"number": number, **asked}, now)


def test_a_site_missing_in_a_round_is_reported_with_its_place() -> None:
    """Where sites wait for each other in different places nothing else tells it: they have no calls to compare."""
    lines: list[str] = []
    members = two_sites(lines)
    members.sites[1].pulse = {"step": 7, "place": "train at mine.py:12"}
    del lines[:]
    join(members, 0, START, 0.0)
    for second in range(130):
        members.sites[1].heard = float(second)
        members.update(float(second))
    assert lines == [
        f"the run's begin: site 0 has waited {seconds} s: site 1 has not arrived, after step 7, in train at "
        f"mine.py:12, last message 0 s ago; it begins without in {600 - seconds} s (netgym rendezvous --wait)"
        for seconds in (30, 60, 90, 120)
    ]


def test_the_begin_waits_for_all_sites_however_short_rounds_do() -> None:
    """A site that takes longer to start than rounds wait was left out of the whole run without a word."""
    lines: list[str] = []
    members = Membership(3, "r", lambda site, message: None, lines.append, wait_seconds=600.0)
    members.arrive(0, "session 0", {"where": "host"}, 0.0)
    asked = {"seconds": 4.0, "averaging_seconds": 9.0, "weight": 1.0, "awaited": [0, 1]}  # site 2 joins late
    members.join(0, 1, {"number": START, **asked}, 0.0)
    for second in range(600):
        if second == 50:  # it comes, and is stopped again
            members.arrive(1, "session 1", {"where": "host"}, 50.0)
            members.depart(1, "session 1", 50.0)
        members.sites[0].heard = float(second)
        members.update(float(second))
    assert not any("the run begins" in line for line in lines)
    reasons = [line.partition(" s: ")[2].partition(";")[0] for line in lines if "has waited" in line]
    assert reasons == ["site 1 has not joined yet", *["site 1 is lost"] * 18]
    members.update(600.0)
    assert lines[-2:] == [
        "the run begins: site 0, without site 1",
        "WARNING: the run begins WITHOUT site 1, not there after 600 s (netgym rendezvous --wait); later sites "
        "take part from their arrival on",
    ]


def test_a_site_that_does_not_finish_an_average_is_reported() -> None:
    lines: list[str] = []
    members = two_sites(lines)
    for site in range(2):
        join(members, site, START, 0.0)
    (attempt,) = members.rounds._attempts.values()
    about = {"number": START, "attempt": 0, "group": attempt.group, "members": [0, 1], "seconds": 600.0}
    members.confirm(1, 9, {**about, "is_finished": True}, 1.0)
    del lines[:]
    members.sites[0].heard = 30.0
    members.update(31.0)
    assert lines == ["the run's begin: site 1 has waited 31 s: site 0 has not arrived, last message 1 s ago"]


def test_a_site_with_fewer_steps_is_not_waited_for() -> None:
    """That one waits for the last rows of the others meanwhile: they waited for each other until the time was over."""
    lines: list[str] = []
    members = two_sites(lines)
    for site in range(2):
        members.publish(site, 60, 1.0)
        members.fetched(site, 60, 1.0)
    join(members, 1, 60, 2.0)
    assert not any("round 61" in line for line in lines)
    members.done(0, 3.0)
    assert lines[-1] == "round 61: site 1, without site 0"


def one_ahead(sent: list[tuple[int, dict[str, Any]]]) -> Membership:
    """Site 0 has done all its rounds, and site 1 comes."""
    members = Membership(2, "r", lambda site, message: sent.append((site, dict(message))))
    members.arrive(0, "session 0", {"where": "host"}, 0.0)
    members.publish(0, 60, 1.0)
    members.arrive(1, "session 1", {"where": "host"}, 2.0)
    members.end(0, 99, 4.0, 3.0)
    return members


def test_finished_sites_wait_for_a_late_one_and_give_it_the_final_state() -> None:
    """That one began anew otherwise, alone and to another model, though it takes a while until it asks."""
    sent: list[tuple[int, dict[str, Any]]] = []
    members = one_ahead(sent)
    members.update(20.0)
    assert sent == []
    join(members, 1, START, 21.0)
    assert sent.pop()[1]["present"] == [], "late: it downloads"
    members.fetch(1, 5, {"at_least": 0, "without": []}, 21.0)
    assert [message.get("number") for _, message in sent] == [60, 60]
    members.update(400.0)
    assert len(sent) == 2, "a large state takes long"
    members.fetched(1, 60, 401.0)
    assert sent[-1] == (0, {"id": 99}), "now it may leave"


def test_a_site_that_joins_after_the_others_have_left_gets_an_error() -> None:
    sent: list[tuple[int, dict[str, Any]]] = []
    members = one_ahead(sent)
    members.depart(0, "session 0", 4.0)
    message = (
        "this run is over: site 0 has finished it, its folder has the model; for another run name it, NETGYM_RUN=..., "
        "or restart the rendezvous"
    )
    join(members, 1, START, 5.0)
    assert (1, {"id": 2, "refused": message}) in sent
    members.fetch(1, 5, {"at_least": 0, "without": []}, 21.0)
    assert (1, {"id": 5, "refused": message}) in sent


def test_a_site_waiting_for_a_round_completed_before_a_restart_of_the_rendezvous_learns_so() -> None:
    """Its question was dropped with the meeting when the others came to their next round: it waited for ever."""
    members, sent = members_of(3, has_begun=True, newest=12)
    join(members, 2, 13, 2.0)
    attempt = {"number": 13, "attempt": 0, "group": "first-7", "members": [0, 1], "seconds": 600.0}
    for site in range(2):
        members.confirm(site, 50, {**attempt, "is_finished": True}, 2.1)
    assert [site for site, message in sent if message["id"] == 50] == [0, 1]
    assert all(site != 2 for site, _ in sent)
    for site in range(2):
        members.publish(site, 14, 2.2)
    assert (2, {"id": 3, "present": [[0, 1.0], [1, 1.0]], "group": ""}) in sent


def test_a_site_that_comes_to_a_restarted_rendezvous_before_those_that_train_is_late() -> None:
    """It waited for a begin of the run that nobody else took part in, for 600 s."""
    sent: list[tuple[int, dict[str, Any]]] = []
    members = Membership(2, "r", lambda site, message: sent.append((site, dict(message))))
    members.arrive(0, "session 0", {"where": "host 0"}, 0.0)
    join(members, 0, START, 1.0)
    members.update(2.0)
    assert sent == []
    members.arrive(1, "session 1", {"where": "host 1", "has_begun": True, "newest": 12}, 2.5)
    members.update(2.5)
    assert sent == [(0, {"id": 1, "present": [], "group": ""})]
    members.fetch(0, 5, {"at_least": 0, "without": []}, 2.6)
    assert [message.get("number") for _, message in sent[1:]] == [12, 12], "one serves, the other downloads"


def test_a_pending_round_outlives_the_begin_of_a_later_one() -> None:
    members, sent = members_of(2, has_begun=True, newest=12)
    join(members, 1, 13, 1.0)
    join(members, 0, 14, 1.0)
    members.publish(0, 14, 1.1)
    assert (1, {"id": 2, "present": [], "group": ""}) in sent


def test_a_broken_pair_is_tested_again_soon_after_a_test_that_ends_early() -> None:
    """A route that refuses packets is known at once; the next test began seven seconds later all the same."""
    members, sent = members_of(2, tests_at=["10.0.0.1", 1])
    members.pairs.test([0, 1], 2.0, 10.0)
    begun: dict[str, float] = {}
    for tenth in range(100, 180):
        now = tenth / 10
        members.update(now)
        for group in [message["group"] for _, message in sent if message.get("push") == "test"]:
            if group not in begun:
                begun[group] = now
                for site in range(2):
                    answer = {"group": group, "peer": 1 - site, "is_reached": False}
                    members.tested(site, 0, answer, now)
    assert list(begun.values()) == [10.0, 13.0, 16.0]


def test_a_question_for_a_state_that_comes_again_is_answered_once() -> None:
    """A link sends it again when it has reconnected: two groups were made for one download."""
    members, sent = members_of(2)
    for _ in range(2):
        members.fetch(1, 7, {"at_least": 1, "without": []}, 2.0)
    members.publish(0, 1, 3.0)
    assert [message["id"] for site, message in sent if site == 1 and "id" in message] == [7]
    assert sum(message.get("push") == "serve" for _, message in sent) == 1


def test_a_process_that_reaches_a_restarted_rendezvous_before_the_first_of_its_site_is_heard() -> None:
    """Its connection was cut at each message until then, and its address for tests of connections was lost."""
    run = RunSession("mine", 1, print)
    channel: Any = SimpleNamespace(send=lambda **message: None, close=lambda: None)
    hello = {"session": "second", "site": 0, "local_rank": 1, "tests_at": ["host", 2]}
    client = run.welcome(channel, hello, 0.0)
    run.take(client, {"say": "beat"}, 1.0)
    first = {"session": "first", "site": 0, "local_rank": 0, "tests_at": ["host", 1]}
    run.welcome(channel, first, 2.0)
    run.close()
    assert run.members.sites[0].processes == {0: ["host", 1], 1: ["host", 2]}
