"""One run's sites at a rendezvous: who is connected, and what each says and is told."""

from __future__ import annotations

import contextlib
import math
import secrets
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from exogym_core.ranks.rendezvous.facts import differences, known_facts, short_names
from exogym_core.ranks.rendezvous.notes import Notes
from exogym_core.ranks.rendezvous.roster import WAIT_SECONDS, Roster
from exogym_core.ranks.rendezvous.row_log import RowLog
from netsim.files.signed import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from netsim.files.signed import SignedChannel

__all__ = ["SitesOfRun"]

_ROWS_AT_ONCE = 500
_STEPS_TOLD_AGAIN = (
    200  # before the oldest checkpoint: rows of others may not have come when theirs were made
)


class SitesOfRun:
    """One run's sites: who is connected, what they are told. Its methods are called under one lock."""

    def __init__(
        self,
        name: str,
        num_sites: int,
        say: Callable[[str], None],
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.name, self.num_sites, self.own_name = name, num_sites, ""
        self.connections: dict[tuple[int, int], SignedChannel] = {}  # of a site's lanes
        self._heard: dict[tuple[int, int], float] = {}  # when a connection last said something
        self._sessions: dict[tuple[int, int], str] = {}
        self._watching: dict[tuple[int, int], int] = {}  # who is told of rows, and how many it has been told
        self._say_on = say
        self._facts: dict[int, Mapping[str, Any]] = {}  # what a site trains, by name
        self._facts_of_finished: Mapping[str, Any] = {}  # of who was through
        self._past_steps: dict[str, int] = {}  # of sessions that go on from a checkpoint: the step of that
        self._retold: dict[str, int] = {}  # since which step they have been asked to tell rows again
        self._first_words: dict[str, list[str]] = {}  # for a session, when it can hear
        self.roster = Roster(num_sites, secrets.token_hex(4), self._send_site, self._say, wait_seconds)
        self._notes, self._rows = Notes(self._answer), RowLog()

    @property
    def is_over(self) -> bool:
        """Whether its sites were through with it."""
        sites = self.roster.sites.values()
        return self.roster.finishers.is_told or (
            any(info.has_ended for info in sites)
            and not any(info.is_connected and not info.has_ended for info in sites)
        )

    def welcome(self, channel: SignedChannel, hello: Mapping[str, Any], now: float) -> tuple[int, int]:
        """A process comes; returns its site and lane.

        Raises:
            ValueError: it is not let in; the text says why.
        """
        session, lane, site = str(hello["session"]), int(hello["lane"]), hello["site"]
        is_known = any(info.session == session for info in self.roster.sites.values())
        goes_further = bool(hello.get("resumed") and differences(known_facts(hello), self._facts_of_finished))
        if self.is_over and not is_known and not goes_further:
            raise ValueError(self.roster.finishers.line)
        hello = {**hello, "goes_further": goes_further}
        if lane == 0:
            site = self._arrived(site, session, hello, now)
            self._compare(int(site), session, hello)
        who = (int(site), lane)
        if who[0] in self.roster.sites:
            self.roster.sites[who[0]].lanes[lane] = hello.get("tests_at")
        earlier = self.connections.pop(who, None)
        if earlier is not None:
            earlier.close()
        self.connections[who], self._sessions[who], self._heard[who] = channel, session, now
        self.own_name = str(hello.get("own_name", ""))
        if hello.get("past_step"):
            self._past_steps[session] = int(hello["past_step"])
        about = {"name": self.roster.name, "num_rows": self._rows.num_of(session)}
        channel.send(site=site, num_sites=self.num_sites, **about)
        return who

    def finished(self, hello: Mapping[str, Any]) -> None:
        """Who has come does not stay: its folder says that this run is finished."""
        site = hello.get("site")
        self.roster.finished(visible(hello["where"], 100) if site is None else f"site {int(site)}")

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is trained, as a site that is there has told it."""
        return next((self._facts[site] for site, lane in sorted(self.connections) if lane == 0), {})

    def has_had(self, hello: Mapping[str, Any]) -> bool:
        """Whether who comes has been here: its process, or an earlier one of that site which was through."""
        sites, site = self.roster.sites.values(), hello["site"]
        return any(
            info.where == hello.get("where") or (info.has_ended and site in (None, info.site))
            for info in sites
        )

    def refuse_stray(self, name: str, hello: Mapping[str, Any]) -> None:
        """Refuse who has come for this run with another file, and tell those who are here.

        Raises:
            ValueError: so it is; it has not said that it is for a run of its own (NETGYM_RUN), nor been here before.
        """
        here = min((site for site, lane in self.connections if lane == 0), default=None)
        if here is None or hello.get("was_here") or self.has_had(hello):
            return
        if str(hello.get("own_name", "")) != self.own_name:
            return
        mine, theirs = short_names(known_facts(hello)), short_names(self.facts)
        if not differences(mine, theirs):
            mine, theirs = {"run": name}, {"run": self.name}
        who = "a site" if hello["site"] is None else f"site {int(hello['site'])}"
        self._say(
            f"{who} was refused ({visible(hello.get('where', ''), 80)}): its {differences(mine, theirs, 'here')}"
        )
        told = differences(mine, theirs, f"the run's (site {here})")
        raise ValueError(
            f"this site's {told}: give both the same file, or this one NETGYM_RUN=... for a run of its own"
        )

    def tell_first(self, session: str, line: str) -> None:
        """Tell a process that has just come, when it can hear."""
        self._first_words.setdefault(session, []).append(line)

    def _compare(self, site: int, session: str, hello: Mapping[str, Any]) -> None:
        """Sites that train the same may still have files of unlike lengths."""
        theirs = next(
            (self._facts[other] for other, lane in self.connections if lane == 0 and other != site), {}
        )
        self._facts[site] = known_facts(hello)
        if told := differences(self._facts[site], theirs):
            line = f"site {site} has another file than those who are here: {told}"
            self._say(line)
            self.tell_first(session, line)

    def _arrived(self, site: Any, session: str, hello: Mapping[str, Any], now: float) -> int:
        """The number of a site whose first process has come; others of an earlier life of it are not heard any more."""
        before = dict(self.roster.sites)
        number = self.roster.arrive(site, session, hello, now)
        if number in before and self.roster.sites[number] is not before[number]:
            for who in [who for who in self.connections if who[0] == number and who[1]]:
                self.connections.pop(who).close()
                del self._heard[who]
        return number

    def leave(self, who: tuple[int, int], channel: SignedChannel, now: float) -> None:
        """A connection has ended."""
        if self.connections.get(who) is not channel:
            return
        del self.connections[who], self._heard[who]
        if who[1] and who[0] in self.roster.sites:
            self.roster.sites[who[0]].lanes.pop(who[1], None)
            self.roster.hear(*who, False, now)
        self._watching.pop(who, None)
        self._notes.forget_asker(who)
        if who[1] == 0:
            self.roster.depart(who[0], self._sessions[who], now)

    def was_away(self, seconds: float, now: float) -> None:
        """This process stood still for so long."""
        self._heard = {who: min(heard + seconds, now) for who, heard in self._heard.items()}
        self.roster.was_away(seconds, now)

    def silent(self, now: float, seconds: float) -> list[SignedChannel]:
        """Connections of sites that have not been heard of for so long."""
        found = []
        for (site, lane), heard in self._heard.items():
            if lane and site in self.roster.sites and now > heard + seconds:
                self.roster.hear(site, lane, True, now)
        for site, info in self.roster.sites.items():
            if info.is_connected and now > info.heard + seconds:
                found += [channel for who, channel in self.connections.items() if who[0] == site]
                self._say(f"site {site} has been silent for {seconds:g} s: {info.where}")
        return found

    # --- what sites say -------------------------------------------------------------------------------------

    def take(self, who: tuple[int, int], message: Mapping[str, Any], now: float) -> None:
        """A message of a site."""
        what, (site, lane), roster = message["say"], who, self.roster
        self._heard[who] = now
        if lane == 0:
            roster.sites[site].heard = now
        elif lane in roster.sites[site].silent_lanes:
            roster.hear(site, lane, False, now)
        if what == "note":
            self._notes.ask(who, int(message["id"]), message)
        elif what == "pulse":
            roster.sites[site].pulse = dict(message["pulse"])
            self._answer(who, int(message["id"]), {"pulses": self.pulses(now)})
        elif what == "rows":
            self._rows.add(self._sessions[who], int(message["first"]), list(message["rows"]))
            self._tell_rows()
        elif what == "watch":
            self._watching[who] = 0
            self._have_retold()
            for line in self._first_words.pop(self._sessions[who], []):
                self._send(who, {"push": "told", "line": line})
            self._tell_rows()
        elif what == "clock":
            if message.get("elapsed") is not None:
                began = now - float(message["elapsed"])
                roster.began = began if roster.began is None else min(began, roster.began)
            self._answer(who, int(message["id"]), {"elapsed": roster.elapsed(now)})
        elif what == "publish":
            roster.publish(site, int(message["number"]), now)
        elif what == "fetched":
            roster.fetched(site, int(message["number"]), now)
        elif what == "tests_at":
            roster.sites[site].lanes[lane] = message["place"]
        elif what == "tested":
            roster.tested(site, lane, message, now)
        elif what == "done":
            roster.done(site, now)
        elif what == "end":
            self._facts_of_finished = self._facts.get(site, {})
            roster.sites[site].pulse = {**roster.sites[site].pulse, **message["pulse"]}
            roster.end(site, int(message["id"]), float(message["seconds"]), now)
        elif what == "trouble":
            self._say(f"site {site}: {visible(message['line'], 400)}")
        elif what in ("join", "confirm", "fetch"):
            getattr(roster, what)(site, int(message["id"]), message, now)

    def told(self, now: float) -> dict[str, Any]:
        """Status of this run, for people."""
        steps = next((str(facts["max_steps"]) for facts in self._facts.values() if "max_steps" in facts), "")
        return {
            "run": self.name,
            "rounds": max(self.roster.newest, 0),
            "num_sites": self.num_sites,
            "steps": int(steps) if steps.isdecimal() else None,
            "seconds": self.roster.elapsed(now),
            "is_over": self.is_over,
            "sites": self.pulses(now),
            **self.roster.told(now),
        }

    def pulses(self, now: float) -> dict[str, Any]:
        """What each site last told of itself."""
        return {
            str(info.site): {
                **info.pulse,
                "where": info.where,
                "is_there": info.is_connected,
                "has_ended": info.has_ended,
                "silent": round(now - info.heard, 2),
            }
            for info in self.roster.sites.values()
        }

    def _have_retold(self) -> None:
        """Have those who go on from checkpoints tell again what others may have lost with everybody's processes."""
        there = [who for who in self._watching if self._sessions[who] in self._past_steps]
        since = min((self._past_steps[self._sessions[who]] for who in there), default=0) - _STEPS_TOLD_AGAIN
        for who in there:
            if len(there) > 1 and since < self._retold.get(self._sessions[who], math.inf):
                self._retold[self._sessions[who]] = since
                self._send(who, {"push": "retell", "since": since})

    def _tell_rows(self) -> None:
        for who, start in list(self._watching.items()):
            while start < len(self._rows):
                rows = self._rows.rows(start, _ROWS_AT_ONCE)
                start += len(rows)
                self._watching[who] = start
                self._send(who, {"push": "rows", "rows": rows})

    # --- what they are told -----------------------------------------------------------------------------------

    def tell(self, line: str) -> None:
        """A line for people at all sites."""
        for who in list(self._watching):
            self._send(who, {"push": "told", "line": line})

    def _say(self, line: str) -> None:
        self._say_on(line)
        self.tell(line)

    def _answer(self, who: tuple[int, int], question: int, told: Mapping[str, Any]) -> None:
        self._send(who, {"id": question, **told})

    def _send_site(self, site: int, message: Mapping[str, Any]) -> None:
        """To its first lane; what concerns all of them, to all."""
        for who in [who for who in self.connections if who[0] == site]:
            if who[1] == 0 or "push" in message:
                self._send(who, message)
        if message.get("push") == "dissolved":
            self._notes.forget(str(message["group"]))

    def _send(self, who: tuple[int, int], message: Mapping[str, Any]) -> None:
        channel = self.connections.get(who)
        if channel is not None:
            with contextlib.suppress(PeerError):
                channel.send(**message)

    def close(self) -> None:
        """Nobody is let stay."""
        for channel in self.connections.values():
            channel.close()
        self._rows.close()
