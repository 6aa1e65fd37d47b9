"""What ranks do for a while, for those who want to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from netsim.network.recorder import Span

if TYPE_CHECKING:
    from collections.abc import Callable

    import simpy

__all__ = ["Diary"]


class Diary:
    """What ranks compute and wait for, told as it ends.

    Args:
        clock: whose time it is.
        on_span: told of every span; None: nobody wants to know.
    """

    def __init__(self, clock: simpy.Environment, on_span: Callable[[Span], None] | None) -> None:
        self._clock = clock
        self._on_span = on_span
        self._open: dict[int, Span] = {}

    def begin(self, rank: int, kind: Literal["compute", "wait"], name: str) -> None:
        """A rank does this from now on."""
        if self._on_span is not None:
            self._open[rank] = Span(rank, kind, name, self._clock.now, self._clock.now)

    def end(self, rank: int, as_kind: Literal["lost"] | None = None) -> None:
        """What a rank has begun ends now."""
        if self._on_span is not None:
            span = self._open.pop(rank)
            if self._clock.now > span.begin_seconds:
                self._on_span(span._replace(kind=as_kind or span.kind, end_seconds=self._clock.now))

    def unfinished(self) -> list[Span]:
        """What ranks are doing at this instant, as far as it has come."""
        return [span._replace(end_seconds=self._clock.now) for _, span in sorted(self._open.items())]
