"""Requests of a launched run's ranks, kept compressed for `netgym retime`; see `netgym.launch.retiming`."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from exogym_core.workers.journal import request_to_line
from netsim.ranks import Advance, Ask, Await, CallEnding, FirstSent, HoldUntil, Mark, Post, Wait

if TYPE_CHECKING:
    from collections.abc import Mapping

    from netsim.ranks import Answer, Question, Request

__all__ = ["RECORDING", "RECORDING_FORMAT", "LaunchRecording"]

RECORDING = "requests.bin"
"""Name of a recording in a run's folder."""

RECORDING_FORMAT = 1
"""Version of its content: a line of JSON, then the zlib streams of all ranks, one after the other."""

_MOST_BYTES = 256 * 2**20


class LaunchRecording:
    """Requests of ranks, as lines of the journal, one compressed stream a rank.

    Args:
        num_ranks: number of ranks.

    Attributes:
        refused: reason for which other networks might see other requests; "" while there is none.
    """

    def __init__(self, num_ranks: int) -> None:
        self.refused = ""
        self._streams = [(zlib.compressobj(1), bytearray()) for _ in range(num_ranks)]
        self._num_bytes = 0

    def add(self, rank: int, request: Request, place: str) -> None:
        """Add a request that a rank makes at `place`."""
        if self.refused:
            return
        if isinstance(request, HoldUntil):
            self.refuse(f"the clock did not wait for rank {rank} (its last place: {place})")
        elif isinstance(request, Advance | Ask | Await | Post | Wait | Mark):
            compressor, content = self._streams[rank]
            more = compressor.compress(request_to_line(rank, request).encode() + b"\n")
            content += more
            self._num_bytes += len(more)
            if self._num_bytes > _MOST_BYTES:
                self.refuse(f"its requests take more than {_MOST_BYTES >> 20} MiB")

    def add_answered(self, rank: int, question: Question, answer: Answer, place: str) -> None:
        """Add a question, whose answer another network must not change: shown times, and calls that have ended well."""
        match question:
            case Await() if answer == CallEnding.DONE:
                self.add(rank, question, place)
            case Await():
                self.refuse(f"rank {rank}'s call at {place} was broken")
            case Ask(key=None, reader=None):
                self.add(rank, question, place)
            case Ask(key=None, reader=reader) if reader:
                self.refuse(f"rank {rank} reads {reader}")
            case Ask(key=None):
                self.refuse(f"rank {rank} asks for the time at {place}")
            case Ask():
                self.refuse(
                    f"rank {rank} asks whether a call is over (is_completed; its last place: {place})"
                )
            case FirstSent():
                self.refuse(f"rank {rank} receives from any rank at {place}")
            case _:
                self.refuse(f"rank {rank} waits for what comes first (its last place: {place})")

    def refuse(self, reason: str) -> None:
        """End the recording, and forget what there is."""
        if not self.refused:
            self.refused = reason
            self._streams.clear()

    def to_bytes(self, options: Mapping[str, Any]) -> bytes:
        """Content of a file: the requests, and `options` of the launch."""
        parts = [bytes(content + compressor.flush()) for compressor, content in self._streams]
        head = {"format": RECORDING_FORMAT, "refused": self.refused, "options": options}
        head["lengths"] = list(map(len, parts))
        return b"".join([json.dumps(head).encode(), b"\n", *parts])
