"""State of each link under several causes at once: events, traces, drift, crashes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from netsim.network.network import Network

__all__ = ["Conditions", "Quantity"]

Quantity = Literal["bits_per_second", "latency_seconds", "loss"]


class _Condition:
    """Condition of a link: the values of the topology, and those that override them."""

    __slots__ = ("dead_since", "downs", "factor", "forced", "in_force", "is_up", "stated", "traced")

    def __init__(self, stated: dict[Quantity, float]) -> None:
        self.stated = stated
        self.traced: dict[Quantity, float] = {}
        self.forced: dict[Quantity, tuple[Hashable, float]] = {}
        self.factor = 1.0
        self.downs: dict[Hashable, None] = {}
        self.in_force = dict(stated)
        self.is_up = True
        self.dead_since = 0.0

    @property
    def is_dead(self) -> bool:
        return not (self.is_up and self.in_force["bits_per_second"])

    def value(self, quantity: Quantity) -> float:
        """An event's value overrides a trace's, which overrides the topology's; drift multiplies rates."""
        forced = self.forced.get(quantity)
        value = forced[1] if forced is not None else self.traced.get(quantity, self.stated[quantity])
        return value * self.factor if quantity == "bits_per_second" else value


class Conditions:
    """Links of a network, each with the causes that act on it; sets the resulting values on the network.

    A cause is named by any hashable. The last value forced stands, and goes when its own cause ends.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._links = [
            _Condition(
                {
                    "bits_per_second": link.bits_per_second,
                    "latency_seconds": link.latency_seconds,
                    "loss": link.loss,
                }
            )
            for link in network.topology.links
        ]

    def put_down(self, links: Iterable[int], cause: Hashable) -> None:
        """Take links down until this cause is lifted."""
        for link in links:
            self._links[link].downs[cause] = None
            self._apply(link)

    def lift(self, links: Iterable[int], cause: Hashable) -> None:
        """End a cause that keeps links down."""
        for link in links:
            self._links[link].downs.pop(cause, None)
            self._apply(link)

    def force(self, links: Iterable[int], quantity: Quantity, value: float, cause: Hashable) -> None:
        """Set a quantity by an event."""
        for link in links:
            self._links[link].forced[quantity] = (cause, value)
            self._apply(link)

    def release(self, links: Iterable[int], quantity: Quantity, cause: Hashable) -> None:
        """End an event that set a quantity; if another has set it since, that value stays."""
        for link in links:
            forced = self._links[link].forced
            if quantity in forced and forced[quantity][0] == cause:
                del forced[quantity]
                self._apply(link)

    def trace(self, links: Iterable[int], quantity: Quantity, value: float) -> None:
        """Set a quantity by a trace."""
        for link in links:
            self._links[link].traced[quantity] = value
            self._apply(link)

    def drift(self, link: int, factor: float) -> None:
        """Multiply a link's rate."""
        self._links[link].factor = factor
        self._apply(link)

    def causes(self, link: int) -> list[Hashable]:
        """Causes that keep a link down."""
        return list(self._links[link].downs)

    def dead_since(self, link: int) -> float:
        """The instant from which on a link that carries nothing has done so."""
        return self._links[link].dead_since

    def is_adrift(self, link: int) -> bool:
        """Return whether a link carries nothing only because drift is zero, which passes."""
        condition = self._links[link]
        return condition.is_up and not condition.factor

    def _apply(self, link: int) -> None:
        condition, network = self._links[link], self._network
        was_dead, is_up = condition.is_dead, not condition.downs
        if is_up != condition.is_up:
            condition.is_up = is_up
            network.set_link_up(link, is_up)
        for quantity, before in condition.in_force.items():
            value = condition.value(quantity)
            if value == before:
                continue
            condition.in_force[quantity] = value
            if quantity == "bits_per_second":
                network.set_capacity(link, value)
            elif quantity == "latency_seconds":
                network.set_latency(link, value)
            else:
                network.set_loss(link, value)
        if condition.is_dead and not was_dead:
            condition.dead_since = network.env.now
