"""Pending rounds at a rendezvous: members meet, average and confirm, and retry without failed members.

Meetings follow `Communicator.among_present`, as in the simulation. Real sites add two rules: rounds do not wait for a
process that is gone, and attempts with broken connections begin again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from exogym_core.communicator.base import FIXED
from exogym_core.communicator.deadlines import ArrivalDelays, Deadline
from exogym_core.names import visible
from netgym.sites.pairs import PairTest, test_seconds
from netgym.sites.site_info import START, SiteInfo, names_of, progress_of
from netsim.units import format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from netgym.sites.pairs import SitePairs
    from netgym.sites.site_info import SiteTable

__all__ = ["WAIT_SECONDS", "Attempt", "PendingRounds", "RoundMeeting"]

WAIT_SECONDS = 600.0
"""Seconds that a run's begin waits for all sites, by default."""

_ANSWER_SECONDS = 3.0  # after an attempt's time its members may still report its failure
_SECONDS_BETWEEN_REPORTS = 30.0  # of a site that misses round after round
_FIRST_REPORT_SECONDS = 30.0  # of a wait; then when it has lasted twice as long, at the run's begin each time
_MOST_BREAKS = 3  # broken attempts of the same members before one is left out


@dataclass(eq=False, kw_only=True)
class _Pending:
    """A meeting or an attempt that sites wait for."""

    number: int  # of the round
    seconds: float  # for an average
    deadline: float
    opened: float = 0.0
    reported_seconds: float = 0.0  # length of the wait at its last report
    questions: dict[int, int] = field(default_factory=dict)  # of the waiting sites
    members: tuple[int, ...] = ()
    sessions: Mapping[int, str] = field(default_factory=dict)  # the members' processes, where known


@dataclass(eq=False, kw_only=True)
class RoundMeeting(_Pending):
    """The meeting before a round; once settled, `members` are those present in time, and late sites wait."""

    awaited: frozenset[int] | None
    rule: Deadline = FIXED
    enough: float = math.inf  # since when a quorum has been there
    missing: set[int] = field(default_factory=set)  # sites that it waits for
    weights: dict[int, float] = field(default_factory=dict)
    is_settled: bool = False

    @property
    def closes(self) -> float:
        """Instant at which it waits no longer, except for sites that return."""
        return max(self.deadline, self.enough) + self.rule.grace_seconds


@dataclass(eq=False, kw_only=True)
class Attempt(_Pending):
    """An attempt at a round's work, pending until it is decided which members are `left`."""

    attempt: int
    group: str
    num_breaks: int = 0  # attempts of the same members before this one that broke
    results: dict[int, bool] = field(default_factory=dict)  # site -> it has completed the work
    failed: float = math.inf  # instant at which the failure was noticed
    test: PairTest | None = None  # of its members' connections, once it has failed
    left: tuple[int, ...] | None = None
    next_group: str = ""


class PendingRounds:
    """Undecided meetings and attempts.

    Args:
        members: the sites.
        pairs: those of them that do not reach each other.
        downloads: returns the sites that download the state of a number.
        wait_seconds: seconds that the run's begin waits for all sites, from the first arrival.

    Attributes:
        present: members of the last round that was completed.
    """

    def __init__(
        self,
        members: SiteTable,
        pairs: SitePairs,
        downloads: Callable[[int], set[int]],
        wait_seconds: float,
    ) -> None:
        self._members, self._wait_seconds = members, wait_seconds
        self._sites, self._pairs, self._downloads = members.sites, pairs, downloads
        self._returns, self._send, self._say = members.returns, members.send, members.say
        self.present: tuple[int, ...] = ()
        self._arrivals = ArrivalDelays()
        self._rounds: dict[int, RoundMeeting] = {}
        self._attempts: dict[tuple[int, int, str], Attempt] = {}  # by number, attempt and group
        self._group = (dict[int, str](), "")  # sessions of the last connected members, and their group

    def update(self, now: float) -> None:
        """Decide the meetings and attempts that can be decided."""
        for attempt in list(self._attempts.values()):
            self._update_attempt(attempt, now)
        for meeting in list(self._rounds.values()):
            self._update_round(meeting, now)
        for pending, _, arrived, missing in self._open_waits(now):
            self._report_wait(pending, arrived, missing, now)

    def forget(self, site: int) -> None:
        """Drop the questions of an earlier process of this site."""
        for meeting in self._rounds.values():
            meeting.questions.pop(site, None)

    def refuse(self) -> None:
        """Refuse all sites that wait for a round."""
        for meeting in self._rounds.values():
            if not meeting.is_settled:
                for site, question in meeting.questions.items():
                    self._members.refuse(site, question)
                meeting.questions.clear()

    # --- meetings --------------------------------------------------------------------------------------------

    def join(self, site: int, question: int, asked: Mapping[str, Any], now: float) -> None:
        """Join a round's meeting: `number`, `seconds`, `averaging_seconds`, `weight`, `awaited`, `deadline`."""
        number = int(asked["number"])
        rule = FIXED if number == START else Deadline(*asked.get("deadline", ()))
        if number != START:
            self._arrivals.add(number, now)
        if self._is_over(site, number, now):
            self._members.refuse(site, question)
            return
        if self._is_late(site, number, now):
            self._answer_late(site, question, self.present)
            return
        meeting = self._rounds.get(number)
        if meeting is None:
            self._rounds = {
                each: meeting for each, meeting in self._rounds.items() if each >= number or meeting.questions
            }
            meeting = self._rounds[number] = RoundMeeting(
                number=number,
                seconds=float(asked["averaging_seconds"]),
                deadline=now
                + (
                    self._wait_seconds
                    if number == START
                    else self._arrivals.seconds(rule, float(asked["seconds"]), number)
                ),
                rule=rule,
                opened=now,
                awaited=None if asked["awaited"] is None else frozenset(asked["awaited"]),
            )
        if not meeting.is_settled:
            meeting.weights[site] = float(asked["weight"])
        if not (meeting.is_settled and self._answered_again(site, question, meeting)):
            meeting.questions[site] = question

    def _answered_again(self, site: int, question: int, meeting: RoundMeeting) -> bool:
        """Answer a member that asks again because its connection broke before the answer; False for others."""
        for attempt in self._attempts.values():
            is_open = attempt.number == meeting.number and attempt.left is None and attempt.test is None
            is_member = site in attempt.members and attempt.sessions.get(site) == self._sites[site].session
            if is_open and is_member and site not in attempt.results:
                self._answer_present(site, question, meeting, attempt)
                return True
        return False

    def _is_late(self, site: int, number: int, now: float) -> bool:
        if number != START:
            return self._members.newest > number
        if self._somebody_has_state(site, now):
            return True
        there = [info for info in self._sites.values() if info.site != site and not info.is_gone(now)]
        if self._rounds.get(START) is None or not there:  # no site has a state any more: begin again
            self._members.newest, self.present = START - 1, ()
            self._rounds.clear()
            self._attempts.clear()
        return False

    def _somebody_has_state(self, site: int, now: float) -> bool:
        """True if another site has begun and is present; finished sites stay for sites that have arrived."""
        others = [info for info in self._sites.values() if info.site != site and info.has_begun]
        return any(info.can_serve or not info.is_gone(now) for info in others)

    def _is_over(self, site: int, number: int, now: float) -> bool:
        """True if the run is finished for a site that would be alone."""
        if not self._members.finished_by or self._sites[site].goes_further:
            return False
        return self._members.has_finished_folder or (
            number == START and not self._somebody_has_state(site, now)
        )

    def _answer_late(self, site: int, question: int, members: Sequence[int]) -> None:
        # An earlier process of it may be one.
        present = [[member, 1.0] for member in members if member != site]
        self._send(site, {"id": question, "present": present, "group": ""})

    def _update_round(self, meeting: RoundMeeting, now: float) -> None:
        if meeting.number == START and not meeting.is_settled:
            # A site came before those that train had reconnected to a restarted rendezvous: it is late.
            for site in [site for site in meeting.questions if self._somebody_has_state(site, now)]:
                self._answer_late(site, meeting.questions.pop(site), self.present)
        if not meeting.is_settled and START < meeting.number < self._members.newest:
            # Completed by members that met before this rendezvous was restarted.
            meeting.is_settled, meeting.members = True, self.present
        late = meeting.questions
        if meeting.is_settled and late:
            if self._members.newest > meeting.number:
                for site, question in late.items():
                    self._answer_late(site, question, meeting.members)
                late.clear()
            elif all(site in late or self._is_lost(meeting, site, now) for site in meeting.members):
                # No member with its result is left: late sites meet again.
                meeting.is_settled, meeting.members = False, ()
                meeting.weights, meeting.awaited = {}, frozenset()
        if meeting.is_settled:
            return
        there = [site for site in meeting.questions if not self._members.is_gone(site, now)]
        if len(self._pairs.mesh(there)) < min(meeting.rule.quorum, self._members.num_sites):
            meeting.enough = math.inf
        elif meeting.enough == math.inf:
            meeting.enough = now
        awaited = self._awaited(meeting, now) if now < meeting.closes else set[int]()
        awaited |= self._returning(meeting, now)
        meeting.missing = (awaited & set(self._pairs.mesh({*awaited, *there}))) - set(meeting.questions)
        if there and not meeting.missing and meeting.enough < math.inf:
            self._settle(meeting, self._pairs.mesh(there), now)

    def _returning(self, meeting: RoundMeeting, now: float) -> set[int]:
        """Sites that download the state of this number, or have just downloaded it, and are not gone."""
        downloading = self._downloads(meeting.number)
        awaited = self._returns.awaited(meeting.number, meeting.closes, downloading, now)
        return {
            site
            for site in awaited
            if not (self._sites[site].has_done_all or self._members.is_gone(site, now))
        }

    def _awaited(self, meeting: RoundMeeting, now: float) -> set[int]:
        wanted = range(self._members.num_sites) if meeting.awaited is None else meeting.awaited
        if meeting.number == START:  # a stopped site may return, perhaps with a newer state
            return {site for site in wanted if site not in self._sites or not self._sites[site].has_ended}

        def is_awaited(info: SiteInfo) -> bool:
            return info.has_begun and not info.has_done_all and not info.is_gone(now)

        return {site for site in wanted if site not in self._sites or is_awaited(self._sites[site])}

    def _settle(self, meeting: RoundMeeting, members: tuple[int, ...], now: float) -> None:
        meeting.is_settled, meeting.members = True, members
        meeting.sessions = {site: self._sites[site].session for site in members}
        if self._members.began is None:
            self._members.began = now
        missing = sorted(set(self._sites) - set(members))
        without = f", without {names_of(missing)}" if missing else ""
        what = "the run begins" if meeting.number == START else f"round {meeting.number + 1}"
        if meeting.number == START or members != self.present:
            self._say(f"{what}: {names_of(members)}{without}")
        if meeting.number == START and (away := self._awaited(meeting, now) - set(members)):
            self._say(
                f"WARNING: the run begins WITHOUT {names_of(sorted(away))}, not there after "
                f"{now - meeting.opened:.0f} s (netgym rendezvous --wait); later sites take part from their arrival on"
            )
        self._report_absences(meeting, members, now)
        attempt = self._begin(meeting.number, 0, members, meeting.seconds, now)
        for site in members:  # the others do not reach all of these, and wait on
            self._answer_present(site, meeting.questions.pop(site), meeting, attempt)

    def _report_absences(self, meeting: RoundMeeting, members: Sequence[int], now: float) -> None:
        """Report why a site that is present misses its second round in a row, and again from time to time."""
        for site, info in self._sites.items():
            is_coming = info.has_begun or info.downloading is not None
            if site in members or not is_coming or not info.is_connected or info.has_done_all:
                continue
            first, reported = info.missed or (meeting.number, now)
            num_missed = meeting.number + 1 - first
            if num_missed == 2 or (num_missed > 2 and now >= reported + _SECONDS_BETWEEN_REPORTS):
                reported = now
                self._say(
                    f"site {site} has missed {format_count(num_missed, 'round')} since round {first + 1}: "
                    f"{self._why_absent(info, members, now)}"
                )
            info.missed = first, reported

    def _why_absent(self, info: SiteInfo, members: Sequence[int], now: float) -> str:
        cut_off = set(self._pairs.unreached(info.site)) & set(members)
        if cut_off:
            return f"it does not reach {names_of(sorted(cut_off))}; it takes part again when it does"
        _, slow_until = self._returns.slow.get(info.site, (0, now))
        if now < slow_until:
            seconds = slow_until - now
            return (
                f"its last averages took too long, so no site waits for its downloads in the next {seconds:.0f} s; "
                "give averages more time (averaging_timeout), or this site a faster link"
            )
        if info.downloading is not None:
            return f"it has been downloading the state for {now - info.downloading:.0f} s"
        option = "timeout_waiting_for_peers, or matchmaking_time"
        return f"it still computes{progress_of(info)}; raise {option}"

    def _answer_present(self, site: int, question: int, meeting: RoundMeeting, attempt: Attempt) -> None:
        present = [[member, meeting.weights.get(member, 1.0)] for member in attempt.members]
        self._send(
            site,
            {
                "id": question,
                "present": present,
                "group": attempt.group,
                "attempt": attempt.attempt,
                "seconds": attempt.seconds,
                "alive": self._num_alive,
            },
        )

    @property
    def _num_alive(self) -> int:
        """Sites to which messages get, and which have not ended."""
        return sum(info.is_connected and not info.has_ended for info in self._sites.values())

    # --- attempts --------------------------------------------------------------------------------------------

    def _begin(
        self, number: int, attempt: int, members: tuple[int, ...], seconds: float, now: float, group: str = ""
    ) -> Attempt:
        """Begin an attempt; one with a `group` was begun before this rendezvous was restarted."""
        sessions = {site: self._sites[site].session for site in members if site in self._sites}
        if not group:
            if sessions != self._group[0]:
                self._group = (sessions, self._members.new_group())
            group = self._group[1]
            self._attempts = {key: each for key, each in self._attempts.items() if key[0] >= number}
        made = self._attempts[number, attempt, group] = Attempt(
            number=number,
            seconds=seconds,
            deadline=now + seconds,
            opened=now,
            members=members,
            sessions=sessions,
            attempt=attempt,
            group=group,
        )
        return made

    def confirm(self, site: int, question: int, asked: Mapping[str, Any], now: float) -> None:
        """Record a member's success or failure: `number`, `attempt`, `group`, `members`, `seconds`, `is_finished`."""
        number, nth, group = key = (int(asked["number"]), int(asked["attempt"]), str(asked["group"]))
        attempt = self._attempts.get(key)
        if attempt is None:  # begun before this rendezvous was restarted: rebuilt from its members' answers
            attempt = self._begin(number, nth, tuple(asked["members"]), float(asked["seconds"]), now, group)
            known = self._rounds.get(number)
            if known is None or not known.is_settled:
                self._rounds[number] = RoundMeeting(
                    number=number,
                    seconds=attempt.seconds,
                    deadline=now,
                    questions={} if known is None else known.questions,  # it began without these sites
                    members=attempt.members,
                    sessions=attempt.sessions,
                    awaited=frozenset(),
                    is_settled=True,
                )
        attempt.questions[site], attempt.results[site] = question, bool(asked["is_finished"])

    def _update_attempt(self, attempt: Attempt, now: float) -> None:
        if attempt.left is None:
            if self._members.newest > attempt.number:
                attempt.left = ()  # reported as completed before this rendezvous was restarted
            elif all(attempt.results.get(site) for site in attempt.members):
                attempt.left = self.present = attempt.members
                for site in attempt.members:
                    if site in self._sites and not self._is_lost(attempt, site, now):
                        self._sites[site].has_begun, self._sites[site].missed = True, None
                        self._returns.slow.pop(site, None)
            elif self._has_failed(attempt, now) and (left := self._left(attempt, now)):
                self._retry(attempt, left, now)
            else:
                return
        following = self._attempts.get((attempt.number, attempt.attempt + 1, attempt.next_group))
        for site, question in attempt.questions.items():
            left = attempt.left or tuple(member for member in attempt.members if member != site)
            answer = {"id": question, "left": list(left), "group": attempt.next_group or attempt.group}
            if following is not None:
                answer |= {"attempt": following.attempt, "seconds": following.seconds}
            self._send(site, answer)
        attempt.questions.clear()

    def _has_failed(self, attempt: Attempt, now: float) -> bool:
        """True if the attempt can never complete; its members then leave the group and test their connections."""
        if attempt.test is not None:
            return True
        there = [site for site in attempt.members if not self._is_lost(attempt, site, now)]
        has_failed = (
            len(there) < len(attempt.members)
            or not all(attempt.results.values())
            or now >= attempt.deadline + _ANSWER_SECONDS
        )
        if has_failed:
            attempt.failed, self._group = now, ({}, "")
            for site in attempt.members:
                self._send(site, {"push": "dissolved", "group": attempt.group})
            attempt.test = self._pairs.test(
                [site for site in there if site in self._sites], test_seconds(attempt.seconds), now
            )
        return has_failed

    def _left(self, attempt: Attempt, now: float) -> tuple[int, ...]:
        """Members of the next attempt; () while undecided."""
        there = {site for site in attempt.members if not self._is_lost(attempt, site, now)}
        if attempt.test is None or not self._pairs.is_over(attempt.test, there, now):
            return ()
        unknown = there - self._sites.keys()  # not yet reconnected to a restarted rendezvous
        if unknown and now < attempt.deadline:
            return ()
        there -= unknown
        if any(not self._sites[site].is_connected for site in there):
            return ()  # it reconnects or is dropped within a second
        answering = there & attempt.results.keys()
        if answering != there and now >= attempt.deadline:
            if now < attempt.deadline + _ANSWER_SECONDS:
                return ()
            self._returns.are_slow((there - answering) & self._sites.keys(), attempt.seconds, now)
            there = answering
        left = self._pairs.mesh(there)
        was_late = attempt.failed >= attempt.deadline - attempt.seconds / 10
        if left == attempt.members and len(left) > 1 and (was_late or attempt.num_breaks + 1 >= _MOST_BREAKS):
            # All answer and still fail: the next attempt is without the one with the slowest connection here.
            delays = {site: float(self._sites[site].pulse.get("delay", 0.0)) for site in attempt.members}
            weakest = max(attempt.members, key=lambda site: (delays[site], site))
            left = tuple(site for site in attempt.members if site != weakest)
            self._returns.are_slow([weakest], attempt.seconds, now)
        return left

    def _retry(self, attempt: Attempt, left: tuple[int, ...], now: float) -> None:
        attempt.left = left
        lost = sorted(set(attempt.members) - set(left))
        reason = f"without {names_of(lost)}" if lost else "as a connection broke"
        if any(site in self._returns.slow for site in lost):
            reason += f", as not all members finished in {attempt.seconds:g} s (averaging_timeout)"
        self._say(f"round {attempt.number + 1}: begins again {reason}")
        following = self._begin(attempt.number, attempt.attempt + 1, left, attempt.seconds, now)
        following.num_breaks = attempt.num_breaks + 1 if left == attempt.members else 0
        attempt.next_group = following.group
        meeting = self._rounds.get(attempt.number)
        if meeting is not None:
            meeting.members = left

    # --- reports ---------------------------------------------------------------------------------------------

    def status(self, now: float) -> dict[str, Any]:
        """Status of the run: `present`, `num_alive`, `waits`, reasons of `absent` sites, pairs that are `broken`."""
        absent = {}
        for site, info in sorted(self._sites.items()):
            if not info.is_connected:
                absent[str(site)] = (
                    "it has ended" if info.has_ended else f"it was lost {now - info.lost:.0f} s ago"
                )
            elif site not in self.present and not info.has_ended:
                since = "" if info.missed is None else f"since round {info.missed[0] + 1}: "
                absent[str(site)] = since + self._why_absent(info, self.present, now)
        return {
            "present": list(self.present),
            "num_alive": self._num_alive,
            "absent": absent,
            "broken": self._pairs.broken,
            "waits": [
                {
                    "round": pending.number + 1,
                    "where": where,
                    "sites": sorted(arrived),
                    "for": sorted(missing),
                    "seconds": round(now - pending.opened, 1),
                }
                for pending, where, arrived, missing in self._open_waits(now)
            ],
        }

    def _open_waits(self, now: float) -> Iterator[tuple[_Pending, str, Collection[int], Collection[int]]]:
        """Waits in rounds: what for, sites that have arrived, and those missing."""
        for meeting in self._rounds.values():
            if not meeting.is_settled and meeting.questions:
                there = [site for site in meeting.questions if not self._members.is_gone(site, now)]
                yield meeting, "for a round's end", there, meeting.missing
        for attempt in self._attempts.values():
            if attempt.left is None:
                missing = set(attempt.members) - set(attempt.results)
                yield attempt, "in an average", attempt.results, missing

    def _is_lost(self, pending: _Pending, site: int, now: float) -> bool:
        """True if the member's process is gone, even if another process is that site now."""
        if site not in self._sites:
            return False
        session = self._sites[site].session
        return self._members.is_gone(site, now) or pending.sessions.get(site, session) != session

    def _report_wait(
        self, pending: _Pending, arrived: Collection[int], missing: Collection[int], now: float
    ) -> None:
        """Report a wait that lasts: sites that have `arrived` wait for those `missing`."""
        seconds = now - pending.opened
        is_begin = pending.number == START and isinstance(pending, RoundMeeting)
        again = pending.reported_seconds + _FIRST_REPORT_SECONDS if is_begin else 2 * pending.reported_seconds
        if not arrived or not missing or seconds < max(_FIRST_REPORT_SECONDS, again):
            return
        pending.reported_seconds = seconds
        name = "the run's begin" if pending.number == START else f"round {pending.number + 1}"
        verb = "has" if len(arrived) == 1 else "have"
        each = "; ".join(self._whereabouts(site, now) for site in sorted(missing))
        then = (
            f"; it begins without in {pending.deadline - now:.0f} s (netgym rendezvous --wait)"
            if is_begin
            else ""
        )
        self._say(f"{name}: {names_of(sorted(arrived))} {verb} waited {seconds:.0f} s: {each}{then}")

    def _whereabouts(self, site: int, now: float) -> str:
        info = self._sites.get(site)
        if info is None:
            return f"site {site} has not joined yet"
        if not info.is_connected:
            return f"site {site} is lost{progress_of(info)}"
        if info.downloading is not None:
            return f"site {site} has been downloading the state for {now - info.downloading:.0f} s"
        place = info.pulse.get("place")
        where = f", in {visible(place, 120)}" if place else ""
        return f"site {site} has not arrived{progress_of(info)}{where}, last message {now - info.heard:.0f} s ago"
