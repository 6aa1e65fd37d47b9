"""Mistakes of users, each with the line that reports it: tables in the folder `mistakes`."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simpy
import strategy_reference as reference
import torch
from experiments import FILE, experiment, fit, fitted, mlp, samples
from torch.utils.data import DataLoader, TensorDataset
from worlds import PEERS, chain, chain_form, star_form

import exogym_core
import exogym_core.strategy
import netgym as netgym_face
import netsim
import netsim.units
from exogym_core import DiLoCoOptimizer, LocalTrainer
from exogym_core.communicator import run_ranks
from exogym_core.cost.compute import Compute
from exogym_core.cost.devices import find_device
from exogym_core.data.batches import collate_of
from exogym_core.data.partition import Partition
from exogym_core.results.fit_result import FitResult
from exogym_core.strategy import FedAvgStrategy, Strategy
from exogym_core.strategy.optimizers import ensure_optim_spec
from exogym_core.workers.spec import WorkerSpec
from netgym import tasks
from netgym.cli.main import main as netgym
from netgym.experiment.experiment import Experiment
from netgym.experiment.own_code import find_own_code
from netgym.launch.compute import ComputeClock
from netgym.planning.reproduce import load_run, reproduce
from netgym.planning.streaming_table import utilisation
from netgym.planning.tables import published_share
from netgym.studies.points import Sweep
from netgym.tasks import MLP
from netsim import Topology
from netsim.cli.main import main as netsim_main
from netsim.collectives.choice import parse_collectives
from netsim.collectives.schedules.algorithms import Algorithm
from netsim.errors import InputError, UnknownNameError, unknown_name
from netsim.files.documents import parse_document
from netsim.files.plain_files import input_file
from netsim.topology.weather import Background, HostEvent, LinkEvent, Trace
from netsim.weather.faults import simulate_weather

TABLES = Path(__file__).with_name("mistakes")


def rows(name: str) -> list[Any]:
    """Pairs of what is given and, indented below it, how the error reads; ` ...` ends one that goes on."""
    lines = (TABLES / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line and not line.startswith("# ")]
    return [(given, line.strip()) for given, line in zip(lines[::2], lines[1::2], strict=True)]


def is_line(line: str, expected: str) -> bool:
    begins = expected.removesuffix(" ...")
    return line.startswith(begins) if begins != expected else line == expected


def is_of_names(line: str) -> bool:
    """Whether an error reports a name that does not exist, and so is a TypeError too, as Python has it."""
    is_listed = "Accepted: " in line or "; accepted: " in line
    return (is_listed or line.startswith("unknown ")) and "unknown unit" not in line


# --- calls -------------------------------------------------------------------------------------------------


def trained(strategy: Strategy, num_ranks: int = 2) -> None:
    model, batches = reference.make_problem(num_ranks, 1, 2, 2, seed=0)
    reference.run_strategy(strategy, model, batches)


def optimizer(**options: Any) -> Any:
    """Every rank makes an optimizer for a loop of its own."""
    given = {"batch_size": 4, "num_inner_steps": 2, "inner_optimizer": "sgd", **options}
    run_ranks(lambda comm: DiLoCoOptimizer(communicator=comm, params=mlp().parameters(), **given), 3)
    return DiLoCoOptimizer(params=mlp().parameters(), **given)


def faults() -> netsim.Faults:
    return netsim.Faults(netsim.Network(netsim.Clock(), chain()))


def twice_faults() -> None:
    network = netsim.Network(netsim.Clock(), chain())
    netsim.Faults(network)
    netsim.Faults(network)


def late_fault(*entries: Any) -> None:
    network = netsim.Network(netsim.Clock(), chain())
    applied = netsim.Faults(network)
    network.env.run(until=5.0)
    for entry in entries:
        applied.add(entry)


def watched_twice() -> None:
    recorder = netsim.Recorder()
    recorder.watch(netsim.Network(netsim.Clock(), chain()))
    recorder.watch(netsim.Network(netsim.Clock(), chain()))


NAMES: dict[str, Any] = {
    name: getattr(module, name)
    for module in (exogym_core, exogym_core.strategy, tasks, netsim, netsim.units)
    for name in module.__all__
}
NAMES |= {"PAIR": chain_form("ab", "10 Gbit/s", "20 ms"), "math": math, "netsim": netsim, "torch": torch}
NAMES |= {
    "DIGITS": {"task": "digits", "workers": {"count": 2}, "steps": 2, "strategies": ["AllReduce"]},
    "PEERS": PEERS,
}
NAMES |= {"check": netgym_face.check, "netgym": netgym_face, "simpy": simpy}
for each in (
    *(
        Compute,
        DataLoader,
        WorkerSpec,
        collate_of,
        ensure_optim_spec,
        faults,
        find_device,
        fit,
        mlp,
    ),
    *(load_run, optimizer, run_ranks, samples, trained, utilisation, watched_twice),
    *(Algorithm, Background, HostEvent, LinkEvent, Partition, TensorDataset, Trace, chain, late_fault),
    *(ComputeClock, FitResult, Path, find_own_code, fitted, published_share, twice_faults),
    *(input_file, parse_collectives, simulate_weather),
):
    NAMES[each.__name__] = each


@pytest.mark.parametrize(("call", "expected"), rows("calls"))
def test_a_call_fails_with_one_line(
    call: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        eval(call, NAMES)
    line = str(caught.value)
    assert is_line(line, expected), line
    assert "\n" not in line
    assert not list(tmp_path.iterdir()), "it leaves nothing"
    assert isinstance(caught.value, UnknownNameError) == is_of_names(line)


# --- files -------------------------------------------------------------------------------------------------

MEASURED = "what: a\nnetwork: b\nmeasured_by: c\nsource: d\nunknown: e\n"
GOOD = {
    "flows": "start_s,src,dst,bytes\n0,h2,h10,5\n",
    "measured": f"{MEASURED}groups: [{{network: lan, unit: s, op: all_reduce, cells: [{{what: f, bytes: 1}}]}}]\n",
    "sweeps": "sweep: {a: [1, 2]}",
    "traces": "start_s,bits_per_second\n0,1\n",
}
TOPOLOGY = """\
name: two
hosts:
  a: {}
  b: {}
routers: [r]
links:
  - {between: [a, r], bandwidth: 1 Gbit/s, latency: 1 ms}
  - {between: [r, b], bandwidth: 1 Gbit/s, latency: 1 ms}
"""


def read_pair(**weather: Any) -> Topology:
    links = [{"between": ["a", "b"], "bandwidth": "1 bit/s"}]
    Path("net.yaml").write_text(json.dumps({"hosts": ["a", "b"], "links": links, **weather}))
    return Topology.load("net.yaml")


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "topologies": (TOPOLOGY, Topology.load),
    "experiments": (FILE, lambda path: Experiment.load(path).check_runs()),
    "traces": ("", lambda path: read_pair(traces=[{"link": ["a", "b"], "bandwidth": path.name}])),
    "absences": ("start_s,host,event\n", lambda path: read_pair(availability=[{"file": path.name}])),
    "flows": ("", lambda path: netsim.flows(chain_form(["h2", "h10"]), path)),
    "sweeps": ("", lambda path: Sweep.parse(parse_document(path.read_text(), str(path)))),
    "measured": (MEASURED, lambda path: list(reproduce(str(path)))),
}


def changed(good: str, given: str) -> str:
    """The good text with `old => new`, or with `+ more` behind it; else what is given is the whole text."""
    text = given.encode().decode("unicode_escape")
    if text.startswith("+ "):
        return f"{good}{text[2:]}\n"
    old, arrow, new = text.partition(" => ")
    assert not arrow or old in good
    return good.replace(old, new, 1) if arrow else text


@pytest.mark.parametrize("kind", READERS)
def test_good_files_are_read(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, read = READERS[kind]
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text(GOOD.get(kind, good))
    read(Path("good.yaml"))


@pytest.mark.parametrize(
    ("kind", "given", "expected"), [(kind, *row) for kind in READERS for row in rows(kind)]
)
def test_a_file_is_refused_with_its_line(
    kind: str, given: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, read = READERS[kind]
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(changed(good, given))
    with pytest.raises(InputError) as caught:
        read(Path("bad.yaml"))
    line = str(caught.value).splitlines()[0]
    assert is_line(line.removeprefix("bad.yaml").removeprefix(":").strip(), expected), line
    assert isinstance(caught.value, UnknownNameError) == is_of_names(line)


def test_all_mistakes_are_reported_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = TOPOLOGY.replace("1 Gbit/s", "0 bit/s").replace("a: {}", "a: {devise: x}")
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(InputError) as caught:
        Topology.load(tmp_path / "bad.yaml")
    assert re.findall(r"bad\.yaml:(\d+):", str(caught.value)) == ["3", "7", "8"]


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "big.yaml").write_bytes(b"#" * 1_000_001)
    (tmp_path / "latin.yaml").write_bytes(b"name: a\nsource: caf\xe9\n")
    for name, words in [
        ("big.yaml", ": larger than 1 MB"),
        ("latin.yaml", ":2: not UTF-8"),
        ("no.yaml", ": no such file"),
    ]:
        with pytest.raises(InputError, match=re.escape(name + words)):
            Topology.load(tmp_path / name)
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        Topology.load(tmp_path)
    # Nothing reaches the terminal.
    with pytest.raises(InputError, match=r"^\\x16/e\\x1b\[2J: no such file: "):
        Topology.load("\x16/e\x1b[2J")


# --- commands ----------------------------------------------------------------------------------------------

PLANNED = """
task: {name: text, num_bytes: 40000}
topology:
  regions: {fra: {hosts: 1, nic: 100 Gbit/s, device: h100}, ore: {hosts: 1, nic: 100 Gbit/s, device: a100}}
  wan: [{between: [fra, ore], bandwidth: 10 Gbit/s, rtt: 90 ms}]
compute: {flops: {utilisation: 0.0001}}
workers: {count: 2}
batch_size: 8
steps: 100
strategies: [{name: DiLoCo, H: 50}]
"""
ENDS = "rtt ms,home,ore\nhome,-,150\nore,,-\n"
RATES = "throughput Mbit/s,home,ore\nhome,-,38.2\nore,250,-\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    files = {
        "small.yaml": experiment(topology="two-datacenters", compute="50 ms"),
        "counted.yaml": experiment(topology="two-datacenters", compute="50 ms", workers=4),
        "plan.yaml": PLANNED,
        "star.yaml": json.dumps(star_form()),
        "alone.yaml": "regions: {here: {hosts: 1, nic: 1 Gbit/s, latency: 1 ms, device: h100}}\n",
        "bad.yaml": "hosts: [[a]]\n",
        "broken.yaml": "a: [",
        "full/file": "x",
        "ddp/train.csv": "",
        "ddp/config.json": "",
        "rtt.csv": ENDS,
        "rates.csv": RATES,
        "script.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("command", "expected"), rows("commands"))
def test_a_command_ends_with_one_line_and_exit_code_2(
    command: str, expected: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name for path in folder.iterdir()}
    program, *arguments = shlex.split(command.encode().decode("unicode_escape"))
    assert {"netgym": netgym, "netsim": netsim_main}[program](arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert is_line(line.removeprefix("error: "), expected), line
    assert line.startswith("error: ")
    assert {path.name for path in folder.iterdir()} - {"runs"} == before, (
        "a command that fails leaves nothing"
    )
    assert not list(folder.glob("runs/*")), "a run that could not begin leaves no folder"


def test_a_name_from_a_file_cannot_write_to_the_terminal() -> None:
    message = str(unknown_name("host", "7\x1b[2J\u202e" + "x" * 1000, ["7", "a"]))
    assert message.isprintable()
    assert r"'7\x1b[2J\u202exxx" in message or r"'7\x1b[2J\x202exxx" in message
    assert len(message) < 300


MODEL = MLP()


def fit(**arguments):
    LocalTrainer(MODEL, []).fit(strategy=FedAvgStrategy(), num_nodes=1, **arguments)
