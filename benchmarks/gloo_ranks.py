"""Real gloo on the hosts of shaped links: seconds of operations from a common start, and segments sent again."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shaped_links import ShapedLinks


def on_hosts(net: ShapedLinks, operations: Sequence[tuple[str, int]], calls: int) -> list[dict[str, Any]]:
    """Call each operation of so many bytes several times, a rank a host.

    Returns:
        An object an operation: `seconds` of each call until the last rank is through, and from the second call on
        `retransmits` of all ranks, and `thread_seconds`: of a call, processor time of the busiest rank's gloo threads.
    """
    hosts = [host.name for host in net.topology.hosts]
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            host: [sys.executable, __file__, json.dumps([rank, len(hosts), folder, operations, calls])]
            for rank, host in enumerate(hosts)
        }
        ranks = [json.loads(text) for text in net.run(commands, 600.0)]
    return [
        {
            "seconds": [max(each) for each in zip(*(seconds for seconds, _, _ in ends), strict=True)],
            "retransmits": sum(retransmits for _, retransmits, _ in ends),
            "thread_seconds": max(seconds for _, _, seconds in ends),
        }
        for ends in zip(*ranks, strict=True)
    ]


def be_rank(
    rank: int, num_ranks: int, folder: str, operations: Sequence[tuple[str, int]], calls: int
) -> list[tuple[list[float], int, float]]:
    """Seconds of each call from its common start until this rank was through, what it sent again, threads' seconds."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    found = []
    for op, num_bytes in operations:
        count = num_bytes // 4 // num_ranks * num_ranks
        whole, other, part = torch.ones(count), torch.ones(count), torch.ones(count // num_ranks)
        call: dict[str, Any] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole),
            "reduce": lambda whole=whole: dist.reduce(whole, 0),
            "all_gather": lambda whole=whole, part=part: dist.all_gather_single(whole, part),
            "all_to_all": lambda whole=whole, other=other: dist.all_to_all_single(other, whole),
            "broadcast": lambda whole=whole: dist.broadcast(whole, 0),
            "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
            "sendrecv": [
                lambda whole=whole: dist.send(whole, 1),
                lambda whole=whole: dist.recv(whole, 0),
                *[lambda: None] * num_ranks,
            ][rank],
        }
        seconds, before, begun = [], 0, 0.0
        for number in range(calls):
            start = _common_start(Path(folder), rank, num_ranks)
            if number == 1:
                before, begun = _segments_sent_again(), _thread_seconds()
            time.sleep(max(start - time.monotonic(), 0.0))
            call[op]()
            seconds.append(time.monotonic() - start)
        spent = (_thread_seconds() - begun) / max(calls - 1, 1)
        found.append((seconds, _segments_sent_again() - before, spent))
    _common_start(
        Path(folder), rank, num_ranks
    )  # a process that ends holds up those of this machine that still send
    return found


def _common_start(folder: Path, rank: int, num_ranks: int) -> float:
    """An instant of the machine's clock, agreed on by files: the links stay idle for as short as they can."""
    number = len(list(folder.glob(f"here-*-{rank}")))
    (folder / f"here-{number}-{rank}").touch()
    text = folder / f"start-{number}"
    while rank == 0 and len(list(folder.glob(f"here-{number}-*"))) < num_ranks:
        time.sleep(0.001)
    if rank == 0:
        written = folder / "written"
        written.write_text(repr(time.monotonic() + 0.03))
        written.rename(text)
    while not text.exists():
        time.sleep(0.001)
    return float(text.read_text())


def _thread_seconds() -> float:
    """Processor seconds of gloo's threads so far."""
    threads = [
        thread for thread in Path("/proc/self/task").iterdir() if "gloo" in (thread / "comm").read_text()
    ]
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def _segments_sent_again() -> int:
    """TCP segments that all connections of this network namespace have sent again so far."""
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


if __name__ == "__main__":
    print(json.dumps(be_rank(*json.loads(sys.argv[1]))))
