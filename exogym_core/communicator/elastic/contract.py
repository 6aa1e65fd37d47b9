"""What there is not where sites come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from exogym_core.communicator.gloo.communicator import GlooCommunicator
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from exogym_core.communicator.elastic.link import SiteLink
    from exogym_core.communicator.gloo.calls import GlooRank

__all__ = ["ElasticCommunicator"]


class ElasticCommunicator(GlooCommunicator):
    """Connects sites that come and go, or their processes: nothing of it waits for all of them.

    Attributes:
        link: this process's way to the rendezvous.
    """

    can_leave_behind = True
    members_change = True

    def before_meeting(self, call: Callable[[], None]) -> None:
        """Have `call()` made by all processes of the site before they meet those of others."""
        raise NotImplementedError

    @property
    def shared_state(self) -> GlooRank:
        """What all communicators of this process share."""
        return self._state

    @property
    def link(self) -> SiteLink:
        """This process's way to the rendezvous."""
        raise NotImplementedError

    def _collective(self, name: str, *arguments: Any, **named: Any) -> NoReturn:
        raise self._changing(name)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> NoReturn:
        raise self._changing("send")

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> NoReturn:
        raise self._changing("recv")

    def recv(self, tensor: Tensor, src: int | None = None, tag: int = 0) -> NoReturn:
        raise self._changing("recv")

    def put(self, tensor: Tensor, dst: int, box: str = "") -> NoReturn:
        raise self._changing("put")

    def take(self, box: str = "", wait: float = 0.0) -> NoReturn:
        raise self._changing("take")

    def group(self, ranks: Sequence[int], reuse: bool = False, number: int | None = None) -> GlooCommunicator:
        raise self._changing("group")

    def _changing(self, call: str) -> InputError:
        return InputError(
            f"rank {self.rank}, {call}: sites that meet at a rendezvous come and go, and what waits for all of them "
            "would wait for ever; use a strategy with time-outs, such as DiLoCo with averaging_timeout"
        )
