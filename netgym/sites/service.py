"""The rendezvous: a process that outlives the sites, holds no tensors and needs no torch; `netgym rendezvous`.

    RendezvousService(num_sites=4, address=('10.0.0.1', 29400), secret=secret).serve()

Sites connect to one port, with the run's secret, and keep the connection. Over it they send pulses and rows, ask for
the members of a round, and find each other's addresses for torch's process groups. A restarted rendezvous learns its
state from the sites.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import click

from exogym_core.meeting_place import SERVICE, allow_many_files, parse_address
from exogym_core.names import visible, visible_text
from netgym.command_options import takes
from netgym.sites.listener import SignedListener
from netgym.sites.membership import WAIT_SECONDS
from netgym.sites.session import RunSession, differences, known_facts
from netsim.cli.terminal import given
from netsim.errors import InputError
from netsim.files.signed import PeerError, shared_secret
from netsim.units import format_count, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from netsim.files.signed import SignedChannel, StrangerError

__all__ = ["RendezvousService", "rendezvous"]

_TICK_SECONDS = 0.05
_SECONDS_OF_STANDING_STILL = 1.0  # between ticks: this process was stopped, or its machine is crowded
_SECONDS_TO_READ = 2.0  # for a site whose connection is full; all others wait
_SECONDS_TO_HELLO = 10.0
_MOST_RUNS = 100  # kept


class RendezvousService:
    """A rendezvous that listens.

    Args:
        num_sites: sites of a run.
        address: to listen at; port 0 takes a free one.
        secret: known to the run's processes.
        silent_seconds: silence after which a site is lost.
        say: called with lines to print.
        wait_seconds: seconds that a run's begin waits for all sites, from the first arrival.

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
        self._runs: dict[str, RunSession] = {}
        self._read, self._stood_still = time.monotonic(), 0.0
        allow_many_files()
        try:
            self._listener = SignedListener(address, secret, SERVICE, self._listen, self._refuse)
        except OSError as error:
            raise InputError(
                f"rendezvous: cannot listen on {visible(address[0])}:{address[1]}: {error.strerror or error}; name an "
                "address of this machine and a port that is free"
            ) from None
        self.address: tuple[str, int] = self._listener.address

    def __enter__(self) -> Self:
        self._listener.start()
        threading.Thread(target=self._tick, name="rendezvous clock", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._listener.close()
        with self._lock:
            for run in self._runs.values():
                run.close()

    def status(self) -> list[dict[str, Any]]:
        """Status of each run: `run`, completed `rounds`, progress of `sites`, and waits."""
        with self._lock:
            now = self._now()
            return [run.status(now) for run in self._runs.values()]

    def serve(self) -> None:
        """Run until Ctrl-C or `close`."""
        with self:
            self._ended.wait()

    def _now(self) -> float:
        """Seconds of a clock that stops with this process, so that no deadline passes then; under the lock."""
        before, self._read = self._read, time.monotonic()
        if self._read > before + _SECONDS_OF_STANDING_STILL:
            self._stood_still += self._read - before
            for run in self._runs.values():
                run.members.stand_still(self._read - before)
        return self._read - self._stood_still

    def _refuse(self, error: StrangerError) -> None:
        self._say(f"refused a connection: {visible(error, 200)}")

    def _listen(self, channel: SignedChannel) -> None:
        run, client = None, None
        try:
            channel.give_up_sending_after(_SECONDS_TO_READ)
            hello = channel.receive(_SECONDS_TO_HELLO)
            if hello.get("status"):
                channel.send(runs=self.status())
                return
            with self._lock:
                if hello.get("finished"):
                    self._run_named(str(hello["run"]), None).finished(hello)
                    channel.send(heard=True)
                    return
                try:
                    run = self._run_named(str(hello["run"]), hello)
                    client = run.welcome(channel, hello, self._now())
                except ValueError as error:
                    channel.send(refused=str(error))
            while run is not None and client is not None:
                message = channel.receive()
                with self._lock:
                    run.take(client, message, self._now())
        except PeerError:
            pass
        except (KeyError, TypeError, ValueError, AttributeError) as error:  # malformed message
            self._say(f"a message was not understood ({type(error).__name__}: {visible(error, 200)})")
        finally:
            channel.close()
            with self._lock:
                if run is not None and client is not None:
                    run.leave(client, channel, self._now())

    def _run_named(self, name: str, hello: Mapping[str, Any] | None) -> RunSession:
        """The run of that name, a new one if there is none; `hello`: None of a process that does not join.

        Raises:
            ValueError: the process has the file of another run; the text names the differences.
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
        run = self._runs[name] = RunSession(name, self._num_sites, self._say, self._wait_seconds)
        for each in others:
            if hello is None or each.has_had(hello):  # it begins its next strategy
                continue
            differing = differences(known_facts(hello), each.facts())
            line = (
                f"a site has joined with another run ({visible(name, 60)}) than the sites present "
                f"({visible(each.name, 60)}), and waits for sites of its own; if it belongs to them, give it their file"
                + (f": {differing}" if differing else "")
            )
            self._say(line)
            each.announce(line)
            run.queued_lines[str(hello["session"])].append(line)
        return run

    def _tick(self) -> None:
        while not self._ended.wait(_TICK_SECONDS):
            silent: list[SignedChannel] = []
            with self._lock:
                now = self._now()
                for run in self._runs.values():
                    silent += run.silent(now, self._silent_seconds)
                    run.members.update(now)
            for channel in silent:
                channel.close()  # its own thread reports the loss


def _seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    try:
        return parse_seconds(value)
    except InputError as error:
        raise click.BadParameter(f"{value!r}: {error}", context, parameter) from None


@click.command()
@takes()
def rendezvous(
    sites: int = given(metavar="N", type=click.IntRange(1, 4096), required=True),
    listen: str = given(metavar="HOST:PORT", default="127.0.0.1:29400"),
    silent: float = given(metavar="SECONDS", type=click.FloatRange(1.0), default=10.0),
    wait: Any = given(metavar="TIME", callback=_seconds, default="10 min"),
    as_json: bool = given(),
) -> None:
    """Serve as the meeting point of sites that may fail, hang, join late and return.

    A site is a process, or a torchrun group, started with NETGYM_RENDEZVOUS=HOST:PORT and the same secret; see
    docs/several-machines.md. The rendezvous holds no model; a restarted one finds its sites again.

    Args:
        sites: Maximum number of sites of a run.
        listen: Address of this machine at which the rendezvous listens, reachable from all sites.
        silent: Silence after which a site counts as lost.
        wait: Time to wait for all sites (except those of join_at) at the start of a run, from the first arrival.
    """
    began = time.monotonic()

    def say(line: str) -> None:
        click.echo(f"{time.monotonic() - began:8.1f} s  {visible_text(line)}", err=as_json)

    service = RendezvousService(sites, parse_address(listen, "--listen"), shared_secret(), silent, say, wait)
    host, port = service.address
    is_any = host in ("0.0.0.0", "::")
    host = "ADDRESS" if is_any else host
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if is_any:
        say("it listens on all interfaces: ADDRESS is one of this machine's that the sites reach")
    say(f"listening for {format_count(sites, 'site')}; start each with NETGYM_RENDEZVOUS={shown}")
    try:
        service.serve()
    finally:
        if as_json:
            click.echo(json.dumps({"address": shown, "sites": sites, "runs": service.status()}))
