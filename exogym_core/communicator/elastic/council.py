"""What the processes of a site ask a rendezvous as one: the first of them asks, and all hear the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from exogym_core.communicator.elastic.link import SiteLink
    from exogym_core.communicator.gloo.communicator import GlooCommunicator

__all__ = ["Council"]

_PATIENCE_SECONDS = 30 * 86400.0  # the first may wait long for other sites; who dies is noticed at once


class Council:
    """One process's place in it. All processes of the site make the same calls in the same order.

    Args:
        link: this process's way to the rendezvous.
        inside: connects the site's processes; None: this one is the site.
    """

    def __init__(self, link: SiteLink, inside: GlooCommunicator | None) -> None:
        self._link = link
        self._inside = None if inside is None else inside.patient(_PATIENCE_SECONDS)

    @property
    def leads(self) -> bool:
        """Whether this process speaks for the site."""
        return self._inside is None or self._inside.rank == 0

    def ask(self, what: str, **about: Any) -> Mapping[str, Any]:
        """The first process's question, as it says it, and its answer on all of them.

        Raises:
            InputError: refused; the line says why.
        """
        answer: Any = self._link.ask(what, **about) if self.leads else None
        if self._inside is not None:
            answer = self._heard(answer)
        if "refused" in answer:
            raise InputError(f"rendezvous: {visible(answer['refused'], 300)}")
        told: Mapping[str, Any] = answer
        return told

    def _heard(self, answer: Any) -> Any:
        assert self._inside is not None
        with self._inside.off_clock():
            return self._inside.broadcast_object(answer)

    def told(self, mine: Any) -> list[Any]:
        """What each process says, on all of them."""
        if self._inside is None:
            return [mine]
        with self._inside.off_clock():
            return self._inside.all_gather_object(mine)

    def tell(self, what: str, **about: Any) -> None:
        """The first process tells the rendezvous; nobody waits."""
        if self.leads:
            self._link.tell(what, **about)
