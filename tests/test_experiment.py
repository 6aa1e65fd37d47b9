"""Experiment files: what is accepted, what is refused with which line, the resolved form, and options."""

from __future__ import annotations

import gzip
import inspect
import math
import urllib.error
import urllib.request
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from experiments import FILE as SMALL
from experiments import fit
from torch.distributed import ReduceOp

from exogym_core import Trainer
from exogym_core.communicator.base import reduce_op_name
from exogym_core.config import OPTIONS, RunConfig
from exogym_core.strategy import AllReduceStrategy
from exogym_core.strategy.optimizers import build_scheduler, resolve_scheduler
from netgym.cli.main import main
from netgym.experiment.experiment import Experiment
from netgym.planning.planned import request_of
from netgym.tasks import build_model, build_task
from netgym.tasks.images import read_idx
from netsim.errors import InputError, UnknownNameError
from netsim.topology.topology import Topology


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "small.yaml"
        path.write_text(text)
        return path

    return write


def test_defaults_are_written_out_and_the_topology_inlined(write: Any) -> None:
    plain = yaml.safe_load(Experiment.load(write(SMALL)).to_yaml())
    assert plain["name"] == "small"
    assert plain["task"] == {"name": "digits"}
    assert plain["workers"].items() >= {"count": 2, "kind": "auto", "processes": None}.items()
    assert plain["topology"]["name"] == "two-datacenters"
    assert plain["strategies"][1] == {"name": "DiLoCo", "label": "DiLoCo", "H": 3}
    assert plain["evaluate"].items() >= {"every": 100, "samples": None}.items()
    assert plain["seed"] == 0


def test_joins_and_leaves_of_a_file_are_inlined(write: Any, tmp_path: Path) -> None:
    """A run's topology named the file, which its folder lacks."""
    away = "start_s,host,event\n0,lan.1,join\n1,lan.1,leave\n"
    (tmp_path / "away.csv").write_text(away)
    network = "name: net\nregions: {lan: {hosts: 2, nic: 1 Gbit/s}}\navailability: [{file: away.csv}]\n"
    (tmp_path / "net.yaml").write_text(network)
    given = Experiment.load(write(SMALL.replace("topology: two-datacenters", "topology: net.yaml")))
    (tmp_path / "away.csv").unlink()
    assert Experiment.load(write(given.to_yaml())).topology == given.topology


def test_the_resolved_form_resolves_to_itself(write: Any) -> None:
    tricky = SMALL.replace("task: digits", "task: {name: digits, seed: 3}") + "name: '1e9'\ntarget_loss: 1\n"
    text = Experiment.load(write(tricky)).to_yaml()
    again = Experiment.load(write(text))
    assert again.to_yaml() == text
    assert again.settings.name == "1e9"


def test_the_order_of_keys_changes_nothing(write: Any) -> None:
    expected = Experiment.load(write(SMALL)).to_yaml()
    plain = yaml.safe_load(SMALL)
    reversed_keys = {key: plain[key] for key in reversed(plain)}
    reversed_keys["strategies"] = ["AllReduce", {"H": 3, "name": "DiLoCo"}]
    assert Experiment.load(write(yaml.safe_dump(reversed_keys, sort_keys=False))).to_yaml() == expected


def test_equal_strategies_get_labels_of_their_own(write: Any) -> None:
    text = SMALL + "  - {name: DiLoCo, H: 2}\n  - {name: DiLoCo, H: 2, label: often}\n"
    labels = [entry.label for entry in Experiment.load(write(text)).strategies]
    assert labels == ["AllReduce", "DiLoCo", "DiLoCo-2", "often"]


def test_one_strategy_can_be_chosen(write: Any) -> None:
    experiment = Experiment.load(write(SMALL))
    assert [entry.label for entry in experiment.only("DiLoCo").strategies] == ["DiLoCo"]
    several = experiment.only("DiLoCo", "AllReduce", "DiLoCo")
    assert [entry.label for entry in several.strategies] == ["DiLoCo", "AllReduce"]
    with pytest.raises(UnknownNameError, match="unknown strategy 'Diloco': did you mean 'DiLoCo'"):
        experiment.only("Diloco")


def test_overrides_go_through_keys_positions_and_names(write: Any) -> None:
    overrides = [
        "steps=20",
        "workers.kind=processes",
        "strategies.DiLoCo.H=9",
        "strategies.*.lr=1e-1",
        "strategies.0.lr=1e-2",
        "task.validation_fraction=0.5",
        "checkpoint.every=5",
        "evaluate={every: 2, samples: 8}",
    ]
    experiment = Experiment.load(write(SMALL), overrides, {"topology": "lan", "protocol": "linux-tcp"})
    plain = experiment.to_mapping()
    assert plain["steps"] == 20
    assert plain["workers"]["kind"] == "processes"
    assert plain["strategies"][0]["lr"] == 0.01
    assert (plain["strategies"][1]["H"], plain["strategies"][1]["lr"]) == (9, 0.1)
    assert plain["task"] == {"name": "digits", "validation_fraction": 0.5}
    assert plain["checkpoint"] == {"every": 5}
    assert plain["evaluate"].items() >= {"every": 2, "samples": 8}.items()
    assert plain["topology"]["name"] == "lan"
    assert plain["protocol"] == "linux-tcp"


TWO_REGIONS = """regions:
  us: {hosts: 2, nic: 1 Gbit/s, latency: 50 us}
  eu: {hosts: 2, nic: 1 Gbit/s, latency: 50 us}
wan:
  - {between: [us, eu], bandwidth: 100 Mbit/s, rtt: 80 ms}
traces:
  - {link: [us, eu], bandwidth: rates.csv}
"""


def test_overrides_reach_into_a_topology_by_name(write: Any, tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(TWO_REGIONS)
    (tmp_path / "rates.csv").write_text("start_s,bits_per_second\n0,1e6\n")
    path = write(SMALL.replace("two-datacenters", "two.yaml"))
    overrides = ["topology.regions.us.hosts=8", "topology.wan.0.rtt=20 ms", "workers.count=10"]
    experiment = Experiment.load(path, overrides)
    changed = experiment.topology
    assert changed is not None
    unchanged = Topology.load(tmp_path / "two.yaml")
    assert (changed.name, len(changed.hosts), len(unchanged.hosts)) == (
        "two with regions.us.hosts 8; wan.0.rtt 20 ms",
        10,
        4,
    )
    assert changed.link_between["us", "eu"].latency_seconds == 0.01
    assert changed.weather.traces == unchanged.weather.traces
    again = tmp_path / "elsewhere" / "experiment.yaml"
    again.parent.mkdir()
    again.write_text(experiment.to_yaml())
    assert Experiment.load(again).topology == changed
    everywhere = Experiment.load(path, ["topology.regions.*.hosts=3"], {"topology": "wan-4-regions"}).topology
    assert everywhere is not None
    assert len(everywhere.hosts) == 12


def test_plans_place_a_worker_on_each_host_of_a_changed_topology() -> None:
    flags = {"model": "gpt-small", "strategies": ["DiLoCo"], "topology": "wan-4-regions", "device": "h100"}
    request = request_of(None, {}, overrides=["topology.regions.eu.hosts=1"], **flags)
    assert request.setting.num_ranks == 13
    swept = request_of(None, {"topology.regions.eu.hosts": "6"}, **flags)
    assert swept.setting.num_ranks == 18


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("task", ("digits", "{name: 'CODE:fails'}"), "it fails with KeyError at CODE.py:2: 'width'"),
        ("strategy", ("AllReduce", "{name: 'CODE:fails'}"), "it fails with KeyError at CODE.py:2: 'width'"),
        (
            "task",
            ("digits", "{name: 'CODE_import:any'}"),
            "its import fails with ZeroDivisionError at CODE_i",
        ),
    ],
)
def test_own_code_that_fails_is_reported_with_file_line_and_key(
    write: Any, tmp_path: Path, key: str, change: tuple[str, str], message: str
) -> None:
    """It used to be a bare KeyError: whose, of which key and in which file could not be seen."""
    name = f"failing_{key}"
    (tmp_path / f"{name}.py").write_text("def fails(**options):\n    return {}['width']\n")
    (tmp_path / f"{name}_import.py").write_text("any = 1 / 0\n")
    old, new = change
    path = write(SMALL.replace(old, new.replace("CODE", name), 1))
    experiment = Experiment.load(path)
    builds = {
        "strategy": lambda: experiment.build_strategy(experiment.strategies[0]),
        "task": experiment.build_task,
    }
    with pytest.raises(InputError) as caught:
        builds[key]()
    line = str(caught.value).splitlines()[0]
    place = "strategies[0]" if key == "strategy" else key
    assert line.startswith(f"{path}:"), line
    assert f": {place}: {key} '{name}" in line
    assert message.replace("CODE", name) in line


def test_a_device_that_is_elsewhere_is_valid_and_does_not_run_here(
    write: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(SMALL + "device: cuda:99\n")
    assert main(["validate", str(path)]) == 0
    assert "; device 'cuda:99' is not here: " in capsys.readouterr().out
    assert main(["compare", str(path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}:9: device: device 'cuda:99' is not here: ")
    assert not (tmp_path / "out").exists()


def test_a_transport_with_virtual_time_or_a_network_of_its_own_is_valid(
    write: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["validate", str(write(SMALL + "transport: netsim\nprotocol: ideal\n"))]) == 0
    monkeypatch.setenv("NETGYM_RENDEZVOUS", "127.0.0.1:1")  # the network is the real one there
    assert main(["validate", str(write(SMALL + "transport: gloo\nprotocol: ideal\n"))]) == 0


def test_servers_go_to_the_strategies_that_have_some(write: Any) -> None:
    path = write(SMALL.replace("DiLoCo, H: 3", "HALoS") + "servers: 3\n")
    experiment = Experiment.load(path)
    given = [experiment.fit_arguments(entry) for entry in experiment.strategies]
    assert [arguments["strategy"].num_servers for arguments in given] == [0, 3]
    assert [arguments.get("servers") for arguments in given] == [None, 3]
    hosts = ["east.0", "west.0", "east.1", "west.1", "east.0"]
    placed = Experiment.load(path, [f"placement=[{','.join(hosts)}]"])
    assert [placed.fit_arguments(entry)["placement"] for entry in placed.strategies] == [hosts[:2], hosts]
    with pytest.raises(InputError, match=r"placement: expected 2 host names, one a rank, got 5"):
        Experiment.load(path, [f"placement=[{','.join(hosts)}]", "servers=", "strategies=[AllReduce]"])


SCALES = """\
scales:
  tiny:
    steps: 2
    workers.count: 1
    strategies.DiLoCo: {name: DiLoCo, H: 1}
  wrong:
    strategies.DiLoCo: {name: DiLoCo, h: 1}
  lost:
    strategies.Diloco.H: 1
"""


def test_a_scale_replaces_keys_before_overrides_and_leaves_no_trace(write: Any) -> None:
    path = write(SMALL + SCALES)
    tiny = Experiment.load(path, scale="tiny")
    assert (tiny.settings.steps, tiny.settings.workers.count, tiny.strategies[1].options) == (2, 1, {"H": 1})
    assert Experiment.load(path, ["steps=3"], scale="tiny").settings.steps == 3
    plain = "\n".join(SMALL.splitlines()).replace("steps: 6", "steps: 2").replace("count: 2", "count: 1")
    assert tiny.to_yaml() == Experiment.load(write(plain.replace("H: 3", "H: 1"))).to_yaml()
    assert Experiment.load(write(SMALL + SCALES)).to_yaml() == Experiment.load(write(SMALL)).to_yaml()


@pytest.mark.parametrize(
    ("scale", "line"),
    [
        ("wrong", "{path}:15: strategies[1].h: unknown argument of DiLoCoStrategy 'h': "),
        (
            "lost",
            "{path}:17: scales.lost.strategies.Diloco.H: unknown entry 'Diloco': did you mean 'DiLoCo'?",
        ),
        ("tinny", "{path}:9: scales: unknown scale 'tinny': did you mean 'tiny'?"),
    ],
)
def test_mistakes_in_scales_are_placed(write: Any, scale: str, line: str) -> None:
    path = write(SMALL + SCALES)
    with pytest.raises(UnknownNameError) as caught:
        Experiment.load(path, scale=scale)
    assert str(caught.value).startswith(line.format(path=path))


def test_no_topology_on_purpose_turns_the_network_off_with_its_settings(write: Any) -> None:
    """`topology: null` leaves nothing to say for what describes a network; what needs virtual time is refused."""
    text = SMALL.replace("two-datacenters", "null") + "protocol: linux-tcp\ncollectives: ring\n"
    experiment = Experiment.load(write(text))
    arguments = experiment.fit_arguments(experiment.strategies[0])
    assert arguments["topology"] is None
    assert not {"compute", "placement", "protocol", "collectives"} & arguments.keys()
    with pytest.raises(InputError, match=r"small\.yaml:11: until: needs virtual time"):
        Experiment.load(write(text + "until: 2 s\n"))
    with pytest.raises(InputError, match=r"small\.yaml:3: compute: needs virtual time"):
        Experiment.load(write(SMALL.replace("topology: two-datacenters\n", "")))


# --- one route for options ----------------------------------------------------------------------------------


def test_fit_and_the_table_tell_the_same_names_in_the_same_order_with_the_same_defaults():
    defaults = {name: each.default for name, each in inspect.signature(Trainer.fit).parameters.items()}
    del defaults["self"]
    assert defaults == {each.name: each.default for each in fields(RunConfig)}
    assert all(f"\n            {name}: " in (Trainer.fit.__doc__ or "") for name in defaults)


ODD = [
    True, -1, math.nan, "", "x", [None], {None: None}, object(), lambda *_: None, np.array([1, 2]),
    Path("/nonexistent/x"), "a\0b",
]  # fmt: skip


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "wandb_project"])
def test_an_odd_value_of_any_option_is_taken_or_refused_in_a_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step: paths, functions and lists were looked at when they were needed."""
    monkeypatch.chdir(tmp_path)
    steps: list[Any] = []
    options = {
        "topology": "lan",
        "compute": "1 ms",
        "max_steps": 1,
        "progress": False,
        "on_event": steps.append,
    }
    warnings.simplefilter("ignore")
    for value in ODD:
        steps.clear()
        try:
            fit(**options | {name: value})
        except InputError as error:
            line = str(error).partition("\n")[0]
            assert not steps, f"{name}: {line}: after the first step"
            assert 10 < len(line) < 1000, line


# --- values in the forms in which users meet them elsewhere -------------------------------------------------


def test_reduce_ops_come_as_text_as_kinds_and_as_objects_of_c10d():
    for name in ("sum", "avg", "min", "max", "product"):
        kind = getattr(ReduceOp, name.upper())
        assert {reduce_op_name(form) for form in (name, name.upper(), kind, ReduceOp(kind))} == {name}
    for unknown in (ReduceOp.BXOR, ReduceOp(ReduceOp.BAND), 3, None):
        with pytest.raises(UnknownNameError, match="unknown reduce op"):
            reduce_op_name(unknown)


def test_null_in_a_schedule_means_its_default():
    """`warmup_steps: null` in an experiment used to fail inside a rank."""
    options = dict.fromkeys(("warmup_steps", "max_steps", "floor", "cosine_anneal"))
    resolve_scheduler("lambda_cosine", options)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    assert build_scheduler(optimizer, "lambda_cosine", options, 10).get_last_lr() == [1.0]


@pytest.mark.parametrize(("of_trainer", "of_fit"), [("auto", ""), ("", "auto")])
def test_no_device_is_written_as_exo_gym_and_as_experiments_do(of_trainer, of_fit):
    """`device=""` is EXO Gym's default, "auto" the experiment files'; fit used to refuse both."""
    samples = torch.utils.data.TensorDataset(torch.randn(8, 6), torch.zeros(8, dtype=torch.long))
    trainer = Trainer(build_model("mlp", inputs=6, hidden=[4], classes=2), samples, device=of_trainer)
    model = trainer.fit(
        strategy=AllReduceStrategy(), num_nodes=2, max_steps=1, batch_size=2, device=of_fit, workers="threads"
    )
    assert model.fit_result.complete
    with pytest.raises(InputError, match="device is 'mps', but Trainer was given 'cpu'"):
        Trainer(model, samples, device="cpu").fit(strategy=AllReduceStrategy(), num_nodes=2, device="mps")


@pytest.mark.parametrize(
    "content", [b"\x1f\x8b\x08" + bytes(40), gzip.compress(bytes(1_000_001), mtime=0) * 100]
)
def test_a_gzip_file_that_is_broken_or_never_ends_is_reported(content, tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"images\.gz: .*fetch it again"):
        read_idx(path)


def test_a_download_that_fails_is_reported_in_one_line(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(InputError, match=r"task mnist: https://.* cannot be fetched: .*no network here"):
        build_task("mnist", path=str(tmp_path), download=True)
