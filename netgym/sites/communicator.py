"""Communicators between sites that come and go: rounds over real sockets, among the sites present."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeVar

from exogym_core.communicator.base import FIXED, Traffic
from exogym_core.communicator.gloo.calls import GlooRank, GroupCalls
from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.communicator.gloo.deadlock_detector import in_thread
from exogym_core.communicator.gloo.rendezvous import (
    ProcessGroups,
    Rendezvous,
)
from exogym_core.meeting_place import MeetingPlace, processes_of_site
from exogym_core.plain import packed, unpacked
from exogym_core.results.disk import RefusedError
from netgym.sites.groups import BROKEN, CONNECTING_SECONDS, HurriedGroup, SiteGroups, moved
from netgym.sites.link import SiteLeader, SiteLink
from netgym.sites.pairs import PairTests
from netsim.errors import InputError
from netsim.files.signed import shared_secret

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

    from exogym_core.communicator.base import CollectiveCall, Communicator, Delivery
    from exogym_core.communicator.deadlines import Deadline
    from netsim.files.signed import PeerAddress

__all__ = [
    "ElasticCommunicator",
    "SiteCommunicator",
    "SiteRankCommunicator",
    "site_link",
]


def _refused(call: str) -> Any:
    """A method that raises an error: its call would wait for all sites."""
    return lambda self, *arguments, **options: self._refuse(call)


class ElasticCommunicator(GlooCommunicator):
    """Connects sites that come and go, or their processes: no call waits for all of them.

    Attributes:
        link: this process's connection to the rendezvous.
    """

    can_leave_behind = True
    members_change = True
    link: SiteLink

    def before_meeting(self, call: Callable[[], None]) -> None:
        """Register `call` for all processes of the site before each meeting with other sites."""
        raise NotImplementedError

    def _collective(self, call: CollectiveCall, deliver: Delivery[T], async_op: bool) -> NoReturn:
        self._refuse(call.name)

    isend, irecv, recv = _refused("send"), _refused("recv"), _refused("recv")
    put, take, group = _refused("put"), _refused("take"), _refused("group")

    def _refuse(self, call: str) -> NoReturn:
        raise InputError(
            f"rank {self.rank}, {call}: sites at a rendezvous come and go, so a call that waits for all of them may "
            "wait for ever; use a strategy with time-outs, such as DiLoCo with averaging_timeout"
        )


T = TypeVar("T")

_DOWNLOAD_SECONDS = 8.0  # until two sites have connected: enough for three lost SYNs; then another try
_NOTHING = -2  # the number of no state


class _Group(NamedTuple):
    """The connected members of an attempt."""

    name: str
    peers: GlooCommunicator
    hurried: HurriedGroup | None  # None: this site is alone
    calls: GroupCalls


class SiteCommunicator(ElasticCommunicator):
    """Connects a site to the others, which come and go: its rank is the number of the site.

    There are no collectives of all sites: `among_present` does the work of the sites that are present. torch's process
    groups carry it, and are made again when members change.

    Use it as a context manager: a site that leaves by an exception is lost to the others, else it stays until
    no site needs its state.

    Where a site has several processes each has one, and all of them make the same calls: the first asks the rendezvous
    for all, and what is done between sites each does with the processes in its place (`SiteRankCommunicator` is what
    connects such a process to all others).

    Args:
        link: to the rendezvous; its local rank is this process's in the site.
        secret: known to the run's processes; members of groups test each other with it.
        on_mark: called with rows that are marked.
        processes: connects the site's processes; None: this one is the site.
    """

    def __init__(
        self,
        link: SiteLink,
        secret: bytes,
        on_mark: Callable[[Any], None] = lambda row: None,
        processes: GlooCommunicator | None = None,
    ) -> None:
        assert link.identity.site is not None
        self.link = link
        self._leader = SiteLeader(link, processes)
        link.on_push = self._pushed
        alone = Rendezvous(link.identity.site, link.num_sites, time_option="averaging_timeout")
        traffic = Traffic() if processes is None else processes.traffic
        state = GlooRank(alone, on_mark, traffic=traffic)
        calls = GroupCalls(state, ProcessGroups(), range(link.num_sites), link.identity.site)
        super().__init__(state, calls, link.identity.site)
        self._group: _Group | None = None  # the last one
        self._groups = SiteGroups(link, secret, alone)
        self._before_meeting: Callable[[], None] = lambda: None
        self._num_meetings = 0
        self._patience_seconds = 0.0
        self._published: tuple[int, list[Tensor]] | None = None
        self._lock = threading.Condition()
        self._pair_tests = PairTests(link.address, secret)
        if self._pair_tests.place is not None:
            link.remember(tests_at=self._pair_tests.place)
            link.send("tests_at", place=self._pair_tests.place)
        self._set_clock()

    @classmethod
    def from_environment(  # type: ignore[override]
        cls,
        *,
        run: str = "",
        facts: Mapping[str, str] | None = None,
        resumed: bool = False,
        past_step: int = 0,
        on_mark: Callable[[Any], None] = lambda row: None,
        patience_seconds: float = 600.0,
        processes: GlooCommunicator | None = None,
    ) -> ElasticCommunicator:
        """Communicator of the site that NETGYM_RENDEZVOUS and NETGYM_SITE describe.

        Where torchrun has started several processes for the site, it connects this one to all processes of all
        sites, and each must make it.

        Args:
            run: name of the run at the rendezvous, besides NETGYM_RUN.
            facts: settings of the training, by name: two runs are compared by them.
            resumed: this process resumes from a state, even where all others have finished the run.
            past_step: of the checkpoint from which it resumes.
            on_mark: called with rows that are marked.
            patience_seconds: how long the rendezvous may be away.
            processes: connects the site's processes, where that is done already.

        Raises:
            InputError: a variable is missing or wrong, the secrets differ, or the rendezvous has no place for it.
            RankError: there is no rendezvous for `patience_seconds`.
        """
        place, secret = MeetingPlace.from_environment(), shared_secret()
        name = " ".join(filter(None, [place.run, run]))
        link = partial(
            SiteLink,
            place.address,
            secret,
            run=name,
            own_name=place.run,
            facts=facts,
            resumed=resumed,
            past_step=past_step,
            patience_seconds=patience_seconds,
        )
        if processes is None and processes_of_site() > 1:
            processes = GlooCommunicator.from_environment()
        if processes is None or processes.world_size == 1:
            return cls(link(place.site), secret, on_mark)
        found = site_link(link, place.site, processes, patience_seconds)
        return SiteRankCommunicator(cls(found, secret, on_mark, processes), processes)

    def __enter__(self) -> Self:
        return self

    def before_meeting(self, call: Callable[[], None]) -> None:
        self._before_meeting = call

    # --- rounds among the sites present ---------------------------------------------------------------------

    def among_present(
        self,
        work: Callable[[Communicator, list[float]], T],
        seconds: float,
        averaging_seconds: float = math.inf,
        weight: float = 1.0,
        number: int | None = None,
        awaited: Sequence[int] | None = None,
        deadline: Deadline = FIXED,
    ) -> tuple[list[int], T | None]:
        self._check_present(seconds, averaging_seconds, weight, deadline)
        self._check_on_clock("among_present")
        self._before_meeting()
        self._patience_seconds = seconds
        number = self._num_meetings if number is None else number
        self._num_meetings = number + 1
        wanted = None if awaited is None else list(awaited)
        answer = self._leader.ask(
            "join",
            number=number,
            seconds=seconds,
            averaging_seconds=averaging_seconds,
            weight=weight,
            awaited=wanted,
            deadline=list(deadline),
        )
        weights = dict(answer["present"])
        self.state.num_alive = answer.get("alive")
        members = sorted(weights)
        while self.rank in members:
            result, is_finished = self._attempt(answer, members, [weights[site] for site in members], work)
            are_finished = all(self._leader.gather(is_finished))
            answer = self._leader.ask(
                "confirm",
                number=number,
                attempt=answer["attempt"],
                group=answer["group"],
                members=members,
                seconds=averaging_seconds,
                is_finished=are_finished,
            )
            members = sorted(answer["left"])
            if "attempt" not in answer and self.rank in members:
                self._set_clock()
                return members, result
        return members, None

    def _attempt(
        self,
        answer: Mapping[str, Any],
        members: list[int],
        weights: list[float],
        work: Callable[[Communicator, list[float]], T],
    ) -> tuple[T | None, bool]:
        """The result of `work`, and True if this site has completed it."""
        try:
            peers = self._peers(answer["group"], members, answer["seconds"])
            return work(peers, weights), True
        except BROKEN as error:
            self.link.send("trouble", line=str(error).partition("\n")[0])
            self._leave_group()
            return None, False

    def _peers(self, group: str, members: list[int], seconds: float) -> GlooCommunicator:
        """Communicator of this group; reused where members have not changed."""
        deadline, made = time.monotonic() + seconds, self._group
        if made is None or made.name != group:
            self._leave_group()
            groups = self._groups.open(group, members, min(seconds, CONNECTING_SECONDS))
            hurried = None if groups.control is None else HurriedGroup(groups.control)
            if hurried is not None:
                groups = ProcessGroups(hurried, hurried, groups.store)
            calls = GroupCalls(self.state, groups, members, members.index(self.rank))
            peers = GlooCommunicator(self.state, calls, members.index(self.rank))
            made = self._group = _Group(group, peers, hurried, calls)
        self.state.rendezvous.timeout_seconds = seconds
        if made.hurried is not None:
            made.hurried.deadline = deadline
        return made.peers

    def _leave_group(self) -> None:
        """Close the connections of the last group, so that its other members do not wait for this one."""
        left, self._group = self._group, None
        if left is not None:
            self._groups.close(left.name)
            if left.calls in self.state.groups:
                self.state.groups.remove(left.calls)
            left.calls.close()
        self.state.in_flight.clear()
        self.state.futures.clear()

    # --- states ---------------------------------------------------------------------------------------------

    def publish(self, number: int, tensors: Sequence[Tensor]) -> None:
        with self._lock:
            self._published = (number, [tensor.detach().cpu().clone() for tensor in tensors])
            self._lock.notify_all()
        self.link.remember(newest=number, has_begun=True)
        self._leader.send("publish", number=number)

    def fetch(
        self, at_least: int, source: int | None = None, is_open: bool = False
    ) -> tuple[int, list[Tensor]] | None:
        self._check_on_clock("fetch")
        if source is not None:
            raise self._not_here("fetch from one source")
        without: list[int] = []
        while True:
            answer = self._leader.ask("fetch", at_least=at_least, without=without)
            if answer["number"] is None:
                return self._published  # all others are gone: the run continues from this site's state
            try:
                number, tensors = self._download(answer["group"], int(answer["holder"]))
            except BROKEN:
                number, tensors = _NOTHING, []
            numbers = set(self._leader.gather(number))
            if _NOTHING in numbers:
                without.append(int(answer["holder"]))
            if numbers != {number} or number == _NOTHING:  # parts of two consecutive states
                continue
            self.link.remember(has_begun=True)
            self._leader.send("fetched", number=number)
            self._set_clock()
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            self.state.traffic.bytes_sent += num_bytes
            self.state.traffic.payload_bytes += num_bytes
            return number, tensors

    def _download(self, group: str, holder: int) -> tuple[int, list[Tensor]]:
        groups = self._groups.open(group, sorted([holder, self.rank]), _DOWNLOAD_SECONDS)
        try:
            payload = moved(groups, holder, self.rank, None)
        finally:
            self._groups.close(group)
            groups.control.shutdown()
        number, tensors = unpacked(payload)
        return number, tensors

    @property
    def _newest(self) -> int:
        return _NOTHING if self._published is None else self._published[0]

    def _pushed(self, message: Mapping[str, Any]) -> None:
        if message["push"] == "dissolved":
            self._groups.dissolve(message["group"])
        if message["push"] == "new life":
            self._groups.give_up_before(message["name"])
        if message["push"] == "serve":
            _in_background(self._serve, message)
        if message["push"] == "test":
            for peer, places in message["peers"].items():
                place = places.get(str(self.link.identity.local_rank))
                if place is not None:
                    about = (message["group"], int(peer), tuple(place), float(message["seconds"]))
                    _in_background(self._test, *about)

    def _test(self, group: str, peer: int, place: PeerAddress, seconds: float) -> None:
        """Test whether this process reaches its peer at another site."""
        trial = in_thread(partial(self._pair_tests.reaches, place, seconds))
        is_reached = False
        with contextlib.suppress(TimeoutError):
            is_reached = trial.result(seconds)
        self.link.send("tested", group=group, peer=peer, is_reached=is_reached)

    def _serve(self, message: Mapping[str, Any]) -> None:
        """Send the last published state to a site, which asks again on failure."""
        with contextlib.suppress(*BROKEN):
            groups = self._groups.open(
                message["group"], sorted([self.rank, int(message["to"])]), _DOWNLOAD_SECONDS
            )
            try:
                with self._lock:  # this process may not be as far yet as the first one of its site
                    self._lock.wait_for(lambda: self._newest >= int(message["number"]), CONNECTING_SECONDS)
                    assert self._published is not None
                    payload = packed(self._published)
                moved(groups, self.rank, int(message["to"]), payload)
            finally:
                self._groups.close(message["group"])
                groups.control.shutdown()

    # --- the clock and the end ------------------------------------------------------------------------------

    def _set_clock(self) -> None:
        """Seconds since the run began, the same origin at all sites."""
        elapsed = self.link.ask("clock", elapsed=None)["elapsed"]
        self._has_begun = elapsed is not None
        if elapsed is not None:
            self.state.start_seconds = time.monotonic() - float(elapsed)
            self.link.remember(elapsed=elapsed)

    def arrive_at(self, seconds: float) -> None:
        while not self._has_begun or self.now() < seconds:
            time.sleep(0.05 if not self._has_begun else min(max(seconds - self.now(), 0.01), 0.2))
            if not self._has_begun:
                self._set_clock()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved)
        self.link.ask("clock", elapsed=saved.get("seconds", 0.0))
        self._set_clock()

    def finish(self) -> None:
        """Report the end of this site, and stay while another site needs its state."""
        self.link.send_rows()
        self._leader.ask("end", seconds=self._patience_seconds, pulse=self.link.rows.pulse)

    def close(self) -> None:
        """Leave; no communicator of this site works afterwards."""
        self._leave_group()
        super().close()
        self._pair_tests.close()
        self.link.close()

    def _check_on_clock(self, call: str) -> None:
        if self.state.off_clock:
            raise InputError(f"rank {self.rank}, {call}: it needs the clock; call it on the clock")


def _in_background(call: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=call, args=arguments, name="state", daemon=True).start()


class SiteRankCommunicator(ElasticCommunicator):
    """Connects all processes of all sites; sites are consecutive ranks, equally many each.

    There are groups of processes of one site, and of those in the same place of every site, over which sites meet
    (`exogym_core.communicator:SiteCommunicator`): with `ranks_per_worker` a strategy asks for both.

    Args:
        between: to the processes in this one's place in the other sites.
        inside: the site's processes.

    Attributes:
        between, inside: as given.
    """

    between: ElasticCommunicator
    inside: GlooCommunicator

    def __init__(self, between: ElasticCommunicator, inside: GlooCommunicator) -> None:
        self.between, self.inside = between, inside
        self._first = between.rank * inside.world_size
        self.link, state, rank = between.link, between.state, self._first + inside.rank
        everyone = range(between.world_size * inside.world_size)
        super().__init__(state, GroupCalls(state, ProcessGroups(), everyone, rank), rank)

    def group(self, ranks: Sequence[int], reuse: bool = False, number: int | None = None) -> GlooCommunicator:
        members = [self._check_rank("group", "ranks", rank) for rank in ranks]
        own = range(self._first, self._first + self.inside.world_size)
        if set(members) <= set(own):
            return self.inside.group([rank - self._first for rank in members], reuse, number)
        if members == list(range(self.inside.rank, self.world_size, self.inside.world_size)):
            return self.between
        raise InputError(
            f"rank {self.rank}, group: {members} are of several sites, which come and go, and a site has "
            f"{self.inside.world_size} processes: make ranks_per_worker equal to that"
        )

    def before_meeting(self, call: Callable[[], None]) -> None:
        self.between.before_meeting(call)

    def arrive_at(self, seconds: float) -> None:
        self.between.arrive_at(seconds)

    def compare_places(self, compare: bool) -> None:
        super().compare_places(compare)
        self.inside.compare_places(compare)

    @contextmanager
    def off_clock(self) -> Iterator[None]:
        with self.inside.off_clock(), super().off_clock():
            yield

    def state_dict(self) -> dict[str, Any]:
        return {**self.inside.state_dict(), **super().state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.between.load_state_dict(saved)

    def finish(self) -> None:
        """Report the end of this site; its processes stay while another site needs their state."""
        self.between.finish()
        self.inside.finish()

    def close(self) -> None:
        """Leave the other sites, and this one."""
        self.between.close()
        super().close()
        self.inside.close()


def site_link(
    link: Callable[..., SiteLink],
    site: int | None,
    inside: GlooCommunicator,
    patience_seconds: float,
) -> SiteLink:
    """A link for each process of a site: the first one determines the site, then the others connect.

    Args:
        link: makes it, for a site (None: the rendezvous says which) and the place of a process in it.
        site: as the environment says.
        inside: connects the site's processes.
        patience_seconds: how long the rendezvous may not be there yet.

    Raises:
        RefusedError: the rendezvous has no place for the site; raised on all its processes, with their ranks.
        InputError: the secrets differ; raised on all its processes.
    """
    first, failure = None, None
    if inside.rank == 0:
        try:
            first = link(site)
        except InputError as error:
            failure = error
    patient = inside.patient(patience_seconds + 60.0)
    with patient.off_clock():
        found = None if first is None else first.identity.site
        failed = None if failure is None else (isinstance(failure, RefusedError), str(failure))
        known, failed = patient.broadcast_object((found, failed))
    if failed is not None:
        is_refused, text = failed
        raise failure or (RefusedError if is_refused else InputError)(
            f"rank {inside.rank} of this site: {text}"
        )
    return first if first is not None else link(known, local_rank=inside.rank)
