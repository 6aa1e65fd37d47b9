"""Process groups of sites that come and go: connected by way of the rendezvous, and dissolved by it."""

from __future__ import annotations

import contextlib
import datetime
import hmac
import math
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from exogym_core.communicator.gloo.deadlock_detector import in_thread
from exogym_core.communicator.gloo.rendezvous import (
    ConnectionLostError,
    ProcessGroups,
    Rendezvous,
)
from netgym.sites.link import LinkStore, SiteLink
from netsim.errors import DeadlockError

__all__ = ["BROKEN", "CONNECTING_SECONDS", "HurriedGroup", "SiteGroups", "moved"]

BROKEN = (ConnectionLostError, DeadlockError)
"""Errors of a group whose members cannot be reached, or do not answer."""

CONNECTING_SECONDS = 60.0
"""Until all members of a group have connected to each other, on a busy machine too."""

_PART_BYTES = 8 << 20  # of a state, at once: each part has its own time-out
_PART_SECONDS = 30.0


def moved(groups: ProcessGroups, sender: int, receiver: int, payload: bytes | None) -> bytes:
    """Bytes from one of two sites to the other; `payload` is the sender's.

    Raises:
        ConnectionLostError: a part took longer, or the connection broke.
    """
    control, place = groups.control, int(sender > receiver)
    options = torch.distributed.BroadcastOptions()
    options.rootRank = place
    try:
        control._set_default_timeout(datetime.timedelta(seconds=_PART_SECONDS))
        size = torch.tensor([0 if payload is None else len(payload)])
        control.broadcast([size], options).wait()
        whole = (
            torch.empty(int(size), dtype=torch.uint8)
            if payload is None
            else torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        )
        for part in torch.split(whole, _PART_BYTES):
            control.broadcast([part], options).wait()
    except RuntimeError as error:
        raise ConnectionLostError(
            f"the state sent by site {sender} was cut off: {str(error).partition(chr(10))[0]}", receiver
        ) from None
    return whole.numpy().tobytes() if payload is None else payload


class HurriedGroup:
    """A process group of torch's whose calls fail at the deadline of an attempt."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.deadline = math.inf

    def __getattr__(self, name: str) -> Any:
        if name != "shutdown" and self.deadline < math.inf:
            left = max(self.deadline - time.monotonic(), 0.01)
            self._group._set_default_timeout(datetime.timedelta(seconds=left))
        return getattr(self._group, name)


class SiteGroups:
    """Groups of a process, by the names that the rendezvous gives them.

    Args:
        link: to the rendezvous, through which members find each other.
        secret: known to the run's processes; members of groups test each other with it.
        common: settings of the rank.
    """

    def __init__(self, link: SiteLink, secret: bytes, common: Rendezvous) -> None:
        self._link, self._secret, self._common = link, secret, common
        self._store = LinkStore(link, CONNECTING_SECONDS)
        self._opened: dict[str, _Opened] = {}  # being made, or there
        self._dissolved = deque[str](maxlen=100)  # no more

    def close(self, group: str) -> None:
        """Forget a group, made or being made, so that its name may be opened again."""
        self._opened.pop(group, None)

    def dissolve(self, group: str) -> None:
        """Fail the calls that wait in a group, which the rendezvous has dropped: one of its members may hang."""
        self._dissolved.append(group)
        if (opened := self._opened.get(group)) is not None:
            opened.give_up()
            opened.among.cut()

    def give_up_before(self, life: str) -> None:
        """Stop waiting for groups made before the rendezvous restarted as `life`: they find no members."""
        for group, opened in list(self._opened.items()):
            if not group.startswith(life):
                opened.give_up()

    def open(self, group: str, members: list[int], seconds: float) -> ProcessGroups:
        """Process groups of these sites, abandoned when the rendezvous drops the group: gloo cannot be interrupted.

        Raises:
            ConnectionLostError, DeadlockError: not all of them could be reached in time.
        """
        store = PrefixStore(f"{group}/{self._link.identity.local_rank}", self._store)
        secret = hmac.digest(self._secret, group.encode(), "sha256")
        about: Any = {"secret": secret, "address": self._link.address, "store": store}
        opened = _Opened(replace(self._common, timeout_seconds=seconds, **about), Future())
        self._opened[group] = opened
        if group in self._dissolved:
            opened.give_up()
        connecting = in_thread(partial(opened.among.subgroup, members))
        try:
            ends: list[Future[Any]] = [connecting, opened.given_up]
            wait(ends, seconds, FIRST_COMPLETED)
            if connecting.done():
                return connecting.result()
            connecting.add_done_callback(_shut_down)
            if opened.given_up.done():
                raise ConnectionLostError(f"the rendezvous keeps group {group} no longer", 0)
            raise DeadlockError(
                f"rank {self._common.rank} connects to {members}: not finished in {seconds:g} s"
            )
        except BaseException as error:
            self.close(group)
            # Also a stranger as a member.
            if isinstance(error, RuntimeError) and not isinstance(error, BROKEN):
                raise ConnectionLostError(str(error).partition("\n")[0], self._common.rank) from None
            raise


class _Opened(NamedTuple):
    """A group, connected or being connected: its members' rendezvous, and whether they are no longer waited for."""

    among: Rendezvous
    given_up: Future[None]

    def give_up(self) -> None:
        with contextlib.suppress(InvalidStateError):
            self.given_up.set_result(None)


def _shut_down(connected: Future[ProcessGroups]) -> None:
    """Close a group that nobody waits for any more."""
    if connected.exception() is None and connected.result().control is not None:
        connected.result().control.shutdown()
