"""Preconditioners shorten CG; diagonal estimates are what they say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sorder.optim import NewtonCG
from sorder.optim.preconditioner import hutchinson_diagonal
from tests.optim.problem import closure_of, model


def test_hutchinson_estimates_the_diagonal_not_the_row_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(6, 6, dtype=torch.float64, generator=generator)
    a = a @ a.T
    like = [torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)]

    def product(v: Any) -> list[Tensor]:
        flat = a @ torch.cat([t.flatten() for t in v])
        return [flat[:4].view(2, 2), flat[4:]]

    draws = torch.stack(
        [torch.cat([t.flatten() for t in hutchinson_diagonal(product, like, seed)]) for seed in range(2000)]
    )
    standard = draws.std(0) / len(draws) ** 0.5
    assert ((draws.mean(0) - a.diagonal()).abs() < 4 * standard).all()
    assert ((draws.mean(0) - a.sum(1)).abs() > 10 * standard).any()
    exact = hutchinson_diagonal(lambda v: [3 * t for t in v], like, 0)
    assert all(torch.equal(d, torch.full_like(d, 3.0)) for d in exact)


def test_a_diagonal_preconditioner_shortens_cg_on_a_badly_scaled_problem() -> None:
    scales = torch.logspace(0, 6, 30, dtype=torch.float64)

    def run(preconditioner: Any) -> int:
        p = torch.ones(30, dtype=torch.float64, requires_grad=True)
        optimizer = NewtonCG(
            [p],
            preconditioner=preconditioner,
            preconditioner_power=1.0,
            cg_iterations=200,
            cg_stop="residual",
            cg_tolerance=1e-8,
        )
        optimizer.step(lambda: (scales * p**2).sum())
        return optimizer.last_step.cg_iterations

    assert run("diagonal") <= 2 < run(None)
    assert run(lambda r: [t / scales for t in r]) <= 2


def test_a_preconditioner_may_be_updated_with_every_step() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.dampings: list[float] = []

        def update(self, product: Callable[[list[Tensor]], list[Tensor]], damping: float) -> None:
            self.dampings.append(damping)

        def __call__(self, r: list[Tensor]) -> list[Tensor]:
            return list(r)

    net, recorder = model(), Recorder()
    optimizer = NewtonCG(net.parameters(), preconditioner=recorder)
    used = []
    for _ in range(3):
        optimizer.step(closure_of(net))
        used.append(optimizer.last_step.damping)
    assert recorder.dampings == used
    twin = NewtonCG(model().parameters())
    twin.load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="pass it again"):
        twin.step(lambda: sum(p.square().sum() for p in twin.param_groups[0]["params"]))
