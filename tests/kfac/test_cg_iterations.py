"""What preconditioners do for conjugate gradients on a small GPT's damped Gauss–Newton matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import sorder
from sorder.curvature import CurvaturePoint
from sorder.curvature.diagonal import hutchinson
from sorder.kfac import KFACPreconditioner
from sorder.linalg import Residual, cg

EXAMPLES = Path(__file__).parents[2] / "examples"
# Light damping, and a solution as accurate as training asks for. With heavy damping, or to small residuals, a
# block-diagonal preconditioner gains nothing here, not even the exact one: what counts then is between blocks.
DAMPING, TOLERANCE = 1e-6, 1e-2


def test_kfac_needs_at_most_a_third_of_the_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from gpt import GPT

    torch.manual_seed(0)
    model = GPT(vocabulary=32, width=16, layers=1, heads=2).double()
    params = list(model.parameters())
    text = torch.frombuffer(bytearray((EXAMPLES / "train_gpt.py").read_bytes()), dtype=torch.uint8).long() % 32

    def loss(seed: int, batch: int = 16) -> Tensor:
        starts = torch.randint(len(text) - 17, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()
        tokens = torch.stack([text[s : s + 17] for s in starts])
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    optimizer = torch.optim.AdamW(params, lr=3e-3)
    for step in range(20):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
    counts = {}
    with sorder.exact_attention(), CurvaturePoint(lambda: loss(1000, batch=64), params, "ggn") as point:
        diagonal = hutchinson(point.product, point.gradient, torch.Generator().manual_seed(0), probes=30)
        preconditioners = {
            "none": None,
            "diagonal": lambda r: [t / (d.abs() + DAMPING) for t, d in zip(r, diagonal, strict=True)],
        }
        for name, inverse in (("kfac", "cholesky"), ("ekfac", "ekfac")):
            kfac = KFACPreconditioner(params, inverse=inverse, samples=8)
            kfac.refresh(point)
            kfac.update(None, DAMPING)
            preconditioners[name] = kfac
        for name, preconditioner in preconditioners.items():
            result = cg(
                lambda v: [p + DAMPING * u for p, u in zip(point.product(v), v, strict=True)],
                point.gradient,
                preconditioner=preconditioner,
                max_iterations=400,
                stopping=Residual(TOLERANCE),
            )
            assert result.residual_norm <= TOLERANCE * result.rhs_norm
            counts[name] = result.iterations
    assert 3 * counts["kfac"] <= counts["none"], counts
    assert 3 * counts["ekfac"] <= counts["none"], counts
    assert counts["kfac"] < counts["diagonal"] and counts["ekfac"] < counts["diagonal"], counts
