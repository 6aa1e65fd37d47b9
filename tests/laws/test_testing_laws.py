"""`netsim.testing`: each law of schedules catches a planted bug; a failing case is a short program that shows it."""

from __future__ import annotations

import random
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from netsim import DeadlockError, Topology
from netsim.cli.main import main
from netsim.collectives.schedules.algorithms import ALGORITHMS, Algorithm
from netsim.collectives.schedules.direct import broadcast_direct, scatter_direct
from netsim.collectives.schedules.ring import RingPhase, all_reduce_ring
from netsim.collectives.schedules.schedule import ListedPhase, Phase, Problem, Schedule, step_of
from netsim.testing import (
    LawError,
    check_schedule,
    compare_schedules,
    placements,
    protocols,
    topologies,
    weather,
)
from netsim.testing.laws import compact_yaml
from netsim.units import parse_bits_per_second

Rows = list[tuple[int, int, int, int]]


def echoing_broadcast(p: Problem) -> tuple[Phase, ...]:
    """The root gets back what it has sent."""
    if p.num_ranks < 2:
        return ()
    back = ListedPhase([step_of([((p.root + 1) % p.num_ranks, p.root, 0, p.num_bytes)])])
    return *broadcast_direct(p), back


def detour(p: Problem) -> tuple[Phase, ...]:
    """The root sends a part to a member that does not take it."""
    others = [rank for rank in range(p.num_ranks) if rank != p.root][:2]
    rows: Rows = [(p.root, one, *p.layout[other : other + 2]) for one, other in pairwise(others)]
    return *scatter_direct(p), ListedPhase([step_of(rows)])


def racing_broadcast(p: Problem) -> tuple[Phase, ...]:
    """Member 1 passes on the root's bytes in a window in which other bytes may have come over them."""
    if p.num_ranks < 3 or p.root:
        return broadcast_direct(p)
    rest = [(0, rank, 0, p.num_bytes) for rank in range(3, p.num_ranks)]
    steps = [step_of([(0, 1, 0, p.num_bytes)]), step_of([]), step_of([(2, 1, 0, p.num_bytes), *rest])]
    return (
        ListedPhase([*steps, step_of([(1, 2, 0, p.num_bytes)]), step_of([(2, 1, 0, p.num_bytes)])], window=2),
    )


class LyingPhase(RingPhase):
    """Counts half of its bytes."""

    def sent_bytes(self, *arguments: Any) -> Any:
        return super().sent_bytes(*arguments) // 2


def miscounted_ring(p: Problem) -> tuple[Phase, ...]:
    return (LyingPhase(p.ranks, p.layout, shift=0, reduce=False),)


def by_name(p: Problem) -> tuple[Phase, ...]:
    """Regions' first members, in the order of the regions' names."""
    leaders = [p.regions.index(name) for name in sorted(set(p.regions))]
    rows: Rows = [(rank, leaders[0], 0, p.num_bytes) for rank in range(p.num_ranks) if rank != leaders[0]]
    back: Rows = [(dst, src, low, high) for src, dst, low, high in rows]
    return ListedPhase([step_of(rows)], reduce=True), ListedPhase([step_of(back)])


named_star = Algorithm(by_name, needs_regions=True, num_messages=lambda num: num)


def moody(p: Problem) -> tuple[Phase, ...]:
    root = random.randrange(p.num_ranks)
    rows: Rows = [(rank, root, 0, p.num_bytes) for rank in range(p.num_ranks) if rank != root]
    back: Rows = [(dst, src, low, high) for src, dst, low, high in rows]
    return ListedPhase([step_of(rows)], reduce=True), ListedPhase([step_of(back)])


def powers_only(p: Problem) -> tuple[Phase, ...]:
    order = {1: 0, 2: 1, 4: 2, 8: 3}[p.num_ranks]
    steps = [
        step_of([(rank, rank ^ (1 << bit), 0, p.num_bytes) for rank in range(p.num_ranks)])
        for bit in range(order)
    ]
    return (ListedPhase(steps, reduce=True),)


def ring_as_a_schedule(p: Problem) -> Schedule:
    phases = all_reduce_ring(p)
    return Schedule(p.op, "mine", p.num_ranks, p.num_bytes, phases, p.layout, 0, p.element_bytes)


def test_a_right_algorithm_passes_as_phases_and_as_a_schedule() -> None:
    for build in (all_reduce_ring, ring_as_a_schedule):
        assert check_schedule(build, "all_reduce", cases=40).num_cases == 40


PLANTED: list[Any] = [
    (racing_broadcast, "broadcast", "if messages arrive early|ends without the values"),
    pytest.param(
        echoing_broadcast, "broadcast", "to member 0: it holds them already", marks=pytest.mark.thorough
    ),
    pytest.param(detour, "scatter", "no result depends on them", marks=pytest.mark.thorough),
    pytest.param(
        miscounted_ring, "all_gather", r"`sent_bytes` of its phases|at least", marks=pytest.mark.thorough
    ),
    (named_star, "all_reduce", "regions have other names"),
    (moody, "all_reduce", "other messages when built again"),
    pytest.param(
        powers_only, "all_reduce", r"KeyError at test_testing_laws.py:\d+: 3", marks=pytest.mark.thorough
    ),
]


@pytest.mark.parametrize(("build", "op", "line"), PLANTED)
def test_each_law_catches_a_planted_bug(build: Any, op: str, line: str) -> None:
    with pytest.raises(LawError, match=line) as caught:
        check_schedule(build, op, seed=1, cases=300)
    assert len(caught.value.program.splitlines()) <= 15
    if "moody" in str(build):
        return  # draws anew
    with pytest.raises(LawError) as again:
        caught.value.case.check(build)
    assert again.value.problem == caught.value.problem


@pytest.mark.parametrize(
    ("name", "planted", "line"),
    [
        ("time_collective", DeadlockError("deadlock: nobody sends"), "deadlock: nobody sends"),
        ("lower_bound_seconds", 1e9, "and no algorithm less than"),
    ],
)
def test_laws_of_the_network_catch_a_planted_bug(
    name: str, planted: Any, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*arguments: Any, **options: Any) -> Any:
        if isinstance(planted, Exception):
            raise planted
        return planted

    monkeypatch.setattr(f"netsim.testing.laws.{name}", wrong)
    with pytest.raises(LawError, match=line):
        check_schedule(all_reduce_ring, "all_reduce", cases=5)


@given(st.integers(1, 8), st.booleans(), st.data())
def test_drawn_networks_are_files(num_hosts: int, is_detailed: bool, data: st.DataObject) -> None:
    form = data.draw(topologies(num_hosts, num_hosts, is_detailed=is_detailed))
    form["protocol"] = data.draw(protocols())
    plain = Topology.from_mapping(form)
    assert len(plain.hosts) == num_hosts
    form |= data.draw(weather(form))
    topology = Topology.from_mapping(form)
    assert topology.weather
    assert yaml.safe_load(repr(form)) == form
    assert yaml.safe_load(compact_yaml(form, 1)) == form
    topology.place(5, data.draw(placements(form, 5)))
    for link in plain.links:
        assert link.bits_per_second >= parse_bits_per_second("1 Mbit/s")


def test_the_table_times_it_beside_each_shipped_algorithm() -> None:
    table = compare_schedules(all_reduce_ring, "all_reduce", networks=["lan"], sizes=["1 MB"])
    ((network, size, bound, seconds),) = table.rows
    assert (network, size, [*seconds]) == ("lan", 10**6, ["all_reduce_ring", *ALGORITHMS["all_reduce"]])
    assert bound < seconds["all_reduce_ring"] == seconds["ring"]
    own = compare_schedules(ALGORITHMS["broadcast"]["tree"], "broadcast", networks=["lan"], sizes=[1000])
    assert next(iter(own.rows[0][3])) == "tree"
    assert str(own).splitlines()[0].split() == ["network", "size", *own.rows[0][3], "bound"]


def test_the_command_names_what_is_no_algorithm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = "def ends(p):\n    raise SystemExit(3)\ndef two(p, q): ...\n"
    (tmp_path / "planted.py").write_text(
        f"from netsim.collectives.schedules.trees import broadcast_tree as star\n{ends}"
    )
    (tmp_path / "ending.py").write_text("import sys; sys.exit(0)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    command = ["check", "--operation", "broadcast", "--cases", "20", "--topology", "lan", "--bytes", "1 MB"]
    assert main([*command, "planted:star"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "broadcast by planted:star: 20 cases passed (seed 0)"
    assert out[2].split()[:3] == ["network", "size", "broadcast_tree"]
    for wrong, line in (
        ("planted", "planted: expected MODULE:FUNCTION, such as mine:ring"),
        ("nowhere:half", "nowhere:half: cannot import 'nowhere' (No module named 'nowhere')"),
        ("planted:stars", "unknown function of planted 'stars': did you mean 'star'?"),
        ("planted.py:star", "planted.py:star: is a file: write planted:star"),
        ("ending:star", "ending:star: cannot import 'ending' (SystemExit: 0)"),
        (
            "planted:two",
            "check_schedule: two: cannot be called with one argument, a Problem (missing a required",
        ),
        ("planted:__doc__", "planted:__doc__: is NoneType, neither a function nor an Algorithm"),
    ):
        assert main([*command, wrong]) == 2
        assert line in capsys.readouterr().err
    assert main([*command, "planted:ends"]) == 1
    assert "error: broadcast by ends: SystemExit at planted.py:3: 3" in capsys.readouterr().err
    sys.modules.pop("planted")


@pytest.mark.thorough
def test_the_page_shows_what_its_programs_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "testing_collectives.md").read_text()
    blocks = re.findall(r"^```(python|text)\n(.*?)^```", page, re.S | re.M)
    (_, mine), (_, failing), (_, fixed), (_, table) = blocks[:4]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("mine.py").write_text(mine)
    assert main(["check", "mine:ring", "--operation", "all_reduce"]) == 1
    assert capsys.readouterr().out == failing
    with pytest.raises(LawError, match=re.escape(failing.splitlines()[0].removeprefix("# "))):
        exec(failing, {})
    sys.modules.pop("mine")
    exec(fixed, {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == table.splitlines()[0]
    assert [line.split() for line in printed if " 1 MB " in line] == [
        line.split() for line in table.splitlines()[2:]
    ]
