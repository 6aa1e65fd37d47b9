"""Who is there, who meets for which round, and who has which state: what a rendezvous of sites decides.

It hears of things that happen, each with its time in seconds, and answers by `send`. It knows nothing of sockets,
threads or clocks, so the same things in the same order give the same decisions. What a meeting means is told by
`Communicator.among_present`, whose rules are the simulation's; what only real sites do is decided here: a process
that is gone is not waited for, and attempts at which a connection broke are begun again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from exogym_core.ranks.rendezvous.agenda import Attempt, RoundMeeting, Wanted
from exogym_core.ranks.rendezvous.downloads import Downloads
from exogym_core.ranks.rendezvous.finishers import Finishers
from exogym_core.ranks.rendezvous.long_waits import LongWaits
from exogym_core.ranks.rendezvous.pairs import SitePairs, test_seconds
from exogym_core.ranks.rendezvous.site_info import START, SiteInfo, names_of, progress_of
from netsim.ranks.reach import SLOW_TIMES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

__all__ = ["START", "WAIT_SECONDS", "Roster", "SiteInfo"]

WAIT_SECONDS = 600.0
"""How long a run's begin waits for all sites, where nobody says how long."""

# How long after an attempt's time its members may still say that it failed.
_ANSWER_SECONDS = 3.0
_SERVING_SECONDS = 60.0  # who is through stays so long at least for those who are on the way
_SECONDS_BETWEEN_WORDS = 30.0  # of a site that misses round after round
_MOST_BREAKS = 3  # attempts of the same members that may break before somebody is left out


class Roster:
    """Decides who takes part.

    Args:
        num_sites: how many there can be; they are numbered from 0.
        name: of this rendezvous' life; names of groups begin with it, so that none comes twice.
        send: called with (site, message) for answers, `{"id": question, ...}`, and requests, `{"push": ...}`.
        say: called with lines for people.
        wait_seconds: how long the run's begin waits for all sites, from the first one's coming.
    """

    def __init__(
        self,
        num_sites: int,
        name: str,
        send: Callable[[int, Mapping[str, Any]], None],
        say: Callable[[str], None] = lambda line: None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.num_sites, self.name, self._wait_seconds = num_sites, name, wait_seconds
        self._send, self._say = send, say
        self.sites: dict[int, SiteInfo] = {}
        self.newest = START - 1
        self.began: float | None = None  # when the first round did
        self._rounds: dict[int, RoundMeeting] = {}
        self._attempts: dict[tuple[int, int, str], Attempt] = {}  # by number, attempt and group
        self._long_waits = LongWaits(self.sites, say)
        self.finishers = Finishers()
        self._pairs = SitePairs(self.sites, send, self._new_group, say)
        self._downloads = Downloads(self.sites, send, self._new_group, self.finishers, self._pairs)
        self._published: dict[int, float] = {}  # when the newest states came to be
        self._leaving: dict[int, tuple[int, float]] = {}  # site -> (question, until when it waits for others)
        self._standing: tuple[tuple[tuple[int, str], ...], str] = ((), "")  # members' sessions, group
        self._num_groups = 0
        self._present: tuple[int, ...] = ()

    def _new_group(self) -> str:
        self._num_groups += 1
        return f"{self.name}-{self._num_groups}"

    # --- coming and going -----------------------------------------------------------------------------------

    def arrive(self, site: int | None, session: str, hello: Mapping[str, Any], now: float) -> int:
        """A process comes, or comes back; returns the number of its site.

        Args:
            site: the one that it is; None: the lowest that is free.
            session: names the process.
            hello: `where`, `goes_further`, and of one that was here before `has_begun`, `newest` and `elapsed`.
            now: the time.

        Raises:
            ValueError: there is no room, or another process is that site; the text says so.
        """
        taken = {
            number for number, info in self.sites.items() if info.is_connected and info.session != session
        }
        if site is None:
            mine = [number for number, info in self.sites.items() if info.session == session]
            free = [number for number in range(self.num_sites) if number not in taken]
            if not free:
                raise ValueError(f"all {self.num_sites} sites are there already")
            site = (mine or free)[0]
        if not 0 <= site < self.num_sites:
            raise ValueError(f"there is no site {site}: they are numbered 0 to {self.num_sites - 1}")
        if site in taken:
            where = self.sites[site].where
            raise ValueError(
                f"site {site} is there already: {where}; give this one another NETGYM_SITE, or end that process"
            )
        known = self.sites.get(site)
        if known is None or known.session != session:
            if known is not None:
                self._forget(known.site)
            known = self.sites[site] = SiteInfo(site, session, str(hello.get("where", "")), now)
            self._say(f"site {site} has come: {known.where}")
        else:
            self._say(f"site {site} is back: {known.where}")
        known.heard, known.lost = now, math.inf
        known.lanes[0] = hello.get("tests_at")
        known.goes_further = bool(hello.get("goes_further"))
        known.has_begun = known.has_begun or bool(hello.get("has_begun"))
        known.newest = max(known.newest, int(hello.get("newest", START - 1)))
        self.newest = max(self.newest, known.newest)
        if hello.get("elapsed") is not None:
            began = now - float(hello["elapsed"])
            self.began = began if self.began is None else min(self.began, began)
        return site

    def _forget(self, site: int) -> None:
        """What an earlier process of this site has asked is not asked any more."""
        self._downloads.forget(site)
        self._leaving.pop(site, None)
        for each in self._rounds.values():
            each.late.pop(site, None)
            if not each.is_settled:
                each.come.pop(site, None)

    def depart(self, site: int, session: str, now: float) -> None:
        """The connection of a process has ended."""
        info = self.sites.get(site)
        if info is not None and info.session == session and info.is_connected:
            info.lost = now
            if not info.has_ended:
                self._say(f"site {site} is lost: {info.where}{progress_of(info)}")
        self.look(now)

    def hear(self, site: int, lane: int, is_silent: bool, now: float) -> None:
        """A process of a site has not been heard of for long, or is heard of again."""
        silent = self.sites[site].silent_lanes
        if is_silent != (lane in silent):
            silent.symmetric_difference_update({lane})
            self._say(f"site {site}: its process {lane} {'hangs' if is_silent else 'is heard of again'}")
            self.look(now)

    def done(self, site: int, now: float) -> None:
        """A site has done its rounds: others that have more to do go on without it."""
        self.sites[site].has_done_all = True
        self.look(now)

    def end(self, site: int, question: int, seconds: float, now: float) -> None:
        """A site is through; it is let go when nobody needs what it has, after `seconds` at the latest."""
        self.sites[site].has_ended = True
        self._leaving[site] = (question, now + max(seconds, _SERVING_SECONDS))
        self.finishers.by(f"site {site}")
        self._say(f"site {site} is through{progress_of(self.sites[site])}")
        self.look(now)

    def finished(self, name: str) -> None:
        """A folder tells that this run has been finished: nobody goes on with it."""
        self.finishers.by(name, is_told=True)
        self._say(f"{name} has finished this run already: its folder has the model")
        for meeting in self._rounds.values():
            waiting = {**{site: question for site, (question, _) in meeting.come.items()}, **meeting.late}
            if not meeting.is_settled:
                for site, question in waiting.items():
                    self._send(site, {"id": question, "refused": self.finishers.line})
                meeting.come.clear()

    def elapsed(self, now: float) -> float | None:
        """Seconds since the run began; None before."""
        return None if self.began is None else now - self.began

    # --- rounds ----------------------------------------------------------------------------------------------

    def join(self, site: int, question: int, asked: Mapping[str, Any], now: float) -> None:
        """Come to the meeting of a number: `number`, `seconds`, `averaging_seconds`, `weight`, `awaited`."""
        number = int(asked["number"])
        self._forget(site)
        if self._is_over(site, number, now):
            self._send(site, {"id": question, "refused": self.finishers.line})
            return
        if self._is_late(site, number, now):
            self._tell_late(site, question, self._present)
            return
        meeting = self._rounds.get(number)
        if meeting is None:
            for passed in [each for each in self._rounds if each < number and not self._rounds[each].late]:
                del self._rounds[passed]
            awaited = None if asked["awaited"] is None else frozenset(asked["awaited"])
            deadline = now + (self._wait_seconds if number == START else float(asked["seconds"]))
            meeting = self._rounds[number] = RoundMeeting(
                number, deadline, float(asked["averaging_seconds"]), awaited, opened=now
            )
        if meeting.is_settled:
            if not self._told_again(site, question, meeting):
                meeting.late[site] = question
        else:
            meeting.come[site] = (question, float(asked["weight"]))
        self.look(now)

    def _told_again(self, site: int, question: int, meeting: RoundMeeting) -> bool:
        """Whether this site is a member that asks again, as the answer was lost with its connection."""
        for attempt in self._attempts.values():
            is_open = attempt.number == meeting.number and attempt.left is None and attempt.test is None
            is_member = site in attempt.members and attempt.sessions.get(site) == self.sites[site].session
            if is_open and is_member and site not in attempt.said:
                self._tell_present(site, question, meeting, attempt)
                return True
        return False

    def _is_late(self, site: int, number: int, now: float) -> bool:
        if number != START:
            return self.newest > number
        if self._somebody_has_state(site, now):
            return True
        there = [info for info in self.sites.values() if info.site != site and not info.is_gone(now)]
        if self._rounds.get(START) is None or not there:  # nobody has a state any more: begin anew
            self.newest, self._present = START - 1, ()
            self._rounds.clear()
            self._attempts.clear()
        return False

    def _somebody_has_state(self, site: int, now: float) -> bool:
        """Whether another one has begun, and is there: who is through stays for those who have come."""
        others = [info for info in self.sites.values() if info.site != site and info.has_begun]
        return any(info.can_serve or not info.is_gone(now) for info in others)

    def _is_over(self, site: int, number: int, now: float) -> bool:
        """Whether there is nothing left to do for a site, and nobody left to do it with."""
        if not self.finishers or self.sites[site].goes_further:
            return False
        return self.finishers.is_told or (number == START and not self._somebody_has_state(site, now))

    def _tell_late(self, site: int, question: int, members: Sequence[int]) -> None:
        present = [
            [member, 1.0] for member in members if member != site
        ]  # an earlier process of it may be one
        self._send(site, {"id": question, "present": present, "group": ""})

    def _look_at_round(self, meeting: RoundMeeting, now: float) -> None:
        if meeting.is_settled:
            if meeting.late and self.newest > meeting.number:
                for site, question in meeting.late.items():
                    self._tell_late(site, question, meeting.members)
                meeting.late.clear()
            elif meeting.late and all(
                member in meeting.late or self._is_lost(meeting, member, now) for member in meeting.members
            ):
                # Nobody has what came of it: who was late meets again.
                meeting.is_settled, meeting.members = False, ()
                meeting.come = {site: (question, 1.0) for site, question in meeting.late.items()}
                meeting.late, meeting.awaited = {}, frozenset()
            if meeting.is_settled:
                return
        there = [site for site in meeting.come if not self._is_gone(site, now)]
        awaited = self._awaited(meeting, now) if now < meeting.deadline else set[int]()
        awaited |= self._returning(meeting, now)
        missing = (awaited & set(self._pairs.mesh({*awaited, *there}))) - set(meeting.come)
        if there and not missing:
            self._settle(meeting, self._pairs.mesh(there), now)
        else:
            self._long_waits.look(meeting, there, missing, now, until=meeting.deadline)

    def _returning(self, meeting: RoundMeeting, now: float) -> set[int]:
        """Sites that download the state of this number, or have just done so.

        They are waited for longer than others, by as much as they got the state later.
        """
        found = self._downloads.of(meeting.number) | {
            site
            for site, info in self.sites.items()
            if info.fetched == meeting.number and now < meeting.deadline + info.fetched_after
        }
        infos = [self.sites[site] for site in found]
        return {
            info.site
            for info in infos
            if now >= info.slow_until and not info.has_done_all and not info.is_gone(now)
        }

    def _awaited(self, meeting: RoundMeeting, now: float) -> set[int]:
        wanted = range(self.num_sites) if meeting.awaited is None else meeting.awaited
        if meeting.number == START:  # who was stopped may come again, perhaps with a newer state
            return {site for site in wanted if site not in self.sites or not self.sites[site].has_ended}
        awaited = {site for site in wanted if site not in self.sites or not self._is_gone(site, now)}
        awaited = {site for site in awaited if site not in self.sites or self.sites[site].has_begun}
        return {site for site in awaited if site not in self.sites or not self.sites[site].has_done_all}

    def _settle(self, meeting: RoundMeeting, members: tuple[int, ...], now: float) -> None:
        meeting.is_settled, meeting.members = True, members
        meeting.sessions = {site: self.sites[site].session for site in members}
        meeting.weights = {site: weight for site, (_, weight) in meeting.come.items()}
        if self.began is None:
            self.began = now
        missing = sorted(set(self.sites) - set(members))
        without = f", without {names_of(missing)}" if missing else ""
        what = "the run begins" if meeting.number == START else f"round {meeting.number + 1}"
        if meeting.number == START or members != self._present:
            self._say(f"{what}: {names_of(members)}{without}")
        for site in set(meeting.come) - set(members):  # they reach not all of the others
            meeting.late[site] = meeting.come[site][0]
        if meeting.number == START and (away := self._awaited(meeting, now) - set(members)):
            self._say(
                f"WARNING: the run begins WITHOUT {names_of(sorted(away))}, not there after "
                f"{now - meeting.opened:.0f} s (netgym rendezvous --wait); who comes later takes part from then on"
            )
        self._tell_absences(meeting, members, now)
        attempt = self._begin(meeting.number, 0, members, meeting.seconds, now)
        for site in members:
            self._tell_present(site, meeting.come[site][0], meeting, attempt)

    def _tell_absences(self, meeting: RoundMeeting, members: Sequence[int], now: float) -> None:
        """Why somebody who is there misses its second round in a row, and again from time to time."""
        for site, info in self.sites.items():
            is_coming = info.has_begun or info.downloads_since is not None
            if site in members or not is_coming or not info.is_connected or info.has_done_all:
                continue
            if info.missed is None:
                info.missed, info.told_missed = meeting.number, now
            num_missed = meeting.number + 1 - info.missed
            if num_missed == 2 or (num_missed > 2 and now >= info.told_missed + _SECONDS_BETWEEN_WORDS):
                info.told_missed = now
                self._say(
                    f"site {site} has missed {num_missed} rounds since round {info.missed + 1}: "
                    f"{self._why_absent(info, members, now)}"
                )

    def _why_absent(self, info: SiteInfo, members: Sequence[int], now: float) -> str:
        cut_off = set(self._pairs.unreached(info.site)) & set(members)
        if cut_off:
            return f"it does not reach {names_of(sorted(cut_off))}; it takes part again when it does"
        if now < info.slow_until:
            seconds = info.slow_until - now
            return (
                f"its last averages took too long, so nobody waits for its downloads in the next {seconds:.0f} s; "
                "give averages more time (averaging_timeout), or this site a faster link"
            )
        if info.downloads_since is not None:
            return f"it downloads the state since {now - info.downloads_since:.0f} s"
        option = "timeout_waiting_for_peers, or matchmaking_time"
        return f"it still computes{progress_of(info)}; give it more time ({option})"

    def _tell_present(self, site: int, question: int, meeting: RoundMeeting, attempt: Attempt) -> None:
        present = [[member, meeting.weights.get(member, 1.0)] for member in attempt.members]
        self._send(
            site,
            {
                "id": question,
                "present": present,
                "group": attempt.group,
                "attempt": attempt.attempt,
                "seconds": attempt.seconds,
            },
        )

    # --- what those present do together -----------------------------------------------------------------------

    def _begin(
        self, number: int, attempt: int, members: tuple[int, ...], seconds: float, now: float
    ) -> Attempt:
        sessions = tuple((site, self.sites[site].session) for site in members)
        if sessions != self._standing[0]:
            self._standing = (sessions, self._new_group())
        made = Attempt(
            number, attempt, self._standing[1], members, dict(sessions), seconds, now + seconds, opened=now
        )
        for key in [key for key, each in self._attempts.items() if each.number < number]:
            del self._attempts[key]
        self._attempts[number, attempt, made.group] = made
        return made

    def confirm(self, site: int, question: int, asked: Mapping[str, Any], now: float) -> None:
        """A member has done its work, or failed: `number`, `attempt`, `group`, `members`, `seconds`, `is_through`."""
        number, nth, group = key = (int(asked["number"]), int(asked["attempt"]), str(asked["group"]))
        attempt = self._attempts.get(key)
        if attempt is None:
            members = tuple(asked["members"])
            # Of an earlier life of this rendezvous: what its members say tells what it knew.
            seconds = float(asked["seconds"])
            sessions = {member: self.sites[member].session for member in members if member in self.sites}
            attempt = Attempt(number, nth, group, members, sessions, seconds, now + seconds, opened=now)
            self._attempts[key] = attempt
            meeting = RoundMeeting(number, now, seconds, frozenset(), sessions=sessions)
            meeting.is_settled, meeting.members = True, members
            self._rounds.setdefault(number, meeting)
        attempt.said[site] = (question, bool(asked["is_through"]))
        self.look(now)

    def _look_at_attempt(self, attempt: Attempt, now: float) -> None:
        if attempt.left is None:
            if self.newest > attempt.number:
                attempt.left = ()  # an earlier life of this rendezvous has told some that all were through
            elif all(attempt.said.get(site, (0, False))[1] for site in attempt.members):
                self._done(attempt, now)
            elif not self._has_failed(attempt, now):
                self._long_waits.look(attempt, attempt.said, set(attempt.members) - set(attempt.said), now)
                return
            elif left := self._left(attempt, now):
                self._go_on(attempt, left, now)
            else:
                return
        for site, (question, _) in list(attempt.said.items()):
            if question:
                self._tell_left(site, question, attempt)
                attempt.said[site] = (0, attempt.said[site][1])

    def _done(self, attempt: Attempt, now: float) -> None:
        """All its members are through."""
        attempt.left = self._present = attempt.members
        for site in attempt.members:
            if site in self.sites and not self._is_lost(attempt, site, now):
                info = self.sites[site]
                info.has_begun, info.missed = True, None
                info.num_slow, info.slow_until = 0, -math.inf

    def _has_failed(self, attempt: Attempt, now: float) -> bool:
        """Whether it will never be done; then its members are told to leave it, and find out whom they reach."""
        if attempt.test is not None:
            return True
        there = [site for site in attempt.members if not self._is_lost(attempt, site, now)]
        has_failed = (
            len(there) < len(attempt.members)
            or any(not is_through for _, is_through in attempt.said.values())
            or now >= attempt.deadline + _ANSWER_SECONDS
        )
        if has_failed:
            attempt.failed, self._standing = now, ((), "")
            self._send_all(attempt.members, {"push": "dissolved", "group": attempt.group})
            attempt.test = self._pairs.test(
                [site for site in there if site in self.sites], test_seconds(attempt.seconds), now
            )
        return has_failed

    def _tell_left(self, site: int, question: int, attempt: Attempt) -> None:
        assert attempt.left is not None
        left = attempt.left or [member for member in attempt.members if member != site]
        told = {"id": question, "left": list(left), "group": attempt.next_group or attempt.group}
        following = self._attempts.get((attempt.number, attempt.attempt + 1, attempt.next_group))
        if following is not None:
            told |= {"attempt": following.attempt, "seconds": following.seconds}
        self._send(site, told)

    def _left(self, attempt: Attempt, now: float) -> tuple[int, ...]:
        """With whom a failed attempt is begun again; () while that is not known yet."""
        there = {site for site in attempt.members if not self._is_lost(attempt, site, now)}
        if attempt.test is None or not self._pairs.is_over(attempt.test, there, now):
            return ()
        unknown = (
            there - self.sites.keys()
        )  # this rendezvous has been started again, and they have not come back yet
        if unknown and now < attempt.deadline:
            return ()
        there -= unknown
        if any(not self.sites[site].is_connected for site in there):
            return ()  # it is back or gone within a second
        answering = there & attempt.said.keys()
        if answering != there and now >= attempt.deadline:
            if now < attempt.deadline + _ANSWER_SECONDS:
                return ()
            self._are_slow(there - answering, attempt.seconds, now)
            there = answering
        left = self._pairs.mesh(there)
        was_late = attempt.failed >= attempt.deadline - attempt.seconds / 10
        if left == attempt.members and len(left) > 1 and (was_late or attempt.num_breaks + 1 >= _MOST_BREAKS):
            left = self._without_weakest(attempt)
            self._are_slow(set(attempt.members) - set(left), attempt.seconds, now)
        return left

    def _are_slow(self, sites: set[int], seconds: float, now: float) -> None:
        """Wait for no downloads of those for a while who were too slow twice: they would hold all others up."""
        for site in sites & self.sites.keys():
            info = self.sites[site]
            if info.num_slow:
                info.slow_until = now + SLOW_TIMES * (seconds + info.fetched_after)
            info.num_slow += 1

    def _without_weakest(self, attempt: Attempt) -> tuple[int, ...]:
        """All answer, and still they do not come through: without the one whose way here is the slowest."""
        delays = {site: float(self.sites[site].pulse.get("delay", 0.0)) for site in attempt.members}
        weakest = max(attempt.members, key=lambda site: (delays[site], site))
        return tuple(site for site in attempt.members if site != weakest)

    def _go_on(self, attempt: Attempt, left: tuple[int, ...], now: float) -> None:
        attempt.left = left
        lost = sorted(set(attempt.members) - set(left))
        slow = [site for site in lost if site in self.sites and self.sites[site].num_slow]
        told = f"without {names_of(lost)}" if lost else "as a connection broke"
        if slow:
            told += f", as not all were through in {attempt.seconds:g} s (averaging_timeout)"
        self._say(f"round {attempt.number + 1}: begins again {told}")
        following = self._begin(attempt.number, attempt.attempt + 1, left, attempt.seconds, now)
        following.num_breaks = attempt.num_breaks + 1 if left == attempt.members else 0
        attempt.next_group = following.group
        meeting = self._rounds.get(attempt.number)
        if meeting is not None:
            meeting.members = left

    def _send_all(self, sites: Sequence[int], message: Mapping[str, Any]) -> None:
        for site in sites:
            if site in self.sites and self.sites[site].is_connected:
                self._send(site, message)

    # --- status ------------------------------------------------------------------------------------------------

    def told(self, now: float) -> dict[str, Any]:
        """Status of the run: `present`, `waits`, why somebody is `absent`, and pairs that are `broken`."""
        absent = {}
        for site, info in sorted(self.sites.items()):
            if not info.is_connected:
                absent[str(site)] = (
                    "it has ended" if info.has_ended else f"it is lost since {now - info.lost:.0f} s"
                )
            elif site not in self._present and not info.has_ended:
                since = "" if info.missed is None else f"since round {info.missed + 1}: "
                absent[str(site)] = since + self._why_absent(info, self._present, now)
        return {
            "present": list(self._present),
            "absent": absent,
            "broken": self._pairs.broken,
            "waits": [*self._open_waits(now)],
        }

    def _open_waits(self, now: float) -> Iterator[dict[str, Any]]:
        """Waits of sites for others in rounds, and since when."""
        for meeting in self._rounds.values():
            if not meeting.is_settled and meeting.come:
                missing = (self._awaited(meeting, now) | self._returning(meeting, now)) - set(meeting.come)
                yield _wait(meeting.number, meeting.come, missing, now - meeting.opened, "for a round's end")
        for attempt in self._attempts.values():
            if attempt.left is None:
                missing = set(attempt.members) - set(attempt.said)
                yield _wait(attempt.number, attempt.said, missing, now - attempt.opened, "in an average")

    # --- states ------------------------------------------------------------------------------------------------

    def publish(self, site: int, number: int, now: float) -> None:
        """A site has the state of that number."""
        info = self.sites[site]
        info.newest, info.has_begun = number, True
        if number > self.newest:
            self.newest = number
            self._published = {number: now}
        self.look(now)

    def fetch(self, site: int, question: int, asked: Mapping[str, Any], now: float) -> None:
        """A site wants the newest state: `at_least` this number, `without` the help of these sites."""
        without = [int(other) for other in asked["without"]]
        self._downloads.ask(Wanted(site, question, int(asked["at_least"]), frozenset(without)))
        if without and without[-1] in self.sites:  # that one has failed to give it
            self._pairs.test([site, without[-1]], test_seconds(math.inf), now)
        self.look(now)

    def tested(self, site: int, lane: int, asked: Mapping[str, Any], now: float) -> None:
        """A process of a site has found out whether it reaches another one: `group`, `peer`, `is_reached`."""
        self._pairs.told(site, lane, str(asked["group"]), int(asked["peer"]), bool(asked["is_reached"]), now)
        self.look(now)

    def fetched(self, site: int, number: int, now: float) -> None:
        """A site has that state now."""
        info = self.sites[site]
        info.fetched, info.has_begun = number, True
        info.fetched_after = now - self._published.get(number, now)
        self._downloads.forget(site)
        self.look(now)

    def was_away(self, seconds: float, now: float) -> None:
        """Nobody could be heard for so long, as this process stood still: that is nobody's silence."""
        for info in self.sites.values():
            info.heard = min(info.heard + seconds, now)
        for meeting in self._rounds.values():
            meeting.deadline += seconds
        for attempt in self._attempts.values():
            attempt.deadline, attempt.failed = attempt.deadline + seconds, attempt.failed + seconds
        self._pairs.was_away(seconds)
        self._leaving = {
            site: (question, until + seconds) for site, (question, until) in self._leaving.items()
        }

    # --- whenever something has happened -------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """See what can be decided now; also called as time passes."""
        for attempt in list(self._attempts.values()):
            self._look_at_attempt(attempt, now)
        for meeting in list(self._rounds.values()):
            self._look_at_round(meeting, now)
        self._pairs.look(now)
        self._downloads.look(self.newest, now)
        for site, (question, until) in list(self._leaving.items()):
            is_late = now >= until and not self._downloads.are_from(site)
            if is_late or not self._is_needed(site, now):
                del self._leaving[site]
                self._send(site, {"id": question})

    def _is_needed(self, site: int, now: float) -> bool:
        """Whether somebody is still on the way for whom this site alone keeps the newest state."""
        others = [info for info in self.sites.values() if info.site != site and not info.is_gone(now)]
        behind = [info for info in others if max(info.newest, info.fetched) < self.newest]
        return self.sites[site].newest == self.newest and bool(behind)

    def _is_gone(self, site: int, now: float) -> bool:
        return site in self.sites and self.sites[site].is_gone(now)

    def _is_lost(self, what: RoundMeeting | Attempt, site: int, now: float) -> bool:
        """Whether the process that was a member of this is no more, though another may be that site."""
        if site not in self.sites:
            return False
        session = self.sites[site].session
        return self._is_gone(site, now) or what.sessions.get(site, session) != session


def _wait(
    number: int, come: Collection[int], missing: Collection[int], seconds: float, where: str
) -> dict[str, Any]:
    return {
        "round": number + 1,
        "where": where,
        "sites": sorted(come),
        "for": sorted(missing),
        "seconds": round(seconds, 1),
    }
