"""The engine compiled and interpreted: the same bits; and which of the two runs after its sources were edited."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_live_collectives import draw_call, ends, networks, started
from worlds import use_sources

import netsim
from netsim import Clock, Network, Topology
from netsim.network.build import MODULES, runs_compiled, source_hash

PROTOCOLS = [
    "ideal",
    "linux-tcp",
    "gloo",
    {"preset": "linux-tcp", "queue": 30},
    {"preset": "linux-tcp", "connections": "per-transfer"},
    {"preset": "nccl-sockets", "sockets_per_thread": 4},
]
LOSSY_LINE = {"between": ["a", "b"], "bandwidth": "50 Mbit/s", "rtt": "30 ms", "loss": "0.1 %"}
LOSSY = {"hosts": ["a", "b"], "links": [LOSSY_LINE], "protocol": "ideal"}


@pytest.fixture(scope="module")
def compiled() -> None:
    if not runs_compiled():
        pytest.skip("the engine is not compiled here: pip install -e . where a C compiler is")


@pytest.mark.usefixtures("compiled")
@settings(max_examples=20)
@given(data=st.data(), protocol=st.sampled_from(PROTOCOLS))
def test_compiled_and_interpreted_engines_agree_bit_by_bit(data: st.DataObject, protocol: Any) -> None:
    """Collectives, other transfers, and links that change or die for a while, on random networks."""
    topology = Topology.from_mapping(data.draw(networks()))
    num = len(topology.hosts)
    calls = [draw_call(data, num, after) for after in (0.0, 0.25)]
    instants = st.integers(0, 500).map(lambda number: number / 1024)
    host, link = st.integers(0, num - 1), st.integers(0, len(topology.links) - 1)
    others = data.draw(
        st.lists(st.tuples(instants, host, host, st.sampled_from([0.0, 9e3, 8e5])), max_size=3)
    )
    dead = data.draw(st.lists(st.tuples(instants, link), max_size=2))

    def run() -> tuple[list[list[float]], list[float], int]:
        network = Network(Clock(), topology, protocol)
        clock = network.env
        for instant, *args in others:
            clock.at(instant, call=lambda event, args=args: network.send(*args, lambda: None))
        for instant, index in dead:
            clock.at(instant, call=lambda event, index=index: network.set_link_up(index, False))
            clock.at(instant + 0.5, call=lambda event, index=index: network.set_link_up(index, True))
        done = ends(started, network, calls, range(num))
        return done, network.link_bytes.tolist(), network.engine.counts.num_events

    first = run()
    with pytest.MonkeyPatch.context() as patch:
        use_sources(patch)
        assert run() == first


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("protocol", ["linux-tcp", "nccl-sockets"])
def test_they_agree_on_a_long_transfer_with_losses(protocol: str) -> None:
    topology = Topology.from_mapping(LOSSY)

    def run() -> tuple[float, int, float]:
        network = Network(Clock(), topology, protocol)
        network.env.run(network.transfer(0, 1, 1e9))
        taken = netsim.collective(topology, "broadcast", num_bytes=1 << 25, protocol=protocol).seconds
        return network.env.now, network.engine.counts.num_events, taken

    first = run()
    with pytest.MonkeyPatch.context() as patch:
        use_sources(patch)
        assert run() == first


# -- which one runs ----------------------------------------------------------------------------------------------

ASK = """
import sys, warnings
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    from netsim.network import engine, build
    import netsim.network.network
print(engine.__file__.endswith(".py"), len(warned), *(each.message for each in warned))
"""


def copied(folder: Path) -> Path:
    """A copy of the package without what is compiled; returns the folder of its engine."""
    source = Path(netsim.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "compiled.sha256")
    shutil.copytree(source, folder / "netsim", ignore=ignored)
    return folder / "netsim" / "network"


def asked(folder: Path) -> str:
    """Whether the copy's engine comes from a source, how many warnings there were, and which."""
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=True, env=environment, cwd=folder
    )
    return done.stdout.strip()


def pretend(network: Path, fits: bool) -> None:
    """Files as mypyc leaves them, empty ones; and a hash."""
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    for name in MODULES:
        (network / f"{name}{suffix}").touch()
    (network.parent.parent / f"netsim_network__mypyc{suffix}").touch()
    (network / "compiled.sha256").write_text((source_hash() if fits else "0" * 64) + "\n")


def test_without_anything_compiled_sources_run_and_nothing_is_said(tmp_path: Path) -> None:
    copied(tmp_path)
    assert asked(tmp_path) == "True 0"


def test_an_edited_source_runs_interpreted_with_one_warning(tmp_path: Path) -> None:
    """Python would load the old extension beside it: an edit that does nothing, without a word."""
    network = copied(tmp_path)
    pretend(network, fits=True)
    with open(network / "fairness.py", "a", encoding="utf-8") as file:
        file.write("# edited\n")
    assert asked(tmp_path) == (
        "True 1 netsim/network was edited after it was compiled and runs interpreted; "
        "compile it again: pip install -e ."
    )


def test_a_hash_that_fits_has_the_extensions_loaded(tmp_path: Path) -> None:
    """They are empty here, so loading them fails: but they are what is loaded."""
    network = copied(tmp_path)
    pretend(network, fits=True)
    with pytest.raises(subprocess.CalledProcessError) as error:
        asked(tmp_path)
    assert "ImportError" in error.value.stderr
    assert "netsim_network__mypyc" in error.value.stderr


@pytest.mark.usefixtures("compiled")
def test_what_is_compiled_is_what_runs() -> None:
    for name in MODULES:
        file = sys.modules[f"netsim.network.{name}"].__file__
        assert file.endswith(tuple(importlib.machinery.EXTENSION_SUFFIXES))
