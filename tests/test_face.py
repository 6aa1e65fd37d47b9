"""`import netsim`: its names, its cost, and that one line gives the results of the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from worlds import chain_form

import exogym_core
import netsim
from netsim.cli.main import cli

PAIR = chain_form("ab", "10 Gbit/s", "20 ms")


@pytest.mark.parametrize("how", ["name", "path", "mapping", "object"])
def test_a_topology_in_any_form(how: str, tmp_path: Path) -> None:
    loaded = netsim.Topology.from_mapping(PAIR)
    path = tmp_path / "pair.yaml"
    path.write_text(json.dumps(loaded.to_mapping()))
    forms: dict[str, Any] = {"name": "lan", "path": path, "mapping": PAIR, "object": loaded}
    took = netsim.collective(forms[how], "all_reduce", num_bytes=1000)
    assert took.seconds == max(took.rank_seconds) >= took.bound_seconds > 0


def test_a_line_of_python_says_what_the_command_says() -> None:
    arguments = [
        "collective",
        "wan-4-regions",
        "all_reduce",
        "--bytes",
        "25MB",
        "--ranks",
        "eu.0,us-west.1,asia.2",
    ]
    result = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).output)
    took = netsim.collective(
        "wan-4-regions", "all_reduce", num_bytes=25_000_000, ranks=["eu.0", "us-west.1", "asia.2"]
    )
    assert result["seconds"] == took.repeat_seconds == [took.seconds]
    assert result["rank_seconds"] == took.rank_seconds
    assert result["link_bytes"] == took.link_bytes
    assert result["algorithm"] == took.algorithm
    assert result["lower_bound_seconds"] == took.bound_seconds


def test_flows_by_name_by_key_and_from_a_file(tmp_path: Path) -> None:
    rows = [(0.0, "a", "b", 10_000_000), (0.5, "a", "b", 5_000_000)]
    keyed = [dict(zip(("start_s", "src", "dst", "bytes"), row, strict=True)) for row in rows]
    path = tmp_path / "flows.csv"
    path.write_text("start_s,src,dst,bytes\n" + "".join(",".join(map(str, row)) + "\n" for row in rows))
    finish = netsim.flows(PAIR, rows).finish_seconds
    assert finish == pytest.approx([0.02 + 0.008, 0.5 + 0.02 + 0.004])
    assert netsim.flows(PAIR, keyed).finish_seconds == finish
    assert netsim.flows(PAIR, str(path)).finish_seconds == finish
    assert netsim.flows(PAIR, [("0 s", "a", "b", "10 MB"), ("500 ms", 0, 1, "5 MB")]).finish_seconds == finish


def test_only_a_barrier_needs_no_size_and_none_may_be_given_on_purpose() -> None:
    """A size that was forgotten used to be a tensor of no bytes, which takes no seconds."""
    assert netsim.collective(PAIR, "barrier").seconds > 0
    assert netsim.collective(PAIR, "all_reduce", num_bytes=0).seconds >= 0


def test_whole_bytes_are_taken_as_any_kind_of_number() -> None:
    rows = [(0, "a", "b", number) for number in (10**6, 1e6, np.int64(10**6), np.float32(10**6))]
    assert len({netsim.flows(PAIR, [row]).finish_seconds[0] for row in rows}) == 1


@pytest.mark.parametrize("package", [netsim, exogym_core])
def test_dir_shows_what_is_public_and_nothing_else(package: Any) -> None:
    """What the package itself imports was listed as if it were part of its face."""
    shown = [name for name in dir(package) if not name.startswith("__")]
    assert shown == sorted(package.__all__)


def test_a_window_that_limits_is_reported_with_the_remedy_and_the_remedy_helps() -> None:
    """40 ms and 4 MiB in flight are 839 Mbit/s, however fast the line; streams or a larger window fill it."""
    took = netsim.collective(PAIR, "all_reduce", num_bytes="1 GB", protocol="linux-tcp", repeat=2)
    limit = took.window_limit
    assert limit.window_bits_per_second == pytest.approx(4 * 2**20 * 8 / 0.04)
    assert "streams: 12 or window: 46 MiB" in str(limit)
    for remedy in ({"streams": limit.streams}, {"window": limit.window_bytes}):
        better = netsim.collective(
            PAIR, "all_reduce", num_bytes="1 GB", protocol={"preset": "linux-tcp", **remedy}, repeat=2
        )
        assert better.window_limit is None
        assert better.seconds < took.seconds / 1.5
    shown = CliRunner().invoke(cli, ["collective", "opendiloco-4-sites", "all_reduce", "--bytes", "1GB"])
    assert shown.exit_code == 0
    assert netsim.collective(PAIR, "all_reduce", num_bytes="1 MB", protocol="linux-tcp").window_limit is None
    assert netsim.collective(PAIR, "all_reduce", num_bytes="1 GB", protocol="ideal").window_limit is None
    assert netsim.flows(PAIR, [(0, "a", "b", 10**9)], "linux-tcp").window_limit is not None


def test_the_bound_knows_a_region_s_lines_with_one_host_each() -> None:
    """What must leave and enter a region crosses its lines, also where one host of each takes part."""
    hosts = ["asia.0", "eu.0", "us-east.0", "us-west.0"]
    took = netsim.collective(
        "wan-4-regions", "all_reduce", num_bytes=860_000_000, ranks=hosts, protocol="ideal"
    )
    lines_of_asia = (360 + 524 + 523) * 1e6 / 8
    assert took.seconds >= took.bound_seconds >= 860e6 / lines_of_asia
