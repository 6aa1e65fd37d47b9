"""Processor time of hivemind's averager: real peers on this machine, whatever else it does.

    python benchmarks/hivemind_averager.py [PEERS] [MILLIONS] [TENSORS]

in an environment with hivemind 1.1.6, Python 3.9 and psutil. PEERS (2) average MILLIONS (40) of fp32 numbers in TENSORS
(8) as fp16 three times. Printed are, for one peer and each averaging, the bytes that it sends, as many as it receives,
seconds, and processor seconds: of the busiest thread of each process, first the event loop, through which all bytes
pass, or with many tensors the DHT's process, which is told of each averaged tensor; and of libp2p's daemon.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from typing import Any

ROUNDS = 3


def processor_seconds() -> dict[tuple[int, int], tuple[str, float]]:
    """Seconds of each thread of this process and those that it began, by process and thread."""
    import psutil  # type: ignore[import-untyped]

    found = {}
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        name = "p2pd" if "p2pd" in process.name() else "python"
        for thread in process.threads():
            found[process.pid, thread.id] = (name, thread.user_time + thread.system_time)
    return found


def peer(rank: int, num_peers: int, values: int, tensors: int, addresses: Any, barrier: Any) -> None:
    import hivemind  # type: ignore[import-not-found]
    import torch
    from hivemind.averaging import DecentralizedAverager  # type: ignore[import-not-found]
    from hivemind.compression import Float16Compression  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    others = [addresses.get()] if rank else []
    dht = hivemind.DHT(start=True, initial_peers=others, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    for _ in range(0 if rank else num_peers - 1):
        addresses.put(str(dht.get_visible_maddrs()[0]))
    averager = DecentralizedAverager(
        [torch.randn(values // tensors) for _ in range(tensors)],
        dht,
        start=True,
        prefix="benchmark",
        compression=Float16Compression(),
        target_group_size=num_peers,
    )
    sent = 2 * (num_peers - 1) / num_peers * values * 2
    for _ in range(ROUNDS):
        barrier.wait()
        before, begin = processor_seconds(), time.monotonic()
        averager.step(timeout=300)
        seconds, after = time.monotonic() - begin, processor_seconds()
        spent = [(key, name, end - before.get(key, ("", 0.0))[1]) for key, (name, end) in after.items()]
        by_process: dict[int, float] = {}
        for (pid, _), name, each in spent:
            if name == "python":
                by_process[pid] = max(by_process.get(pid, 0.0), each)
        loop, *rest = sorted(by_process.values(), reverse=True)
        daemon = sum(each for _, name, each in spent if name == "p2pd")
        if not rank:
            print(f"{sent / 1e6:.1f} MB each way, {seconds:.1f} s; busiest threads of processes", end=" ")
            print([round(each, 2) for each in (loop, *rest)], f"p2pd {daemon:.2f}", flush=True)
    barrier.wait()
    averager.shutdown()
    dht.shutdown()


def main() -> None:
    given = [float(each) for each in sys.argv[1:]]
    num_peers, millions, tensors = (*given, *(2.0, 40.0, 8.0)[len(given) :])
    addresses: Any = multiprocessing.Queue()
    barrier = multiprocessing.Barrier(int(num_peers))
    common = int(num_peers), int(millions * 1e6), int(tensors), addresses, barrier
    peers = [multiprocessing.Process(target=peer, args=(rank, *common)) for rank in range(int(num_peers))]
    for each in peers:
        each.start()
    for each in peers:
        each.join()


if __name__ == "__main__":
    main()
