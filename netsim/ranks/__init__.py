"""Ranks in virtual time: requests, the kernel that serves them, calls, mailboxes and meetings."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netsim.ranks.calls import FROM_ROOT as FROM_ROOT
    from netsim.ranks.calls import Cancel as Cancel
    from netsim.ranks.calls import Enter as Enter
    from netsim.ranks.calls import Progress as Progress
    from netsim.ranks.calls import group_of as group_of
    from netsim.ranks.calls import needs_nobody as needs_nobody
    from netsim.ranks.calls import start_at_once as start_at_once
    from netsim.ranks.kernel import Kernel as Kernel
    from netsim.ranks.kernel import RankSink as RankSink
    from netsim.ranks.kernel import RankSource as RankSource
    from netsim.ranks.kernel import StampedRow as StampedRow
    from netsim.ranks.meetings import SLOW_TIMES as SLOW_TIMES
    from netsim.ranks.meetings import Reach as Reach
    from netsim.ranks.meetings import largest_mesh as largest_mesh
    from netsim.ranks.requests import Advance as Advance
    from netsim.ranks.requests import Answer as Answer
    from netsim.ranks.requests import Arrival as Arrival
    from netsim.ranks.requests import Ask as Ask
    from netsim.ranks.requests import Await as Await
    from netsim.ranks.requests import Call as Call
    from netsim.ranks.requests import CallEnding as CallEnding
    from netsim.ranks.requests import Confirm as Confirm
    from netsim.ranks.requests import Exit as Exit
    from netsim.ranks.requests import Fetch as Fetch
    from netsim.ranks.requests import Fetched as Fetched
    from netsim.ranks.requests import FirstSent as FirstSent
    from netsim.ranks.requests import Join as Join
    from netsim.ranks.requests import Key as Key
    from netsim.ranks.requests import Lane as Lane
    from netsim.ranks.requests import Letter as Letter
    from netsim.ranks.requests import Mark as Mark
    from netsim.ranks.requests import Post as Post
    from netsim.ranks.requests import Publish as Publish
    from netsim.ranks.requests import Put as Put
    from netsim.ranks.requests import Question as Question
    from netsim.ranks.requests import Request as Request
    from netsim.ranks.requests import Stand as Stand
    from netsim.ranks.requests import Take as Take
    from netsim.ranks.requests import Wait as Wait
    from netsim.ranks.requests import Withdraw as Withdraw
    from netsim.ranks.requests import gives_time as gives_time

_NAMES = {  # by module
    "calls": "FROM_ROOT Cancel Enter Progress group_of needs_nobody start_at_once",
    "kernel": "Kernel RankSink RankSource StampedRow",
    "meetings": "Reach SLOW_TIMES largest_mesh",
    "requests": (
        "Advance Answer Arrival Ask Await Call CallEnding Confirm Exit Fetch Fetched FirstSent Join Key "
        "Lane Letter Mark Post Publish Put Question Request Stand Take Wait Withdraw gives_time"
    ),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(
                f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}"
            )
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
