"""The network still answers what it did when the corpus was frozen: a fixed part of it; `make.py compare` has all."""

from __future__ import annotations

import pytest
from make import PARTS, compare, frozen


@pytest.mark.parametrize("part", PARTS)
def test_answers_are_as_frozen(part: str) -> None:
    kept = frozen(part)
    names = list(PARTS[part].names())
    assert sorted(kept) == sorted(names)
    wrong = [
        str(difference)
        for name in names[:: PARTS[part].stride]
        for difference in compare(part, name, kept[name])
        if not difference.is_allowed
    ]
    assert not wrong, "\n".join(wrong[:20])
