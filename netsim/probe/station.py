"""A host of a probe: it listens, authenticates the others, and measures what the leading host requests.

Times of torch's own gloo come from a program of `exogym_core` in a process of its own: netsim never imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from netsim.errors import InputError
from netsim.files.signed import PeerAddress, PeerError, SignedChannel, StrangerError, answer_peer
from netsim.probe.streams import SERVICE, Arrivals, drain, echo, goodput, ping, send

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["GlooTiming", "Station", "free_port"]

_PROGRAM = "exogym_core.communicator.gloo.pair"

_MOST_CONNECTIONS = 512
_MOST_MEASUREMENTS = 64  # whose arrivals are kept
_SILENT_SECONDS = 120.0


class Station:
    """Context manager of this host's listening socket and threads.

    Args:
        name: of this host.
        place: address and port to listen at.
        secret: shared by all hosts.

    Raises:
        InputError: it cannot listen there.
    """

    def __init__(self, name: str, place: PeerAddress, secret: bytes) -> None:
        self.name, self._place, self._secret = name, place, secret
        self._arrivals: dict[str, Arrivals] = {}
        self._controls: queue.Queue[tuple[SignedChannel, dict[str, Any]]] = queue.Queue()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_ending = False
        self.strangers: list[str] = []

    def __enter__(self) -> Self:
        host, port = self._place
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server(self._place, family=family, backlog=128)
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
            raise InputError(f"listen at {host}:{port}: {reason}") from None
        threading.Thread(target=self._accept, name="probe", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_ending = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for opened in self._open:
                with contextlib.suppress(OSError):
                    opened.shutdown(socket.SHUT_RDWR)

    # --- connections --------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._is_ending:
            try:
                opened, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ECONNABORTED, errno.EINTR):
                    time.sleep(0.05)
                    continue
                return
            with self._lock:
                if len(self._open) >= _MOST_CONNECTIONS or self._is_ending:
                    opened.close()
                    continue
                self._open.add(opened)
            threading.Thread(target=self._welcome, args=(opened,), name="probe", daemon=True).start()

    def _welcome(self, opened: socket.socket) -> None:
        is_kept = False
        try:
            channel = answer_peer(opened, self._secret, SERVICE)
            hello = channel.receive(10.0)
            if hello["role"] == "control":
                is_kept = True
                self._controls.put((channel, hello))
            elif hello["role"] == "data":
                drain(channel, self._arrivals_of(hello["id"]), hello["seconds"] + 10.0)
            else:
                echo(channel)
        except StrangerError as error:
            self.strangers = [*self.strangers[:99], str(error)]
        except PeerError:
            pass
        finally:
            with self._lock:
                self._open.discard(opened)
            if not is_kept:
                opened.close()

    def _arrivals_of(self, number: str) -> Arrivals:
        with self._lock:
            while len(self._arrivals) >= _MOST_MEASUREMENTS:
                self._arrivals.pop(next(iter(self._arrivals)))
            return self._arrivals.setdefault(number, Arrivals())

    # --- requests of the leading host ------------------------------------------------------------------------

    def follow(self, names: Sequence[str], wait_seconds: float, report: Callable[[str], None]) -> str:
        """Serve the leading host's requests until it is done; return the topology file.

        Args:
            names: of all hosts, as given to this one.
            wait_seconds: time for the leading host to connect.
            report: called with each line of progress.

        Raises:
            PeerError: the leading host does not connect, is lost, has another list of hosts, or reports a failure.
        """
        try:
            channel, hello = self._controls.get(timeout=wait_seconds)
        except queue.Empty:
            seen = (
                f"; connections refused: {len(self.strangers)}, the last: {self.strangers[-1]}"
                if self.strangers
                else ""
            )
            raise PeerError(
                f"{self.name}: {names[0]}, the leading host, did not connect within {wait_seconds:.0f} s{seen}"
            ) from None
        runs = dict[str, GlooTiming]()
        try:
            if hello["hosts"] != list(names):
                text = (
                    f"{self.name} was started with the hosts {', '.join(names)}, {hello['hosts'][0]} with"
                    f" {', '.join(hello['hosts'])}: give both the same list"
                )
                channel.send(error=text)
                raise PeerError(text)
            channel.send(clock=time.time(), steady=time.monotonic())
            while True:
                asked = channel.receive(_SILENT_SECONDS)
                match asked["do"]:
                    case "note":
                        report(asked["text"])
                        continue
                    case "done":
                        return str(asked["text"])
                    case "stop":
                        raise PeerError(asked["text"])
                try:
                    result = self._result(asked, runs)
                except PeerError as error:
                    result = {"error": f"from {self.name}: {error}"}
                channel.send(**result)
        finally:
            for run in runs.values():
                run.close()
            channel.close()

    def _result(self, asked: dict[str, Any], runs: dict[str, GlooTiming]) -> dict[str, Any]:
        match asked["do"]:
            case "clock":
                return {"clock": time.time(), "steady": time.monotonic()}
            case "ping":
                return {"rtt": ping((asked["place"][0], asked["place"][1]), self._secret, asked["to"])}
            case "send":
                targets = [
                    (name, (host, port), number, count)
                    for name, host, port, number, count in asked["targets"]
                ]
                return send(targets, self._secret, asked["seconds"], asked["bytes"])
            case "arrived":
                arrivals = self._arrivals_of(asked["id"])
                arrivals.wait(asked["streams"], 10.0)
                rate, spread = goodput(arrivals.streams, asked["seconds"], asked["warm"])
                return {"rate": rate, "spread": spread}
            case "port":
                return {"port": free_port(self._place[0])}
            case "gloo":
                runs[asked["id"]] = GlooTiming(
                    asked["rank"], asked["master"], asked["port"], self._place[0], self._secret
                )
                return {}
            case "gloo result":
                return runs.pop(asked["id"]).result(asked["seconds"])
        raise PeerError(f"asked for {asked['do']!r}, which it does not know")


_REASONS = {
    errno.EADDRINUSE: (
        "the port is taken: end what listens there, or give another (NAME=ADDRESS:PORT, the same on all hosts)"
    ),
    errno.EADDRNOTAVAIL: "this machine has no such address: say where to listen with --listen ADDRESS:PORT",
    errno.EACCES: "ports below 1024 are root's: choose one above",
}


class GlooTiming:
    """One of two gloo ranks, in a child process.

    Args:
        rank: 0 or 1.
        master: address at which rank 0 listens for the other.
        port: its port.
        address: of this host, for gloo's connections.
        secret: shared by both ranks; passed through a pipe.
    """

    def __init__(self, rank: int, master: str, port: int, address: str, secret: bytes) -> None:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": master,
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(secret.hex().encode() + b"\n")
            self._process.stdin.flush()

    def result(self, seconds: float) -> dict[str, Any]:
        """Wait for the rank's figures; raises PeerError if it fails, or takes longer than `seconds`."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            # Not by `communicate`, which would close its input: that ends it.
            self._process.wait(seconds)
            output, errors = self._process.stdout.read(1 << 16), self._process.stderr.read(1 << 16)
        except subprocess.TimeoutExpired:
            raise PeerError(
                f"gloo: no result within {seconds:.0f} s: are all ports open between the hosts?"
            ) from None
        finally:
            self.close()
        if self._process.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise PeerError(f"gloo: {last[:300] or f'ended with {self._process.returncode}'}")
        found = json.loads(output)
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        """End the process, and close its pipes."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def free_port(address: str) -> int:
    """Find a port of this host on which nothing listens now."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((address, 0), family=family) as listener:
        return int(listener.getsockname()[1])
