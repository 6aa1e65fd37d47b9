"""Sites that meet at a rendezvous over real sockets: each a thread here, with connections of its own."""

from __future__ import annotations

import queue
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from worlds import star_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.meeting_place import allow_many_files
from exogym_core.run.optimizer import DiLoCoOptimizer
from netgym.sites.communicator import SiteCommunicator, moved
from netgym.sites.link import SiteLink
from netgym.sites.membership import START
from netgym.sites.rounds import PendingRounds
from netgym.sites.service import RendezvousService
from netsim.errors import InputError, RankError

SECRET = b"known to these tests"
H, ROUNDS = 5, 6
SGD = partial(torch.optim.SGD, lr=0.1)
Told = dict[int, tuple[list[int], list[float]]]
ALL, OTHERS = [0, 1, 2], [0, 1]


@contextmanager
def meeting(num_sites: int = 3, **options: Any) -> Iterator[RendezvousService]:
    with RendezvousService(num_sites, ("127.0.0.1", 0), SECRET, **options) as found:
        yield found


def site(at: RendezvousService, number: int | None, secret: bytes = SECRET) -> SiteCommunicator:
    return SiteCommunicator(SiteLink(at.address, secret, number, patience_seconds=20), secret)


def together(*bodies: Callable[[], Any]) -> list[Any]:
    """What each returns or raises, all at the same time."""
    results: list[Any] = [None] * len(bodies)

    def run(place: int) -> None:
        try:
            results[place] = bodies[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


# --- the same absences, simulated and for real -------------------------------------------------------------


class KilledError(Exception):
    """This process is no more."""


class Gates:
    """What happens when, by rounds and not by time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._rounds: dict[object, int] = {}

    def tell(self, who: object, number: int) -> None:
        with self._changed:
            self._rounds[who] = number
            self._changed.notify_all()

    def reached(self, who: object, number: int) -> bool:
        return self._rounds.get(who, 0) >= number

    def until(self, who: object, number: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._rounds.get(who, 0) >= number, 60)


def train(
    comm: Communicator,
    target: float,
    before_step: Callable[[int], Any] = lambda step: None,
    after_round: Callable[[int], None] = lambda number: None,
    inner: Callable[[Any], torch.optim.Optimizer] = SGD,
    **options: Any,
) -> Told:
    """Every rank goes towards its target; after each round who was there, and what came of it."""
    weights = [nn.Parameter(torch.zeros(size)) for size in (3000, 7, 40)]
    optimizer = DiLoCoOptimizer(
        batch_size=1,
        num_inner_steps=H,
        inner_optimizer=inner,
        params=weights,
        communicator=comm,
        **options,
    )
    after_round(optimizer.local_epoch)
    result: Told = {}
    while optimizer.local_epoch < ROUNDS:
        before_step(optimizer.local_step)
        for place, weight in enumerate(weights):
            weight.grad = (weight.detach() - target * (1 + place)) * torch.linspace(1, 2, weight.numel())
        optimizer.step()
        if optimizer.local_step % H == 0:
            values = torch.cat([weight.detach()[:: len(weight) // 7] for weight in weights])
            result[optimizer.local_epoch] = (optimizer.averaged_ranks, values.tolist())
            after_round(optimizer.local_epoch)
    return result


def checked(found: Sequence[Any]) -> list[Told]:
    for each in found:
        if isinstance(each, Exception):
            raise each
    return list(found)


def check_equal(real: Told, expected: Told) -> None:
    assert real.keys() == expected.keys()
    for number, (ranks, values) in real.items():
        assert ranks == expected[number][0]
        assert values == pytest.approx(expected[number][1], rel=1e-5, abs=1e-7)


def for_real(
    hold: Callable[[Gates, object, int], None], lives: Callable[[Gates, int], list[object]], patience: float
) -> list[Told]:
    """Three sites. `lives(gates, rank)` waits until a site comes and tells the names of its processes, one after the
    other; `hold(gates, name, step)` waits, or kills, before a process's step."""
    gates = Gates()
    options = {"averaging_timeout": 30, "timeout_waiting_for_peers": patience}
    with meeting(wait_seconds=patience) as at:

        def body(rank: int) -> dict[int, Any]:
            results: dict[int, Any] = {}
            for name in lives(gates, rank):
                try:
                    with site(at, rank) as comm:
                        results = train(
                            comm,
                            1.0 + rank,
                            lambda step, name=name: hold(gates, name, step),  # type: ignore[misc]
                            lambda number, name=name: gates.tell(name, number),  # type: ignore[misc]
                            join_at={2: 0} if name == "joining" else None,
                            **options,
                        )
                except KilledError:
                    gates.until(0, 3)
            return results

        found = together(*(lambda rank=rank: body(rank) for rank in range(3)))  # type: ignore[misc]
    return checked(found)


def simulated(
    *events: Any,
    slow: Callable[[int, int], float] = lambda rank, step: 0.0,
    home: str = "80 Mbit/s",
    **options: Any,
) -> list[Told]:
    rates = {"a": "80 Mbit/s", "b": "80 Mbit/s", "c": home}

    def body(comm: Communicator) -> dict[int, Any]:
        patience = {"averaging_timeout": 2, "timeout_waiting_for_peers": 3}

        def pass_time(step: int) -> None:
            comm.advance(1.0 + slow(comm.rank, step))

        return train(comm, 1.0 + comm.rank, pass_time, **{**patience, **options})

    return run_ranks(body, 3, star_form(rates, rates, events=list(events))).results


def check(found: list[Told], expected: list[Told], present: list[list[int]]) -> None:
    assert [found[0][number][0] for number in range(1, ROUNDS + 1)] == present
    for real, virtual in zip(found, expected, strict=True):
        check_equal(real, virtual)


def test_a_site_that_is_killed_and_comes_again_is_as_one_that_was_cut_off_in_simulation() -> None:
    """The same rounds, members and parameters; from its return on, on the one that was away too."""

    def hold(gates: Gates, name: object, step: int) -> None:
        if name == 2 and step == 2 * H + 2:
            raise KilledError
        if name in (0, 1) and step == 4 * H - 1:
            gates.until("again", 3)  # which is there from round 4 on, as in the simulation

    found = for_real(hold, lambda gates, rank: [2, "again"] if rank == 2 else [rank], patience=30)
    expected = simulated({"link": ["c", "switch"], "at": "12 s", "for": "7 s", "down": True})
    kept = {number: expected[2][number] for number in expected[2] if number > 3}
    check(found, [*expected[:2], kept], [ALL, ALL, OTHERS, ALL, ALL, ALL])


def test_a_site_that_joins_late_gets_what_the_others_have_as_in_simulation() -> None:
    def hold(gates: Gates, name: object, step: int) -> None:
        if name in (0, 1) and step == 3 * H - 1:
            gates.until("late", 2)

    def lives(gates: Gates, rank: int) -> list[object]:
        if rank == 2:
            gates.until(0, 2)
        return ["late"] if rank == 2 else [rank]

    # The others do not know of it, and begin when nobody else has come for so long.
    found = for_real(hold, lives, patience=1.5)
    check(found, simulated(join_at={2: "12 s"}), [OTHERS, OTHERS, ALL, ALL, ALL, ALL])


def test_a_site_that_is_late_loses_its_round_as_in_simulation() -> None:
    def hold(gates: Gates, name: object, step: int) -> None:
        if name == 2 and step == 2 * H - 1:
            gates.until(0, 2)
        if name in (0, 1) and step == 3 * H - 1:
            gates.until(2, 2)

    found = for_real(hold, lambda gates, rank: [rank], patience=1.5)
    expected = simulated(slow=lambda rank, step: 3.5 if (rank, step) == (2, 2 * H - 1) else 0.0)
    check(found, expected, [ALL, OTHERS, ALL, ALL, ALL, ALL])


def test_a_downloading_site_is_waited_for_as_in_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its download takes longer than the others' steps: it came too late for every round."""
    known: list[Gates] = []
    join, num_joined = PendingRounds.join, 0

    def joined(rounds: PendingRounds, number: int, question: int, asked: Any, now: float) -> None:
        nonlocal num_joined
        join(rounds, number, question, asked, now)
        num_joined += number != 2 and asked["number"] == 2
        known[0].tell("at the end of round 3", num_joined)

    def slowly(groups: Any, sender: int, receiver: int, payload: bytes | None, *more: Any) -> bytes:
        known[0].tell("downloads", 1)
        known[0].until("at the end of round 3", 2)
        return moved(groups, sender, receiver, payload, *more)

    monkeypatch.setattr(PendingRounds, "join", joined)
    monkeypatch.setattr("netgym.sites.communicator.moved", slowly)

    def hold(gates: Gates, name: object, step: int) -> None:
        if name in (0, 1) and step == 3 * H - 1:
            gates.until("downloads", 1)

    def lives(gates: Gates, rank: int) -> list[object]:
        known.append(gates)
        if rank == 2:
            gates.until(0, 2)
        return [rank]

    found = for_real(hold, lives, patience=1.5)
    # 24 kB at 6 kB/s: from 12 s to 16 s, and the others are through with their steps at 15 s.
    expected = simulated(join_at={2: "12 s"}, home="48 kbit/s", averaging_timeout=60)
    check(found, expected, [OTHERS, OTHERS, ALL, ALL, ALL, ALL])


def test_a_site_alone_goes_on_when_all_others_are_gone() -> None:
    with meeting() as at:

        def body(rank: int) -> Any:
            def hold(step: int) -> None:
                if rank < 2 and step == 7:
                    raise KilledError

            with site(at, rank) as comm:
                return train(comm, 1.0 + rank, hold, averaging_timeout=30, timeout_waiting_for_peers=30)

        found = together(*(lambda rank=rank: body(rank) for rank in range(3)))  # type: ignore[misc]
    assert [type(each) for each in found[:2]] == [KilledError, KilledError]
    assert [found[2][number][0] for number in range(1, ROUNDS + 1)] == [ALL, *[[2]] * 5]


# --- a rendezvous that is started again --------------------------------------------------------------------


def test_a_rendezvous_that_is_started_again_finds_its_sites_again() -> None:
    """The rounds go on where they were, with the same members, and nothing is begun anew."""
    first = RendezvousService(2, ("127.0.0.1", 0), SECRET).__enter__()
    second: list[RendezvousService] = []

    def body(rank: int) -> Any:
        def hold(step: int) -> None:
            if rank == 0 and step == 2 * H:
                first.__exit__()
                second.append(RendezvousService(2, first.address, SECRET).__enter__())

        with site(first, rank) as comm:
            return train(comm, 1.0 + rank, hold, averaging_timeout=30, timeout_waiting_for_peers=30)

    try:
        found = together(lambda: body(0), lambda: body(1))
    finally:
        for each in second:
            each.__exit__()
    assert [found[0][number][0] for number in range(1, ROUNDS + 1)] == [[0, 1]] * ROUNDS
    assert found[0] == found[1]


# --- who is refused -----------------------------------------------------------------------------------------


def test_a_rendezvous_that_stood_still_takes_no_site_for_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process, or a crowded machine: messages sent meanwhile have not been read yet, and are in time."""
    asked = {"number": START, "seconds": 1.0, "averaging_seconds": 9.0, "weight": 1.0, "awaited": None}
    host = [0.0]
    clock = SimpleNamespace(monotonic=lambda: host[0])
    monkeypatch.setattr("netgym.sites.service.time", clock)
    with meeting(num_sites=2) as at, ExitStack() as links:
        one, two = (SiteLink(at.address, SECRET, number) for number in range(2))
        links.callback(one.close)
        links.callback(two.close)
        one.ask("clock", elapsed=0.0)

        def stand_still() -> Any:
            while not at.status()[0]["waits"]:
                pass  # until the first site's question has arrived
            one._is_up.clear()  # it sends nothing more, and must be taken for neither silent nor late
            host[0] += 605.0
            two.send("tested", group="", peer=0, is_reached=True)  # the rendezvous decides what is due
            return two.ask("join", **asked)["present"]

        first, present = together(lambda: one.ask("join", **asked)["present"], stand_still)
        assert first == present == [[0, 1.0], [1, 1.0]]
        assert two.ask("clock", elapsed=None)["elapsed"] == 605.0, "the run's own seconds passed"


def test_a_process_without_the_secret_gets_only_the_refusal() -> None:
    lines: list[str] = []
    with meeting(say=lines.append) as at:
        with pytest.raises(InputError, match=r"rendezvous 127.*: has another secret: give both the same"):
            site(at, 0, b"another one altogether")
        with socket.create_connection(at.address) as stranger:
            stranger.sendall(b"x" * 200)
            stranger.settimeout(10)
            got = b""
            with suppress(ConnectionResetError):  # what it has sent was not even read
                while part := stranger.recv(1000):
                    got += part
        assert got == b""
        with site(at, 0) as comm:
            assert (comm.rank, comm.world_size) == (0, 3)
    assert sum("refused a connection" in line for line in lines) == 2


def test_silent_strangers_keep_no_site_out() -> None:
    with meeting() as at, ExitStack() as strangers:
        for _ in range(100):
            strangers.enter_context(socket.create_connection(at.address))
        SiteLink(at.address, SECRET, 0, patience_seconds=0.0).close()  # it does not try twice


def test_sites_may_open_as_many_files_as_the_system_lets_them() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
        allow_many_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 1 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_site_that_is_there_already_or_does_not_exist_is_refused() -> None:
    with meeting(num_sites=2) as at, site(at, None) as first:
        assert first.rank == 0
        with pytest.raises(InputError, match=r"site 0 is there already: .*process"):
            site(at, 0)
        with pytest.raises(InputError, match="there is no site 2: they are numbered 0 to 1"):
            site(at, 2)
        second = site(at, None)
        assert second.rank == 1
        with pytest.raises(InputError, match="all 2 sites are there already"):
            site(at, None)
        second.close()


def test_a_site_with_another_experiment_is_refused_and_present_sites_print_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would else wait for sites of its own, and the others for it, until their times are over."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def link(at: RendezvousService, number: int, host: str, steps: int, **more: Any) -> SiteLink:
        monkeypatch.setattr("socket.gethostname", lambda: host)
        facts = {"settings: seed": "42", "strategy's options: H": str(steps)}
        return SiteLink(at.address, SECRET, number, run=f"DiLoCo {steps} {more}", facts=facts, **more)

    with meeting(num_sites=2) as at:
        first = link(at, 0, "near", 50)
        first.on_line = lines.put
        first.watch(lambda rank, row: None)
        first.ask("clock", elapsed=None)
        refused = (
            r"^rendezvous 127\.0\.0\.1:\d+: this site's H is 40, the run's \(site 0\) 50: give both the same file, or "
            r"this one NETGYM_RUN=\.\.\. for a run of its own$"
        )
        with pytest.raises(InputError, match=refused):
            link(at, 1, "far", 40)
        assert ": its H is 40, here 50" in _first(lines, "site 1 was refused (far, process")
        link(at, 1, "far", 40, own_name="another").close()  # on purpose
        right = link(at, 1, "far", 50)
        right.ask("clock", elapsed=None)
        link(at, 1, "far", 30).close()  # its process goes on to its next strategy
        right.close()
        first.close()


def test_sites_that_were_here_before_are_not_refused_by_a_rendezvous_that_was_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One may be in its next strategy already when the others are not."""
    first = RendezvousService(2, ("127.0.0.1", 0), SECRET).__enter__()
    monkeypatch.setattr("socket.gethostname", lambda: "near")
    near = SiteLink(first.address, SECRET, 0, run="first")
    monkeypatch.setattr("socket.gethostname", lambda: "far")
    far = SiteLink(first.address, SECRET, 1, run="first")
    near.run = "second"
    first.__exit__()
    with RendezvousService(2, first.address, SECRET):
        for link in (near, far):
            link.ask("clock", elapsed=None)
        near.close()
        far.close()


def test_a_site_with_a_longer_file_is_reported_with_the_sites_present() -> None:
    """It would train on alone when they are through."""
    lines: list[str] = []
    output: queue.SimpleQueue[str] = queue.SimpleQueue()
    with meeting(num_sites=2, say=lines.append) as at:
        first = SiteLink(at.address, SECRET, 0, run="r", facts={"max_steps": "300"})
        other = SiteLink(at.address, SECRET, 1, run="r", facts={"max_steps": "600"})
        other.on_line = output.put
        other.watch(lambda rank, row: None)
        line = _first(output, "another file")
        for link in (first, other):
            link.close()
    assert line in lines
    assert line == "site 1 has another file than the sites present: max_steps is 600, theirs 300"


def test_resumed_sites_send_rows_again_that_others_may_have_lost() -> None:
    """Where the rendezvous died too nobody else has the rows between the checkpoints of two sites."""
    asked: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    with meeting(num_sites=2) as at:
        links = []
        for number, step in ((0, 1100), (1, 1000)):
            links.append(SiteLink(at.address, SECRET, number, run="r", resumed=True, past_step=step))
            links[-1].on_resend = lambda since, number=number: asked.put((number, since))  # type: ignore[misc]
            links[-1].watch(lambda rank, row: None)
        assert sorted(asked.get(timeout=30) for _ in range(2)) == [(0, 800), (1, 800)]
        for link in links:
            link.close()


def _first(lines: queue.SimpleQueue[str], words: str) -> str:
    while words not in (line := lines.get(timeout=30)):
        pass
    return line


def test_without_a_rendezvous_the_line_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    with pytest.raises(RankError, match=r"cannot be reached: .*start it there with netgym rendezvous"):
        SiteLink(address, SECRET, 0, patience_seconds=0.0)


def test_addresses_of_groups_that_are_no_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many groups a long run makes, its rendezvous keeps a bounded number of notes, and the newest ones."""
    monkeypatch.setattr("netgym.sites.session._MOST_KEYS", 10)
    with meeting(num_sites=1) as at, site(at, 0) as comm:
        for number in range(30):
            comm.link.ask("note", does="set", key=f"group {number}", value="x")
        keys = [f"group {number}" for number in range(30)]
        found = [comm.link.ask("note", does="check", key="", keys=[key])["value"] for key in keys]
    assert found == [False] * 20 + [True] * 10


def test_what_would_wait_for_all_sites_is_refused() -> None:
    with meeting(num_sites=1) as at, site(at, 0) as comm:
        with pytest.raises(InputError, match="all_reduce: sites at a rendezvous come and go"):
            comm.all_reduce(torch.ones(1))
        with pytest.raises(InputError, match="group: sites at a rendezvous"):
            comm.group([0])
