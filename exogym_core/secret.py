"""What only the ranks of one's own runs know; `netsim probe` asks for the same."""

from __future__ import annotations

from netsim.files.secret import shared_secret, user_secret

__all__ = ["shared_secret", "user_secret"]
