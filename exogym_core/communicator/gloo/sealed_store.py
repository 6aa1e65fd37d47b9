"""A store at which ranks meet, whose values nobody can write who does not know their secret."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Any

from torch.distributed import Store  # type: ignore[attr-defined]

from netsim.files.errors import RankError

if TYPE_CHECKING:
    import datetime

__all__ = ["SealedStore"]

_DIGEST_BYTES = 32


class SealedStore(Store):
    """A store whose values are signed: what somebody without the secret has written there is refused.

    Keep it alive as long as a process group that was made with it: torch holds the C++ half alone.

    Raises:
        RankError: (`get`) the value under this key was not written by a rank of this run.
    """

    def __init__(self, inner: Store, secret: bytes, rank: int) -> None:
        super().__init__()
        self._inner, self._secret, self._rank = inner, secret, rank

    def set(self, key: str, value: Any) -> None:
        """Write a signed value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(key, self._seal(key, content) + content)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """The value under `key`, waiting for it."""
        raw = self._inner.get(key)
        seal, content = raw[:_DIGEST_BYTES], raw[_DIGEST_BYTES:]
        if not hmac.compare_digest(seal, self._seal(key, content)):
            raise RankError(
                f"rank {self._rank}: what the rendezvous holds was not written by a rank of this run; let all ranks "
                "have the same secret (NETGYM_SECRET, or a file of mode 0600 by NETGYM_SECRET_FILE)",
                self._rank,
            )
        return content

    def _seal(self, key: str, content: bytes) -> bytes:
        return hmac.digest(self._secret, key.encode() + b"\0" + content, "sha256")

    # What is not signed is passed on: nothing of ours, nor of gloo's, trusts it.

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        """Until all `keys` are there."""
        self._inner.wait(keys) if timeout is None else self._inner.wait(keys, timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all `keys` are there."""
        return bool(self._inner.check(keys))

    def add(self, key: str, amount: int) -> int:
        """Count: the sum of all that has been added under `key`."""
        return int(self._inner.add(key, amount))

    def delete_key(self, key: str) -> bool:
        """Forget a value."""
        return bool(self._inner.delete_key(key))

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long `get` and `wait` wait."""
        self._inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """No: torch then uses the methods here alone."""
        return False

    def clone(self) -> SealedStore:
        """One for another thread; it shares this one's connection."""
        return self
