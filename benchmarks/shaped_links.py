"""A topology made real on one Linux machine: network namespaces joined by shaped links.

    sudo python benchmarks/shaped_links.py TOPOLOGY        up until Ctrl-C; prints the namespace of each host
    sudo python benchmarks/shaped_links.py clean           removes what a killed program left

Every host and router is a namespace. Each direction of a link is a veth pair with a tbf queue (tc) at its sending end;
where it has latency, the frames pass a namespace in which `delayline.c` (compiled at the start) holds each back and
drops the link's `loss`, since netem is not in every kernel. Rates count Ethernet bytes, so of 100 Mbit/s 95.6 are
payload. Rates of 10 Gbit/s and more are not shaped, latencies below 0.2 ms, with their losses, are left out: crossing a
namespace takes about that. Queues are drop-tail, of 100 ms of the rate and at least 64 kB, or a link's `queue` of
packets. A link's `mtu` is that of its interfaces.

Needs root, iproute2, gcc, and the kernel's veth and tbf. Addresses exist inside the namespaces alone, and all are
removed at the end. On machines of your own leave this out: `netsim export --format tc` writes a script for each.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from harness import REALTIME

from netsim import Topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

NAMESPACES = Path("/var/run/netns")
CLONE_NEWNET = 0x40000000
UNSHAPED_BITS_PER_SECOND = 10e9
ETHERNET_MTU_BYTES = 1500
LEAST_LATENCY_SECONDS = 0.2e-3
CROSSING_SECONDS = 0.03e-3  # that a frame takes through the delay line besides, and is held back less for
SETTINGS = {  # Linux's defaults, spelt out because the machine's own may differ
    "net.ipv4.tcp_congestion_control": "cubic",
    "net.ipv4.tcp_slow_start_after_idle": "1",
    "net.ipv4.tcp_rmem": "4096 131072 6291456",
    "net.ipv4.tcp_wmem": "4096 16384 4194304",
    "net.ipv4.tcp_no_metrics_save": "1",
    "net.ipv6.conf.all.disable_ipv6": "1",
    "net.ipv6.conf.default.disable_ipv6": "1",
    "net.ipv4.conf.all.rp_filter": "0",
    "net.ipv4.conf.default.rp_filter": "0",
    "net.ipv4.conf.all.send_redirects": "0",
    "net.ipv4.conf.default.send_redirects": "0",
}


def why_not() -> str:
    """Why links cannot be shaped here; empty where they can."""
    missing = [program for program in ("ip", "tc", "gcc") if shutil.which(program) is None]
    if os.name != "posix" or not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing:
        return f"{', '.join(missing)} not found"
    name = f"shaped{os.getpid()}-try"
    try:
        sh(f"ip netns add {name}")
        try:
            sh(f"ip -n {name} link add one type veth peer name other")
            sh(f"tc -n {name} qdisc add dev one root {_shaper(1e6, None)}")
        finally:
            sh(f"ip netns del {name}")
    except (RuntimeError, OSError) as error:
        return f"this machine allows no shaped namespaces: {error}"
    return ""


def sh(line: str, *words: str, text: str | None = None) -> str:
    """Output of the command of a line, and of further words that may have spaces."""
    done = subprocess.run([*line.split(), *words], capture_output=True, text=True, input=text)
    if done.returncode:
        raise RuntimeError(f"{' '.join([line, *words])}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class ShapedLinks:
    """Context manager: the namespaces of a topology; at the end they are gone.

    >>> with ShapedLinks(Topology.load("two-sites.yaml")) as net:      # doctest: +SKIP
    ...     subprocess.run([*net.inside("us.0"), "ping", "-c1", net.address("eu.0")])
    """

    def __init__(
        self, topology: Topology, settings: dict[str, str] | None = None, shaper: str | None = None
    ) -> None:
        """With `shaper`, words for tc in place of this module's tbf, interfaces keep their offloads."""
        self.topology = topology
        self._shaper = shaper
        self._settings = {**SETTINGS, **(settings or {})}
        self._prefix = f"shaped{os.getpid()}x{id(self) % 0x10000:x}"
        self._made: list[str] = []
        self._delayline: subprocess.Popen[str] | None = None
        self.late = ""  # what the delay line says of itself at the end
        ends = [(link.source, link.target) for link in topology.links]
        self._nodes = [*(host.name for host in topology.hosts), *topology.routers]
        pairs = list(dict.fromkeys(tuple(sorted(pair)) for pair in ends))
        self._pair = {pair: number for number, pair in enumerate(pairs)}
        self._short = {name: f"n{number}" for number, name in enumerate(self._nodes)}

    def namespace(self, node: str) -> str:
        """Network namespace of a host or router."""
        return f"{self._prefix}-{self._short[node]}"

    def inside(self, node: str) -> list[str]:
        """Words before a command that run it on a host."""
        return ["ip", "netns", "exec", self.namespace(node)]

    def address(self, host: str, neighbour: str | None = None) -> str:
        """The host's address on its link to a neighbour, or on its first link, `interface(host)`."""
        links = (link for link in self.topology.links if link.source == host)
        link = next(link for link in links if neighbour in (None, link.target))
        return self._address(link.source, link.target)

    def interface(self, host: str) -> str:
        """The interface of the host's first link."""
        return self.out(
            *next((each.source, each.target) for each in self.topology.links if each.source == host)
        )

    def run(self, commands: Mapping[str, Sequence[str]], seconds: float, **environment: str) -> list[str]:
        """Run commands at once, each in its host's namespace; returns what they print.

        Raises:
            RuntimeError: one fails.
            TimeoutExpired: one has not ended after so many `seconds`.
        """
        started: list[subprocess.Popen[str]] = []
        deadline = time.monotonic() + seconds
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        try:
            for host, command in commands.items():
                own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.interface(host), **environment}
                words = [*self.inside(host), *REALTIME, *command]
                started.append(subprocess.Popen(words, env={**os.environ, **own}, **pipes))
            printed = [
                process.communicate(timeout=max(deadline - time.monotonic(), 1.0)) for process in started
            ]
        finally:
            for process in started:
                process.kill()
                process.wait()
        for process, (_, errors) in zip(started, printed, strict=True):
            if process.returncode:
                raise RuntimeError(errors)
        return [text for text, _ in printed]

    def __enter__(self) -> Self:
        try:
            with allow_congestion_control(self._settings["net.ipv4.tcp_congestion_control"]):
                self._make_namespaces()
            self._make_links()
            self._make_routes()
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove all that was made."""
        atexit.unregister(self.close)
        if self._delayline is not None:
            self._delayline.terminate()
            self.late = self._delayline.communicate(timeout=10)[1]
            self._delayline = None
        made, self._made = self._made, []
        for namespace in made:
            with contextlib.suppress(RuntimeError):
                sh(f"ip netns del {namespace}")

    def drops(self) -> dict[str, int]:
        """Frames that queues have dropped so far, by direction."""
        found = {}
        for link in self.topology.links:
            out = self.out(link.source, link.target)
            text = sh(f"tc -s -n {self.namespace(link.source)} qdisc show dev {out}")
            dropped = re.search(r"dropped (\d+)", text)
            if dropped and int(dropped[1]):
                found[f"{link.source}->{link.target}"] = int(dropped[1])
        return found

    # --- how it is made ------------------------------------------------------------------------------------

    def _number(self, source: str, target: str) -> tuple[int, int]:
        """Number of the connection, and which of its two ends `source` is."""
        pair = (source, target) if (source, target) in self._pair else (target, source)
        return self._pair[pair], pair.index(source)

    def _address(self, source: str, target: str) -> str:
        number, side = self._number(source, target)
        return f"10.{77 + number // 16384}.{number * 4 // 256 % 256}.{number * 4 % 256 + 1 + side}"

    def _mac(self, source: str, target: str) -> str:
        number, side = self._number(source, target)
        return f"02:00:00:{number // 256:02x}:{number % 256:02x}:{side + 1:02x}"

    def out(self, source: str, target: str) -> str:
        """The interface at which a direction of a link begins."""
        return f"e{self._number(source, target)[0]}"

    def _make_namespaces(self) -> None:
        settings = [f"{key}={value}" for key, value in self._settings.items()]
        wired = any(link.latency_seconds >= LEAST_LATENCY_SECONDS for link in self.topology.links)
        self._wire = f"{self._prefix}-wire"
        for name in [*map(self.namespace, self._nodes), *([self._wire] if wired else [])]:
            sh(f"ip netns add {name}")
            self._made.append(name)
            sh(f"ip netns exec {name} sysctl -q net.ipv4.ip_forward=1", *settings)
            sh(f"ip -n {name} link set lo up")

    def _make_links(self) -> None:
        spans = [span for link in self.topology.links for span in self._make_direction(link)]
        for link in self.topology.links:
            here, out = self.namespace(link.source), self.out(link.source, link.target)
            near, far = (link.source, link.target), (link.target, link.source)
            batch = f"addr add {self._address(*near)}/30 dev {out}\n"
            batch += f"neigh replace {self._address(*far)} lladdr {self._mac(*far)} dev {out} nud permanent\n"
            sh(f"ip -n {here} -batch -", text=batch)
        if spans:
            self._start_delayline(spans)

    def _make_direction(self, link: Any) -> list[str]:
        """Make eN at the sender and rN at the receiver, through the wire's namespace where there is latency."""
        here, there = self.namespace(link.source), self.namespace(link.target)
        mtu = link.mtu_bytes or ETHERNET_MTU_BYTES
        number, side = self._number(link.source, link.target)
        out, into, spans = f"e{number}", f"r{number}", []
        if link.latency_seconds >= LEAST_LATENCY_SECONDS:
            enter, leave = f"i{number}{'ab'[side]}", f"o{number}{'ab'[side]}"
            sh(f"ip -n {here} link add {out} type veth peer name {enter} netns {self._wire}")
            sh(f"ip -n {self._wire} link add {leave} type veth peer name {into} netns {there}")
            for end in (enter, leave):
                sh(f"ip -n {self._wire} link set {end} mtu {mtu} arp off promisc on up")
            _offloads_off(self._wire, [enter, leave])
            spans = [f"{enter}:{leave}:{(link.latency_seconds - CROSSING_SECONDS) * 1e6:g}:{link.loss}"]
        else:
            sh(f"ip -n {here} link add {out} type veth peer name {into} netns {there}")
        sh(f"ip -n {there} link set {into} address {self._mac(link.target, link.source)}")
        if self._shaper is None:
            _offloads_off(here, [out])
            _offloads_off(there, [into])
        sh(f"ip -n {here} link set {out} mtu {mtu} up")
        sh(f"ip -n {there} link set {into} mtu {mtu} up")
        if link.bits_per_second < UNSHAPED_BITS_PER_SECOND:
            shaper = self._shaper or _shaper(link.bits_per_second, link.queue_packets, mtu)
            sh(f"tc -n {here} qdisc add dev {out} root {shaper}")
        return spans

    def _make_routes(self) -> None:
        hosts = self.topology.hosts
        batches: dict[str, dict[str, str]] = {name: {} for name in self._nodes}
        for src in hosts:
            for dst in hosts:
                if src.index == dst.index:
                    continue
                for link in map(self.topology.links.__getitem__, self.topology.route(src.index, dst.index)):
                    hop = self._address(link.target, link.source)
                    line = f"via {hop} dev {self.out(link.source, link.target)}"
                    if batches[link.source].setdefault(self.address(dst.name), line) != line:
                        raise RuntimeError(
                            f"{link.source}: two routes to {dst.name}, by where one comes from"
                        )
        for node, lines in batches.items():
            text = "".join(f"route replace {address}/32 {line}\n" for address, line in lines.items())
            sh(f"ip -n {self.namespace(node)} -batch -", text=text)

    def _start_delayline(self, spans: Sequence[str]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            binary = Path(folder) / "delayline"
            longest = max([link.mtu_bytes or ETHERNET_MTU_BYTES for link in self.topology.links]) + 100
            sh(f"gcc -O2 -DFRAME={longest} -o", str(binary), str(Path(__file__).with_name("delayline.c")))
            command = ["ip", "netns", "exec", self._wire, str(binary), *spans]
            self._delayline = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            assert self._delayline.stdout is not None
            if self._delayline.stdout.readline().strip() != "ready":
                raise RuntimeError(f"delayline: {self._delayline.communicate()[1]}")


@contextlib.contextmanager
def allow_congestion_control(congestion_control: str) -> Iterator[None]:
    """A namespace may choose from the machine's allowed algorithms only: let this one be among them meanwhile."""
    path = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
    with path.open() as lock:
        # Another program's end would restore the file before this one has chosen.
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = path.read_text().split()
        if congestion_control not in before:
            path.write_text(" ".join([*before, congestion_control]))
        try:
            yield
        finally:
            if congestion_control not in before:
                path.write_text(" ".join(before))


def _shaper(bits_per_second: float, queue_packets: int | None, mtu: int = ETHERNET_MTU_BYTES) -> str:
    rate = bits_per_second / 8
    burst = max(2 * (mtu + 40), rate * 0.0005)
    queue = queue_packets * (mtu + 14) if queue_packets is not None else max(64_000, rate * 0.1)
    return f"tbf rate {int(rate * 8)}bit burst {int(burst)} limit {int(queue)}"


def enter_namespace(path: Path) -> None:
    """Let sockets that this thread, and threads that it starts, open from now on belong to a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    there = os.open(path, os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {path}")
    finally:
        os.close(there)


@contextlib.contextmanager
def _in_namespace(namespace: str) -> Iterator[None]:
    """Sockets that this thread opens in the block belong to the namespace."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        enter_namespace(NAMESPACES / namespace)
        yield
    finally:
        enter_namespace(Path(f"/proc/thread-self/fd/{home}"))
        os.close(home)


def _offloads_off(namespace: str, interfaces: Sequence[str]) -> None:
    """As `ethtool -K IF tx off sg off tso off gso off gro off`: shapers and delay line must see frames as on a wire."""
    request = 0x8946  # SIOCETHTOOL
    with _in_namespace(namespace), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        for interface in interfaces:
            for command in (0x17, 0x19, 0x1F, 0x24, 0x2C):
                value = ctypes.create_string_buffer(struct.pack("II", command, 0), 8)
                asked = struct.pack("16sP", interface.encode(), ctypes.addressof(value)).ljust(40, b"\0")
                with contextlib.suppress(OSError):  # refused when already off
                    fcntl.ioctl(opened, request, asked)


def clean() -> list[str]:
    """Remove namespaces whose maker is gone; returns their names."""
    gone = []
    for path in NAMESPACES.glob("shaped*-*"):
        maker = re.match(r"shaped(\d+)", path.name)
        if maker and not Path(f"/proc/{maker[1]}").exists():
            sh(f"ip netns del {path.name}")
            gone.append(path.name)
    return gone


def main(args: Sequence[str]) -> None:
    if len(args) != 1:
        print(__doc__)
    elif args[0] == "clean":
        print("\n".join(clean()))
    else:
        with ShapedLinks(Topology.load(args[0])) as net:
            for host in net.topology.hosts:
                print(f"{host.name}: {net.address(host.name)} in {net.namespace(host.name)}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(3600)


if __name__ == "__main__":
    main(sys.argv[1:])
