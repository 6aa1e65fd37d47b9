"""The network still answers what it did when the corpus was frozen: a fixed part of it; `make.py compare` has all."""

from __future__ import annotations

import pytest
from frozen_runs import CARRIERS
from make import PARTS, compare, frozen


@pytest.mark.parametrize("part", PARTS)
def test_answers_are_as_frozen(part: str) -> None:
    names = list(PARTS[part].names())
    assert sorted(frozen(part)) == sorted(["", *names])
    wrong = [
        str(difference)
        for name in PARTS[part].tested(names)
        for difference in compare(part, name)
        if not difference.is_allowed
    ]
    assert not wrong, "\n".join(wrong[:20])


def test_threads_processes_and_resumed_runs_were_the_same() -> None:
    kept = {tuple(name.rsplit(" ", 1)): answer for name, answer in frozen("runs").items() if name}
    for (run, _), answer in kept.items():
        for carrier in CARRIERS:
            assert kept[run, carrier] == answer, run
