"""torch's compiler, `torch._dynamo`, imported when something is compiled and not before."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import contextmanager
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec

__all__ = ["without_compiler"]

_NAME = "torch._dynamo"


class _Unimported(ModuleType):
    """`torch._dynamo` until an attribute or submodule of it is used; then the module itself is imported.

    torch's optimizers and meta kernels import it to call `disable` and `graph_break`, which have an effect in compiled
    code alone: there is none before its import.
    """

    def __init__(self) -> None:
        super().__init__(_NAME)
        self.__path__: list[str] = []  # `_Submodules` finds the submodules

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks all modules for their files
            raise AttributeError(name)
        return getattr(self.load(), name)

    @property
    def is_in_use(self) -> bool:
        return sys.modules.get(_NAME) is self

    def load(self) -> ModuleType:
        """Import the module itself."""
        if self.is_in_use:
            del sys.modules[_NAME]
        return importlib.import_module(_NAME)

    def graph_break(self, msg: str = "") -> None:
        """Do nothing: no code is compiled."""

    def disable(self, fn: Any = None, *options: Any, **named: Any) -> Any:
        """Return `fn`, which is disabled for the compiler from its import on."""
        if fn is None:
            return self.load().disable(fn, *options, **named)
        disabled: Callable[..., Any] | None = None

        @wraps(fn)
        def called(*arguments: Any, **values: Any) -> Any:
            nonlocal disabled
            if self.is_in_use:
                return fn(*arguments, **values)
            if disabled is None:
                disabled = importlib.import_module(_NAME).disable(fn, *options, **named)
            return disabled(*arguments, **values)

        return called


class _Submodules(MetaPathFinder):
    """Finder that imports the module itself before one of its submodules."""

    def __init__(self, unimported: _Unimported) -> None:
        self._unimported = unimported

    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if not name.startswith(f"{_NAME}.") or not self._unimported.is_in_use:
            return None
        self._unimported.load()
        return importlib.util.spec_from_loader(name, _Imported(importlib.import_module(name)))


class _Imported(Loader):
    """Loader of a module that has been imported."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


@contextmanager
def without_compiler() -> Iterator[None]:
    """Do not import torch's compiler in the block unless something is compiled: half a second and 60 MB."""
    if _NAME in sys.modules:
        yield
        return
    unimported = _Unimported()
    sys.modules[_NAME] = unimported
    finder = _Submodules(unimported)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if unimported.is_in_use:
            del sys.modules[_NAME]
