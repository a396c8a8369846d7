"""Levenberg–Marquardt damping: zero where the quadratic is right, and out of zero where it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sorder.optim import NewtonCG
from sorder.optim.last_step import NewtonCGStep


def first_step(function: Callable[[Tensor], Tensor], damping: float) -> NewtonCGStep:
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = NewtonCG([x], damping=damping, curvature="hessian")
    optimizer.step(lambda: function(x))
    assert optimizer.last_step is not None
    return optimizer.last_step


@pytest.mark.parametrize("curvature", ["hessian", "ggn"])
@pytest.mark.parametrize("seed", range(5))
def test_least_squares_take_no_damping_and_one_step(curvature: str, seed: int) -> None:
    """Steps at the minimum, where rounding alone tells ρ, leave λ at zero too."""
    torch.manual_seed(seed)
    net = nn.Linear(6, 2).double()
    x, y = torch.randn(20, 6).double(), torch.randn(20, 2).double()
    ones = torch.cat([x, x.new_ones(20, 1)], 1)
    least = F.mse_loss(ones @ torch.linalg.lstsq(ones, y).solution, y).item()
    optimizer = NewtonCG(
        net.parameters(), curvature=curvature, cg_iterations=50, cg_stop="residual", cg_tolerance=1e-13
    )
    for _ in range(4):
        optimizer.step(lambda: F.mse_loss(net(x), y))
        step = optimizer.last_step
        assert step.damping == step.next_damping == 0.0 and step.step_length == 1.0
        assert step.new_loss == pytest.approx(least, rel=1e-12)


@pytest.mark.parametrize("damping", [0.0, 1e-300])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_a_bad_step_raises_the_damping_from_zero_in_units_of_the_loss(scale: float, damping: float) -> None:
    """The full step is 1, where m = −1/2 and the loss 7/2: λ/2 = 4 would have told that, and λ takes a tenth.

    The loss is below m at the length that the line search comes back to, so that this asks for nothing.
    """
    step = first_step(lambda x: scale * (-x + x**2 / 2 - x**3 + 5 * x**5), damping)
    assert step.reduction_ratio == pytest.approx(-7.0) and step.accepted and 0.1 < step.step_length < 0.12
    assert step.next_damping == pytest.approx(0.8 * scale, rel=1e-6, abs=0.0)


@pytest.mark.parametrize("damping", [0.0, 1e-6])
def test_a_loss_that_explodes_at_the_full_step_does_not_end_the_descent(damping: float) -> None:
    """The full step is 100, where the loss is 10²⁰; the search comes back to 10, where the loss is below m.

    λ = ‖g‖/10 bounds steps by 10, and λ takes a tenth.
    """
    step = first_step(lambda x: -x + 0.005 * x**2 - 0.002 * x**3 + (x / 10) ** 20, damping)
    assert step.reduction_ratio < -1e17 and step.step_length == pytest.approx(0.1, rel=1e-3)
    assert step.next_damping == pytest.approx(0.01, rel=1e-3)


def test_rounding_does_not_keep_a_damping_at_zero_where_it_does_not_excuse_the_step() -> None:
    """The excess over m is just within rounding, but ρ, as it stands, is below a quarter."""
    step = first_step(lambda x: 1.0 + 1.5e-14 * (-x + x**2 / 2 + 0.4 * x**3), 0.0)
    assert 0.0 < step.reduction_ratio < 0.25 and step.step_length == 1.0
    assert step.next_damping == pytest.approx(0.08 * 1.5e-14, rel=0.1, abs=0.0)


def test_a_classifier_leaves_a_damping_of_zero() -> None:
    """For a third of these seeds the trial of the Cauchy step does better than the quadratic, and λ starts at zero."""
    raised = 0
    for seed in range(40):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
        x, y = torch.randn(64, 4), torch.randint(3, (64,))
        optimizer = NewtonCG(model.parameters())
        for _ in range(6):
            optimizer.step(lambda model=model, x=x, y=y: F.cross_entropy(model(x), y))
            step = optimizer.last_step
            if step.reduction_ratio < 0.25:
                assert step.next_damping > step.damping
                raised += step.damping == 0.0
    assert raised > 5
