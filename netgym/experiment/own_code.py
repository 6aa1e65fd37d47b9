"""Tasks, models and strategies of the user's own, as `module:callable`: places that their code may come from.

An experiment file may come from a stranger. So a module is taken from the folder of the file, or from the
installed distribution that the module's name is, and never from Python's own library; finding it runs nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exogym_core.names import visible
from netsim.errors import InputError, NetsimError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

__all__ = ["OwnCode", "find_own_code"]

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclass(frozen=True)
class OwnCode:
    """Place of a `module:callable`; nothing of it has been run.

    Attributes:
        reference: as it was written.
        what: its kind: task, model or strategy.
        folder: in which the module lies; None: it is installed.
        distribution: the installed distribution that has it, and its version; empty where there is a folder.
    """

    reference: str
    what: str
    folder: Path | None = None
    distribution: str = ""

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return self.reference.partition(":")[0]

    def __str__(self) -> str:
        if self.folder is None:
            return f"{self.reference} of {self.distribution}"
        return f"{self.reference} of {_file_in(self.folder, self.module)}"

    def load(self, *, wrapped: bool = True, also: type | tuple[()] = ()) -> Callable[..., Any]:
        """Import the module, which runs it, and return the callable; `wrapped`, its failures name it.

        An object of the kind `also` need not be callable.

        Raises:
            InputError: it cannot be imported, has no such callable, or the callable is Python's own.
        """
        name, folder = self.reference.partition(":")[2], self.folder
        try:
            module = _import_from(folder, self.module) if folder else importlib.import_module(self.module)
        except ImportError as error:
            raise InputError(
                f"{self.what} '{self.reference}': cannot import '{self.module}' ({error})"
            ) from error
        except (Exception, SystemExit) as error:  # one that ends Python must not end the command silently
            raise self._failed("its import fails with", error) from error
        found: Any = getattr(module, name, None)
        if not (callable(found) or isinstance(found, also)):
            raise InputError(
                f"{self.what} '{self.reference}': '{self.module}' has no callable '{name}'; write module:callable"
            )
        home = str(getattr(found, "__module__", "")).partition(".")[0]
        if self.folder is None and home in _OF_PYTHON:
            raise InputError(
                f"{self.what} '{self.reference}': is Python's own '{home}'; write the callable into a module "
                "next to the file"
            )
        if not wrapped:
            return found  # type: ignore[no-any-return]

        @functools.wraps(found, updated=())
        def called(*arguments: Any, **options: Any) -> Any:
            try:
                return found(*arguments, **options)
            except NetsimError:
                raise
            except (Exception, SystemExit) as error:
                raise self._failed("it fails with", error) from error

        return called

    def _failed(self, how: str, error: BaseException) -> InputError:
        """Error for an exception of the user's code, with its place."""
        from exogym_core.workers.failures import is_own

        frames = traceback.extract_tb(error.__traceback__)[1:]
        places = [(each.filename, each.lineno) for each in frames if is_own(each.filename)]
        text = str(error).partition("\n")[0]
        if isinstance(error, SyntaxError) and error.filename:  # which no frame has run
            places, text = [(error.filename, error.lineno)], error.msg
        where = f" at {os.path.basename(places[-1][0])}:{places[-1][1]}" if places else ""
        return InputError(f"{self.what} '{self.reference}': {how} {type(error).__name__}{where}: {text}")


# `posix` and `nt` are the modules of some functions of `os`.
_OF_PYTHON = sys.stdlib_module_names | {"builtins", "posix", "nt", "__main__"}


def find_own_code(reference: str, what: str, folders: Sequence[Path]) -> OwnCode:
    """Find the module of `reference` without importing it.

    Args:
        reference: `module:callable`.
        what: task, model or strategy.
        folders: searched first.

    Raises:
        InputError: it is no reference, belongs to Python, or is nowhere.
    """
    if not _REFERENCE.fullmatch(reference):
        raise InputError(f"{what} '{visible(reference)}': is no module:callable")
    module = reference.partition(":")[0]
    top = module.partition(".")[0]
    if top in _OF_PYTHON:
        raise InputError(
            f"{what} '{reference}': '{top}' is Python's own library, which experiments do not call; write "
            "the callable into a module next to the file"
        )
    for folder in folders:
        if _file_in(folder, module) is not None:
            return OwnCode(reference, what, folder)
    names = ["netgym"] if top in ("exogym_core", "netsim") else [top]
    for name in metadata.packages_distributions().get(top, names):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return OwnCode(reference, what, distribution=f"{name} {metadata.version(name)}")
    raise InputError(
        f"{what} '{reference}': cannot import '{module}': there is no {top}.py next to the file, and no installed "
        f"distribution has it; put it next to the file, or install it"
    )


def _file_in(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*module.split("."))
    for candidate in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def _import_from(folder: Path, module: str) -> ModuleType:
    """Import `module` of `folder`, even where another folder's of that name was imported before.

    Its folder stays at the end of `sys.path`: modules next to it, and processes started for ranks, find it there.
    """
    place = str(folder.resolve())
    top = module.partition(".")[0]
    known = sys.modules.get(top)
    if known is not None and not _lies_in(known, place):
        if any(_lies_in(known, sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")):
            raise ImportError(f"an installed package has the name '{top}' too; rename the file")
        for name in [name for name in sys.modules if name == top or name.startswith(f"{top}.")]:
            del sys.modules[name]
    importlib.invalidate_caches()
    sys.path.insert(0, place)
    try:
        found = importlib.import_module(module)
    finally:
        sys.path.remove(place)
        if place not in sys.path:
            sys.path.append(place)
    if not _lies_in(found, place):
        raise ImportError(f"another module has the name '{module}'; rename the file")
    return found


def _lies_in(module: ModuleType, folder: str) -> bool:
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    return any(Path(place).resolve().is_relative_to(folder) for place in places if place)
