"""`torch.distributed.split_group` where there is no accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from exogym_core.torch_backend.group import NetsimGroup
from netsim.files.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["split_group"]


def split_group(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """c10d's function, with groups on `netsim` split whatever devices there are; all others by `otherwise`."""

    def split(
        parent_pg: Any = None, split_ranks: Sequence[Sequence[int]] | None = None, *rest: Any, **options: Any
    ) -> Any:
        parent = parent_pg if parent_pg is not None else dist.group.WORLD
        if not isinstance(parent, NetsimGroup):
            return otherwise(parent_pg, split_ranks, *rest, **options)
        return _split(parent, split_ranks or [], *rest, **options)

    return split


def _split(
    parent: NetsimGroup,
    split_ranks: Sequence[Sequence[int]],
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: str | None = None,
) -> Any:
    given = [rank for part in split_ranks for rank in part]
    if (
        not given
        or not all(split_ranks)
        or len(set(given)) < len(given)
        or not set(given) <= set(range(parent.size()))
    ):
        raise InputError(
            f"split_group: split_ranks={split_ranks!r} must be lists of the parent group's ranks, 0 to "
            f"{parent.size() - 1}, each rank once at most"
        )
    mine = next((sorted(part) for part in split_ranks if parent.rank() in part), None)
    if mine is None:
        return None
    ranks = [dist.get_global_rank(parent, rank) for rank in mine]
    return dist.new_group(
        ranks, timeout, backend, pg_options, use_local_synchronization=True, group_desc=group_desc
    )
