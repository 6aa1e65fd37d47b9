"""Every attribute and method of what `netsim` and `exogym_core` offer by name says what it is, and its types."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

import exogym_core
import netsim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FACES = [(package, name) for package in (netsim, exogym_core) for name in package.__all__]


def bases(made: type) -> list[type]:
    """The class and those of this project that it is made of."""
    return [base for base in made.__mro__ if base.__module__.split(".")[0] in ("netsim", "exogym_core")]


def own_functions(made: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """What of a class is public and can be called, the constructor and properties included."""
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
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
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
    """What the docstrings of a class have an entry for, under `Args` or `Attributes`."""
    lines = [line for base in bases(made) for line in (base.__doc__ or "").splitlines()]
    found = [re.match(r"\s+(\w+(?:, \w+)*):", line) for line in lines]
    return {name for each in found if each for name in each[1].split(", ")}


def unannotated(function: Callable[..., Any]) -> list[str]:
    """Parameters without a type, and `return` where the result has none."""
    told = inspect.signature(function)
    missing = [name for name, each in told.parameters.items() if each.annotation is each.empty]
    missing += ["return"] if told.return_annotation is told.empty else []
    return [name for name in missing if name not in ("self", "cls")]


def untold(function: Callable[..., Any], told: str) -> list[str]:
    """Parameters that no docstring names."""
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    return [name for name in names if not re.search(rf"\b{name}\b", told)]


@pytest.mark.parametrize(("package", "name"), FACES, ids=[name for _, name in FACES])
def test_what_is_offered_tells_what_it_is(package: Any, name: str) -> None:
    offered = getattr(package, name)
    assert inspect.getdoc(offered)
    if inspect.isfunction(offered):
        assert unannotated(offered) == []
        assert untold(offered, inspect.getdoc(offered) or "") == []
        return
    assert attributes(offered) - entries(offered) == set(), "an entry under Args or Attributes"
    whole = "\n".join(base.__doc__ or "" for base in bases(offered))
    for called, function in own_functions(offered):
        where = f"{name}.{called}"
        own = whole if called == "__init__" else inspect.getdoc(getattr(offered, called))
        assert own, f"{where}: no docstring"
        assert unannotated(function) == [], where
        assert untold(function, own + whole) == [], where
