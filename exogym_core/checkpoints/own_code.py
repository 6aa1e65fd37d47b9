"""User code and checkpoints: digests by which a resume finds edits, and a trial of `state_dict`.

Hashed are the classes and functions of strategy and model, and what these name in turn, constants of their modules
included, and plain attributes of a model's modules. The rest of a script may change, such as how long it trains; so
may comments.

The trial saves a strategy's state, has a fresh one load it, and compares the two: a `state_dict` that lacks something
would show up only when a run is resumed, and then as another run, without an error.
"""

from __future__ import annotations

import ast
import copy
import dis
import functools
import hashlib
import inspect
import json
import sys
import sysconfig
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from exogym_core.checkpoints.files import decode, encode
from exogym_core.reach import reachable
from exogym_core.strategy.base import Strategy
from exogym_core.strategy.chain import Chain, Module
from exogym_core.workers.rng import kept_rng
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from exogym_core.communicator.base import Communicator


__all__ = ["StateTrial", "attribute_digests", "code_digests", "is_own_module"]

_OURS = ("exogym_core", "netgym", "netsim")
_CONSTANTS = (int, float, complex, str, bytes, bool, type(None))


def code_digests(roots: Iterable[object]) -> dict[str, str]:
    """`module.name` -> digest of each class, function and constant of one's own that the `roots` lead to.

    A root is a class, a function, or an object, whose class and attributes count.
    """
    digests: dict[str, str] = {}
    waiting = [each for root in roots for each in _held(root)]
    seen: set[int] = set()
    while waiting:
        found = _definition(waiting.pop())
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, type):
            waiting += found.__mro__[1:]
        if not is_own_module(found.__module__):
            continue
        digests[f"{found.__module__}.{found.__qualname__}"] = _digest(_source(found))
        loaded = list(_loads(found))
        while loaded:
            module, name, value = loaded.pop()
            if isinstance(value, type | FunctionType):
                waiting.append(value)
            elif f"{module}.{name}" not in digests:
                waiting += _held(value)
                given = _assignments(module, name)
                if given or _is_plain(value):
                    digests[f"{module}.{name}"] = _digest(given or repr(value))
                loaded += (
                    _loaded(compile(given, "", "exec"), module, vars(sys.modules[module])) if given else ()
                )
    return dict(sorted(digests.items()))


def attribute_digests(model: nn.Module) -> dict[str, str]:
    """`module.class.attribute` -> digest of the plain values that modules of one's own in a model have for it."""
    values: dict[str, list[object]] = defaultdict(list)
    for path, module in model.named_modules():
        kind = type(module)
        if is_own_module(kind.__module__):
            for name in vars(module).keys() - vars(nn.Module()).keys():
                if _is_plain(value := vars(module)[name]):
                    values[f"{kind.__module__}.{kind.__qualname__}.{name}"].append((path, value))
    return {name: _digest(repr(each)) for name, each in values.items()}


def is_own_module(module: str) -> bool:
    """True if a module is neither Python's, nor ours, nor of an installed package."""
    top = module.partition(".")[0]
    if top in _OURS or (top in sys.stdlib_module_names and top != "__main__") or top == "builtins":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not any(Path(file).resolve().is_relative_to(place) for place in _installed())


@functools.cache
def _installed() -> list[Path]:
    """Folders of Python's own modules and of installed packages."""
    return [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]


def _held(root: object) -> list[object]:
    """An object and those that its options hold; the modules of a model stand for their parameters."""
    return list(root.modules() if isinstance(root, nn.Module) else reachable(root, _has_options))


def _has_options(value: object) -> bool:
    if isinstance(value, type | nn.Module):
        return False
    return (
        isinstance(value, Strategy | Module) or is_dataclass(value) or is_own_module(type(value).__module__)
    )


def _definition(value: object) -> Any:
    """The class or function that `value` is or wraps, or its class."""
    while isinstance(value, functools.partial | MethodType | property | staticmethod | classmethod):
        if isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, property):
            value = value.fget
        else:
            value = value.__func__
    if isinstance(value, FunctionType):
        return inspect.unwrap(value)
    return value if isinstance(value, type) else type(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _assignments(module: str, name: str) -> str:
    """The statements by which a module gives a name its value, which may come from the environment; "" without any."""
    given = []
    for statement in _statements(module):
        targets = (
            statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            given.append(ast.unparse(statement))
    return "\n".join(given)


def _is_plain(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    return isinstance(value, _CONSTANTS) or (isinstance(value, tuple | list) and all(map(_is_plain, value)))


def _statements(module: str) -> list[ast.stmt]:
    """The statements of a module's source; none where it has no file."""
    try:
        return ast.parse(inspect.getsource(sys.modules[module])).body
    except (KeyError, OSError, TypeError, SyntaxError):
        return []


def _source(found: Any) -> str:
    """Its source without comments; of what has none, such as code typed into a console, its compiled form."""
    text = _text(found)
    if not text:
        return repr([(code.co_code, code.co_names, _plain(code)) for code in _codes(found)])
    try:
        return ast.unparse(ast.parse(text))
    except SyntaxError:  # a lambda in the middle of a statement
        return text


def _text(found: Any) -> str:
    """Its source; "" where it has none."""
    try:
        return textwrap.dedent(inspect.getsource(found))
    except (OSError, TypeError):
        return ""


def _plain(code: CodeType) -> list[object]:
    return [each for each in code.co_consts if not isinstance(each, CodeType)]


def _loads(found: Any) -> Iterator[tuple[str, str, Any]]:
    """Globals, attributes of one's own modules and enclosed values that a class or a function loads; and where."""
    functions, home = list(_functions(found)), sys.modules.get(found.__module__)
    names = dict(vars(home) if home is not None else functions[0].__globals__ if functions else {})
    for function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            names.pop(name, None)
            try:
                yield found.__module__, f"{function.__qualname__}.{name}", cell.cell_contents
            except ValueError:  # not yet bound
                continue
    for code in _codes(found):
        yield from _loaded(code, found.__module__, names)


def _loaded(code: CodeType, home: str, names: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Values that code of the module `home`, whose globals are `names`, loads by name; and where they stand."""
    held: object = None  # what the instruction before has loaded
    for each in dis.get_instructions(code):
        module, space, wanted = home, names, [each.argval]
        if each.opname == "IMPORT_NAME":  # into a local variable: whatever the code names of the module
            module, space, wanted = each.argval, _own_names(sys.modules.get(each.argval)), list(code.co_names)
        elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            module, space = getattr(held, "__name__", ""), _own_names(held)
        elif each.opname not in ("LOAD_GLOBAL", "LOAD_NAME"):
            space = {}
        held = space.get(each.argval)
        for name in wanted:
            if name in space and not isinstance(space[name], ModuleType):
                yield module, name, space[name]


def _own_names(module: object) -> Mapping[str, Any]:
    return vars(module) if isinstance(module, ModuleType) and is_own_module(module.__name__) else {}


def _codes(found: Any) -> Iterator[CodeType]:
    """Compiled forms of a class with its decorators and defaults, or a function; without a source, of its functions."""
    try:
        source = _text(found) or "("
        yield from _nested(compile(source, "", "exec", annotations.compiler_flag, dont_inherit=True))
    except SyntaxError:
        for function in _functions(found):
            yield from _nested(function.__code__)


def _functions(found: Any) -> Iterator[FunctionType]:
    """A function, or those of a class."""
    named = [found] if isinstance(found, FunctionType) else map(_definition, vars(found).values())
    return (each for each in named if isinstance(each, FunctionType))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


# --- the trial ----------------------------------------------------------------------------------------------


class _CommunicationError(Exception):
    """The strategy's `setup` or `load_state_dict` talks to other ranks, which a trial cannot."""


class _NoOthers:
    """A communicator of which only what this rank knows by itself is there."""

    def __init__(self, comm: Communicator) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self.traffic, self.inside, self.members_change = copy.deepcopy(comm.traffic), None, False
        self.can_leave_behind = comm.can_leave_behind

    def __getattr__(self, name: str) -> Any:
        raise _CommunicationError(name)


class StateTrial:
    """Saves the state of a strategy of one's own, has a fresh one load it, and compares their attributes.

    Args:
        strategy: not set up yet; copied, as `model` is.
        model: the rank's.
        set_up: sets a strategy up with a model and a communicator.
    """

    def __init__(
        self, strategy: Strategy, model: nn.Module, set_up: Callable[[Strategy, nn.Module, Any], None]
    ) -> None:
        self._own = [is_own_module(type(part).__module__) for part in _strategy_parts(strategy)]
        self._before = copy.deepcopy((strategy, model)) if any(self._own) else None
        self._set_up = set_up

    def refuse_incomplete(self, strategy: Strategy) -> None:
        """Try the state of `strategy`, which is between two steps.

        Nothing is tried where a fresh one has to talk to other ranks before it has its state.

        Raises:
            InputError: an attribute is another after that, the state cannot be loaded, or it holds what cannot be kept.
        """
        if self._before is None:
            return
        name = type(strategy).__name__
        tensors: dict[str, Tensor] = {}
        plain = json.dumps(encode(strategy.state_dict(), tensors, f"checkpoint: {name}"))
        fresh, model = copy.deepcopy(self._before)
        try:
            with kept_rng(torch.device("cpu")):
                self._set_up(fresh, model, _NoOthers(strategy.comm))
                fresh.load_state_dict(decode(json.loads(plain), tensors, next(model.parameters()).device))
        except _CommunicationError:
            return
        except Exception as error:
            raise InputError(
                f"{name}.load_state_dict(): fails on what state_dict() returned: {type(error).__name__}: {error}"
            ) from error
        for is_own, part, loaded in zip(
            self._own, _strategy_parts(strategy), _strategy_parts(fresh), strict=True
        ):
            if is_own:
                _compare(part, loaded)


def _strategy_parts(strategy: Strategy) -> list[Strategy | Module]:
    return [strategy, *(strategy.modules if isinstance(strategy, Chain) else [])]


def _compare(part: Strategy | Module, loaded: Strategy | Module) -> None:
    known = {*vars(Strategy()), *Strategy.__annotations__, *part.not_saved}
    for name, value in vars(part).items():
        is_computed_again = isinstance(getattr(type(part), name, None), functools.cached_property)
        if name in known or is_computed_again or _is_equal(value, vars(loaded).get(name)):
            continue
        where = f"{type(part).__name__}.state_dict()"
        raise InputError(
            f"{where}: lacks {name!r}, which changes in a save and a load; add it there and in "
            f"load_state_dict(), or, if no step reads it, write not_saved = ({name!r},) in the class"
        )


def _is_equal(value: object, other: object) -> bool:
    """True if plain values and tensors are equal; what is neither is not compared."""
    if isinstance(value, Tensor):
        if not isinstance(other, Tensor) or value.shape != other.shape or value.dtype != other.dtype:
            return False
        return torch.equal(value.detach().cpu().nan_to_num(), other.detach().cpu().nan_to_num())
    if isinstance(value, torch.Generator):
        return isinstance(other, torch.Generator) and torch.equal(value.get_state(), other.get_state())
    if isinstance(value, list | tuple):
        if not isinstance(other, list | tuple) or len(value) != len(other):
            return False
        return all(map(_is_equal, value, other))
    if isinstance(value, dict):
        if not isinstance(other, dict) or value.keys() != other.keys():
            return False
        return all(_is_equal(each, other[key]) for key, each in value.items())
    if isinstance(value, int | float | str | bytes | None):
        return value == other or value != value  # nan
    return True
