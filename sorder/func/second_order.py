"""Operations whose second derivatives PyTorch gets silently wrong, composed of others whose it gets right.

Through torch 2.13:

- the backward of ``weight_norm`` (``torch.nn.utils.parametrizations.weight_norm``) takes the norms, where it is
  recorded, for constants: wrong in every mode;
- those of ``det``, ``slogdet``, ``logdet``, ``solve`` and ``tensorsolve`` use the factorisation that the forward pass
  saved, of which tangents know nothing, unless they are recorded: wrong in forward over reverse, as
  :func:`sorder.func.hvp` takes it, and in reverse over forward;
- the forward-mode rule of ``cholesky_inverse`` is wrong where it is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class RightSecondDerivatives(TorchFunctionMode):
    """Within this mode these operations are compositions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _COMPOSED.get(func, func)(*args, **(kwargs or {}))


def _named(name: str, values: tuple[Tensor, Tensor]) -> Any:
    return getattr(torch.return_types, name)(values)  # no attribute that type checkers know


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _det(input: Tensor) -> Tensor:
    permutation, _, upper = torch.linalg.lu(input)
    return torch.linalg.det(permutation) * upper.diagonal(dim1=-2, dim2=-1).prod(-1)


def _slogdet(input: Tensor) -> Any:
    permutation, _, upper = torch.linalg.lu(input)
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
    vector = B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1])
    result = torch.linalg.lu_solve(factors, pivots, B.unsqueeze(-1) if vector else B, left=left)
    return _named("linalg_solve_ex", (result.squeeze(-1) if vector else result, info))


def _solve(A: Tensor, B: Tensor, *, left: bool = True) -> Tensor:
    return _solve_ex(A, B, left=left, check_errors=True)[0]


def _tensorsolve(A: Tensor, B: Tensor, dims: Any = None) -> Tensor:
    A = A if dims is None else A.movedim(dims, tuple(range(-len(dims), 0)))
    shape = A.shape[B.dim() :]
    return _solve(A.reshape(-1, prod(shape)), B.flatten()).reshape(shape)


def _cholesky_inverse(L: Tensor, upper: bool = False) -> Tensor:
    identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    return torch.cholesky_solve(identity.expand_as(L), L, upper=upper)


WRONG_IN_EVERY_MODE: dict[Any, Callable[..., Any]] = {torch._weight_norm: _weight_norm}
_COMPOSED: dict[Any, Callable[..., Any]] = {
    **WRONG_IN_EVERY_MODE,
    **dict.fromkeys((torch.det, torch.linalg.det, Tensor.det), _det),
    **dict.fromkeys((torch.slogdet, torch.linalg.slogdet, Tensor.slogdet), _slogdet),
    **dict.fromkeys((torch.logdet, Tensor.logdet), _logdet),
    torch.linalg.solve: _solve,
    torch.linalg.solve_ex: _solve_ex,
    torch.linalg.tensorsolve: _tensorsolve,
    **dict.fromkeys((torch.cholesky_inverse, Tensor.cholesky_inverse), _cholesky_inverse),
}
