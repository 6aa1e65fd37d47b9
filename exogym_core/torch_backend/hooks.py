"""Hooks that make a process one of a launched program: its groups, its children, calls that are refused."""

from __future__ import annotations

import multiprocessing.spawn
from typing import Any

import torch.distributed.rpc

from exogym_core.torch_backend.cuda_as_cpu import stand_in_for_cuda
from exogym_core.torch_backend.launched import Launched
from exogym_core.torch_backend.registration import register
from exogym_core.torch_backend.replacement import replace_backends

__all__ = ["become_launched"]


def become_launched() -> None:
    """Have torch.distributed in this process go by the launch that its variables name."""
    launched = Launched.current()
    if launched is None:
        return
    register()
    replace_backends()
    torch.distributed.rpc.init_rpc = _refuse_rpc
    _prepare_spawned()
    if launched.num_devices:
        stand_in_for_cuda(launched.num_devices)


def _refuse_rpc(*arguments: Any, **options: Any) -> None:
    launched = Launched.current()
    assert launched is not None
    raise launched.refused(
        "torch.distributed.rpc is not simulated, so its time would be missing: use collectives or send and recv"
    )


class _Hook:
    """Becomes a process of the launch where it is unpickled, before the process's own main module is imported."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return become_launched, ()


def _prepare_spawned() -> None:
    """Processes that multiprocessing spawns get a hook with their first message; forked ones need none."""
    original = multiprocessing.spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        return original(name) | {"netgym": _Hook()}

    multiprocessing.spawn.get_preparation_data = prepared
