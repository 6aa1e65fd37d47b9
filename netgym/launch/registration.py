"""Registration of `netsim` with torch.distributed, in the place of other backends and under `split_group`."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from netgym.launch.group import NetsimGroup, NetsimWork
from netgym.launch.launched import Launched, refused
from netgym.launch.private import (
    DEFAULT_SECONDS,
    answer_for_nccl,
    break_graphs_at,
    is_registered,
    keep_works_of_joins,
    name_group,
    wrap_function,
)
from netgym.launch.session import current_session
from netsim.errors import InputError

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Collection, Sequence

    from torch.distributed.distributed_c10d import _DistributedBackendOptions  # type: ignore[attr-defined]

__all__ = ["register", "replace_backends", "split_group"]


def _create(options: _DistributedBackendOptions, backend_options: Any) -> NetsimGroup:
    session = current_session()
    ranks = list(options.global_ranks_in_group)
    whole = None if ranks else (options.group_rank, options.group_size)
    if session is None or (whole is not None and whole != (session.comm.rank, session.comm.world_size)):
        from netgym.launch.joining import connect

        session = connect(options.store, options.group_rank, options.group_size)
    ranks = ranks or list(range(options.group_size))
    is_first = session.begin()
    comm = session.comm if len(ranks) == session.comm.world_size and is_first else None
    if comm is None:
        comm = session.comm.group(ranks)
    seconds = options.timeout.total_seconds()
    if seconds != DEFAULT_SECONDS:  # chosen by the program
        comm.call_seconds = max(seconds, 0.0)
    return NetsimGroup(session, comm, options.store, options.group_id)


def register() -> None:
    """Register `netsim` with torch.distributed; idempotent."""
    if not is_registered("netsim"):
        break_graphs_at(NetsimGroup, NetsimWork)
        keep_works_of_joins()
        wrap_function("split_group", split_group)
        wrap_function("_set_pg_timeout", _set_timeout)
        register_optimizer_step_post_hook(
            lambda optimizer, *_: None if (rank := current_session()) is None else rank.stepped(optimizer)
        )
        dist.Backend.register_backend("netsim", _create, extended_api=True, devices=["cpu"])


_BACKEND, _STORE = 3, 4  # positions among the arguments of c10d's function that makes groups
_TORCHS_OWN = {"undefined", "gloo", "mpi", "nccl", "ucc", "xccl"}  # "undefined": none was named


def replace_backends(also: Collection[str] = (), *, cuda_as_cpu: bool = False) -> None:
    """Give the program `netsim` where it asks for a backend of torch's own, or for `also`, or names none.

    Its groups keep the requested name, which c10d and programs test: `get_backend` returns it, and calls that c10d
    offers for gloo alone (`monitored_barrier`) work where gloo was requested. Groups of other backends are left
    unchanged, and named as not charged.
    """
    replaced = _TORCHS_OWN.union(also)
    # Without CUDA's stand-ins c10d takes gloo where none is named.
    rules_of_gloo = {"gloo"} if cuda_as_cpu else {"gloo", "undefined"}
    # c10d reads nccl's default time-out before it makes a group.
    warnings.filterwarnings("ignore", message="Attempted to get default timeout for nccl backend")

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            asked = str(arguments[_BACKEND])
            parts = {part.rpartition(":")[2] for part in asked.split(",")}
            if not parts & replaced:
                made_by_original = original(*arguments, **options)
                _note_uncharged(asked)
                return made_by_original
            if arguments[0] == -1:  # MPI's runtime would know
                session, launched = current_session(), Launched.current()
                if session is None or launched is None:
                    raise refused(
                        "backend mpi: ranks that the script starts have no numbers of MPI: start them with -n"
                    )
                size, rank = session.comm.world_size, session.comm.rank
                meeting = dist.FileStore(launched.store, size)  # type: ignore[attr-defined]
                arguments = (size, rank, *arguments[2:_STORE], meeting, *arguments[_STORE + 1 :])
            group, store = original(*arguments[:_BACKEND], "netsim", *arguments[_BACKEND + 1 :], **options)
            if store is not None:
                name_group(group, asked)
                group.is_gloos = parts <= rules_of_gloo
                if "," not in asked:
                    group.shown_name = asked
            return group, store

        return made

    answer_for_nccl()
    wrap_function("_new_process_group_helper", around)
    _simulate_groups_made_by_hand()


class _GroupByHand(NetsimGroup):
    """A group that the program makes without `init_process_group`, as torchft does: `ProcessGroup(store, rank, size)`.

    Its members find each other's ranks of the simulation by its store. The backend that the program adds to it is
    not used.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:  # type: ignore[name-defined]
        session = current_session()
        assert session is not None
        store.set(f"netgym rank {rank}", str(session.comm.rank))
        members = [int(store.get(f"netgym rank {member}")) for member in range(size)]
        session.begin()
        super().__init__(session, session.comm.group(members), store)
        self.is_gloos = True
        self._set_group_desc("made by hand")

    def _register_backend(self, device: Any, kind: Any, backend: Any) -> None:
        pass

    def _set_default_backend(self, kind: Any) -> None:
        pass


def _simulate_groups_made_by_hand() -> None:
    """Give ranks `_GroupByHand` where their program calls `ProcessGroup(store, rank, size)`.

    A `ProcessGroupGloo` that is no such group's is the program's own: its calls are not simulated, which is noted.
    """
    make, construct = dist.ProcessGroup.__new__, dist.ProcessGroupGloo.__init__
    made: list[_GroupByHand] = []

    def make_by_hand(cls: type[dist.ProcessGroup], *arguments: Any, **options: Any) -> Any:
        is_by_hand = (
            cls is dist.ProcessGroup
            and current_session() is not None
            and len(arguments) == 3
            and sys._getframe(1).f_globals.get("__name__") != dist.distributed_c10d.__name__
        )
        group: Any = make(_GroupByHand if is_by_hand else cls, *arguments, **options)
        if is_by_hand:
            made[:] = [group]
        return group

    def constructed(gloo: Any, store: Any, rank: int, size: int, *timeout: Any, **options: Any) -> None:
        construct(gloo, store, rank, size, *timeout, **options)
        if not made or made[0].get_group_store() is not store:
            _note_uncharged("gloo, by ProcessGroupGloo")
        elif timeout:
            made[0].set_timeout(timeout[0])

    dist.ProcessGroup.__new__ = make_by_hand  # type: ignore[method-assign, assignment]
    dist.ProcessGroupGloo.__init__ = constructed  # type: ignore[method-assign, assignment]


def _note_uncharged(backend: str) -> None:
    session = current_session()
    if session is not None and backend != "netsim":
        session.comm.mark({"uncharged": f"backend {backend}"})


def _set_timeout(otherwise: Callable[..., None]) -> Callable[..., None]:
    """c10d's function, which knows gloo and nccl alone."""

    def set_timeout(timeout: datetime.timedelta, group: Any = None) -> None:
        chosen = dist.group.WORLD if group is None else group
        if isinstance(chosen, NetsimGroup):
            chosen.set_timeout(timeout)
        else:
            otherwise(timeout, group)

    return set_timeout


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
