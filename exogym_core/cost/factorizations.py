"""FLOPs of torch's dense factorizations, solvers and transforms of matrices: the leading terms of published counts.

Multiply and add count as two. LU, Cholesky, LDL, QR, their inverses and solutions: LAPACK Working Note 41, appendix C.
Eigenvalues and singular values: Golub and Van Loan, Matrix Computations, 4th ed., sections 7.5.6 and 8.3.3, and figure
8.6.1. Fourier transforms: 5 n log2(n). GPUs reach a smaller share of their peak here than in products: times are lower
bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

__all__ = ["FACTORIZATIONS"]

Shape: TypeAlias = Sequence[int]

_aten = torch.ops.aten


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
