"""Sites that join, die and return in any order, and absent ranks: all that finish a round agree on its members."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import fit_until, outcome
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from worlds import star_form

from exogym_core import Trainer
from exogym_core.checkpoints.checkpoint import StoredCheckpoint, find_checkpoint
from exogym_core.communicator import Communicator, run_ranks
from exogym_core.communicator.deadlines import Deadline
from exogym_core.results.fit_result import FitResult
from exogym_core.strategy import DiLoCoStrategy
from netgym.sites.membership import START, Membership
from netsim.errors import DeadlockError

# Rounds of the trainings here are a little longer than their time-out.
pytestmark = pytest.mark.filterwarnings("ignore:.*rejoin='at_once' with a time-out")

ROUNDS = 4


class World:
    """A rendezvous, and sites that do nothing but meet; time passes in steps.

    With `cables` pairs of sites break and are mended, and an average fails where one of its pairs is broken.
    """

    def __init__(self, num_sites: int, seed: int, trouble: float, cables: float) -> None:
        self.random, self.trouble, self.now = random.Random(seed), trouble, 0.0
        self.cables, self.broken = cables, set[frozenset[int]]()
        self.pairs = [frozenset(pair) for pair in itertools.combinations(range(num_sites), 2)]
        self.inbox: dict[int, list[dict[str, Any]]] = {site: [] for site in range(num_sites)}
        self.members = Membership(
            num_sites, "r", lambda site, message: self.inbox[site].append(dict(message)), wait_seconds=3.0
        )
        self.sites = {site: Site(self, site, 0) for site in range(num_sites)}
        self.results: dict[int, set[tuple[int, ...]]] = {}  # what those who were through say of a round

    def run(self) -> None:
        for tick in range(6000):
            self.now += 0.1
            if all(site.is_over for site in self.sites.values()):
                return
            calm = tick > 400  # trouble ends, so that every run can
            for pair in self.pairs:
                if calm or self.random.random() < 0.02:
                    self.broken.discard(pair)
                elif self.random.random() < self.cables:
                    self.broken.add(pair)
            for number in sorted(self.sites, key=lambda _: self.random.random()):
                site = self.sites[number]
                if not calm and self.random.random() < self.trouble:
                    self.disturb(site)
                elif calm and not site.is_up and not site.is_over:
                    self.disturb(site)  # starts it again
                elif site.is_up:
                    site.act()
            self.members.update(self.now)
        raise AssertionError({number: vars(site) for number, site in self.sites.items()})

    def disturb(self, site: Site) -> None:
        """Kill it, or start it again; or break what its members do together."""
        if not site.is_up and not site.is_over:
            self.sites[site.number] = Site(self, site.number, site.life + 1)
        elif site.is_up and self.random.random() < 0.5:
            site.is_up = False
            self.members.depart(site.number, site.session, self.now)
        else:
            site.breaks = True


class Site:
    """A process: begins with the others, then does rounds, and downloads what it has missed."""

    def __init__(self, world: World, number: int, life: int) -> None:
        self.world, self.number, self.life = world, number, life
        self.session, self.round, self.question = f"{number}.{life}", START, 0
        self.is_up, self.is_over, self.breaks = True, False, False
        self.members: list[int] = []
        self.waits_in: dict[str, Any] = {}  # an average that stands still
        self.waits_until = 0.0
        self.awaited: list[int] | None = None
        world.inbox[number].clear()
        world.members.arrive(number, self.session, {"tests_at": ["here", 1]}, world.now)
        self.join()

    def ask(self) -> int:
        self.question += 1
        return self.question

    def join(self) -> None:
        asked = {"number": self.round, "seconds": 3.0, "averaging_seconds": 2.0, "weight": 1.0}
        members = self.world.members
        members.join(self.number, self.ask(), {**asked, "awaited": self.awaited}, self.world.now)

    def act(self) -> None:
        if not self.is_over and self.life and self.question == 0:
            self.join()
        for message in list(self.world.inbox[self.number]):
            self.world.inbox[self.number].remove(message)
            if message.get("id") == self.question:
                self.take(message)
            elif message.get("push") == "test":
                for other in map(int, message["peers"]):
                    is_reached = frozenset((self.number, other)) not in self.world.broken
                    answer = {"group": message["group"], "peer": other, "is_reached": is_reached}
                    self.world.members.tested(self.number, 0, answer, self.world.now)
            elif message.get("push") == "dissolved" and message["group"] == self.waits_in.get("group"):
                self.say_how_it_went(self.waits_in, False)
        if self.waits_in and self.world.now > self.waits_until:
            self.say_how_it_went(self.waits_in, False)

    def take(self, answer: dict[str, Any]) -> None:
        members, now = self.world.members, self.world.now
        if "refused" in answer:
            self.is_over = True  # the others have finished without it
        elif "present" in answer:
            self.members = [site for site, _ in answer["present"]]
            self.work(answer) if self.number in self.members else self.fetch()
        elif "left" in answer:
            self.members = list(answer["left"])
            if self.number not in self.members:
                self.fetch()
            elif "attempt" in answer:
                self.work(answer)
            else:
                self.world.results.setdefault(self.round, set()).add(tuple(self.members))
                self.begin_round(self.round + 1)
        elif "number" in answer and answer["number"] is None:
            self.join()
        elif "number" in answer:
            members.fetched(self.number, answer["number"], now)
            self.round, self.awaited = answer["number"], None
            self.join() if self.round < ROUNDS else self.end()
        else:
            self.is_over = True

    def work(self, answer: dict[str, Any]) -> None:
        pairs = {frozenset(pair) for pair in itertools.combinations(self.members, 2)}
        if pairs & self.world.broken:
            self.waits_in, self.waits_until = answer, self.world.now + 2.0
        else:
            self.say_how_it_went(answer, not self.breaks)
            self.breaks = False

    def say_how_it_went(self, answer: dict[str, Any], is_finished: bool) -> None:
        self.waits_in = {}
        about = {
            "attempt": answer["attempt"],
            "group": answer["group"],
            "seconds": 2.0,
            "members": self.members,
        }
        about |= {"number": self.round, "is_finished": is_finished}
        self.world.members.confirm(self.number, self.ask(), about, self.world.now)

    def fetch(self) -> None:
        asked = {"at_least": max(self.round + 1, 0), "without": []}
        self.world.members.fetch(self.number, self.ask(), asked, self.world.now)

    def begin_round(self, number: int) -> None:
        self.round, self.awaited = number, list(self.members)
        self.world.members.publish(self.number, number, self.world.now)
        self.join() if number < ROUNDS else self.end()

    def end(self) -> None:
        self.world.members.end(self.number, self.ask(), 5.0, self.world.now)


@given(
    st.integers(1, 5),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.02, 0.1]),
    st.sampled_from([0.0, 0.001, 0.01, 0.1]),
)
# A site comes again beside one that was refused.
@example(num_sites=3, seed=524288, trouble=0.02, cables=0.01)
@settings(max_examples=40)
def test_all_sites_that_finish_a_round_report_the_same_members(
    num_sites: int, seed: int, trouble: float, cables: float
) -> None:
    """However sites die and return, and pairs break, none waits for ever, and no round has two memberships.

    A round that all who did it have died of is done again, by others: only then there may be a second one.
    """
    world = World(num_sites, seed, trouble, cables)
    world.run()
    for number, results in world.results.items():
        lives = sum(site.life for site in world.sites.values())
        assert len(results) == 1 or lives, (number, results)
    if not trouble and not cables:
        assert world.results == {number: {tuple(range(num_sites))} for number in range(START, ROUNDS)}


def test_sites_that_were_all_stopped_wait_for_each_other_when_they_come_again() -> None:
    """The first to come may have an old state: it must not begin before those with newer ones are there."""
    sent: list[tuple[int, dict[str, Any]]] = []
    members = Membership(2, "r", lambda site, message: sent.append((site, dict(message))))
    asked = {"number": START, "seconds": 100.0, "averaging_seconds": 9.0, "weight": 1.0, "awaited": [0, 1]}
    for life in range(2):
        now = 50.0 * life
        for site in (0, 1):
            members.arrive(site, f"{site}.{life}", {}, now + site)
            sent.clear()
            members.join(site, 1, asked, now + site)
            members.update(now + site + 5 * (1 - site))  # some seconds after the first has come
            assert bool(sent) == (site == 1), (life, site, sent)
        attempt = {"number": START, "attempt": 0, "group": sent[-1][1]["group"], "members": [0, 1]}
        for site in (0, 1):
            members.confirm(site, 2, {**attempt, "seconds": 9.0, "is_finished": True}, now + 10)
            members.publish(site, 0, now + 10)
        for site in (0, 1):
            members.depart(site, f"{site}.{life}", now + 20)
        members.update(now + 30)


def test_one_end_of_a_broken_pair_is_left_out_until_the_pair_is_mended() -> None:
    world = World(4, 1, 0.0, 0.0)
    world.pairs = []  # nothing else happens
    world.broken.add(frozenset((1, 2)))
    world.run()
    assert world.results == {number: {(0, 1, 3)} for number in range(START, ROUNDS)}
    assert world.now < 10.0, "one average was cut off, after 2 s, and no other"


# --- the rendezvous and the simulation ----------------------------------------------------------------------

DELAYS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, 2.5, 4.0, 9.0, math.inf])
Rounds = list[dict[int, list[int]]]  # members of each round that a site was in, by site


def simulated_rounds(sites: Sequence[Sequence[float]], about: Mapping[str, Any]) -> Rounds:
    """Rounds of ranks that compute for these seconds before they come, and before each round; infinity: they hang."""

    def body(comm: Communicator) -> dict[int, list[int]]:
        late, *delays = sites[comm.rank]
        rounds: dict[int, list[int]] = {}
        number, present = 0, [rank for rank, (late, *_) in enumerate(sites) if not late]
        if late:
            comm.arrive_at(late)
            number, _ = comm.fetch(0) or (ROUNDS, [])
        comm.publish(number, [])
        while number < ROUNDS and delays[number] < math.inf:
            comm.advance(delays[number])
            present, _ = comm.among_present(lambda *_: None, number=number, awaited=present, **about)
            if comm.rank in present:
                rounds[number], number = present, number + 1
            else:
                number, _ = comm.fetch(number + 1) or (ROUNDS, [])
                present = [*range(len(sites))]
            comm.publish(number, [])
        return rounds

    return run_ranks(body, len(sites)).results


def real_rounds(sites: Sequence[Sequence[float]], about: Mapping[str, Any]) -> Rounds:
    """Rounds of sites at a rendezvous that do the same."""
    sent: list[tuple[int, Mapping[str, Any]]] = []
    members = Membership(len(sites), "r", lambda site, message: sent.append((site, message)))
    rounds, number, now = [dict[int, list[int]]() for _ in sites], [0] * len(sites), 0.0
    present = [[site for site, (late, *_) in enumerate(sites) if not late] for _ in sites]
    due = {site: late for site, (late, *_) in enumerate(sites)}  # next instant at which a site does something

    def begin(site: int, state: int) -> None:
        number[site] = state
        members.publish(site, state, now)
        due[site] = now + sites[site][1 + state] if state < ROUNDS else math.inf

    for site in present[0]:
        members.arrive(site, f"{site}", {}, now)
        begin(site, 0)
    while now < math.inf:
        for site in [site for site in due if due[site] == now]:
            due[site] = math.inf
            if site in members.sites:
                asked = {**about, "number": number[site], "weight": 1.0, "awaited": present[site]}
                members.join(site, 1, asked, now)
            else:
                members.arrive(site, f"{site}", {}, now)
                members.fetch(site, 1, {"at_least": 0, "without": []}, now)
        members.update(now)
        while sent:
            site, answer = sent.pop(0)
            if "push" in answer:
                continue
            if "present" in answer:
                present[site] = [member for member, _ in answer["present"]]
                if site in present[site]:
                    attempt = {**answer, "number": number[site], "is_finished": True}
                    members.confirm(site, 1, attempt, now)
                else:
                    members.fetch(site, 1, {"at_least": number[site] + 1, "without": []}, now)
                    # A late rank hears of the round that it has missed, a late site of the last one.
                    present[site] = [*range(len(sites))]
            elif "left" in answer:
                rounds[site][number[site]] = present[site]
                begin(site, number[site] + 1)
            else:
                members.fetched(site, answer["number"], now)
                begin(site, answer["number"])
        ages = [0.0, *(age for _, age in members.returns.downloaded.values())]
        closings = [each.closes + age for each in members.rounds._rounds.values() for age in ages]
        now = min(at for at in [*due.values(), *closings, math.inf] if at > now)
    return rounds


RULES = st.builds(
    lambda learned, grace, quorum: Deadline(*learned, grace, quorum),
    st.sampled_from([(0.0, 0.0, 0.0), (1.0, 3.0, 0.0), (0.0, 0.0, 0.5), (0.0, 0.0, 0.75)]),
    st.sampled_from([0.0, 1.25]),
    st.integers(1, 3),
)


@given(
    st.lists(st.lists(DELAYS, min_size=1 + ROUNDS, max_size=1 + ROUNDS), min_size=1, max_size=4),
    st.sampled_from([0.5, 3.0]),
    RULES,
    st.integers(0, 10**6),
)
@settings(max_examples=20)
def test_the_rendezvous_and_the_simulation_agree_on_who_is_in_each_round(
    sites: list[list[float]], seconds: float, rule: Deadline, seed: int
) -> None:
    """Sites come late to the run and to rounds, catch up, and hang for good; no two come at one instant."""
    drawn = random.Random(seed)
    sites = [[seconds + drawn.randrange(1, 2**18) * 2.0**-20 for seconds in site] for site in sites]
    for place, site in enumerate(sites):
        site[0] = 0.0 if place == 0 or site[0] < 0.25 else min(site[0], 9.0 + place / 8)  # somebody begins
    able = sum(math.inf not in site for site in sites)
    rule = rule._replace(quorum=max(1, min(rule.quorum, able)))
    about = {"seconds": seconds, "averaging_seconds": 60.0, "deadline": rule}
    assert real_rounds(sites, about) == simulated_rounds(sites, about)


# --- absent ranks -------------------------------------------------------------------------------------------

STEPS, H = 20, 2
PROCESSES = {"kind": "processes", "processes": 2}


class Model(nn.Module):
    """Draws random numbers, so that a step too many or too few is seen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.2), nn.Linear(40, 1))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return ((self.layers(batch[0]) - batch[1]) ** 2).mean()


def event(host: str, at: float, lasts: float | None, crash: bool, pause: bool = False) -> dict[str, Any]:
    what: dict[str, Any] = (
        {"host": host, "crash": True} if crash else {"link": [host, "switch"], "down": True}
    )
    if pause and lasts is not None:
        what = {"host": host, "pause": True}
    return {**what, "at": f"{at} s", **({} if lasts is None else {"for": f"{lasts} s"})}


def topology(events: Sequence[Mapping[str, Any]], protocol: str) -> dict[str, Any]:
    rates = {"a": "100 kbit/s", "b": "100 kbit/s", "home": "20 kbit/s"}
    return star_form(rates, rates, protocol=protocol, events=list(events))


def fit(
    events: Sequence[Mapping[str, Any]],
    protocol: str = "linux-tcp",
    stop_at: int | None = None,
    rejoin: str = "next_round",
    **arguments: Any,
) -> FitResult:
    inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    trainer = Trainer(Model(), data, data)
    strategy = DiLoCoStrategy(
        "adamw",
        H=H,
        join_at=None if events else {2: "7 s"},
        averaging_timeout=4,
        timeout_waiting_for_peers=2,
        rejoin=rejoin,
        codec="int8",
        error_feedback=True,
        lr_scheduler="lambda_cosine",
        lr_scheduler_kwargs={"warmup_steps": 3, "cosine_anneal": True},
    )
    return fit_until(
        trainer,
        stop_at,
        strategy=strategy,
        num_nodes=3,
        max_steps=STEPS,
        batch_size=2,
        val_interval=3,
        correlation_interval=4,
        topology=topology(events, protocol),
        compute={"fixed": "1 s", "jitter": 0.1},
        collectives="ring",
        device="cpu",
        **{"workers": "threads", **arguments},
    )


def end_of(
    events: Sequence[Mapping[str, Any]], protocol: str, rejoin: str = "next_round"
) -> FitResult | DeadlockError:
    try:
        return fit(events, protocol, rejoin=rejoin)
    except DeadlockError as error:
        return error


OUTAGES: dict[str, list[dict[str, Any]]] = {
    "joins late": [],
    "crash": [event("home", 5.0, 9.0, crash=True)],
    "the first rank": [event("a", 5.0, 9.0, crash=False)],
    "pause": [event("home", 5.0, 9.0, crash=False, pause=True)],
}


@cache
def undisturbed(name: str, rejoin: str) -> Any:
    result = fit(OUTAGES[name], rejoin=rejoin)
    assert result.dropped_peers
    return outcome(result)


@pytest.mark.parametrize(("name", "rejoin"), [("joins late", "next_round"), ("pause", "at_once")])
def test_processes_give_what_threads_give(name: str, rejoin: str) -> None:
    assert outcome(fit(OUTAGES[name], workers=PROCESSES, rejoin=rejoin)) == undisturbed(name, rejoin)


@pytest.mark.parametrize(("name", "rejoin"), [("crash", "next_round"), ("the first rank", "at_once")])
def test_stopped_and_resumed_is_never_stopped(name: str, rejoin: str, tmp_path: Path) -> None:
    """Several times, as the run goes on."""
    kept, where = 0, {"save_dir": tmp_path}
    for stop_at in (3, 8, 16, None):
        result = fit(OUTAGES[name], stop_at=stop_at, checkpoint_interval=3, rejoin=rejoin, **where)
        assert result.resumed_step == kept
        assert result.complete == (stop_at is None)
        assert result.checkpoint_folder is not None
        found = find_checkpoint(result.checkpoint_folder)
        if found is not None:  # before the first there is nothing to go on from
            where = {"resume_from": result.checkpoint_folder}
        kept = found.step if isinstance(found, StoredCheckpoint) else 0
    assert outcome(result) == undisturbed(name, rejoin)


def test_if_all_are_gone_the_run_ends_with_the_cause() -> None:
    for crash in (True, False):
        hosts = [event(host, 5.0, None, crash=crash) for host in ("a", "b", "home")]
        if crash:
            with pytest.raises(DeadlockError, match=r"hosts? a, .*crashed at 5 s and never comes? back"):
                fit(hosts)
        else:  # each is alone: the first goes on
            result = fit(hosts)
            assert result.averaged_ranks[STEPS] == [0]


def test_if_all_are_away_they_continue_when_the_first_is_back() -> None:
    lasts = {"a": 20.0, "b": 10.0, "home": 30.0}
    result = fit([event(host, 4.0, seconds, crash=True) for host, seconds in lasts.items()])
    rounds = list(result.averaged_ranks.values())
    assert [1] in rounds
    assert rounds[-1] == [0, 1]  # home comes back when they have ended


@given(
    st.lists(
        st.builds(
            event,
            st.sampled_from(["a", "b", "home"]),
            st.sampled_from([0.5, 1.0, 2.0, 3.7, 6.0, 9.5]),
            st.sampled_from([None, 0.5, 3.0, 8.0, 20.0]),
            st.booleans(),
            st.booleans(),
        ),
        max_size=4,
    ),
    st.sampled_from(["ideal", "linux-tcp", "gloo"]),
    st.sampled_from(["next_round", "at_once"]),
)
@settings(max_examples=10)
def test_every_run_ends_and_reports_the_sites_present(
    events: list[dict[str, Any]], protocol: str, rejoin: str
) -> None:
    result = end_of(events, protocol, rejoin)
    if isinstance(result, DeadlockError):
        # Only a host that was alone, since others were cut off too, takes the newest state with it for good.
        hit = {entry.get("host") or entry["link"][0] for entry in events}
        assert rejoin == "at_once" or len(hit) > 1
        assert any("for" not in entry for entry in events)
        assert re.search("never comes? back", str(result))
        return
    assert result.complete
    assert [row["step"] for row in result.history] == list(range(1, STEPS + 1))
    seconds = [row["virtual_seconds"] for row in result.history]
    assert seconds == sorted(seconds)
    rounds = result.averaged_ranks
    assert list(rounds) == list(range(H, STEPS + 1, H))
    assert result.dropped_peers is not None
    if rejoin == "at_once":
        assert all(rounds.values())
        return
    for step, ranks in rounds.items():
        away = {
            row["rank"]
            for row in result.dropped_peers
            if row["step"] <= step and (row["back_step"] is None or step <= row["back_step"])
        }
        assert ranks == [rank for rank in range(3) if rank not in away]
