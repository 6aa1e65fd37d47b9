"""How many bytes had crossed each link, at some instants of a run: as many as a page can show, however long it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netsim.network.network import Network
    from netsim.topology.topology import FloatArray

__all__ = ["LinkHistory"]

_MOST = 120  # instants that are kept after each thinning; twice as many at most
_MOST_NUMBERS = 50_000  # in all rows: networks of thousands of links are looked at less often


class LinkHistory:
    """Looks at a network's links when it is told that something has come to its end.

    Looking changes nothing. Instants are at first all those it is told of; when there are too many, every other one is
    dropped, and from then on those that come too soon after the last.

    Args:
        network: whose links.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._looks: list[tuple[float, FloatArray]] = [(network.env.now, network.link_bytes)]
        self._gap_seconds = 0.0

    def look(self) -> None:
        """Note what has crossed links until now, if the last look is long enough ago."""
        now = float(self._network.env.now)
        if now <= self._looks[-1][0] or now < self._looks[-1][0] + self._gap_seconds:
            return
        self._looks.append((now, self._network.link_bytes))
        if len(self._looks) > 2 * _MOST:
            self._looks = self._looks[::2]
            self._gap_seconds = now / (2 * _MOST)

    def rows(self) -> list[dict[str, float]]:
        """A row an instant: `virtual_seconds`, and bytes from the start over each link (`a->b`) that carried any."""
        now = float(self._network.env.now)
        end = (now, self._network.link_bytes)
        looks = [look for look in self._looks if look[0] < now] + [end]
        names = [f"{link.source}->{link.target}" for link in self._network.topology.links]
        used = [index for index, total in enumerate(end[1].tolist()) if total > 0]
        stride = 1 + len(looks) * len(used) // _MOST_NUMBERS
        looks = [look for number, look in enumerate(looks) if number % stride == 0 or look is end]
        return [
            {"virtual_seconds": at, **{names[index]: round(float(totals[index])) for index in used}}
            for at, totals in looks
        ]
