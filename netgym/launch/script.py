"""A process of a launched program: hooks for torch.distributed, and the script as torchrun or `python` would run it.

On a machine without the CUDA devices that a script names, the CPU stands in for them: tensors stay on the CPU, and
`torch.cuda` answers as on a machine with so many devices for training scripts: devices, streams, memory, generators,
autocast and gradient scaling.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import multiprocessing.spawn
import multiprocessing.util
import os
import runpy
import sys
import time
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlparse

import torch
import torch.distributed as dist
import torch.distributed.rpc
from torch.distributed import device_mesh, fsdp
from torch.distributed.tensor import DTensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from netgym.launch.launched import Launched, refused
from netgym.launch.private import PARSE_TO, rendezvous_by
from netgym.launch.registration import register, replace_backends
from netgym.launch.session import ComputeClock, attach

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from exogym_core.communicator.simulated.communicator import SimulatedCommunicator
    from netgym.launch.run import Script

__all__ = ["become_launched", "run_rank", "run_script", "stand_in_for_cuda"]

_NAME = "CPU, standing in for CUDA"
_BYTES = 80 * 10**9  # reported memory of a device


def stand_in_for_cuda(num_devices: int) -> None:
    """Let the CPU stand in for so many CUDA devices, in this process and thread."""
    _CpuForCuda().__enter__()  # type: ignore[no-untyped-call]
    _patch_cuda(num_devices)
    _patch_accelerator(num_devices)
    for owner, name in (
        (torch, "autocast"),
        (torch.amp, "GradScaler"),
        (torch, "load"),
        (torch, "set_default_device"),
        (torch, "get_autocast_dtype"),
        (device_mesh, "init_device_mesh"),
        (dist, "init_device_mesh"),
        (dist, "init_process_group"),
        (fsdp, "FullyShardedDataParallel"),
    ):
        _have_on_cpu(owner, name)
    _have_on_cpu(device_mesh, "DeviceMesh")
    _without_devices(DistributedDataParallel)
    dist.is_nccl_available = lambda: True
    torch.Generator = _Generator  # type: ignore[misc]
    # The method itself: a data loader pins in a thread of its own, where the mode does not hold.
    torch.Tensor.pin_memory = _pinned  # type: ignore[method-assign, assignment]


def _pinned(tensor: Any, device: Any = None) -> Any:
    return tensor


def _on_cpu(value: Any) -> Any:
    """The CPU for a CUDA device or its name, anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


class _CpuForCuda(TorchFunctionMode):
    """Makes and moves tensors on the CPU where CUDA was asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        if "device" in kwargs:
            kwargs["device"] = _number_on_cpu(_on_cpu(kwargs["device"]))
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        if func is scaled_dot_product_attention and isinstance(args[0], DTensor):
            query, *others = (
                args  # DTensor has no rule for the CPU's kernel: heads and batches are independent
            )
            local = func(query.to_local(), *(each.to_local() for each in others), **kwargs)
            return DTensor.from_local(local, query.device_mesh, query.placements, run_check=False)
        at = 0 if func is PARSE_TO else 1  # Module.to's arguments, or a tensor and Tensor.to's
        if (func is torch.Tensor.to or at == 0) and len(args) > at:
            args = (*args[:at], _number_on_cpu(_on_cpu(args[at])), *args[at + 1 :])
        return func(*args, **kwargs)


def _number_on_cpu(device: Any) -> Any:
    return "cpu" if isinstance(device, int) and not isinstance(device, bool) else device


def _have_on_cpu(owner: Any, name: str) -> None:
    """Call a function, or make a class's objects, with CPU devices in place of CUDA's."""
    made = getattr(owner, name)
    is_class = isinstance(made, type)
    called = getattr(made, "__init__") if is_class else made  # noqa: B009 (mypy takes it for an instance's)

    @functools.wraps(called)
    def on_cpu(*arguments: Any, **options: Any) -> Any:
        given = {key: _on_cpu(value) for key, value in options.items()}
        if "device_id" in given and name != "init_process_group":
            given["device_id"] = torch.device("cpu")
        elif name == "init_process_group":
            given.pop("device_id", None)
        elif name == "FullyShardedDataParallel":  # which without it looks for an accelerator
            given["device_id"] = torch.device("cpu")
        return called(*map(_on_cpu, arguments), **given)

    if is_class:
        made.__init__ = on_cpu
    else:
        setattr(owner, name, on_cpu)


def _without_devices(model: Any) -> None:
    """Make a wrapper of models without the devices that only CUDA modules may name."""
    made = model.__init__

    @functools.wraps(made)
    def without(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *rest: Any, **options: Any
    ) -> None:
        made(self, module, None, None, *rest, **options)

    model.__init__ = without


class _Generator(torch.Generator):
    """A generator of the CPU, whatever device it is for."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, _on_cpu(device))  # type: ignore[call-arg]


class _Stream(torch.cpu.Stream):
    """A stream, whose work on the CPU is always in order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self.device, self.cuda_stream = torch.device("cuda"), 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def record_event(self, event: _Event | None = None) -> _Event:  # type: ignore[override]
        event = event or _Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None:
        pass


class _Event(torch.cpu.Event):
    """An instant of host time."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds between two events."""
        return (end._seconds - self._seconds) * 1e3


def _patch_cuda(num_devices: int) -> None:
    """Let `torch.cuda` answer as on a machine with so many devices."""
    current = [0]

    def set_device(device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        current[0] = index if index is not None and index >= 0 else current[0]

    @contextlib.contextmanager
    def on_device(device: Any) -> Iterator[None]:
        yield

    stream = _Stream()
    properties = SimpleNamespace(
        name=_NAME, total_memory=_BYTES, major=8, minor=0, multi_processor_count=1, gcnArchName=""
    )
    answers: dict[str, Callable[..., Any]] = {
        **{name: _always(True) for name in ("is_available", "is_initialized", "is_bf16_supported")},
        **{name: _always(None) for name in _NOTHING_TO_DO},
        **{name: _always(0) for name in _NO_BYTES},
        **{name: _always(stream) for name in ("current_stream", "default_stream")},
        "is_current_stream_capturing": _always(False),
        **{name: _always({}) for name in ("memory_stats", "memory_stats_as_nested_dict")},
        "device_count": lambda: num_devices,
        "current_device": lambda: current[0],
        "set_device": set_device,
        "device": on_device,
        "stream": lambda given: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "get_device_name": _always(_NAME),
        "get_device_capability": _always((8, 0)),
        "get_device_properties": _always(properties),
        "mem_get_info": _always((_BYTES, _BYTES)),
        "memory_summary": _always(""),
        "get_rng_state": lambda *a, **o: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()] * num_devices,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def _always(answer: Any) -> Callable[..., Any]:
    """A new function that returns `answer`: torch.compile keeps rules by function."""
    return lambda *arguments, **options: answer


_NOTHING_TO_DO = (
    *("init", "_lazy_init", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"),
    *("reset_max_memory_allocated", "reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("set_rng_state", "set_rng_state_all", "set_stream"),
)
_NO_BYTES = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_cached", "max_memory_cached", "utilization"),
)


def _patch_accelerator(num_devices: int) -> None:
    """Let `torch.accelerator` answer likewise."""
    answers: dict[str, Callable[..., Any]] = {
        "is_available": _always(True),
        "device_count": lambda: num_devices,
        "current_accelerator": _always(torch.device("cuda")),
        "current_device_index": lambda: torch.cuda.current_device(),
        "current_device_idx": lambda: torch.cuda.current_device(),
        "set_device_index": lambda device: torch.cuda.set_device(device),
        "set_device_idx": lambda device: torch.cuda.set_device(device),
        "device_index": lambda device: contextlib.nullcontext(),
        "current_stream": _always(_Stream()),
        **{name: _always(None) for name in ("synchronize", "empty_cache", "set_stream")},
    }
    for name, answer in answers.items():
        setattr(torch.accelerator, name, answer)


def become_launched() -> None:
    """Configure torch.distributed in this process by the launch that its variables name."""
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
    raise refused(
        "torch.distributed.rpc is not simulated, so its time would be missing: use collectives or send and recv"
    )


class _Hook:
    """Adds a process to the launch where it is unpickled, before the process's own main module is imported."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return become_launched, ()


def _prepare_spawned() -> None:
    """Send a hook to processes that multiprocessing spawns, with their first message; forked ones need none."""
    original = multiprocessing.spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        return original(name) | {"netgym": _Hook()}

    multiprocessing.spawn.get_preparation_data = prepared


def run_script(script: Script) -> None:
    """Run a script as `python` would, to the end of its exit handlers.

    Raises:
        SystemExit: the script ended with another exit code than 0.
    """
    _forget_exit_handlers()
    if script.prints_to_stderr:
        os.dup2(2, 1)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [script.name, *script.arguments]
    try:
        if script.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script.name, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(script.name)))
            runpy.run_path(script.name, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    atexit._run_exitfuncs()


def run_rank(comm: SimulatedCommunicator, script: Script, launched: Launched) -> None:
    """Run a script as a child of torchrun would, as a rank of the simulation."""
    rank, size = comm.rank, comm.world_size
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(size))
    os.environ |= {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "netgym",
    }
    launched.to_environment()
    become_launched()
    pid = os.getpid()

    def meet(url: str, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:  # type: ignore[name-defined]
        query = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
        asked = query.get("rank", rank), query.get("world_size", size)
        if asked != (rank, size) or os.getpid() != pid:
            raise launched.refused_rank(*asked)
        yield dist.FileStore(launched.store, size), rank, size  # type: ignore[attr-defined]

    rendezvous_by(meet)  # torch's own would listen on a port; these ranks share a private folder
    session = attach(comm, ComputeClock.parse(launched.compute))
    run_script(script)
    session.settle()
    session.end()


def _forget_exit_handlers() -> None:
    """Drop the launcher's exit handlers, which a fork inherits."""
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
