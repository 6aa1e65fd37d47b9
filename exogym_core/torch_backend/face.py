"""What c10d asks a process group about itself, besides its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    import datetime

    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
    from exogym_core.torch_backend.session import RankSession

__all__ = ["GroupFace"]


class GroupFace(dist.ProcessGroup):
    """The part of a process group that tells who it is.

    Args:
        session: the rank's.
        comm: the group's communicator.
        store: the group's part of c10d's store.
        name: c10d's name of the group.
    """

    def __init__(
        self, session: RankSession, comm: SimulatedCommunicator, store: dist.Store, name: str = ""
    ) -> None:
        super().__init__(comm.rank, comm.world_size)
        self._session, self._comm, self._store, self._given_name = session, comm, store, name
        self.shown_name = "netsim"  # in profiles

    def getBackendName(self) -> str:  # noqa: N802 (c10d's, whose C++ looks for gloo itself under gloo's name)
        return "netsim"

    def name(self) -> str:
        return "netsim"

    @property
    def group_name(self) -> str:
        return self._given_name

    def _set_group_name(self, name: str) -> None:
        self._given_name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_desc(self) -> str:
        return getattr(self, "_desc", "")

    @property
    def supports_splitting(self) -> bool:
        return False

    @property
    def bound_device_id(self) -> torch.device | None:
        return None

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> GroupFace:
        return self

    def get_group_store(self) -> dist.Store:
        return self._store

    def _has_hooks(self) -> bool:
        return False

    def _wait_for_pending_works(self) -> None:
        self._session.settle()

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self._comm.call_seconds = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return 0
