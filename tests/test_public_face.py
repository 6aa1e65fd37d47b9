"""Public names of the packages: docstrings name every parameter and attribute."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import exogym_core
import netgym
import netsim

ROOT = Path(netsim.__file__).parent.parent
FACES = [(package, name) for package in (netsim, exogym_core, netgym) for name in package.__all__]


def bases(made: type) -> list[type]:
    """The class and its base classes in this project."""
    ours = {"netsim", "exogym_core", "netgym"}
    return [base for base in made.__mro__ if base.__module__.split(".")[0] in ours]


def source(made: type) -> ast.ClassDef:
    """Definition of a class in its module's .py file, which lies next to a compiled module too."""
    return classes(made.__module__)[made.__name__]


@cache
def classes(module: str) -> dict[str, ast.ClassDef]:
    """Classes that a module defines, by name."""
    stem = ROOT.joinpath(*module.split("."))
    path = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
    return {node.name: node for node in parsed(path).body if isinstance(node, ast.ClassDef)}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def docstring(made: type) -> str:
    """Docstring of a class with its indentation, from the source where compilation has dropped it."""
    return made.__doc__ or ast.get_docstring(source(made), clean=False) or ""


def constant_docstring(package: Any, name: str) -> str | None:
    """String below the assignment of a constant, in the module from which `package` offers it."""
    imported = [
        node.module
        for node in ast.walk(parsed(Path(package.__file__)))
        if isinstance(node, ast.ImportFrom) and node.module and name in {each.name for each in node.names}
    ]
    body = parsed(Path(importlib.import_module(imported[0]).__file__ or "")).body
    for node, below in pairwise(body):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if name in [target.id for target in targets if isinstance(target, ast.Name)]:
            is_string = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            return str(below.value.value) if is_string else None
    return None


def own_functions(made: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods and properties of a class, and its constructor."""
    for base in bases(made):
        for name, value in vars(base).items():
            if name.startswith("_") and name != "__init__":
                continue
            bare = (
                value.fget
                if isinstance(value, property)
                else inspect.unwrap(getattr(value, "__func__", value))
            )
            if inspect.isfunction(bare):
                yield name, bare


def attributes(made: type) -> set[str]:
    """Public names that a class or its methods assign."""
    found: set[str] = set()
    for base in bases(made):
        tree = source(base)
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in (
                each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])
            ):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    found.add(target.attr)
                elif isinstance(target, ast.Name) and node in tree.body:
                    found.add(target.id)
    return {name for name in found if not name.startswith("_")}


def entries(made: type) -> set[str]:
    """Names that the docstrings of a class have an entry for, under `Args` or `Attributes`."""
    lines = [line for base in bases(made) for line in docstring(base).splitlines()]
    found = [re.match(r"\s+(\w+(?:, \w+)*):", line) for line in lines]
    return {name for each in found if each for name in each[1].split(", ")}


def undocumented(function: Callable[..., Any], text: str) -> list[str]:
    """Parameters that `text`, the docstrings about a function, does not name."""
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    return [name for name in names if not re.search(rf"\b{name}\b", text)]


@pytest.mark.parametrize(("package", "name"), FACES, ids=[name for _, name in FACES])
def test_public_names_are_documented(package: Any, name: str) -> None:
    offered = inspect.unwrap(getattr(package, name))
    if inspect.isfunction(offered):
        assert inspect.getdoc(offered)
        assert undocumented(offered, inspect.getdoc(offered) or "") == []
        return
    if not inspect.isclass(offered):
        assert constant_docstring(package, name), "a docstring below the constant"
        return
    assert docstring(offered)
    assert attributes(offered) - entries(offered) == set(), "an entry under Args or Attributes"
    whole = "\n".join(docstring(base) for base in bases(offered))
    for called, function in own_functions(offered):
        where = f"{name}.{called}"
        own = whole if called == "__init__" else inspect.getdoc(getattr(offered, called))
        assert own, f"{where}: no docstring"
        assert undocumented(function, own + whole) == [], where
