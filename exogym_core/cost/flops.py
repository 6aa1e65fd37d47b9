"""FLOPs of a forward and backward pass, by torch's counter with formulas that it lacks.

Products count (matrices, convolutions, attention, recurrent layers), multiply and add as two; elementwise work does
not, as is the custom. Modules and operators without a formula are named, since they would take no time.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, bmm_flop

from exogym_core.data.batches import device_of, loss_and_count
from exogym_core.workers.rng import kept_rng
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FlopCount", "count_flops"]

Shape: TypeAlias = Sequence[int]

_aten = torch.ops.aten
_WITHOUT_PRODUCTS = nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm  # despite their large parameters


@dataclass(frozen=True)
class FlopCount:
    """Operations of a forward and backward pass.

    Attributes:
        total: those counted.
        uncounted: modules with matrices of parameters but no counted operation, and operators that are not torch's,
            such as "scan (Mamba)" and "mylib::scan".
    """

    total: int
    uncounted: tuple[str, ...] = ()

    def warn_or_refuse(self) -> None:
        """Warn about the parts that a step's time by FLOPs leaves out.

        Raises:
            InputError: it would leave out all.
        """
        remedy = "give its time in the experiment or fit, as in compute='50 ms' or compute='measured'"
        names = ", ".join(self.uncounted)
        if not self.total:
            what = f"{names} cannot be counted" if names else "it multiplies no matrices"
            raise InputError(f"fit: compute by flops finds no operations in this model: {what}; {remedy}")
        if names:
            warnings.warn(
                f"fit: compute by flops cannot count {names}, which will take no time; {remedy}",
                UserWarning,
                stacklevel=6,
            )


def count_flops(model: nn.Module, batch: Any) -> FlopCount:
    """Operations of one forward and backward pass over `batch`, counted on a copy of the model.

    The RNG is left as it was.
    """
    replica = copy.deepcopy(model)
    foreign: Counter[str] = Counter()
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    watch = _Modules(replica, counter)
    with kept_rng(device_of(model)), counter, _Foreign(foreign):
        loss_and_count(replica(batch), "fit: a first batch", with_gradient=True)[0].backward()  # type: ignore[no-untyped-call]
    return FlopCount(int(counter.get_total_flops()), (*watch.uncounted(), *sorted(foreign)))


class _Modules:
    """Counts the operations of each module with matrices of its own."""

    def __init__(self, model: nn.Module, counter: FlopCounterMode) -> None:
        self._counter = counter
        self._counted: Counter[str] = Counter()
        for name, module in model.named_modules():
            matrices = [p for p in module.parameters(recurse=False) if p.dim() > 1 and p.requires_grad]
            if matrices and not isinstance(module, _WITHOUT_PRODUCTS):
                title = f"{name or 'the model'} ({type(module).__name__})"
                module.register_forward_pre_hook(partial(self._note, title, -1))
                module.register_forward_hook(partial(self._note, title, 1))

    def _note(self, title: str, sign: int, *_: object) -> None:
        self._counted[title] += sign * int(self._counter.get_total_flops())

    def uncounted(self) -> list[str]:
        return [title for title, flops in self._counted.items() if not flops]


class _Foreign(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators that are not torch's own."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace = getattr(func, "namespace", "higher_order")
        if namespace not in ("aten", "prim", "prims", "higher_order", "c10d", "_c10d_functional", "profiler"):
            self._found[f"{namespace}::{func._opname}"] += 1
        return func(*args, **(kwargs or {}))


# --- formulas that torch's counter lacks; arguments are shapes -----------------------------------------------


def _attention(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    samples, heads, length, width = query
    return 2 * samples * heads * length * key[-2] * (width + value[-1])


def _attention_backward(query: Shape, key: Shape, value: Shape, *args: Any, **kwargs: Any) -> int:
    # Five products where the forward pass has two: the scores again, and the gradients of all factors.
    return _attention(query, key, value) * 5 // 2


def _tokens(values: Shape) -> int:
    """Rows of an input of shape (length, batch, width), or (all tokens, width) if packed."""
    return math.prod(values[:-1])


def _onednn_rnn(values: Shape, of_input: Shape, of_hidden: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * _tokens(values) * (math.prod(of_input) + math.prod(of_hidden))


def _cudnn_rnn(values: Shape, weights: Sequence[Shape], *args: Any, **kwargs: Any) -> int:
    return 2 * _tokens(values) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def _twice(formula: Callable[..., int]) -> Callable[..., int]:
    """Formula of a backward pass: gradients of inputs and of weights, each as costly as the forward pass."""
    return lambda *args, **kwargs: 2 * formula(*args, **kwargs)


def _behind(formula: Callable[..., int]) -> Callable[..., int]:
    """Formula that drops its first argument, which costs nothing: a gradient, or the addend of a product."""
    return lambda first, *args, **kwargs: formula(*args, **kwargs)


def _matrix_vector(matrix: Shape, *args: Any, **kwargs: Any) -> int:
    return 2 * math.prod(matrix)


def _trilinear(first: Shape, second: Shape, third: Shape, expand: Shape, *others: Any, **kwargs: Any) -> int:
    # Each of three factors lacks some dimensions of the whole; two multiplications and an addition a point.
    shapes: list[list[int]] = []
    for shape, places in zip((first, second, third), (expand, *others[:2]), strict=True):
        full = list(shape)
        for place in places:
            full.insert(place, 1)
        shapes.append(full)
    return 3 * math.prod(max(int(size) for size in sizes) for sizes in zip(*shapes, strict=True))


def _distances(first: Shape, second: Shape, *args: Any, **kwargs: Any) -> int:
    return 3 * math.prod(first) * second[-2]


def _fourier(values: Shape, dims: Shape, *args: Any, **kwargs: Any) -> int:
    points = math.prod(values[dim] for dim in dims)
    return int(5 * math.prod(values) * math.log2(max(points, 2)))


def _formulas() -> dict[Any, Callable[..., int]]:
    return {
        _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: _behind(_attention_backward),
        _aten.mkldnn_rnn_layer: _onednn_rnn,
        _aten.mkldnn_rnn_layer_backward: _twice(_onednn_rnn),
        _aten._cudnn_rnn: _cudnn_rnn,
        _aten._cudnn_rnn_backward: _twice(_cudnn_rnn),
        _aten.mv: _matrix_vector,
        _aten.dot: _matrix_vector,
        _aten.addmv: _behind(_matrix_vector),
        _aten.addbmm: _behind(bmm_flop),
        _aten._trilinear: _trilinear,
        _aten._cdist_forward: _distances,
        _aten._cdist_backward: _twice(_behind(_distances)),
        _aten._fft_r2c: _fourier,
        _aten._fft_c2r: _fourier,
        _aten._fft_c2c: _fourier,
    }
