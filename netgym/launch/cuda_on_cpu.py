"""The CPU in place of the CUDA devices that a script names, on a machine without them.

Tensors stay on the CPU, and `torch.cuda` answers training scripts as on a machine with GPUs: devices,
streams, memory, generators, autocast, gradient scaling and SyncBatchNorm.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh, fsdp
from torch.distributed.tensor import DTensor
from torch.nn import SyncBatchNorm
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from netgym.launch.private import PARSE_TO, prefer_foreach_on_cpu, train_flex_attention_on_cpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["stand_in_for_cuda"]

_NAME = "CPU, standing in for CUDA"
_BYTES = 80 * 10**9  # reported memory of a device


def stand_in_for_cuda(num_devices: int) -> None:
    """Let the CPU stand in for `num_devices` CUDA devices, in this process and thread."""
    _CpuForCuda().__enter__()  # type: ignore[no-untyped-call]
    _patch_cuda(num_devices)
    for owner, name in (
        (torch, "autocast"),
        (torch.amp, "GradScaler"),
        (torch, "load"),
        (torch, "set_default_device"),
        (torch, "get_autocast_dtype"),
        (device_mesh, "init_device_mesh"),
        (device_mesh, "DeviceMesh"),
        (dist, "init_device_mesh"),
        (dist, "init_process_group"),
        (fsdp, "FullyShardedDataParallel"),
    ):
        _have_on_cpu(owner, name)
    _without_devices(DistributedDataParallel)
    _profile_without_devices(torch.autograd.profiler.profile)
    dist.is_nccl_available = lambda: True
    torch.Generator = _Generator  # type: ignore[misc]
    # The methods themselves: data loaders pin in a thread of their own, where the mode does not hold.
    Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[method-assign, assignment, return-value]
    Tensor.record_stream = _always(None)  # type: ignore[method-assign]
    _synchronize_batch_norm()
    prefer_foreach_on_cpu()
    train_flex_attention_on_cpu()
    if "CUDA_HOME" in os.environ:  # a torch without CUDA does not look for the program's compiler
        extensions: Any = importlib.import_module("torch.utils.cpp_extension")
        extensions.CUDA_HOME = os.environ["CUDA_HOME"]


def _on_cpu(value: Any, *, are_numbers: bool = False) -> Any:
    """The CPU for a CUDA device or its name (or its number, where `are_numbers`), anything else as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    is_name = isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    is_number = are_numbers and isinstance(value, int) and not isinstance(value, bool)
    return "cpu" if is_name or is_number else value


class _CpuForCuda(TorchFunctionMode):
    """Makes and moves tensors on the CPU where CUDA was asked for."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type:
            return _converted(*args, **kwargs)
        if func is torch.device and args and isinstance(args[0], int):
            return torch.device("cuda", *args)
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"], are_numbers=True)
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        if func is scaled_dot_product_attention and isinstance(args[0], DTensor):
            # DTensor has no rule for the CPU's kernel: heads and batches are independent.
            query, *others = args
            local = func(query.to_local(), *(each.to_local() for each in others), **kwargs)
            return DTensor.from_local(local, query.device_mesh, query.placements, run_check=False)
        at = 0 if func is PARSE_TO else 1  # Module.to's arguments, or a tensor and Tensor.to's
        if (func is torch.Tensor.to or at == 0) and len(args) > at:
            args = (*args[:at], _on_cpu(args[at], are_numbers=True), *args[at + 1 :])
        return func(*args, **kwargs)


def _converted(tensor: Tensor, dtype: Any = None, *rest: Any, **options: Any) -> Any:
    """`tensor.type(dtype)`; without a dtype the name of CUDA's class, which mixed-precision code compares."""
    if dtype is None:
        return tensor.type().replace("torch.", "torch.cuda.", 1)
    given = dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype
    return tensor.type(given, *rest, **options)


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


def _profile_without_devices(profile: Any) -> None:
    """Make profilers record the CPU alone: a torch without CUDA prints an error at each operation otherwise."""
    made = profile.__init__

    @functools.wraps(made)
    def without(self: Any, *enabled: Any, **options: Any) -> None:
        made(self, *enabled, **options | {"use_cuda": False, "use_device": None})

    profile.__init__ = without


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
    """An instant of the clock that the script reads."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__()
        self._seconds = 0.0

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds between two events."""
        return (end._seconds - self._seconds) * 1e3


def _patch_cuda(num_devices: int) -> None:
    """Let `torch.cuda` and `torch.accelerator` answer as on a machine with `num_devices` devices."""
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
    answers: dict[str, Any] = {
        **{name: _always(True) for name in _TRUE},
        **{name: _always(None) for name in _NOTHING_TO_DO},
        **{name: _always(0) for name in _NO_BYTES},
        **{name: _always(stream) for name in ("current_stream", "default_stream")},
        "is_current_stream_capturing": _always(False),
        **{name: lambda *a, **o: defaultdict(int) for name in _STATISTICS},
        **{name: getattr(torch, name) for name in dir(torch.cuda) if name.endswith("Tensor")},
        "default_generators": (torch.default_generator,) * num_devices,
        "cudart": _always(SimpleNamespace(cudaProfilerStart=_always(0), cudaProfilerStop=_always(0))),
        "device_of": on_device,
        "get_arch_list": _always(["sm_80"]),
        "memory_snapshot": _always([]),
        "initial_seed": torch.initial_seed,
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
        if hasattr(torch.cuda.random, name):
            setattr(torch.cuda.random, name, answer)
    for name in ("mark", "range_push", "range_pop", "range_start", "range_end"):
        setattr(torch.cuda.nvtx, name, _always(0))
    torch.Event = _Event  # type: ignore[misc, assignment]
    of_accelerator: dict[str, Callable[..., Any]] = {
        **{name: _anew(answers[name]) for name in ("is_available", "device_count", "current_stream")},
        **{name: _anew(set_device) for name in ("set_device_index", "set_device_idx")},
        **{name: _anew(answers["current_device"]) for name in ("current_device_index", "current_device_idx")},
        **{name: _always(None) for name in ("synchronize", "empty_cache", "set_stream")},
        "current_accelerator": _always(torch.device("cuda")),
        "device_index": lambda given: contextlib.nullcontext(),
    }
    for name, answer in of_accelerator.items():
        setattr(torch.accelerator, name, answer)


def _always(answer: Any) -> Callable[..., Any]:
    """A new function that returns `answer`: torch.compile keeps rules by function."""
    return lambda *arguments, **options: answer


def _anew(function: Callable[..., Any]) -> Callable[..., Any]:
    """A new function that calls `function`."""
    return lambda *arguments, **options: function(*arguments, **options)


_TRUE = ("is_available", "is_initialized", "is_bf16_supported", "is_tf32_supported", "can_device_access_peer")
_STATISTICS = ("memory_stats", "memory_stats_as_nested_dict", "host_memory_stats")
_NOTHING_TO_DO = (
    *("init", "_lazy_init", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"),
    *("reset_max_memory_cached", "reset_peak_host_memory_stats", "reset_accumulated_host_memory_stats"),
    *("reset_max_memory_allocated", "reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
    *("manual_seed", "manual_seed_all", "seed", "seed_all"),
    *("set_rng_state", "set_rng_state_all", "set_stream"),
)
_NO_BYTES = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("memory_cached", "max_memory_cached", "utilization", "memory_usage", "device_memory_used"),
    *("temperature", "power_draw", "clock_rate"),
)


# --- SyncBatchNorm ---------------------------------------------------------------------------------------------


def _synchronize_batch_norm() -> None:
    """Give torch's SyncBatchNorm, whose collectives stay its own, the kernels that it has for GPUs alone."""
    for kernel in (
        *(batch_norm_stats, batch_norm_gather_stats_with_counts, batch_norm_elemt),
        *(batch_norm_backward_reduce, batch_norm_backward_elemt),
    ):
        setattr(torch, kernel.__name__, kernel)
    DistributedDataParallel._passing_sync_batchnorm_handle = _always(None)  # type: ignore[method-assign]
    forward = SyncBatchNorm.forward

    @functools.wraps(forward)
    def on_cpu(module: SyncBatchNorm, values: Tensor) -> Tensor:
        with mock.patch.object(torch._C, "_get_privateuse1_backend_name", return_value="cpu"):
            return forward(module, values)

    SyncBatchNorm.forward = on_cpu  # type: ignore[method-assign, assignment]


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(1, -1, *[1] * (like.dim() - 2))


def _others(values: Tensor) -> list[int]:
    """Dimensions but that of channels."""
    return [dim for dim in range(values.dim()) if dim != 1]


def batch_norm_stats(values: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of each channel."""
    variance, mean = torch.var_mean(values.float(), _others(values), correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    values: Tensor,
    means: Tensor,
    inverses: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation over all ranks, from theirs; running ones are brought up to date."""
    weights, total = (counts / counts.sum())[:, None], counts.sum()
    mean = (means * weights).sum(0)
    variance = ((inverses**-2 - eps + (means - mean) ** 2) * weights).sum(0)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((variance * total / (total - 1)).to(running_var.dtype), momentum)
    return mean, (variance + eps).rsqrt()


def batch_norm_elemt(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, eps: float
) -> Tensor:
    """Values normalised by their channel's mean and inverse deviation, then scaled by `weight` and moved by `bias`."""
    scale = inverse if weight is None else inverse * weight
    made = (values - _by_channel(mean, values)) * _by_channel(scale, values)
    return made if bias is None else made + _by_channel(bias, values)


def batch_norm_backward_reduce(
    gradient: Tensor, values: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor | None, *needed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of the gradient, and of it times the centred values; gradients of weight and bias."""
    gradient = gradient.float()
    total = gradient.sum(_others(values))
    centred = (gradient * (values.float() - _by_channel(mean, gradient))).sum(_others(values))
    return total, centred, centred * inverse, total


def batch_norm_backward_elemt(
    gradient: Tensor,
    values: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    total: Tensor,
    centred: Tensor,
    counts: Tensor,
) -> Tensor:
    """Gradient of the values, from sums over all ranks."""
    num = counts.sum()
    scale = inverse if weight is None else inverse * weight
    shift = (values - _by_channel(mean, values)) * _by_channel(inverse**2 * centred / num, values)
    return (gradient - _by_channel(total / num, values) - shift) * _by_channel(scale, values)
