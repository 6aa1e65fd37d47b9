"""A TCP transfer over packets of several sizes: Linux's sockets between shaped namespaces, and the model.

    sudo python benchmarks/packets.py [MTU ...]

10 MB cross 50 Mbit/s with a round trip of 20 ms on a new connection. Printed are the median of three real transfers,
the model's seconds, and those that it gives for 1,500 bytes.
"""

from __future__ import annotations

import socket
import statistics
import sys
import time

from shaped_links import ShapedLinks, why_not

import netsim
from netsim import Topology

MTUS = (600, 1500, 4000, 9000)
NUM_BYTES, PORT, REPEATS = 10_000_000, 5001, 3
LINK = {"between": ["a", "b"], "bandwidth": "50 Mbit/s", "rtt": "20 ms"}


def topology(mtu: int) -> Topology:
    return Topology.from_mapping({"name": "packets", "hosts": ["a", "b"], "links": [{**LINK, "mtu": mtu}]})


def receive(address: str) -> None:
    """Print the instant of the last byte."""
    with socket.create_server((address, PORT)) as server:
        left, opened = NUM_BYTES, server.accept()[0]
        while left > 0:
            left -= len(opened.recv(1 << 20)) or left
        print(time.monotonic())
        opened.close()


def send(address: str) -> None:
    """Print the instant of the first byte."""
    deadline = time.monotonic() + 20.0
    while True:
        try:
            opened = socket.create_connection((address, PORT))
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
    time.sleep(0.3)
    print(time.monotonic())
    opened.sendall(b"x" * NUM_BYTES)
    opened.shutdown(socket.SHUT_WR)
    opened.recv(1)


def main(words: list[str]) -> None:
    if words[:1] in (["receive"], ["send"]):
        (receive if words[0] == "receive" else send)(words[1])
        return
    if reason := why_not():
        sys.exit(reason)
    usual = netsim.collective(topology(1500), "sendrecv", num_bytes=NUM_BYTES, protocol="linux-tcp").seconds
    for mtu in map(int, words or MTUS):
        times = []
        with ShapedLinks(topology(mtu)) as net:
            command = [sys.executable, __file__]
            for _ in range(REPEATS):
                ends = {
                    "b": [*command, "receive", net.address("b")],
                    "a": [*command, "send", net.address("b")],
                }
                last, first = map(float, net.run(ends, 60.0))
                times.append(last - first)
        real = statistics.median(times)
        model = netsim.collective(
            topology(mtu), "sendrecv", num_bytes=NUM_BYTES, protocol="linux-tcp"
        ).seconds
        print(
            f"{mtu:5} bytes: real {real:.3f} s, model {model:.3f} ({model / real - 1:+.1%}),"
            f" with 1,500 bytes {usual:.3f} ({usual / real - 1:+.1%})",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
