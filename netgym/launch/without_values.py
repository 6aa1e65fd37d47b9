"""Tensors without values: a program's own operations give shapes, dtypes and strides, and take no memory.

What a program creates or draws as floating-point tensors has no values, and neither has what is computed from it. Data
have values: integers, what comes from files, numpy and Python's numbers, and what is computed from them alone. Where
code asks for a value that there is none of, a number that can be printed stands for it; a decision by it is refused.
"""

from __future__ import annotations

import copy
import functools
import math
import pickle
import struct
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from netgym.launch.launched import refused
from netgym.launch.private import (
    group_named,
    is_shape_inference,
    let_foreach_take,
    pickle_objects_by,
    swap_contents,
)
from netgym.launch.session import program_place, session_of_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from netgym.launch.session import RankSession
    from netsim.errors import InputError

__all__ = [
    "Unknown",
    "communicate_without_values",
    "forget_values",
    "has_values",
    "or_forget",
    "run_without_values",
]

_aten = torch.ops.aten

#: Operators that give numbers by counting: a program decides by them.
_COUNTING = {_aten.arange, _aten.linspace, _aten.logspace, _aten.scalar_tensor}

#: Operators, with all views, whose results torch's own kernels shape; a FakeTensorMode takes six times as long.
_BY_KERNEL = {_aten.mm.default, _aten.bmm.default, _aten._unsafe_view.default}

#: Operators whose results are like their operands, where these are alike.
_BY_ELEMENT = {_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor, _aten.sqrt.default}

#: Operators that overwrite their first operand, and return it.
_IN_PLACE = {_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor} | {
    *(_aten.addcmul_.default, _aten.addcdiv_.default, _aten.lerp_.Scalar),
    *(_aten.zero_.default, _aten.fill_.Scalar),
}

_DEVICE = torch.ops.prim.device.default


@functools.cache
def _is_by_kernel(func: Any) -> bool:
    return func in _BY_KERNEL or (func.namespace == "aten" and func.is_view)


def run_without_values() -> None:
    """Give this process, and those that it forks, tensors without values, in this thread."""
    _ShapesAlone().__enter__()  # type: ignore[no-untyped-call]
    _replace_reads()
    for name in ("isnan", "isinf", "isfinite"):
        setattr(math, name, _refuse_unknown(getattr(math, name)))
    torch.compile = _as_it_is
    scaler: Any = torch.amp.GradScaler
    scaler._maybe_opt_step = _step
    torch.save = _skip_unknown(torch.save)
    torch.nn.init.trunc_normal_ = _drawn_once(torch.nn.init.trunc_normal_)
    torch.utils.swap_tensors = _swapped(torch.utils.swap_tensors)
    let_foreach_take(FakeTensor)
    pickle_objects_by(_Pickler, _Unpickler)
    _load_data_in_threads()


def communicate_without_values(session: RankSession) -> None:
    """Let a rank post calls of tensors without values, which others receive as unknown."""
    session.without_values = sys.modules[__name__]
    session.comm.state.has_values = has_values


def has_values(tensor: Tensor) -> bool:
    """True if the values of a tensor are known."""
    return not isinstance(tensor, FakeTensor) and not hasattr(tensor.untyped_storage(), _FORGOTTEN)


_FORGOTTEN = "_netgym_forgotten"


def forget_values(tensors: Iterable[Tensor]) -> None:
    """Note that tensors, and all that share their memory, have been overwritten by what is unknown."""
    for tensor in tensors:
        if not isinstance(tensor, FakeTensor):
            setattr(tensor.untyped_storage(), _FORGOTTEN, True)


def or_forget(
    deliver: Callable[[Sequence[Tensor]], Any], outputs: Sequence[Tensor]
) -> Callable[[Sequence[Tensor]], Any]:
    """Delivery of a call's values into `outputs`, which are unknown where another member had none to give."""

    def deliver_or_forget(got: Sequence[Tensor]) -> Any:
        if got:
            return deliver(got)
        forget_values(outputs)
        return None

    return deliver_or_forget


def _refused(what: str) -> InputError:
    return refused(
        f"{program_place()}: {what}; without values it is unknown: run without --meta, or "
        "decide by what has values, such as the number of steps"
    )


# --- operations ------------------------------------------------------------------------------------------------


class _ShapesAlone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Executes operations of known tensors, and gives the shapes of all others."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = FakeTensorMode(allow_non_fake_inputs=True)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute an operator, or find the shapes of its results."""
        kwargs = kwargs or {}
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # by its parts, which come here too
        if is_shape_inference():
            return func(*args, **kwargs)
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        given = list(_tensors([*args, *kwargs.values()]))
        if (made := self._soon(func, args, kwargs, given)) is not None:
            return made
        if all(map(has_values, given)):
            if not given and func.namespace != "profiler" and func.overloadpacket not in _COUNTING:
                made = self._shapes.dispatch(func, types, args, kwargs)
                if isinstance(made, Tensor) and made.numel() > 1 and made.is_floating_point():
                    return made
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:
            if given[0].is_floating_point():
                return math.nan
            raise _refused("the value of a tensor decides here")
        if func.namespace == "_c10d_functional":
            return self._communicate(func, types, args, kwargs)
        try:
            made = self._shapes.dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise _refused(f"the values of a tensor decide the result of {func} here") from None
        return self._overwritten(func, args, kwargs, made) if func._schema.is_mutable else made

    def _soon(self, func: Any, args: Sequence[Any], kwargs: Any, given: Sequence[Any]) -> Any:
        """Result of an operator on alike tensors, or of a view; None where the FakeTensorMode is asked."""
        is_in_place, is_by_element = func in _IN_PLACE, func in _BY_ELEMENT
        if not (is_in_place or is_by_element or _is_by_kernel(func)) or not isinstance(args[0], FakeTensor):
            return None
        own = args[0]
        if any(
            isinstance(each, FakeTensor)
            and (each.constant is not None or each.fake_device != own.fake_device)
            for each in given
        ):
            return None
        if is_in_place:
            are_alike = own.is_floating_point() and all(each.shape in (own.shape, ()) for each in given)
            return own if are_alike else None
        if not all(isinstance(each, FakeTensor) for each in given):
            return None
        if is_by_element and (
            len(given) < len(args)
            or not own.is_floating_point()
            or any(each.shape != own.shape or each.dtype != own.dtype for each in given)
            or not all(each.is_contiguous() for each in given)
        ):
            return None
        with in_kernel_invocation_manager(self._shapes):
            if is_by_element:
                made: Any = torch.empty(own.shape, dtype=own.dtype, device="meta")
            else:
                made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            return FakeTensor(self._shapes, made, own.fake_device)
        return [FakeTensor(self._shapes, each, own.fake_device) for each in made]

    def _overwritten(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], made: Any) -> Any:
        """Note which known tensors an operator has overwritten; returns its result."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                forget_values(_tensors([value]))
                if isinstance(made, Tensor):
                    made = value
        return made

    def _communicate(self, func: Any, types: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a functional collective's call on its group, asynchronously."""
        name = func._opname
        if name == "_wrap_tensor_autograd":
            return AsyncCollectiveTensor(args[0])
        if name == "wait_tensor":
            storage = args[0].untyped_storage()
            if (work := storage.__dict__.pop(_WORK, None)) is not None:
                work.wait()
            return args[0]
        names = [argument.name for argument in func._schema.arguments]
        given = SimpleNamespace(**dict(zip(names, args, strict=False)), **kwargs)
        inputs = given.inputs if hasattr(given, "inputs") else [given.input]
        if name.endswith("_"):
            made = args[0]
        else:
            made = getattr(given, "out", None)
            made = self._shapes.dispatch(func, types, args, kwargs) if made is None else made
        outputs = made if isinstance(made, list | tuple) else [made]
        group = group_named(given.group_name)
        op = getattr(dist.ReduceOp, given.reduce_op.upper()) if hasattr(given, "reduce_op") else None
        match name.removesuffix("_").removesuffix("_out"):
            case "all_reduce":
                work = group.allreduce(outputs, op)
            case "all_reduce_coalesced":
                work = group.allreduce_coalesced(outputs, op)
            case "broadcast":
                work = group.broadcast(outputs, SimpleNamespace(rootRank=given.src))
            case "all_gather_into_tensor" | "all_gather_into_tensor_coalesced":
                work = group.all_gather_single_coalesced(outputs, inputs)
            case "reduce_scatter_tensor" | "reduce_scatter_tensor_coalesced":
                work = group.reduce_scatter_single_coalesced(outputs, inputs, op)
            case "all_to_all_single":
                sizes = given.output_split_sizes, given.input_split_sizes
                work = group.all_to_all_single(made, inputs[0], *sizes)
            case _:
                raise _refused(f"{func} has no form")
        for output in outputs:
            setattr(output.untyped_storage(), _WORK, work)
        return made


_WORK = "_netgym_work"


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (each for each in value if isinstance(each, Tensor))


# --- values that a program asks for ----------------------------------------------------------------------------


class Unknown(float):
    """A number that is unknown: it prints as nan, sums and products of it are unknown, and comparisons are refused."""

    def __new__(cls, value: float = math.nan) -> Unknown:
        """Make one, whatever the value is said to be."""
        return super().__new__(cls, math.nan)

    def __format__(self, spec: str) -> str:
        try:
            return super().__format__(spec)
        except ValueError:  # a format of integers
            return "nan"

    def __float__(self) -> float:
        _warn_of_float()
        return math.nan

    __hash__ = float.__hash__


def _warn_of_float() -> None:
    session = session_of_thread()
    if session is None or session.comm.rank == 0:
        warnings.warn(
            f"{program_place()}: float() of a number that is unknown without values is nan, and a decision by it is "
            "not noticed: use tensor.item()",
            stacklevel=3,
        )


def _unknown(*arguments: Any, **options: Any) -> Any:
    other = arguments[1] if len(arguments) > 1 else None
    return NotImplemented if isinstance(other, Tensor) else Unknown()


def _refuse_decision(*arguments: Any) -> Any:
    raise _refused("the value of a tensor decides here")


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Unknown, f"__{_name}__", _unknown)
    setattr(Unknown, f"__r{_name}__", _unknown)
for _name in ("neg", "pos", "abs", "round"):
    setattr(Unknown, f"__{_name}__", _unknown)
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "bool", "int", "trunc", "floor", "ceil"):
    setattr(Unknown, f"__{_name}__", _refuse_decision)


def _replace_reads() -> None:
    """Have tensors without values give unknown numbers where Python reads them."""

    def replace(name: str, answer: Callable[..., Any]) -> None:
        original = getattr(Tensor, name)

        @functools.wraps(original)
        def read(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            if has_values(tensor):
                return original(tensor, *arguments, **options)
            return answer(tensor, *arguments, **options)

        setattr(Tensor, name, read)

    def listed(tensor: Tensor) -> Any:
        return [listed(each) for each in tensor] if tensor.dim() else Unknown()

    def shown(tensor: Tensor, **options: Any) -> str:
        return f"tensor({'nan' if not tensor.dim() else '...'}, size={tuple(tensor.shape)}, dtype={tensor.dtype})"

    def as_float(tensor: Tensor) -> float:
        _warn_of_float()
        return math.nan

    def refuse(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        raise _refused("the value of a tensor decides here")

    replace("item", lambda tensor: Unknown())
    replace("tolist", listed)
    replace("__repr__", shown)
    replace("__format__", lambda tensor, spec: format(Unknown() if not tensor.dim() else shown(tensor), spec))
    replace("__float__", as_float)
    for name in ("__bool__", "__int__", "__index__", "numpy", "__array__"):
        replace(name, refuse)


def _refuse_unknown(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def decide(number: Any) -> Any:
        if isinstance(number, Unknown):
            raise _refused("the value of a tensor decides here")
        return original(number)

    return decide


# --- what torch does with values -------------------------------------------------------------------------------


def _as_it_is(model: Any = None, **options: Any) -> Any:
    """torch.compile: code runs, and is charged, operation by operation."""
    return (lambda function: function) if model is None else model


_PythonPickler: Any = vars(pickle)["_Pickler"]
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """Pickles unknown numbers in as many bytes as known ones."""

    dispatch = {**_PythonPickler.dispatch, Unknown: _PythonPickler.save_float}  # noqa: RUF012


def _load_float(unpickler: Any) -> None:
    (value,) = struct.unpack(">d", unpickler.read(8))
    unpickler.append(Unknown() if math.isnan(value) else value)


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]
    dispatch = {**_PythonUnpickler.dispatch, pickle.BINFLOAT[0]: _load_float}  # noqa: RUF012


def _load_data_in_threads() -> None:
    """Have a thread of the rank do what a DataLoader's worker processes would, which take no time either."""
    loaders: Any = DataLoader
    make = loaders._get_iterator

    def iterator_of(loader: Any) -> Any:
        if not loader.num_workers:
            return make(loader)
        alone = copy.copy(loader)
        alone.num_workers = alone.timeout = 0
        iterator, thread = make(alone), ThreadPoolExecutor(1)
        fetch = iterator._dataset_fetcher.fetch
        iterator._dataset_fetcher.fetch = lambda index: thread.submit(fetch, index).result()
        return iterator

    loaders._get_iterator = iterator_of


def _swapped(swap: Callable[[Tensor, Tensor], None]) -> Callable[[Tensor, Tensor], None]:
    """Swap two tensors, as `Module.to` does; those without values though torch keeps weak references to them."""

    @functools.wraps(swap)
    def swap_any(first: Any, second: Any) -> None:
        if not isinstance(first, FakeTensor) or not isinstance(second, FakeTensor):
            swap(first, second)
        elif (first.dtype, first.fake_device) != (second.dtype, second.fake_device):
            swap_contents(first, second)

    return swap_any


def _step(scaler: Any, optimizer: Any, state: Any, *arguments: Any, **options: Any) -> Any:
    """Step as if all gradients were finite."""
    return optimizer.step(*arguments, **options)


def _drawn_once(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.nn.init.trunc_normal_, which draws until all values are within the bounds; once where there are none."""

    @functools.wraps(original)
    def draw(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if has_values(local):
            return original(tensor, *arguments, **options)
        with torch.no_grad():
            return tensor.normal_()

    return draw


def _skip_unknown(save: Callable[..., Any]) -> Callable[..., Any]:
    """torch.save, which writes nothing where a tensor has no values."""

    @functools.wraps(save)
    def write(content: Any, *arguments: Any, **options: Any) -> None:
        leaves, _ = torch.utils._pytree.tree_flatten(content)
        if all(has_values(each) for each in leaves if isinstance(each, Tensor)):
            save(content, *arguments, **options)
        else:
            warnings.warn(f"{program_place()}: torch.save writes nothing: there are no values", stacklevel=2)

    return write
