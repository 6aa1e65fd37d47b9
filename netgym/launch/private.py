"""Private names of torch that the backend uses, in one place for when torch changes them."""

from __future__ import annotations

import functools
import importlib
import weakref
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as core
from torch.distributed.algorithms.join import Join
from torch.distributed.rendezvous import _rendezvous_handlers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "DEFAULT_SECONDS",
    "PARSE_TO",
    "Profile",
    "answer_for_nccl",
    "at_end_of_backward",
    "break_graphs_at",
    "group_named",
    "import_late_modules",
    "is_in_backward",
    "is_registered",
    "is_shape_inference",
    "keep_works_of_joins",
    "let_foreach_take",
    "name_group",
    "pickle_objects_by",
    "prefer_foreach_on_cpu",
    "rendezvous_by",
    "swap_contents",
    "train_flex_attention_on_cpu",
    "wrap_function",
]

DEFAULT_SECONDS = core.default_pg_timeout.total_seconds()
"""c10d's time-out where a program gives none."""


PARSE_TO = torch._C._nn._parse_to
"""The function that reads the arguments of `Module.to`."""


# Modules that torch imports when a program makes its first optimizer, wraps or shards a model.
_LATE_MODULES = ("torch._dynamo", "torch.nn.parallel.distributed", "torch.distributed.fsdp")


def import_late_modules() -> None:
    """Import what training programs make torch import: once, for all processes that are then forked."""
    for name in _LATE_MODULES:
        importlib.import_module(name)


def is_in_backward() -> bool:
    """True inside a backward pass of the calling thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Have `function` called when the backward pass that is under way ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def is_registered(name: str) -> bool:
    """True if c10d knows a backend of this name."""
    return name.upper() in dist.Backend._plugins


def is_shape_inference() -> bool:
    """True where code under a FakeTensorMode asks for shapes alone, as DTensor does."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def rendezvous_by(handler: Callable[..., Iterator[tuple[dist.Store, int, int]]]) -> None:  # type: ignore[name-defined]
    """Have `init_method="env://"` go by `handler` instead of a port."""
    _rendezvous_handlers["env"] = handler


def wrap_function(name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap a function of c10d, under all its names."""
    wrapped = around(getattr(core, name))
    for module in (core, dist):
        if hasattr(module, name):
            setattr(module, name, wrapped)


def name_group(group: Any, backend: str) -> None:
    """Have `get_backend(group)` return this name."""
    _, store = core._world.pg_map[group]
    core._world.pg_map[group] = (dist.Backend(backend), store)


def prefer_foreach_on_cpu() -> None:
    """Have optimizers update all tensors of the CPU in one operation each by default, as they do on CUDA."""
    optimizer: Any = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes the name
    devices = optimizer._get_foreach_kernels_supported_devices()
    optimizer._get_foreach_kernels_supported_devices = lambda: [*devices, "cpu"]


def train_flex_attention_on_cpu() -> None:
    """Have flex_attention take tensors that need gradients: on the CPU torch has no compiled kernel for them."""
    module: Any = importlib.import_module("torch.nn.attention.flex_attention")
    module._validate_device = lambda *tensors: None


def let_foreach_take(cls: type) -> None:
    """Have optimizers and gradient clipping take tensors of a class as they take torch's own."""
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        importlib.import_module(name)._foreach_supported_types.append(cls)


def group_named(name: Any) -> Any:
    """The process group that a functional collective names."""
    resolve: Any = vars(core)["_resolve_process_group"]
    return resolve(name) if isinstance(name, str) else name


def keep_works_of_joins() -> None:
    """Keep the works that DDP's `join` hands to C++ alone: without their Python half C++ would wait for ever."""
    notify, kept = Join.notify_join_context, weakref.WeakKeyDictionary[Any, Any]()

    def notified(joinable: Any) -> Any:
        kept[joinable] = work = notify(joinable)
        return work

    Join.notify_join_context = notified  # type: ignore[method-assign]


def pickle_objects_by(pickler: Any, unpickler: Any) -> None:
    """Have collectives of objects pickle by other classes than Python's."""
    core._pickler, core._unpickler = pickler, unpickler


def swap_contents(first: Any, second: Any) -> None:
    """Swap two tensors of one class under their names."""
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    torch._C._swap_tensor_impl(first, second)


def answer_for_nccl() -> None:
    """Give torch a version of NCCL, which its error reports read where a group is nccl's."""
    if not hasattr(torch._C, "_nccl_version"):
        torch._C._nccl_version = lambda: 2 << 32 | 27 << 16
        torch._C._nccl_version_suffix = lambda: b""


def break_graphs_at(*classes: type) -> None:
    """Have torch.compile break its graph at the methods of classes, as at those of C++ groups and works.

    They are marked when a program compiles first, since that loads the compiler.
    """
    original, is_marked = torch.compile, [False]

    @functools.wraps(original)
    def compiled(*arguments: Any, **options: Any) -> Any:
        if not is_marked[0]:
            is_marked[0] = True
            for cls in classes:
                for name, member in list(vars(cls).items()):
                    if isinstance(member, FunctionType):
                        setattr(cls, name, torch.compiler.disable(member))  # type: ignore[no-untyped-call]
        return original(*arguments, **options)

    torch.compile = compiled


class Profile:
    """Calls as torch's profiler shows them: asynchronous events, with the shapes of their tensors.

    They stay open until profiling ends: host time of a call has no meaning.
    """

    def __init__(self) -> None:
        self._open: list[Any] = []

    def show(self, backend: str, op: str, tensors: Sequence[torch.Tensor]) -> None:
        """Show a call while a profiler is active."""
        if torch._C._autograd._profiler_enabled():
            event = torch._C._profiler._RecordFunctionFast(f"{backend}:{op}", list(tensors), {})
            event.__enter__()
            self._open.append(event)
        elif self._open:
            self._open.clear()
