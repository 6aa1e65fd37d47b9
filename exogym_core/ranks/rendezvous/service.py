"""The process at which sites meet: it outlives any of them, holds no tensors and needs no torch.

    Meeting(num_sites=4, address=("10.0.0.1", 29400), secret=secret).serve()

Sites connect to one port, with the run's secret, and keep the connection. Over it they say that they are alive, ask
who takes part in a round, find each other's addresses for torch's process groups, and tell each other rows. If it is
ended and started again, sites come back to it and tell it what it must know.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from exogym_core.meeting_place import SERVICE, allow_many_files
from exogym_core.names import visible
from exogym_core.ranks.rendezvous.facts import differences, known_facts
from exogym_core.ranks.rendezvous.roster import WAIT_SECONDS
from exogym_core.ranks.rendezvous.sites_of_run import SitesOfRun
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
_MOST_RUNS = 100  # that are remembered


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
        self._runs: dict[str, SitesOfRun] = {}
        self._greeted: list[socket.socket] = []  # the oldest first
        allow_many_files()
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
        """Each run that there was: `run`, `rounds` that were done, `sites` with how far they got, and who waits."""
        with self._lock:
            return [run.told(time.monotonic()) for run in self._runs.values()]

    def serve(self) -> None:
        """Until Ctrl-C, or somebody ends it."""
        with self:
            self._ended.wait()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:  # also where there are too many files
                self._ended.wait(_SECONDS_BETWEEN_LOOKS)
                continue
            with self._lock:
                self._greeted.append(connection)
                if (
                    len(self._greeted) > _MOST_GREETED
                ):  # who knows the secret shows it sooner than strangers leave
                    with contextlib.suppress(OSError):
                        self._greeted.pop(0).shutdown(socket.SHUT_RDWR)
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
                if connection in self._greeted:
                    self._greeted.remove(connection)
        if channel is not None:
            self._listen(channel)

    def _listen(self, channel: SignedChannel) -> None:
        run, who = None, None
        try:
            hello = channel.receive(_SECONDS_TO_HELLO)
            if hello.get("status"):
                channel.send(runs=self.told())
                return
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

    def _run_named(self, name: str, hello: Mapping[str, Any] | None) -> SitesOfRun:
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
        run = self._runs[name] = SitesOfRun(name, self._num_sites, self._say, self._wait_seconds)
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
