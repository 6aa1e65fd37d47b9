"""Writes the tables of public names in `api/*.md` from signatures and docstrings, for readers without a build.

python docs/api_tables.py    # after a public name or the first line of its docstring has changed
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("api")
PAGES = {
    "netgym": ("netgym", "netgym.testing"),
    "exogym_core": ("exogym_core", "exogym_core.communicator"),
    "strategies": ("exogym_core.strategy",),
    "tasks": ("netgym.tasks",),
    "netsim": ("netsim", "netsim.testing"),
}
WITH_METHODS = {
    "Comparison",
    "SweepResult",
    "Trainer",
    "DiLoCoOptimizer",
    "Communicator",
    "Handle",
    "Topology",
}
WITH_METHODS |= {"Strategy", "FitResult", "Task"}
# Of the communicator: the run's own calls, which no strategy needs.
OF_THE_RUN = {
    "arrive_at",
    "calls_again",
    "averaging_algorithm",
    "counted_as",
    "deposit",
    "flush",
    "load_state_dict",
}
OF_THE_RUN |= {"mark", "noting_calls", "off_clock", "repeating", "state_dict"}
_MOST_CHARACTERS = 100  # of a signature; longer ones are in the built reference and in help()


def page(name: str, text: str) -> str:
    """The page with its tables as the code has them."""
    for module in PAGES[name]:
        begin, end = f"<!-- names of {module} -->\n", f"<!-- end of names of {module} -->"
        before, _, rest = text.partition(begin)
        text = before + begin + table(module) + "\n" + end + rest.partition(end)[2]
    return text


def table(module: str) -> str:
    """Markdown table of a module's public names."""
    loaded = importlib.import_module(module)
    rows = ["| name | |", "|---|---|"]
    public = {name: getattr(loaded, name) for name in sorted(loaded.__all__, key=str.lower)}
    for name, found in sorted(public.items(), key=lambda item: isinstance(item[1], type)):  # functions first
        rows.append(_row(name, found))
        if name in WITH_METHODS and (module == "netgym" or name not in _names_of_netgym()):
            rows += [_row(f"{name}.{each}", member) for each, member in _methods(found)]
    return "\n".join(rows)


def _names_of_netgym() -> set[str]:
    return set(importlib.import_module("netgym").__all__)


def _methods(owner: type) -> list[tuple[str, Any]]:
    """Public methods and properties that the class itself defines, with a docstring."""
    return [
        (name, member)
        for name, member in vars(owner).items()
        if not name.startswith("_") and not (owner.__name__ == "Communicator" and name in OF_THE_RUN)
        if (callable(member) or type(member) is property) and not isinstance(member, type)
        if member.__doc__
    ]


def _row(name: str, found: Any) -> str:
    is_code = callable(found) or isinstance(found, property)
    line = (inspect.getdoc(found) or "").partition("\n")[0] if is_code else ""
    return f"| `{name}{_signature(found)}` | {line.replace('|', chr(92) + '|')} |"


def _signature(found: Any) -> str:
    """Names of parameters; nothing for exceptions, properties and values."""
    if not callable(found) or (isinstance(found, type) and issubclass(found, BaseException)):
        return ""
    if hasattr(found, "model_rebuild"):  # pydantic's models are built when they are first used
        found.model_rebuild()
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return ""
    names = [each.name for each in parameters if each.name != "self" and not each.name.startswith("_")]
    text = f"({', '.join(names)})"
    return text if len(text) <= _MOST_CHARACTERS else f"({', '.join(names[:5])}, ...)"


if __name__ == "__main__":
    for name in PAGES:
        path = FOLDER / f"{name}.md"
        path.write_text(page(name, path.read_text(encoding="utf-8")), encoding="utf-8")
