"""torch's store at the rendezvous: where members of a process group find each other's addresses."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from torch.distributed import Store  # type: ignore[attr-defined]

if TYPE_CHECKING:
    import datetime

    from exogym_core.communicator.elastic.link import SiteLink

__all__ = ["LinkStore"]


class LinkStore(Store):
    """A store whose values the rendezvous keeps; what goes there is signed on its way.

    Keep it alive as long as a process group that was made with it: torch holds the C++ half alone.
    """

    def __init__(self, link: SiteLink, seconds: float) -> None:
        super().__init__()
        self._link, self._seconds = link, seconds

    def _note(self, what: str, key: str, **about: Any) -> Any:
        try:
            answer = self._link.ask("note", self._seconds, does=what, key=key, **about)
        except TimeoutError:
            raise RuntimeError(f"store: timed out waiting for {key}") from None
        if "error" in answer:
            raise RuntimeError(f"store: connection to a member was lost: {answer['error']}")
        return answer.get("value")

    def set(self, key: str, value: Any) -> None:
        """Write a value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._note("set", key, value=base64.b64encode(content).decode())

    def get(self, key: str) -> bytes:
        """The value under `key`, waiting for it."""
        return base64.b64decode(self._note("get", key))

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Until all `keys` are there."""
        for key in keys:
            self._note("get", key)

    def check(self, keys: list[str]) -> bool:
        """Whether all `keys` are there."""
        return bool(self._note("check", "", keys=keys))

    def add(self, key: str, amount: int) -> int:
        """Count: the sum of all that has been added under `key`."""
        return int(self._note("add", key, value=amount))

    def delete_key(self, key: str) -> bool:
        """Forget a value."""
        return bool(self._note("delete", key))

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long `get` and `wait` wait."""
        self._seconds = timeout.total_seconds()

    def has_extended_api(self) -> bool:
        """No: torch then uses the methods here alone."""
        return False

    def clone(self) -> LinkStore:
        """One for another thread; it shares this one's connection."""
        return self
