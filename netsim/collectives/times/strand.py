"""Collectives that may meet each other and nobody else, followed from scene to scene."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from netsim.collectives.times.ensemble import Ensemble
from netsim.collectives.times.events import call_at
from netsim.collectives.times.rehearsal import GRID_PER_SECOND, Scene, ensemble_alone, ticks
from netsim.fluid.fork import credit, end_show, put_windows, show, window_states

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from netsim.collectives.times.play import Play
    from netsim.collectives.times.rehearsal import Rehearsals
    from netsim.fluid.network import Network

__all__ = ["Strand"]

# Priorities in an instant: after SimPy's own events; and after the network's, which have 10.
_LATE = 5
_LAST = 11


class Strand:
    """Collectives off the network, from when the first one begins until all are over.

    A single one in which nobody is through before the last member arrives is settled then, as a whole. In all
    other cases each entry leads from one scene to the next, and what is not remembered of a scene is found
    out as time goes by.

    Args:
        network: on whose clock they live.
        rehearsals: what is remembered.
        conditions: what the links of a collective are like at present.
        on_over: called when nothing is left of it, or the network has taken it over.

    Attributes:
        plays: the collectives, in the order in which they began.
        links: all links that they can use.
    """

    def __init__(
        self,
        network: Network,
        rehearsals: Rehearsals,
        conditions: Callable[[Play], Hashable],
        on_over: Callable[[Strand], None],
    ) -> None:
        self.plays: list[Play] = []
        self.links: frozenset[int] = frozenset()
        self._network = network
        self._rehearsals = rehearsals
        self._conditions = conditions
        self._on_over = on_over
        self._shown: Network | None = None  # for those who watch, while all is found out otherwise
        self._scene: Scene | None = None  # None: the first collective gathers its members
        self._start = 0.0  # of the scene
        self._told = 0  # cues of the scene
        self._frozen: Ensemble | None = None  # as it was in an earlier scene; None: before the first
        # Who entered since then: seconds and cues since the scene before began, place, member.
        self._entries: list[tuple[float, int, int, int]] = []
        self._ensemble: Ensemble | None = None  # as it is now, where that was needed
        self._began = 0.0  # the scene, on the ensemble's clock
        self._given = 0  # cues of the scene that the ensemble has given
        self._turn = 0  # what was planned in earlier ones is void
        self._due = math.nan

    @property
    def shown(self) -> Network:
        """A network for those who watch."""
        if self._shown is None:
            self._shown = show(self._network)
        return self._shown

    def is_busy(self, host: int) -> bool:
        """Whether a member on a host takes part in something that it is not through."""
        return any(host in play.hosts and not play.is_through(host) for play in self.plays)

    def enter(self, play: Play, member: int) -> None:
        """A member of a collective enters now."""
        now = self._network.env.now
        if self._scene is None and self.plays in ([], [play]):
            self._gather(play)
            return
        self._begin()
        self._follow(play, member, now)
        self._plan(now)

    def bring_on(self) -> None:
        """Have the network carry all of it from now on, as if it had been there from the start."""
        network, now = self._network, self._network.env.now
        self._begin()
        ensemble = self._ensemble_at(now - self._start)
        self._keep(ensemble.prune())
        left = [(self.plays[place], member) for place, member in ensemble.untold]
        if self._shown is not None:
            end_show(self._shown)
        self._turn += 1
        self._on_over(self)
        executions = ensemble.take_over(network, [play.numbers for play in self.plays])
        for play, execution in zip(self.plays, executions, strict=True):
            play.go_live(execution)
        for play, member in left:
            play.tell(member)

    # -- the first collective ------------------------------------------------------------------------------------

    def _gather(self, play: Play) -> None:
        if len(play.arrivals) == play.schedule.num_ranks:
            scene = self._scene = self._rehearsals.alone(play, self._conditions(play))
            self._start = min(play.arrivals.values())
            if scene.cues:
                self._plan(max(self._start + scene.cues[0][0], self._network.env.now))
        elif not self.plays and not play.schedule.binds_everyone:
            # Members may be through before others arrive: only if all arrive now can it be settled as a whole.
            call_at(self._network.env, self._network.env.now, self._begin, _LATE)
        self.plays = [play]

    def _begin(self) -> None:
        """Do not wait any longer: let those in who are there."""
        if self._scene is not None:
            return
        self._scene, (play,), self.plays = self._rehearsals.quiet, self.plays, []
        self._start = min(play.arrivals.values())
        for member, instant in play.arrivals.items():
            self._follow(play, member, instant)
        self._plan(self._network.env.now)

    # -- from scene to scene ------------------------------------------------------------------------------------

    def _follow(self, play: Play, member: int, instant: float) -> None:
        """A member enters: on to the next scene."""
        assert self._scene is not None
        seconds = ticks(instant - self._start)
        begins = play not in self.plays
        entry = self._opening(play, instant) if begins else self.plays.index(play)
        edge = (seconds, self._told, entry, member)
        known = self._scene.following.get(edge)
        if known is None:
            kept, scene = self._discover(seconds / GRID_PER_SECOND, play, member, instant)
            if scene.frozen is not None or not begins:
                self._scene.remember(edge, kept, scene)
        else:
            kept, scene = known
            self._ensemble = None
        self._keep(kept)
        if begins:
            self.plays.append(play)
        if scene.frozen is not None:
            self._frozen = scene.frozen
            self._entries = []
        else:
            self._entries.append((seconds / GRID_PER_SECOND, self._told, self.plays.index(play), member))
        self._scene, self._start, self._told = scene, instant, 0

    def _opening(self, play: Play, instant: float) -> Hashable:
        """What a collective that begins adds to the state."""
        assert self._scene is not None
        known = play.group in self._scene.groups
        windows = None if known else window_states(self._network, play.group, instant)
        return play.schedule, play.hosts, play.group, self._conditions(play), windows

    def _discover(
        self, seconds: float, play: Play, member: int, instant: float
    ) -> tuple[tuple[int, ...], Scene]:
        """A scene that has not been there before; or has, but not after this one."""
        ensemble = self._ensemble_at(seconds)
        kept = ensemble.prune()
        begins = play not in self.plays
        if begins:
            place = ensemble.open(play.schedule, play.hosts, play.group, self._network, instant)
        else:
            place = kept.index(self.plays.index(play))
        ensemble.enter(place, member)
        new = Scene(ensemble.groups)
        scene = self._rehearsals.beginning(ensemble, self._conditions(play)) if begins else new
        self._began, self._given = ensemble.now, 0
        if scene.known_until:
            self._ensemble = None  # what follows is known
        return kept, scene

    def _ensemble_at(self, seconds: float) -> Ensemble:
        """The ensemble so long after the scene began, with no cues given but those that are told."""
        if self._ensemble is None:
            self._ensemble = self._rebuilt()
        self._ensemble.advance(self._began + seconds, self._told - self._given)
        self._given = self._told
        return self._ensemble

    def _rebuilt(self) -> Ensemble:
        """The ensemble as the scene began."""
        self._began, self._given = 0.0, 0
        if self._frozen is None:
            return ensemble_alone(self._network, self.plays[0]) if self.plays else Ensemble(self._network)
        ensemble = self._frozen.copied()
        for seconds, num_cues, place, member in self._entries:
            ensemble.advance(self._began + seconds, num_cues)
            ensemble.prune()
            ensemble.enter(place, member)
            self._began = ensemble.now
        return ensemble

    def _keep(self, kept: tuple[int, ...]) -> None:
        """Go on with the collectives of these places; the others are over."""
        if len(kept) < len(self.plays):
            for place, play in enumerate(self.plays):
                if place not in kept:
                    self._credit(play)
            self.plays = [self.plays[place] for place in kept]

    def _credit(self, play: Play) -> None:
        for src, dst, num_bytes in play.schedule.pair_bytes:
            credit(self._network, play.hosts[src], play.hosts[dst], num_bytes)

    # -- the clock -------------------------------------------------------------------------------------------------

    def _plan(self, instant: float) -> None:
        """See to it that what comes next is looked for at an instant."""
        if instant == self._due:
            return
        self._turn += 1
        self._due = instant
        call_at(self._network.env, instant, partial(self._look, self._turn), _LAST)

    def _look(self, turn: int) -> None:
        """Tell who is through by now, and come back when the next one is."""
        scene, now = self._scene, max(self._network.env.now, self._due)
        assert scene is not None
        self._due = math.nan
        while turn == self._turn:
            is_cue = self._told < len(scene.cues)
            instant = self._start + (scene.cues[self._told][0] if is_cue else scene.known_until)
            if instant > now:
                if instant < math.inf:
                    self._plan(instant)
                return
            if is_cue:
                self._tell(scene)
                continue
            self._find_out(scene)
            if scene.is_over and self._told == len(scene.cues):
                self._finish(scene)

    def _tell(self, scene: Scene) -> None:
        _, done = scene.cues[self._told]
        self._told += 1
        through = [(self.plays[place], member) for place, member in done]
        if scene.is_over and self._told == len(scene.cues):
            self._finish(scene)
        for play, member in through:
            play.tell(member)

    def _finish(self, scene: Scene) -> None:
        """All are through: leave bytes and connections on the network as if all had been there."""
        self._turn += 1
        self._keep(())
        for group, windows in scene.windows.items():
            put_windows(self._network, group, windows, self._start)
        self._on_over(self)

    def _find_out(self, scene: Scene) -> None:
        """Go on from where a scene is known."""
        ensemble = self._ensemble_at(0.0)
        if ensemble.next_instant - self._began <= scene.known_until:
            done = ensemble.step()
            if done:
                scene.cues.append((ensemble.now - self._began, done))
                self._given += 1
        scene.known_until = ensemble.next_instant - self._began
        if ensemble.is_over:
            scene.is_over, scene.known_until = True, math.inf
            scene.windows = ensemble.windows(self._began)
