"""Draws `rooms.svg` from the code: the rooms of both packages, and which room imports which at run time.

    python docs/rooms.py    # after rooms or imports between them have changed

An import that follows from others is left out (`networkx.transitive_reduction`). A room stands just below the lowest
room that imports it.
"""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]
ANNEXES = {"netsim": "formats probe", "exogym_core": "bench planning sites studies torch_backend"}
# `exogym_core.communicator` offers `run_ranks`, and imports its room when it is asked for.
ON_DEMAND = ("communicator", "workers")

BOX_WIDTH, BOX_HEIGHT, GAP, ROW = 118, 34, 22, 66
TOP, MARGIN = 84, 24
FONT = 'font-family="Helvetica, Arial, sans-serif"'
# Left edge and width of each panel; the four doors stand between them.
PANELS = {"exogym_core": (MARGIN, 620), "netsim": (MARGIN + 620 + 170, 310)}
DOORS = ("netsim", "netsim.errors", "netsim.units", "netsim.ranks")

Place = tuple[str, int]  # a room, or an arrow on its way past a row: its name and its row, the lowest 0


def imported_names(path: Path) -> set[str]:
    """Modules that a file imports, and names of its `from` imports; not those for type checkers alone."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
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


def rooms(package: str) -> nx.DiGraph[str]:
    """Rooms of a package, each with an edge to those that it imports; files at the bottom are one room."""
    folder = ROOT / package
    names = {path.stem: path for path in folder.glob("*.py") if not path.stem.startswith("__")}
    names |= {path.parent.name: path.parent for path in folder.glob("*/__init__.py")}
    found: nx.DiGraph[str] = nx.DiGraph()
    for name, place in names.items():
        found.add_node(name)
        for path in [place] if place.suffix else sorted(place.rglob("*.py")):
            parts = [each.split(".") for each in imported_names(path)]
            used = {part[1] for part in parts if part[0] == package and len(part) > 1} & names.keys()
            found.add_edges_from((name, each) for each in used - {name} if (name, each) != ON_DEMAND)
    files = {name for name, place in names.items() if place.suffix}
    low = sorted(name for name in files if nx.descendants(found, name) <= files)
    low = [name for name in low if name not in ANNEXES[package].split()]
    merged = nx.relabel_nodes(found, dict.fromkeys(low, ", ".join(low)))
    merged.remove_edges_from(list(nx.selfloop_edges(merged)))
    reduced: nx.DiGraph[str] = nx.transitive_reduction(merged)
    return reduced


def rows_of(graph: nx.DiGraph[str]) -> dict[str, int]:
    """Row of each room: its longest way down, raised to just below the lowest room that imports it."""
    rows: dict[str, int] = {}
    for name in reversed(list(nx.lexicographical_topological_sort(graph))):
        rows[name] = 1 + max((rows[each] for each in graph.successors(name)), default=-1)
    for name in nx.lexicographical_topological_sort(graph):
        above = [rows[each] - 1 for each in graph.predecessors(name)]
        rows[name] = min(above) if above else rows[name]
    return rows


def arranged(graph: nx.DiGraph[str]) -> tuple[list[list[Place]], list[list[Place]]]:
    """Places of each row from left to right, such that few arrows cross, and the arrows as lists of places."""
    rows = rows_of(graph)
    layers: list[list[Place]] = [[] for _ in range(1 + max(rows.values()))]
    for name in sorted(rows):
        layers[rows[name]].append((name, rows[name]))
    arrows = []
    for upper, lower in sorted(graph.edges):
        passed = [(f"{upper}>{lower}", row) for row in range(rows[upper] - 1, rows[lower], -1)]
        arrows.append([(upper, rows[upper]), *passed, (lower, rows[lower])])
        for place in passed:
            layers[place[1]].append(place)
    near: dict[Place, list[Place]] = {place: [] for layer in layers for place in layer}
    for arrow in arrows:
        for one, other in pairwise(arrow):
            near[one].append(other)
            near[other].append(one)
    for sweep in range(25):
        order = range(len(layers)) if sweep % 2 else range(len(layers) - 1, -1, -1)
        for row in order:
            beside = {place: _share(layer, place) for layer in layers for place in layer}
            side = -1 if sweep % 2 else 1
            pulled = {
                place: [beside[each] for each in near[place] if each[1] == row + side] or [beside[place]]
                for place in layers[row]
            }
            layers[row].sort(key=lambda place: (sum(pulled[place]) / len(pulled[place]), place))
    return layers, arrows


def _share(layer: list[Place], place: Place) -> float:
    return (layer.index(place) + 0.5) / len(layer)


def panel(package: str, height: int) -> list[str]:
    """Frame, arrows and boxes of one package."""
    graph = rooms(package)
    layers, arrows = arranged(graph)
    left, width = PANELS[package]
    middle: dict[Place, float] = {}
    extent: dict[Place, float] = {}
    for layer in layers:
        for place in layer:
            is_room = place[0] in graph
            extent[place] = max(BOX_WIDTH, 7.2 * len(place[0]) + 20) if is_room else 8
        used = sum(extent[place] for place in layer) + GAP * (len(layer) - 1)
        x = left + (width - used) / 2
        for place in layer:
            middle[place] = x + extent[place] / 2
            x += extent[place] + GAP

    def top_of(row: int) -> float:
        return height - MARGIN - 50 - row * ROW

    parts = [
        f'<rect x="{left}" y="44" width="{width}" height="{height - 44 - MARGIN}" rx="8" '
        'fill="#f7f8fa" stroke="#c9ced6"/>',
        f'<text x="{left + 14}" y="70" {FONT} font-size="17" font-weight="bold" fill="#222">{package}</text>',
    ]
    for arrow in arrows:
        points = [f"M{middle[arrow[0]]:.1f},{top_of(arrow[0][1]) + BOX_HEIGHT:.1f}"]
        for place in arrow[1:-1]:
            x, y = middle[place], top_of(place[1])
            points += [_curve(points[-1], x, y), f"L{x:.1f},{y + BOX_HEIGHT:.1f}"]
        points.append(_curve(points[-1], middle[arrow[-1]], top_of(arrow[-1][1]) - 5))
        parts.append(
            f'<path d="{" ".join(points)}" fill="none" stroke="#6b7684" stroke-width="1.3" marker-end="url(#tip)"/>'
        )
    annexes = ANNEXES[package].split()
    for place in middle:
        if place[0] not in graph:
            continue
        style = (
            'fill="#fff6e3" stroke="#c58a1b" stroke-dasharray="5 3"'
            if place[0] in annexes
            else 'fill="#e6f0fa" stroke="#3b78b5"'
        )
        x, y = middle[place] - extent[place] / 2, top_of(place[1])
        parts += [
            f'<rect x="{x:.1f}" y="{y}" width="{extent[place]:.1f}" height="{BOX_HEIGHT}" rx="5" {style}/>',
            f'<text x="{middle[place]:.1f}" y="{y + 22}" {FONT} font-size="13" text-anchor="middle" fill="#222">'
            f"{place[0]}</text>",
        ]
    return parts


def _curve(before: str, x: float, y: float) -> str:
    """A curve from the end of a path's last piece that leaves and arrives upright."""
    start_x, start_y = (float(each) for each in before.split()[-1].lstrip("ML").split(","))
    bend = (y - start_y) / 2
    return f"C{start_x:.1f},{start_y + bend:.1f} {x:.1f},{y - bend:.1f} {x:.1f},{y:.1f}"


def doors(height: int) -> list[str]:
    """The four modules of netsim that exogym_core imports, between the panels."""
    left, right = PANELS["exogym_core"][0] + PANELS["exogym_core"][1], PANELS["netsim"][0]
    x, y, step = (left + right) / 2, height / 2 - 70, 38
    parts = [
        f'<text x="{x}" y="{y - 14}" {FONT} font-size="13" text-anchor="middle" fill="#555">four doors</text>'
    ]
    for index, name in enumerate(DOORS):
        at = y + index * step
        parts += [
            f'<path d="M{left},{at + 14} H{x - 59}" stroke="#6b7684" stroke-width="1.3" marker-end="url(#tip)"/>',
            f'<rect x="{x - 54}" y="{at}" width="108" height="28" rx="5" fill="#e8f5ea" stroke="#3f8f52"/>',
            f'<text x="{x}" y="{at + 19}" {FONT} font-size="13" text-anchor="middle" fill="#222">{name}</text>',
            f'<path d="M{x + 54},{at + 14} H{right - 5}" stroke="#6b7684" stroke-width="1.3" marker-end="url(#tip)"/>',
        ]
    return parts


def draw() -> str:
    """The picture as the text of `rooms.svg`."""
    num_rows = max(1 + max(rows_of(rooms(package)).values()) for package in PANELS)
    height = TOP + num_rows * ROW + MARGIN
    width = sum(PANELS["netsim"]) + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="3" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0,0 L8,4 L0,8 Z" fill="#6b7684"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="28" {FONT} font-size="13" fill="#555">An arrow points from a room to one that it '
        "imports; imports that follow from others are left out. Dashed: annexes, which the core never imports.</text>",
        *(part for package in PANELS for part in panel(package, height)),
        *doors(height),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parent / "rooms.svg").write_text(draw(), encoding="utf-8")
