"""Compositions in the place of operations whose second derivatives PyTorch gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sorder.func.written_out import WrittenOut
from tests.cases import relative_error

torch.manual_seed(0)
A = torch.randn(2, 4, 4, dtype=torch.float64) + 3.0 * torch.eye(4, dtype=torch.float64)
B, TANGENT = torch.randn(4, 3, dtype=torch.float64), torch.randn_like(A)
B[0] *= -1.0  # of either sign

# Functions of a batch of matrices, whose second derivatives PyTorch's reverse over reverse gets right.
CASES: dict[str, Callable[[Tensor], Any]] = {
    "det": torch.det,
    "linalg.det": torch.linalg.det,
    "det method": lambda a: a.det(),
    "slogdet": lambda a: torch.linalg.slogdet(a).logabsdet,
    "slogdet of a negative determinant": lambda a: torch.slogdet(a[:, [1, 0, 2, 3]])[1],
    "logdet": torch.logdet,
    "solve": lambda a: torch.linalg.solve(a, B),
    "solve for one vector": lambda a: torch.linalg.solve(a[0], B[:, 0]),
    "solve for a vector each": lambda a: torch.linalg.solve(a, B.T[:2]),
    "solve from the right": lambda a: torch.linalg.solve(a, B.T, left=False),
    "solve for vectors mapped within": lambda a: torch.func.vmap(torch.linalg.solve, (None, 0))(a[0], B.T),
    "solve for vectors mapped within mapped matrices": lambda a: torch.func.vmap(
        lambda a: torch.func.vmap(torch.linalg.solve, (None, 0))(a, B.T)
    )(a),
    "solve_ex": lambda a: torch.linalg.solve_ex(a, B).result,
    "tensorsolve": lambda a: torch.linalg.tensorsolve(a[0].view(2, 2, 4), B[:, 0].view(2, 2)),
    "tensorsolve along a dimension": lambda a: torch.linalg.tensorsolve(
        a[0].view(2, 4, 2), B[:, 0].view(2, 2), dims=(1,)
    ),
    "det by name": lambda a: torch.det(input=a) + torch.linalg.det(A=a),
    "slogdet by name": lambda a: torch.slogdet(input=a)[1] + torch.linalg.slogdet(A=a)[1],
    "solve by name": lambda a: torch.linalg.solve(B=B, A=a),
    "cholesky_inverse by name": lambda a: torch.cholesky_inverse(input=a.tril()),
    "cholesky_inverse": lambda a: torch.cholesky_inverse(a.tril()),
    "cholesky_inverse of an upper factor": lambda a: a.triu().cholesky_inverse(upper=True),
}


def composed(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(a: Tensor) -> Tensor:
        with WrittenOut(norms=False):
            return f(a)

    return function


def scalar(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda a: f(a).sin().sum()


@pytest.mark.parametrize("name", CASES)
def test_values_and_second_derivatives_of_compositions(name: str) -> None:
    f, g = scalar(CASES[name]), scalar(composed(CASES[name]))
    assert relative_error(composed(CASES[name])(A), CASES[name](A)) < 1e-12
    want = torch.func.vjp(torch.func.grad(f), A)[1](TANGENT)[0]
    gradient = torch.func.grad(g)
    assert relative_error(torch.func.vjp(gradient, A)[1](TANGENT)[0], want) < 1e-10
    assert relative_error(torch.func.jvp(gradient, (A,), (TANGENT,))[1], want) < 1e-10
    along = torch.func.grad(lambda a: torch.func.jvp(g, (a,), (TANGENT,))[1])
    assert relative_error(along(A), want) < 1e-10


def test_signs_and_the_logarithm_of_a_negative_determinant() -> None:
    a = torch.stack([A[0], A[0][[1, 0, 2, 3]]])
    with WrittenOut(norms=False):
        found, logarithm = torch.linalg.slogdet(a), torch.logdet(a)
    assert torch.equal(found.sign, torch.linalg.slogdet(a).sign) and set(found.sign.tolist()) == {1.0, -1.0}
    assert torch.equal(logarithm.isnan(), found.sign < 0)


REFUSED: dict[str, Callable[[], Any]] = {
    "singular system": lambda: torch.linalg.solve(torch.zeros(2, 2), torch.ones(2)),
    "shapes of a system": lambda: torch.linalg.solve(A, torch.ones(5, 2)),
    "determinant of a rectangle": lambda: torch.det(A[0, :2]),
    "logdet of a rectangle": lambda: torch.linalg.slogdet(A[0, :3]),
    "inverse of a rectangle": lambda: torch.cholesky_inverse(A[0, :3]),
    "unknown option": lambda: torch.linalg.det(A, upper=True),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_pytorchs(name: str) -> None:
    with pytest.raises((RuntimeError, TypeError)) as want:
        REFUSED[name]()
    with WrittenOut(norms=False), pytest.raises(want.type) as got:
        REFUSED[name]()
    assert got.type is want.type and str(got.value) == str(want.value)


def test_out_is_written_to() -> None:
    out = torch.empty(2, dtype=A.dtype)
    with WrittenOut(norms=False):
        assert torch.linalg.det(A, out=out) is out
    assert torch.equal(out, torch.linalg.det(A))


@pytest.mark.parametrize("dim", [0, 1])
def test_weight_norm(dim: int) -> None:
    v, tangent = A[0], TANGENT[0]
    g = torch.rand(4, 1, dtype=torch.float64) if dim == 0 else torch.rand(1, 4, dtype=torch.float64)

    def by_hand(v: Tensor) -> Tensor:
        return g * v / v.square().sum(1 - dim, keepdim=True).sqrt()

    def torchs(v: Tensor) -> Tensor:
        return torch._weight_norm(v, g, dim)

    assert relative_error(composed(torchs)(v), torchs(v)) < 1e-14
    want = torch.func.vjp(torch.func.grad(scalar(by_hand)), v)[1](tangent)[0]
    gradient = torch.func.grad(scalar(composed(torchs)))
    assert relative_error(torch.func.vjp(gradient, v)[1](tangent)[0], want) < 1e-12
    assert relative_error(torch.func.jvp(gradient, (v,), (tangent,))[1], want) < 1e-12
