"""Sites of several processes that meet at a rendezvous over real sockets: each process a thread here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rendezvous import (
    ROUNDS,
    SECRET,
    Gates,
    H,
    KilledError,
    Told,
    check_equal,
    checked,
    meeting,
    together,
    train,
)
from worlds import star_form

from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.gloo.communicator import GlooCommunicator
from exogym_core.communicator.gloo.rendezvous import Rendezvous
from netgym.sites.communicator import SiteCommunicator, SiteRankCommunicator, site_link
from netgym.sites.link import SiteLink
from netgym.sites.service import RendezvousService
from netsim.errors import InputError

SIZE = 2
SHARDINGS = ("NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD")
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


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("codec", [None, "int8"])
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


@pytest.mark.parametrize("sharding", ["NO_SHARD", "FULL_SHARD"])
def test_a_site_of_two_that_is_killed_and_comes_again_is_as_one_that_was_cut_off_in_simulation(
    sharding: str, tmp_path: Path
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
                        sharding=sharding,
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


def test_a_site_of_two_needs_ranks_per_worker(tmp_path: Path) -> None:
    def body(at: RendezvousService, place: int) -> Any:
        with process(at, 0, place, tmp_path / "0") as comm:
            return train(comm, 1.0, **PATIENCE)

    with meeting(2) as at:
        errors = together(*(partial(body, at, place) for place in range(SIZE)))
    assert [type(error) for error in errors] == [InputError] * SIZE
    assert str(errors[0]) == (
        "DiLoCoOptimizer: ranks_per_worker=1, but this site has 2 processes: make them equal"
    )


@pytest.mark.parametrize("where", ["computing", "averaging"])
def test_a_process_that_hangs_is_left_out_when_it_has_been_silent(where: str, tmp_path: Path) -> None:
    """With its whole site, while the first process of that is alive: not only when the time-outs are over."""
    gates, lines = Gates(), list[str]()

    def stop(comm: SiteRankCommunicator) -> None:
        comm.link._is_up.clear()  # as SIGSTOP: its threads stand still
        gates.until((0, 0), 3)
        comm.link._is_up.set()

    def body(at: RendezvousService, number: int, place: int) -> Told:
        with process(at, number, place, tmp_path / str(number)) as comm:
            is_victim = (number, place) == (1, 1)

            def hold(step: int) -> None:
                if is_victim and where == "computing" and step == 2 * H - 1:
                    stop(comm)
                if number == 0 and step == 5 * H - 1:
                    gates.until((1, 1), 4)  # it has come to itself, and downloads what the others have

            def after(done: int) -> None:
                gates.tell((number, place), done)
                if is_victim and where == "averaging" and done == 1:
                    comm.before_meeting(lambda: None if gates.reached((0, 0), 3) else stop(comm))

            return train(
                comm,
                1.0 + number,
                hold,
                after,
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


def next_process(address: tuple[str, int]) -> SiteLink:
    """Site 0 again, as soon as the rendezvous has read that its last process is gone."""
    deadline = time.monotonic() + 10.0
    while True:
        try:
            return SiteLink(address, SECRET, 0)
        except InputError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_what_an_earlier_life_of_a_site_left_hanging_does_not_count_against_the_next(tmp_path: Path) -> None:
    """A machine froze with both its processes, and the site comes again as one process: the other is not missed."""
    lines = list[str]()
    with meeting(2, silent_seconds=2.0, say=lines.append) as at:
        first, frozen = SiteLink(at.address, SECRET, 0), SiteLink(at.address, SECRET, 0, local_rank=1)
        for each in (first, frozen):
            each._is_up.clear()  # they say nothing more, and their connections stay
        first.close()
        again = next_process(at.address)
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            again.ask("clock", elapsed=None)
        again.close()
        frozen.close()
    assert [line for line in lines if "hangs" in line] == []
