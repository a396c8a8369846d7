"""Newton-CG on functions whose minima are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sorder.optim import NewtonCG


def minimise(
    function: Callable[[Tensor], Tensor], start: list[float], steps: int, **options: object
) -> tuple[Tensor, NewtonCG]:
    x = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = NewtonCG([x], **options)
    for _ in range(steps):
        optimizer.step(lambda: function(x))
    return x.detach(), optimizer


def rosenbrock(x: Tensor) -> Tensor:
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def saddle(x: Tensor) -> Tensor:
    return -(x[0] ** 2) + x[1] ** 2 + x[0] ** 4 / 4


def quartic(x: Tensor) -> Tensor:
    return (x**4).sum() + (x**2).sum()


def quadratic(seed: int = 0) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(100, 100, dtype=torch.float64, generator=generator))[0]
    a = q @ torch.diag(torch.logspace(0, 3, 100, dtype=torch.float64)) @ q.T
    b = torch.randn(100, dtype=torch.float64, generator=generator)
    return lambda x: 0.5 * x @ a @ x - b @ x, torch.linalg.solve(a, b)


@pytest.mark.parametrize("options", [{}, {"damping_update": "constant", "damping": 0.0}], ids=["default", "undamped"])
def test_one_step_solves_a_convex_quadratic(options: dict[str, object]) -> None:
    """Dimension 100, condition 1000. The damping chosen from the problem is zero; CG must be let run to the end."""
    function, solution = quadratic()
    x, optimizer = minimise(
        function, [0.0] * 100, 1, cg_iterations=400, cg_stop="residual", cg_tolerance=1e-13, **options
    )
    assert (x - solution).norm() < 1e-10 * solution.norm()
    step = optimizer.last_step
    assert step.curvature == "hessian" and step.damping == 0.0 and step.step_length == 1.0
    assert abs(step.reduction_ratio - 1.0) < 1e-9
    assert step.cg_stop == "residual" and step.products == step.cg_iterations + ("damping" not in options)
    assert step.evaluations == 2 + ("damping" not in options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "forward-over-reverse"},
        {"damping_update": "trust-region"},
        {"line_search": None},
        {"cg_stop": "eisenstat-walker"},
        {"preconditioner": "diagonal"},
    ],
    ids=["default", "forward", "trust region", "no line search", "eisenstat-walker", "diagonal"],
)
@pytest.mark.parametrize(
    ("function", "start", "minimum"),
    [(rosenbrock, [-1.2, 1.0], [1.0, 1.0]), (quartic, [1.0, -2.0, 3.0], [0.0, 0.0, 0.0])],
    ids=["rosenbrock", "quartic"],
)
def test_converges(
    function: Callable[[Tensor], Tensor], start: list[float], minimum: list[float], options: dict[str, object]
) -> None:
    x, _ = minimise(function, start, 60, **options)
    torch.testing.assert_close(x, torch.tensor(minimum, dtype=torch.float64), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"damping_update": "trust-region"}], ids=["default", "trust region"])
@pytest.mark.parametrize("start", [[1e-3, 1.0], [1e-9, 1.0], [0.0, 1.0], [0.0, 0.0]])
def test_leaves_a_saddle_for_a_minimum(start: list[float], options: dict[str, object]) -> None:
    x, _ = minimise(saddle, start, 25, **options)
    torch.testing.assert_close(x.abs(), torch.tensor([2**0.5, 0.0], dtype=torch.float64), rtol=0.0, atol=1e-8)


@pytest.mark.parametrize("rule", ["relative-progress", "residual", "eisenstat-walker"])
def test_the_record_names_the_stopping_rule_as_the_option_does(rule: str) -> None:
    function, _ = quadratic()
    _, optimizer = minimise(function, [0.0] * 100, 1, cg_iterations=400, cg_stop=rule, cg_tolerance=0.1)
    assert optimizer.last_step.cg_stop == rule


def test_leaves_a_maximum_and_stays_at_a_minimum() -> None:
    x, _ = minimise(lambda x: (x.square().sum() - 1) ** 2, [0.0, 0.0, 0.0], 15)
    assert abs(x.norm() - 1.0) < 1e-8
    x, optimizer = minimise(quartic, [0.0, 0.0], 2)
    assert torch.equal(x, torch.zeros(2, dtype=torch.float64)) and not optimizer.last_step.accepted


def test_negative_curvature_is_reported_and_followed() -> None:
    x, optimizer = minimise(saddle, [1e-3, 0.0], 1)
    step = optimizer.last_step
    assert step.cg_stop == "negative_curvature" and step.curvature_along_step < 0.0
    assert abs(x[0]) > 0.5 and step.new_loss < -0.2


@pytest.mark.parametrize("scale", [1e-12, 1e12])
@pytest.mark.parametrize(
    ("function", "start"), [(rosenbrock, [-1.2, 1.0]), (saddle, [1e-3, 1.0]), (quartic, [1.0, -2.0])]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"damping_update": "trust-region"}, {"preconditioner": "diagonal"}, {"preconditioner": "squared-gradient"}],
    ids=lambda o: str(next(iter(o.values()), "default")),
)
def test_iterates_do_not_depend_on_the_scale_of_the_loss(
    function: Callable[[Tensor], Tensor], start: list[float], scale: float, options: dict[str, object]
) -> None:
    plain, _ = minimise(function, start, 6, **options)
    scaled, _ = minimise(lambda x: scale * function(x), start, 6, **options)
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=1e-9)


def test_a_rejected_step_moves_nothing_and_raises_the_damping() -> None:
    x = torch.tensor([-1.2, 1.0], dtype=torch.float64, requires_grad=True)
    optimizer = NewtonCG([x], damping=1e-9, line_search=None)
    for _ in range(10):
        before = x.detach().clone()
        optimizer.step(lambda: rosenbrock(x))
        step = optimizer.last_step
        if not step.accepted:
            break
    assert not step.accepted and torch.equal(x, before)
    assert step.step_length == 0.0 and step.new_loss == step.loss and step.reduction_ratio < 0.0
    assert step.next_damping > step.damping


def test_a_trial_that_is_not_finite_is_backtracked_from() -> None:
    # log is NaN beyond 1: the full Newton step from 0.9 for this slope leaves the domain.
    x = torch.tensor([0.9], dtype=torch.float64, requires_grad=True)
    optimizer = NewtonCG([x], damping=0.0, damping_update="constant")
    optimizer.step(lambda: (torch.log(1 - x) * 1e-3 - x + 0.01 * x**2).sum())
    assert 0.9 < x.item() < 1.0 and 0.0 < optimizer.last_step.step_length < 1.0


def test_maximize() -> None:
    minimum, _ = minimise(rosenbrock, [-1.2, 1.0], 10)
    maximum, optimizer = minimise(lambda x: -rosenbrock(x), [-1.2, 1.0], 10, maximize=True)
    assert torch.equal(maximum, minimum)
    assert optimizer.last_step.loss < 0.0 and optimizer.last_step.new_loss > optimizer.last_step.loss


def test_step_norm_is_bounded() -> None:
    x = torch.tensor([-1.2, 1.0], dtype=torch.float64, requires_grad=True)
    for options in ({}, {"damping_update": "trust-region"}):
        optimizer = NewtonCG([x], max_step_norm=0.05, **options)
        for _ in range(5):
            before = x.detach().clone()
            optimizer.step(lambda: rosenbrock(x))
            assert (x - before).norm() <= 0.05 * (1 + 1e-12)
            assert optimizer.last_step.accepted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_parameters(dtype: torch.dtype) -> None:
    x = torch.tensor([3.0, -2.0], dtype=dtype, requires_grad=True)
    optimizer = NewtonCG([x])
    for _ in range(10):
        optimizer.step(lambda: quartic(x.float()))
    assert x.dtype is dtype and x.abs().max() < 1e-2
    assert optimizer.state[x]["direction"].dtype is torch.float32


@pytest.mark.parametrize("line_search", ["armijo", None])
def test_a_barrier_is_kept_and_the_minimum_behind_it_found(line_search: str | None) -> None:
    """The logarithm is NaN beyond 1: trials fail, and λ rises, from zero too."""

    def barrier(x: Tensor) -> Tensor:
        return (-x - 1e-3 * torch.log(1 - x) + 0.05 * x**2).sum()

    x, optimizer = minimise(barrier, [0.0, 0.5], 60, damping=0.0, line_search=line_search)
    assert (x < 1.0).all()
    gradient = -1 + 1e-3 / (1 - x) + 0.1 * x
    assert gradient.abs().max() < 1e-6
    assert optimizer.last_step.damping > 0.0
