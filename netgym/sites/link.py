"""A process's connection to the rendezvous: questions, pulses, rows, torch's store; reconnects when lost."""

from __future__ import annotations

import base64
import contextlib
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
from typing import TYPE_CHECKING, Any

from torch.distributed import Store  # type: ignore[attr-defined]

from exogym_core.events import StepDone, from_record, to_record
from exogym_core.meeting_place import SERVICE, MeetingPlace, allow_many_files
from exogym_core.names import visible
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
        site, num_sites: as agreed.
        pulses: of all sites, as last received: step, round, place, where, is_there, has_ended, silent.
        address: this machine's, on the network of the rendezvous.
        where: host and process, as text.

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
        self._rendezvous, self._secret = address, secret
        self.on_push: Callable[[Mapping[str, Any]], None] = lambda message: None
        self.on_line: Callable[[str], None] = lambda line: None
        self.on_resend: Callable[[int], None] = lambda since: None
        self.place_in_code: Callable[[], str] = str
        self.site, self.local_rank, self.run, self.num_sites = site, local_rank, run, 0
        self._patience_seconds = patience_seconds
        self.session = secrets.token_hex(8)
        self.where = _whereabouts()
        self.pulses: Mapping[str, Mapping[str, Any]] = {}
        self._remembered: dict[str, Any] = {
            "own_name": own_name,
            "resumed": resumed,
            "past_step": past_step,
            "facts": dict(facts or {}),
        }  # sent again to a rendezvous that was restarted
        self._questions: dict[int, tuple[Mapping[str, Any], Future[Mapping[str, Any]]]] = {}
        self._num_questions = 0
        self._pulse: dict[str, Any] = {}
        self._delay = 0.0
        self._first: tuple[float, int] | None = None  # time and number of this process's first step
        self._rows: list[str] = []  # this process's own
        self._num_rows_sent = self._num_rows_known = 0
        self._on_row: Callable[[int, SiteRow], None] | None = None
        self._num_seen: Counter[str] = Counter()  # rows of each session
        self._lock, self._sending = threading.RLock(), threading.Lock()
        self._ended, self._is_up = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        self.address = self._life = ""
        self._channel = self._connected(time.monotonic() + patience_seconds)
        self._is_up.set()
        for body, name in ((self._listen, "rendezvous"), (self._send_periodically, "rendezvous pulse")):
            threading.Thread(target=body, name=name, daemon=True).start()

    # --- questions and messages ---------------------------------------------------------------------------------

    def ask(self, what: str, limit: float | None = None, **about: Any) -> Mapping[str, Any]:
        """Send a question and wait for the answer, also while the rendezvous is away.

        Raises:
            RankError: the rendezvous stays away.
            TimeoutError: no answer within `limit` seconds.
        """
        with self._lock:
            self._num_questions += 1
            number = self._num_questions
            message, answer = self._questions[number] = ({"say": what, "id": number, **about}, Future())
        self._send(message)
        try:
            # Short waits, so that Ctrl-C is handled on every platform.
            deadline = math.inf if limit is None else time.monotonic() + limit
            while wait([answer], min(0.2, max(deadline - time.monotonic(), 0.0))).not_done:
                if self._failure is not None:
                    raise self._failure
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{what}: no answer within {limit:g} s")
        finally:
            with self._lock:
                self._questions.pop(number, None)
        return answer.result()

    def send(self, what: str, **about: Any) -> None:
        """Send a message without an answer; it is lost while the rendezvous is away, unless remembered."""
        self._send({"say": what, **about})

    def remember(self, **about: Any) -> None:
        """Keep facts that a restarted rendezvous needs first."""
        with self._lock:
            self._remembered |= about

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(PeerError):
            self._channel.send(**message)

    # --- rows and pulses ------------------------------------------------------------------------------------

    def mark(self, rank: int, row: SiteRow) -> None:
        """Queue a row of a rank of this site for all that watch."""
        with self._lock:
            record, number = to_record(row), len(self._rows)
            text = {"rank": rank, "session": self.session, "number": number, "row": record}
            self._rows.append(json.dumps(text))
            if isinstance(row, StepDone):
                begun, first = self._first = self._first or (time.monotonic(), row.step)
                self._pulse |= {"step": row.step, "loss": row.loss}
                self._pulse |= {} if row.place is None else {"round": row.place.round}
                self._pulse |= {"first": first, "seconds": round(time.monotonic() - begun, 1)}

    @property
    def pulse(self) -> Mapping[str, Any]:
        """Step and round of the last row of this process."""
        with self._lock:
            return dict(self._pulse)

    def watch(self, on_row: Callable[[int, SiteRow], None]) -> None:
        """Call `on_row(rank, row)`, in the link's thread, for all rows of the run but this process's."""
        self._on_row = on_row
        self.send("watch")

    def send_rows(self) -> None:
        """Send the rows that have not been sent."""
        with self._sending:  # two threads do this, and rows stay in order
            with self._lock:
                first, rows = self._num_rows_sent, self._rows[self._num_rows_sent :]
                self._num_rows_sent = len(self._rows)
            for start in range(0, len(rows), 500):
                self.send("rows", first=first + start, rows=rows[start : start + 500])

    def _send_periodically(self) -> None:
        last = 0.0
        while not self._ended.wait(_SECONDS_BETWEEN_ROWS):
            if not self._is_up.is_set():
                continue
            self.send_rows()
            if time.monotonic() < last + _SECONDS_BETWEEN_PULSES:
                continue
            last = time.monotonic()
            if self.local_rank:
                self.send("beat")
            else:
                with contextlib.suppress(TimeoutError, RankError, InputError):
                    about = {"delay": round(self._delay, 4), "place": self.place_in_code()}
                    pulse = {**self._pulse, **about}
                    answer = self.ask("pulse", 2.0, pulse=pulse)
                    self.pulses, self._delay = answer["pulses"], time.monotonic() - last

    # --- the connection -------------------------------------------------------------------------------------

    def _connected(self, until: float) -> SignedChannel:
        """A connection that has welcomed this process.

        Raises:
            InputError: refused.
            RankError: no rendezvous answered until then.
        """
        next_line = -math.inf
        while True:
            try:
                channel, welcome = _greeted(self._rendezvous, self._secret, self._hello())
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
                        self.site or 0,
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
            raise InputError(f"{_shown(self._rendezvous)}: {visible(welcome['refused'], 500)}")
        with contextlib.suppress(OSError):  # a connection that has ended keeps the earlier address
            self.address = channel.address
        self.site, self.num_sites = int(welcome["site"]), int(welcome["num_sites"])
        self._num_rows_known = int(welcome["num_rows"])
        earlier, self._life = self._life, str(welcome["name"])
        if earlier and earlier != self._life:
            self.on_push({"push": "new life", "name": self._life})
        self.remember(was_here=True)
        return channel

    def _hello(self) -> dict[str, Any]:
        with self._lock:
            names = ("session", "site", "local_rank", "run", "where")
            return {name: getattr(self, name) for name in names} | self._remembered

    def _listen(self) -> None:
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
                found = self._connected(time.monotonic() + self._patience_seconds)
                with self._sending:
                    self._channel, self._num_rows_sent = found, self._num_rows_known
            except Exception as error:
                self._failure = error
                return
            self._is_up.set()
            with self._lock:
                pending = sorted(self._questions.items())
            for _, (question, _) in pending:
                self._send(question)
            if self._on_row is not None:
                self.send("watch")

    def _take(self, message: Mapping[str, Any]) -> None:
        if "id" in message:
            with self._lock:
                _, answer = self._questions.pop(message["id"], (None, None))
            if answer is not None:
                answer.set_result(message)
        elif message["push"] == "rows":
            self._take_rows(message["rows"])
        elif message["push"] == "resend":
            self.on_resend(int(message["since"]))
        elif message["push"] == "line":
            self.on_line(str(message["line"]))
        else:
            self.on_push(message)

    def _take_rows(self, rows: list[str]) -> None:
        for text in rows:
            known = json.loads(text)
            if known["session"] == self.session or self._on_row is None:
                continue
            if known["number"] >= self._num_seen[known["session"]]:
                self._num_seen[known["session"]] = known["number"] + 1
                self._on_row(known["rank"], from_record(known["row"]))

    def close(self) -> None:
        """Leave without a message."""
        self._ended.set()
        self._channel.close()


def _whereabouts() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


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
    """torch's store with its values at the rendezvous, over the signed connection.

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

    def delete_key(self, key: str) -> bool:
        """Delete `key`; True if it was set."""
        return bool(self._note("delete", key))

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Set the time-out of `get` and `wait`."""
        self._seconds = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        """False: torch then uses the methods here alone."""
        return False

    def clone(self) -> LinkStore:
        """This store, which threads may share."""
        return self


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
            InputError: refused, with the reason.
        """
        answer: Any = self._link.ask(what, **about) if self._leads else None
        if self._inside is not None:
            with self._inside.off_clock():
                answer = self._inside.broadcast_object(answer)
        if "refused" in answer:
            raise InputError(f"rendezvous: {visible(answer['refused'], 300)}")
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
