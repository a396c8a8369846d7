"""Operations whose second derivatives PyTorch gets silently wrong, composed of others whose it gets right.

Through torch 2.13:

- the backward of ``weight_norm`` (``torch.nn.utils.parametrizations.weight_norm``) takes the norms, where it is
  recorded, for constants: wrong in every mode;
- those of ``det``, ``slogdet``, ``logdet``, ``solve`` and ``tensorsolve`` use the factorisation that the forward pass
  saved, of which tangents know nothing, unless they are recorded: wrong in forward over reverse, as
  :func:`sorder.func.hvp` takes it, and in reverse over forward;
- the forward-mode rule of ``cholesky_inverse`` is wrong where it is differentiated.

The determinants' compositions have no derivatives at a singular matrix (NaN).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor


def _in_place_of(operation: Callable[..., Any], composition: Callable[..., Any]) -> Callable[..., Any]:
    """``composition``, called as ``operation`` is; what it refuses, PyTorch refuses in its own words."""

    @functools.wraps(composition)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("out") is not None:  # which takes no derivatives
            return operation(*args, **kwargs)
        options = {name: x for name, x in kwargs.items() if name not in ("input", "A", "out")}
        first = [kwargs[name] for name in ("input", "A") if name in kwargs]
        try:
            return composition(*first, *args, **options)
        except Exception:
            operation(*args, **kwargs)
            raise

    return call


def _named(name: str, values: tuple[Tensor, Tensor]) -> Any:
    return getattr(torch.return_types, name)(values)  # no attribute that type checkers know


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _square_lu(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if A.shape[-1] != A.shape[-2]:
        raise ValueError("LU of other matrices has a diagonal, too, but no determinant")
    return torch.linalg.lu(A)


def _det(A: Tensor) -> Tensor:
    permutation, _, upper = _square_lu(A)
    return torch.linalg.det(permutation) * upper.diagonal(dim1=-2, dim2=-1).prod(-1)


def _slogdet(A: Tensor) -> Any:
    permutation, _, upper = _square_lu(A)
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    sign = torch.linalg.det(permutation) * diagonal.sgn().prod(-1)
    return _named("linalg_slogdet", (sign, diagonal.abs().log().sum(-1)))


def _logdet(input: Tensor) -> Tensor:
    sign, logarithm = _slogdet(input)
    return logarithm + sign.log()  # NaN for a negative determinant


def _solve_ex(
    A: Tensor,
    B: Tensor,
    *,
    left: bool = True,
    check_errors: bool = False,
) -> Any:
    factors, pivots, info = torch.linalg.lu_factor_ex(A, check_errors=check_errors)
    permutation, lower, upper = torch.lu_unpack(factors, pivots)
    vector = B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])
    x = B.unsqueeze(-1) if vector else B
    # Not lu_solve, whose values are wrong where vmap maps A, and one inside it B.
    if left:
        x = torch.linalg.solve_triangular(lower, permutation.mT @ x, upper=False, unitriangular=True)
        x = torch.linalg.solve_triangular(upper, x, upper=True)
    else:
        x = torch.linalg.solve_triangular(upper, x, upper=True, left=False)
        x = torch.linalg.solve_triangular(lower, x, upper=False, left=False, unitriangular=True) @ permutation.mT
    return _named("linalg_solve_ex", (x.squeeze(-1) if vector else x, info))


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    return _solve_ex(A, B, left=left, check_errors=True)[0]


def _tensorsolve(A: Tensor, B: Tensor, dims: Any = None) -> Tensor:
    A = A if dims is None else A.movedim(dims, tuple(range(-len(dims), 0)))
    shape = A.shape[B.dim() :]
    return _solve(A.reshape(-1, prod(shape)), B.flatten()).reshape(shape)


def _cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.cholesky_solve(identity.expand_as(L), L, upper=upper)


WRONG_IN_EVERY_MODE = (torch._weight_norm,)
_COMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch._weight_norm: _weight_norm,
    **dict.fromkeys((torch.det, torch.linalg.det, Tensor.det), _det),
    **dict.fromkeys((torch.slogdet, torch.linalg.slogdet, Tensor.slogdet), _slogdet),
    **dict.fromkeys((torch.logdet, Tensor.logdet), _logdet),
    torch.linalg.solve: _solve,
    torch.linalg.solve_ex: _solve_ex,
    torch.linalg.tensorsolve: _tensorsolve,
    **dict.fromkeys((torch.cholesky_inverse, Tensor.cholesky_inverse), _cholesky_inverse),
}
COMPOSED = {operation: _in_place_of(operation, composition) for operation, composition in _COMPOSITIONS.items()}
"""What :class:`sorder.func.written_out.WrittenOut` calls in the place of each operation."""
