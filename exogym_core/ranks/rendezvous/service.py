"""The process at which sites meet: it outlives any of them, holds no tensors and needs no torch.

    Meeting(num_sites=4, address=("10.0.0.1", 29400), secret=secret).serve()

Sites connect to one port, with the run's secret, and keep the connection. Over it they say that they are alive, ask
who takes part in a round, find each other's addresses for torch's process groups, and tell each other rows. If it is
ended and started again, sites come back to it and tell it what it must know.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from exogym_core.meeting_place import SERVICE
from exogym_core.names import visible
from exogym_core.ranks.rendezvous.facts import differences, known_facts, short_names
from exogym_core.ranks.rendezvous.notes import Notes
from exogym_core.ranks.rendezvous.roster import WAIT_SECONDS, Roster
from exogym_core.ranks.rendezvous.row_log import RowLog
from netsim.files.errors import InputError
from netsim.files.signed import PeerError, StrangerError, answer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from netsim.files.signed import SignedChannel

__all__ = ["Meeting"]

_SECONDS_BETWEEN_LOOKS = 0.05
_SECONDS_OF_STANDING_STILL = (
    1.0  # from one look to the next: this process was stopped, or its machine is crowded
)
_SECONDS_TO_READ = 2.0  # for a site whose connection is full; others wait meanwhile
_SECONDS_TO_HELLO = 10.0
_MOST_GREETED = 64  # connections that have not shown yet that they know the secret
_ROWS_AT_ONCE = 500
_STEPS_TOLD_AGAIN = (
    200  # before the oldest checkpoint: rows of others may not have come when theirs were made
)
_MOST_RUNS = 100  # that are remembered


class _SitesOfRun:
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


class Meeting:
    """A rendezvous that listens.

    Args:
        num_sites: how many sites a run has.
        address: where to listen; port 0 takes one that is free.
        secret: known to the run's processes.
        silent_seconds: a site that has not been heard of for so long is lost.
        say: takes lines for people.
        wait_seconds: how long a run's begin waits for all sites, from when the first one comes.

    Attributes:
        address: where it listens.

    Raises:
        InputError: it cannot listen there.
    """

    def __init__(
        self,
        num_sites: int,
        address: tuple[str, int],
        secret: bytes,
        silent_seconds: float = 10.0,
        say: Callable[[str], None] = lambda line: None,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self._num_sites, self._secret, self._wait_seconds = num_sites, secret, wait_seconds
        self._silent_seconds, self._say = silent_seconds, say
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._runs: dict[str, _SitesOfRun] = {}
        self._num_greeted = 0
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server(address, family=family)
        except OSError as error:
            raise InputError(
                f"rendezvous: cannot listen on {visible(address[0])}:{address[1]}: {error.strerror or error}; name an "
                "address of this machine and a port that is free"
            ) from None
        self.address: tuple[str, int] = self._listener.getsockname()[:2]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, name="rendezvous", daemon=True).start()
        threading.Thread(target=self._keep_looking, name="rendezvous clock", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for run in self._runs.values():
                run.close()

    def told(self) -> list[dict[str, Any]]:
        """Each run that there was: `run`, `rounds` that were done, and `sites` with how far they got."""
        with self._lock:
            return [
                {"run": run.name, "rounds": max(run.roster.newest, 0), "sites": run.pulses(time.monotonic())}
                for run in self._runs.values()
            ]

    def serve(self) -> None:
        """Until Ctrl-C, or somebody ends it."""
        with self:
            self._ended.wait()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._num_greeted >= _MOST_GREETED:
                    connection.close()
                    continue
                self._num_greeted += 1
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        channel = None
        try:
            channel = answer(connection, self._secret, SERVICE)
            channel.give_up_sending_after(_SECONDS_TO_READ)
        except StrangerError as error:
            self._say(f"somebody was refused: {visible(error, 200)}")
        except PeerError:
            pass
        finally:
            with self._lock:
                self._num_greeted -= 1
        if channel is not None:
            self._listen(channel)

    def _listen(self, channel: SignedChannel) -> None:
        run, who = None, None
        try:
            hello = channel.receive(_SECONDS_TO_HELLO)
            with self._lock:
                if hello.get("finished"):
                    self._run_named(str(hello["run"]), None).finished(hello)
                    channel.send(heard=True)
                    return
                try:
                    run = self._run_named(str(hello["run"]), hello)
                    who = run.welcome(channel, hello, time.monotonic())
                except ValueError as error:
                    channel.send(refused=str(error))
            while run is not None and who is not None:
                message = channel.receive()
                with self._lock:
                    run.take(who, message, time.monotonic())
        except PeerError:
            pass
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # somebody of other making
            self._say(f"a message was not understood ({type(error).__name__}: {visible(error, 200)})")
        finally:
            channel.close()
            with self._lock:
                if run is not None and who is not None:
                    run.leave(who, channel, time.monotonic())

    def _run_named(self, name: str, hello: Mapping[str, Any] | None) -> _SitesOfRun:
        """The run, a new one where there is none; `hello` is of who comes to it, None of who does not stay.

        Raises:
            ValueError: who comes belongs to another run, and has another file; the text says in what it differs.
        """
        run = self._runs.get(name)
        if run is not None:
            return run
        others = [each for each in self._runs.values() if each.connections and not each.is_over]
        if hello is not None:
            for each in others:
                each.refuse_stray(name, hello)
        if len(self._runs) >= _MOST_RUNS:
            oldest = next((each for each in self._runs.values() if not each.connections), None)
            if oldest is not None:
                oldest.close()
                del self._runs[oldest.name]
        run = self._runs[name] = _SitesOfRun(name, self._num_sites, self._say, self._wait_seconds)
        for each in others:
            if hello is None or each.has_had(hello):  # it goes on to its next strategy
                continue
            told = differences(known_facts(hello), each.facts)
            line = (
                f"a site has come with another run ({visible(name, 60)}) than those who are here "
                f"({visible(each.name, 60)}), and waits for sites of its own; if it belongs to them, give it their file"
                + (f": {told}" if told else "")
            )
            self._say(line)
            each.tell(line)
            run.tell_first(str(hello["session"]), line)
        return run

    def _keep_looking(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(_SECONDS_BETWEEN_LOOKS):
            before, last = last, time.monotonic()
            now = last
            silent: list[SignedChannel] = []
            with self._lock:
                for run in self._runs.values():
                    if now > before + _SECONDS_OF_STANDING_STILL:
                        run.was_away(now - before, now)
                    silent += run.silent(now, self._silent_seconds)
                    run.roster.look(now)
            for channel in silent:
                channel.close()  # its own thread tells that it is lost
