"""Published shares of devices' peak in plans."""

from __future__ import annotations

import pytest
from experiments import json_of

from netgym.planning.tables import published_share

WORDS = [
    "plan",
    "--parameters",
    "13B",
    "--strategy",
    "DiLoCo",
    "--topology",
    "lan",
    "--workers",
    "2",
    "--protocol",
    "ideal",
    "--tokens",
    "1B",
    "--json",
]


def test_shares_are_the_median_and_range_of_models_of_nearly_this_size() -> None:
    """By hand: MosaicML's 6.7B and 13B and TorchTitan's 8B and 13B on A100."""
    share = published_share("a100", 10_000_000_000)
    shares = sorted(
        [0.545, 0.548, 0.642, 0.58, 0.568, 0.582, 0.561, 0.576, 0.596, 0.595, 0.611, 0.541, 0.538]
    )
    assert share[:3] == (shares[6], shares[0], shares[-1])
    assert "TorchTitan" in share.text


def test_a_plan_at_published_shares(capsys: pytest.CaptureFixture[str]) -> None:
    """Its days are those at the median; computing alone in the band, by the least and the most."""
    more = ["--device", "a100", "--utilisation"]
    (plan,) = json_of([*WORDS, *more, "published"], capsys)
    share = published_share("a100", 13_000_000_000)
    (given,) = json_of([*WORDS, *more, str(share.median)], capsys)
    assert plan["days"] == pytest.approx(given["days"], rel=1e-9)
    computing, waiting = given["compute_utilisation"], 1 - given["compute_utilisation"]
    error = (given["days_high"] / given["days"] - 1) / waiting
    expected = given["days"] * (computing * share.median / share.least + waiting * (1 + error))
    assert plan["days_high"] == pytest.approx(expected, rel=1e-9)
    assert any(share.text in remark for remark in plan["remarks"])
