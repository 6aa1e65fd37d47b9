"""Rooms and layers: allowed imports, and public names."""

from __future__ import annotations

import ast
import importlib
import json
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

import exogym_core
import netgym
import netsim

ROOT = Path(netsim.__file__).parent.parent
SOURCES = [
    path for room in ("netsim", "exogym_core", "netgym") for path in sorted((ROOT / room).rglob("*.py"))
]

# Strategies and tasks see the contract, not what keeps it.
ENGINE = {
    *("netsim.Clock", "netsim.Faults", "netsim.Network", "netsim.schedule", "netsim.start_collective"),
    *("netsim.network.clock.Clock", "netsim.network.network.Network", "netsim.weather.faults.Faults"),
    *("netsim.collectives.choice.Choices", "netsim.collectives.choice.schedule", "netsim.ranks.Kernel"),
    *(f"netsim.collectives.start.{name}" for name in ("Collective", "start_all_to_all", "start_collective")),
    *(
        f"netsim.ranks.{name}"
        for name in ("Advance", "Await", "Call", "Key", "Mark", "Post", "Put", "Take", "Wait")
    ),
}
JOINT = (
    "exogym_core/communicator/simulated/",
    "netgym/launch/",
)  # where torch and the engine meet


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> set[str]:
    """Modules that a file imports, and names of its `from` imports; not those for type checkers alone."""
    found: set[str] = set()
    pending: list[ast.AST] = [parsed(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        blocks = (ast.stmt, ast.ExceptHandler, ast.match_case)  # no expression imports
        pending += [each for each in ast.iter_child_nodes(node) if isinstance(each, blocks)]
    return found


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_imports_point_down() -> None:
    for path in SOURCES:
        check_imports(path)


def check_imports(path: Path) -> None:
    room, names = room_of(path), imports(path)
    roots = {name.split(".")[0] for name in names}
    if room.startswith("netsim/"):
        assert not roots & {"torch", "exogym_core", "netgym"}, (
            f"{room}: netsim knows nothing of tensors and training"
        )
    if not room.startswith("netgym/"):
        assert "netgym" not in roots, f"{room}: netgym is the layer above"
    if room.startswith("exogym_core/strategy/"):
        seen = {name for name in names if name.startswith("exogym_core.communicator.")}
        assert all(name.startswith("exogym_core.communicator.base") for name in seen), room
    if room.startswith("exogym_core/") and not room.startswith(JOINT):
        engine = names & ENGINE
        if room.startswith(("exogym_core/workers/", "exogym_core/run/recording")):  # the kernel's requests
            engine = {name for name in engine if not name.startswith("netsim.ranks.")}
        assert not engine, room
    if room.startswith("exogym_core/communicator/") and path.name != "__init__.py":
        assert not any(name.startswith("exogym_core.strategy") for name in names), room


@cache
def graph() -> nx.DiGraph[str]:
    """Which module imports which at run time: at its head, and inside functions."""
    paths = {room_of(path)[:-3].replace("/", ".").removesuffix(".__init__"): path for path in SOURCES}
    found: nx.DiGraph[str] = nx.DiGraph()
    found.add_nodes_from(paths)
    for name, path in paths.items():
        found.add_edges_from((name, each) for each in imports(path) if each in paths and each != name)
    return found


def test_no_circle_of_imports_at_run_time() -> None:
    circles = [circle for circle in nx.strongly_connected_components(graph()) if len(circle) > 1]
    assert [sorted(circle) for circle in circles] == []


# The rooms of each package, the lowest first: a room imports from those below it.
ROOMS = {
    "netsim": (
        "errors units docstrings files topology network weather transfers collectives ranks testing cli formats probe"
    ),
    "exogym_core": (
        "moved names plain uncompiled meeting_place successors events communicator workers data learner cost strategy "
        "stages results checkpoints config run testing"
    ),
    "netgym": (
        "command_options testing tasks strategy sites strategy_check experiment cli planning studies launch "
        "results commands"
    ),
}
# `run_ranks` is looked for beside `Communicator`, and loaded when it is asked for.
FACE = {
    ("exogym_core.communicator", "exogym_core.workers.run"),
    ("exogym_core.communicator", "exogym_core.workers"),
}


def upward_imports(package: str) -> set[tuple[str, str]]:
    """Imports from a lower room to a higher one; a command line imports the commands that it lists."""
    rooms = ROOMS[package].split()
    found = set()
    for user, used in graph().edges:
        if not all(name.startswith(f"{package}.") and "__main__" not in name for name in (user, used)):
            continue
        user_room, used_room = user.split(".")[1], used.split(".")[1]
        if rooms.index(user_room) < rooms.index(used_room) and user_room != "cli":
            found.add((user, used))
    return found


@pytest.mark.parametrize("package", ROOMS)
def test_imports_between_rooms_point_down(package: str) -> None:
    assert upward_imports(package) - FACE == set()


def test_saved_pages_are_as_the_code_writes_them() -> None:
    """After a change of pages' texts, style or scripts: python docs/saved_pages.py."""
    for path, text in runpy.run_path(str(ROOT / "docs" / "saved_pages.py"))["made"]().items():
        assert path.read_text(encoding="utf-8") == text, path.name


def test_the_architecture_page_names_files_that_are_there() -> None:
    """Files in backticks, by their path from the repository or from a package; and each room has a row."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`((?:[\w-]+/)+[\w-]+\.\w+)`", page))
    assert len(paths) > 20
    starts = (ROOT, *(ROOT / package for package in ROOMS))
    assert [path for path in sorted(paths) if not any((start / path).exists() for start in starts)] == []
    for package, rooms in ROOMS.items():
        for room in rooms.split():
            assert re.search(rf"^\| .*`{room}`", page, re.M), f"{package}/{room} has no row"


# A machine of a topology, and where ranks live.
MEANT_TWICE = {"Host"}


def test_two_classes_never_share_a_name() -> None:
    """Who reads a name knows which class it is, in whatever room."""
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(room_of(path))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert shared.keys() == MEANT_TWICE
    assert all(len(found) == 2 for found in shared.values())


# One after the other in a process: what must not be loaded by then.
LIGHT = {
    "import netsim": "numpy simpy networkx pydantic torch",
    "from netsim.cli.main import main; main(['--help'])": "numpy torch pydantic networkx rich matplotlib",
    "import netgym": "torch numpy matplotlib pandas",
    "from netgym.cli.main import main; main(['--help'])": "torch pydantic netgym.studies netgym.sites",
    "main(['list'])": "torch pydantic matplotlib",
    "main(['schema', 'experiment'])": "torch matplotlib",
    "import netsim.cli.main, netsim.network.network, netsim.collectives, netsim.ranks.kernel": "torch matplotlib",
}


def test_what_starts_quickly_loads_nothing_heavy() -> None:
    code = "import sys\n" + "".join(
        f"{each}\nassert not {{*{heavy.split()}}} & {{*sys.modules}}, {each!r}\n"
        for each, heavy in LIGHT.items()
    )
    # MKL's results would depend on where memory lies; torch reads it when it is loaded, which it is not yet.
    code += "import os, exogym_core\nassert os.environ['MKL_CBWR'] == 'AUTO,STRICT'\n"
    inherited = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=inherited)
    assert done.returncode == 0, done.stderr


def modules() -> list[str]:
    names = []
    for package in (netsim, exogym_core, netgym):
        names += [package.__name__]
        names += [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return names


def test_public_names_are_declared_sorted_and_there() -> None:
    for name in modules():
        if name.endswith("__main__"):  # a script
            continue
        module = importlib.import_module(name)
        declared = getattr(module, "__all__", [])
        assert sorted(declared, key=str) == sorted(set(declared)), f"{name}: sorted, nothing twice"
        for public in declared:
            assert getattr(module, public) is not None or public in vars(module), name


# What users may import from the front doors, and nothing else: a name that comes or goes does so here too.
FRONTS = {
    "netsim": (
        "Background Clock DeadlockError Drift Faults HostEvent InputError LinkEvent NetsimError Network Protocol "
        "Recorder Topology Trace Weather collective flows schedule shipped_topologies start_collective"
    ),
    "netsim.ranks": (
        "Advance Answer Ask Await Call CallEnding Cancel Enter Exit "
        "FROM_ROOT FirstSent GroupPart HoldUntil "
        "Kernel Key MailboxMessage Mark MessageGroup Post Progress Put "
        "Question RankSink RankSource Request StampedRow Take Wait Withdraw call_at gives_time "
        "group_of needs_nobody on_grid start_at_once "
    ),
    "exogym_core": (
        "Communicator DiLoCoOptimizer FitResult LocalTrainer OptimSpec Strategy Trainer load_runs"
    ),
    "netgym": (
        "Communicator Comparison DiLoCoOptimizer FitResult LocalTrainer Network OptimSpec Strategy "
        "SweepResult Topology Trainer advance check collective compare flows load load_runs now plan retime "
        "run run_ranks sweep tune"
    ),
}


@pytest.mark.parametrize("package", FRONTS)
def test_the_public_face_is_this(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.__all__) == FRONTS[package].split()
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)


FORMER = [
    ("exogym_core", "check", "netgym"),
    ("exogym_core", "now", "netgym"),
    ("netsim", "read_flows", "netsim.transfers"),
    ("exogym_core.communicator", "SiteCommunicator", "netgym.sites.communicator"),
    ("exogym_core.tasks", "digits", "netgym.tasks"),
    ("exogym_core.planning.plan", "plan", "netgym.planning.plan"),
    ("exogym_core.cli.experiment", "Experiment", "netgym.experiment.experiment"),
]


@pytest.mark.thorough
def test_former_import_paths_work_and_name_their_successors() -> None:
    """One after the other in a process of their own, each with one line of warning."""
    code = "import json, warnings\nlines = []\n" + "".join(
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('default')\n"
        f"    from {former} import {name} as there\n"
        f"from {successor} import {name}\n"
        f"assert there is {name}, {name!r}\n"
        "lines.append([f'{each.category.__name__} {each.message}' for each in caught])\n"
        for former, name, successor in FORMER
    )
    done = subprocess.run(
        [sys.executable, "-c", code + "print(json.dumps(lines))"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for (former, _, successor), (line,) in zip(FORMER, json.loads(done.stdout), strict=True):
        assert line.startswith(f"FutureWarning {former.partition('.')[0]}.")
        assert f"has moved: write {successor.split('.')[0]}" in line
