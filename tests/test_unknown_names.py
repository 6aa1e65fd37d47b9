"""Names that do not exist: all told at once, and what is accepted in an order that can be searched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exogym_core.cost.compute import Compute
from exogym_core.strategy import DiLoCoStrategy
from exogym_core.tasks import build_model, build_task
from exogym_core.training.trainer import Trainer
from netsim.files.errors import UnknownNameError, unknown_name, unknown_names

NAMES = st.text("abcdefgh_-XYZ", min_size=1, max_size=8)


@given(NAMES, st.sets(NAMES, min_size=1, max_size=12))
def test_the_nearest_come_first_and_the_rest_is_in_alphabetical_order(given: str, known: set[str]) -> None:
    """The whole list used to be in the order of likeness to what was given: no order to the eye."""
    told = str(unknown_name("thing", given, known))
    accepted = told.partition("Accepted: ")[2].split(", ")
    assert sorted(accepted) == sorted(known)
    tails = [accepted[at:] for at in range(len(accepted) + 1)]
    ordered = next(
        at for at, tail in enumerate(tails) if tail == sorted(tail, key=lambda name: (name.casefold(), name))
    )
    if "did you mean" in told:
        assert f"did you mean '{accepted[0]}'" in told
    likeness = [len(set(given.lower()) & set(name.lower())) for name in accepted]
    assert all(likeness[at] for at in range(ordered)), "what comes before has something in common with it"


def test_several_are_told_in_one_line() -> None:
    told = str(unknown_names("key of compute", ["jiter", "q"], ["jitter", "fixed"]))
    assert told == "unknown keys of compute 'jiter' (did you mean 'jitter'?), 'q': Accepted: jitter, fixed"


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (
            lambda: DiLoCoStrategy(h=3, inner_optin="adam"),
            "unknown arguments of DiLoCoStrategy 'h' (did you mean 'H'?), 'inner_optin' (did you mean ",
        ),
        (
            lambda: DiLoCoStrategy(rank=0, inner_optin="adam"),
            "unknown argument of DiLoCoStrategy 'rank': the Trainer gives it to the strategy; leave it out; "
            "unknown argument of DiLoCoStrategy 'inner_optin': did you mean 'inner_optim'? ",
        ),
        (lambda: DiLoCoStrategy("adamw", lrr=1, wd=2), "unknown arguments of DiLoCoStrategy 'lrr'"),
        (lambda: Trainer(None, None).fit(stepz=1, evry=2), "unknown arguments of fit 'stepz'"),
        (
            lambda: Compute.parse({"jiter": 1, "fixd": 2}),
            "unknown keys of compute 'jiter' (did you mean 'jitter'?), 'fixd'",
        ),
        (
            lambda: build_model("mlp", build_task("digits"), hiden=[1], depht=2),
            "unknown options of model mlp 'hiden' (did you mean 'hidden'?), 'depht': ",
        ),
    ],
)
def test_who_takes_names_tells_all_that_are_wrong(make: object, line: str) -> None:
    """Only the first was told, and the next at the next attempt."""
    with pytest.raises(UnknownNameError) as caught:
        make()  # type: ignore[operator]
    assert str(caught.value).startswith(line)


def test_a_name_from_a_file_cannot_write_to_the_terminal() -> None:
    told = str(unknown_name("host", "7\x1b[2J\u202e" + "x" * 1000, ["7", "a"]))
    assert told.isprintable()
    assert r"'7\x1b[2J\u202exxx" in told or r"'7\x1b[2J\x202exxx" in told
    assert len(told) < 300
