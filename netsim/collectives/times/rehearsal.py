"""What is remembered of collectives: scenes, and how one leads to another.

A scene is a state of collectives that are under way together, as some member has just entered; times in it
count from that instant. From there all goes on by itself until somebody else enters, so two things are worth
remembering: who is through when, and into which scene it turns if this member enters at that time. Where a
collective begins, its scene is compared with all that are known: steps of training that repeat come to
scenes that were there before, however much they overlap.
"""

from __future__ import annotations

import importlib.util
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from netsim.collectives.times.compiled import compiled_seconds
from netsim.collectives.times.ensemble import Ensemble
from netsim.collectives.times.recurrence import contention_free_seconds
from netsim.fluid.fork import window_states, wires_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from netsim.collectives.times.play import Play
    from netsim.fluid.fork import Windows
    from netsim.fluid.network import Network
    from netsim.topology.protocol import Protocol

__all__ = ["GRID_PER_SECOND", "Cue", "Rehearsals", "Scene", "ensemble_alone", "is_plain", "ticks"]

Seconds = npt.NDArray[np.float64]
Cue = tuple[float, tuple[tuple[int, int], ...]]

GRID_PER_SECOND = 2.0**30
_MOST_SCENES = 512
_MOST_EDGES = 64
# After so many scenes in a row that were new, only every so-manieth is kept: nothing seems to repeat.
_PATIENCE = 64
# From so many messages on, loading and running compiled code takes less time than playing them one by one.
_WORTH_COMPILING = 20_000


def ticks(seconds: float) -> int:
    """A time on the grid of requests, rounded down: no cue can come between the two."""
    return math.floor(seconds * GRID_PER_SECOND)


def is_plain(protocol: Protocol) -> bool:
    """Whether a message alone takes its latency and then the rate of its narrowest link, whatever was before."""
    per_transfer = protocol.connections == "per-transfer"
    return not (protocol.has_windows or protocol.rendezvous or protocol.ack_share or per_transfer)


@dataclass(eq=False)
class Scene:
    """Collectives under way, from the instant at which somebody entered until the next one does.

    Attributes:
        groups: whose connections it knows.
        cues: when members are through: seconds, and places of collectives with their members; as far as known.
        known_until: no other cues come before, in seconds.
        is_over: whether everybody is through with the last cue.
        windows: what it then leaves behind of connections, by group.
        frozen: its state as it begins; None where that is found from an earlier one.
        following: by when and who entered: places of the collectives that are still there, and the next scene.
    """

    groups: frozenset[Hashable] = frozenset()
    cues: list[Cue] = field(default_factory=list)
    known_until: float = 0.0
    is_over: bool = False
    windows: Mapping[Hashable, Windows] = field(default_factory=dict)
    frozen: Ensemble | None = None
    following: dict[Hashable, tuple[tuple[int, ...], Scene]] = field(default_factory=dict)

    def remember(self, edge: Hashable, kept: tuple[int, ...], scene: Scene) -> None:
        """Keep what it has turned into."""
        if len(self.following) >= _MOST_EDGES:
            self.following.clear()
        self.following[edge] = (kept, scene)


class Rehearsals:
    """What one network remembers of collectives.

    Attributes:
        scenes: by all that they depend on, the one used last at the end.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self.scenes: OrderedDict[Hashable, Scene] = OrderedDict()
        self.quiet = Scene()  # nobody is there
        self._num_new = 0
        self._numbers: dict[Hashable, int] = {}

    def number_of(self, conditions: Hashable) -> int:
        """A number that stands for conditions of links, the same each time."""
        return self._numbers.setdefault(conditions, len(self._numbers))

    def alone(self, play: Play, conditions: Hashable) -> Scene:
        """A collective that nobody meets and whose members have all arrived, from the first arrival on."""
        arrivals = [play.arrivals[member] for member in range(play.schedule.num_ranks)]
        first = min(arrivals)
        offsets = tuple(ticks(arrival - first) for arrival in arrivals)
        windows = window_states(self._network, play.group, first)
        key = (play.schedule, play.hosts, play.group, offsets, conditions, windows)
        scene = self._recall(key)
        return scene if scene is not None else self._keep(key, self._found_alone(play))

    def beginning(self, ensemble: Ensemble, conditions: Hashable) -> Scene:
        """The scene of an ensemble in which a collective has just begun: one that is known, or a new one."""
        self._num_new += 1
        if self._num_new > _PATIENCE and self._num_new % _PATIENCE:
            return Scene(ensemble.groups)
        key = (ensemble.state(), conditions)
        scene = self._recall(key)
        if scene is not None:
            self._num_new = 0
            return scene
        return self._keep(key, Scene(ensemble.groups, frozen=ensemble.copied()))

    def _recall(self, key: Hashable) -> Scene | None:
        scene = self.scenes.get(key)
        if scene is not None:
            self.scenes.move_to_end(key)
        return scene

    def _keep(self, key: Hashable, scene: Scene) -> Scene:
        self.scenes[key] = scene
        if len(self.scenes) > _MOST_SCENES:
            self.scenes.popitem(last=False)
        return scene

    def _found_alone(self, play: Play) -> Scene:
        scene = Scene(frozenset((play.group,)), known_until=math.inf)
        seconds = self._seconds_without_events(play)
        if seconds is not None:
            scene.cues = _by_instant(seconds)
            scene.is_over = bool((seconds < np.inf).all())
            return scene
        ensemble = ensemble_alone(self._network, play)
        while ensemble.next_instant < math.inf:
            done = ensemble.step()
            if done:
                scene.cues.append((ensemble.now, done))
        scene.is_over, scene.windows = ensemble.is_over, ensemble.windows(0.0)
        return scene

    def _seconds_without_events(self, play: Play) -> Seconds | None:
        """When each member is through, counted from the first arrival, where that can be found without events."""
        if not is_plain(self._network.protocol):
            return None
        wires, first = wires_of(self._network), min(play.arrivals.values())
        offsets = [play.arrivals[member] - first for member in range(play.schedule.num_ranks)]
        arrivals = np.array(offsets, np.float64)
        seconds = contention_free_seconds(play.schedule, play.hosts, arrivals, wires)
        if seconds is None and play.schedule.num_messages >= _WORTH_COMPILING and _can_compile():
            seconds = compiled_seconds(play.schedule, play.hosts, arrivals, wires)
        return seconds


def ensemble_alone(network: Network, play: Play) -> Ensemble:
    """A collective that nobody meets, just after its last arrival, on a clock that began with the first."""
    ensemble = Ensemble(network)
    first = min(play.arrivals.values())
    place = ensemble.open(play.schedule, play.hosts, play.group, network, first)
    for member, instant in sorted(play.arrivals.items(), key=lambda item: (item[1], item[0])):
        ensemble.advance(instant - first)
        ensemble.enter(place, member)
    return ensemble


def _can_compile() -> bool:
    return importlib.util.find_spec("numba") is not None


def _by_instant(seconds: Seconds) -> list[Cue]:
    """Members by the instant at which they are through, those that never are left out."""
    instants, which = np.unique(seconds, return_inverse=True)
    order = np.argsort(which, kind="stable")
    members = np.split(order, np.searchsorted(which[order], np.arange(1, len(instants))))
    ends = zip(instants.tolist(), members, strict=True)
    return [(end, tuple((0, member) for member in each.tolist())) for end, each in ends if end < np.inf]
