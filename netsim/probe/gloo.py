"""torch's own gloo between two hosts, timed by a program of `exogym_core`: netsim itself knows nothing of torch."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from typing import Any

from netsim.files.signed import PeerError

__all__ = ["GlooTiming", "free_port", "interface_of"]

_PROGRAM = "exogym_core.ranks.gloo.pair"
_SIOCGIFADDR = 0x8915


class GlooTiming:
    """One rank of two, in a process of its own that ends with this object.

    Args:
        rank: 0 or 1.
        master: address at which rank 0 lets the other meet it.
        port: there.
        address: of this host, for gloo's own connections.
        secret: that both ranks share; it goes through a pipe.
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
        name = interface_of(address)
        if name:
            environment["GLOO_SOCKET_IFNAME"] = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM],
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
        """What the rank measured. Raises PeerError: it failed, or took longer than that."""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        try:
            # Not by `communicate`, which would close its input: that ends it.
            self._process.wait(seconds)
            said, complaint = self._process.stdout.read(1 << 16), self._process.stderr.read(1 << 16)
        except subprocess.TimeoutExpired:
            raise PeerError(
                f"gloo: no result within {seconds:.0f} s: are all ports open between the hosts?"
            ) from None
        finally:
            self.close()
        if self._process.returncode:
            last = complaint.decode(errors="replace").strip().rpartition("\n")[2]
            raise PeerError(f"gloo: {last[:300] or f'ended with {self._process.returncode}'}")
        found = json.loads(said)
        assert isinstance(found, dict)
        return found

    def close(self) -> None:
        """End the process, and let go of its pipes."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def free_port(address: str) -> int:
    """A port of this host on which nothing listens now."""
    family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
    with socket.create_server((address, 0), family=family) as listener:
        return int(listener.getsockname()[1])


def interface_of(address: str) -> str:
    """The name of the interface that has an IPv4 address; empty where that cannot be told.

    >>> interface_of("127.0.0.1") in ("lo", "lo0", "")
    True
    """
    try:
        import fcntl

        wanted = socket.inet_aton(socket.gethostbyname(address))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
            for _, name in socket.if_nameindex():
                asked = array.array("B", struct.pack("256s", name.encode()[:15]))
                with contextlib.suppress(OSError):
                    fcntl.ioctl(opened, _SIOCGIFADDR, asked)
                    if asked.tobytes()[20:24] == wanted:
                        return name
    except (ImportError, OSError):
        pass
    return ""
