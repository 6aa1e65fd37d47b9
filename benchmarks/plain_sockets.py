"""A ring all-reduce over plain TCP sockets between namespaces of unequal latencies, alongside the model.

    sudo python benchmarks/plain_sockets.py

Four hosts in a ring of shaped links (see shaped_links.py). A rank sends a chunk by `sendall`, receives one, and goes on
when both calls have returned, in the six steps of a ring all-reduce, once or ten times in a row, on new connections;
nothing is added up. All ranks start at one instant, and the last one's end counts. Printed are the median of three
measurements, `linux-tcp`, and `linux-tcp` as if a send ended with its delivery.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import harness
from shaped_links import ShapedLinks, why_not

import netsim
from netsim import Protocol, Topology

RANKS, PORT, REPEATS = 4, 29_400, 3
SHAPES = {
    "100 Mbit/s; 10, 20, 40 and 15 ms": ("100 Mbit/s", (10, 20, 40, 15)),
    "50 Mbit/s; 2, 60, 5 and 30 ms": ("50 Mbit/s", (2, 60, 5, 30)),
}
SIZES, CALLS = (4_000, 400_000, 4_000_000), (1, 10)


def shaped(rate: str, latencies: tuple[int, ...]) -> Topology:
    """A ring of hosts, each joined to the next one."""
    links = [
        {"between": [f"h{i}", f"h{(i + 1) % RANKS}"], "bandwidth": rate, "latency": f"{latency} ms"}
        for i, latency in enumerate(latencies)
    ]
    return Topology.from_mapping({"hosts": [f"h{i}" for i in range(RANKS)], "links": links})


def rank_program(rank: int, following: str, num_bytes: int, calls: int) -> None:
    """Connect to the next rank, start when rank 0 says, and print the seconds until the end."""
    chunk = bytes(num_bytes // RANKS)
    with socket.create_server(("", PORT)) as server:
        out = connected(following)
        into = server.accept()[0]
    for each in (out, into):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    in_a_second = int(time.monotonic_ns() + 1e9)  # the namespaces have one clock
    start = received(into, 8) if rank else in_a_second.to_bytes(8)
    out.sendall(start)
    if not rank:
        received(into, 8)
    begin = int.from_bytes(start) / 1e9
    with ThreadPoolExecutor(1) as sender:
        sender.submit(time.sleep, 0).result()  # its thread exists
        time.sleep(begin - time.monotonic())
        for _ in range(2 * (RANKS - 1) * calls):
            sent = sender.submit(out.sendall, chunk)
            received(into, len(chunk))
            sent.result()
    print(time.monotonic() - begin)


def connected(host: str) -> socket.socket:
    """A connection to a rank that may not listen yet."""
    while True:
        try:
            return socket.create_connection((host, PORT))
        except ConnectionRefusedError:
            time.sleep(0.05)


def received(connection: socket.socket, num_bytes: int) -> bytes:
    """So many bytes."""
    got = bytearray(num_bytes)
    view = memoryview(got)
    while view:
        view = view[connection.recv_into(view) :]
    return bytes(got)


def measured(topology: Topology, num_bytes: int, calls: int) -> float:
    """Seconds until the last rank's end."""
    with ShapedLinks(topology) as net:
        commands = {}
        for rank in range(RANKS):
            address = net.address(f"h{(rank + 1) % RANKS}", f"h{rank}")
            words = [sys.executable, __file__, rank, address, num_bytes, calls]
            commands[f"h{rank}"] = list(map(str, words))
        return max(map(float, net.run(commands, 120.0)))


def main() -> None:
    if len(sys.argv) > 1:
        rank_program(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
        return
    if reason := why_not():
        sys.exit(f"plain_sockets: {reason}")
    buffered = Protocol.parse("linux-tcp")
    protocols = buffered, replace(buffered, buffers_sends=False)
    harness.heading("links", "bytes", "calls", "measured", "linux-tcp", "error", "at delivery", "error")
    for name, shape in SHAPES.items():
        topology = shaped(*shape)
        for num_bytes in SIZES:
            for calls in CALLS:
                real = statistics.median(measured(topology, num_bytes, calls) for _ in range(REPEATS))
                cells = []
                for protocol in protocols:
                    took = netsim.collective(
                        topology,
                        "all_reduce",
                        num_bytes=num_bytes,
                        algorithm="ring",
                        protocol=protocol,
                        calls=calls,
                    ).seconds
                    cells += [f"{took:.3f} s", f"{took / real - 1:+.1%}"]
                harness.row(name, f"{num_bytes:,}", calls, f"{real:.3f} s", *cells)


if __name__ == "__main__":
    main()
