"""Run session: the connections of one run's sites at the rendezvous, their messages, and the answers."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from itertools import pairwise
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from netgym.sites.membership import WAIT_SECONDS, Membership
from netsim.files.signed import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from netsim.files.signed import SignedChannel

__all__ = ["KeyValueStore", "RowLog", "RunSession", "differences", "known_facts", "short_names"]

_MOST_NAMED = 3


def differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], whose: str = "theirs") -> str:
    """Facts that differ, in words; "" where none does, or where one of the two is unknown.

    `whose` stands before the second of two values.

    >>> differences({"settings: seed": "7"}, {"settings: seed": "42"})
    'settings: seed is 7, theirs 42'
    """
    if not mine or not theirs:
        return ""
    differing = [name for name in {**theirs, **mine} if theirs.get(name) != mine.get(name)]
    named = [
        f"{visible(name, 60)} is {visible(mine.get(name, 'absent'), 60)}, "
        f"{whose} {visible(theirs.get(name, 'absent'), 60)}"
        for name in differing[:_MOST_NAMED]
    ]
    more = [f"and {len(differing) - len(named)} more"] if len(differing) > len(named) else []
    return "; ".join([*named, *more])


def short_names(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts by the names that a user writes, without their group."""
    parts = ("strategy's options: ", "settings: ")
    return {name.removeprefix(parts[0]).removeprefix(parts[1]): value for name, value in facts.items()}


def known_facts(hello: Mapping[str, Any]) -> Mapping[str, Any]:
    """Facts in a hello; none where they are malformed."""
    facts = hello.get("facts")
    return facts if isinstance(facts, dict) else {}


class RowLog:
    """All rows of all sites in order of arrival, in an anonymous temporary file."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115
        self._ends = [0]
        self.num_of: Counter[str] = Counter()  # rows of each session

    def add(self, session: str, first: int, rows: list[str]) -> None:
        """Append rows of a session, numbered from `first`; rows stored before are skipped."""
        known = self.num_of[session]
        for row in rows[max(known - first, 0) :]:
            data = row.encode()
            self._file.seek(self._ends[-1])
            self._file.write(data)
            self._ends.append(self._ends[-1] + len(data))
            self.num_of[session] += 1

    def __len__(self) -> int:
        return len(self._ends) - 1

    def rows(self, start: int, number: int) -> list[str]:
        """`number` rows from `start`."""
        self._file.seek(self._ends[start])
        ends = self._ends[start : start + number + 1]
        return [self._file.read(end - begin).decode() for begin, end in pairwise(ends)]

    def close(self) -> None:
        """Close and delete the file."""
        self._file.close()


_MOST_KEYS = 20_000
_MOST_GROUPS = 1_000


class KeyValueStore:
    """torch's store for process groups; answers may have to wait.

    Args:
        answer: called with (client, question, answer).
    """

    def __init__(self, answer: Callable[[tuple[int, int], int, Mapping[str, Any]], None]) -> None:
        self._answer = answer
        self._values: dict[str, str] = {}
        self._waiting: list[tuple[tuple[int, int], int, str]] = []
        self._gone: deque[str] = deque(maxlen=_MOST_GROUPS)  # groups that are no more

    def ask(self, client: tuple[int, int], question: int, asked: Mapping[str, Any]) -> None:
        """`set`, `get`, `add` or `check` a key."""
        what, key = asked["does"], str(asked["key"])
        if key.partition("/")[0] in self._gone:
            self._answer(client, question, {"error": "the group is dissolved"})
            return
        if what == "get":
            self._waiting.append((client, question, key))
            self._answer_waiting()
            return
        answer: dict[str, Any] = {}
        if what == "set":
            while len(self._values) >= _MOST_KEYS:  # of groups that were made long ago
                del self._values[next(iter(self._values))]
            self._values[key] = str(asked["value"])
        elif what == "add":
            self._values[key] = str(int(self._values.get(key, "0")) + int(asked["value"]))
            answer["value"] = int(self._values[key])
        else:
            answer["value"] = all(each in self._values for each in asked["keys"])
        self._answer(client, question, answer)
        self._answer_waiting()

    def forget(self, group: str) -> None:
        """Delete the keys of a group that is dissolved, and fail the questions that wait for one."""
        self._gone.append(group)
        for key in [key for key in self._values if key.startswith(f"{group}/")]:
            del self._values[key]
        gone = [each for each in self._waiting if each[2].startswith(f"{group}/")]
        self._waiting = [each for each in self._waiting if each not in gone]
        for client, question, _ in gone:
            self._answer(client, question, {"error": "the group is dissolved"})

    def drop_client(self, client: tuple[int, int]) -> None:
        """Drop the questions of a process that is gone."""
        self._waiting = [each for each in self._waiting if each[0] != client]

    def _answer_waiting(self) -> None:
        for each in list(self._waiting):
            client, question, key = each
            if key in self._values:
                self._waiting.remove(each)
                self._answer(client, question, {"value": self._values[key]})


_ROWS_AT_ONCE = 500
_STEPS_SENT_AGAIN = 200  # before the oldest checkpoint: others' rows may have arrived after it was made


@dataclass(eq=False)
class _Connection:
    """A process's connection to the rendezvous, with the position that it is to continue from.

    Attributes:
        channel: to it.
        session: names the process.
        heard: instant of its last message.
        past_step: of the checkpoint from which it resumes; 0: of none.
        tests_at: address at which the process answers others' tests.
        num_rows: sent to it; None: it does not watch.
    """

    channel: SignedChannel
    session: str
    heard: float
    past_step: int = 0
    tests_at: Any = None
    num_rows: int | None = None


class RunSession:
    """Connections and messages of a run's sites; its methods are called under one lock."""

    def __init__(
        self,
        name: str,
        num_sites: int,
        say: Callable[[str], None],
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        self.name, self.num_sites, self.own_name = name, num_sites, ""
        self.connections: dict[tuple[int, int], _Connection] = {}  # of a site's processes
        self._say_on = say
        self._facts: dict[int, Mapping[str, Any]] = {}  # settings of a site's training, by name
        self._facts_of_finished: Mapping[str, Any] = {}  # of a site that finished
        self._requested_since: dict[str, int] = {}  # first step of rows that a session is to send again
        self.queued_lines = defaultdict[str, list[str]](list)  # for a session, sent when it watches
        self.members = Membership(num_sites, secrets.token_hex(4), self._send_site, self._say, wait_seconds)
        self._store, self._rows = KeyValueStore(self._answer), RowLog()

    @property
    def is_over(self) -> bool:
        """True if its sites have finished it."""
        sites = self.members.sites.values()
        return self.members.has_finished_folder or (
            any(info.has_ended for info in sites)
            and not any(info.is_connected and not info.has_ended for info in sites)
        )

    def welcome(self, channel: SignedChannel, hello: Mapping[str, Any], now: float) -> tuple[int, int]:
        """Let a process in; returns its site and local rank.

        Raises:
            ValueError: refused; the text says why.
        """
        session, local_rank, site = str(hello["session"]), int(hello["local_rank"]), hello["site"]
        is_known = any(info.session == session for info in self.members.sites.values())
        goes_further = bool(hello.get("resumed") and differences(known_facts(hello), self._facts_of_finished))
        if self.is_over and not is_known and not goes_further:
            raise ValueError(self.members.refusal)
        hello = {**hello, "goes_further": goes_further}
        if local_rank == 0:
            site = self._arrived(site, session, hello, now)
            self._compare(int(site), session, hello)
        client = (int(site), local_rank)
        earlier = self.connections.pop(client, None)
        if earlier is not None:
            earlier.channel.close()
        past_step, tests_at = int(hello.get("past_step") or 0), hello.get("tests_at")
        self.connections[client] = _Connection(channel, session, now, past_step, tests_at)
        self._note_tests(client[0])
        self.own_name = str(hello.get("own_name", ""))
        about = {"name": self.members.name, "num_rows": self._rows.num_of[session]}
        channel.send(site=site, num_sites=self.num_sites, **about)
        return client

    def _note_tests(self, site: int) -> None:
        """Note where the processes of a site answer tests, once its first one is there."""
        if site in self.members.sites:
            there = {rank: each.tests_at for (of, rank), each in self.connections.items() if of == site}
            self.members.sites[site].processes |= there

    def finished(self, hello: Mapping[str, Any]) -> None:
        """A process that does not join reports that its folder holds the finished run."""
        site = hello.get("site")
        self.members.finished(visible(hello["where"], 100) if site is None else f"site {int(site)}")

    def facts(self, besides: int | None = None) -> Mapping[str, Any]:
        """Facts of a site that is connected, another than the one `besides`."""
        there = (site for site, local_rank in sorted(self.connections) if local_rank == 0 and site != besides)
        return next((self._facts[site] for site in there), {})

    def has_had(self, hello: Mapping[str, Any]) -> bool:
        """True if this process, or an earlier one of its site that finished, has been connected."""
        sites, site = self.members.sites.values(), hello["site"]
        return any(
            info.where == hello.get("where") or (info.has_ended and site in (None, info.site))
            for info in sites
        )

    def refuse_stray(self, name: str, hello: Mapping[str, Any]) -> None:
        """Refuse a process that joins this run with another file, and report it to the sites.

        Raises:
            ValueError: the files differ, it names no run of its own (NETGYM_RUN), and it has not been a member before.
        """
        here = min((site for site, local_rank in self.connections if local_rank == 0), default=None)
        if here is None or hello.get("was_here") or self.has_had(hello):
            return
        if str(hello.get("own_name", "")) != self.own_name:
            return
        mine, theirs = short_names(known_facts(hello)), short_names(self.facts())
        if not differences(mine, theirs):
            mine, theirs = {"run": name}, {"run": self.name}
        client = "a site" if hello["site"] is None else f"site {int(hello['site'])}"
        self._say(
            f"{client} was refused ({visible(hello.get('where', ''), 80)}): its {differences(mine, theirs, 'here')}"
        )
        differing = differences(mine, theirs, f"the run's (site {here})")
        raise ValueError(
            f"this site's {differing}: give both the same file, or this one NETGYM_RUN=... for a run of its own"
        )

    def _compare(self, site: int, session: str, hello: Mapping[str, Any]) -> None:
        """Report a site whose file has another length."""
        self._facts[site] = known_facts(hello)
        if differing := differences(self._facts[site], self.facts(besides=site)):
            line = f"site {site} has another file than the sites present: {differing}"
            self._say(line)
            self.queued_lines[session].append(line)

    def _arrived(self, site: Any, session: str, hello: Mapping[str, Any], now: float) -> int:
        """Register the first process of a site and return its number; connections of its earlier session are closed."""
        before = dict(self.members.sites)
        number = self.members.arrive(site, session, hello, now)
        if number in before and self.members.sites[number] is not before[number]:
            for client in [client for client in self.connections if client[0] == number and client[1]]:
                self.connections.pop(client).channel.close()
        return number

    def leave(self, client: tuple[int, int], channel: SignedChannel, now: float) -> None:
        """Drop a connection that has ended."""
        connection = self.connections.get(client)
        if connection is None or connection.channel is not channel:
            return
        del self.connections[client]
        if client[1] and client[0] in self.members.sites:
            self.members.sites[client[0]].processes.pop(client[1], None)
            self.members.hear(*client, False, now)
        self._store.drop_client(client)
        if client[1] == 0:
            self.members.depart(client[0], connection.session, now)

    def silent(self, now: float, seconds: float) -> list[SignedChannel]:
        """Connections of sites that have sent nothing for `seconds`."""
        found = []
        for (site, local_rank), connection in self.connections.items():
            if local_rank and site in self.members.sites and now > connection.heard + seconds:
                self.members.hear(site, local_rank, True, now)
        for site, info in self.members.sites.items():
            if info.is_connected and now > info.heard + seconds:
                found += [each.channel for client, each in self.connections.items() if client[0] == site]
                self._say(f"site {site} has been silent for {seconds:g} s: {info.where}")
        return found

    # --- messages of sites -------------------------------------------------------------------------------------

    def take(self, client: tuple[int, int], message: Mapping[str, Any], now: float) -> None:
        """Handle a message of a site."""
        what, (site, local_rank), members = message["say"], client, self.members
        connection = self.connections.get(client)
        if connection is None:  # of a process that another has replaced
            return
        connection.heard = now
        if local_rank == 0:
            members.sites[site].heard = now
        elif site in members.sites:  # else the first process has not reached a restarted rendezvous yet
            members.hear(site, local_rank, False, now)
        if what == "note":
            self._store.ask(client, int(message["id"]), message)
        elif what == "pulse":
            members.sites[site].pulse = dict(message["pulse"])
            self._answer(client, int(message["id"]), {"pulses": self.pulses(now)})
        elif what == "rows":
            self._rows.add(connection.session, int(message["first"]), list(message["rows"]))
            self._send_rows()
        elif what == "watch":
            connection.num_rows = 0
            self._request_rows_again()
            for line in self.queued_lines.pop(connection.session, []):
                self._send(client, {"push": "line", "line": line})
            self._send_rows()
        elif what == "clock":
            members.count_from(message.get("elapsed"), now)
            self._answer(client, int(message["id"]), {"elapsed": members.elapsed(now)})
        elif what in ("publish", "fetched"):
            getattr(members, what)(site, int(message["number"]), now)
        elif what == "tests_at":
            connection.tests_at = message["place"]
            self._note_tests(site)
        elif what == "tested":
            members.tested(site, local_rank, message, now)
        elif what == "done":
            members.done(site, now)
        elif what == "end":
            self._facts_of_finished = self._facts.get(site, {})
            members.sites[site].pulse = {**members.sites[site].pulse, **message["pulse"]}
            members.end(site, int(message["id"]), float(message["seconds"]), now)
        elif what == "trouble":
            self._say(f"site {site}: {visible(message['line'], 400)}")
        elif what in ("join", "confirm", "fetch"):
            getattr(members, what)(site, int(message["id"]), message, now)

    def status(self, now: float) -> dict[str, Any]:
        """Status of this run, for people."""
        steps = next((str(facts["max_steps"]) for facts in self._facts.values() if "max_steps" in facts), "")
        return {
            "run": self.name,
            "rounds": max(self.members.newest, 0),
            "num_sites": self.num_sites,
            "steps": int(steps) if steps.isdecimal() else None,
            "seconds": self.members.elapsed(now),
            "is_over": self.is_over,
            "sites": self.pulses(now),
            **self.members.rounds.status(now),
        }

    def pulses(self, now: float) -> dict[str, Any]:
        """Last reports of each site."""
        return {
            str(info.site): {
                **info.pulse,
                "where": info.where,
                "is_there": info.is_connected,
                "has_ended": info.has_ended,
                "silent": round(now - info.heard, 2),
            }
            for info in self.members.sites.values()
        }

    def _request_rows_again(self) -> None:
        """Ask sites resumed from checkpoints to send rows again that others may have lost with all processes."""
        there = {client: each for client, each in self._watching.items() if each.past_step}
        since = min((each.past_step for each in there.values()), default=0) - _STEPS_SENT_AGAIN
        for client, each in there.items():
            if len(there) > 1 and since < self._requested_since.get(each.session, math.inf):
                self._requested_since[each.session] = since
                self._send(client, {"push": "resend", "since": since})

    def _send_rows(self) -> None:
        for client, each in self._watching.items():
            while (start := each.num_rows or 0) < len(self._rows):
                rows = self._rows.rows(start, _ROWS_AT_ONCE)
                each.num_rows = start + len(rows)
                self._send(client, {"push": "rows", "rows": rows})

    @property
    def _watching(self) -> dict[tuple[int, int], _Connection]:
        """Connections of processes that receive all rows and lines."""
        return {client: each for client, each in self.connections.items() if each.num_rows is not None}

    # --- messages to sites -----------------------------------------------------------------------------------

    def announce(self, line: str) -> None:
        """Print a line at all sites."""
        for client in self._watching:
            self._send(client, {"push": "line", "line": line})

    def _say(self, line: str) -> None:
        self._say_on(line)
        self.announce(line)

    def _answer(self, client: tuple[int, int], question: int, answer: Mapping[str, Any]) -> None:
        self._send(client, {"id": question, **answer})

    def _send_site(self, site: int, message: Mapping[str, Any]) -> None:
        """Send to the first process of a site, and pushes to all of its processes."""
        for client in [client for client in self.connections if client[0] == site]:
            if client[1] == 0 or "push" in message:
                self._send(client, message)
        if message.get("push") == "dissolved":
            self._store.forget(str(message["group"]))

    def _send(self, client: tuple[int, int], message: Mapping[str, Any]) -> None:
        if client in self.connections:
            with contextlib.suppress(PeerError):
                self.connections[client].channel.send(**message)

    def close(self) -> None:
        """Close the connections of all processes, and the file of rows."""
        for connection in self.connections.values():
            connection.channel.close()
        self._rows.close()
