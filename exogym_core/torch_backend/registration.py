"""Makes `netsim` known to torch.distributed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from exogym_core.torch_backend.group import NetsimGroup
from exogym_core.torch_backend.private import DEFAULT_SECONDS, is_registered, wrap_split_group
from exogym_core.torch_backend.session import current_session
from exogym_core.torch_backend.splitting import split_group

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import _DistributedBackendOptions  # type: ignore[attr-defined]

__all__ = ["register"]


def _create(options: _DistributedBackendOptions, backend_options: Any) -> NetsimGroup:
    session = current_session()
    ranks = list(options.global_ranks_in_group)
    whole = None if ranks else (options.group_rank, options.group_size)
    if session is None or (whole is not None and whole != (session.comm.rank, session.comm.world_size)):
        from exogym_core.torch_backend.joining import connect

        session = connect(options.store, options.group_rank, options.group_size)
    ranks = ranks or list(range(options.group_size))
    is_first = session.begin()
    comm = session.comm if len(ranks) == session.comm.world_size and is_first else None
    if comm is None:
        comm = session.comm.group(ranks)
    seconds = options.timeout.total_seconds()
    if seconds != DEFAULT_SECONDS:  # a time that the program itself has chosen
        comm.call_seconds = seconds
    return NetsimGroup(session, comm, options.store, options.group_id)


def _stepped(optimizer: object, arguments: object, options: object) -> None:
    session = current_session()
    if session is not None:
        session.stepped(optimizer)


def register() -> None:
    """Make `netsim` known to torch.distributed; again is harmless."""
    if not is_registered("netsim"):
        wrap_split_group(split_group)
        register_optimizer_step_post_hook(_stepped)
        dist.Backend.register_backend("netsim", _create, extended_api=True, devices=["cpu"])
