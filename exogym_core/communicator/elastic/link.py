"""One process's way to the rendezvous of its run: questions, signs of life, rows; and back to it when it was away."""

from __future__ import annotations

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
from typing import TYPE_CHECKING, Any

from exogym_core.meeting_place import SERVICE, allow_many_files
from exogym_core.names import visible
from netsim.files.errors import InputError, RankError
from netsim.files.signed import PeerError, StrangerError, connect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from netsim.files.signed import SignedChannel

__all__ = ["SiteLink"]

_SECONDS_BETWEEN_PULSES = 0.5
_SECONDS_BETWEEN_ROWS = 0.1
_SECONDS_BETWEEN_TRIES = 0.5
_SECONDS_TO_CONNECT = 5.0
_SECONDS_BETWEEN_WORDS = 30.0  # while nobody answers


class _Question:
    """A message that waits for its answer."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self.message = message
        self.answered = threading.Event()
        self.answer: Mapping[str, Any] = {}


class SiteLink:
    """A connection that is made again when it is lost; what was asked and not answered is asked again.

    Args:
        address: where the rendezvous listens.
        secret: known to the run's processes.
        site: this process's; None: the rendezvous says which.
        lane: its place among the processes of its site.
        run: which run this is, where one rendezvous sees several.
        own_name: what of `run` the user has said (NETGYM_RUN): other runs of that name are taken for mistakes.
        facts: what is trained, by name: tells people in what two runs differ.
        resumed: this process has a state to go on from, though all others may be through with the run.
        past_step: of the checkpoint from which it goes on.
        patience_seconds: how long the rendezvous may be away, or not be there yet.

    Attributes:
        on_push: called in the link's thread with what the rendezvous asks of this process,
        on_told: and with what it tells people.
        on_retell: called there with a step since which others want to be told rows again,
        place_in_code: tells where in its code this process is, for people.
        site, num_sites: as agreed.
        pulses: of all sites, as last heard: step, round, place, where, is_there, has_ended, silent.
        address: this machine's, on the network of the rendezvous.
        where: what people call this process.

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
        lane: int = 0,
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
        self.on_told: Callable[[str], None] = lambda line: None
        self.on_retell: Callable[[int], None] = lambda since: None
        self.place_in_code: Callable[[], str] = str
        self.site, self.lane, self.run, self.num_sites = site, lane, run, 0
        self._patience_seconds = patience_seconds
        self.session = secrets.token_hex(8)
        self.where = f"{socket.gethostname()}, process {os.getpid()}"
        self.pulses: Mapping[str, Mapping[str, Any]] = {}
        self._remembered: dict[str, Any] = {
            "own_name": own_name,
            "resumed": resumed,
            "past_step": past_step,
            "facts": dict(facts or {}),
        }  # what a rendezvous that has forgotten it must be told
        self._questions: dict[int, _Question] = {}
        self._num_questions = 0
        self._pulse: dict[str, Any] = {}
        self._delay = 0.0
        self._first: tuple[float, int] | None = None  # when this process's first step came, and which it was
        self._rows: list[str] = []  # this process's own
        self._num_rows_sent = self._num_rows_known = 0
        self._on_row: Callable[[int, Mapping[str, Any]], None] | None = None
        self._num_seen: Counter[str] = Counter()  # rows of each session
        self._lock, self._sending = threading.RLock(), threading.Lock()
        self._ended, self._is_up = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        self.address = self._life = ""
        self._channel = self._connected(time.monotonic() + patience_seconds)
        self._is_up.set()
        for body, name in ((self._listen, "rendezvous"), (self._keep_telling, "rendezvous pulse")):
            threading.Thread(target=body, name=name, daemon=True).start()

    # --- asking and telling ---------------------------------------------------------------------------------

    def ask(self, what: str, limit: float | None = None, **about: Any) -> Mapping[str, Any]:
        """A question, and its answer; while the rendezvous is away it waits for it.

        Raises:
            RankError: the rendezvous stays away.
            TimeoutError: no answer within `limit` seconds.
        """
        with self._lock:
            self._num_questions += 1
            number = self._num_questions
            question = _Question({"say": what, "id": number, **about})
            self._questions[number] = question
        self._send(question.message)
        try:
            # Woken now and then, so that Ctrl-C is heard everywhere.
            deadline = math.inf if limit is None else time.monotonic() + limit
            while not question.answered.wait(min(0.2, max(deadline - time.monotonic(), 0.0))):
                if self._failure is not None:
                    raise self._failure
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"{what}: no answer within {limit:g} s")
        finally:
            with self._lock:
                self._questions.pop(number, None)
        return question.answer

    def tell(self, what: str, **about: Any) -> None:
        """Something that has no answer; while the rendezvous is away it is lost, but for what is remembered."""
        self._send({"say": what, **about})

    def remember(self, **about: Any) -> None:
        """What a rendezvous that was started again is told first."""
        with self._lock:
            self._remembered |= about

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(PeerError):
            self._channel.send(**message)

    # --- rows and pulses ------------------------------------------------------------------------------------

    def mark(self, rank: int, row: Mapping[str, Any]) -> None:
        """Tell all who watch of a row of a rank of this site; returns at once."""
        with self._lock:
            text = {"rank": rank, "session": self.session, "number": len(self._rows), "row": row}
            self._rows.append(json.dumps(text))
            self._pulse |= {name: row[name] for name in ("step", "round", "loss") if name in row}
            if "step" in row and "loss" in row:
                begun, first = self._first = self._first or (time.monotonic(), row["step"])
                self._pulse |= {"first": first, "seconds": round(time.monotonic() - begun, 1)}

    @property
    def pulse(self) -> Mapping[str, Any]:
        """Step and round of the last row of this process."""
        with self._lock:
            return dict(self._pulse)

    def watch(self, on_row: Callable[[int, Mapping[str, Any]], None]) -> None:
        """Have `on_row(rank, row)` called, in the link's thread, for all rows of the run but this process's."""
        self._on_row = on_row
        self.tell("watch")

    def send_rows(self) -> None:
        """Send the rows that have not been sent."""
        with self._sending:  # two threads do this, and rows stay in order
            with self._lock:
                first, rows = self._num_rows_sent, self._rows[self._num_rows_sent :]
                self._num_rows_sent = len(self._rows)
            for start in range(0, len(rows), 500):
                self.tell("rows", first=first + start, rows=rows[start : start + 500])

    def _keep_telling(self) -> None:
        last = 0.0
        while not self._ended.wait(_SECONDS_BETWEEN_ROWS):
            if not self._is_up.is_set():
                continue
            self.send_rows()
            if time.monotonic() < last + _SECONDS_BETWEEN_PULSES:
                continue
            last = time.monotonic()
            if self.lane:
                self.tell("beat")
            else:
                with contextlib.suppress(TimeoutError, RankError, InputError):
                    about = {"delay": round(self._delay, 4), "place": self.place_in_code()}
                    pulse = {**self._pulse, **about}
                    answer = self.ask("pulse", 2.0, pulse=pulse)
                    self.pulses, self._delay = answer["pulses"], time.monotonic() - last

    # --- the connection -------------------------------------------------------------------------------------

    def _connected(self, until: float) -> SignedChannel:
        """A connection at which this process is known.

        Raises:
            InputError: refused.
            RankError: nobody is there until then.
        """
        where = f"rendezvous {visible(self._rendezvous[0])}:{self._rendezvous[1]}"
        next_word = -math.inf
        while True:
            try:
                channel, welcome = self._welcomed(where)
                break
            except StrangerError as error:
                raise InputError(visible(error, 300)) from None
            except PeerError as error:
                told = visible(error, 200)
                now = time.monotonic()
                if now >= until or self._ended.is_set():
                    raise RankError(
                        f"{told}: start it there with netgym rendezvous, and see that no firewall is between; or check "
                        "NETGYM_RENDEZVOUS (unset it for ranks on this machine)",
                        self.site or 0,
                    ) from None
                if now >= next_word:
                    next_word = now + _SECONDS_BETWEEN_WORDS
                    line = (
                        f"{told}; trying again for {until - now:.0f} s: start `netgym rendezvous ...` there, or check "
                        "NETGYM_RENDEZVOUS (unset it for ranks on this machine)"
                    )
                    print(line, file=sys.stderr, flush=True)
                self._ended.wait(_SECONDS_BETWEEN_TRIES)
        if "refused" in welcome:
            channel.close()
            raise InputError(f"{where}: {visible(welcome['refused'], 500)}")
        with contextlib.suppress(OSError):  # it may have ended already: then the earlier one counts
            self.address = channel.address
        self.site, self.num_sites = int(welcome["site"]), int(welcome["num_sites"])
        self._num_rows_known = int(welcome["num_rows"])
        earlier, self._life = self._life, str(welcome["name"])
        if earlier and earlier != self._life:
            self.on_push({"push": "new life", "name": self._life})
        self.remember(was_here=True)
        return channel

    def _welcomed(self, where: str) -> tuple[SignedChannel, Mapping[str, Any]]:
        """A connection, and what is said there to this process."""
        channel = connect(self._rendezvous, self._secret, SERVICE, where, _SECONDS_TO_CONNECT)
        with self._lock:
            hello = {
                "session": self.session,
                "site": self.site,
                "lane": self.lane,
                "run": self.run,
                "where": self.where,
            } | self._remembered
        try:
            channel.send(**hello)
            return channel, channel.receive(_SECONDS_TO_CONNECT)
        except PeerError:
            channel.close()
            raise

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
            for _, question in pending:
                self._send(question.message)
            if self._on_row is not None:
                self.tell("watch")

    def _take(self, message: Mapping[str, Any]) -> None:
        if "id" in message:
            with self._lock:
                question = self._questions.get(message["id"])
            if question is not None:
                question.answer = message
                question.answered.set()
        elif message["push"] == "rows":
            self._take_rows(message["rows"])
        elif message["push"] == "retell":
            self.on_retell(int(message["since"]))
        elif message["push"] == "told":
            self.on_told(str(message["line"]))
        else:
            self.on_push(message)

    def _take_rows(self, rows: list[str]) -> None:
        for text in rows:
            known = json.loads(text)
            if known["session"] == self.session or self._on_row is None:
                continue
            if known["number"] >= self._num_seen[known["session"]]:
                self._num_seen[known["session"]] = known["number"] + 1
                self._on_row(known["rank"], known["row"])

    def close(self) -> None:
        """Leave, without a word."""
        self._ended.set()
        self._channel.close()
