"""What traffic costs: prices on links, from file to dollars."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import netsim
from netsim.files.units import parse_bits_per_second, parse_dollars_per_byte
from netsim.tools.cli import cli


def pair(egress: str) -> dict[str, object]:
    link = {"between": ["a", "b"], "bandwidth": "1 Gbit/s", "latency": "1 ms", "egress": egress}
    return {"name": "pair", "source": "test", "hosts": ["a", "b"], "links": [link]}


@given(st.floats(0, 1e6, allow_subnormal=False))
def test_prices_read_back_from_what_a_topology_writes(dollars: float) -> None:
    topology = netsim.Topology.from_mapping(pair(f"{dollars!r} $/GB"))
    assert netsim.Topology.from_mapping(topology.to_mapping()) == topology
    assert topology.egress_dollars([1e9, 2e9]) == pytest.approx(3 * dollars)


def test_a_collective_tells_what_its_traffic_costs() -> None:
    """Both halves of a ring cross once each way: 2 GB, 1 GB a direction, at 2 cents."""
    took = netsim.collective(pair("0.02 $/GB"), "all_reduce", num_bytes="1 GB", algorithm="ring")
    assert took.dollars == pytest.approx(0.04)
    assert netsim.collective(pair("0 $/GB"), "all_reduce", num_bytes="1 GB").dollars == 0
    told = CliRunner().invoke(
        cli, ["collective", "aws-12-regions-64-streams", "all_reduce", "--bytes", "1GB", "--json"]
    )
    assert json.loads(told.output)["dollars"] > 0


@pytest.mark.parametrize("text", ["0.02", "0.02 $", "-1 $/GB", "1 $/Gbit", "1e999 $/GB", "0.02 EUR/GB", 0.02])
def test_what_is_no_price_is_told(text: object) -> None:
    with pytest.raises(netsim.InputError, match="expected a price such as"):
        parse_dollars_per_byte(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("300 MB/s", "2.4 Gbit/s"),
        ("1.5 GB/s", "12 Gbit/s"),
        ("300 MBps", "2.4 Gbit/s"),
        ("4 MiB/s", "33.55 Mbit/s"),
    ],
)
def test_bytes_a_second_are_not_taken_for_bits(text: str, rate: str) -> None:
    """The advice used to be Mbit/s, which is wrong by 8."""
    with pytest.raises(netsim.InputError) as caught:
        parse_bits_per_second(text)
    assert str(caught.value) == (
        f"'{text}' is in bytes, and rates are in bits: write '{rate}' if bytes are meant"
    )
