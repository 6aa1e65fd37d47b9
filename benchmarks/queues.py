"""TCP transfers side by side through a short queue, of their own host or of a router: Linux's sockets and the model.

    sudo python benchmarks/queues.py

15 MB cross 50 Mbit/s on as many new connections. Printed are the time of the last byte, the median of three real runs,
segments sent again, frames that the queue dropped, and the model's time.
"""

from __future__ import annotations

import json
import socket
import statistics
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from shaped_links import ShapedLinks, why_not

from netsim import Topology
from netsim.transfers import time_flows

NUM_BYTES, MBIT, PORT, REPEATS = 15_000_000, 50, 5001, 3
TOTAL_RETRANS = 100  # bytes before it in Linux's struct tcp_info
CASES = [  # round trip in ms, packets in the queue, connections
    *((20.0, queue, num) for queue in (20, 100, 1000) for num in (1, 16)),
    *((100.0, queue, num) for queue in (100, 400) for num in (1, 8)),
]


def topology(where: str, round_trip: float, queue: int) -> Topology:
    """One link between hosts, so that the queue is the sender's own, or one behind a router."""
    slow = {"up": f"{MBIT} Mbit/s", "down": "1 Gbit/s", "latency": f"{round_trip / 2} ms", "queue": queue}
    if where == "host":
        links = [{"between": ["a", "b"], **slow}]
    else:
        links = [{"between": ["a", "r"], "bandwidth": "1 Gbit/s"}, {"between": ["r", "b"], **slow}]
    routers = ["r"] if where == "router" else []
    return Topology.from_mapping({"name": "queues", "hosts": ["a", "b"], "routers": routers, "links": links})


def receive(address: str, num: int) -> None:
    """Print the instant of the last byte."""

    def read(opened: socket.socket) -> None:
        while opened.recv(1 << 18):
            pass

    with socket.create_server((address, PORT), backlog=num) as server, ThreadPoolExecutor(num) as pool:
        list(pool.map(read, [server.accept()[0] for _ in range(num)]))
        print(time.monotonic())


def send(address: str, num: int) -> None:
    """Print the instant of the first byte, and the segments that were sent again."""
    opened: list[socket.socket] = []
    deadline = time.monotonic() + 20.0
    while len(opened) < num:
        try:
            opened.append(socket.create_connection((address, PORT)))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    time.sleep(0.3)
    began = time.monotonic()

    def write(one: socket.socket) -> int:
        one.sendall(b"x" * (NUM_BYTES // num))
        one.shutdown(socket.SHUT_WR)
        one.recv(1)
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int(struct.unpack_from("I", info, TOTAL_RETRANS)[0])

    with ThreadPoolExecutor(num) as pool:
        print(json.dumps([began, sum(pool.map(write, opened))]))


def main(words: list[str]) -> None:
    if words:
        (receive if words[0] == "receive" else send)(words[1], int(words[2]))
        return
    if reason := why_not():
        sys.exit(reason)
    for where in ("host", "router"):
        for round_trip, queue, num in CASES:
            net_of = topology(where, round_trip, queue)
            times, again = [], []
            with ShapedLinks(net_of) as net:
                for _ in range(REPEATS):
                    command = [sys.executable, __file__]
                    peer = [net.address("b"), str(num)]
                    ends = {"b": [*command, "receive", *peer], "a": [*command, "send", *peer]}
                    last, first = net.run(ends, 60.0)
                    began, num_again = json.loads(first)
                    times.append(float(last) - began)
                    again.append(num_again)
                drops = sum(net.drops().values()) / REPEATS
            real = statistics.median(times)
            # What a shaper of the host's own drops is not lost there: its queue is no input to the model here.
            modelled = topology(where, round_trip, 1_000_000 if where == "host" else queue)
            flows = [(0.0, "a", "b", NUM_BYTES / num)] * num
            model = float(max(time_flows(modelled, flows, "linux-tcp")))
            print(
                f"{where:6} {round_trip:3.0f} ms, {queue:4} packets, {num:2} connections: real {real:.3f} s"
                f" ({min(times):.3f} to {max(times):.3f}), sent again {statistics.median(again):.0f},"
                f" dropped {drops:.0f}, model {model:.3f} s ({model / real - 1:+.1%})",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
