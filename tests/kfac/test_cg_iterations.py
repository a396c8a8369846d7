"""What preconditioners do for conjugate gradients on a small GPT's damped Gauss–Newton matrix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sorder
from sorder.curvature import CurvaturePoint
from sorder.curvature.diagonal import hutchinson
from sorder.kfac import KFACPreconditioner
from sorder.linalg import Residual, cg

EXAMPLES = Path(__file__).parents[2] / "examples"
Solver = Callable[[Any], Any] | None


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Module, Callable[..., Tensor]]:
    """A model, and its loss on the batch of a number."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from gpt import GPT

    torch.manual_seed(0)
    model = GPT(vocabulary=32, width=16, layers=1, heads=2).double()
    text = torch.frombuffer(bytearray((EXAMPLES / "gpt.py").read_bytes() * 2), dtype=torch.uint8).long() % 32

    def loss(seed: int, batch: int = 64) -> Tensor:
        starts = torch.randint(len(text) - 17, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
        tokens = torch.stack([text[s : s + 17] for s in starts])
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return model, loss


def iterations(model: nn.Module, loss: Callable[..., Tensor], damping: float, tolerance: float) -> dict[str, int]:
    """Conjugate gradient steps on (B + λ)x = g to a relative residual, by preconditioner."""
    params, counts = list(model.parameters()), {}
    with sorder.exact_attention(), CurvaturePoint(lambda: loss(1000), params, "ggn") as point:
        diagonal = hutchinson(point.product, point.gradient, torch.Generator().manual_seed(0), probes=30)
        solvers: dict[str, Solver] = {
            "none": None,
            "diagonal": lambda r: [t / (d.abs() + damping) for t, d in zip(r, diagonal, strict=True)],
        }
        for name, inverse in (("kfac", "cholesky"), ("ekfac", "ekfac")):
            kfac = KFACPreconditioner(params, inverse=inverse, samples=8, least_damping=0.0)
            kfac.refresh(point)
            kfac.update(None, damping)
            solvers[name] = kfac
        for name, solver in solvers.items():
            result = cg(
                lambda v: [p + damping * u for p, u in zip(point.product(v), v, strict=True)],
                point.gradient,
                preconditioner=solver,
                max_iterations=400,
                stopping=Residual(tolerance),
            )
            assert result.residual_norm <= tolerance * result.rhs_norm
            counts[name] = result.iterations
    return counts


def test_a_third_of_the_iterations_where_damping_is_light(problem: Any) -> None:
    model, loss = problem
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(20):
        optimizer.zero_grad()
        loss(step, batch=16).backward()
        optimizer.step()
    counts = iterations(model, loss, 1e-6, 1e-2)
    assert 3 * counts["kfac"] <= counts["none"], counts
    assert 3 * counts["ekfac"] <= counts["none"], counts
    assert counts["kfac"] < counts["diagonal"] and counts["ekfac"] < counts["diagonal"], counts


def test_half_of_them_at_the_damping_that_newton_cg_holds(problem: Any) -> None:
    """More is not to be had there: most of the curvature lies between layers, and the exact blocks take a fourth."""
    model, loss = problem
    optimizer = sorder.NewtonCG(model.parameters(), lr=0.5)
    for step in range(8):
        optimizer.step(lambda step=step: loss(step))
    counts = iterations(model, loss, optimizer.param_groups[0]["damping"], 0.1)
    assert 2 * counts["kfac"] <= counts["none"], counts
    assert 2 * counts["ekfac"] <= counts["none"], counts
    assert counts["kfac"] < counts["diagonal"] and counts["ekfac"] < counts["diagonal"], counts


def test_three_iterations_train_further_behind_kfac(problem: Any) -> None:
    model, loss = problem
    start = {name: t.clone() for name, t in model.state_dict().items()}
    losses = []
    for with_kfac in (False, True):
        model.load_state_dict(start)
        kfac = KFACPreconditioner(model) if with_kfac else None
        optimizer = sorder.NewtonCG(model.parameters(), lr=0.5, preconditioner=kfac, cg_iterations=3)
        for step in range(8):
            optimizer.step(lambda step=step: loss(step))
            assert optimizer.last_step.cg_iterations <= 3
        losses.append(float(loss(2000, batch=128).detach()))
    assert losses[1] < losses[0] - 0.1, losses
