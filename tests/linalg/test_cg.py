"""Conjugate gradients against dense solves, and every way to stop."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from sorder.linalg import EisenstatWalker, Record, RelativeProgress, Residual, StopReason, cg
from sorder.linalg import pytree as vector_space
from tests.cases import relative_error


def spd(n: int, condition: float, seed: int = 0) -> Tensor:
    """Symmetric positive definite (n, n) with eigenvalues spread over [1, condition] in log scale."""
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=generator))
    return q @ torch.diag(torch.logspace(0, math.log10(condition), n, dtype=torch.float64)) @ q.T


def vector(n: int, seed: int = 1) -> Tensor:
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Counted:
    """A matrix as a matvec that counts its products."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.products = 0

    def __call__(self, v: Tensor) -> Tensor:
        self.products += 1
        return self.matrix @ v


def test_quadratic_of_dimension_100_to_1e_10() -> None:
    a, b = Counted(spd(100, 1e3)), vector(100)
    result = cg(a, b, stopping=Residual(rtol=1e-13), max_iterations=300)
    want = torch.linalg.solve(a.matrix, b)
    assert relative_error(result.x, want) < 1e-10
    assert result.reason is StopReason.CONVERGED
    assert result.rule == Residual(rtol=1e-13)
    assert result.products == result.iterations == a.products
    assert abs(result.value - float(-0.5 * b @ want)) < 1e-12 * abs(result.value)
    assert abs(result.quadratic - float(want @ b)) < 1e-11 * result.quadratic
    assert result.direction is None
    assert float((result.residual - (b - a.matrix @ result.x)).norm()) < 1e-11 * float(b.norm())
    assert len(result.record.values) == len(result.record.residual_norms) == result.iterations + 1
    assert len(result.record.curvatures) == result.iterations
    assert result.record.values == sorted(result.record.values, reverse=True)
    eigenvalues = torch.linalg.eigvalsh(a.matrix)
    assert all(eigenvalues[0] * 0.999 <= c <= eigenvalues[-1] * 1.001 for c in result.record.curvatures)


def test_as_many_iterations_as_distinct_eigenvalues() -> None:
    q, _ = torch.linalg.qr(torch.randn(30, 30).double())
    a = q @ torch.diag(torch.tensor([1.0, 4.0, 9.0]).repeat(10).double()) @ q.T
    result = cg(lambda v: a @ v, vector(30), stopping=Residual(rtol=1e-12))
    assert result.iterations == 3


def test_iterates_minimise_over_the_krylov_space() -> None:
    a, b = spd(8, 50.0), vector(8)
    krylov = [b]
    for k in range(1, 5):
        result = cg(lambda v: a @ v, b, stopping=None, max_iterations=k)
        basis, _ = torch.linalg.qr(torch.stack(krylov, 1))
        want = basis @ torch.linalg.solve(basis.T @ a @ basis, basis.T @ b)
        assert relative_error(result.x, want) < 1e-11
        assert result.reason is StopReason.MAX_ITERATIONS
        assert result.products == k
        krylov.append(a @ krylov[-1])


def test_pytrees_of_mixed_dtypes() -> None:
    a = spd(9, 10.0)
    rhs = {"w": vector(6).float().view(2, 3), "rest": [vector(3, 2)]}

    def matvec(v: dict[str, Any]) -> dict[str, Any]:
        assert v["w"].dtype == torch.float32
        out = a @ torch.cat([v["w"].double().flatten(), v["rest"][0]])
        return {"w": out[:6].view(2, 3).float(), "rest": [out[6:]]}

    result = cg(matvec, rhs, stopping=Residual(rtol=1e-6))
    want = torch.linalg.solve(a, torch.cat([rhs["w"].double().flatten(), rhs["rest"][0]]))
    got = torch.cat([result.x["w"].double().flatten(), result.x["rest"][0]])
    assert result.x["w"].dtype == torch.float32
    assert result.x["rest"][0].dtype == torch.float64
    assert relative_error(got, want) < 5e-6


@pytest.mark.parametrize(
    ("dtype", "rtol", "bound"),
    [
        (torch.float64, 1e-12, 1e-11),
        (torch.float32, 1e-6, 1e-5),
        (torch.float16, 1e-2, 2e-2),
        (torch.bfloat16, 3e-2, 8e-2),
    ],
)
def test_each_dtype(dtype: torch.dtype, rtol: float, bound: float) -> None:
    a, b = spd(50, 10.0), vector(50).to(dtype)
    result = cg(lambda v: (a @ v.double()).to(dtype), b, stopping=Residual(rtol=rtol), max_iterations=60)
    assert result.reason is StopReason.CONVERGED
    assert result.x.dtype == dtype
    assert relative_error(result.x, torch.linalg.solve(a, b.double())) < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-12, 1e12, 2.0**-40, 2.0**40])
@pytest.mark.parametrize("radius", [None, 0.8])
def test_multiplying_the_loss_changes_no_iterate(dtype: torch.dtype, scale: float, radius: float | None) -> None:
    bound = 1e-4 if dtype == torch.float32 else 1e-12
    if math.log2(scale).is_integer():  # nothing is rounded, and nothing may differ
        bound = 0.0
    for shift in (0.0, 4.0):
        matrix = spd(20, 10.0) - shift * torch.eye(20, dtype=torch.float64)
        results = []
        for s in (1.0, scale):
            a, b = s * matrix.to(dtype), s * vector(20).to(dtype)
            results.append(cg(lambda v, a=a: a @ v, b, stopping=Residual(rtol=1e-2), trust_radius=radius))
        one, other = results
        assert one.reason is (
            StopReason.NEGATIVE_CURVATURE if shift else StopReason.BOUNDARY if radius else StopReason.CONVERGED
        )
        assert (one.reason, one.iterations, one.products) == (other.reason, other.iterations, other.products)
        assert relative_error(other.x, one.x) <= bound
        assert abs(other.value / scale - one.value) <= bound * abs(one.value)
        if shift:
            assert one.direction_curvature is not None
            assert other.direction_curvature is not None
            curvature = other.direction_curvature / scale
            assert abs(curvature - one.direction_curvature) <= 10 * bound * abs(one.direction_curvature)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_multiplying_the_matrix_alone_divides_the_solution(scale: float) -> None:
    a, b = spd(20, 10.0), vector(20)
    one = cg(lambda v: a @ v, b, stopping=Residual(rtol=1e-3))
    other = cg(lambda v: scale * (a @ v), b, stopping=Residual(rtol=1e-3))
    assert one.iterations == other.iterations
    assert relative_error(other.x * scale, one.x) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "rhs_scale", "matrix_scale"),
    [
        (torch.float32, 2.0**-130, 1.0),
        (torch.float32, 2.0**120, 1.0),
        (torch.float32, 1.0, 2.0**100),
        (torch.float32, 1.0, 2.0**-100),
        (torch.float32, 2.0**-100, 2.0**-60),
        (torch.float32, 2.0**90, 2.0**70),
        (torch.bfloat16, 2.0**100, 1.0),
        (torch.float64, 2.0**-1000, 1.0),
        (torch.float64, 2.0**1000, 1.0),
        (torch.float64, 2.0**-400, 2.0**400),
    ],
)
def test_scales_over_the_range_of_the_dtype(dtype: torch.dtype, rhs_scale: float, matrix_scale: float) -> None:
    # A few bits each, so that nothing is rounded when the right-hand side becomes subnormal.
    a, b = spd(6, 5.0).to(dtype), vector(6).mul(16.0).round().to(dtype)
    radius = float(torch.linalg.solve(a.double(), b.double()).norm()) / 2.0
    shift = rhs_scale / matrix_scale
    for trust_radius, reason in ((None, StopReason.CONVERGED), (radius, StopReason.BOUNDARY)):
        one, other = (
            cg(
                lambda v, s=s: (a * s) @ v,
                b * t,
                stopping=Residual(rtol=0.05),
                trust_radius=trust_radius and trust_radius * t / s,
            )
            for s, t in ((1.0, 1.0), (matrix_scale, rhs_scale))
        )
        assert one.reason is other.reason is reason
        assert (one.iterations, one.products) == (other.iterations, other.products)
        # In two steps, where one factor alone would leave the dtype's range; bits are lost to subnormal numbers only.
        got = other.x.double() * (1.0 / shift)
        assert relative_error(got, one.x) <= (1e-4 if rhs_scale == 2.0**-130 else 0.0)
        assert math.isclose(other.residual_norm / rhs_scale, one.residual_norm, rel_tol=1e-12)
        warm = cg(lambda v: (a * matrix_scale) @ v, b * rhs_scale, x0=other.x, stopping=Residual(rtol=0.05))
        assert warm.record.residual_norms[0] <= 1.1 * other.residual_norm


def test_what_is_multiplied_stays_within_half_precision() -> None:
    """Products may be computed in float16: whatever the sizes of rhs, x0 and preconditioner, vectors have one size."""
    a, b = spd(30, 1e3), vector(30)
    norms: list[float] = []

    def matvec(v: Tensor) -> Tensor:
        norms.append(float(v.norm()))
        return a @ v

    for size in (1e-9, 1.0, 1e9):
        cg(matvec, b, x0=size * vector(30, 3), preconditioner=lambda r, s=size: s * r, stopping=Residual(rtol=1e-9))
        cg(matvec, size * b, stopping=Residual(rtol=1e-9))
    assert len(norms) > 60
    assert 4.0 < min(norms) <= max(norms) < 64.0


def test_a_solution_outside_the_dtype_is_no_solution() -> None:
    rhs = {"w": torch.ones(2), "b": torch.full((3,), 3e4, dtype=torch.float16)}
    with pytest.raises(FloatingPointError, match=r"leaf 1 of the solution exceeds the range of torch.float16"):
        cg(lambda v: {k: (1e-3 * t.float()).to(t.dtype) for k, t in v.items()}, rhs)


def test_what_writes_to_its_argument_is_refused() -> None:
    b = vector(3)
    with pytest.raises(ValueError, match="matvec must not write to its argument"):
        cg(lambda v: v.mul_(2.0), b)
    with pytest.raises(ValueError, match="matvec must not write to its argument"):
        cg(lambda v: v.mul_(2.0), b, x0=b)
    with pytest.raises(ValueError, match="preconditioner must not write to its argument"):
        cg(lambda v: 2.0 * v, b, preconditioner=lambda r: r.mul_(2.0))
    with torch.inference_mode():  # where tensors do not count writes
        assert torch.equal(cg(lambda v: v.mul_(2.0), b).x, b / 2.0)


def test_results_are_matched_by_key() -> None:
    rhs = {"a": vector(3), "b": vector(3, 2)}
    result = cg(lambda v: {"b": 2.0 * v["b"], "a": 4.0 * v["a"]}, rhs, x0=dict(reversed(rhs.items())))
    assert relative_error(result.x["a"], rhs["a"] / 4.0) < 1e-12
    assert relative_error(result.x["b"], rhs["b"] / 2.0) < 1e-12


def test_preconditioner_saves_iterations() -> None:
    scales = torch.logspace(0, 3, 60, dtype=torch.float64)
    a = scales[:, None] * spd(60, 2.0) * scales
    b = vector(60)
    diagonal = a.diagonal()
    plain = cg(lambda v: a @ v, b, stopping=Residual(rtol=1e-8), max_iterations=2000)
    jacobi = cg(lambda v: a @ v, b, preconditioner=lambda r: r / diagonal, stopping=Residual(rtol=1e-8))
    assert jacobi.iterations < 25 < 4 * 25 < plain.iterations
    assert relative_error(jacobi.x, torch.linalg.solve(a, b)) < 1e-6
    exact = cg(lambda v: a @ v, b, preconditioner=lambda r: torch.linalg.solve(a, r))
    assert exact.iterations == 1


def test_warm_start() -> None:
    a, b = Counted(spd(30, 100.0)), vector(30)
    want = torch.linalg.solve(a.matrix, b)
    near = want + 1e-6 * vector(30, 3)
    cold = cg(a, b, stopping=Residual(rtol=1e-8))
    a.products = 0
    warm = cg(a, b, x0=near, stopping=Residual(rtol=1e-8))
    assert warm.iterations < cold.iterations
    assert warm.products == warm.iterations + 1 == a.products
    start = 0.5 * near @ a.matrix @ near - b @ near
    assert abs(warm.record.values[0] - float(start)) < 1e-12 * abs(start)
    assert abs(warm.value - float(-0.5 * b @ want)) < 1e-12 * abs(warm.value)
    assert abs(warm.quadratic - float(warm.x @ a.matrix @ warm.x)) < 1e-12 * warm.quadratic
    exact = cg(a, b, x0=want, stopping=Residual(rtol=1e-8))
    assert exact.iterations == 0
    assert torch.equal(exact.x, want)


def test_zero_right_hand_side_costs_nothing() -> None:
    def matvec(v: Tensor) -> Tensor:
        raise AssertionError("a product was taken")

    result = cg(matvec, torch.zeros(3))
    assert result.reason is StopReason.ZERO_RHS
    assert torch.equal(result.x, torch.zeros(3))
    assert (result.products, result.iterations, result.value) == (0, 0, 0.0)


def boundary_solution(a: Tensor, b: Tensor, m: Tensor, radius: float) -> Callable[[float], float]:
    """λ ↦ ‖(A + λM)⁻¹b‖_M − radius, whose root gives the exact solution of the trust-region problem."""

    def gap(multiplier: float) -> float:
        x = torch.linalg.solve(a + multiplier * m, b)
        return math.sqrt(float(x @ m @ x)) - radius

    return gap


@pytest.mark.parametrize("preconditioned", [False, True])
def test_trust_region_boundary(preconditioned: bool) -> None:
    a, b = spd(20, 100.0), vector(20)
    m = torch.diag(torch.linspace(1, 9, 20, dtype=torch.float64)) if preconditioned else torch.eye(20).double()
    preconditioner = (lambda r: torch.linalg.solve(m, r)) if preconditioned else None
    free = torch.linalg.solve(a, b)
    norm = lambda x: math.sqrt(float(x @ m @ x))  # noqa: E731
    inside = cg(lambda v: a @ v, b, preconditioner=preconditioner, trust_radius=1.01 * norm(free))
    assert inside.reason is StopReason.CONVERGED
    assert relative_error(inside.x, free) < 1e-4
    values = []
    for fraction in (0.9, 0.5, 0.1, 1e-4):
        radius = fraction * norm(free)
        result = cg(lambda v: a @ v, b, preconditioner=preconditioner, trust_radius=radius)
        assert result.reason is StopReason.BOUNDARY
        assert abs(norm(result.x) - radius) < 1e-12 * radius
        direct = 0.5 * result.x @ a @ result.x - b @ result.x
        assert abs(result.value - float(direct)) < 1e-11 * abs(result.value)
        assert abs(result.quadratic - float(result.x @ a @ result.x)) < 1e-11 * abs(result.quadratic)
        # Steihaug's point takes at least half of the best reduction on a convex problem (Yuan 2000).
        low, high = 0.0, 1e9
        gap = boundary_solution(a, b, m, radius)
        for _ in range(200):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if gap(middle) > 0 else (low, middle)
        best = torch.linalg.solve(a + high * m, b)
        assert result.value <= 0.5 * float(0.5 * best @ a @ best - b @ best)
        values.append(result.value)
    assert values == sorted(values)


def test_negative_curvature_in_the_first_iteration() -> None:
    # The saddle −x² + y² + x⁴/4 at (1e-3, 0.0): the gradient is (−2e-3, 0) and the curvature along it −2.
    hessian = torch.diag(torch.tensor([-2.0, 2.0], dtype=torch.float64))
    rhs = torch.tensor([2e-3, 0.0], dtype=torch.float64)
    result = cg(lambda v: hessian @ v, rhs)
    assert result.reason is StopReason.NEGATIVE_CURVATURE
    assert (result.iterations, result.products) == (0, 1)
    assert torch.equal(result.x, torch.zeros(2).double())
    assert torch.equal(result.direction, rhs)
    assert result.direction_curvature == -2.0
    bounded = cg(lambda v: hessian @ v, rhs, trust_radius=0.25)
    assert bounded.reason is StopReason.NEGATIVE_CURVATURE
    assert relative_error(bounded.x, torch.tensor([0.25, 0.0])) < 1e-14
    assert abs(bounded.value - (-(0.25**2) - 2e-3 * 0.25)) < 1e-15


def test_the_saddle_of_a_coupled_problem_is_left_along_a_descent_direction() -> None:
    # At (1e-3, 1) the gradient is dominated by y; the negative curvature in x shows in the second direction.
    hessian = torch.diag(torch.tensor([-2.0 + 3e-6, 2.0], dtype=torch.float64))
    rhs = -torch.tensor([-2e-3 + 1e-9, 2.0], dtype=torch.float64)
    for scale in (1e-12, 1.0, 1e12):
        result = cg(lambda v, s=scale: s * (hessian @ v), scale * rhs)
        assert result.reason is StopReason.NEGATIVE_CURVATURE
        assert result.iterations == 1
        p = result.direction
        assert p @ rhs > 0
        assert p @ hessian @ p < 0
        assert abs(p[0]) > abs(p[1])
        curvature = float(p @ hessian @ p / (p @ p)) * scale
        assert abs(result.direction_curvature - curvature) < 1e-9 * abs(curvature)
        bounded = cg(lambda v, s=scale: s * (hessian @ v), scale * rhs, trust_radius=3.0)
        assert abs(float(bounded.x.norm()) - 3.0) < 1e-12
        assert bounded.value < result.value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_curvature_is_not_divided_by(dtype: torch.dtype) -> None:
    a = torch.diag(torch.tensor([1.0, 0.0], dtype=dtype))
    result = cg(lambda v: a @ v, torch.tensor([0.0, 1.0], dtype=dtype))
    assert result.reason is StopReason.NEGATIVE_CURVATURE
    assert result.direction_curvature == 0.0
    rounding = torch.finfo(dtype).eps / 4
    almost = torch.tensor([[rounding, 1.0], [1.0, 0.0]], dtype=dtype)
    assert cg(lambda v: almost @ v, torch.tensor([1.0, 0.0], dtype=dtype)).direction is not None
    assert cg(lambda v: almost @ v, torch.tensor([1.0, 0.0], dtype=dtype), curvature_tolerance=0.0).iterations > 0


def test_max_and_min_iterations() -> None:
    a, b = spd(20, 1e4), vector(20)
    few = cg(lambda v: a @ v, b, max_iterations=3)
    assert (few.iterations, few.products, few.reason) == (3, 3, StopReason.MAX_ITERATIONS)
    none = cg(lambda v: a @ v, b, max_iterations=0)
    assert (none.products, none.reason) == (0, StopReason.MAX_ITERATIONS)
    assert cg(lambda v: a @ v, b, min_iterations=7, stopping=lambda record: True).iterations == 7
    assert cg(lambda v: a @ v, b, stopping=lambda record: True).iterations == 0


def test_several_rules_and_callables() -> None:
    a, b = spd(20, 1e4), vector(20)

    def after_four(record: Record) -> bool:
        return record.iterations == 4

    result = cg(lambda v: a @ v, b, stopping=(Residual(rtol=1e-12), after_four))
    assert result.iterations == 4
    assert result.rule is after_four


def record(values: list[float]) -> Record:
    return Record(values, [1.0] * len(values), [1.0] * (len(values) - 1), 1.0)


def test_relative_progress_fires_where_its_formula_says() -> None:
    rule = RelativeProgress(eps=5e-4, window=10, fraction=0.1)
    slow = [-1.0 - 4e-4 * i for i in range(200)]  # each iteration gains 4e-4 of the value and less
    assert not any(rule(record(slow[: i + 1])) for i in range(11))
    assert rule(record(slow[:12]))
    fast = [-(1.001**i) for i in range(200)]
    assert not any(rule(record(fast[: i + 1])) for i in range(200))
    assert not rule(record([float(200 - i) for i in range(200)]))  # m > 0 after a bad warm start
    # From i = 101 on, k = ceil(0.1 i) exceeds the window: a stall of 10 iterations no longer suffices.
    stalled = [-float(i + 1) for i in range(192)] + [-192.0] * 10
    k = math.ceil(0.1 * 201)
    assert (stalled[201] - stalled[201 - k]) / stalled[201] > k * 5e-4
    assert not rule(record(stalled))
    a, b = spd(200, 1e6), vector(200)
    result = cg(lambda v: a @ v, b, stopping=rule, max_iterations=1000)
    assert result.rule is rule
    m, i = result.record.values, result.iterations
    k = max(10, math.ceil(0.1 * i))
    assert (m[i] - m[i - k]) / m[i] < k * 5e-4


def test_eisenstat_walker_forcing_terms() -> None:
    first = EisenstatWalker(choice=2).advance(gradient_norm=1.0)
    assert first.eta == 0.5
    alpha = (1 + math.sqrt(5)) / 2
    second = first.advance(gradient_norm=0.5)
    assert math.isclose(second.eta, 0.9 * 0.5**alpha)
    third = second.advance(gradient_norm=1e-4)
    assert math.isclose(third.eta, 0.9 * second.eta**alpha)  # the floor is above 0.1 and holds
    fourth = third.advance(gradient_norm=0.9e-5)
    assert math.isclose(fourth.eta, 0.9 * 0.09**alpha)  # the floor is below 0.1 and idle
    assert EisenstatWalker(gradient_norm=1e-300).advance(gradient_norm=1e300).eta == 0.9
    one = EisenstatWalker(choice=1, eta=0.01, gradient_norm=2.0).advance(0.5, linear_residual_norm=0.3)
    assert math.isclose(one.eta, 0.1)
    with pytest.raises(ValueError, match="linear_residual_norm"):
        EisenstatWalker(choice=1, gradient_norm=2.0).advance(0.5)
    a, b = spd(50, 100.0), vector(50)
    result = cg(lambda v: a @ v, b, stopping=second)
    norms = result.record.residual_norms
    assert norms[-1] <= second.eta * norms[0] < min(norms[:-1])


def test_not_finite_is_told_with_its_iteration() -> None:
    a, b = spd(20, 100.0), vector(20)

    def fails_at(n: int) -> Callable[[Tensor], Tensor]:
        count = 0

        def matvec(v: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return a @ v * (float("nan") if count == n else 1.0)

        return matvec

    with pytest.raises(FloatingPointError, match="iteration 3 "):
        cg(fails_at(3), b)
    with pytest.raises(FloatingPointError, match="x0"):
        cg(fails_at(1), b, x0=b)
    with pytest.raises(FloatingPointError, match="right-hand side"):
        cg(lambda v: a @ v, b / 0)
    with pytest.raises(FloatingPointError, match="preconditioner"):
        cg(lambda v: a @ v, b, preconditioner=lambda r: r * float("inf"))


def test_bad_arguments_are_named() -> None:
    a, b = spd(4, 2.0), vector(4)
    matvec = lambda v: a @ v  # noqa: E731
    for arguments, message in (
        ({"max_iterations": -1}, "max_iterations must be at least 0, got -1"),
        ({"min_iterations": 9, "max_iterations": 5}, "min_iterations must lie in"),
        ({"trust_radius": 0.0}, "trust_radius must be positive"),
        ({"trust_radius": 1.0, "x0": b}, "x0 must be None"),
        ({"x0": b[:2]}, "x0: leaf 0 must have shape"),
        ({"x0": [b]}, "x0 must have the structure"),
        ({"curvature_tolerance": 1.0}, "curvature_tolerance"),
        ({"curvature_tolerance": math.nan}, "curvature_tolerance"),
        ({"trust_radius": math.inf}, "trust_radius must be positive and finite, got inf"),
        ({"preconditioner": lambda r: -r}, "positive definite"),
    ):
        with pytest.raises(ValueError, match=message):
            cg(matvec, b, **arguments)
    with pytest.raises(ValueError, match="the result of matvec"):
        cg(lambda v: v[:2], b)
    number: Any
    for name in ("max_iterations", "min_iterations"):
        for number in (2.5, "3", math.nan, None, True):
            with pytest.raises(TypeError, match=f"{name} must be an integer, got"):
                cg(matvec, b, **{name: number})
    for name in ("trust_radius", "curvature_tolerance"):
        for number in ("1", True, torch.ones(2), [1.0]):
            with pytest.raises(TypeError, match=f"{name} must be a number, got"):
                cg(matvec, b, **{name: number})
    for name in ("preconditioner", "dot"):
        with pytest.raises(TypeError, match=f"{name} must be callable, got Tensor"):
            cg(matvec, b, **{name: a})
    with pytest.raises(TypeError, match="matvec must be callable, got Tensor"):
        cg(a, b)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dot must return a 0-dimensional tensor, got float"):
        cg(matvec, b, dot=lambda x, y: 1.0)  # type: ignore[arg-type, return-value]
    rule: Any
    for rule in (1e-5, "residual", ["residual"], Residual, [Residual]):
        with pytest.raises(TypeError, match="stopping must be a rule"):
            cg(matvec, b, stopping=rule)
    with pytest.raises(TypeError, match=r"rhs must be .* dense .* leaf 0 is torch\.sparse_coo"):
        cg(matvec, b.to_sparse())
    with pytest.raises(TypeError, match=r"rhs must be .* leaf 0 is on the meta device"):
        cg(matvec, b.to("meta"))
    with pytest.raises(TypeError, match=r"rhs must be a pytree of floating-point tensors, but leaf 1 is int"):
        cg(matvec, [b, 3])
    with pytest.raises(ValueError, match="rtol must be at least 0"):
        Residual(rtol=-1.0)
    with pytest.raises(ValueError, match="choice must be 1 or 2"):
        EisenstatWalker(choice=3)
    rules: Any = (Residual, RelativeProgress, EisenstatWalker)
    for rule, name in zip(rules, ("rtol", "eps", "eta"), strict=True):
        for number in ("a", None, True, torch.ones(2)):
            with pytest.raises(TypeError, match=f"{name} must be a number, got"):
                rule(number)
    with pytest.raises(TypeError, match=r"window must be an integer, got 1\.5"):
        RelativeProgress(window=1.5)  # type: ignore[arg-type]
    for bad in (math.nan, -1.0, math.inf):
        with pytest.raises(ValueError, match="gradient_norm must be at least 0 and finite"):
            EisenstatWalker().advance(bad)
        with pytest.raises(ValueError, match="linear_residual_norm must be at least 0 and finite"):
            EisenstatWalker(choice=1).advance(1.0, bad)


def test_dot_is_the_one_place_of_reduction() -> None:
    diagonal, b = torch.linspace(1, 50, 10).double(), vector(10)
    calls = 0

    def dot(x: Any, y: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return 4.0 * vector_space.dot(x, y)  # any positive multiple leaves the iterates as they are

    want = cg(lambda v: diagonal * v, b, stopping=None, max_iterations=5)
    got = cg(lambda v: diagonal * v, b, stopping=None, max_iterations=5, dot=dot)
    assert calls > 0
    assert relative_error(got.x, want.x) < 1e-13
    assert abs(got.value - 4 * want.value) < 1e-12 * abs(got.value)


def test_shards_of_other_sizes_and_magnitudes_take_the_same_steps() -> None:
    diagonal, rhs = torch.linspace(1.0, 5.0, 60).double(), torch.cat([1e-12 * vector(3), vector(57)])
    shards, barrier, sums = (
        (slice(0, 3), slice(3, 60)),
        threading.Barrier(2, timeout=60.0),
        [torch.zeros(()), torch.zeros(())],
    )

    def solve(rank: int) -> Tensor:
        def dot(x: Any, y: Any) -> Tensor:
            sums[rank] = vector_space.dot(x, y)
            barrier.wait()
            total = sums[0] + sums[1]
            barrier.wait()
            return total

        own = shards[rank]
        return cg(lambda v: diagonal[own] * v, rhs[own], x0=rhs[own], stopping=None, max_iterations=5, dot=dot).x

    with ThreadPoolExecutor(2) as pool:
        got = torch.cat(list(pool.map(solve, range(2))))
    want = cg(lambda v: diagonal * v, rhs, x0=rhs, stopping=None, max_iterations=5).x
    for own in shards:
        assert relative_error(got[own], want[own]) < 1e-12


def test_arguments_are_not_modified_and_gradients_are_not_recorded() -> None:
    a, b = spd(6, 10.0).requires_grad_(), vector(6).requires_grad_()
    start = vector(6, 2)
    before = b.detach().clone(), start.clone()
    result = cg(lambda v: a @ v, b, x0=start)
    assert torch.equal(b, before[0])
    assert torch.equal(start, before[1])
    assert not result.x.requires_grad


def test_one_read_of_the_device_per_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = spd(20, 1e3), vector(20)
    reads = 0
    for name in ("item", "tolist", "__float__", "__bool__", "cpu", "numpy"):
        original = getattr(Tensor, name)

        def counted(self: Tensor, *args: Any, original: Any = original) -> Any:
            nonlocal reads
            reads += 1
            return original(self, *args)

        monkeypatch.setattr(Tensor, name, counted)
    result = cg(lambda v: a @ v, b, stopping=None, max_iterations=10, trust_radius=1e3)
    assert result.iterations == 10
    assert reads <= 10 + 4  # before the loop two, after it one or two
