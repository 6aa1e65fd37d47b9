"""Programs that ask for another backend and get `netsim`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from exogym_core.torch_backend.private import name_group, wrap_group_maker

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["replace_backends"]

_BACKEND = 3  # its position among the arguments of what makes groups


def replace_backends(names: Sequence[str]) -> None:
    """Give the program `netsim` where it asks for one of these, or for torch's own choice.

    Its groups keep the name that it has asked for, since c10d and programs go by it: `get_backend` tells it, and what
    c10d has for gloo alone (`monitored_barrier`) is there for who asked for gloo.
    """
    if not names:
        return
    # c10d looks for nccl's default time-out before it comes to what makes groups.
    warnings.filterwarnings("ignore", message="Attempted to get default timeout for nccl backend")

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            asked = str(arguments[_BACKEND])
            parts = {part.rpartition(":")[2] for part in asked.split(",")}
            if asked != "undefined" and not parts & set(names):
                return original(*arguments, **options)
            group, store = original(*arguments[:_BACKEND], "netsim", *arguments[_BACKEND + 1 :], **options)
            if store is not None:
                name_group(group, asked)
                if "," not in asked:
                    group.shown_name = asked
            return group, store

        return made

    wrap_group_maker(around)
