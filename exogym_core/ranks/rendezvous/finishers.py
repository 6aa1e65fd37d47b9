"""Who has finished a run: what tells those who come afterwards that there is nothing left to do."""

from __future__ import annotations

__all__ = ["Finishers"]


class Finishers:
    """Who has finished a run; true when somebody has.

    Attributes:
        is_told: whether a finished folder says so: then nobody goes on, though those who did it are not there.
    """

    def __init__(self) -> None:
        self._by: list[str] = []
        self.is_told = False

    def __bool__(self) -> bool:
        return bool(self._by)

    def by(self, name: str, is_told: bool = False) -> None:
        """One has finished it, with its own process or as its folder tells."""
        self._by = sorted({*self._by, name})
        self.is_told = self.is_told or is_told

    @property
    def line(self) -> str:
        """What who comes too late is told."""
        have, whose = ("has", "its folder has") if len(self._by) == 1 else ("have", "their folders have")
        return (
            f"this run is over: {', '.join(self._by)} {have} finished it, {whose} the model; for another run name it, "
            "NETGYM_RUN=..., or start the rendezvous anew"
        )
