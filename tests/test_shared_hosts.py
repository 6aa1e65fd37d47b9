"""More workers than hosts: reported in a line, and slower where a host says how many devices it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experiments import Squares, experiment
from torch.utils.data import TensorDataset
from worlds import chain_form

from exogym_core import Trainer
from exogym_core.strategy import AllReduceStrategy
from netgym.cli.main import main
from netsim import Topology

EXPERIMENT = experiment(
    workers="{count: %s, kind: threads}",
    topology="{hosts: {a: %s, b: %s}, links: [{between: [a, b], bandwidth: 1 Gbit/s}]}",
    compute="50 ms",
    steps=2,
    evaluate=None,
    strategies="[AllReduce]",
)


def seconds(num_nodes: int, **host: Any) -> float:
    """Virtual seconds of 4 steps of 1 s each, on two hosts that nothing delays between."""
    network = chain_form({"a": host, "b": {}}, "1000 Gbit/s", "0 s")
    trainer = Trainer(Squares(2), TensorDataset(torch.ones(64, 2)), device="cpu")
    model = trainer.fit(
        strategy=AllReduceStrategy(lr=0.1),
        num_nodes=num_nodes,
        max_steps=4,
        batch_size=2,
        topology=network,
        compute=1.0,
        workers="threads",
    )
    return float(model.fit_result.virtual_seconds)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize(
    ("num_nodes", "host", "steps"),
    [
        (6, {}, 4.0),
        (6, {"devices": 3}, 4.0),
        (6, {"devices": 1}, 12.0),
        (6, {"devices": 2}, 6.0),
        (2, {"devices": 1}, 4.0),
    ],
)
def test_workers_beyond_a_host_s_devices_share_them(
    num_nodes: int, host: dict[str, Any], steps: float
) -> None:
    """Three workers on one device computed as fast as one."""
    assert seconds(num_nodes, **host) == pytest.approx(steps, abs=1e-3)


@pytest.mark.parametrize(
    ("count", "a", "b", "message"),
    [
        (2, "{}", "{}", None),
        (3, "{}", "{}", "3 workers are placed on 2 hosts, up to 2 on one: each computes at full speed"),
        (3, "{devices: 1}", "{}", "those beyond a host's devices share them"),
    ],
)
def test_it_is_reported_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int, a: str, b: str, message: str | None
) -> None:
    """64 workers on 16 hosts were valid without a word."""
    path = tmp_path / "crowd.yaml"
    path.write_text(EXPERIMENT % (count, a, b))
    assert main(["validate", str(path)]) == 0
    out = capsys.readouterr().out
    assert (message in out) if message else ("hosts, up to" not in out)


def test_devices_are_kept_and_checked() -> None:
    given = {"regions": {"a": {"hosts": 2, "nic": "1 Gbit/s", "devices": 8}}, "hosts": {"h": {"devices": 2}},
             "links": [{"between": ["h", "a"], "bandwidth": "1 Gbit/s"}],  "protocol": "ideal"}  # fmt: skip
    topology = Topology.from_mapping(given)
    assert [host.devices for host in topology.hosts] == [8, 8, 2]
    assert Topology.from_mapping(topology.to_mapping()) == topology
