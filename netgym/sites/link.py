"""A process's connection to the rendezvous: questions, pulses, rows, torch's store; reconnects when lost."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.distributed import Store  # type: ignore[attr-defined]

from exogym_core.events import StepDone, from_record, to_record
from exogym_core.meeting_place import SERVICE, MeetingPlace, allow_many_files
from exogym_core.names import visible
from exogym_core.results.disk import RefusedError
from netsim.errors import InputError, RankError
from netsim.files.signed import PeerError, StrangerError, connect_peer, shared_secret

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Mapping

    from exogym_core.communicator.gloo.communicator import GlooCommunicator
    from exogym_core.events import SiteRow
    from netsim.files.signed import PeerAddress, SignedChannel

__all__ = ["LinkStore", "SiteLeader", "SiteLink", "report_finished"]

_SECONDS_BETWEEN_PULSES = 0.5
_SECONDS_BETWEEN_ROWS = 0.1
_SECONDS_BETWEEN_TRIES = 0.5
_SECONDS_TO_CONNECT = 5.0
_SECONDS_BETWEEN_LINES = 30.0  # while the rendezvous does not answer


def _whereabouts() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


@dataclass
class Identity:
    """Names of a process, by which the rendezvous knows it.

    Attributes:
        site, local_rank, run: as of `SiteLink`; the rendezvous may choose the site.
        remembered: facts that are sent again to a rendezvous that was restarted.
        session: of this process, unlike any other's.
        where: host and process, as text.
    """

    site: int | None
    local_rank: int
    run: str
    remembered: dict[str, Any]
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    where: str = field(default_factory=_whereabouts)

    def hello(self) -> dict[str, Any]:
        """The first message of a connection."""
        names = ("session", "site", "local_rank", "run", "where")
        return {name: getattr(self, name) for name in names} | dict(self.remembered)


class Questions:
    """Questions under way, by number; threads may share it.

    Attributes:
        failure: no answer will come, and why.
    """

    def __init__(self) -> None:
        self._pending: dict[int, tuple[Mapping[str, Any], Future[Mapping[str, Any]]]] = {}
        self._numbers = itertools.count(1)
        self.failure: Exception | None = None

    def ask(
        self, send: Callable[[Mapping[str, Any]], None], message: Mapping[str, Any], limit: float | None
    ) -> Mapping[str, Any]:
        """Send a question and wait for its answer; raises as `SiteLink.ask`."""
        number, answer = next(self._numbers), Future["Mapping[str, Any]"]()
        self._pending[number] = ({**message, "id": number}, answer)
        try:
            send(self._pending[number][0])
            # Short waits, so that Ctrl-C is handled on every platform.
            deadline = math.inf if limit is None else time.monotonic() + limit
            while wait([answer], min(0.2, max(deadline - time.monotonic(), 0.0))).not_done:
                if self.failure is not None:
                    raise self.failure
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{message['say']}: no answer within {limit:g} s")
        finally:
            self._pending.pop(number, None)
        return answer.result()

    def answered(self, message: Mapping[str, Any]) -> None:
        """Take in an answer, unless nobody waits for it any more."""
        _, answer = self._pending.pop(message["id"], (None, None))
        if answer is not None:
            answer.set_result(message)

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """Messages of the questions without an answer, in order."""
        return [message for _, (message, _) in sorted(self._pending.copy().items())]


class RunRows:
    """Rows of a run: this process's, as text in order, and others', each once; threads may share it.

    Args:
        session: of this process.

    Attributes:
        pulse: step, round and loss of this process's last row.
        on_row: called with rank and row of others' rows; None: they are dropped.
        num_sent: of this process's rows.
    """

    def __init__(self, session: str) -> None:
        self._session = session
        self._own: list[str] = []
        self.num_sent = 0
        self.pulse: Mapping[str, Any] = {}
        self._first: tuple[float, int] | None = None  # time and number of this process's first step
        self.on_row: Callable[[int, SiteRow], None] | None = None
        self._num_seen: Counter[str] = Counter()  # rows of each session
        self._lock = threading.Lock()

    def add(self, rank: int, row: SiteRow) -> None:
        """Queue a row of this process."""
        with self._lock:
            record, number = to_record(row), len(self._own)
            text = {"rank": rank, "session": self._session, "number": number, "row": record}
            self._own.append(json.dumps(text))
            if isinstance(row, StepDone):
                begun, first = self._first = self._first or (time.monotonic(), row.step)
                pulse = {**self.pulse, "step": row.step, "loss": row.loss}
                pulse |= {} if row.place is None else {"round": row.place.round}
                self.pulse = pulse | {"first": first, "seconds": round(time.monotonic() - begun, 1)}

    def unsent(self) -> tuple[int, list[str]]:
        """Rows of this process that have not been sent, from the number of the first."""
        with self._lock:
            first, self.num_sent = self.num_sent, len(self._own)
            return first, self._own[first:]

    def receive(self, rows: list[str]) -> None:
        """Pass on others' rows that have not come before."""
        for text in rows:
            known = json.loads(text)
            if known["session"] == self._session or self.on_row is None:
                continue
            if known["number"] >= self._num_seen[known["session"]]:
                self._num_seen[known["session"]] = known["number"] + 1
                self.on_row(known["rank"], from_record(known["row"]))


class SiteLink:
    """A connection to the rendezvous, made again when it is lost; unanswered questions are sent again.

    Args:
        address: of the rendezvous.
        secret: known to the run's processes.
        site: this process's; None: the rendezvous chooses it.
        local_rank: of this process in its site, as torchrun numbers them.
        run: name of the run, of several at one rendezvous.
        own_name: the user's part of `run` (NETGYM_RUN): another run of that name is refused.
        facts: settings of the training, by name: two runs are compared by them.
        resumed: this process resumes from a state, even where all others have finished the run.
        past_step: step of the checkpoint from which it resumes.
        patience_seconds: longest time without a rendezvous.

    Attributes:
        on_push: called in the link's thread with requests of the rendezvous.
        on_line: called there with lines to print.
        on_resend: called there with the first step whose rows others need again.
        place_in_code: returns the line that this process runs, as text.
        identity: names of this process; its site as agreed.
        rows: of the run.
        pulses: of all sites, as last received: step, round, place, where, is_there, has_ended, silent.
        address: this machine's, on the network of the rendezvous.

    Raises:
        InputError: the secrets differ, or the rendezvous has no room for this site.
        RankError: there is no rendezvous.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        site: int | None,
        *,
        local_rank: int = 0,
        run: str = "",
        own_name: str = "",
        facts: Mapping[str, str] | None = None,
        resumed: bool = False,
        past_step: int = 0,
        patience_seconds: float = 600.0,
    ) -> None:
        allow_many_files()
        self._door = address, secret
        self.on_push: Callable[[Mapping[str, Any]], None] = lambda message: None
        self.on_line: Callable[[str], None] = lambda line: None
        self.on_resend: Callable[[int], None] = lambda since: None
        self.place_in_code: Callable[[], str] = str
        own = {"own_name": own_name, "resumed": resumed, "past_step": past_step, "facts": dict(facts or {})}
        self.identity = Identity(site, local_rank, run, own)
        self.rows, self._questions = RunRows(self.identity.session), Questions()
        self.pulses: Mapping[str, Mapping[str, Any]] = {}
        self._sending = threading.Lock()
        self._ended, self._is_up = threading.Event(), threading.Event()
        self.address = ""
        self._welcome: Mapping[str, Any] = {}
        self._channel = self._connected(time.monotonic() + patience_seconds)
        self._is_up.set()
        listen = partial(self._listen, patience_seconds)
        for body, name in ((listen, "rendezvous"), (self._send_periodically, "rendezvous pulse")):
            threading.Thread(target=body, name=name, daemon=True).start()

    # --- questions and messages ---------------------------------------------------------------------------------

    def ask(self, what: str, limit: float | None = None, **about: Any) -> Mapping[str, Any]:
        """Send a question and wait for the answer, also while the rendezvous is away.

        Raises:
            RankError: the rendezvous stays away.
            TimeoutError: no answer within `limit` seconds.
        """
        return self._questions.ask(self._send, {"say": what, **about}, limit)

    def send(self, what: str, **about: Any) -> None:
        """Send a message without an answer; it is lost while the rendezvous is away, unless remembered."""
        self._send({"say": what, **about})

    def remember(self, **about: Any) -> None:
        """Keep facts that a restarted rendezvous needs first."""
        self.identity.remembered.update(about)

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(PeerError):
            self._channel.send(**message)

    # --- rows and pulses ------------------------------------------------------------------------------------

    def watch(self, on_row: Callable[[int, SiteRow], None]) -> None:
        """Call `on_row(rank, row)`, in the link's thread, for all rows of the run but this process's."""
        self.rows.on_row = on_row
        self.send("watch")

    def send_rows(self) -> None:
        """Send the rows that have not been sent."""
        with self._sending:  # two threads do this, and rows stay in order
            first, rows = self.rows.unsent()
            for start in range(0, len(rows), 500):
                self.send("rows", first=first + start, rows=rows[start : start + 500])

    def _send_periodically(self) -> None:
        last = delay = 0.0
        while not self._ended.wait(_SECONDS_BETWEEN_ROWS):
            if not self._is_up.is_set():
                continue
            self.send_rows()
            if time.monotonic() < last + _SECONDS_BETWEEN_PULSES:
                continue
            last = time.monotonic()
            if self.identity.local_rank:
                self.send("beat")
            else:
                with contextlib.suppress(TimeoutError, RankError, InputError):
                    about = {"delay": round(delay, 4), "place": self.place_in_code()}
                    answer = self.ask("pulse", 2.0, pulse={**self.rows.pulse, **about})
                    self.pulses, delay = answer["pulses"], time.monotonic() - last

    # --- the connection -------------------------------------------------------------------------------------

    def _connected(self, until: float) -> SignedChannel:
        """A connection that has welcomed this process.

        Raises:
            RefusedError: by the rendezvous.
            RankError: no rendezvous answered until then.
        """
        next_line = -math.inf
        while True:
            try:
                channel, welcome = _greeted(*self._door, self.identity.hello())
                break
            except StrangerError as error:
                raise InputError(visible(error, 300)) from None
            except PeerError as error:
                failure = visible(error, 200)
                now = time.monotonic()
                if now >= until or self._ended.is_set():
                    raise RankError(
                        f"{failure}: start it there with netgym rendezvous, and open its port in firewalls; or check "
                        "NETGYM_RENDEZVOUS (unset it for ranks on this machine)",
                        self.identity.site or 0,
                    ) from None
                if now >= next_line:
                    next_line = now + _SECONDS_BETWEEN_LINES
                    line = (
                        f"{failure}; retrying for {until - now:.0f} s: start `netgym rendezvous ...` there, or check "
                        "NETGYM_RENDEZVOUS (unset it for ranks on this machine)"
                    )
                    print(line, file=sys.stderr, flush=True)
                self._ended.wait(_SECONDS_BETWEEN_TRIES)
        if "refused" in welcome:
            channel.close()
            raise RefusedError(f"{_shown(self._door[0])}: {visible(welcome['refused'], 500)}")
        with contextlib.suppress(OSError):  # a connection that has ended keeps the earlier address
            self.address = channel.address
        self.identity.site = int(welcome["site"])
        earlier, self._welcome = self._welcome.get("name"), welcome
        if earlier not in (None, welcome["name"]):
            self.on_push({"push": "new life", "name": str(welcome["name"])})
        self.remember(was_here=True)
        return channel

    @property
    def num_sites(self) -> int:
        """Number of sites, as agreed."""
        return int(self._welcome["num_sites"])

    def _listen(self, patience_seconds: float) -> None:
        while True:
            try:
                while True:
                    self._take(self._channel.receive())
            except PeerError:
                pass
            self._channel.close()
            if self._ended.is_set():
                return
            self._is_up.clear()
            try:
                found = self._connected(time.monotonic() + patience_seconds)
                with self._sending:
                    self._channel, self.rows.num_sent = found, int(self._welcome["num_rows"])
            except Exception as error:
                self._questions.failure = error
                return
            self._is_up.set()
            for question in self._questions.messages:
                self._send(question)
            if self.rows.on_row is not None:
                self.send("watch")

    def _take(self, message: Mapping[str, Any]) -> None:
        if "id" in message:
            self._questions.answered(message)
        elif message["push"] == "rows":
            self.rows.receive(message["rows"])
        elif message["push"] == "resend":
            self.on_resend(int(message["since"]))
        elif message["push"] == "line":
            self.on_line(str(message["line"]))
        else:
            self.on_push(message)

    def close(self) -> None:
        """Leave without a message."""
        self._ended.set()
        self._channel.close()


def _shown(address: PeerAddress) -> str:
    return f"rendezvous {visible(address[0])}:{address[1]}"


def _greeted(
    address: PeerAddress, secret: bytes, hello: Mapping[str, Any]
) -> tuple[SignedChannel, Mapping[str, Any]]:
    """A connection to the rendezvous, and its answer to this process's hello."""
    channel = connect_peer(address, secret, SERVICE, _shown(address), _SECONDS_TO_CONNECT)
    try:
        channel.send(**hello)
        return channel, channel.receive(_SECONDS_TO_CONNECT)
    except BaseException:
        channel.close()
        raise


class LinkStore(Store):
    """torch's store with its values at the rendezvous, over the signed connection: what groups of gloo call of it.

    It must outlive process groups made with it: torch holds the C++ half alone.
    """

    def __init__(self, link: SiteLink, seconds: float) -> None:
        super().__init__()
        self._link, self._seconds = link, seconds

    def _note(self, what: str, key: str, **about: Any) -> Any:
        try:
            answer = self._link.ask("note", self._seconds, does=what, key=key, **about)
        except TimeoutError:
            raise RuntimeError(f"store: timed out waiting for {key}") from None
        if "error" in answer:
            raise RuntimeError(f"store: connection to a member was lost: {answer['error']}")
        return answer.get("value")

    def set(self, key: str, value: Any) -> None:
        """Write a value under `key`."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._note("set", key, value=base64.b64encode(content).decode())

    def get(self, key: str) -> bytes:
        """Wait for the value under `key`, and return it."""
        return base64.b64decode(self._note("get", key))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all `keys` are set."""
        for key in keys:
            self._note("get", key)

    def check(self, keys: list[str]) -> bool:
        """True if all `keys` are set."""
        return bool(self._note("check", "", keys=keys))

    def add(self, key: str, amount: int) -> int:
        """Add to the counter `key` and return its sum."""
        return int(self._note("add", key, value=amount))


# The first process may wait long for other sites; a process that ends is noticed at once.
_PATIENCE_SECONDS = 30 * 86400.0


class SiteLeader:
    """Questions of a site: its first process asks, and all of its processes get the answer.

    All processes of the site make the same calls in the same order.

    Args:
        link: this process's connection to the rendezvous.
        inside: connects the site's processes; None: the site is this process alone.
    """

    def __init__(self, link: SiteLink, inside: GlooCommunicator | None) -> None:
        self._link = link
        self._inside = None if inside is None else inside.patient(_PATIENCE_SECONDS)
        self._leads = inside is None or inside.rank == 0

    def ask(self, what: str, **about: Any) -> Mapping[str, Any]:
        """Ask for the site; every process gets the answer.

        Raises:
            RefusedError: refused, with the reason.
        """
        answer: Any = self._link.ask(what, **about) if self._leads else None
        if self._inside is not None:
            with self._inside.off_clock():
                answer = self._inside.broadcast_object(answer)
        if "refused" in answer:
            who = "" if self._inside is None or self._leads else f"rank {self._inside.rank} of this site: "
            raise RefusedError(f"{who}rendezvous: {visible(answer['refused'], 300)}")
        return answer  # type: ignore[no-any-return]

    def gather(self, mine: Any) -> list[Any]:
        """Values of all processes of the site, on each of them."""
        if self._inside is None:
            return [mine]
        with self._inside.off_clock():
            return self._inside.all_gather_object(mine)

    def send(self, what: str, **about: Any) -> None:
        """Send a message for the site, without an answer."""
        if self._leads:
            self._link.send(what, **about)


def report_finished(run: str) -> str:
    """Report to the rendezvous of NETGYM_RENDEZVOUS that this site's folder holds the finished `run`.

    Returns:
        The error that prevented it; "" on success.

    Raises:
        InputError: a variable is wrong, or there is no secret.
    """
    place = MeetingPlace.from_environment()
    name = " ".join(filter(None, [place.run, run]))
    hello = {"finished": True, "run": name, "site": place.site, "where": _whereabouts()}
    try:
        _greeted(place.address, shared_secret(), hello)[0].close()
    except PeerError as error:
        return visible(error, 200)
    return ""
