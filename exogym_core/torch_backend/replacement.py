"""Programs that ask for another backend and get `netsim`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from exogym_core.torch_backend.private import name_group, wrap_group_maker
from exogym_core.torch_backend.session import current_session

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

__all__ = ["replace_backends"]

_BACKEND = 3  # its position among the arguments of what makes groups
_TORCHS_OWN = {"undefined", "gloo", "mpi", "nccl", "ucc", "xccl"}  # "undefined": none was named


def replace_backends(also: Collection[str] = ()) -> None:
    """Give the program `netsim` where it asks for a backend of torch's own, or for `also`, or names none.

    Its groups keep the name that it has asked for, since c10d and programs go by it: `get_backend` tells it, and what
    c10d has for gloo alone (`monitored_barrier`) is there for who asked for gloo. Groups of other backends are left as
    they are, and named as not charged.
    """
    replaced = _TORCHS_OWN.union(also)
    # c10d looks for nccl's default time-out before it comes to what makes groups.
    warnings.filterwarnings("ignore", message="Attempted to get default timeout for nccl backend")

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            asked = str(arguments[_BACKEND])
            parts = {part.rpartition(":")[2] for part in asked.split(",")}
            if not parts & replaced:
                made_by_original = original(*arguments, **options)
                _note_uncharged(asked)
                return made_by_original
            group, store = original(*arguments[:_BACKEND], "netsim", *arguments[_BACKEND + 1 :], **options)
            if store is not None:
                name_group(group, asked)
                if "," not in asked:
                    group.shown_name = asked
            return group, store

        return made

    wrap_group_maker(around)


def _note_uncharged(backend: str) -> None:
    session = current_session()
    if session is not None and backend != "netsim":
        session.comm.mark({"uncharged": f"backend {backend}"})
