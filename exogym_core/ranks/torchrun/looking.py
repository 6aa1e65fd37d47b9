"""Status of a group that torchrun has started, read from outside: the last report of each rank."""

from __future__ import annotations

import contextlib
import datetime
import hmac
import json
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from exogym_core.communicator.gloo.sealed_store import SealedStore
from exogym_core.names import visible
from exogym_core.ranks.torchrun.side_channel import RUN_TEXT, Pulse
from netsim.files.errors import InputError, RankError

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

__all__ = ["group_status"]

_SECONDS = 5.0
_MOST_RESTARTS = 1000


def group_status(address: tuple[str, int], secret: bytes) -> dict[str, Any]:
    """Last reports of the ranks at a torchrun address (MASTER_ADDR:MASTER_PORT).

    Raises:
        InputError: nobody listens there, no such run is there, or it has another secret.
    """
    where = f"{visible(address[0])}:{address[1]}"
    try:
        store = TCPStore(*address, None, False, datetime.timedelta(seconds=_SECONDS), wait_for_workers=False)
        found = _newest_run(store)
    except (RuntimeError, ValueError, OSError) as error:  # torch's errors have many names
        raise InputError(
            f"{where}: neither a rendezvous nor torchrun answers ({_first_line(error)})"
        ) from None
    if found is None:
        raise InputError(f"{where}: torchrun listens there, and no run of netgym has begun")
    num_ranks, run = _num_ranks(found), found
    try:
        sealed = SealedStore(run, secret, -1)
        numbers = [sealed.get(f"number {rank}") for rank in range(num_ranks)]
        own = hmac.digest(secret, b"".join(numbers), "sha256")
        beside = SealedStore(PrefixStore("beside", run), own, -1)
        pulses = [_pulse(beside, rank) for rank in range(num_ranks)]
        about = json.loads(beside.get(RUN_TEXT)) if beside.check([RUN_TEXT]) else {}
    except RankError:
        raise InputError(
            f"{where}: the run there has another secret (NETGYM_SECRET, NETGYM_SECRET_FILE)"
        ) from None
    ranks = [{"rank": rank, **pulse._asdict()} for rank, pulse in enumerate(pulses)]
    return {"kind": "group", "address": where, "num_ranks": num_ranks, **about, "ranks": ranks}


def _newest_run(store: Store) -> Store | None:
    """Store of the last run after the last restart of a group."""
    last = None
    for restart in range(_MOST_RESTARTS):
        prefix = f"netgym {restart}"
        counted = PrefixStore(prefix, store)
        if not counted.check(["runs of rank 0"]):
            break
        last = PrefixStore(f"{prefix} {int(counted.get('runs of rank 0'))}", store)
    return last


def _num_ranks(run: Store) -> int:
    number = 0
    while run.check([f"number {number}"]):
        number += 1
    return number


def _pulse(beside: SealedStore, rank: int) -> Pulse:
    with contextlib.suppress(ValueError, TypeError):
        if beside.check([f"pulse {rank}"]):
            return Pulse(*json.loads(beside.get(f"pulse {rank}")))
    return Pulse()


def _first_line(error: Exception) -> str:
    return visible(str(error).partition("\n")[0], 200)
