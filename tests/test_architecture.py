"""Rooms and layers: who may import whom, and what is public."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest

import exogym_core
import netsim

ROOT = Path(netsim.__file__).parent.parent
SOURCES = [path for room in ("netsim", "exogym_core") for path in sorted((ROOT / room).rglob("*.py"))]

# Strategies and tasks see the contract, not what keeps it.
ENGINE = (
    "netsim.ranks.kernel",
    "netsim.ranks.requests",
    "netsim.network.network",
    "netsim.collectives",
    "netsim.network.clock",
)
JOINT = "exogym_core/communicator/simulated/"  # where torch and the engine meet


def imports(path: Path) -> set[str]:
    """The modules a file imports, also inside functions, but not those for type checkers alone."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        pending += ast.iter_child_nodes(node)
    return found


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", SOURCES, ids=room_of)
def test_imports_point_down(path: Path) -> None:
    room, names = room_of(path), imports(path)
    roots = {name.split(".")[0] for name in names}
    if room.startswith("netsim/"):
        assert not roots & {"torch", "exogym_core"}, "netsim knows nothing of tensors and training"
    if room.startswith("exogym_core/strategy/"):
        seen = {name for name in names if name.startswith("exogym_core.communicator.")}
        contract = ("exogym_core.communicator.base", "exogym_core.communicator.handle")
        assert all(name.startswith(contract) for name in seen)
    if room.startswith("exogym_core/") and not room.startswith(JOINT):
        engine = {name for name in names if name.startswith(ENGINE)}
        carries = room.startswith("exogym_core/ranks/")  # the kernel's requests and results
        carried = ("netsim.ranks.kernel", "netsim.ranks.requests")
        assert not engine or (carries and all(name.startswith(carried) for name in engine))
    if room.startswith("exogym_core/communicator/") and path.name != "__init__.py":
        assert not any(name.startswith("exogym_core.strategy") for name in names)


def graph() -> nx.DiGraph[str]:
    """Which module imports which: at its head, inside functions, and for type checkers alone."""
    paths = {room_of(path)[:-3].replace("/", ".").removesuffix(".__init__"): path for path in SOURCES}
    found: nx.DiGraph[str] = nx.DiGraph()
    found.add_nodes_from(paths)
    for name, path in paths.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [each if each in paths else node.module for each in inner]
            else:
                continue
            found.add_edges_from((name, target) for target in targets if target in paths and target != name)
    return found


def test_no_module_needs_itself() -> None:
    """No circle of imports, under TYPE_CHECKING and inside functions either."""
    circles = [circle for circle in nx.strongly_connected_components(graph()) if len(circle) > 1]
    assert [sorted(circle) for circle in circles] == []


# The rooms of both packages, the lowest first: a room knows only those below it.
ROOMS = {
    "netsim": "files topology network weather collectives ranks face probe tools",
    "exogym_core": (
        "names plain meeting_place successors communicator ranks data cost strategy results checkpoints "
        "tasks training "
        "planning torch_backend app"
    ),
}
FACE = {
    ("exogym_core.communicator", "exogym_core.ranks.run")
}  # its users look for `run_ranks` there; loaded late


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_know_only_those_below(package: str) -> None:
    """What a module may need is in its own room or a lower one, for type checkers alone too."""
    rooms = ROOMS[package].split()
    inside = {
        (user, used)
        for user, used in graph().edges
        if all(name.startswith(f"{package}.") and "__main__" not in name for name in (user, used))
    }
    upwards = {
        (user, used)
        for user, used in inside
        if rooms.index(user.split(".")[1]) < rooms.index(used.split(".")[1])
    }
    assert upwards - FACE == set()


# What the engine calls its own, where nothing else is in sight.
MEANT_TWICE = {"Group", "Link", "Plan"}


def test_two_classes_never_share_a_name() -> None:
    """Who reads a name knows which class it is, in whatever room."""
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(room_of(path))
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert shared.keys() == MEANT_TWICE
    assert all(len(found) == 2 for found in shared.values())


def test_the_library_costs_next_to_nothing_until_it_is_used() -> None:
    """`import netsim` loads nothing but itself; torch is not loaded by any of it."""
    code = "import sys, netsim; print({'numpy', 'simpy', 'networkx', 'pydantic', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_netsim_loads_without_torch() -> None:
    engine = "netsim.tools.cli, netsim.network.network, netsim.collectives, netsim.ranks.kernel"
    code = f"import sys, {engine}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def modules() -> list[str]:
    names = []
    for package in (netsim, exogym_core):
        names += [package.__name__]
        names += [info.name for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    return names


@pytest.mark.parametrize("name", modules())
def test_public_names_are_declared_sorted_and_there(name: str) -> None:
    if name.endswith("__main__"):
        pytest.skip("a script")
    module = importlib.import_module(name)
    declared = getattr(module, "__all__", [])
    assert sorted(declared, key=str) == sorted(set(declared)), "sorted, nothing twice"
    for public in declared:
        assert getattr(module, public) is not None or public in vars(module)


# What users may import from the front doors, and nothing else: a name that comes or goes does so here too.
FRONTS = {
    "netsim": (
        "Clock CollectiveTimes DeadlockError FlowTimes InputError MismatchError NetsimError Network Protocol RankError "
        "Topology UnknownNameError WindowLimit collective flows parse_collectives shipped_topologies unknown_name"
    ),
    "exogym_core": (
        "Communicator DiLoCoOptimizer FitResult LocalTrainer OptimSpec Strategy Trainer advance load_runs now"
    ),
}


@pytest.mark.parametrize("package", FRONTS)
def test_the_public_face_is_this(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == FRONTS[package].split()
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
