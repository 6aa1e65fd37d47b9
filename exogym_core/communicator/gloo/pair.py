"""Program of two ranks that time torch's gloo between their hosts; `netsim probe --gloo` starts them.

    python -m exogym_core.communicator.gloo.pair ADDRESS < SECRET

RANK, WORLD_SIZE=2, MASTER_ADDR and MASTER_PORT are set as torchrun sets them; gloo listens at ADDRESS of this host.
The secret comes as a line of hexadecimal digits; when that pipe is closed, the process ends. Rank 0 prints a line of
JSON: `small`, seconds that 4 bytes take one way, and `there` and `back`, bits a second from rank 0 to rank 1 and
back, in messages of 4 MiB.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

import torch

from exogym_core.communicator.gloo.rendezvous import Rendezvous

__all__ = ["main"]

_BLOCK_FLOATS = 1 << 20
_SECONDS = 3.0
_MOST_BLOCKS = 64
_NUM_SMALL = 10


def main() -> None:
    """Run as one of the two ranks."""
    secret = bytes.fromhex(sys.stdin.readline())
    threading.Thread(target=_end_with_starter, daemon=True).start()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    address = sys.argv[1]
    group: Any = Rendezvous(rank, 2, "", False, 60.0, "gloo", secret=secret, address=address).join().data
    small = min(_there_and_back(group, rank, 0, 1, 1) for _ in range(_NUM_SMALL)) / 2
    found = {"small": small}
    for source, name in enumerate(("there", "back")):
        once = _there_and_back(group, rank, source, _BLOCK_FLOATS, 1)  # it warms the connection, too
        number = torch.tensor([max(1, min(_MOST_BLOCKS, int(_SECONDS / max(once, 1e-6))))])
        _pass(group, rank, 0, number)
        num_blocks = int(number)
        seconds = _there_and_back(group, rank, source, _BLOCK_FLOATS, num_blocks) - small
        found[name] = num_blocks * _BLOCK_FLOATS * 32 / seconds
    _there_and_back(group, rank, 0, 1, 1)
    if rank == 0:
        print(json.dumps(found), flush=True)
    else:
        print("{}", flush=True)
    os._exit(0)  # without waiting for gloo's threads


def _end_with_starter() -> None:
    sys.stdin.read()
    os._exit(1)


def _pass(group: Any, rank: int, source: int, tensor: torch.Tensor) -> None:
    if rank == source:
        group.send([tensor], 1 - source, 0).wait()
    else:
        group.recv([tensor], source, 0).wait()


def _there_and_back(group: Any, rank: int, source: int, num_floats: int, num_blocks: int) -> float:
    """Seconds of `num_blocks` blocks from `source` and an answer of 4 bytes."""
    block, answer = torch.zeros(num_floats), torch.zeros(1)
    _pass(group, rank, 1 - source, answer)  # both are here
    began = time.monotonic()
    for _ in range(num_blocks):
        _pass(group, rank, source, block)
    _pass(group, rank, 1 - source, answer)
    seconds = torch.tensor([time.monotonic() - began], dtype=torch.float64)
    _pass(group, rank, source, seconds)  # the sender's figure
    return float(seconds)


if __name__ == "__main__":
    main()
