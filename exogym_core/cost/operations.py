"""Operations of torch as a device executes them: FLOPs of products, and bytes read and written by all.

Products are of matrices, convolutions, attention and recurrent layers, and factorizations of matrices; multiply and add
count as two. Formulas are torch's, with those that it lacks. Bytes are those of the operands and results, each once: a
kernel that holds them in caches moves no more. Views cost nothing, as torch's own schemas declare them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import bmm_flop, flop_registry

__all__ = ["FACTORIZATIONS", "FLOP_FORMULAS", "OperationWatch", "TorchOperation"]

Shape: TypeAlias = Sequence[int]

_aten = torch.ops.aten

# --- factorizations, solvers and transforms of matrices ------------------------------------------------------

# Leading terms of published counts; multiply and add count as two. LU, Cholesky, LDL, QR, their inverses and solutions:
# LAPACK Working Note 41, appendix C. Eigenvalues and singular values: Golub and Van Loan, Matrix Computations, 4th ed.,
# sections 7.5.6 and 8.3.3, and figure 8.6.1. Fourier transforms: 5 n log2(n). GPUs reach a smaller share of their peak
# here than in products: times are lower bounds.


def _cubic(thirds: int) -> Callable[..., int]:
    """Formula of `thirds` / 3 * n^3 for each of a batch of square matrices."""
    return lambda matrix, *args, **kwargs: math.prod(matrix) * int(matrix[-1]) * thirds // 3


def _num_matrices(shape: Shape) -> int:
    return math.prod(shape[:-2])


def _lu(matrix: Shape, *args: Any, **kwargs: Any) -> int:
    rows, columns, least = *matrix[-2:], min(matrix[-2:])
    each = 6 * rows * columns * least - 3 * (rows + columns) * least**2 + 2 * least**3
    return _num_matrices(matrix) * each // 3


def _reflectors(matrix: Shape, *args: Any, **kwargs: Any) -> int:
    """Householder vectors of a QR factorization, as LAPACK's geqrf finds them."""
    most, least = max(matrix[-2:]), min(matrix[-2:])
    return _num_matrices(matrix) * (6 * most * least**2 - 2 * least**3) // 3


def _from_reflectors(matrix: Shape, scales: Shape, *args: Any, **kwargs: Any) -> int:
    """The orthogonal matrix of Householder vectors, as LAPACK's orgqr makes it."""
    rows, columns, num = *matrix[-2:], scales[-1]
    each = 12 * rows * columns * num - 6 * (rows + columns) * num**2 + 4 * num**3
    return _num_matrices(matrix) * each // 3


def _qr(matrix: Shape, mode: str = "reduced", *args: Any, **kwargs: Any) -> int:
    if mode == "r":
        return _reflectors(matrix)
    rows, least = matrix[-2], min(matrix[-2:])
    columns = rows if mode == "complete" else least
    return _reflectors(matrix) + _from_reflectors((*matrix[:-2], rows, columns), (least,))


def _times_reflectors(
    matrix: Shape, scales: Shape, other: Shape, left: bool = True, *args: Any, **kwargs: Any
) -> int:
    rows, num = int(other[-2 if left else -1]), int(scales[-1])
    return math.prod(other) // rows * (4 * rows * num - 2 * num**2)


def _solution(factors: Shape, *args: Any, **kwargs: Any) -> int:
    """Two triangular solutions of the right sides, the last argument."""
    return int(2 * factors[-1] * math.prod(args[-1]))


def _least_squares(matrix: Shape, sides: Shape, *args: Any, **kwargs: Any) -> int:
    most, least = max(matrix[-2:]), min(matrix[-2:])
    num_sides = math.prod(sides) // int(matrix[-2])
    return int(_reflectors(matrix) + (4 * most * least - least**2) * num_sides)


def _symmetric_eigen(matrix: Shape, triangle: str = "L", vectors: bool = True, **kwargs: Any) -> int:
    return _cubic(27 if vectors else 4)(matrix)


def _singular(
    matrix: Shape, full_matrices: bool = False, vectors: bool = True, *args: Any, **kwargs: Any
) -> int:
    """The cheaper of Golub and Reinsch's algorithm and of one that begins with a QR factorization."""
    m, n = max(matrix[-2:]), min(matrix[-2:])
    if not vectors:
        each = min(12 * m * n**2 - 4 * n**3, 6 * m * n**2 + 6 * n**3)
    elif full_matrices:
        each = min(12 * m**2 * n + 24 * m * n**2 + 27 * n**3, 12 * m**2 * n + 66 * n**3)
    else:
        each = min(42 * m * n**2 + 24 * n**3, 18 * m * n**2 + 60 * n**3)
    return _num_matrices(matrix) * each // 3


def _pseudo_inverse(matrix: Shape, *args: Any, hermitian: bool = False, **kwargs: Any) -> int:
    product = 2 * math.prod(matrix) * min(matrix[-2:])
    return product + (_symmetric_eigen(matrix) if hermitian else _singular(matrix))


def _fourier(values: Shape, dims: Shape, *args: Any, **kwargs: Any) -> int:
    points = math.prod(values[dim] for dim in dims)
    return int(5 * math.prod(values) * math.log2(max(points, 2)))


FACTORIZATIONS: Mapping[Any, Callable[..., int]] = {
    **dict.fromkeys((_aten.linalg_cholesky_ex, _aten.cholesky, _aten.linalg_ldl_factor_ex), _cubic(1)),
    _aten.cholesky_inverse: _cubic(2),
    _aten.linalg_inv_ex: _cubic(6),
    _aten.linalg_eig: _cubic(75),
    _aten._linalg_eigvals: _cubic(30),
    _aten._linalg_eigh: _symmetric_eigen,
    _aten._linalg_svd: _singular,
    _aten.linalg_pinv: _pseudo_inverse,
    # A polynomial of degree 18 in five products (Bader, Blanes, Casas, 2019); its squarings depend on the values.
    _aten.linalg_matrix_exp: _cubic(30),
    **dict.fromkeys((_aten.linalg_lu, _aten.linalg_lu_factor_ex, _aten._linalg_det), _lu),
    _aten._linalg_slogdet: _lu,
    _aten._linalg_solve_ex: lambda matrix, sides, **kwargs: _lu(matrix) + _solution(matrix, sides),
    **dict.fromkeys((_aten.linalg_lu_solve, _aten.linalg_ldl_solve), _solution),
    _aten.cholesky_solve: lambda sides, factor, *args, **kwargs: _solution(factor, sides),
    _aten.linalg_solve_triangular: lambda factor, sides, **kwargs: _solution(factor, sides) // 2,
    _aten.triangular_solve: lambda sides, factor, *args, **kwargs: _solution(factor, sides) // 2,
    _aten.linalg_lstsq: _least_squares,
    _aten.linalg_qr: _qr,
    _aten.geqrf: _reflectors,
    _aten.linalg_householder_product: _from_reflectors,
    _aten.ormqr: _times_reflectors,
    **dict.fromkeys((_aten._fft_r2c, _aten._fft_c2r, _aten._fft_c2c), _fourier),
}
"""FLOPs by operation, called with its arguments, shapes in place of tensors. None goes by torch's setting of TF32."""

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


def _of_shapes(formula: Callable[..., int]) -> Callable[..., int]:
    def count(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        shapes = [
            [each.shape if isinstance(each, Tensor) else each for each in value]
            if isinstance(value, list | tuple)
            else value.shape
            if isinstance(value, Tensor)
            else value
            for value in args
        ]
        return formula(*shapes, **kwargs)

    return count


_FORMULAS: Mapping[Any, Callable[..., int]] = {
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
    **FACTORIZATIONS,
}

#: FLOPs of a product by its operation, called with its arguments and `out_val`.
FLOP_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    **{operation: _of_shapes(formula) for operation, formula in _FORMULAS.items()},
}

# --- what operations move ------------------------------------------------------------------------------------

#: Operations that only allocate, rename or look at what the host knows; views are declared by their schemas.
_FREE = {
    *(_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided),
    *(
        _aten._unsafe_view,
        _aten._reshape_alias,
        _aten.lift_fresh,
        _aten.set_,
        _aten.resize_,
        _aten.is_same_size,
    ),
    *(_aten._local_scalar_dense, _aten.is_pinned, _aten._has_compatible_shallow_copy_type),
}

#: Positions of operands that are not read: overwritten, or taken for their shape alone.
_UNREAD: Mapping[Any, int] = {
    **dict.fromkeys((_aten.copy_, _aten.fill_, _aten.zero_, _aten.uniform_, _aten.normal_, _aten.random_), 0),
    **dict.fromkeys((_aten.bernoulli_, _aten.exponential_, _aten._foreach_copy_, _aten._foreach_zero_), 0),
    **dict.fromkeys(
        (_aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like), 0
    ),
    **dict.fromkeys((_aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.bernoulli), 0),
    _aten.nll_loss_backward: 1,
}

#: Fused optimizers, which write gradients (their second operand) only where they divide them by a loss scale.
_UNSCALING = {_aten._fused_adam_, _aten._fused_adamw_, _aten._fused_sgd_, _aten._fused_adagrad_}
_GRADIENTS = 1

#: Operations that touch as many elements of their first operand as their indices choose.
_CHOOSING = {
    *(_aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten.take, _aten.nll_loss_forward),
    *(_aten.index_put_, _aten._index_put_impl_, _aten.index_add_, _aten.scatter_, _aten.scatter_add_),
    *(_aten.index_copy_, _aten.index_fill_, _aten._unsafe_index),
}

#: Namespaces of operators that are no computing: of communication and of profilers.
_NOT_COMPUTING = {
    "c10d",
    "_c10d_functional",
    "c10d_functional",
    "profiler",
    "prim",
    "symm_mem",
    "higher_order",
}


_FAKE = torch._C._TorchDispatchModeKey.FAKE


class TorchOperation(NamedTuple):
    """An operation that a program has executed.

    Attributes:
        name: such as `aten.mm`.
        operands: tensors that it read or overwrote.
        results: tensors that it made.
        flops: of a product, by its formula, else 0.
        skipped: share of them that a fused kernel leaves out: half of a causal attention.
        num_bytes: read and written.
    """

    name: str
    operands: Sequence[Tensor]
    results: Sequence[Tensor]
    flops: int
    skipped: float
    num_bytes: int


class _Operator(NamedTuple):
    """Declared figures of an operator, independent of its arguments.

    Attributes:
        formula: FLOPs of a product; None for all others.
        unread: position of an operand that is not read; -1: none.
        written: positions of operands that it overwrites; names of those given by name.
        causal: position of `is_causal`; -1: none.
        is_unscaling: writes gradients only where it is given a loss scale.
    """

    name: str
    is_free: bool
    is_composite: bool
    formula: Callable[..., int] | None
    unread: int
    written: frozenset[int | str]
    causal: int
    is_choosing: bool
    is_unscaling: bool


@functools.cache
def _kind_of(operator: Any) -> _Operator:
    packet, schema = operator.overloadpacket, operator._schema
    written = {
        where
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
        for where in (position, argument.name)
    }
    causal = [position for position, argument in enumerate(schema.arguments) if argument.name == "is_causal"]
    return _Operator(
        f"{operator.namespace}.{operator._opname}",
        operator.is_view or packet in _FREE or operator.namespace in _NOT_COMPUTING,
        packet not in FLOP_FORMULAS
        and operator.namespace != "prim"  # questions of tensors in Python, which the dispatcher lacks
        and operator.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
        FLOP_FORMULAS.get(packet),
        _UNREAD.get(packet, -1),
        frozenset(written),
        causal[0] if causal else -1,
        packet in _CHOOSING,
        packet in _UNSCALING,
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            if isinstance(each, Tensor):
                yield each


def _num_bytes(tensor: Tensor) -> int:
    """Bytes of its elements, those that a broadcast repeats once; 0 where they are not strided."""
    if tensor.layout is not torch.strided:
        return 0
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            count *= size
        elif not size:
            return 0
    return count


_DEVICE = torch.ops.prim.device.default


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `on_operation` for each operation of this thread, and of its backward passes, that is not free.

    Context manager. Operators that are composed of others are seen as those, and a tensor that wraps others (a
    DTensor) as its own parts. Those of a FakeTensorMode, which only asks for shapes, are not reported.

    Args:
        on_operation: called after each.
        on_foreign: called with the name of each operator that is not torch's own.
        execute: calls an operator with its arguments.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        on_operation: Callable[[TorchOperation], None],
        on_foreign: Callable[[str], None] | None = None,
        execute: Callable[..., Any] = lambda operator, *args, **kwargs: operator(*args, **kwargs),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_operation, self._on_foreign, self._execute = on_operation, on_foreign, execute

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Execute an operator and report it."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or any(
            hasattr(each, "__tensor_flatten__") for each in types
        ):
            return NotImplemented  # by its parts, which come here too
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **kwargs)
        if func is _DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device  # without values, half of all operators
        kind = _kind_of(func)
        if kind.is_composite:
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs) if kind.is_free else self._execute(func, *args, **kwargs)
        if self._on_foreign is not None and func.namespace not in ("aten", "prims", *_NOT_COMPUTING):
            self._on_foreign(f"{func.namespace}::{func._opname}")
        if not kind.is_free:
            self._on_operation(_operation(kind, args, kwargs, out))
        return out


def _operation(kind: _Operator, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> TorchOperation:
    operands: list[Tensor] = []
    sizes: list[int] = []
    seen = set[int]()
    keeps_gradients = kind.is_unscaling and kwargs.get("grad_scale") is None
    for position, value in (*enumerate(args), *kwargs.items()):
        is_written = position in kind.written and not (keeps_gradients and position == _GRADIENTS)
        for tensor in _tensors(value):
            is_read = position != kind.unread and id(tensor) not in seen  # a square reads its factor once
            operands.append(tensor)
            sizes.append((is_read + is_written) * _num_bytes(tensor))
            seen.add(id(tensor))
    results = [each for each in _tensors(out) if id(each) not in seen]
    made = sum(map(_num_bytes, results))
    if kind.is_choosing and len(sizes) > 1:
        sizes[0] = min(sizes[0], 2 * max(made, *sizes[1:]) if 0 in kind.written else max(made, *sizes[1:]))
    flops = 0 if kind.formula is None else int(kind.formula(*args, **kwargs, out_val=out))
    if any(each.dtype.is_complex for each in operands):
        flops *= 4  # of real numbers: four products and four sums where formulas count one of each
    skips = kind.causal >= 0 and (
        args[kind.causal] if kind.causal < len(args) else kwargs.get("is_causal", False)
    )
    return TorchOperation(kind.name, operands, results, flops, 0.5 if skips else 0.0, made + sum(sizes))
