"""A site's communicator: rounds over real sockets, among the sites that are there."""

from __future__ import annotations

import contextlib
import datetime
import hmac
import math
import threading
import time
from collections import deque
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from exogym_core.communicator.elastic.contract import ElasticCommunicator
from exogym_core.communicator.elastic.council import Council
from exogym_core.communicator.elastic.cutting import OpenedSockets
from exogym_core.communicator.elastic.link import SiteLink
from exogym_core.communicator.elastic.member import SiteRankCommunicator, site_link
from exogym_core.communicator.elastic.moving import moved
from exogym_core.communicator.elastic.pair_tests import PairTests
from exogym_core.communicator.elastic.store import LinkStore
from exogym_core.communicator.gloo.calls import GlooRank, GroupCalls
from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.communicator.gloo.rendezvous import ConnectionLostError, ProcessGroups, Rendezvous
from exogym_core.communicator.gloo.vigil import in_thread
from exogym_core.communicator.handle import Traffic
from exogym_core.meeting_place import MeetingPlace, processes_of_site
from exogym_core.plain import packed, unpacked
from netsim.files.errors import DeadlockError, InputError
from netsim.files.secret import shared_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from exogym_core.communicator.base import Communicator
    from netsim.files.signed import Place

__all__ = ["SiteCommunicator"]

T = TypeVar("T")

_CONNECTING_SECONDS = 60.0  # until all members of a group have connected to each other, on a busy machine too
_BROKEN = (ConnectionLostError, DeadlockError)
_DOWNLOAD_SECONDS = 20.0  # until two sites have connected to each other
_NOTHING = -2  # the number of no state


class _Hurried:
    """One of torch's process groups, whose calls give up when an attempt's time is over."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.deadline = math.inf

    def __getattr__(self, name: str) -> Any:
        if name != "shutdown" and self.deadline < math.inf:
            left = max(self.deadline - time.monotonic(), 0.01)
            self._group._set_default_timeout(datetime.timedelta(seconds=left))
        return getattr(self._group, name)


class SiteCommunicator(ElasticCommunicator):
    """What connects a site to the others, who come and go: its rank is the number of the site.

    There are no collectives of all sites, as nobody knows who will be there: `among_present` does what is to be done
    together. torch's process groups carry it, and are made anew when members change.

    Use it as a context manager: a site that leaves by an exception is lost to the others, else it stays until
    nobody needs what it has.

    Where a site has several processes each has one, and all of them make the same calls: the first asks the rendezvous
    for all, and what is done between sites each does with the processes in its place (`SiteRankCommunicator` is what
    connects such a process to all others).

    Args:
        link: to the rendezvous; its lane is this process's place in the site.
        secret: known to the run's processes; members of groups test each other with it.
        on_mark: receives what is marked.
        processes: connects the site's processes; None: this one is the site.
    """

    def __init__(
        self,
        link: SiteLink,
        secret: bytes,
        on_mark: Callable[[Mapping[str, Any]], None] = lambda row: None,
        processes: GlooCommunicator | None = None,
    ) -> None:
        assert link.site is not None
        self._link, self._secret = link, secret
        self._council = Council(link, processes)
        link.on_push = self._pushed
        alone = Rendezvous(link.site, link.num_sites, time_option="averaging_timeout")
        traffic = Traffic() if processes is None else processes.traffic
        state = GlooRank(alone, on_mark, traffic=traffic)
        nobody = ProcessGroups(None, None, None)
        super().__init__(state, GroupCalls(state, nobody, range(link.num_sites), link.site), link.site)
        self._group: tuple[str, GlooCommunicator | None, list[_Hurried], GroupCalls | None] = (
            "",
            None,
            [],
            None,
        )
        self._opened: dict[str, _Opened] = {}  # groups that are being made, or there
        self._dissolved = deque[str](maxlen=100)  # groups that are no more
        self._before_meeting: Callable[[], None] = lambda: None
        self._num_meetings = 0
        self._patience_seconds = 0.0
        self._published: tuple[int, list[Tensor]] | None = None
        self._lock = threading.Condition()
        self._store = LinkStore(link, _CONNECTING_SECONDS)
        self._pair_tests = PairTests(link.address, secret)
        if self._pair_tests.place is not None:
            link.remember(tests_at=self._pair_tests.place)
            link.tell("tests_at", place=self._pair_tests.place)
        self._set_clock()

    @classmethod
    def from_environment(  # type: ignore[override]
        cls,
        *,
        run: str = "",
        facts: Mapping[str, str] | None = None,
        resumed: bool = False,
        past_step: int = 0,
        on_mark: Callable[[Mapping[str, Any]], None] = lambda row: None,
        patience_seconds: float = 600.0,
        processes: GlooCommunicator | None = None,
    ) -> ElasticCommunicator:
        """That of the site which NETGYM_RENDEZVOUS and NETGYM_SITE tell of.

        Where torchrun has started several processes for the site, it connects this one to all processes of all
        sites, and each must make it.

        Args:
            run: what distinguishes this run from others at the same rendezvous, besides NETGYM_RUN.
            facts: what is trained, by name: tells people in what two runs differ.
            resumed: this process has a state to go on from, though all others may be through with the run.
            past_step: of the checkpoint from which it goes on.
            on_mark: receives what is marked.
            patience_seconds: how long the rendezvous may be away.
            processes: connects the site's processes, where that is done already.

        Raises:
            InputError: a variable is missing or wrong, the secrets differ, or the rendezvous has no place for it.
            RankError: there is no rendezvous for `patience_seconds`.
        """
        place, secret = MeetingPlace.from_environment(), shared_secret()
        name = " ".join(filter(None, [place.run, run]))

        def link(site: int | None, lane: int = 0) -> SiteLink:
            about: Any = {
                "run": name,
                "own_name": place.run,
                "facts": facts,
                "resumed": resumed,
                "past_step": past_step,
                "patience_seconds": patience_seconds,
            }
            return SiteLink(place.address, secret, site, lane=lane, **about)

        if processes is None and processes_of_site() > 1:
            processes = GlooCommunicator.from_environment()
        if processes is None or processes.world_size == 1:
            return cls(link(place.site), secret, on_mark)
        inside = processes
        found = site_link(link, place.site, inside, patience_seconds)
        return SiteRankCommunicator(cls(found, secret, on_mark, inside), inside)

    def __enter__(self) -> Self:
        return self

    @property
    def link(self) -> SiteLink:
        return self._link

    def before_meeting(self, call: Callable[[], None]) -> None:
        self._before_meeting = call

    # --- who comes in time ----------------------------------------------------------------------------------

    def among_present(
        self,
        work: Callable[[Communicator, list[float]], T],
        seconds: float,
        averaging_seconds: float = math.inf,
        weight: float = 1.0,
        number: int | None = None,
        awaited: Sequence[int] | None = None,
    ) -> tuple[list[int], T | None]:
        self._check_present(seconds, averaging_seconds, weight)
        self._check_on_clock("among_present")
        self._before_meeting()
        self._patience_seconds = seconds
        number = self._num_meetings if number is None else number
        self._num_meetings = number + 1
        wanted = None if awaited is None else list(awaited)
        told = self._council.ask(
            "join",
            number=number,
            seconds=seconds,
            averaging_seconds=averaging_seconds,
            weight=weight,
            awaited=wanted,
        )
        weights = dict(told["present"])
        members = sorted(weights)
        while self.rank in members:
            result, is_through = self._attempt(told, members, [weights[site] for site in members], work)
            are_through = all(self._council.told(is_through))
            told = self._council.ask(
                "confirm",
                number=number,
                attempt=told["attempt"],
                group=told["group"],
                members=members,
                seconds=averaging_seconds,
                is_through=are_through,
            )
            members = sorted(told["left"])
            if "attempt" not in told and self.rank in members:
                self._set_clock()
                return members, result
        return members, None

    def _attempt(
        self,
        told: Mapping[str, Any],
        members: list[int],
        weights: list[float],
        work: Callable[[Communicator, list[float]], T],
    ) -> tuple[T | None, bool]:
        """What `work` returned, and whether this site is through with it."""
        try:
            peers = self._peers(told["group"], members, told["seconds"])
            return work(peers, weights), True
        except _BROKEN as error:
            self._link.tell("trouble", line=str(error).partition("\n")[0])
            self._leave_group()
            return None, False

    def _peers(self, group: str, members: list[int], seconds: float) -> GlooCommunicator:
        """The communicator of this group; the one that there is where members have not changed."""
        known, peers, hurried, _ = self._group
        deadline = time.monotonic() + seconds
        if known != group or peers is None:
            self._leave_group()
            groups = self._connected_unless_dissolved(group, members, min(seconds, _CONNECTING_SECONDS))
            hurried = [] if groups.control is None else [_Hurried(groups.control)]
            if hurried:
                groups = ProcessGroups(hurried[0], hurried[0], groups.store)
            calls = GroupCalls(self._state, groups, members, members.index(self.rank))
            peers = GlooCommunicator(self._state, calls, members.index(self.rank))
            self._group = (group, peers, hurried, calls)
        self._state.rendezvous.timeout_seconds = seconds
        for each in hurried:
            each.deadline = deadline
        return peers

    def _connected_unless_dissolved(self, group: str, members: list[int], seconds: float) -> ProcessGroups:
        """As `_connected`, for no longer than the rendezvous keeps this group: gloo itself cannot be called back."""
        opened = self._opened[group] = _Opened(group)
        if group in self._dissolved:
            opened.dissolve()
        connecting = in_thread(partial(self._connected, group, members, seconds))
        connecting.add_done_callback(partial(_hand_over, opened.outcome))
        try:
            return opened.outcome.result(seconds)
        except TimeoutError:
            opened.give_up()
            told = f"rank {self.rank} connects to {members}: not through in {seconds:g} s"
            raise DeadlockError(told) from None
        finally:
            opened.sockets.stop()
            if not opened.outcome.done() or opened.outcome.exception() is not None:
                del self._opened[group]

    def _connected(self, group: str, members: Sequence[int], seconds: float) -> ProcessGroups:
        """Process groups of these sites.

        Raises:
            ConnectionLostError, DeadlockError: not all of them could be reached in time.
        """
        store = PrefixStore(f"{group}/{self._link.lane}", self._store)
        secret = hmac.digest(self._secret, group.encode(), "sha256")
        among = Rendezvous.among(store, self.rank, self.world_size, seconds, secret, self._link.address)
        try:
            return among.subgroup(members)
        except _BROKEN:
            raise
        except RuntimeError as error:  # also a stranger in a member's place
            raise ConnectionLostError(str(error).partition("\n")[0], self.rank) from None

    def _leave_group(self) -> None:
        """Close the connections of the last group, so that its other members do not wait for this one."""
        group, _, _, calls = self._group
        self._opened.pop(group, None)
        self._group = ("", None, [], None)
        if calls is not None:
            if calls in self._state.groups:
                self._state.groups.remove(calls)
            calls.close()
        self._state.in_flight.clear()
        self._state.futures.clear()

    # --- states ---------------------------------------------------------------------------------------------

    def publish(self, number: int, tensors: Sequence[Tensor]) -> None:
        with self._lock:
            self._published = (number, [tensor.detach().cpu().clone() for tensor in tensors])
            self._lock.notify_all()
        self._link.remember(newest=number, has_begun=True)
        self._council.tell("publish", number=number)

    def fetch(self, at_least: int) -> tuple[int, list[Tensor]] | None:
        self._check_on_clock("fetch")
        without: list[int] = []
        while True:
            told = self._council.ask("fetch", at_least=at_least, without=without)
            if told["number"] is None:
                return self._published  # all others are gone: the run goes on from what this site has
            try:
                number, tensors = self._download(told["group"], int(told["holder"]))
            except _BROKEN:
                number, tensors = _NOTHING, []
            numbers = set(self._council.told(number))
            if _NOTHING in numbers:
                without.append(int(told["holder"]))
            if numbers != {number} or number == _NOTHING:  # some of a state, and some of the one after it
                continue
            self._link.remember(has_begun=True)
            self._council.tell("fetched", number=number)
            self._set_clock()
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            self.traffic.bytes_sent += num_bytes
            self.traffic.payload_bytes += num_bytes
            return number, tensors

    def _download(self, group: str, holder: int) -> tuple[int, list[Tensor]]:
        groups = self._connected_unless_dissolved(group, sorted([holder, self.rank]), _DOWNLOAD_SECONDS)
        try:
            payload = moved(groups, holder, self.rank, None)
        finally:
            del self._opened[group]
            groups.control.shutdown()
        number, tensors = unpacked(payload)
        return number, tensors

    @property
    def _newest(self) -> int:
        return _NOTHING if self._published is None else self._published[0]

    def _pushed(self, message: Mapping[str, Any]) -> None:
        if message["push"] == "dissolved":
            self._dissolved.append(message["group"])
            if message["group"] in self._opened:
                self._opened[message["group"]].dissolve()  # this process may wait in it for one that hangs
        if message["push"] == "new life":  # nobody finds members there any more for groups of the one before
            for opened in list(self._opened.values()):
                if not opened.group.startswith(message["name"]):
                    opened.give_up()
        if message["push"] == "serve":
            _in_background(self._serve, message)
        if message["push"] == "test":
            for peer, places in message["peers"].items():
                place = places.get(str(self._link.lane))
                if place is not None:
                    about = (message["group"], int(peer), tuple(place), float(message["seconds"]))
                    _in_background(self._test, *about)

    def _test(self, group: str, peer: int, place: Place, seconds: float) -> None:
        """Find out whether this process reaches its like of another site."""
        trial = in_thread(partial(self._pair_tests.reaches, place, seconds))
        is_reached = False
        with contextlib.suppress(TimeoutError):
            is_reached = trial.result(seconds)
        self._link.tell("tested", group=group, peer=peer, is_reached=is_reached)

    def _serve(self, message: Mapping[str, Any]) -> None:
        """Send what was published last to a site; if it fails, that one asks again."""
        with contextlib.suppress(*_BROKEN):
            groups = self._connected(
                message["group"], sorted([self.rank, int(message["to"])]), _DOWNLOAD_SECONDS
            )
            try:
                with self._lock:  # this process may not be as far yet as the first one of its site
                    self._lock.wait_for(lambda: self._newest >= int(message["number"]), _CONNECTING_SECONDS)
                    assert self._published is not None
                    payload = packed(self._published)
                moved(groups, self.rank, int(message["to"]), payload)
            finally:
                groups.control.shutdown()

    # --- the clock and the end ------------------------------------------------------------------------------

    def _set_clock(self) -> None:
        """All sites count seconds from when the run began."""
        elapsed = self._link.ask("clock", elapsed=None)["elapsed"]
        self._has_begun = elapsed is not None
        if elapsed is not None:
            self._state.start_seconds = time.monotonic() - float(elapsed)
            self._link.remember(elapsed=elapsed)

    def arrive_at(self, seconds: float) -> None:
        while not self._has_begun or self.now() < seconds:
            time.sleep(0.05 if not self._has_begun else min(max(seconds - self.now(), 0.01), 0.2))
            if not self._has_begun:
                self._set_clock()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved)
        self._link.ask("clock", elapsed=saved.get("seconds", 0.0))
        self._set_clock()

    def finish(self) -> None:
        """This site is through: stay while somebody is on the way who needs its state."""
        self._link.send_rows()
        self._council.ask("end", seconds=self._patience_seconds, pulse=self._link.pulse)

    def close(self) -> None:
        """Leave; no communicator of this site works afterwards."""
        self._leave_group()
        super().close()
        self._pair_tests.close()
        self._link.close()

    def _check_on_clock(self, call: str) -> None:
        if self._state.off_clock:
            raise InputError(f"rank {self.rank}, {call}: it needs the clock; call it on the clock")


def _in_background(call: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=call, args=arguments, name="state", daemon=True).start()


class _Opened:
    """A group that is being made, or there."""

    def __init__(self, group: str) -> None:
        self.group, self.sockets, self.outcome = group, OpenedSockets(), Future[ProcessGroups]()

    def give_up(self) -> None:
        """Wait no longer for its members to connect."""
        with contextlib.suppress(InvalidStateError):
            self.outcome.set_exception(
                ConnectionLostError(f"the rendezvous keeps group {self.group} no longer", 0)
            )

    def dissolve(self) -> None:
        """End what waits in it."""
        self.give_up()
        self.sockets.cut()


def _hand_over(outcome: Future[ProcessGroups], done: Future[ProcessGroups]) -> None:
    """Give what was connected to who waits for it; it is closed where nobody does so any more."""
    error = done.exception()
    try:
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(done.result())
    except InvalidStateError:
        if error is None and done.result().control is not None:
            done.result().control.shutdown()
