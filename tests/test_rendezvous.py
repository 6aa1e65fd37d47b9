"""Sites that meet at a rendezvous, alone or of several processes, over real sockets: each a thread here."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments import experiment
from torch import nn
from worlds import star_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.communicator.gloo.rendezvous import Rendezvous
from exogym_core.results.disk import RefusedError
from exogym_core.run.loop import take_step
from exogym_core.run.optimizer import DiLoCoOptimizer
from exogym_core.strategy import AllReduceStrategy
from exogym_core.strategy.base import StepContext
from netgym.cli.main import main
from netgym.sites.communicator import SiteCommunicator, SiteRankCommunicator, site_link
from netgym.sites.groups import moved
from netgym.sites.link import SiteLink
from netgym.sites.membership import START, Membership
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
    hold: Callable[[Gates, int, int], None],
    patience: float,
    come: Callable[[Gates, int], Any] = lambda *_: None,
) -> list[Told]:
    """Three sites. `come(gates, rank)` waits until a site comes, and `hold(gates, rank, step)` before its step."""
    gates = Gates()
    options = {"averaging_timeout": 30, "timeout_waiting_for_peers": patience}
    with meeting(wait_seconds=patience) as at:

        def body(rank: int) -> Told:
            come(gates, rank)
            with site(at, rank) as comm:
                return train(
                    comm, 1.0 + rank, partial(hold, gates, rank), partial(gates.tell, rank), **options
                )

        found = together(*(partial(body, rank) for rank in range(3)))
    return checked(found)


def simulated(
    *,
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

    return run_ranks(body, 3, star_form(rates, rates)).results


def check(found: list[Told], expected: list[Told], present: list[list[int]]) -> None:
    assert [found[0][number][0] for number in range(1, ROUNDS + 1)] == present
    for real, virtual in zip(found, expected, strict=True):
        check_equal(real, virtual)


def test_steps_of_gradients_go_on_without_a_killed_site_and_heal_the_one_that_comes_again() -> None:
    """Each goes towards its own value: the mean of a step is over the sites that are in it."""
    gates = Gates()

    def steps(comm: Communicator, hold: Callable[[int], None]) -> dict[int, tuple[list[int], float]]:
        strategy = AllReduceStrategy(
            {"name": "sgd", "lr": 0.1, "momentum": 0.5}, averaging_timeout=30, timeout_waiting_for_peers=30
        )
        model = nn.Linear(50, 1, bias=False)
        nn.init.zeros_(model.weight)
        strategy.setup(model, comm, 12, 0)
        found = {}

        def gradients(step: None, context: StepContext) -> float:
            model.weight.grad = model.weight.detach() - (1.0 + comm.rank)
            return 0.0

        while strategy.local_step < 12:
            number = strategy.local_step
            if not strategy.workers.take_place(number):
                strategy.skip_step()
                continue
            hold(number)
            take_step(strategy, gradients, None, StepContext(number, 1))
            place = strategy.round_place()
            if place is not None and place.averaged_ranks:
                found[number + 1] = (place.averaged_ranks, float(model.weight[0, 0].detach()))
            gates.tell(comm.rank, number + 1)
        return found

    def hold(rank: int, number: int) -> None:
        if rank == 2 and number == 4:
            raise KilledError
        if rank < 2 and number == 8:
            gates.until("again", 1)

    with meeting(wait_seconds=30) as at:

        def body(rank: int) -> dict[int, tuple[list[int], float]]:
            with suppress(KilledError), site(at, rank) as comm:
                return steps(comm, partial(hold, rank))
            gates.until(0, 7)
            with site(at, rank) as comm:
                return steps(comm, lambda number: gates.tell("again", 1))

        first, second, again = checked(together(*(partial(body, rank) for rank in range(3))))
    value = velocity = 0.0
    for ranks, seen in first.values():
        velocity = 0.5 * velocity + sum(value - (1 + rank) for rank in ranks) / len(ranks)
        value -= 0.1 * velocity
        assert seen == pytest.approx(value, rel=1e-5)
    assert first == second
    assert [ranks for ranks, _ in first.values()][:8] == [ALL] * 4 + [OTHERS] * 4
    assert again
    assert again == {number: first[number] for number in again}


def test_a_site_that_is_late_loses_its_round_as_in_simulation() -> None:
    def hold(gates: Gates, rank: int, step: int) -> None:
        if rank == 2 and step == 2 * H - 1:
            gates.until(0, 2)
        if rank < 2 and step == 3 * H - 1:
            gates.until(2, 2)

    found = for_real(hold, patience=1.5)
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

    def hold(gates: Gates, rank: int, step: int) -> None:
        if rank < 2 and step == 3 * H - 1:
            gates.until("downloads", 1)

    def come(gates: Gates, rank: int) -> None:
        known.append(gates)
        if rank == 2:
            gates.until(0, 2)

    # The others do not know of it, and begin when nobody else has come for so long.
    found = for_real(hold, 1.5, come)
    # 24 kB at 6 kB/s: from 12 s to 16 s, and the others are through with their steps at 15 s.
    expected = simulated(join_at={2: "12 s"}, home="48 kbit/s", averaging_timeout=60)
    check(found, expected, [OTHERS, OTHERS, ALL, ALL, ALL, ALL])


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


def _first(lines: queue.SimpleQueue[str], words: str) -> str:
    while words not in (line := lines.get(timeout=30)):
        pass
    return line


def test_every_process_of_a_site_is_refused_with_its_rank(tmp_path: Path) -> None:
    def body(at: RendezvousService, place: int) -> str:
        with pytest.raises(RefusedError) as caught, process(at, 2, place, tmp_path / "inside"):
            pass
        return str(caught.value)

    with meeting(2) as at:
        first, second = checked(together(*(partial(body, at, place) for place in range(SIZE))))
    assert "there is no site 2: they are numbered 0 to 1" in first
    assert second == f"rank 1 of this site: {first}"


def test_what_would_wait_for_all_sites_is_refused() -> None:
    with meeting(num_sites=1) as at, site(at, 0) as comm:
        with pytest.raises(InputError, match="all_reduce: sites at a rendezvous come and go"):
            comm.all_reduce(torch.ones(1))
        with pytest.raises(InputError, match="group: sites at a rendezvous"):
            comm.group([0])


# --- membership and pending rounds --------------------------------------------------------------------------


def members_of(num_sites: int, **hello: Any) -> tuple[Membership, list[tuple[int, dict[str, Any]]]]:
    """Sites that have all arrived, and the messages sent to them."""
    sent: list[tuple[int, dict[str, Any]]] = []
    members = Membership(num_sites, "r", lambda site, message: sent.append((site, dict(message))))
    for site in range(num_sites):
        members.arrive(site, f"session {site}", {"where": f"host {site}", **hello}, float(site))
    return members, sent


def join(members: Membership, site: int, number: int, now: float) -> None:
    asked: dict[str, Any] = {"seconds": 600.0, "averaging_seconds": 600.0, "weight": 1.0, "awaited": [0, 1]}
    members.join(site, site + 1, {"number": number, **asked}, now)


def test_the_begin_waits_for_all_sites_however_short_rounds_do() -> None:
    """A site that takes longer to start than rounds wait was left out of the whole run without a word."""
    lines: list[str] = []
    members = Membership(3, "r", lambda site, message: None, lines.append, wait_seconds=600.0)
    members.arrive(0, "session 0", {"where": "host"}, 0.0)
    asked = {"seconds": 4.0, "averaging_seconds": 9.0, "weight": 1.0, "awaited": [0, 1]}  # site 2 joins late
    members.join(0, 1, {"number": START, **asked}, 0.0)
    for second in range(600):
        if second == 50:  # it comes, and is stopped again
            members.arrive(1, "session 1", {"where": "host"}, 50.0)
            members.depart(1, "session 1", 50.0)
        members.sites[0].heard = float(second)
        members.update(float(second))
    assert not any("the run begins" in line for line in lines)
    reasons = [line.partition(" s: ")[2].partition(";")[0] for line in lines if "has waited" in line]
    assert reasons == ["site 1 has not joined yet", *["site 1 is lost"] * 18]
    members.update(600.0)
    assert lines[-2:] == [
        "the run begins: site 0, without site 1",
        "WARNING: the run begins WITHOUT site 1, not there after 600 s (netgym rendezvous --wait); later sites "
        "take part from their arrival on",
    ]


def test_finished_sites_wait_for_a_late_one_and_give_it_the_final_state() -> None:
    """That one began anew otherwise, alone and to another model, though it takes a while until it asks."""
    members, sent = members_of(2)
    members.depart(1, "session 1", 1.0)
    members.publish(0, 60, 1.0)
    members.arrive(1, "session 2", {"where": "host"}, 2.0)
    members.end(0, 99, 4.0, 3.0)
    members.update(20.0)
    assert sent == []
    join(members, 1, START, 21.0)
    assert sent.pop()[1]["present"] == [], "late: it downloads"
    members.fetch(1, 5, {"at_least": 0, "without": []}, 21.0)
    assert [message.get("number") for _, message in sent] == [60, 60]
    members.update(400.0)
    assert len(sent) == 2, "a large state takes long"
    members.fetched(1, 60, 401.0)
    assert sent[-1] == (0, {"id": 99}), "now it may leave"


def test_a_site_waiting_for_a_round_completed_before_a_restart_of_the_rendezvous_learns_so() -> None:
    """Its question was dropped with the meeting when the others came to their next round: it waited for ever."""
    members, sent = members_of(3, has_begun=True, newest=12)
    join(members, 2, 13, 2.0)
    attempt = {"number": 13, "attempt": 0, "group": "first-7", "members": [0, 1], "seconds": 600.0}
    for site in range(2):
        members.confirm(site, 50, {**attempt, "is_finished": True}, 2.1)
    assert [site for site, message in sent if message["id"] == 50] == [0, 1]
    assert all(site != 2 for site, _ in sent)
    for site in range(2):
        members.publish(site, 14, 2.2)
    assert (2, {"id": 3, "present": [[0, 1.0], [1, 1.0]], "group": ""}) in sent


# --- sites of several processes: each process a thread here -------------------------------------------------

SIZE = 2
PATIENCE = {"averaging_timeout": 30, "timeout_waiting_for_peers": 30}
ADAM = partial(torch.optim.AdamW, lr=0.05)


@contextmanager
def process(at: RendezvousService, number: int, place: int, meets_in: Path) -> Iterator[SiteRankCommunicator]:
    """One of a site's processes, with the communicator that it has of all processes."""
    secret = SECRET + str(number).encode()
    inside = GlooCommunicator.connect(
        Rendezvous(place, SIZE, str(meets_in), timeout_seconds=20, secret=secret)
    )

    link = partial(SiteLink, at.address, SECRET, patience_seconds=20)
    between = SiteCommunicator(site_link(link, number, inside, 20), SECRET, processes=inside)
    with SiteRankCommunicator(between, inside) as comm:
        yield comm


@pytest.mark.parametrize(
    ("sharding", "codec"), [("NO_SHARD", None), ("SHARD_GRAD_OP", "int8"), ("FULL_SHARD", "int8")]
)
def test_sites_of_two_processes_train_as_simulated_sites_of_two_ranks(
    sharding: str, codec: str | None, tmp_path: Path
) -> None:
    options = {"ranks_per_worker": SIZE, "sharding": sharding, "codec": codec, "inner": ADAM}

    def real(at: RendezvousService, rank: int) -> Told:
        number, place = divmod(rank, SIZE)
        with process(at, number, place, tmp_path / str(number)) as comm:
            assert (comm.rank, comm.world_size) == (rank, 4)
            return train(comm, 1.0 + rank, **options, **PATIENCE)

    with meeting(2) as at:
        found = checked(together(*(partial(real, at, rank) for rank in range(4))))
    virtual = run_ranks(lambda comm: train(comm, 1.0 + comm.rank, **options), 4).results
    for each, expected in zip(found, virtual, strict=True):
        check_equal(each, expected)


def test_a_site_of_two_that_is_killed_and_comes_again_is_as_one_that_was_cut_off_in_simulation(
    tmp_path: Path,
) -> None:
    """Each of its processes downloads what its like has, and the rounds, members and parameters are the simulated."""
    gates = Gates()

    def hold(name: tuple[int, str, int], step: int) -> None:
        number, life, place = name
        if (number, life) == (2, "first") and step == 2 * H + 2:
            raise KilledError
        if number < 2 and step == 4 * H - 1:
            gates.until((2, "again", place), 3)

    def live(at: RendezvousService, number: int, place: int) -> Told:
        received: Told = {}
        for life in ("first", "again") if number == 2 else ("first",):
            name = (number, life, place)
            try:
                with process(at, number, place, tmp_path / f"{number} {life}") as comm:
                    received = train(
                        comm,
                        1.0 + number + (place - 0.5) / 4,
                        partial(hold, name),
                        partial(gates.tell, name),
                        ranks_per_worker=SIZE,
                        sharding="FULL_SHARD",
                        **PATIENCE,
                    )
            except KilledError:
                gates.until((0, "first", place), 3)
        return received

    with meeting(3) as at:
        bodies = [partial(live, at, number, place) for number in range(3) for place in range(SIZE)]
        found = checked(together(*bodies))
    cut = {"link": ["c", "switch"], "at": "12 s", "for": "7 s", "down": True}

    def body(comm: Communicator) -> Told:
        patience = {"averaging_timeout": 2, "timeout_waiting_for_peers": 3}
        return train(comm, 1.0 + comm.rank, lambda step: comm.advance(1.0), **patience)

    virtual = run_ranks(body, 3, star_form("abc", "80 Mbit/s", events=[cut])).results
    for place, received in enumerate(found):
        for number, (ranks, values) in received.items():
            expected_ranks, expected = virtual[place // SIZE][number]
            assert ranks == [rank * SIZE + each for rank in expected_ranks for each in range(SIZE)]
            assert values == pytest.approx(expected, rel=1e-5)
    assert [len(found[0][number][0]) for number in found[0]] == [6, 6, 4, 6, 6, 6]
    assert list(found[-1]) == [4, 5, 6]


def test_a_process_that_hangs_is_left_out_when_it_has_been_silent(tmp_path: Path) -> None:
    """With its whole site, while the first process of that is alive: not only when the time-outs are over."""
    gates, lines = Gates(), list[str]()

    def stop(comm: SiteRankCommunicator) -> None:
        comm.link._is_up.clear()  # as SIGSTOP: its threads stand still
        gates.until((0, 0), 3)
        comm.link._is_up.set()

    def body(at: RendezvousService, number: int, place: int) -> Told:
        with process(at, number, place, tmp_path / str(number)) as comm:

            def hold(step: int) -> None:
                if (number, place) == (1, 1) and step == 2 * H - 1:
                    stop(comm)
                if number == 0 and step == 5 * H - 1:
                    gates.until((1, 1), 4)  # it has come to itself, and downloads what the others have

            return train(
                comm,
                1.0 + number,
                hold,
                partial(gates.tell, (number, place)),
                ranks_per_worker=SIZE,
                averaging_timeout=300,
                timeout_waiting_for_peers=300,
            )

    with meeting(2, silent_seconds=1.0, say=lines.append) as at:
        found = checked(
            together(*(partial(body, at, number, place) for number in range(2) for place in range(SIZE)))
        )
    members = [found[0][number][0] for number in range(1, ROUNDS + 1)]
    assert members[0] == members[-1] == [0, 1, 2, 3]
    assert members[1] == members[2] == [0, 1]
    assert lines.index("site 1: its process 1 hangs") < lines.index("site 1: its process 1 answers again")


# --- start and end of a site --------------------------------------------------------------------------------

SECRET_TEXT = "known to these tests alone"
EXPERIMENT = experiment(
    workers="{count: 1}",
    batch_size=4,
    evaluate="{every: 4, samples: 16}",
    checkpoint="{every: 2}",
    strategies="[{name: DiLoCo, H: 2, averaging_timeout: 10 min, timeout_waiting_for_peers: 4 s}]",
)


def test_a_finished_folder_that_is_resumed_tells_the_rendezvous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that was started after everything had been killed: it knows nothing of the run else."""
    (tmp_path / "one.yaml").write_text(EXPERIMENT)
    out = str(tmp_path / "out")
    monkeypatch.setenv("NETGYM_SECRET", SECRET_TEXT)
    monkeypatch.setenv("NETGYM_SITE", "0")
    lines: list[str] = []
    with RendezvousService(1, ("127.0.0.1", 0), SECRET_TEXT.encode(), say=lines.append) as at:
        monkeypatch.setenv("NETGYM_RENDEZVOUS", f"127.0.0.1:{at.address[1]}")
        assert main(["compare", str(tmp_path / "one.yaml"), "--out", out]) == 0
        (run,) = at.status()
    assert lines[-1] == "site 0 has finished, after step 4"
    with RendezvousService(2, ("127.0.0.1", 0), SECRET_TEXT.encode(), say=lines.append) as at:
        monkeypatch.setenv("NETGYM_RENDEZVOUS", f"127.0.0.1:{at.address[1]}")
        assert main(["compare", "--resume", out]) == 0
        assert "is finished and left as it is" in capsys.readouterr().out
        assert lines[-1] == "site 0 has finished this run already: its folder has the model"
        with pytest.raises(
            InputError, match="this run is over: site 0 has finished it, its folder has the model"
        ):
            SiteLink(at.address, SECRET_TEXT.encode(), 1, run=run["run"], resumed=True)
    monkeypatch.setattr("netgym.sites.link._SECONDS_TO_CONNECT", 0.01)
    assert main(["compare", "--resume", out]) == 0
    assert (
        "warning: could not report to other sites that DiLoCo is finished: rendez" in capsys.readouterr().err
    )


# --- what never begins --------------------------------------------------------------------------------------

LINK = "netgym.sites.link"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RankError("rendezvous: cannot be reached", 0)])
def test_what_ends_before_its_first_step_leaves_no_folder(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the same command, given again, says that the folder is not empty."""

    def ends(*_: Any) -> None:
        raise error

    (tmp_path / "one.yaml").write_text(EXPERIMENT)
    monkeypatch.setattr(f"{LINK}.connect_peer", ends)
    monkeypatch.setenv("NETGYM_SECRET", SECRET_TEXT)
    monkeypatch.setenv("NETGYM_RENDEZVOUS", "127.0.0.1:29400")
    code = main(["compare", str(tmp_path / "one.yaml"), "--out", str(tmp_path / "out")])
    errors = capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    if isinstance(error, RankError):
        assert (code, errors.splitlines()[-1]) == (1, "error: rendezvous: cannot be reached")
    else:
        assert (code, errors.splitlines()[-1]) == (
            130,
            "interrupted: nothing was trained yet, and nothing is left",
        )


@pytest.mark.parametrize(
    ("address", "site", "message"),
    [
        ("nonsense", "0", "environment: NETGYM_RENDEZVOUS: 'nonsense' is no address: write HOST:PORT"),
        ("127.0.0.1:29400", "x", "environment: NETGYM_SITE='x' is no number of a site: write 0, 1, ..."),
        (
            "127.0.0.1:29400",
            "7",
            "environment: NETGYM_SITE=7: there is no such site: they are numbered 0 to 1",
        ),
    ],
)
def test_an_environment_that_cannot_be_is_refused_before_anything_is_made(
    address: str, site: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETGYM_RENDEZVOUS", address)
    monkeypatch.setenv("NETGYM_SITE", site)
    monkeypatch.setattr("exogym_core.results.run_folder.RunFolder.create", None)
    (tmp_path / "two.yaml").write_text(EXPERIMENT.replace("count: 1", "count: 2"))
    errors: list[str] = []
    monkeypatch.setattr("click.echo", lambda text="", **_: errors.append(str(text)))
    assert main(["compare", str(tmp_path / "two.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert errors[-1].startswith(f"error: {message}")
